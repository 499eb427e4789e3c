"""Requests to stop (SIGINT, SIGTERM, SIGHUP), and what a person is told if the process ends now.

The command does its work in a child process, which a request ends at once; the parent then prints the message
(`cli.child_process`). The message follows from a `Standing` in memory that both processes share: how far the work has
come, and the exit code once it is decided.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

POLITE = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
BOARD_BYTES = 4096


@dataclass(frozen=True)
class Standing:
    """How far the work has come."""

    so_far: str = "nothing was written"
    exit_code: int | None = None  # once the result is published
    told: bool = False  # the child had printed everything itself
    relies_on: str = ""  # a library that ends the process, without a word, when the library's own servers are gone


_standing = Standing()
_board: mmap.mmap | None = None
_publication_is_all = False


def share() -> None:
    """Keep the standing in memory that a child process made by fork writes and its parent reads."""
    global _board
    _board = mmap.mmap(-1, BOARD_BYTES)


def standing() -> Standing:
    """The standing as the child left it."""
    text = _board[:].rstrip(b"\0") if _board is not None else b""
    try:
        return Standing(**json.loads(text)) if text else _standing
    except ValueError:  # the child was killed while it wrote the standing
        return Standing("its output may have been written")


def begin(so_far: str, *, publication_is_all: bool = False) -> None:
    """Say what was done before the work that begins now, and whether its published result is all that is asked for."""
    global _publication_is_all
    _publication_is_all = publication_is_all
    _post(Standing(so_far, relies_on=_standing.relies_on))


def published(exit_code: int) -> None:
    """The result has its name. If that is all that was asked for, the exit code is decided."""
    code = exit_code if _publication_is_all else None
    _post(Standing("the model was written", code, relies_on=_standing.relies_on))


@contextlib.contextmanager
def relying_on(library: str) -> Iterator[None]:
    """Work that a library ends, without a word, when its own servers are gone."""
    _post(replace(_standing, relies_on=library))
    try:
        yield
    finally:
        _post(replace(_standing, relies_on=""))


def ended(exit_code: int) -> None:
    """All work is done and reported; only Python's shutdown is left."""
    _post(replace(_standing, exit_code=exit_code, told=True))


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold requests to stop while a result is renamed into place, then carry them out.

    The handlers are replaced, because a blocked signal would be delivered to a thread of onnxruntime instead.
    """
    waiting: list[int] = []
    kept = {}
    if threading.current_thread() is threading.main_thread():
        for number in POLITE:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: not set from Python, so it cannot be put back
                kept[number] = handler
                signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])


def _post(new: Standing) -> None:
    global _standing
    _standing = new
    if _board is not None:
        text = json.dumps(asdict(new)).encode()
        if len(text) <= BOARD_BYTES:
            _board[:] = text.ljust(BOARD_BYTES, b"\0")
