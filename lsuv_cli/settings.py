"""What a user can choose: each setting's type, default, limits and one line of help.

Imports nothing heavy: `lsuv --help` shows it at once.

A new setting goes here and nowhere else: a field in `Settings` and its keyword in `SettingsDict` (a test compares the
two). From the field follow the command's option, its help and its place there (cli/options.py), the keyword of the
Python functions and its line in their docstrings (api.py), and the table in docs/python.md (docs/generate.py). A
setting of the groups DATA and RUN is for all commands; another one is for `init` and `compare`, unless INSPECT or JUDGE
names it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, TypedDict, cast, get_args, get_type_hints

from lsuv_cli import setting_values as readers
from lsuv_cli.setting_values import About
from lsuv_cli.target_variances import TargetVariances

MOST_THREADS = max(256, os.cpu_count() or 1)  # each thread takes a stack and time to start
MOST_WORKERS = 1024
MOST_SIZE = 8192  # pixels; an image of that height and width takes 800 MB in float32

ONE = TargetVariances()


class PreInit(StrEnum):
    """The weights before scaling."""

    ORTHONORMAL = "orthonormal"
    GAUSSIAN = "gaussian"
    XAVIER = "xavier"
    MSRA = "msra"
    ORTHONORMAL_MSRA = "orthonormal-msra"
    KEEP = "keep"


class Bias(StrEnum):
    """What becomes of a layer's bias."""

    ZERO = "zero"
    KEEP = "keep"
    CENTER = "center"


class Scale(StrEnum):
    """How many scales a layer has."""

    LAYER = "layer"
    CHANNEL = "channel"


class Residual(StrEnum):
    """What becomes of the variance of a residual stream."""

    KEEP = "keep"
    BOUNDED = "bounded"


class Tied(StrEnum):
    """What to do with a weight that several layers share."""

    SHARE = "share"
    UNTIE = "untie"
    SKIP = "skip"


PreInitName = Literal["orthonormal", "gaussian", "xavier", "msra", "orthonormal-msra", "keep"]
BiasName = Literal["zero", "keep", "center"]
ScaleName = Literal["layer", "channel"]
ResidualName = Literal["keep", "bounded"]
TiedName = Literal["share", "untie", "skip"]

# The groups of settings, in the order in which help shows them.
METHOD, WHICH, DATA, SHOW, RUN = "Method", "Which layers", "How data is read", "What to show", "Where it runs"
GROUPS = (METHOD, WHICH, DATA, SHOW, RUN)

CHECK_TOL = 0.1
"""The default tolerance of `measure` and `lsuv check`: the data may be other samples than those of `init`."""


class SettingsDict(TypedDict, total=False):
    """The settings as keywords of the Python functions, with all types that `Settings` accepts and converts."""

    pre_init: PreInit | PreInitName
    rescale: bool
    bias: Bias | BiasName
    scale: Scale | ScaleName
    tol: float
    max_trials: int
    target_variance: float | str | Sequence[float | str] | Mapping[str, float] | TargetVariances
    residual: Residual | ResidualName
    seed: int
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    tied: Tied | TiedName
    recurrent: bool
    reset_norm: bool
    before: bool
    batch_size: int | Literal["all"] | None
    limit: int | None
    mean: float | str | Sequence[float]
    std: float | str | Sequence[float]
    size: int | None
    input_shapes: str | Sequence[str] | Mapping[str, Sequence[int]]
    val_range: str | Sequence[str] | Mapping[str, Sequence[float]]
    device: str
    threads: int | None
    memory: int | str | None
    workers: int | str | None


@dataclass(frozen=True)
class Settings:
    """All that can be chosen, checked; each field is an option of the command with the same name.

    Plain strings, lists and numpy's numbers are welcome: `Settings(pre_init="keep", exclude="fc*", memory="8G")`.
    """

    pre_init: Annotated[
        PreInit, About(readers.one_of(PreInit), METHOD, "KIND", f"The weights before scaling: {', '.join(PreInit)}.")
    ] = PreInit.ORTHONORMAL
    rescale: Annotated[bool, About(readers.flag, METHOD, "", "Scale each layer on the data, or stop before that.")] = (
        True
    )
    bias: Annotated[
        Bias,
        About(
            readers.one_of(Bias),
            METHOD,
            "zero|keep|center",
            "Set biases to zero, keep them, or let them take away the mean of each channel.",
        ),
    ] = Bias.ZERO
    scale: Annotated[
        Scale,
        About(
            readers.one_of(Scale),
            METHOD,
            "layer|channel",
            "One scale for a layer, or one for each of its output channels.",
        ),
    ] = Scale.LAYER
    tol: Annotated[
        float, About(readers.number, METHOD, "X", "Relative tolerance: |variance / target - 1|.", above=0, most=1)
    ] = 0.01
    max_trials: Annotated[
        int, About(readers.whole, METHOD, "N", "Trials at most; nearly always one is enough.", above=0, most=1000)
    ] = 10
    target_variance: Annotated[
        TargetVariances,
        About(
            readers.targets,
            METHOD,
            "[GLOB=]X",
            "The variance of every layer's output, 1 if not given; GLOB=X for layers whose name matches.",
            above=0,
            repeatable=True,
        ),
    ] = ONE
    residual: Annotated[
        Residual,
        About(
            readers.one_of(Residual),
            METHOD,
            "keep|bounded",
            "Residual sums: every branch at its target, or the stream's variance bounded by smaller targets.",
        ),
    ] = Residual.KEEP
    seed: Annotated[int, About(readers.whole, METHOD, "N", "Seed of the random numbers.", least=0)] = 0
    include: Annotated[
        tuple[str, ...], About(readers.patterns, WHICH, "GLOB", "Only layers whose name matches.", repeatable=True)
    ] = ()
    exclude: Annotated[
        tuple[str, ...], About(readers.patterns, WHICH, "GLOB", "Leave out layers whose name matches.", repeatable=True)
    ] = ()
    tied: Annotated[
        Tied,
        About(
            readers.one_of(Tied),
            WHICH,
            "share|untie|skip",
            "A weight that several layers use: one scale for all, a copy for each, or leave it alone.",
        ),
    ] = Tied.SHARE
    recurrent: Annotated[
        bool, About(readers.flag, WHICH, "", "Pre-initialize LSTM, GRU and RNN too, gate by gate.")
    ] = False
    reset_norm: Annotated[
        bool, About(readers.flag, WHICH, "", "Reset the statistics of BatchNormalization right behind a layer.")
    ] = False
    before: Annotated[
        bool, About(readers.flag, SHOW, "", "The variances in the model as given too (one more pass).")
    ] = False
    batch_size: Annotated[
        int | Literal["all"] | None,
        About(readers.batch_size, DATA, "N|all", "Samples in a run; all feeds every input whole.", text_too=True),
    ] = None
    limit: Annotated[
        int | None, About(readers.optional(readers.whole), DATA, "N", "Use the first N samples.", above=0)
    ] = None
    mean: Annotated[
        tuple[float, ...],
        About(readers.numbers_of, DATA, "X[,X,X]", "Images: subtract this from each channel, 0 to 1.", text_too=True),
    ] = (0.0,)
    std: Annotated[
        tuple[float, ...], About(readers.numbers_of, DATA, "X[,X,X]", "Images: then divide by this.", text_too=True)
    ] = (1.0,)
    size: Annotated[
        int | None,
        About(
            readers.optional(readers.whole),
            DATA,
            "N",
            "Images: resize the shorter side to N, then crop the middle.",
            above=0,
            most=MOST_SIZE,
        ),
    ] = None
    input_shapes: Annotated[
        tuple[str, ...],
        About(
            readers.named_lists(readers.is_shape, "a name and its lengths, each 1 or more, such as x:[1,3,224,224]"),
            DATA,
            "NAME:[N,...]",
            "Random data: the shape of an input in one run.",
            repeatable=True,
        ),
    ] = ()
    val_range: Annotated[
        tuple[str, ...],
        About(
            readers.named_lists(readers.is_range, "a name and two numbers, the smaller one first, such as x:[0,1]"),
            DATA,
            "NAME:[X,X]",
            "Random data: uniform numbers from X to X, not normal ones.",
            repeatable=True,
        ),
    ] = ()
    device: Annotated[
        str, About(readers.text, RUN, "DEVICE", "auto, cpu, cuda[:N] or webgpu[:N]; auto is CUDA, else the CPU.")
    ] = "auto"
    threads: Annotated[
        int | None,
        About(readers.optional(readers.whole), RUN, "N", "CPU threads; all, if not given.", above=0, most=MOST_THREADS),
    ] = None
    memory: Annotated[
        int | None,
        About(
            readers.optional(readers.bytes_of),
            RUN,
            "SIZE",
            "Memory for values between stages, such as 8G; more goes to a file.",
            least=0,
            text_too=True,
        ),
    ] = None
    workers: Annotated[
        int | str | None,
        About(
            readers.optional(readers.workers),
            RUN,
            "N|auto|ray://HOST:PORT",
            "Work in N processes on this machine, or on a Ray cluster; needs the extra ray.",
            least=1,
            most=MOST_WORKERS,
            text_too=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, about in ABOUT.items():
            object.__setattr__(self, name, about.value(name, getattr(self, name)))

    @classmethod
    def of(cls, given: SettingsDict) -> Settings:
        """`Settings` from keywords; a TypeError for an unknown keyword."""
        unknown = sorted(set(given) - set(ABOUT))
        if unknown:
            raise TypeError(f"unknown settings {', '.join(unknown)}; there are {', '.join(sorted(ABOUT))}")
        return cls(**cast(Mapping[str, Any], given))  # reads the wider types of SettingsDict

    def keywords(self) -> SettingsDict:
        """The settings as keywords: `initialize(model, data, **settings.keywords())`."""
        return cast(SettingsDict, {name: getattr(self, name) for name in ABOUT})

    def to_json(self) -> dict[str, Any]:
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        return {**plain, "target_variance": self.target_variance.to_json()}


ABOUT: Mapping[str, About] = {k: get_args(hint)[1] for k, hint in get_type_hints(Settings, include_extras=True).items()}
"""What is to be known about each setting, by its name, in the order of the fields."""

INSPECT = tuple(k for k, about in ABOUT.items() if k in {"seed", "include", "exclude"} or about.group in {DATA, RUN})
"""The settings that matter where a model is only looked at."""
COMPARE = tuple(name for name in ABOUT if name in {"target_variance", *INSPECT})
"""The settings that `lsuv compare` has options for."""
JUDGE = tuple(name for name in ABOUT if name in {"tol", "target_variance", *INSPECT})
"""The settings that matter where a model is looked at and judged."""
EXAMINE = ("device", "threads")
"""The settings that matter where a device is examined."""
