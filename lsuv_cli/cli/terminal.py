"""Standard streams: consoles, progress, complaints, and readers that leave before the end.

stdout is for what was asked for (a table, JSON, a model), stderr for the rest.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from lsuv_cli.cli.wording import as_typed
from lsuv_cli.errors import ExitCode, LsuvError

if TYPE_CHECKING:
    from rich.console import Console

Listener = Callable[[str, int, int], None]
LONGEST = 800  # characters of a complaint


def make_whole() -> None:
    """A process may be started without some standard stream (`2>&-`): what is written there then goes nowhere."""
    for name in ("stdin", "stdout", "stderr"):  # in this order each gets its own number back
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open("r" if name == "stdin" else "w")  # noqa: SIM115  it lives as long as the process
            setattr(sys, name, stream)


def console(*, stderr: bool = True, quiet: bool = False) -> Console:
    """A console whose colours are for terminals. Where there is no terminal at all, lines may be long."""
    import rich.console

    class Patient(rich.console.Console):
        def on_broken_pipe(self) -> None:
            _hush(self.file)

    return Patient(stderr=stderr, highlight=False, quiet=quiet, width=_width())


def _width() -> int:
    """The terminal's, even if one stream is piped into a pager; then COLUMNS; else as wide as it gets."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream.isatty() and (columns := os.get_terminal_size(stream.fileno()).columns):
                return columns
    columns_text = os.environ.get("COLUMNS", "")
    return int(columns_text) if columns_text.isdecimal() and int(columns_text) else 1000


def write(text: str) -> None:
    """Print on standard output. A reader that has seen enough (`| head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _hush(sys.stdout)


def write_bytes(data: bytes) -> None:
    """Send a model to standard output."""
    if sys.stdout.isatty():
        raise LsuvError("a model is not for a terminal; redirect standard output or give -o PATH")
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _hush(sys.stdout)
        raise LsuvError("the program that reads standard output closed it before the model was written") from None


def read_bytes() -> bytes:
    """A model from standard input."""
    if sys.stdin.isatty():
        raise LsuvError("the model is to come from standard input, which is a terminal; pipe a file into it")
    return sys.stdin.buffer.read()


def complain(text: str) -> None:
    """One line on stderr, of a length that can be read, whatever names a file has in it."""
    line = " ".join(text.split())
    if len(line) > LONGEST:
        line = f"{line[: LONGEST * 2 // 3]} ... {line[-LONGEST // 4 :]}"
    try:
        sys.stderr.write(f"lsuv: {line}\n")
        sys.stderr.flush()
    except BrokenPipeError:
        _hush(sys.stderr)


def _hush(stream: IO[str]) -> None:
    """Nobody reads this stream any more: what is still written goes nowhere, at exit too."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def errors(tell: Callable[[int, str], None] | None = None, so_far: str = "nothing was written") -> Iterator[None]:
    """One line for a person instead of a traceback; LSUV_DEBUG=1 shows the traceback.

    The exit code ends the program or, where there is more to do, is told with the message to `tell`.
    """
    try:
        yield
    except KeyboardInterrupt:
        complain(f"interrupted; {so_far}")
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    except typer.Exit:
        raise
    except Exception as problem:
        if os.environ.get("LSUV_DEBUG"):
            raise
        code, text = int(ExitCode.BAD_REQUEST), str(problem)
        if isinstance(problem, LsuvError):
            code, text = int(problem.exit_code), as_typed(text)
        elif isinstance(problem, MemoryError):
            text = "out of memory; use a smaller --batch-size, fewer samples (--limit) or --memory"
        else:
            text = f"internal error, please report it ({type(problem).__name__}: {problem}); nothing was written"
        if tell is None:
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
