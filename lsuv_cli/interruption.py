"""Requests to stop (SIGINT, SIGTERM, SIGHUP), and what a person is told if the process ends now.

The command does its work in a child process, which a request ends at once; its parent then speaks
(`cli.child_process`). What it says stands in memory that both share: how far the work has come, and the exit code once
it is decided.
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
    exit_code: int | None = None  # once the result is there
    told: bool = False  # nothing more was to be said


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
    except ValueError:  # killed while it wrote
        return Standing("its output may have been written")


def begin(so_far: str, *, publication_is_all: bool = False) -> None:
    """Say what was done before the work that begins now, and whether its published result is all that is asked for."""
    global _publication_is_all
    _publication_is_all = publication_is_all
    _post(Standing(so_far))


def published(exit_code: int) -> None:
    """The result has its name. If that is all that was asked for, the exit code is decided."""
    _post(Standing("the model was written", exit_code if _publication_is_all else None))


def ended(exit_code: int) -> None:
    """All is done and told; what is left is Python's own end."""
    _post(replace(_standing, exit_code=exit_code, told=True))


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Requests to stop wait while a result gets its name, and are then carried out.

    The handlers are exchanged rather than the signals blocked: a thread of onnxruntime would take them instead.
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
