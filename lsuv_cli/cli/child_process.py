"""A child process for the work: if native code crashes it, a person gets one line and no temporary file stays behind.

onnxruntime runs other people's graphs, and a defect in one of its operators can end the process at any instruction.
So the command forks before anything heavy is imported. The child does the work; a request to stop (SIGINT, SIGTERM,
SIGHUP) ends it at once, even inside an import or native code. The parent waits, passes such requests on, removes the
temporary files that the child announced and did not remove (temporary.py), and says what happened. If the child had
published its result by then, the exit code is that of the finished work. Windows has no fork: there the work is done
in the only process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

from lsuv_cli import interruption, temporary
from lsuv_cli.errors import ExitCode, ModelError
from lsuv_cli.interruption import POLITE

PR_SET_PDEATHSIG = 1
T = TypeVar("T")
_is_forked = False  # whether this process is the child

CRASHES = [getattr(signal, name, None) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP")]


def run(command: Callable[[], None], complain: Callable[[str], None]) -> None:
    """Run a command that ends by SystemExit, in a child process where the system can fork."""
    if not hasattr(os, "fork") or os.environ.get("LSUV_DEBUG"):
        _in_this_process(command, complain)
        return
    temporary.share()
    interruption.share()
    parent = os.getpid()
    # Requests to stop are blocked until parent and child have each set their handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
    child = os.fork()
    if child == 0:
        global _is_forked
        _is_forked = True
        _on_request(signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)
        _die_with(parent)
        _own_stderr()
        _to_the_end(command)
        return

    def pass_on(number: int, frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    _on_request(pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)
    _, status = os.waitpid(child, 0)
    _on_request(signal.SIG_IGN)
    sys.exit(_verdict(status, complain))


def apart(work: Callable[[], T]) -> T:
    """Do work in a process of its own, if this one was forked for the command too; a crash is then an exception."""
    if not _is_forked:
        return work()
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _die_with(parent)
        _deliver(work, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        told = stream.read()
    _, status = os.waitpid(child, 0)
    temporary.remove_announced()
    if not os.WIFEXITED(status) or not told:
        raise ModelError(_crash(os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGABRT))
    result = pickle.loads(told)
    if isinstance(result, BaseException):
        raise result
    return result  # type: ignore[no-any-return]


def _deliver(work: Callable[[], object], writer: int) -> None:
    """Do work, send its result or its exception through a pipe, and end the process."""
    try:
        result: object = work()
    except BaseException as problem:
        result = problem
    try:
        told = pickle.dumps(result)
    except Exception:  # an exception of a library that cannot be sent
        told = pickle.dumps(RuntimeError(f"{type(result).__name__}: {result}"))
    with os.fdopen(writer, "wb") as stream:
        stream.write(told)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _to_the_end(command: Callable[[], None]) -> None:
    """Run a command, and leave at once when it has ended: Python would take a tenth of a second to free its memory."""
    try:
        command()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
        interruption.ended(code)
        if "ray" in sys.modules:  # which ends its own processes while Python shuts down
            raise
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):  # what nobody reads any more
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def _in_this_process(command: Callable[[], None], complain: Callable[[str], None]) -> None:
    try:
        command()
    except KeyboardInterrupt:
        complain(f"interrupted; {interruption.standing().so_far}")
        sys.exit(int(ExitCode.INTERRUPTED))
    finally:
        # Python restores default signal handlers while it shuts down; a late signal would change the exit code.
        _on_request(signal.SIG_IGN)


def _on_request(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    """Install a handler for SIGINT, SIGTERM and SIGHUP, except for signals that are already ignored (nohup)."""
    for number in POLITE:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _die_with(parent: int) -> None:
    """Ask the system to kill this process when its parent is killed; only Linux can."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent was killed before the system was asked
            os._exit(int(ExitCode.INTERRUPTED))


def _own_stderr() -> None:
    """Keep stderr for Python: messages of crashing native code would hide the line that explains the crash."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    sys.stderr = os.fdopen(kept, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")


def _verdict(status: int, complain: Callable[[str], None]) -> int:
    """The exit code for the child's wait status; complain in one line if a signal or a library ended the child."""
    temporary.remove_announced()
    standing = interruption.standing()
    if os.WIFEXITED(status) and standing.told:
        return os.WEXITSTATUS(status)
    if standing.exit_code is not None and standing.told:
        return standing.exit_code
    _tidy_terminal()
    number = os.WTERMSIG(status)
    how = f"exit code {os.WEXITSTATUS(status)} of a library" if os.WIFEXITED(status) else signal.strsignal(number)
    if standing.exit_code is not None:
        complain(f"stopped ({how}) after {standing.so_far}; it is complete and verified")
        return standing.exit_code
    if os.WIFEXITED(status):
        what = f"a library ended the run, without a reason ({how})"
        if standing.relies_on:
            gone = "ended or were killed, perhaps because memory ran out"
            what = f"the run ended with {standing.relies_on}, whose own processes {gone}"
        complain(f"{what}; {standing.so_far}")
        return int(ExitCode.BAD_REQUEST)
    if number in POLITE:
        complain(f"interrupted; {standing.so_far}")
        return int(ExitCode.INTERRUPTED)
    if number not in (*CRASHES, signal.SIGKILL):
        complain(f"the run was ended by a signal ({signal.strsignal(number)}); {standing.so_far}")
        return 128 + number
    complain(_crash(number))
    return int(ExitCode.BAD_REQUEST)


def _crash(number: int) -> str:
    """What a person is told about a process that a signal ended."""
    if number == signal.SIGKILL:
        what = "was killed, perhaps because memory ran out (then a smaller --batch-size, --limit or --memory helps)"
    else:
        what = f"crashed inside a native library, most likely onnxruntime on this model ({signal.strsignal(number)})"
    return f"the run {what}; the input is untouched, and no half-written file is left"


def _tidy_terminal() -> None:
    """Show the cursor again: a killed child's progress bar may have left it hidden."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            sys.stderr.write("\r\x1b[K\x1b[?25h")
            sys.stderr.flush()
