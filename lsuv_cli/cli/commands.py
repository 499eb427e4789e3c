"""The commands: a thin shell over the Python API. Their options are in options.py, the standard streams in terminal.py.

`init` talks on stderr and leaves stdout to JSON and models. What the others print is what they are asked for: stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsuv_cli.cli import child_process as guard
from lsuv_cli.cli import options as o
from lsuv_cli.cli import terminal
from lsuv_cli.errors import ExitCode, LsuvError
from lsuv_cli.settings import Bias, PreInit, Tied
from lsuv_cli.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from lsuv_cli.report import Report

app = typer.Typer(
    name="lsuv",
    help="Give the weights of any ONNX model a good start: LSUV, layer-sequential unit-variance initialization.",
    rich_markup_mode=None,  # plain help fits 80 columns better than boxes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        terminal.write(f"lsuv {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _lsuv(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        sys.stderr.write(context.get_help() + "\n")
        raise typer.Exit(int(ExitCode.BAD_REQUEST))


@app.command(cls=o.Command, short_help="Initialize models by LSUV, on your data.")
def init(
    models: o.Models,
    data: o.Sources = None,
    output: o.Output = None,
    output_dir: o.OutputDir = None,
    weights: o.Weights = None,
    like: o.Like = None,
    force: o.Force = False,
    dry_run: o.DryRun = False,
    pre_init: o.PreInitKind = PreInit.ORTHONORMAL,
    rescale: o.Rescale = True,
    bias: o.BiasKind = Bias.ZERO,
    tol: o.Tol = 0.01,
    max_trials: o.MaxTrials = 10,
    target_variance: o.Target = 1.0,
    seed: o.Seed = 0,
    include: o.Include = None,
    exclude: o.Exclude = None,
    tied: o.TiedHow = Tied.SHARE,
    recurrent: o.Recurrent = False,
    reset_norm: o.ResetNorm = False,
    batch_size: o.BatchSize = None,
    limit: o.Limit = None,
    mean: o.Mean = None,
    std: o.Std = None,
    size: o.Size = None,
    before: o.Before = False,
    plot: o.Plot = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    device: o.DeviceName = "auto",
    threads: o.Threads = None,
    memory: o.Memory = None,
) -> None:
    """Initialize models: orthonormal weights, scaled layer by layer to variance 1 on your data.

    The result goes to MODEL.lsuv.onnx beside the input, or where -o or --output-dir say.
    """
    with terminal.errors():
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
            **o.common(include, exclude, batch_size, limit, mean, std, size, device, threads, memory),
        }
        if json and output == "-":
            raise LsuvError("--json and -o - both want standard output; write the model to a file")
        if like is not None and weights is None:
            raise LsuvError("--like needs --weights, the file to write the changed checkpoint to")
        _for_one_model(models, {"-o": output, "--weights": weights, "--plot": plot})
        targets = _targets(models, output, output_dir, dry_run)
        picture = _plot(plot)
    console = terminal.console(quiet=quiet)
    several = len(models) > 1
    reports: list[dict[str, Any]] = []
    for model, target in zip(models, targets, strict=True):

        def failed(code: int, text: str, model: str = model) -> None:
            terminal.complain(text if model in text else f"{model}: {text}")
            reports.append({"schema": "lsuv-error/1", "exit_code": code, "model": model, "error": text})

        so_far = f"{len(reports)} of {len(models)} models were done" if several else "nothing was written"
        with terminal.errors(failed if several else None, so_far):
            from lsuv_cli.api import initialize

            with terminal.progress(console, not quiet) as listen:
                done = initialize(
                    _source(model),
                    list(data) if data else None,
                    output=None if target == "-" else target,
                    weights=weights,
                    like=like,
                    force=force,
                    dry_run=dry_run,
                    listen=listen,
                    **settings,
                )
            if target == "-" and not dry_run:
                terminal.write_bytes(done.to_bytes())
            _tell(done.report, console, verbose=verbose)
            if picture is not None:
                _draw({"": done.report}, picture)
            for also in (None if dry_run else weights, picture):
                if also is not None:
                    console.print(f"wrote {also}", soft_wrap=True, markup=False)
            reports.append(done.report.to_json())
    codes = [report["exit_code"] for report in reports]
    if json:
        _print_json(reports if several else reports[0])
    if several:
        wrong, outside = codes.count(ExitCode.BAD_REQUEST), codes.count(ExitCode.OUTSIDE_TOLERANCE)
        text = f"{len(models) - wrong} of {len(models)} models done"
        console.print(f"{text}, {outside} of them with layers outside the tolerance, {wrong} failed", soft_wrap=True)
    raise typer.Exit(max(codes))


@app.command(cls=o.Command, short_help="Show a model's layers and what they put out.")
def inspect(
    model: o.Model,
    data: o.Sources = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    batch_size: o.BatchSize = None,
    limit: o.Limit = None,
    mean: o.Mean = None,
    std: o.Std = None,
    size: o.Size = None,
    seed: o.Seed = 0,
    json: o.Json = False,
    csv: o.Csv = False,
    device: o.DeviceName = "auto",
    threads: o.Threads = None,
    memory: o.Memory = None,
) -> None:
    """Show a model's layers, where their weights live and, with data, what they put out."""
    with terminal.errors():
        if json and csv:
            raise LsuvError("--json and --csv both want standard output; give one of them")
        settings = o.common(include, exclude, batch_size, limit, mean, std, size, device, threads, memory)
        console = terminal.console()
        from lsuv_cli.api import inspect as look
        from lsuv_cli.cli import display

        with terminal.progress(console, not (json or csv)) as listen:
            report = look(_source(model), list(data) if data else None, listen=listen, seed=seed, **settings)
        _warn(report, console)
        if json:
            _print_json(report.to_json())
        elif csv:
            terminal.write(display.as_csv(report))
        else:
            display.show_layers(report, terminal.console(stderr=False))


@app.command(cls=o.Command, short_help="Is every output's variance near 1? For CI.")
def check(
    model: o.Model,
    data: o.Sources = None,
    tol: o.Tol = 0.1,
    target_variance: o.Target = 1.0,
    seed: o.Seed = 0,
    include: o.Include = None,
    exclude: o.Exclude = None,
    batch_size: o.BatchSize = None,
    limit: o.Limit = None,
    mean: o.Mean = None,
    std: o.Std = None,
    size: o.Size = None,
    plot: o.Plot = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
    device: o.DeviceName = "auto",
    threads: o.Threads = None,
    memory: o.Memory = None,
) -> None:
    """Exit with 0 if every layer's output has variance 1 within the tolerance, with 1 if not."""
    with terminal.errors():
        if not data:
            raise LsuvError("check needs data: give --data")
        settings = o.common(include, exclude, batch_size, limit, mean, std, size, device, threads, memory)
        settings |= {"tol": tol, "target_variance": target_variance, "seed": seed}
        picture = _plot(plot)
        console = terminal.console(quiet=quiet)
        from lsuv_cli.api import measure
        from lsuv_cli.cli import display

        with terminal.progress(console, not quiet) as listen:
            report = measure(_source(model), list(data), listen=listen, **settings)
        _warn(report, console)
        if picture is not None:
            _draw({"": report}, picture)
        if json:
            _print_json(report.to_json())
        else:
            display.show_verdict(report, terminal.console(stderr=False, quiet=quiet), verbose=verbose)
    raise typer.Exit(int(report.exit_code))


@app.command(cls=o.Command, short_help="Show initializations side by side.")
def compare(
    model: o.Model,
    data: o.Sources = None,
    inits: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="What to compare: lsuv, keep (the model as given), or a --pre-init of lsuv init, unscaled.",
        ),
    ] = "lsuv,orthonormal,xavier,msra,keep",
    seed: o.Seed = 0,
    include: o.Include = None,
    exclude: o.Exclude = None,
    batch_size: o.BatchSize = None,
    limit: o.Limit = None,
    mean: o.Mean = None,
    std: o.Std = None,
    size: o.Size = None,
    plot: o.Plot = None,
    json: o.Json = False,
    device: o.DeviceName = "auto",
    threads: o.Threads = None,
    memory: o.Memory = None,
) -> None:
    """Show weights and output variances under several initializations side by side; writes nothing."""
    with terminal.errors():
        if not data:
            raise LsuvError("compare needs data: give --data")
        settings = o.common(include, exclude, batch_size, limit, mean, std, size, device, threads, memory)
        picture = _plot(plot)
        console = terminal.console()
        from lsuv_cli.api import compare as side_by_side
        from lsuv_cli.cli import display

        with terminal.progress(console, not json) as listen:
            names = [name.strip() for name in inits.split(",") if name.strip()]
            reports = side_by_side(_source(model), list(data), names, listen=listen, seed=seed, **settings)
        _warn(next(iter(reports.values())), console)
        if picture is not None:
            _draw(reports, picture)
        if json:
            found = {name: report.to_json() for name, report in reports.items()}
            _print_json({"schema": "lsuv-comparison/1", "inits": found})
        else:
            display.show_comparison(reports, terminal.console(stderr=False))


def _for_one_model(models: list[str], given: dict[str, str | None]) -> None:
    for option, value in given.items():
        if len(models) > 1 and value is not None:
            raise LsuvError(f"{option} is for one model, {len(models)} were given; use --output-dir")


def _targets(models: list[str], output: str | None, output_dir: str | None, dry_run: bool) -> list[str | None]:
    """Where each model is written: None for nowhere, - for standard output."""
    if output is not None and output_dir is not None:
        raise LsuvError("-o and --output-dir both say where to write; give one of them")
    if output is not None:
        return [output]
    if dry_run:
        return [None] * len(models)
    if "-" in models:
        raise LsuvError("the model comes from standard input: say where to write it with -o PATH, or -o -")
    if output_dir is None:
        if len(models) > 1:
            raise LsuvError(f"{len(models)} models were given; say where they go with --output-dir")
        path = Path(models[0])
        return [str(path.with_name(f"{path.name.removesuffix('.onnx')}.lsuv.onnx"))]
    targets = [Path(output_dir) / Path(model).name for model in models]
    if len(set(targets)) < len(targets):
        raise LsuvError("two of the models have the same file name; in --output-dir one would overwrite the other")
    inputs = {Path(model).resolve() for model in models}
    if mine := next((target for target in targets if target.resolve() in inputs), None):
        raise LsuvError(f"--output-dir {output_dir} would overwrite {mine}, an input; give another directory")
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise LsuvError(f"--output-dir {output_dir} cannot be made: {problem.strerror}") from None
    return [str(target) for target in targets]


def _source(model: str) -> str | bytes:
    return terminal.read_bytes() if model == "-" else model


def _tell(report: Report, console: Console, *, verbose: bool) -> None:
    """Warnings and table for people."""
    from lsuv_cli.cli import display

    _warn(report, console)
    display.show(report, console, verbose=verbose)


def _warn(report: Report, console: Console) -> None:
    from rich.markup import escape

    for warning in report.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)


def _print_json(value: Any) -> None:
    import json

    terminal.write(json.dumps(value, indent=2) + "\n")


def _plot(path: str | None) -> Path | None:
    if path is None:
        return None
    from lsuv_cli.cli import plot

    return plot.check(path)


def _draw(reports: dict[str, Report], path: Path) -> None:
    """The variances of one run, or of several side by side."""
    from lsuv_cli.cli import plot

    report = next(iter(reports.values()))
    series = plot.of_report(report) if "" in reports else plot.of_comparison(reports)
    chosen = report.settings
    names = [layer.name for layer in report.layers]
    plot.draw(names, series, path, target=chosen["target_variance"], tol=chosen["tol"], title=Path(report.model).name)


def main(args: Sequence[str] | None = None) -> None:
    """The `lsuv` command as it is typed, or with the given words and in the caller's process."""
    terminal.make_whole()
    if args is None:
        guard.run(lambda: _run(None), terminal.complain)
    else:
        _run(args)


def _run(args: Sequence[str] | None) -> None:
    try:
        code = app(args, prog_name="lsuv", standalone_mode=False)
    except Exception as problem:
        # Click's errors have no name that holds in every version of typer.
        if not hasattr(problem, "format_message"):
            raise
        context = getattr(problem, "ctx", None)
        text = problem.format_message().rstrip(".").replace("Error: ", "")
        terminal.complain(f"{text}; see {context.command_path if context else 'lsuv'} --help")
        code = int(ExitCode.BAD_REQUEST)
    sys.exit(code or 0)
