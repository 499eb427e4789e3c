"""The report's JSON inside a page: as it is or, if it is long, in columns and compressed.

Rows of a table as JSON repeat the names of their fields, and neighbours have little in common; values of one field have
much. So, before gzip and base64,

1. a list of objects with the same fields, or null, is {KEY: [the places of nulls, {field: values}]};
2. a list that has come before is {KEY: its number}, counted from 0 among the lists of LEAST values and more that hold
   no object, in the order of the text;
3. such a list of numbers with many digits is {KEY: "float64"}. Its values follow behind the text, NaN for null: after a
   zero byte, first the highest byte of all numbers in the page, then the next one, down to the lowest.

page.js undoes it.
"""

from __future__ import annotations

import array
import base64
import gzip
import json
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

from lsuv_cli.page.markup import data

LARGEST_PLAIN = 300_000  # bytes of JSON that are embedded as they are
KEY = "\0"  # the name of no file, setting or initialization
LEAST, DIGITS = 8, 11
PACKED = "application/json;form=columns;encoding=gzip,base64"


def element(content: Any) -> str:
    """The script element that holds a JSON value; no browser runs it."""
    kind, held = "application/json", data(content)
    if len(held) > LARGEST_PLAIN:
        kind, held = PACKED, base64.b64encode(gzip.compress(packed(content), mtime=0)).decode()
    return f'<script id="report" type="{kind}">{held}</script>'


def embedded(page: str) -> Any:
    """The JSON that a page holds."""
    found = re.search(r'<script id="report" type="([^"]*)">(.*?)</script>', page, re.S)
    if found is None:
        raise ValueError("this is no page of a report")
    kind, held = found.groups()
    return unpacked(gzip.decompress(base64.b64decode(held))) if kind == PACKED else json.loads(held)


def packed(content: Any) -> bytes:
    """A JSON value in columns, and the numbers that follow it."""
    packer = _Packer()
    text = json.dumps(packer.shorter(content), separators=(",", ":"), allow_nan=False).encode()
    numbers = array.array("d", packer.numbers)
    if sys.byteorder == "little":
        numbers.byteswap()
    raw = numbers.tobytes()
    return text + b"\0" + b"".join(raw[k::8] for k in range(8))


def unpacked(content: bytes) -> Any:
    """What `packed` was given."""
    text, _, planes = content.partition(b"\0")
    count = len(planes) // 8
    raw = bytearray(len(planes))
    for k in range(8):
        raw[k::8] = planes[k * count : (k + 1) * count]
    numbers = array.array("d", bytes(raw))
    if sys.byteorder == "little":
        numbers.byteswap()
    return _Unpacker(iter(numbers)).longer(json.loads(text))


class _Packer:
    """The lists and numbers that were met so far."""

    def __init__(self) -> None:
        self.lists: dict[str, int] = {}
        self.numbers: list[float] = []

    def shorter(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.shorter(item) for key, item in value.items()}
        if not isinstance(value, list):
            return value
        rows = [item for item in value if item is not None]
        if len(rows) > 1 and all(isinstance(row, dict) and row and list(row) == list(rows[0]) for row in rows):
            absent = [k for k, item in enumerate(value) if item is None]
            return {KEY: [absent, {key: self.shorter([row[key] for row in rows]) for key in rows[0]}]}
        if len(value) < LEAST or any(isinstance(item, dict) for item in rows):
            return [self.shorter(item) for item in value]
        return self._column(value)

    def _column(self, value: list[Any]) -> Any:
        text = json.dumps(value)
        if text in self.lists:
            return {KEY: self.lists[text]}
        self.lists[text] = len(self.lists)
        floats = [item for item in value if item is not None]
        if not floats or not all(isinstance(item, float) for item in floats) or len(text) < DIGITS * len(value):
            return value
        self.numbers += [math.nan if item is None else item for item in value]
        return {KEY: "float64", "count": len(value)}


class _Unpacker:
    """The lists that were met so far, and the numbers that are left."""

    def __init__(self, numbers: Iterator[float]) -> None:
        self.lists: list[list[Any]] = []
        self.numbers = numbers

    def longer(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._column(value) if KEY in value else {key: self.longer(item) for key, item in value.items()}
        if not isinstance(value, list):
            return value
        if len(value) < LEAST or any(isinstance(item, dict) for item in value):
            return [self.longer(item) for item in value]
        self.lists.append(value)
        return value

    def _column(self, value: dict[str, Any]) -> list[Any]:
        held = value[KEY]
        if isinstance(held, int):
            return self.lists[held]
        if held == "float64":
            numbers = [next(self.numbers) for _ in range(value["count"])]
            self.lists.append([None if math.isnan(number) else number for number in numbers])
            return self.lists[-1]
        absent, columns = held
        values = [self.longer(column) for column in columns.values()]
        rows: list[Any] = [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
        for k in absent:
            rows.insert(k, None)
        return rows
