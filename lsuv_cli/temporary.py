"""Files and directories that must not outlive the process.

Code that makes a temporary file announces its path first, and withdraws the path when the file is removed or renamed to
the result. The announced paths are in memory that a parent process can share (`share`), so that the parent can remove
the files of a killed child. A directory that is announced `if_empty` goes only if nothing was put into it. A directory
that workers write into is announced to be `swept` of what they leave (scratch.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

BOARD_BYTES = 1 << 15
# Behind the name of a directory:
IF_EMPTY = os.sep
SWEPT = f"{os.sep}*"

_board: mmap.mmap | None = None
_announced: list[str] = []


def announce(path: Path, *, if_empty: bool = False) -> None:
    """Have this file or directory removed if the process dies."""
    _announced.append(_name(path, if_empty))
    _post()


def withdraw(path: Path, *, if_empty: bool = False) -> None:
    """Take back an announcement: the file is removed, or renamed to the result."""
    with contextlib.suppress(ValueError):
        _announced.remove(_name(path, if_empty))
    _post()


def share() -> None:
    """Keep the announced paths in memory that a child process made by fork writes and its parent reads."""
    global _board
    _board = mmap.mmap(-1, BOARD_BYTES)


def remove_announced() -> None:
    """Remove every path that a dead child had announced and not withdrawn; what this process announced stays."""
    if _board is None:
        return
    names = [os.fsdecode(name) for name in _board[:].split(b"\0") if name]
    for name in reversed([name for name in names if name not in _announced]):  # a directory after what is in it
        path = Path(name)
        if name.endswith(SWEPT):
            from lsuv_cli import scratch  # which imports this module

            scratch.sweep_soon(path.parent)
        elif name.endswith(IF_EMPTY):
            with contextlib.suppress(OSError):
                path.rmdir()
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    _board[:] = bytes(BOARD_BYTES)
    _post()


@contextlib.contextmanager
def swept(directory: Path | None) -> Iterator[None]:
    """Work in which other processes write into a directory: if this one dies, what they left half done is removed."""
    if directory is None:
        yield
        return
    announce(directory / "*")
    try:
        yield
    finally:
        withdraw(directory / "*")


def _name(path: Path, if_empty: bool) -> str:
    return os.fspath(path.absolute()) + (IF_EMPTY if if_empty else "")


def _post() -> None:
    text = b"\0".join(map(os.fsencode, _announced))
    if _board is not None and len(text) <= BOARD_BYTES:
        _board[:] = text.ljust(BOARD_BYTES, b"\0")
