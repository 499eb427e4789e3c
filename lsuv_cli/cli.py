"""The command line: a thin shell over the Python API, and the only module that prints.

stdout is for machines (the report as JSON, or the model with `-o -`), stderr for people.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsuv_cli.errors import ExitCode, LsuvError
from lsuv_cli.settings import Bias, PreInit, Tied
from lsuv_cli.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="lsuv",
    help="Give the weights of any ONNX model a good start: LSUV, layer-sequential unit-variance initialization.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lsuv {__version__}")
        raise typer.Exit


@app.callback()
def _lsuv(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or - for standard input.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="[NAME=]PATH",
            help="Calibration data: .npy, .npz, or a directory of them; NAME=PATH, repeated, for several inputs.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="PATH", help="Where to write; - for standard output. Default: MODEL.lsuv.onnx."
        ),
    ] = None,
    pre_init: Annotated[
        PreInit, typer.Option(help="The weights before scaling; keep leaves their directions as they are.")
    ] = PreInit.ORTHONORMAL,
    rescale: Annotated[
        bool, typer.Option("--rescale/--no-rescale", help="Scale each layer on the data, or stop after --pre-init.")
    ] = True,
    bias: Annotated[Bias, typer.Option(help="Set biases to zero, or keep them.")] = Bias.ZERO,
    tol: Annotated[
        float, typer.Option(help="Largest deviation of a variance from its target, as a share of it.")
    ] = 0.01,
    max_trials: Annotated[int, typer.Option(metavar="N", help="Trials at most; nearly always one is enough.")] = 10,
    target_variance: Annotated[float, typer.Option(help="The variance every layer's output is to have.")] = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random weights.")] = 0,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only layers whose name matches; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave out layers whose name matches; repeatable.")
    ] = None,
    tied: Annotated[
        Tied, typer.Option(help="A weight that several layers use: share it, copy it for each, or skip them.")
    ] = Tied.SHARE,
    recurrent: Annotated[
        bool, typer.Option("--recurrent", help="Pre-initialize LSTM, GRU and RNN too, gate by gate.")
    ] = False,
    reset_norm: Annotated[
        bool,
        typer.Option("--reset-norm", help="Reset the running statistics of BatchNormalization behind a layer."),
    ] = False,
    batch_size: Annotated[
        str | None, typer.Option(metavar="N|all", help="Samples in a run; all feeds every input whole.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Use the first N samples.")] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Annotated[int | None, typer.Option(metavar="N", help="CPU threads; default: all available.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for values between stages, e.g. 500M or 8G; beyond it they go to a file."
        ),
    ] = None,
    before: Annotated[
        bool, typer.Option("--before", help="Show the variances in the model as given too (one more pass).")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, write nothing.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON on standard output.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output if it exists.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every note and each layer's stage.")] = False,
) -> None:
    """Initialize a model: orthonormal weights, scaled layer by layer to variance 1 on your data."""
    with _errors():
        target = _target(model, output, dry_run)
        if json and target == "-":
            raise LsuvError("--json and -o - both want standard output; write the model to a file")
        settings: dict[str, Any] = {
            "pre_init": pre_init,
            "rescale": rescale,
            "bias": bias,
            "tol": tol,
            "max_trials": max_trials,
            "target_variance": target_variance,
            "seed": seed,
            "include": tuple(include or ()),
            "exclude": tuple(exclude or ()),
            "tied": tied,
            "recurrent": recurrent,
            "reset_norm": reset_norm,
            "batch_size": _batch_size(batch_size),
            "limit": limit,
            "device": device,
            "threads": threads,
            "memory": _bytes(memory),
            "before": before,
        }
        source = _model(model)
        console = _console(quiet)
        from lsuv_cli.api import initialize

        with _progress(console, quiet) as listen:
            done = initialize(
                source,
                list(data) if data else None,
                output=None if target == "-" else target,
                force=force,
                dry_run=dry_run,
                listen=listen,
                **settings,
            )
        if target == "-" and not dry_run:
            assert done.model is not None
            _write_stdout(done.model)
        _tell(done.report, console, json=json, quiet=quiet, verbose=verbose)
    raise typer.Exit(int(done.report.exit_code))


def _tell(report: Any, console: Console, *, json: bool, quiet: bool, verbose: bool) -> None:
    """Warnings and table for people, JSON for machines."""
    from lsuv_cli import display

    for warning in report.warnings if not quiet else ():
        console.print(f"[yellow]warning:[/] {_escaped(warning)}", soft_wrap=True)
    if not quiet:
        display.show(report, console, verbose=verbose)
    if json:
        import json as writer

        sys.stdout.write(writer.dumps(report.to_json(), indent=2) + "\n")


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _target(model: str, output: str | None, dry_run: bool) -> str | None:
    if output is not None:
        return output
    if model == "-":
        if dry_run:
            return None
        raise LsuvError("the model comes from standard input: say where to write it with -o PATH, or -o -")
    path = Path(model)
    return str(path.with_name(f"{path.name.removesuffix('.onnx')}.lsuv.onnx"))


def _model(model: str) -> str | bytes:
    if model != "-":
        return model
    if sys.stdin.isatty():
        raise LsuvError("the model is to come from standard input, which is a terminal; pipe a file into it")
    return sys.stdin.buffer.read()


def _write_stdout(model: Any) -> None:
    if sys.stdout.isatty():
        raise LsuvError("a model is not for a terminal; redirect standard output or give -o PATH")
    data = model.SerializeToString()
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise LsuvError("the program that reads standard output closed it before the model was written") from None


def _batch_size(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    if not text.isdigit() or int(text) < 1:
        raise LsuvError(f"--batch-size {text!r} is not a positive number or all")
    return int(text)


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in units else ""
    try:
        size = int(float(number.removesuffix(unit)) * units[unit])
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise LsuvError(f"--memory {text!r} is not a size such as 500M or 8G")
    return size


def _console(quiet: bool) -> Console:
    from rich.console import Console

    # Without a terminal the width is nobody's concern, but a log should stay readable.
    width = None if sys.stderr.isatty() else int(os.environ.get("COLUMNS") or 100)
    return Console(stderr=True, highlight=False, quiet=quiet, width=width)


@contextlib.contextmanager
def _progress(console: Console, quiet: bool) -> Iterator[Any]:
    """A progress bar over stages and batches, on a terminal only."""
    if quiet or not console.is_terminal:
        yield lambda phase, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:>9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def listen(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done, total=total)

        yield listen


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """One line for a person instead of a traceback; LSUV_DEBUG=1 shows the traceback."""
    try:
        yield
    except LsuvError as problem:
        if os.environ.get("LSUV_DEBUG"):
            raise
        _complain(str(problem))
        raise typer.Exit(int(problem.exit_code)) from None
    except KeyboardInterrupt:
        _complain("interrupted; nothing was written")
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    except Exception as problem:
        if os.environ.get("LSUV_DEBUG"):
            raise
        if isinstance(problem, MemoryError):
            _complain("out of memory; use a smaller --batch-size, fewer samples (--limit) or --memory")
        else:
            _complain(f"internal error, please report it ({type(problem).__name__}: {problem}); nothing was written")
        raise typer.Exit(int(ExitCode.BAD_REQUEST)) from None


def _complain(text: str) -> None:
    typer.echo(f"lsuv: {' '.join(text.split())}", err=True)


def main() -> None:
    """The `lsuv` command."""
    # A polite request to stop cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    app()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
