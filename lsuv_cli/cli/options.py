"""The options of the commands: what each is called, what its help says, and how its text becomes a value.

Imports nothing heavy: `lsuv --help` and the shell's completion must be quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lsuv_cli.errors import LsuvError
from lsuv_cli.settings import Bias, PreInit, Tied

DATA, HOW, WHICH, SHOW, RUN = "How data is read", "Method", "Which layers", "What to show", "Where it runs"


class Command(TyperCommand):
    """A command whose help is plain text, its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options group by group; those of no group come first."""
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
        found = (param.metavar or "" for param in self.get_params(ctx) if param.param_type_name == "argument")
        return ["[OPTIONS]", *found]


def _option(*names: str, group: str | None = None, **rest: Any) -> Any:
    return typer.Option(*names, rich_help_panel=group, **rest)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or - for standard input.")]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="ONNX files, or - for standard input.")]

Sources = Annotated[
    list[str] | None,
    _option(
        "--data",
        metavar="[NAME=]PATH",
        help="Calibration data: .npy, .npz, or a directory of them or of JPEG and PNG pictures. NAME=PATH, repeated, "
        "for several inputs. random: made-up numbers.",
    ),
]
BatchSize = Annotated[
    str | None, _option(group=DATA, metavar="N|all", help="Samples in a run; all feeds every input whole.")
]
Limit = Annotated[int | None, _option(group=DATA, metavar="N", help="Use the first N samples.")]
Mean = Annotated[
    str | None,
    _option(group=DATA, metavar="X[,X,X]", help="Pictures: subtract this from each channel, 0 to 1."),
]
Std = Annotated[str | None, _option(group=DATA, metavar="X[,X,X]", help="Pictures: then divide by this.")]
Size = Annotated[
    int | None,
    _option(group=DATA, metavar="N", help="Pictures: resize the shorter side to N, then crop the middle."),
]

Output = Annotated[str | None, _option("--output", "-o", metavar="PATH", help="Where to write; - for standard output.")]
OutputDir = Annotated[
    str | None, _option(metavar="DIR", help="Write each model there, under its own name; needed for several.")
]
Force = Annotated[bool, _option("--force", "-f", help="Overwrite files that exist.")]
DryRun = Annotated[bool, _option("--dry-run", help="Show the plan, write nothing.")]
Weights = Annotated[
    str | None,
    _option(metavar="FILE", help="Write the initialized tensors to a file of their own too: .safetensors or .npz."),
]
Like = Annotated[
    str | None,
    _option(metavar="FILE", help="The network's checkpoint as exported: --weights is then that checkpoint, changed."),
]

PreInitKind = Annotated[
    PreInit, _option(group=HOW, metavar="KIND", help=f"The weights before scaling: {', '.join(PreInit)}.")
]
Rescale = Annotated[
    bool, _option("--rescale/--no-rescale", group=HOW, help="Scale each layer on the data, or stop before that.")
]
BiasKind = Annotated[Bias, _option(group=HOW, metavar="zero|keep", help="Set biases to zero, or keep them.")]
Tol = Annotated[
    float, _option(group=HOW, metavar="X", help="How far a variance may be from its target, as a share of it.")
]
MaxTrials = Annotated[int, _option(group=HOW, metavar="N", help="Trials at most; nearly always one is enough.")]
Target = Annotated[float, _option(group=HOW, metavar="X", help="The variance every layer's output is to have.")]
Seed = Annotated[int, _option(group=HOW, metavar="N", help="Seed of the random numbers.")]

Include = Annotated[
    list[str] | None, _option(group=WHICH, metavar="GLOB", help="Only layers whose name matches; repeatable.")
]
Exclude = Annotated[
    list[str] | None, _option(group=WHICH, metavar="GLOB", help="Leave out layers whose name matches; repeatable.")
]
TiedHow = Annotated[
    Tied,
    _option(
        group=WHICH,
        metavar="share|untie|skip",
        help="A weight that several layers use: one scale for all, a copy for each, or leave it alone.",
    ),
]
Recurrent = Annotated[
    bool, _option("--recurrent", group=WHICH, help="Pre-initialize LSTM, GRU and RNN too, gate by gate.")
]
ResetNorm = Annotated[
    bool,
    _option("--reset-norm", group=WHICH, help="Reset the statistics of BatchNormalization right behind a layer."),
]

Before = Annotated[
    bool, _option("--before", group=SHOW, help="The variances in the model as given too (one more pass).")
]
Plot = Annotated[
    str | None, _option(group=SHOW, metavar="FILE", help="Draw the variances of all layers: .png, .svg or .pdf.")
]
Json = Annotated[bool, _option("--json", group=SHOW, help="The whole report as JSON on standard output.")]
Csv = Annotated[bool, _option("--csv", group=SHOW, help="The table as CSV on standard output.")]
Quiet = Annotated[bool, _option("--quiet", "-q", group=SHOW, help="Only errors.")]
Verbose = Annotated[bool, _option("--verbose", "-v", group=SHOW, help="Every layer, its stage and every note.")]

DeviceName = Annotated[str, _option(group=RUN, metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, _option(group=RUN, metavar="N", help="CPU threads; all, if not given.")]
Memory = Annotated[
    str | None,
    _option(group=RUN, metavar="SIZE", help="Memory for values between stages, such as 8G; more goes to a file."),
]


def common(
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
        "mean": tuple(_numbers("--mean", mean)) if mean is not None else (0.0,),
        "std": tuple(_numbers("--std", std)) if std is not None else (1.0,),
        "size": size,
        "device": device,
        "threads": threads,
        "memory": _bytes(memory) if memory is not None else None,
    }


def _numbers(option: str, text: str) -> Iterator[float]:
    for part in text.split(","):
        try:
            yield float(part)
        except ValueError:
            raise LsuvError(f"{option} {text!r} is not a list of numbers such as 0.485,0.456,0.406") from None


def _batch_size(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise LsuvError(f"--batch-size {text!r} is not a positive number or all")
    return int(text)


def _bytes(text: str) -> int:
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
