"""The options of the commands: what each is called, what its help says, and how all of them become typed values.

An option that is a setting is not stated here: it follows from the field of `Settings` (settings.py says how to add
one). The others are below: a field of `Writing` or `Showing`, or a type of its own where few commands have it.
`spread` puts the fields of such dataclasses into a command's signature and hands it the dataclasses.

Imports nothing heavy: `lsuv --help` and the shell's completion must be quick.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from lsuv_cli.cli import terminal
from lsuv_cli.cli.wording import flag
from lsuv_cli.settings import ABOUT, CHECK_TOL, COMPARE, EXAMINE, GROUPS, INSPECT, JUDGE, SHOW, Settings


class Command(TyperCommand):
    """A command whose help is plain text, its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options group by group; options without a group come first."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                groups.setdefault("Arguments", []).append((param.metavar or "", getattr(param, "help", "") or ""))
            elif (record := param.get_help_record(ctx)) is not None:
                groups.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`lsuv init [OPTIONS] MODEL...`, however typer would write it."""
        arguments = (param.metavar or "" for param in self.get_params(ctx) if param.param_type_name == "argument")
        return ["[OPTIONS]", *arguments]


def _option(*names: str, group: str | None = None, **rest: Any) -> Any:
    return typer.Option(*names, rich_help_panel=group, **rest)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or - for standard input.")]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="ONNX files, or - for standard input.")]

Sources = Annotated[
    list[str] | None,
    _option(
        "--data",
        metavar="[NAME=]PATH",
        help="Calibration data: .npy, .npz, .safetensors, onnx's test data, JPEG or PNG, or a directory of them; - for "
        "standard input. NAME=PATH, repeated, for several inputs; NAME=16000 for a number that is the same in every "
        "run. LOADER.py[:FUNCTION]: your own code that yields dicts of arrays. random: random numbers.",
    ),
]
Inits = Annotated[
    str,
    _option(
        metavar="NAME,...",
        help="What to compare: lsuv; lsuv with options, as in lsuv+center, lsuv+channel, lsuv+bounded or "
        "lsuv+center+channel; keep (the model as given); or a --pre-init of lsuv init, unscaled.",
    ),
]
Plot = Annotated[
    str | None, _option(group=SHOW, metavar="FILE", help="Draw the variances of all layers: .png, .svg or .pdf.")
]
Html = Annotated[
    str | None, _option("--html", group=SHOW, metavar="FILE", help="A page with plots, graph, table and every number.")
]
Explorer = Annotated[
    str | None,
    _option(
        "--model-explorer",
        group=SHOW,
        metavar="FILE",
        help="The variances as node data (.json) for Google's Model Explorer.",
    ),
]
Dump = Annotated[
    str | None,
    _option(
        "--dump", metavar="DIR", help="Write every layer's values on the data into a new directory, as .npy files."
    ),
]
Output = Annotated[str, _option("--output", "-o", metavar="PATH", help="Where to write; - for standard output.")]
Include = Annotated[
    list[str] | None, _option("--include", metavar="GLOB", help="Only layers whose name matches; repeatable.")
]
Exclude = Annotated[
    list[str] | None, _option("--exclude", metavar="GLOB", help="Leave out layers whose name matches; repeatable.")
]
Keep = Annotated[
    list[str] | None,
    _option("--keep", metavar="GLOB", help="Keep tensors whose name matches; repeatable."),
]
LargerThan = Annotated[int, _option("--larger-than", metavar="N", help="Keep tensors of N values and fewer.")]
Force = Annotated[bool, _option("--force", "-f", help="Overwrite files that exist.")]
Json = Annotated[bool, _option("--json", group=SHOW, help="The whole report as JSON on standard output.")]
Csv = Annotated[bool, _option("--csv", group=SHOW, help="The table as CSV on standard output.")]


@dataclass(frozen=True)
class Writing:
    """What `init` writes, and where."""

    output: Annotated[
        str | None, _option("--output", "-o", metavar="PATH", help="Where to write; - for standard output.")
    ] = None
    output_dir: Annotated[
        str | None, _option(metavar="DIR", help="Write each model there, under its own name; needed for several.")
    ] = None
    weights: Annotated[
        str | None,
        _option(metavar="FILE", help="Write the initialized tensors to a file of their own too: .safetensors or .npz."),
    ] = None
    like: Annotated[
        str | None,
        _option(
            metavar="FILE", help="The network's checkpoint as exported: --weights is then that checkpoint, changed."
        ),
    ] = None
    force: Annotated[bool, _option("--force", "-f", help="Overwrite files that exist.")] = False
    dry_run: Annotated[bool, _option("--dry-run", help="Show the plan, and write no model.")] = False
    without_weights: Annotated[
        bool, _option("--without-weights", help="Make up tensors whose data file is missing, by their role.")
    ] = False


@dataclass(frozen=True)
class Showing:
    """What `init` and `check` print and draw."""

    plot: Plot = None
    html: Html = None
    model_explorer: Explorer = None
    json: Json = False
    quiet: Annotated[bool, _option("--quiet", "-q", group=SHOW, help="Only errors.")] = False
    verbose: Annotated[bool, _option("--verbose", "-v", group=SHOW, help="Every layer, its stage and every note.")] = (
        False
    )

    @property
    def drawn(self) -> dict[str, str | None]:
        """Option -> the file to draw, if any."""
        return {"--plot": self.plot, "--html": self.html, "--model-explorer": self.model_explorer}


@dataclass(frozen=True)
class ShowingInspect:
    """What `inspect` writes, prints and draws."""

    dump: Dump = None
    html: Html = None
    model_explorer: Explorer = None
    json: Json = False
    csv: Csv = False

    @property
    def drawn(self) -> dict[str, str | None]:
        """Option -> the file to draw, if any."""
        return {"--html": self.html, "--model-explorer": self.model_explorer}


@dataclass(frozen=True)
class Offer:
    """The settings that a command has options for, and its own defaults where they differ from those of `Settings`."""

    names: Sequence[str] = tuple(ABOUT)
    defaults: Mapping[str, object] = field(default_factory=dict)


AllSettings = Annotated[Settings, Offer()]
InspectSettings = Annotated[Settings, Offer(INSPECT)]
ExamineSettings = Annotated[Settings, Offer(EXAMINE)]
CompareSettings = Annotated[Settings, Offer(COMPARE)]
JudgeSettings = Annotated[Settings, Offer(JUDGE, {"tol": CHECK_TOL})]


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: in place of each parameter that is a dataclass, an option for each of its fields.

    All options stand in the order of their groups.
    """
    parameters: list[inspect.Parameter] = []
    made: dict[str, tuple[Callable[..., object], list[str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = get_args(parameter.annotation)[0] if get_origin(parameter.annotation) else parameter.annotation
        if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
            parameters.append(parameter)
            continue
        options = list(_settings(parameter.annotation) if kind is Settings else _fields(kind))
        made[parameter.name] = kind, [option.name for option in options]
        parameters += options
    parameters.sort(key=_place)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        with terminal.errors():
            values = {
                # An option that was not given leaves the field its default.
                name: kind(**{key: given[key] for key in keys if given[key] is not None})
                for name, (kind, keys) in made.items()
            }
        spent = {key for _, keys in made.values() for key in keys}
        command(**{key: value for key, value in given.items() if key not in spent}, **values)

    signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _fields(kind: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for each in dataclasses.fields(kind):
        yield _parameter(each.name, hints[each.name], each.default)


def _settings(annotation: Any) -> Iterator[inspect.Parameter]:
    """An option for each setting that a command offers."""
    _, offer = get_args(annotation)
    hints = get_type_hints(Settings)
    for name in offer.names:
        about, hint, default = ABOUT[name], hints[name], offer.defaults.get(name, getattr(Settings, name))
        names, text = [flag(name)], about.help
        if hint is bool and default:
            names = [f"{flag(name)}/{flag(name, on=False)}"]
        elif about.repeatable:
            hint, default, text = list[str] | None, None, f"{text.removesuffix('.')}; repeatable."
        elif about.text_too:
            hint, default = str | None, None
        option = _option(*names, group=about.group, metavar=about.metavar or None, help=text)
        yield _parameter(name, Annotated[hint, option], default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _place(parameter: inspect.Parameter) -> int:
    """The rank of an option's group in the help; arguments and options without a group come first."""
    _, about = get_args(parameter.annotation)
    return GROUPS.index(about.rich_help_panel) + 1 if about.rich_help_panel else 0
