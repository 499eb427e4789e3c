"""The commands: a thin shell over the Python API. Their options are in options.py, the standard streams in terminal.py.

`init` prints its table on stderr and leaves stdout to JSON and models. The other commands print results on stdout.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsuv_cli import outputs
from lsuv_cli.cli import options as o
from lsuv_cli.cli import several, terminal, wording
from lsuv_cli.cli.pictures import Pictures
from lsuv_cli.errors import ExitCode, LsuvError
from lsuv_cli.outputs import Target
from lsuv_cli.progress import Listener
from lsuv_cli.spool import Spool
from lsuv_cli.text import printable
from lsuv_cli.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from lsuv_cli.report import Report

typed: list[str] = []  # the words of the command that runs, for a page that says how to repeat it

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
@o.spread
def init(
    *, models: o.Models, data: o.Sources = None, writing: o.Writing, settings: o.AllSettings, showing: o.Showing
) -> None:
    """Initialize models: orthonormal weights, scaled layer by layer to variance 1 on your data.

    The result goes to MODEL.lsuv.onnx beside the input, or where -o or --output-dir say.
    """
    with contextlib.ExitStack() as stack:
        with terminal.errors():
            if showing.json and writing.output == "-":
                raise LsuvError("--json and -o - both want standard output; write the model to a file")
            if writing.like is not None and writing.weights is None:
                raise LsuvError("--like needs --weights, the file to write the changed checkpoint to")
            _check_streams(models, data)
            _for_one_model(models, {"-o": writing.output}, "use --output-dir")
            _for_one_model(models, {"--weights": writing.weights, **showing.drawn}, "give one model at a time")
            targets = _targets(models, writing)
            if not writing.dry_run:
                _make_directory(writing.output_dir, stack)
            pictures = Pictures.check(showing.drawn)
        if pictures:
            settings = dataclasses.replace(settings, before=True)
        if len(models) > 1:
            code = _each(models, data, targets, writing, settings, showing)
        else:
            code = _one(models[0], data, targets[0], writing, settings, (showing, pictures))
    raise typer.Exit(code)


def _one(
    model: str,
    data: list[str] | None,
    target: str | None,
    writing: o.Writing,
    settings: o.AllSettings,
    shown: tuple[o.Showing, Pictures],
) -> int:
    """Initialize one model and tell the result. Returns the exit code."""
    showing, pictures = shown
    console = terminal.console(quiet=showing.quiet)
    with terminal.errors(publication_is_all=not (showing.json or pictures)):
        with terminal.progress(console, not showing.quiet) as listen:
            report = _initialized(model, data, target, writing, settings, (listen, pictures))
        report = wording.report_as_typed(report)
        _tell(report, console, verbose=showing.verbose)
        pictures.draw(report, typed)
        for also in (None if writing.dry_run else writing.weights, *pictures.drawn.values()):
            if also is not None:
                _wrote(str(also), console)
    if showing.json:
        weights = writing.weights if report.output else None
        written = [file for file in (report.output, weights, *pictures.drawn.values()) if file is not None]
        with terminal.after_writing(written):
            _print_json(report.to_json())
    return int(report.exit_code)


def _each(
    models: list[str],
    data: list[str] | None,
    targets: list[str | None],
    writing: o.Writing,
    settings: o.AllSettings,
    showing: o.Showing,
) -> int:
    """Initialize several models, print a table for each as it ends, and a summary. Returns the exit code."""
    console = terminal.console(quiet=showing.quiet)

    def initialized(index: int) -> Report:
        with terminal.progress(console, not showing.quiet) as listen:
            return _initialized(models[index], data, targets[index], writing, settings, (listen, Pictures()))

    reports: dict[int, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        outcomes = several.one_by_one(len(models), initialized)
        if settings.workers is not None:
            listen = stack.enter_context(terminal.progress(console, not showing.quiet))
            outcomes = several.at_once(models, data, targets, writing, settings, listen)
        while len(reports) < len(models):
            so_far = f"{len(reports)} of {len(models)} models were done"
            with terminal.errors(None, so_far):
                index, outcome = next(outcomes)

            def failed(code: int, text: str, index: int = index) -> None:
                model, text = models[index], wording.of_a_list(text)
                terminal.complain(text if model in text else f"{model}: {text}")
                reports[index] = {"schema": "lsuv-error/1", "exit_code": code, "model": model, "error": text}

            with terminal.errors(failed, so_far):
                report = wording.report_as_typed(outcome())
                place = targets[index] if report.output is not None else None
                report = dataclasses.replace(report, model=models[index], output=place)
                _tell(report, console, verbose=showing.verbose)
                reports[index] = report.to_json()
        next(outcomes, None)  # to its end
    listed = [reports[index] for index in range(len(models))]
    if showing.json:
        with terminal.after_writing([report["output"] for report in listed if report.get("output")]):
            _print_json(listed)
    return _summed_up([report["exit_code"] for report in listed], console)


def _initialized(
    model: str,
    data: list[str] | None,
    target: str | None,
    writing: o.Writing,
    settings: o.AllSettings,
    watching: tuple[Listener, Pictures],
) -> Report:
    """Initialize one model; send it to standard output if that is its target."""
    with terminal.imports():
        from lsuv_cli.api import initialize

    listen, pictures = watching
    done = initialize(
        _source(model),
        data or None,
        output=None if target == "-" else target,
        weights=writing.weights,
        like=writing.like,
        force=writing.force,
        dry_run=writing.dry_run,
        without_weights=writing.without_weights,
        listen=listen,
        drawn=pictures.drawn,
        details=pictures.details,
        **settings.keywords(),
    )
    if target == "-" and not writing.dry_run:
        terminal.write_model(done.chunks())
    return done.report


def _summed_up(codes: list[int], console: Console) -> int:
    """The exit code for all models together; prints a summary if there are several models."""
    if len(codes) > 1:
        wrong, outside = codes.count(ExitCode.BAD_REQUEST), codes.count(ExitCode.OUTSIDE_TOLERANCE)
        text = f"{len(codes) - wrong} of {len(codes)} models done"
        console.print(f"{text}, {outside} of them with layers outside the tolerance, {wrong} failed", soft_wrap=True)
    return max(codes)


@app.command(cls=o.Command, short_help="Show a model's layers and what they put out.")
@o.spread
def inspect(*, model: o.Model, data: o.Sources = None, settings: o.InspectSettings, showing: o.ShowingInspect) -> None:
    """Show a model's layers, where their weights live and, with data, what they put out."""
    with terminal.errors():
        if showing.json and showing.csv:
            raise LsuvError("--json and --csv both want standard output; give one of them")
        _check_streams([model], data)
        pictures = Pictures.check(showing.drawn)
        console = terminal.console()
        with terminal.imports():
            from lsuv_cli import api
        from lsuv_cli.cli import display

        with terminal.progress(console, not (showing.json or showing.csv)) as listen:
            report = api.inspect(
                _source(model), data or None, dump=showing.dump, listen=listen, **pictures.wanted, **settings.keywords()
            )
        report = wording.report_as_typed(report)
        _warn(report, console)
        pictures.draw(report, typed)
        dumped = [] if showing.dump is None else [showing.dump]
        with terminal.after_writing([*pictures.drawn.values(), *dumped]):
            if showing.json:
                _print_json(report.to_json())
            elif showing.csv:
                terminal.write(display.as_csv(report))
            else:
                display.show_layers(report, terminal.console(stderr=False))
                terminal.finish()
        for also in (*dumped, *pictures.drawn.values()):
            _wrote(str(also), console)


@app.command(cls=o.Command, short_help="Write the model with its layers' outputs as outputs.")
@o.spread
def expose(
    *, model: o.Model, output: o.Output, include: o.Include = None, exclude: o.Exclude = None, force: o.Force = False
) -> None:
    """Write the model with its layers' outputs as graph outputs: typed, in order, under their own names.

    For those who look into a network with tools of their own. Weights and all else are as they were.
    """
    with terminal.errors():
        console = terminal.console()
        with terminal.imports():
            from lsuv_cli import api

        place = None if output == "-" else output
        done = api.expose(_source(model), place, include=include or (), exclude=exclude or (), force=force)
        if output == "-":
            terminal.write_model(done.chunks())
        _warn_of(done.warnings, console)
        for layer, name in done.outputs.items():
            console.print(printable(f"{layer}: {name}"), soft_wrap=True, markup=False)
        _wrote(output, console)


@app.command(cls=o.Command, short_help="Is every output's variance near 1? For CI.")
@o.spread
def check(*, model: o.Model, data: o.Sources = None, settings: o.JudgeSettings, showing: o.Showing) -> None:
    """Exit with 0 if every layer's output has variance 1 within the tolerance, with 1 if not."""
    with terminal.errors():
        if not data:
            raise LsuvError("check needs data: give --data")
        _check_streams([model], data)
        pictures = Pictures.check(showing.drawn)
        console = terminal.console(quiet=showing.quiet)
        with terminal.imports():
            from lsuv_cli import api
        from lsuv_cli.cli import display

        with terminal.progress(console, not showing.quiet) as listen:
            report = api.measure(_source(model), data, listen=listen, **pictures.wanted, **settings.keywords())
        report = wording.report_as_typed(report)
        _warn(report, console)
        pictures.draw(report, typed)
        with terminal.after_writing(pictures.drawn.values()):
            if showing.json:
                _print_json(report.to_json())
            else:
                table = terminal.console(stderr=False, quiet=showing.quiet)
                display.show_verdict(report, table, verbose=showing.verbose)
                terminal.finish()
        for drawn in pictures.drawn.values():
            _wrote(str(drawn), console)
    raise typer.Exit(int(report.exit_code))


@app.command(cls=o.Command, short_help="Show initializations side by side.")
@o.spread
def compare(
    *,
    model: o.Model,
    data: o.Sources = None,
    inits: o.Inits = "lsuv,orthonormal,xavier,msra,keep",
    settings: o.CompareSettings,
    plot: o.Plot = None,
    html: o.Html = None,
    json: o.Json = False,
) -> None:
    """Show weights and output variances under several initializations side by side; writes nothing."""
    with terminal.errors():
        if not data:
            raise LsuvError("compare needs data: give --data")
        _check_streams([model], data)
        pictures = Pictures.check({"--plot": plot, "--html": html})
        console = terminal.console()
        with terminal.imports():
            from lsuv_cli import api
        from lsuv_cli.cli import display
        from lsuv_cli.report import Comparison

        with terminal.progress(console, not json) as listen:
            measured = api.compare(_source(model), data, inits, listen=listen, **pictures.wanted, **settings.keywords())
        reports = Comparison({name: wording.report_as_typed(report) for name, report in measured.items()})
        _warn(next(iter(reports.values())), console)
        pictures.draw(reports, typed)
        with terminal.after_writing(pictures.drawn.values()):
            if json:
                _print_json(reports.to_json())
            else:
                display.show_comparison(reports, terminal.console(stderr=False))
                terminal.finish()
        for drawn in pictures.drawn.values():
            _wrote(str(drawn), console)


@app.command(cls=o.Command, short_help="Write the model without its weights.")
@o.spread
def strip(
    *, model: o.Model, output: o.Output, keep: o.Keep = None, larger_than: o.LargerThan = 1, force: o.Force = False
) -> None:
    """Write the model without its weights: names, types, shapes and roles, kilobytes for gigabytes.

    lsuv init gives such a file weights again, with any data or with --data random.
    """
    with terminal.errors():
        console = terminal.console()
        with terminal.imports():
            from lsuv_cli import api

        place = None if output == "-" else output
        done = api.strip(_source(model), place, keep=keep or (), larger_than=larger_than, force=force)
        content = done.to_bytes()
        if output == "-":
            terminal.write_model([content])
        _warn_of(done.warnings, console)
        kept = f", {len(done.kept)} kept" if done.kept else ""
        console.print(f"{len(done.roles)} tensors of {done.bytes:,} bytes stripped{kept}; {len(content):,} bytes left")
        _wrote(output, console)


@app.command(cls=o.Command, short_help="Does a device compute what the CPU does?")
@o.spread
def doctor(*, settings: o.ExamineSettings, json: o.Json = False) -> None:
    """Tell what a device has, and try it in every type against the CPU; exit with 1 if something is off."""
    with terminal.errors():
        console = terminal.console()
        with terminal.imports():
            from lsuv_cli import api
        from lsuv_cli.cli import bedside

        with terminal.progress(console, not json) as listen:
            found = wording.diagnosis_as_typed(api.doctor(listen=listen, **settings.keywords()))
        if json:
            _print_json(found.to_json())
        else:
            terminal.write(bedside.block(found))
    raise typer.Exit(int(found.exit_code))


def _for_one_model(models: list[str], given: dict[str, str | None], instead: str) -> None:
    for option, value in given.items():
        if len(models) > 1 and value is not None:
            raise LsuvError(f"{option} is for one model, {len(models)} were given; {instead}")


def _targets(models: list[str], writing: o.Writing) -> list[str | None]:
    """Where each model is written: None for nowhere, - for standard output."""
    output, output_dir = writing.output, writing.output_dir
    if output is not None and output_dir is not None:
        raise LsuvError("-o and --output-dir both say where to write; give one of them")
    if output is not None:
        return [output]
    if writing.dry_run:
        return [None] * len(models)
    if "-" in models:
        raise LsuvError("the model comes from standard input: say where to write it with -o PATH, or -o -")
    if output_dir is None:
        if len(models) > 1:
            raise LsuvError(f"{len(models)} models were given; say where they go with --output-dir")
        path = Path(models[0])
        if not path.name:  # "", . and /
            raise LsuvError(f"{models[0] or repr('')} is no file; give an ONNX file")
        return [str(path.with_name(f"{path.name.removesuffix('.onnx')}.lsuv.onnx"))]
    targets = [Path(output_dir) / Path(model).name for model in models]
    if len(set(targets)) < len(targets):
        raise LsuvError("two of the models have the same file name; in --output-dir one would overwrite the other")
    # Each model is checked against its own output later; all outputs against all models only here.
    outputs.check_apart([Target("--output-dir", path, path) for path in targets], models)
    return [str(target) for target in targets]


def _make_directory(output_dir: str | None, stack: contextlib.ExitStack) -> None:
    """Make the directory for outputs; if nothing is written there, it is gone again when the command ends."""
    if output_dir is None:
        return
    try:
        stack.enter_context(outputs.directory(Path(output_dir)))
    except OSError as problem:
        raise LsuvError(f"--output-dir {output_dir} cannot be made: {problem.strerror}") from None


def _check_streams(models: Sequence[str], data: Sequence[str] | None) -> None:
    """A pipe can be read once: by one model, and not for the model and the data both."""
    if not data or (len(models) == 1 and models != ["-"]):
        return
    from lsuv_cli.api import is_stream

    paths = [Path(text) for source in data for text in (source, source.rpartition("=")[2])]
    if "-" in models and "-" in map(str, paths):
        raise LsuvError("the model and the data both are to come from standard input; give one of them as a file")
    if len(models) > 1 and any(map(is_stream, paths)):
        raise LsuvError(f"data from a pipe can be read once, and {len(models)} models were given; give a file")


def _source(model: str) -> str | Spool | bytes:
    return terminal.model_from_stdin() if model == "-" else model


def _tell(report: Report, console: Console, *, verbose: bool) -> None:
    """Print the warnings and the table for people."""
    from lsuv_cli.cli import display

    _warn(report, console)
    display.show(report, console, verbose=verbose)


def _wrote(output: str, console: Console) -> None:
    if output != "-":
        console.print(f"wrote {printable(output)}", soft_wrap=True, markup=False)


def _warn(report: Report, console: Console) -> None:
    _warn_of(report.warnings, console)


def _warn_of(warnings: Sequence[str], console: Console) -> None:
    from rich.markup import escape

    for warning in map(wording.as_typed, warnings):
        console.print(f"[yellow]warning:[/] {escape(terminal.shortened(warning))}", soft_wrap=True)


def _print_json(value: Any) -> None:
    import json

    terminal.write(json.dumps(value, indent=2) + "\n")


def _app_for(words: Sequence[str]) -> typer.Typer:
    """The app with the one command that these words begin with, because typer takes time for each; else all of it."""
    asked = [known for known in app.registered_commands if known.callback and known.callback.__name__ in words[:1]]
    if not asked:
        return app
    chosen = copy.copy(app)
    chosen.registered_commands = asked
    return chosen


def run(args: Sequence[str] | None) -> None:
    """Run the command with these arguments, or with the process's own; ends by SystemExit."""
    typed[:] = sys.argv[1:] if args is None else args
    try:
        code = _app_for(typed)(args, prog_name="lsuv", standalone_mode=False)
        terminal.finish()
    except (terminal.Unwritable, OSError) as problem:  # typer prints help and completion itself, and that may fail
        if os.environ.get("LSUV_DEBUG"):
            raise
        terminal.hush()
        reason = getattr(problem, "strerror", None)
        terminal.complain(f"standard output cannot be written: {reason}" if reason else str(problem))
        code = int(ExitCode.BAD_REQUEST)
    except Exception as problem:  # the class of click's errors differs between versions of typer
        if not hasattr(problem, "format_message"):
            raise
        context = getattr(problem, "ctx", None)
        text = problem.format_message().rstrip(".").replace("Error: ", "")
        terminal.complain(f"{text}; see {context.command_path if context else 'lsuv'} --help")
        code = int(ExitCode.BAD_REQUEST)
    sys.exit(code or 0)
