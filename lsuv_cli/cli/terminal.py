"""Standard streams: consoles, progress, complaints, readers that leave before the end, and disks that are full.

stdout is for results (a table, JSON, a model), stderr for other messages. No text from a file reaches a terminal raw:
unprintable characters (escape sequences, line breaks, marks that change the direction of writing) are shown as escapes
(`printable`). Imports nothing heavy: the parent of the working process complains through it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lsuv_cli import interruption
from lsuv_cli.cli.wording import as_typed
from lsuv_cli.errors import ExitCode, LsuvError
from lsuv_cli.progress import Listener
from lsuv_cli.spool import Spool, TooMuch
from lsuv_cli.text import printable

if TYPE_CHECKING:
    from rich.console import Console

LONGEST = 800  # characters of a complaint


class Unwritable(LsuvError):
    """Standard output cannot be written (a full disk), for another reason than a reader that left (`| head`)."""


def shortened(text: str, longest: int = LONGEST) -> str:
    """A line cut to a readable length: names from a file may be very long."""
    line = " ".join(text.split())
    if len(line) > longest:
        line = f"{line[: longest * 2 // 3]} ... {line[-longest // 4 :]}"
    return printable(line)


def make_whole() -> None:
    """Make the standard streams accept any text.

    A process may be started without some of them (`2>&-`): text written to a missing stream goes nowhere. A character
    that a stream's encoding lacks is written as an escape.
    """
    for name in ("stdin", "stdout", "stderr"):  # opened in this order, they get the descriptors 0, 1, 2
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open("r" if name == "stdin" else "w")  # noqa: SIM115  it lives as long as the process
            setattr(sys, name, stream)
    for written in (sys.stdout, sys.stderr):
        if hasattr(written, "reconfigure"):
            written.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """What is imported meanwhile stays: to look for garbage among it would take a tenth of the time of the imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


class _Stream:
    """A standard stream for a console: a full disk under stdout is an error of one line, under stderr it is ignored."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _writing(self._stream):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _writing(self._stream):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _writing(stream: IO[str]) -> Iterator[None]:
    """A reader that has seen enough (`| head`) is no error; a full disk under stdout is."""
    try:
        yield
    except OSError as problem:
        hush(stream)
        if stream is sys.stdout and not isinstance(problem, BrokenPipeError):
            raise Unwritable(f"standard output cannot be written: {problem.strerror or problem}") from None


def console(*, stderr: bool = True, quiet: bool = False) -> Console:
    """A console with colours on a terminal only. Without any terminal, lines may be long."""
    import rich.console

    stream: Any = _Stream(sys.stderr if stderr else sys.stdout)
    return rich.console.Console(file=stream, highlight=False, quiet=quiet, width=_width())


def _width() -> int:
    """The width of the terminal on any stream (stdout may be a pager's pipe); else COLUMNS; else as wide as it gets."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty() and (columns := os.get_terminal_size(stream.fileno()).columns):
                return columns
    columns_text = os.environ.get("COLUMNS", "")
    return int(columns_text) if columns_text.isdecimal() and int(columns_text) else 1000


def write(text: str) -> None:
    """Print a text on standard output: unchanged for programs, with escapes on a terminal."""
    if sys.stdout.isatty():
        text = "\n".join(printable(line) for line in text.split("\n"))
    with _writing(sys.stdout):
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def after_writing(files: Iterable[object]) -> Iterator[None]:
    """Printing that follows files which were written: if it fails, the error says that these are complete."""
    try:
        yield
    except Unwritable as problem:
        names = [printable(str(file)) for file in files]
        if not names:
            raise
        told = f"{', '.join(names)} {'were' if len(names) > 1 else 'was'} written"
        raise Unwritable(f"{problem}; the report is lost, {told}") from None


def write_model(chunks: Iterable[bytes | memoryview]) -> None:
    """Send a model to standard output."""
    if sys.stdout.isatty():
        raise LsuvError("a model is not for a terminal; redirect standard output or give -o PATH")
    try:
        sys.stdout.buffer.writelines(chunks)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        hush(sys.stdout)
        raise LsuvError("the program that reads standard output closed it before the model was written") from None
    except OSError as problem:
        hush(sys.stdout)
        raise Unwritable(f"standard output cannot be written: {problem.strerror or problem}") from None


def model_from_stdin() -> Spool | bytes:
    """A model from standard input, in a temporary file; in memory where there is no room for the file."""
    if sys.stdin.isatty():
        raise LsuvError("the model is to come from standard input, which is a terminal; pipe a file into it")
    try:
        spool = Spool("model")
        spool.copy(sys.stdin.buffer)
    except TooMuch:
        return spool.path.read_bytes() + sys.stdin.buffer.read()
    except OSError as problem:
        raise LsuvError(f"the model from standard input cannot be read: {problem.strerror or problem}") from None
    return spool


def complain(text: str) -> None:
    """One line on stderr."""
    with _writing(sys.stderr):
        sys.stderr.write(f"lsuv: {shortened(text)}\n")
        sys.stderr.flush()


def finish() -> None:
    """Flush standard output now: Python would flush it at exit, too late to report an error."""
    with _writing(sys.stdout):
        sys.stdout.flush()


def hush(stream: IO[str] | None = None) -> None:
    """Send all further output of a stream that nobody reads any more to nowhere, also the flush at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


@contextlib.contextmanager
def errors(
    tell: Callable[[int, str], None] | None = None,
    so_far: str = "nothing was written",
    *,
    publication_is_all: bool = False,
) -> Iterator[None]:
    """One line for a person instead of a traceback; LSUV_DEBUG=1 shows the traceback.

    The exit code ends the program or, with `tell`, is passed to it together with the message, so that further models
    can follow. `so_far` is the message's account of earlier work if the work is interrupted. With `publication_is_all`,
    the work counts as complete once its result is published: no output that a reader would miss follows.
    """

    interruption.begin(so_far, publication_is_all=publication_is_all)
    import typer

    try:
        yield
    except KeyboardInterrupt:
        complain(f"interrupted; {interruption.standing().so_far}")
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    except typer.Exit:
        raise
    except Exception as problem:  # the last resort: a person gets one line, whatever went wrong
        if os.environ.get("LSUV_DEBUG"):
            raise
        code, text = int(ExitCode.BAD_REQUEST), str(problem)
        if isinstance(problem, LsuvError):
            code, text = int(problem.exit_code), as_typed(text)
        elif isinstance(problem, MemoryError):
            text = "out of memory; use a smaller --batch-size, fewer samples (--limit) or --memory"
        else:
            text = f"internal error, please report it ({type(problem).__name__}: {problem}); nothing was written"
        if tell is None or isinstance(problem, Unwritable):
            complain(text)
            raise typer.Exit(code) from None
        tell(code, text)


@contextlib.contextmanager
def progress(console: Console, wanted: bool) -> Iterator[Listener]:
    """A progress bar over stages and batches, on a terminal only."""
    if not wanted or not console.is_terminal:
        yield lambda phase, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def listen(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done, total=total)

        yield listen
