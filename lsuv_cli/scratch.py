"""Scratch directories: results are written there before they are renamed into place.

1. A scratch directory lies beside the output and is called `.lsuv-` and 16 hexadecimal digits. It holds a file `lock`
   with the text `MARK`, whose lock the living process holds.
2. The next run in the same place removes the scratch directories of killed runs: a directory of such a name whose lock
   no process holds, and whose `lock` file has the text `MARK`, or which holds only an empty `lock`, or nothing. Any
   other directory may be the user's and stays.
3. Between making a directory and holding its lock another run may take it for a leftover. So its maker looks whether
   the locked file is still in its place, and begins anew with another name if it is not.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from lsuv_cli import temporary

PREFIX = ".lsuv-"
NAME = re.compile(r"\.lsuv-[0-9a-f]{16}")
MARK = b"Scratch of a running lsuv. If none runs, the next one here removes it.\n"
ATTEMPTS = 100
PATIENCE = 5.0  # seconds in which the processes of a run that was ended have ended too


class Scratch:
    """A directory that is gone when its context ends. Leftovers of killed runs beside it go first."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: IO[bytes] | None = None
        self.path = directory

    def __enter__(self) -> Scratch:
        sweep(self._directory)
        for _ in range(ATTEMPTS):
            # The path is set before the directory is made, so that an interruption between the two leaves nothing.
            self.path = self._directory / f"{PREFIX}{secrets.token_hex(8)}"
            temporary.announce(self.path)
            try:
                self.path.mkdir(mode=0o700)
                self._lock = _claimed(self.path / "lock")
            except BaseException:  # an interruption too: `with` calls no __exit__ if __enter__ fails
                self._remove()
                raise
            if self._lock is not None:
                return self
            self._remove()
        raise OSError("other runs take every scratch directory away")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        temporary.withdraw(self.path)


def sweep(directory: Path) -> None:
    """Remove the scratch directories that killed runs left in a directory."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_left(Path(entry.path))


def sweep_soon(directory: Path) -> None:
    """Sweep a directory in which other processes of this run are about to end; a living run's scratch stays."""
    end = time.monotonic() + PATIENCE
    sweep(directory)
    while time.monotonic() < end and any(NAME.fullmatch(path.name) for path in directory.glob(f"{PREFIX}*")):
        time.sleep(0.1)
        sweep(directory)


def _claimed(lock: Path) -> IO[bytes] | None:
    """The lock of a new directory, held; None if another run took the directory for a leftover meanwhile."""
    try:
        file = lock.open("xb", buffering=0)
    except FileNotFoundError:
        return None
    try:
        held = _hold(file)
    except OSError:  # a file system without locks, where nothing is ever swept either
        held = True
    if held and _is_there(lock, file):
        file.write(MARK)
        return file
    file.close()
    return None


def _remove_if_left(path: Path) -> None:
    lock = path / "lock"
    try:
        # A pipe or a symbolic link called `lock` is the user's; opening it must neither block nor follow it.
        handle = os.open(lock, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        path.rmdir()  # refused unless it is empty
        return
    with os.fdopen(handle, "rb") as file:
        if not _hold(file):
            return
        said = file.read(len(MARK) + 1)
        if said not in (MARK, b"") or (not said and list(path.iterdir()) != [lock]):
            return
        if os.name == "nt":  # Windows cannot remove a file that a living run has open: that is its lock
            file.close()
            lock.unlink()
        shutil.rmtree(path, ignore_errors=True)


def _hold(file: IO[bytes]) -> bool:
    """Hold a file's lock for as long as it is open; False if another process does."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_there(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False
