"""What comes through a pipe and is read more than once: a copy in a temporary file.

1. No more is copied than half of the space that is free where temporary files go.
2. The file is gone with the last reference to it, and when the process ends, in whatever way.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import IO

from lsuv_cli import temporary

CHUNK = 1 << 20


class TooMuch(Exception):
    """More came through the pipe than there is room for; the message says how much that is. What came was copied."""


class Spool(os.PathLike[str]):
    """A temporary file that is removed with the last reference to it, or when the process ends."""

    def __init__(self, kind: str) -> None:
        handle, name = tempfile.mkstemp(prefix=f"lsuv-{kind}-")
        self.path = Path(name)
        temporary.announce(self.path)
        self.file: IO[bytes] = os.fdopen(handle, "wb")
        self.remove = weakref.finalize(self, _removed, self.file, self.path)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def copy(self, source: IO[bytes]) -> None:
        """Copy all that a stream gives."""
        most, copied = room(), 0
        while piece := source.read(CHUNK):
            copied += len(piece)
            self.file.write(piece)
            if copied > most:
                self.file.flush()
                raise TooMuch(f"more than {most:,} bytes, half of the space free in {tempfile.gettempdir()}")
        self.file.flush()


def room() -> int:
    """Bytes that temporary files may take: half of the space that is free."""
    return shutil.disk_usage(tempfile.gettempdir()).free // 2


def _removed(file: IO[bytes], path: Path) -> None:
    file.close()
    path.unlink(missing_ok=True)
    temporary.withdraw(path)
