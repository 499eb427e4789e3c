"""The report as a person sees it: a table that fits the terminal, and one line that sums up."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from lsuv_cli.cli import tables
from lsuv_cli.cli.tables import Column
from lsuv_cli.cli.terminal import shortened
from lsuv_cli.labels import elided, label
from lsuv_cli.memory import amount
from lsuv_cli.report import FINE, GOOD, LEFT, Carried, LayerReport, Report, Status
from lsuv_cli.settings import Residual
from lsuv_cli.text import decades, number, plural, printable

TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
PLACES = {"initializer": "init", "constant": "const", "folded": "fold", "external": "ext"}
BAR = 4  # cells on each side of the middle; each is a factor of 10 in variance
RIGHT = 0.05  # decades from the target within which a variance is green and has no bar
WIDE = 100  # columns of a terminal that has room for bars beside everything else
NAMED = 3  # most tensors that the summary names for each reason

Layers = Sequence[LayerReport]


def show(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print the table, the notes below it, and the summary."""
    layers = report.layers
    columns = [
        *_head(layers),
        Column("given", [_variance(layer.variance_given, _target(layer)) for layer in layers]),
        _numbers("at turn", layers, lambda layer: layer.variance_at_turn),
        _numbers("scale", layers, lambda layer: layer.scale),
        Column("variance", [_variance(layer.variance, _target(layer)) for layer in layers]),
        *_targets(layers),
        Column("channels", [_channels(layer) for layer in layers]),
        _numbers("std w", layers, lambda layer: layer.weight_std),
    ]
    if verbose or any(layer.status is Status.PLANNED for layer in layers):
        columns.append(_stages(layers))
    if console.is_terminal:
        columns.append(_bars(layers))
    _print(layers, [*columns, _statuses(layers)], console)
    _explain(report, console, verbose)
    if report.settings.get("residual") == Residual.BOUNDED:  # a page has them always
        _show_sums({"variance": report}, console)
    console.print(summary(report))
    if verbose and report.device_reason:
        console.print(Text(f"device: {report.device} ({shortened(report.device_reason)})"), soft_wrap=True)
    for k, worker in enumerate(report.workers if verbose else (), 1):
        where = f"{worker.host} {worker.address}".strip()
        what = f"{worker.batches} batch{'es' if worker.batches != 1 else ''} {worker.data}".strip()
        reason = worker.device_reason if worker.device_reason != report.device_reason else ""
        device = f"{worker.device} ({shortened(reason)})" if reason else worker.device
        line = f"worker {k}: {where}, process {worker.pid}; {device}; {what}"
        console.print(Text(printable(line)), soft_wrap=True)
    if report.carried is not None:
        left = report.carried.left
        console.print(Text(carried(report.carried), style="bold red" if left else ""), soft_wrap=True)
    if report.output:
        console.print(f"wrote {printable(report.output)}", soft_wrap=True, markup=False)


def show_layers(report: Report, console: Console) -> None:
    """What `inspect` prints: where weights live and, with data, what layers put out."""
    layers = report.layers
    columns = [
        *_head(layers),
        _stages(layers),
        Column("groups", [str(layer.groups) if layer.groups > 1 else "" for layer in layers]),
        Column("type", [TYPES.get(layer.dtype, layer.dtype) for layer in layers], rank=1),
        Column("in", [PLACES.get(layer.place, "") + ("*" if layer.shared else "") for layer in layers], left=True),
        _numbers("std w", layers, lambda layer: layer.weight_std),
        _numbers("mean", layers, lambda layer: layer.mean),
        Column("variance", [_variance(layer.variance, 1.0) for layer in layers]),
        Column("dead", [f"{layer.dead:.0%}" if layer.dead is not None else "" for layer in layers]),
    ]
    if console.is_terminal and console.width >= WIDE:
        columns.append(_bars(layers))
    _print(layers, columns, console)
    if any(layer.shared for layer in layers):
        console.print("  * shared by several layers", style="dim")
    _explain(report, console, verbose=False)
    _show_sums({"variance": report}, console)
    console.print(summary(report))


def show_verdict(report: Report, console: Console, *, verbose: bool = False, count: int = 5) -> None:
    """What `check` prints: the worst layers, if there are bad ones, and the summary."""
    if verbose:
        show(report, console, verbose=True)
        return
    bad = [layer for layer in report.layers if layer.status not in FINE]
    bad.sort(key=lambda layer: _distance(layer.variance, _target(layer)), reverse=True)
    worst = bad[:count]
    if worst:
        variances = Column("variance", [_variance(layer.variance, _target(layer)) for layer in worst])
        columns = [*_head(worst), variances, *_targets(worst)]
        if console.is_terminal:
            columns.append(_bars(worst))
        _print(worst, [*columns, _statuses(worst)], console)
    if len(bad) > count:
        console.print(f"and {len(bad) - count} more; -v shows all")
    console.print(summary(report))


def show_comparison(reports: Mapping[str, Report], console: Console) -> None:
    """The paper's tables on the user's own network."""
    first = next(iter(reports.values()))
    console.print("standard deviation of the weight", style="bold")
    deviations = [_numbers(init, report.layers, lambda layer: layer.weight_std) for init, report in reports.items()]
    _print(first.layers, [*_head(first.layers), *deviations], console)
    console.print("\nvariance of the output", style="bold")
    variances = [
        Column(init, [_variance(layer.variance, _target(layer)) for layer in report.layers])
        for init, report in reports.items()
    ]
    _print(first.layers, [*_head(first.layers), *variances], console)
    _explain(first, console, verbose=False)
    _show_sums(reports, console)
    console.print(f"\n{first.facts}")


def _show_sums(reports: Mapping[str, Report], console: Console) -> None:
    """The variance of each residual sum, a column for each report."""
    sums = next(iter(reports.values())).sums
    if not any(entry.variance is not None for report in reports.values() for entry in report.sums):
        return
    console.print("\nvariance of the residual stream at each sum", style="bold")
    columns = [
        Column("stream", [str(entry.stream) for entry in sums]),
        Column("branch", [f"{entry.branch}/{entry.branches}" for entry in sums]),
        Column("last layer", [entry.layer for entry in sums], left=True, rank=1),
        *(Column(title, [number(entry.variance) for entry in report.sums]) for title, report in reports.items()),
    ]
    for line in tables.lines([entry.name for entry in sums], columns, console.width, title="sum"):
        console.print(line, soft_wrap=True)
    console.print("")


def as_csv(report: Report) -> str:
    """Every fact about every layer, one line each."""
    names = list(LayerReport.__dataclass_fields__)
    rows: list[Sequence[object]] = [names]
    for entry in report.to_json()["layers"]:
        cells = {**entry, "shape": "x".join(map(str, entry["shape"])), "notes": "; ".join(entry["notes"])}
        rows.append(["" if cells[name] is None else cells[name] for name in names])
    return "".join(map(_csv_line, rows))


def _csv_line(cells: Sequence[object]) -> str:
    """A CSV line that ends in \\n. csv quotes \\n and \\r in names because its line terminator holds both."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\r\n").writerow(cells)
    return stream.getvalue().removesuffix("\r\n") + "\n"


def summary(report: Report) -> Text:
    """What was done, on what, and how long it took."""
    bad = any(layer.status not in FINE for layer in report.layers)
    text = Text(report.verdict, style="bold red" if bad else "bold")
    text.append(f" ({report.facts})", style="not bold")
    if report.memory:
        expected = ", ".join(
            f"{name.replace('_', ' ')} {'unknown' if size is None else amount(size)}"
            for name, size in report.memory.items()
        )
        text.append(f"\nmemory expected: {expected}", style="not bold")
    return text


def carried(account: Carried) -> str:
    """Which of the changed tensors are in the weights file."""
    text = f"carried {account.tensors} of {plural(account.total, 'tensor')}"
    if not account.left:
        return text
    about: dict[str, list[str]] = {}
    for item in account.left:
        about.setdefault(item.reason, []).append(item.name)
    return f"{text}; {len(account.left)} could not be carried: {'; '.join(_named(*item) for item in about.items())}"


def _named(reason: str, names: Sequence[str]) -> str:
    """A few of the tensors that share a reason, and the reason once."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more} ({reason})"


def _target(layer: LayerReport) -> float:
    return 1.0 if layer.target is None else layer.target


def _targets(layers: Layers) -> list[Column]:
    """A column with the layers' targets, if not all layers have the same."""
    differ = len({layer.target for layer in layers if layer.target is not None}) > 1
    return [_numbers("target", layers, lambda layer: layer.target)] if differ else []


def _print(layers: Layers, columns: Sequence[Column], console: Console) -> None:
    for line in tables.lines([layer.name for layer in layers], columns, console.width):
        console.print(line, soft_wrap=True)


def _head(layers: Layers) -> list[Column]:
    return [
        Column("module", [layer.module for layer in layers], left=True, rank=2, names=True),
        Column("op", [layer.op for layer in layers], left=True, rank=1),
        Column("weight", ["x".join(map(str, layer.shape)) for layer in layers], left=True, rank=2),
    ]


def _numbers(title: str, layers: Layers, value: Callable[[LayerReport], float | None]) -> Column:
    return Column(title, [number(value(layer)) for layer in layers])


def _stages(layers: Layers) -> Column:
    return Column("stage", ["" if layer.stage is None else str(layer.stage) for layer in layers])


def _channels(layer: LayerReport) -> str:
    """The least and the largest variance of a live channel, where channels were scaled one by one."""
    found = layer.channels
    if found is None or found.least_scale is None:
        return ""
    ends = dict.fromkeys([number(found.least_variance), number(found.most_variance)])
    return "..".join(ends)


def _bars(layers: Layers) -> Column:
    return Column("tiny│huge", [_bar(layer.variance, _target(layer)) for layer in layers], left=True, rank=3)


def _statuses(layers: Layers) -> Column:
    return Column("status", [Text(layer.status, style=_colour(layer.status)) for layer in layers], left=True)


def _explain(report: Report, console: Console, verbose: bool) -> None:
    """The notes, each once, with the layers they are about."""
    about: dict[str, list[str]] = {}
    for layer in report.layers:
        for note in layer.notes:
            named = layer.module and layer.module != layer.name
            about.setdefault(note, []).append(f"{layer.module} ({layer.name})" if named else layer.name)
    for note, names in about.items():
        shown = names if verbose else names[:3]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        called = ", ".join(elided(label(name), console.width) for name in shown)
        text = f"{called}{more}: {shortened(note)}"
        wrapper = textwrap.TextWrapper(console.width, break_long_words=False, break_on_hyphens=False)
        wrapper.initial_indent, wrapper.subsequent_indent = "  ", "    "
        for line in wrapper.wrap(text):
            console.print(Text(line, style="dim"), soft_wrap=True)


def _colour(status: Status) -> str:
    return "green" if status in GOOD else "yellow" if status in LEFT else "bold red"


def _shade(off: float) -> str:
    if math.isnan(off):
        return "red"
    return "green" if abs(off) <= RIGHT else "yellow" if abs(off) <= 1 else "red"


def _variance(variance: float | None, target: float) -> Text:
    return Text(number(variance), style="" if variance is None else _shade(decades(variance, target)))


def _bar(variance: float | None, target: float) -> Text:
    """A variance on a log scale: to the left it vanishes, to the right it explodes, in the middle it is right."""
    off = decades(variance, target)
    if math.isnan(off):
        return Text("" if variance is None else "    │", style="red")
    cells = min(BAR, math.ceil(abs(off) - RIGHT)) if math.isfinite(off) else BAR
    left, right = (cells, 0) if off < 0 else (0, cells)
    return Text(f"{'█' * left:>{BAR}}│{'█' * right:<{BAR}}", style=_shade(off))


def _distance(variance: float | None, target: float) -> float:
    off = decades(variance, target)
    return math.inf if math.isnan(off) else abs(off)
