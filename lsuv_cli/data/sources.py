"""Calibration data as a caller may give it: arrays and batches in memory, or the names of files.

1. A string or a path is one source; a list or tuple of them several. A string is what `--data` takes: PATH, NAME=PATH,
   NAME=16000, LOADER.py:FUNCTION, - or "random". A path object is always a path, whatever its name.
2. A dict of paths by input name is NAME=PATH for each; numbers and lists of numbers among them are literals.
3. All else is data in memory (see `batches.from_arrays`).
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, overload

from numpy.typing import NDArray

from lsuv_cli.errors import DataError
from lsuv_cli.outputs import StrPath


class ArrayLike(Protocol):
    """An object that numpy can turn into an array: numpy's own, or another library's tensor in main memory."""

    def __array__(self) -> NDArray[Any]: ...


Numbers = float | list[Any]
"""A number or a list of numbers, written out."""
BatchLike = ArrayLike | Mapping[str, ArrayLike | Numbers] | Sequence[ArrayLike]
"""One batch: an array, arrays by input name, or arrays for the inputs in their order."""
Data = ArrayLike | Mapping[str, ArrayLike | Numbers] | Iterable[BatchLike]
"""Data in memory: an array, a dict of arrays by input name, or an iterable of batches."""
Paths = StrPath | Sequence[StrPath] | Mapping[str, StrPath | Numbers]
"""Data in files."""


@overload
def as_sources(data: None) -> None: ...
@overload
def as_sources(data: Data | Paths) -> Data | list[str]: ...
def as_sources(data: Data | Paths | None) -> Data | list[str] | None:
    """Data in files as a list of sources as `--data` takes them; data in memory unchanged."""
    if isinstance(data, str | os.PathLike):
        return [_source(data)]
    items: list[Any] = []
    if isinstance(data, Mapping):
        items = list(data.values())
    elif isinstance(data, list | tuple):
        items = list(data)
    in_files = [isinstance(item, str | os.PathLike) for item in items]
    if isinstance(data, Mapping) and any(in_files):
        in_files = [known or isinstance(item, int | float | list) for known, item in zip(in_files, items, strict=True)]
    if not any(in_files):
        return data  # type: ignore[return-value]  # no item is a path
    if not all(in_files):
        kind = type(items[in_files.index(False)]).__name__
        raise DataError(f"`data` holds both paths and a {kind}; give files or arrays, not both")
    if isinstance(data, Mapping):
        return [
            f"{name}={os.fspath(item) if isinstance(item, str | os.PathLike) else item}"
            for name, item in zip(data, items, strict=True)
        ]
    return [_source(item) for item in items]


def _source(source: StrPath) -> str:
    if not os.fspath(source):
        raise DataError("`data` is empty; give a file, a directory or random")
    if isinstance(source, str):
        return source
    path = os.fspath(source)
    # A path with a = in it would be read as NAME=PATH; ./ in front prevents that.
    return os.path.join(os.curdir, path) if "=" in path and not os.path.isabs(path) else path  # noqa: PTH118, PTH117
