"""What a user can choose, with defaults and limits. Imports nothing heavy: `lsuv --help` shows it at once."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from lsuv_cli.errors import LsuvError

MOST_THREADS = 256  # or as many as there are cores; each takes a stack and time
MOST_SIZE = 8192  # pixels; an image of that height and width takes 800 MB in float32


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


class Tied(StrEnum):
    """What to do with a weight that several layers share."""

    SHARE = "share"
    UNTIE = "untie"
    SKIP = "skip"


@dataclass(frozen=True)
class Settings:
    """All that can be chosen; each field is an option of the command with the same name."""

    pre_init: PreInit = PreInit.ORTHONORMAL
    rescale: bool = True
    bias: Bias = Bias.ZERO
    tol: float = 0.01
    max_trials: int = 10
    target_variance: float = 1.0
    seed: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    tied: Tied = Tied.SHARE
    recurrent: bool = False
    reset_norm: bool = False
    before: bool = False
    batch_size: int | Literal["all"] | None = None
    limit: int | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    size: int | None = None
    device: str = "auto"
    threads: int | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        for name, most in (
            ("tol", 1),
            ("target_variance", math.inf),
            ("max_trials", 1000),
            ("threads", max(MOST_THREADS, os.cpu_count() or 1)),
            ("size", MOST_SIZE),
        ):
            value = getattr(self, name)
            if value is not None and not (0 < value <= most and math.isfinite(value)):
                limit = f" and at most {most}" if math.isfinite(most) else ""
                raise LsuvError(f"{_option(name)} is {value}; it must be above 0{limit}")
        for name in ("seed", "memory"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise LsuvError(f"{_option(name)} is {value}; it must not be negative")
        # Plain strings and lists are welcome from Python.
        for name, kind in (("pre_init", PreInit), ("bias", Bias), ("tied", Tied)):
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(given))
            except ValueError:
                raise LsuvError(f"{_option(name)} {given!r} is not one of {', '.join(kind)}") from None
        for name in ("include", "exclude"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given))

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise TypeError(f"unknown settings {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
