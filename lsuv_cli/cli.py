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


Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="[NAME=]PATH",
        help="Calibration data: .npy, .npz, a directory of them or of pictures; NAME=PATH, repeated, for several "
        "inputs; random for made-up numbers.",
    ),
]
Include = Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Only layers whose name matches; repeatable.")]
Exclude = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Leave out layers whose name matches; repeatable.")
]
BatchSize = Annotated[str | None, typer.Option(metavar="N|all", help="Samples in a run; all feeds every input whole.")]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Use the first N samples.")]
Mean = Annotated[str | None, typer.Option(metavar="X[,X,X]", help="Pictures: mean of each channel, of 1.")]
Std = Annotated[str | None, typer.Option(metavar="X[,X,X]", help="Pictures: deviation of each channel.")]
Size = Annotated[int | None, typer.Option(metavar="N", help="Pictures: length of the shorter side.")]
DeviceName = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads; default: all available.")]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory for values between stages (500M, 8G); more goes to a file."),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the random weights.")]
Target = Annotated[float, typer.Option(metavar="X", help="The variance every layer's output is to have.")]
Json = Annotated[bool, typer.Option("--json", help="Print the whole report as JSON on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print every note and each layer's stage.")]
Plot = Annotated[str | None, typer.Option(metavar="FILE", help="Draw the variances of all layers: .png, .svg or .pdf.")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or - for standard input.")]


@app.command()
def init(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="ONNX files, or - for standard input.")],
    data: Sources = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="PATH", help="Where to write; - for standard output."),
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write each model there, under its own name; needed for several."),
    ] = None,
    pre_init: Annotated[
        PreInit, typer.Option(metavar="KIND", help=f"The weights before scaling: {', '.join(PreInit)}.")
    ] = PreInit.ORTHONORMAL,
    rescale: Annotated[
        bool, typer.Option("--rescale/--no-rescale", help="Scale each layer on the data, or stop after --pre-init.")
    ] = True,
    bias: Annotated[Bias, typer.Option(metavar="zero|keep", help="Set biases to zero, or keep them.")] = Bias.ZERO,
    tol: Annotated[
        float, typer.Option(metavar="X", help="Largest deviation of a variance from its target, as a share of it.")
    ] = 0.01,
    max_trials: Annotated[int, typer.Option(metavar="N", help="Trials at most; nearly always one is enough.")] = 10,
    target_variance: Target = 1.0,
    seed: Seed = 0,
    include: Include = None,
    exclude: Exclude = None,
    tied: Annotated[
        Tied,
        typer.Option(metavar="HOW", help="A weight that several layers use: share it, untie (copy) it, or skip them."),
    ] = Tied.SHARE,
    recurrent: Annotated[
        bool, typer.Option("--recurrent", help="Pre-initialize LSTM, GRU and RNN too, gate by gate.")
    ] = False,
    reset_norm: Annotated[
        bool,
        typer.Option("--reset-norm", help="Reset the running statistics of BatchNormalization behind a layer."),
    ] = False,
    batch_size: BatchSize = None,
    limit: Limit = None,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    device: DeviceName = "auto",
    threads: Threads = None,
    memory: Memory = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the initialized tensors alone, too: .safetensors or .npz."),
    ] = None,
    before: Annotated[
        bool, typer.Option("--before", help="Show the variances in the model as given too (one more pass).")
    ] = False,
    plot: Plot = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, write nothing.")] = False,
    json: Json = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Overwrite the output if it exists.")] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Initialize models: orthonormal weights, scaled layer by layer to variance 1 on your data.

    The result is written to MODEL.lsuv.onnx beside the input, unless -o or --output-dir say otherwise.
    """
    with _errors():
        if len(models) > 1:
            for option, given in (("-o", output), ("--weights", weights), ("--plot", plot)):
                if given is not None:
                    raise LsuvError(f"{option} is for one model, {len(models)} were given; use --output-dir")
            if output_dir is None and not dry_run:
                raise LsuvError(f"{len(models)} models were given; say where they go with --output-dir")
        if output is not None and output_dir is not None:
            raise LsuvError("-o and --output-dir both say where to write; give one of them")
        if json and output == "-":
            raise LsuvError("--json and -o - both want standard output; write the model to a file")
        settings: dict[str, Any] = {
            "pre_init": pre_init,
            "rescale": rescale,
            "bias": bias,
            "tol": tol,
            "max_trials": max_trials,
            "target_variance": target_variance,
            "seed": seed,
            "tied": tied,
            "recurrent": recurrent,
            "reset_norm": reset_norm,
            "before": before or plot is not None,
            **_common(include, exclude, batch_size, limit, mean, std, size, device, threads, memory),
        }
        picture = _plot(plot)
        targets = [_target(model, output, output_dir, dry_run) for model in models]
        if output_dir is not None:
            if len(set(targets)) < len(targets):
                raise LsuvError("two of the models have the same file name; --output-dir would mix them up")
            Path(output_dir).mkdir(parents=True, exist_ok=True)
    console = _console(quiet)
    codes: list[int] = []
    reports: list[Any] = []
    for model, target in zip(models, targets, strict=True):
        with _errors(codes if len(models) > 1 else None):
            from lsuv_cli.api import initialize

            source = _model(model)
            with _progress(console, quiet) as listen:
                done = initialize(
                    source,
                    list(data) if data else None,
                    output=None if target == "-" else target,
                    weights=weights,
                    force=force,
                    dry_run=dry_run,
                    listen=listen,
                    **settings,
                )
            if target == "-" and not dry_run:
                assert done.model is not None
                _write_stdout(done.model)
            _tell(done.report, console, quiet=quiet, verbose=verbose)
            if picture is not None:
                _draw({"": done.report}, picture)
            codes.append(int(done.report.exit_code))
            reports.append(done.report)
    if json:
        _print_json(reports[0].to_json() if len(models) == 1 else [report.to_json() for report in reports])
    if len(models) > 1:
        failed = sum(code == ExitCode.BAD_REQUEST for code in codes)
        outside = sum(code == ExitCode.OUTSIDE_TOLERANCE for code in codes)
        done_text = f"{len(models) - failed} of {len(models)} models done"
        console.print(f"{done_text}, {outside} of them outside the tolerance, {failed} failed", soft_wrap=True)
    raise typer.Exit(max(codes))


@app.command()
def inspect(
    model: Model,
    data: Sources = None,
    include: Include = None,
    exclude: Exclude = None,
    batch_size: BatchSize = None,
    limit: Limit = None,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    device: DeviceName = "auto",
    threads: Threads = None,
    memory: Memory = None,
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
) -> None:
    """Show a model's layers, where their weights live and, with data, what they put out."""
    with _errors():
        if json and csv:
            raise LsuvError("--json and --csv both want standard output; give one of them")
        settings = _common(include, exclude, batch_size, limit, mean, std, size, device, threads, memory)
        source = _model(model)
        console = _console(False)
        from lsuv_cli import display
        from lsuv_cli.api import inspect as look

        with _progress(console, json or csv) as listen:
            report = look(source, list(data) if data else None, listen=listen, **settings)
        _warn(report, console)
        if json:
            _print_json(report.to_json())
        elif csv:
            display.write_csv(report, sys.stdout)
        else:
            display.show_layers(report, _console(False, stderr=False))


@app.command()
def check(
    model: Model,
    data: Sources = None,
    tol: Annotated[
        float, typer.Option(metavar="X", help="Largest deviation of a variance from its target, as a share of it.")
    ] = 0.1,
    target_variance: Target = 1.0,
    include: Include = None,
    exclude: Exclude = None,
    batch_size: BatchSize = None,
    limit: Limit = None,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    device: DeviceName = "auto",
    threads: Threads = None,
    memory: Memory = None,
    plot: Plot = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Exit with 0 if every layer's output has variance 1 within the tolerance, with 1 if not."""
    with _errors():
        if not data:
            raise LsuvError("check needs data: give --data")
        settings = _common(include, exclude, batch_size, limit, mean, std, size, device, threads, memory)
        settings |= {"tol": tol, "target_variance": target_variance}
        picture = _plot(plot)
        source = _model(model)
        console = _console(quiet)
        from lsuv_cli import display
        from lsuv_cli.api import measure

        with _progress(console, quiet) as listen:
            report = measure(source, list(data), listen=listen, **settings)
        _warn(report, console)
        if verbose:
            display.show(report, console, verbose=True)
        else:
            display.show_verdict(report, console)
        if picture is not None:
            _draw({"as given": report}, picture)
        if json:
            _print_json(report.to_json())
    raise typer.Exit(int(report.exit_code))


@app.command()
def compare(
    model: Model,
    data: Sources = None,
    inits: Annotated[
        str, typer.Option(metavar="NAME,...", help="What to compare: lsuv, keep (the model as given), or a --pre-init.")
    ] = "lsuv,orthonormal,xavier,msra,keep",
    seed: Seed = 0,
    include: Include = None,
    exclude: Exclude = None,
    batch_size: BatchSize = None,
    limit: Limit = None,
    mean: Mean = None,
    std: Std = None,
    size: Size = None,
    device: DeviceName = "auto",
    threads: Threads = None,
    memory: Memory = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Show weight deviations and output variances under several initializations side by side; nothing is written."""
    with _errors():
        if not data:
            raise LsuvError("compare needs data: give --data")
        settings = _common(include, exclude, batch_size, limit, mean, std, size, device, threads, memory)
        picture = _plot(plot)
        source = _model(model)
        console = _console(False)
        from lsuv_cli import display
        from lsuv_cli.api import compare as side_by_side

        with _progress(console, json) as listen:
            names = [name.strip() for name in inits.split(",") if name.strip()]
            reports = side_by_side(source, list(data), names, listen=listen, seed=seed, **settings)
        _warn(next(iter(reports.values())), console)
        if picture is not None:
            _draw(reports, picture)
        if json:
            found = {name: report.to_json() for name, report in reports.items()}
            _print_json({"schema": "lsuv-comparison/1", "inits": found})
        else:
            display.show_comparison(reports, _console(False, stderr=False))


def _common(
    include: list[str] | None,
    exclude: list[str] | None,
    batch_size: str | None,
    limit: int | None,
    mean: str | None,
    std: str | None,
    size: int | None,
    device: str,
    threads: int | None,
    memory: str | None,
) -> dict[str, Any]:
    """The settings that all commands share."""
    return {
        "include": tuple(include or ()),
        "exclude": tuple(exclude or ()),
        "batch_size": _batch_size(batch_size),
        "limit": limit,
        "mean": _numbers("--mean", mean, (0.0,)),
        "std": _numbers("--std", std, (1.0,)),
        "size": size,
        "device": device,
        "threads": threads,
        "memory": _bytes(memory),
    }


def _tell(report: Any, console: Console, *, quiet: bool, verbose: bool) -> None:
    """Warnings and table for people."""
    if quiet:
        return
    from lsuv_cli import display

    _warn(report, console)
    display.show(report, console, verbose=verbose)


def _warn(report: Any, console: Console) -> None:
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {_escaped(warning)}", soft_wrap=True)


def _print_json(value: Any) -> None:
    import json

    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _plot(path: str | None) -> Path | None:
    if path is None:
        return None
    from lsuv_cli import plot

    return plot.check(path)


def _draw(reports: dict[str, Any], path: Path) -> None:
    """The variances of one run, or of several side by side."""
    from lsuv_cli import plot

    report = next(iter(reports.values()))
    series = (
        plot.of_report(report) if "" in reports else {k: [x.variance for x in r.layers] for k, r in reports.items()}
    )
    chosen = report.settings
    names = [layer.name for layer in report.layers]
    plot.draw(names, series, path, target=chosen["target_variance"], tol=chosen["tol"], title=Path(report.model).name)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _target(model: str, output: str | None, output_dir: str | None, dry_run: bool) -> str | None:
    if output is not None:
        return output
    if output_dir is not None and model != "-":
        return str(Path(output_dir) / Path(model).name)
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


def _numbers(option: str, text: str | None, default: tuple[float, ...]) -> tuple[float, ...]:
    if text is None:
        return default
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise LsuvError(f"{option} {text!r} is not a list of numbers such as 0.485,0.456,0.406") from None


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


def _console(quiet: bool, *, stderr: bool = True) -> Console:
    from rich.console import Console

    # Without a terminal the width is nobody's concern, but a log should stay readable.
    columns = os.environ.get("COLUMNS", "")
    width = None if (sys.stderr if stderr else sys.stdout).isatty() else int(columns) if columns.isdigit() else 100
    return Console(stderr=stderr, highlight=False, quiet=quiet, width=width)


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
def _errors(codes: list[int] | None = None) -> Iterator[None]:
    """One line for a person instead of a traceback; LSUV_DEBUG=1 shows the traceback.

    The exit code ends the program or, where a list is given, is added to it.
    """
    try:
        yield
    except KeyboardInterrupt:
        _complain("interrupted; nothing was written")
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    except Exception as problem:
        if os.environ.get("LSUV_DEBUG"):
            raise
        if isinstance(problem, LsuvError):
            _complain(str(problem))
        elif isinstance(problem, MemoryError):
            _complain("out of memory; use a smaller --batch-size, fewer samples (--limit) or --memory")
        else:
            _complain(f"internal error, please report it ({type(problem).__name__}: {problem}); nothing was written")
        code = int(problem.exit_code if isinstance(problem, LsuvError) else ExitCode.BAD_REQUEST)
        if codes is None:
            raise typer.Exit(code) from None
        codes.append(code)


def _complain(text: str) -> None:
    typer.echo(f"lsuv: {' '.join(text.split())}", err=True)


def main() -> None:
    """The `lsuv` command."""
    # A polite request to stop cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    app()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
