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
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, TypedDict, TypeVar, cast, get_args, get_type_hints

from lsuv_cli import target_variances
from lsuv_cli.errors import LsuvError
from lsuv_cli.target_variances import TargetVariances

MOST_THREADS = max(256, os.cpu_count() or 1)  # each thread takes a stack and time to start
MOST_WORKERS = 1024
MOST_SIZE = 8192  # pixels; an image of that height and width takes 800 MB in float32
MOST_DIGITS = 18  # digits of a number of samples

ONE = TargetVariances()

T = TypeVar("T")
Kind = TypeVar("Kind", bound=StrEnum)


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


class Unfit(Exception):
    """A setting does not take a value; the message says which values it takes."""


@dataclass(frozen=True)
class About:
    """How a setting's value is read, its group, how help shows the value, one line of help, and the limits."""

    read: Callable[[Any], object]
    group: str
    metavar: str
    help: str
    above: float | None = None
    least: float | None = None
    most: float = math.inf
    repeatable: bool = False  # the command takes it several times, and `read` all of them as a list
    text_too: bool = False  # `read` also parses text (8G, all, 0.5,0.5), so the command passes it unparsed

    def value(self, name: str, given: object) -> object:
        """The value as `Settings` holds it, or an error that names the setting."""
        try:
            value = self.read(given)
        except Unfit as problem:
            raise LsuvError(f"`{name}` {given!r} is not {problem}") from None
        if isinstance(value, TargetVariances):
            for number in value.values:
                self._check_limits(name, number)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._check_limits(name, value)
        return value

    def _check_limits(self, name: str, value: float) -> None:
        below = (self.above is not None and not value > self.above) or (self.least is not None and value < self.least)
        if below or not value <= self.most or not math.isfinite(value):
            lower = f"above {self.above}" if self.above is not None else f"at least {self.least}"
            upper = (
                f" and at most {self.most}" if self.most < math.inf else "" if math.isfinite(value) else " and finite"
            )
            raise LsuvError(f"`{name}` is {value}; it must be {lower}{upper}")


def _flag(given: object) -> bool:
    if not isinstance(given, bool):
        raise Unfit("True or False")
    return given


def _whole(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):  # numpy's integers are welcome
        raise Unfit("a whole number")
    return int(given)


def _number(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise Unfit("a number")
    return float(given)


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise Unfit("a string")
    return given


def _optional(read: Callable[[object], T]) -> Callable[[object], T | None]:
    return lambda given: None if given is None else read(given)


def _one_of(kind: type[Kind]) -> Callable[[str], Kind]:
    def read(given: str) -> Kind:
        try:
            return kind(given)
        except ValueError:
            raise Unfit(f"one of {', '.join(kind)}") from None

    return read


def _patterns(given: object) -> tuple[str, ...]:
    """A sequence of patterns; a single string is one pattern."""
    items = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(item, str) for item in items):
        raise Unfit("a pattern or a list of patterns")
    return items


def _numbers(given: object) -> tuple[float, ...]:
    """One number for all channels, or one for each; as text with commas too."""
    items: Iterable[Any] = (given,)
    if isinstance(given, str | Iterable):
        items = given.split(",") if isinstance(given, str) else given
    try:
        return tuple(float(item) for item in items)
    except (TypeError, ValueError):
        raise Unfit("a list of numbers such as 0.485,0.456,0.406") from None


NAMED_LIST = re.compile(r"(?:(?P<name>.*):)?\[(?P<numbers>[^\[\]]*)\]", re.DOTALL)


def named_list(text: str) -> tuple[str, tuple[float, ...]]:
    """NAME:[1,3,224,224] in its two parts; the name is empty where there is none."""
    match = NAMED_LIST.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return match["name"] or "", tuple(float(number) for number in match["numbers"].split(",") if number.strip())


def _named_lists(check: Callable[[tuple[float, ...]], bool], example: str) -> Callable[[object], tuple[str, ...]]:
    """Reads texts NAME:[...], or a mapping of names to lists, to texts of one form; `check` tells a good list."""

    def read(given: object) -> tuple[str, ...]:
        items = [given] if isinstance(given, str) else given
        if isinstance(given, Mapping):
            items = [f"{name}:{list(numbers)}" for name, numbers in given.items()]
        try:
            named = [named_list(item) for item in cast(Iterable[str], items)]
        except (TypeError, ValueError):
            raise Unfit(f"a list of the form {example}") from None
        if not all(check(numbers) for _, numbers in named):
            raise Unfit(f"a list of the form {example}")
        return tuple(f"{name}:[{','.join(f'{x:.17g}' for x in numbers)}]".removeprefix(":") for name, numbers in named)

    return read


def _is_shape(numbers: tuple[float, ...]) -> bool:
    return all(number >= 1 and number == int(number) for number in numbers if math.isfinite(number)) and all(
        map(math.isfinite, numbers)
    )


def _is_range(numbers: tuple[float, ...]) -> bool:
    return len(numbers) == 2 and all(map(math.isfinite, numbers)) and numbers[0] <= numbers[1]


def _batch_size(given: object) -> int | Literal["all"] | None:
    if given is None or given == "all":
        return given
    if isinstance(given, str) and given.isdecimal() and len(given) <= MOST_DIGITS:
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < 1:
        raise Unfit("a positive number or all")
    return int(given)


def _targets(given: object) -> TargetVariances:
    try:
        return target_variances.read(given)
    except ValueError:
        raise Unfit(target_variances.FORMS) from None


def _workers(given: object) -> int | str:
    """A number of workers on this machine, or where a Ray cluster is."""
    if isinstance(given, str) and given.isdecimal() and len(given) <= MOST_DIGITS:
        given = int(given)
    if isinstance(given, str) and (given == "auto" or re.fullmatch(r"ray://[^/\s]+:\d{1,5}", given)):
        return given
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < 1:
        raise Unfit("a positive number, auto, or ray://HOST:PORT")
    return int(given)


def _bytes(given: object) -> int:
    """A number of bytes, or a text such as 8G."""
    if not isinstance(given, str):
        return _whole(given)
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number = given.upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in units else ""
    try:
        size = int(float(number.removesuffix(unit)) * units[unit])
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise Unfit("a size such as 500M or 8G")
    return size


@dataclass(frozen=True)
class Settings:
    """All that can be chosen, checked; each field is an option of the command with the same name.

    Plain strings, lists and numpy's numbers are welcome: `Settings(pre_init="keep", exclude="fc*", memory="8G")`.
    """

    pre_init: Annotated[
        PreInit, About(_one_of(PreInit), METHOD, "KIND", f"The weights before scaling: {', '.join(PreInit)}.")
    ] = PreInit.ORTHONORMAL
    rescale: Annotated[bool, About(_flag, METHOD, "", "Scale each layer on the data, or stop before that.")] = True
    bias: Annotated[
        Bias,
        About(
            _one_of(Bias),
            METHOD,
            "zero|keep|center",
            "Set biases to zero, keep them, or let them take away the mean of each channel.",
        ),
    ] = Bias.ZERO
    scale: Annotated[
        Scale,
        About(
            _one_of(Scale), METHOD, "layer|channel", "One scale for a layer, or one for each of its output channels."
        ),
    ] = Scale.LAYER
    tol: Annotated[
        float, About(_number, METHOD, "X", "Relative tolerance: |variance / target - 1|.", above=0, most=1)
    ] = 0.01
    max_trials: Annotated[
        int, About(_whole, METHOD, "N", "Trials at most; nearly always one is enough.", above=0, most=1000)
    ] = 10
    target_variance: Annotated[
        TargetVariances,
        About(
            _targets,
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
            _one_of(Residual),
            METHOD,
            "keep|bounded",
            "Residual sums: every branch at its target, or the stream's variance bounded by smaller targets.",
        ),
    ] = Residual.KEEP
    seed: Annotated[int, About(_whole, METHOD, "N", "Seed of the random numbers.", least=0)] = 0
    include: Annotated[
        tuple[str, ...], About(_patterns, WHICH, "GLOB", "Only layers whose name matches.", repeatable=True)
    ] = ()
    exclude: Annotated[
        tuple[str, ...], About(_patterns, WHICH, "GLOB", "Leave out layers whose name matches.", repeatable=True)
    ] = ()
    tied: Annotated[
        Tied,
        About(
            _one_of(Tied),
            WHICH,
            "share|untie|skip",
            "A weight that several layers use: one scale for all, a copy for each, or leave it alone.",
        ),
    ] = Tied.SHARE
    recurrent: Annotated[bool, About(_flag, WHICH, "", "Pre-initialize LSTM, GRU and RNN too, gate by gate.")] = False
    reset_norm: Annotated[
        bool, About(_flag, WHICH, "", "Reset the statistics of BatchNormalization right behind a layer.")
    ] = False
    before: Annotated[bool, About(_flag, SHOW, "", "The variances in the model as given too (one more pass).")] = False
    batch_size: Annotated[
        int | Literal["all"] | None,
        About(_batch_size, DATA, "N|all", "Samples in a run; all feeds every input whole.", text_too=True),
    ] = None
    limit: Annotated[int | None, About(_optional(_whole), DATA, "N", "Use the first N samples.", above=0)] = None
    mean: Annotated[
        tuple[float, ...],
        About(_numbers, DATA, "X[,X,X]", "Images: subtract this from each channel, 0 to 1.", text_too=True),
    ] = (0.0,)
    std: Annotated[
        tuple[float, ...], About(_numbers, DATA, "X[,X,X]", "Images: then divide by this.", text_too=True)
    ] = (1.0,)
    size: Annotated[
        int | None,
        About(
            _optional(_whole),
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
            _named_lists(_is_shape, "x:[1,3,224,224]"),
            DATA,
            "NAME:[N,...]",
            "Random data: the shape of an input in one run.",
            repeatable=True,
        ),
    ] = ()
    val_range: Annotated[
        tuple[str, ...],
        About(
            _named_lists(_is_range, "x:[0,1]"),
            DATA,
            "NAME:[X,X]",
            "Random data: uniform numbers from X to X, not normal ones.",
            repeatable=True,
        ),
    ] = ()
    device: Annotated[
        str, About(_text, RUN, "DEVICE", "auto, cpu, cuda[:N] or webgpu[:N]; auto is CUDA, else the CPU.")
    ] = "auto"
    threads: Annotated[
        int | None, About(_optional(_whole), RUN, "N", "CPU threads; all, if not given.", above=0, most=MOST_THREADS)
    ] = None
    memory: Annotated[
        int | None,
        About(
            _optional(_bytes),
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
            _optional(_workers),
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
