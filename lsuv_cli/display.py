"""The report as a person sees it: a table that fits the terminal, and one line that sums up."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lsuv_cli.report import FINE, LayerReport, Report, Status

GOOD = {Status.OK: "within tolerance", Status.PRE_INITIALIZED: "pre-initialized", Status.PLANNED: "to initialize"}
LEFT = (Status.SKIPPED, Status.EXCLUDED)
TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
PLACES = {"initializer": "init", "constant": "const", "folded": "fold"}
BAR = 4  # cells on each side of the middle; each is a factor of BAR_STEP in variance
BAR_STEP = 10.0


def show(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print the table, what needs explaining below it, and the summary."""
    columns = {
        "given": [_number(layer.variance_given) for layer in report.layers],
        "at turn": [_number(layer.variance_at_turn) for layer in report.layers],
        "scale": [_number(layer.scale) for layer in report.layers],
        "variance": [_number(layer.variance) for layer in report.layers],
        "std w": [_number(layer.weight_std) for layer in report.layers],
    }
    if verbose or any(layer.status is Status.PLANNED for layer in report.layers):
        columns["stage"] = ["" if layer.stage is None else str(layer.stage + 1) for layer in report.layers]
    console.print(_table(report.layers, columns, bars=console.is_terminal))
    _explain(report, console, verbose)
    console.print(summary(report), soft_wrap=True)


def show_layers(report: Report, console: Console) -> None:
    """What `inspect` prints: where weights live and, with data, what layers put out."""
    layers = report.layers
    columns = {
        "stage": ["" if layer.stage is None else str(layer.stage + 1) for layer in layers],
        "groups": [str(layer.groups) if layer.groups > 1 else "" for layer in layers],
        "type": [TYPES.get(layer.dtype, layer.dtype) for layer in layers],
        "in": [PLACES.get(layer.place, "") + ("*" if layer.shared else "") for layer in layers],
        "std w": [_number(layer.weight_std) for layer in layers],
        "mean": [_number(layer.mean) for layer in layers],
        "variance": [_number(layer.variance) for layer in layers],
        "dead": [f"{layer.dead:.0%}" if layer.dead is not None else "" for layer in layers],
    }
    console.print(_table(layers, columns, bars=False, status=False))
    if any(layer.shared for layer in layers):
        console.print(Text("  * shared by several layers", style="dim"))
    _explain(report, console, verbose=True)
    console.print(summary(report), soft_wrap=True)


def show_verdict(report: Report, console: Console, count: int = 5) -> None:
    """What `check` prints: the worst layers, if there are bad ones, and the summary."""
    bad = [layer for layer in report.layers if layer.status not in FINE]
    target = report.settings.get("target_variance", 1.0)
    bad.sort(key=lambda layer: _distance(layer.variance, target), reverse=True)
    if bad:
        console.print(
            _table(bad[:count], {"variance": [_number(x.variance) for x in bad[:count]]}, console.is_terminal)
        )
        if len(bad) > count:
            console.print(f"  and {len(bad) - count} more")
    console.print(summary(report), soft_wrap=True)


def show_comparison(reports: Mapping[str, Report], console: Console) -> None:
    """The paper's tables on the user's own network."""
    layers = next(iter(reports.values())).layers
    for title, name in (("standard deviation of the weight", "weight_std"), ("variance of the output", "variance")):
        columns = {init: [_number(getattr(x, name)) for x in report.layers] for init, report in reports.items()}
        console.print(Text(title, style="bold"))
        console.print(_table(layers, columns, bars=False, status=False))


def write_csv(report: Report, stream: IO[str]) -> None:
    """Every fact about every layer, one line each."""
    names = list(LayerReport.__dataclass_fields__)
    writer = csv.writer(stream)
    writer.writerow(names)
    for entry in report.to_json()["layers"]:
        cells = {**entry, "shape": "x".join(map(str, entry["shape"])), "notes": "; ".join(entry["notes"])}
        writer.writerow(["" if cells[name] is None else cells[name] for name in names])


def summary(report: Report) -> Text:
    """What was done, on what, how long it took, where it went."""
    counts = Counter(layer.status for layer in report.layers)
    kinds = {**GOOD, Status.PLANNED: "found"} if report.command == "inspect" else GOOD
    good = [f"{counts[s]} layer{'s' if counts[s] != 1 else ''} {text}" for s, text in kinds.items() if counts[s]]
    left = [f"{counts[s]} {s}" for s in LEFT if counts[s]]
    bad = [f"{counts[s]} {s}" for s in Status if counts[s] and s not in FINE]
    text = Text(", ".join([*good, *left, *bad]) or "no layers", style="bold red" if bad else "bold")
    facts = [f"{report.samples} samples" if report.samples else "", report.device]
    facts.append("random data" if report.data == "random" else "")
    facts.append(f"{report.stages} stage{'s' if report.stages != 1 else ''}" if report.stages else "")
    facts.append(f"{report.trials} trials" if report.trials > 1 else "")
    facts.append(f"{report.seconds['total']:.2f} s" if "total" in report.seconds else "")
    text.append(f" ({'; '.join(fact for fact in facts if fact)})", style="not bold")
    if report.memory:
        expected = ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in report.memory.items())
        text.append(f"\nmemory expected: {expected}", style="not bold")
    if report.output:
        text.append(f" -> {report.output}", style="not bold")
    return text


def _table(
    layers: Sequence[LayerReport], columns: Mapping[str, Sequence[str]], bars: bool, status: bool = True
) -> Table:
    """One row for each layer. Columns that say nothing are left out."""
    used = {title: cells for title, cells in columns.items() if any(cells)}
    grid = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    grid.add_column("layer", overflow="ellipsis", no_wrap=True, ratio=1, min_width=8)
    grid.add_column("op", no_wrap=True, overflow="ellipsis")
    grid.add_column("weight", no_wrap=True, overflow="ellipsis", min_width=6)
    for title in used:
        grid.add_column(title, justify="right", no_wrap=True)
    bars = bars and any(layer.variance is not None for layer in layers)
    if bars:
        grid.add_column("vanish|explode", no_wrap=True, justify="center")
    if status:
        grid.add_column("status", no_wrap=True)
    for k, layer in enumerate(layers):
        cells: list[str | Text] = [Text(layer.name), layer.op, "x".join(map(str, layer.shape))]
        cells += [cells_of[k] for cells_of in used.values()]
        if bars:
            cells.append(_bar(layer.variance))
        if status:
            cells.append(Text(layer.status, style=_colour(layer.status)))
        grid.add_row(*cells)
    return grid


def _explain(report: Report, console: Console, verbose: bool) -> None:
    """The notes, each once, with the layers they are about."""
    about: dict[str, list[str]] = {}
    for layer in report.layers:
        for note in layer.notes:
            about.setdefault(note, []).append(layer.name)
    for note, names in about.items():
        shown = names if verbose else names[:3]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        console.print(Text(f"  {', '.join(shown)}{more}: {note}", style="dim"))


def _colour(status: Status) -> str:
    return "green" if status in GOOD else "yellow" if status in LEFT else "bold red"


def _bar(variance: float | None) -> Text:
    """A variance on a log scale: to the left it vanishes, to the right it explodes, in the middle it is 1."""
    if variance is None:
        return Text("")
    if math.isnan(variance):
        return Text("not a number", style="red")
    size = -math.inf if variance <= 0 else math.log(variance, BAR_STEP)
    cells = min(BAR, math.ceil(abs(size) - 0.05)) if math.isfinite(size) else BAR
    left, right = (cells, 0) if size < 0 else (0, cells)
    style = "green" if not cells else "yellow" if cells == 1 else "red"
    return Text(f"{'█' * left:>{BAR}}│{'█' * right:<{BAR}}", style=style)


def _number(value: float | None) -> str:
    """At most eight characters, whatever the size."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"[: 7 if value < 0 else 6].rstrip(".")
    return f"{value:.1e}"


def _distance(variance: float | None, target: float) -> float:
    if variance is None or not math.isfinite(variance) or variance <= 0:
        return math.inf
    return abs(math.log(variance / target))


def _size(size: float | None) -> str:
    if size is None:
        return "unknown"
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
