"""The report of a run as data: one entry for each node that looks like a layer. `to_json` is the documented schema."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lsuv_cli.errors import ExitCode

SCHEMA = "lsuv-report/1"


class Status(StrEnum):
    """How a layer ended. All but the first six make the exit code 1."""

    OK = "ok"  # within the tolerance
    PLANNED = "planned"  # a layer that is not judged: --dry-run, inspect
    PRE_INITIALIZED = "pre-init"  # not scaled: --no-rescale, or a recurrent layer
    TIED = "tied"  # shares its weight: outside itself, but the layers that decide the scale are within, pooled
    SKIPPED = "skipped"
    EXCLUDED = "excluded"
    OUTSIDE = "outside"  # outside the tolerance, or optimized and unoptimized runs differ
    DEAD = "dead"  # its output has no variance, or is nothing but rounding
    NOT_FINITE = "non-finite"  # Inf or NaN in its output or weight
    UNREACHABLE = "unreachable"  # the kept bias alone has too much variance
    OVERFLOW = "overflow"  # the scaled weight does not fit its type
    NOT_HOME = "not-home"  # right in the written model, but a tensor of it, or of a layer before it, is not carried


FINE = frozenset({Status.OK, Status.PLANNED, Status.TIED, Status.PRE_INITIALIZED, Status.SKIPPED, Status.EXCLUDED})
LEFT_ALONE = frozenset({Status.SKIPPED, Status.EXCLUDED})


@dataclass(frozen=True)
class ChannelsReport:
    """The channels of a layer's output in the written file, where they were centred or scaled one by one."""

    count: int
    dead: int  # constant, and so not scaled
    largest_mean: float  # of the absolute values
    least_variance: float  # of live channels
    most_variance: float
    least_scale: float | None = None  # None where the layer has one scale
    most_scale: float | None = None


@dataclass(frozen=True)
class LayerReport:
    """One layer, or one node that looks like a layer and was left alone."""

    name: str
    op: str
    status: Status
    module: str = ""  # the PyTorch module that it was exported from
    stage: int | None = None
    weight: str = ""
    shape: tuple[int, ...] = ()
    groups: int = 1
    dtype: str = ""
    place: str = ""
    shared: bool = False
    variance_given: float | None = None  # in the model as given, if asked for
    variance_at_turn: float | None = None  # with the pre-initialized weight and all layers before it scaled
    scale: float | None = None
    target: float | None = None  # the variance that the output is to have
    variance: float | None = None  # in the written file
    variance_home: float | None = None  # in PyTorch, where the network was initialized by lsuv_cli.torch.lsuv_
    mean: float | None = None
    dead: float | None = None  # fraction of the units that are never above zero, where a ReLU follows
    weight_std: float | None = None
    channels: ChannelsReport | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SumReport:
    """A sum of a residual stream and a branch, the k-th of N of its stream."""

    name: str
    stream: int  # its number, from 1
    branch: int  # k
    branches: int  # N
    layer: str = ""  # the last layer of the branch, if there is one
    variance: float | None = None  # of the sum, in the written file or in the model that was looked at
    mean: float | None = None


@dataclass(frozen=True)
class NotCarried:
    """A tensor of the model whose new values are not in the weights file."""

    name: str
    reason: str
    layers: tuple[str, ...] = ()  # names of the layers whose weight or bias it is


@dataclass(frozen=True)
class Carried:
    """How many of the tensors that changed are in the weights file."""

    tensors: int
    total: int
    left: tuple[NotCarried, ...] = ()


@dataclass(frozen=True)
class Report:
    """The whole of one run."""

    command: str
    version: str
    model: str
    layers: tuple[LayerReport, ...]
    output: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    device: str = ""
    device_reason: str = ""  # why this device, and why not another
    data: str = ""
    samples: int = 0
    batches: int = 0
    stages: int = 0
    trials: int = 0
    memory: dict[str, int | None] = field(default_factory=dict)  # bytes expected; null where not known
    sums: tuple[SumReport, ...] = ()
    carried: Carried | None = None  # where the tensors go to a weights file
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        fine = all(layer.status in FINE for layer in self.layers) and not (self.carried and self.carried.left)
        return ExitCode.DONE if fine and not self.did_nothing else ExitCode.OUTSIDE_TOLERANCE

    @property
    def did_nothing(self) -> bool:
        """Whether layers were to be initialized, and not one was."""
        return self.command == "init" and all(layer.status in LEFT_ALONE for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; NaN and Inf, which JSON does not have, become null."""
        fields = {"schema": SCHEMA, "exit_code": int(self.exit_code), **dataclasses.asdict(self)}
        plain = _plain(fields)
        assert isinstance(plain, dict)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
