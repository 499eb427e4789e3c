"""Data from a pipe: standard input (`-`) or a FIFO, copied to a temporary file, because several passes are made.

1. What comes is known by its first bytes: .npy, .npz (a zip archive) or .safetensors.
2. The temporary file (spool.py) is gone when its arrays are, and when the process ends, in whatever way.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from lsuv_cli.data import files
from lsuv_cli.data.files import Array, Contents, StoredArray
from lsuv_cli.errors import DataError
from lsuv_cli.spool import Spool, TooMuch

STDIN = "-"


def is_stream(path: Path) -> bool:
    """Whether data at a path can be read only once, from front to back."""
    if str(path) == STDIN:
        return True
    try:
        return stat.S_ISFIFO(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def contents(path: Path) -> Contents:
    """The arrays in a stream."""
    shown = "standard input" if str(path) == STDIN else str(path)
    if str(path) == STDIN and sys.stdin.isatty():
        raise DataError("the data is to come from standard input, which is a terminal; pipe a file into it")
    spool = Spool("data")
    try:
        with files.reading(path):
            if str(path) == STDIN:
                _copy(sys.stdin.buffer, spool, shown)
            else:
                with path.open("rb") as stream:
                    _copy(stream, spool, shown)
        kind = _kind(spool.path, shown)
    except BaseException:  # an interruption too
        spool.remove()
        raise
    return {name: partial(_opened, spool, opened, shown) for name, opened in files.READERS[kind](spool.path).items()}


def _opened(spool: Spool, opened: Callable[[], StoredArray], shown: str) -> StoredArray:
    try:
        stored = opened()
    except DataError as problem:
        raise DataError(str(problem).replace(str(spool.path), shown)) from None
    load = partial(_loaded, spool, stored.load)
    return replace(stored, where=stored.where.replace(str(spool.path), shown), load=load, file=None)


def _loaded(spool: Spool, load: Callable[[], Array]) -> Array:
    """The values, while `spool` keeps their file."""
    return load()


def _copy(source: IO[bytes], spool: Spool, shown: str) -> None:
    try:
        spool.copy(source)
    except TooMuch as problem:
        raise DataError(f"{shown}: {problem}; give a file") from None


def _kind(path: Path, shown: str) -> str:
    """The end of the name that a file with these first bytes would have."""
    with path.open("rb") as file:
        start = file.read(9)
    if not start:
        raise DataError(f"{shown}: is empty; send an .npy, .npz or .safetensors file")
    if start.startswith(b"\x93NUMPY"):
        return ".npy"
    if start.startswith(b"PK"):
        return ".npz"
    if start.endswith(b"{"):
        return ".safetensors"
    raise DataError(f"{shown}: no .npy, .npz or .safetensors file, by its first bytes; send one of them")
