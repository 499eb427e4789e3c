"""A child process for the work: whatever native code does to it, a person gets one line and nothing is left behind.

onnxruntime runs other people's graphs, and a defect in one of its operators can end the process at any instruction.
So the command forks before anything heavy is imported. The child does the work. The parent waits, passes on requests
to stop, and removes what the child had announced as temporary and did not come to remove. Windows has no fork:
there the work is done in the only process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from lsuv_cli import temporary
from lsuv_cli.errors import ExitCode

PR_SET_PDEATHSIG = 1
ONE_REQUEST = 2.0  # seconds; a terminal sends it to all processes, and the parent passes it on as well
POLITE = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
CRASHES = [getattr(signal, name, None) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP")]

_last_request = -ONE_REQUEST


def run(command: Callable[[], None], complain: Callable[[str], None]) -> None:
    """Run a command that ends by SystemExit, in a process of its own where that can be had."""
    if not hasattr(os, "fork") or os.environ.get("LSUV_DEBUG"):
        _interruptible(command)
        return
    temporary.share()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _die_with(parent)
        _own_stderr()
        _interruptible(command)
        return

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            _send(child, number)

    _on_request(pass_on)
    _, status = os.waitpid(child, 0)
    _on_request(signal.SIG_IGN)
    sys.exit(_verdict(status, complain))


def _send(process: int, number: int) -> None:
    """Send a signal to a process's main thread, the only one in which Python handles it, or at least to the process."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(AttributeError):  # an old C library
            if ctypes.CDLL(None).tgkill(process, process, number) == 0:
                return
    os.kill(process, number)


def _interruptible(command: Callable[[], None]) -> None:
    _on_request(_interrupt)
    try:
        command()
    finally:
        # Python gives signals back to the system while it shuts down, and a late one would change the exit code.
        _on_request(signal.SIG_IGN)


def _on_request(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Handle polite requests to stop, but for those that whoever started us wants to be ignored (nohup)."""
    for number in POLITE:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    """A polite request to stop cleans up. One that comes twice at once must not interrupt that; a later one counts."""
    global _last_request
    now = time.monotonic()
    if now - _last_request > ONE_REQUEST:
        _last_request = now
        raise KeyboardInterrupt


def _die_with(parent: int) -> None:
    """Let the system kill this process when its parent is killed, where it can (Linux)."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before it could be said
            os._exit(int(ExitCode.INTERRUPTED))


def _own_stderr() -> None:
    """Keep stderr for Python: what native code prints while it dies would hide the line that explains it."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    sys.stderr = os.fdopen(kept, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")


def _verdict(status: int, complain: Callable[[str], None]) -> int:
    """The exit code for what became of the child, and one line if it was not its own decision."""
    temporary.remove_announced()
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    if number not in (*CRASHES, signal.SIGKILL):
        return 128 + number
    if number == signal.SIGKILL:
        what = "was killed, perhaps because memory ran out (then a smaller --batch-size, --limit or --memory helps)"
    else:
        what = f"crashed inside a native library, most likely onnxruntime on this model ({signal.strsignal(number)})"
    complain(f"the run {what}; the input is untouched, and no half-written file is left")
    return int(ExitCode.BAD_REQUEST)
