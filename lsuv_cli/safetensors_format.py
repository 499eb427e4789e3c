"""The header of a .safetensors file: each tensor's type, shape and place, checked against the size of the file.

The file is data alone. No size in it is believed: a tensor that promises other bytes than the file holds is refused
before memory is taken.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library
TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(bfloat16),
    "F8_E4M3": np.dtype(float8_e4m3fn), "F8_E5M2": np.dtype(float8_e5m2), "C64": np.dtype("<c8"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip


class Damaged(Exception):
    """The bytes are no safetensors file; the message says what is wrong with them."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor's bytes lie in the file, and what they are."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class Header:
    """The tensors of a file by name, in the order of its header, and the file's own metadata."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read(file: IO[bytes], size: int) -> Header:
    """The header of a file of `size` bytes; `Damaged` if it cannot be right."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise Damaged("its header has no valid length")
    try:
        header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {}) or {}
        entries = {str(key): _entry(value, 8 + length) for key, value in header.items()}
        texts = {str(key): str(value) for key, value in metadata.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Damaged("its header cannot be read") from None
    for key, entry in entries.items():
        promised = math.prod(entry.shape) * entry.dtype.itemsize
        if entry.length != promised or not 8 + length <= entry.offset <= entry.offset + entry.length <= size:
            raise Damaged(f"tensor {key!r} does not fit the file")
    return Header(entries, texts)


def _entry(value: dict[str, Any], begin: int) -> Entry:
    shape = tuple(value["shape"])
    first, last = value["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, first, last)):
        raise ValueError
    return Entry(TYPES[value["dtype"]], shape, begin + first, last - first)
