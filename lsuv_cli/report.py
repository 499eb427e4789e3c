"""The report of a run as data: one entry for each node that looks like a layer. `to_json` is the documented schema."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lsuv_cli.details import Details
from lsuv_cli.errors import ExitCode
from lsuv_cli.text import plural, printable

SCHEMA, COMPARISON_SCHEMA = "lsuv-report/1", "lsuv-comparison/1"


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
# What a summary calls the layers of a status.
GOOD = {Status.OK: "within tolerance", Status.PRE_INITIALIZED: "pre-initialized", Status.PLANNED: "to initialize"}
LEFT = (Status.TIED, Status.SKIPPED, Status.EXCLUDED)
COMMANDS = {"measure": "check"}  # where the command's name is another


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
    stage: int | None = None  # from 1
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
class WorkerReport:
    """A worker of the run."""

    host: str
    address: str  # of the host in the Ray cluster
    pid: int
    device: str
    batches: int  # that it had in the end
    data: str = ""  # "read" where it read them from files, "sent" where they were sent to it
    device_reason: str = ""  # why this device there, and why not another


@dataclass(frozen=True, repr=False)
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
    workers: tuple[WorkerReport, ...] = ()  # none where one process did it all
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
    details: Details | None = None  # histograms, channels and the graph's outline, if asked for

    @property
    def exit_code(self) -> ExitCode:
        fine = all(layer.status in FINE for layer in self.layers) and not (self.carried and self.carried.left)
        return ExitCode.DONE if fine and not self.did_nothing else ExitCode.OUTSIDE_TOLERANCE

    @property
    def did_nothing(self) -> bool:
        """Whether layers were to be initialized, and not one was."""
        return self.command == "init" and all(layer.status in LEFT_ALONE for layer in self.layers)

    @property
    def verdict(self) -> str:
        """How many layers ended how."""
        counts = Counter(layer.status for layer in self.layers)
        kinds = {**GOOD, Status.PLANNED: "found"} if self.command == "inspect" else GOOD
        bad = [f"{counts[s]} {s}" for s in Status if counts[s] and s not in FINE]
        judged = sum(counts[s] for s in Status if s not in FINE) + counts[Status.OK]
        good = [f"{plural(counts[s], 'layer')} {text}" for s, text in kinds.items() if counts[s]]
        if bad:
            good = [f"{counts[Status.OK]} of {plural(judged, 'layer')} within tolerance"]
        left = [f"{counts[s]} {s}" for s in LEFT if counts[s]]
        return ", ".join([*good, *left, *bad]) or "no layers"

    @property
    def facts(self) -> str:
        """On what it was done, and how long it took."""
        facts = [plural(self.samples, "sample") if self.samples else ""]
        facts += ["random data" if self.data == "random" else "", self.where]
        facts.append(plural(self.stages, "stage") if self.stages else "")
        facts.append(plural(self.trials, "trial") if self.trials > 1 else "")
        facts.append(f"{self.seconds['total']:.2f} s" if "total" in self.seconds else "")
        return "; ".join(fact for fact in facts if fact)

    @property
    def where(self) -> str:
        """On what it ran: the device, or how many workers on which devices and hosts."""
        if not self.workers:
            return self.device
        hosts = len({worker.host for worker in self.workers})
        each = " each" if len(self.workers) > 1 else ""
        devices = " and ".join(dict.fromkeys(f"{worker.device}{each}" for worker in self.workers))
        on = f" on {plural(hosts, 'host')}" if hosts > 1 else ""
        return f"{plural(len(self.workers), 'worker')}{on}, {devices}"

    def __repr__(self) -> str:
        command = COMMANDS.get(self.command, self.command)
        return f"<Report of lsuv {command} {printable(self.model)}: {self.verdict} ({self.facts})>"

    def _repr_html_(self) -> str:
        """The report in a notebook: a table with bars, and a plot where matplotlib is installed."""
        from lsuv_cli.page import document, notebook

        content = self.to_json()
        return notebook.cells({"": content}, repr(self).strip("<>")) + notebook.plotted(
            document.variances({"": content})
        )

    def to_html(self, command: str = "") -> str:
        """The report as one HTML page, which needs no other file; `command` is the line that repeats the run.

        What the page can show depends on what was measured: plots and the table always; the graph, histograms and
        channels with `details=True`.
        """
        from lsuv_cli.page.document import render

        return render(self.to_json(), command)

    def to_model_explorer(self) -> dict[str, Any]:
        """The variances as node data of Google's Model Explorer, to be saved as JSON and loaded over the graph."""
        from lsuv_cli.page.explorer import node_data

        return node_data(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; NaN and Inf, which JSON does not have, become null."""
        fields = {"schema": SCHEMA, "exit_code": int(self.exit_code), **dataclasses.asdict(self)}
        plain = _plain(fields)
        assert isinstance(plain, dict)
        return plain


@dataclass(frozen=True, repr=False)
class Comparison(Mapping[str, Report]):
    """A report for each of several initializations, by their names."""

    reports: Mapping[str, Report]

    def __getitem__(self, init: str) -> Report:
        return self.reports[init]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    def __repr__(self) -> str:
        first = next(iter(self.values()), None)
        about = f" of {printable(first.model)}, {plural(len(first.layers), 'layer')} ({first.facts})" if first else ""
        return f"<Comparison of {', '.join(self)}{about}>"

    def _repr_html_(self) -> str:
        """The comparison in a notebook: a table with bars, and a plot where matplotlib is installed."""
        from lsuv_cli.page import document, notebook

        inits = self.to_json()["inits"]
        return notebook.cells(inits, repr(self).strip("<>")) + notebook.plotted(document.variances(inits))

    def to_html(self, command: str = "") -> str:
        """The comparison as one HTML page, which needs no other file; `command` is the line that repeats the run."""
        from lsuv_cli.page.document import render

        return render(self.to_json(), command)

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {"schema": COMPARISON_SCHEMA, "inits": {init: report.to_json() for init, report in self.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
