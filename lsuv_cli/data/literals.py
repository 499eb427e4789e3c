"""Numbers as data, written out: `sr=16000` or `scale=[[0.5, 2]]`, the same in every run."""

from __future__ import annotations

import ast
import json
from typing import Any

import numpy as np

from lsuv_cli.data.files import StoredArray
from lsuv_cli.data.inputs import Feed, InputColumn, InputSpec, check_type, fixed_length
from lsuv_cli.errors import DataError

LONGEST = 10_000  # characters; more is a file's business
MOST = 1 << 24  # values that one number is repeated to


def parsed(text: str) -> Any:
    """The number, truth value, text in quotes, or nested list of them that a text is; None if it is none."""
    if len(text) > LONGEST:
        return None
    for read in (ast.literal_eval, json.loads):
        try:
            value = read(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return value if isinstance(value, bool | int | float | str | list | tuple) else None
    return None


def column(spec: InputSpec, value: Any) -> InputColumn:
    """A literal as data for an input; one number stands for all values of an input whose shape is fixed."""
    where = f"{spec.name}={value}"
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as problem:
        raise DataError(f"{where}: the list is no array ({problem}); give lists of one length") from None
    if array.dtype.kind not in "biufU":
        raise DataError(f"{where}: not all of it are numbers of one kind; give a file")
    shape = spec.shape if spec.shape is not None else array.shape
    lengths = [fixed_length(dim) for dim in shape]
    if not array.ndim and shape:
        if None in lengths:
            raise DataError(
                f"{where}: input {spec.name!r} wants {spec.wanted}, whose shape is open; give a list or a file"
            )
        sizes = [length or 0 for length in lengths]
        if np.prod(sizes, dtype=float) > MOST:
            raise DataError(f"{where}: input {spec.name!r} wants {spec.wanted}; give a file")
        array = np.full(sizes, array)
    if len(shape) != array.ndim or any(n not in {None, got} for n, got in zip(lengths, array.shape, strict=True)):
        got = "x".join(map(str, array.shape))
        raise DataError(f"{where}: input {spec.name!r} wants {spec.wanted}, got {got}; give the whole input")
    stored = StoredArray.of(array, where)
    check_type(spec, stored)
    return InputColumn(spec, Feed.SAME, (stored,))
