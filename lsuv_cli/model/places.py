"""Where a tensor's bytes lie: a range of a file, or memory. They are read when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.errors import ModelError
from lsuv_cli.spool import Spool

Array = NDArray[Any]
Stamp = tuple[int, int, int]

CHUNK = 1 << 22  # bytes that are copied at a time


@dataclass(frozen=True)
class Range:
    """A range of a file. With a stamp, the file has to be the one that it was when the stamp was taken."""

    path: Path
    offset: int
    length: int
    stamp: Stamp | None = None
    spool: Spool | None = field(default=None, compare=False, repr=False)  # a temporary file lives as long as it

    def read(self) -> bytes:
        """The bytes."""
        with self._opened() as file:
            data = file.read(self.length)
        self._check(len(data))
        return data

    def array(self, dtype: np.dtype[Any]) -> Array:
        """The bytes as values of a type, in memory of their own.

        They are read, not memory-mapped: if another program truncates the file, access to a mapping kills this process.
        """
        with self._opened() as file:
            array = np.fromfile(file, dtype, self.length // dtype.itemsize)
        self._check(array.nbytes)
        return array

    def chunks(self) -> Iterator[bytes]:
        """The bytes, a few megabytes at a time."""
        with self._opened() as file:
            left = self.length
            while left > 0:
                data = file.read(min(CHUNK, left))
                self._check(self.length if data else self.length - left)
                left -= len(data)
                yield data

    def check(self) -> None:
        """Whether the file is still what it was; an error if not."""
        self._opened().close()

    def _opened(self) -> IO[bytes]:
        try:
            file = self.path.open("rb")
        except OSError as problem:
            raise ModelError(f"{self.path}: {problem.strerror}; keep it as it is during the run") from None
        if self.stamp is not None and stamp_of(os.fstat(file.fileno())) != self.stamp:
            file.close()
            raise ModelError(f"{self.path} was changed during the run; run again")
        file.seek(self.offset)
        return file

    def _check(self, length: int) -> None:
        if length != self.length:
            raise ModelError(f"{self.path}: the file became shorter while it was read")


@dataclass(frozen=True)
class Held:
    """Bytes in memory."""

    data: memoryview

    @property
    def length(self) -> int:
        return self.data.nbytes

    def read(self) -> bytes:
        return bytes(self.data)

    def array(self, dtype: np.dtype[Any]) -> Array:
        """The bytes as values of a type, not to be written to."""
        array: Array = np.frombuffer(self.data, dtype)
        array.flags.writeable = False
        return array

    def chunks(self) -> Iterator[memoryview]:
        yield self.data


Place = Range | Held


def stamp_of(status: os.stat_result) -> Stamp:
    """What changes when another file takes a file's place, or a program writes to it."""
    return status.st_ino, status.st_size, status.st_mtime_ns
