"""The report as a person sees it: a table that fits the terminal, and one line that sums up."""

from __future__ import annotations

import math
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lsuv_cli.report import FINE, LayerReport, Report, Status

COLOURS = {
    Status.OK: "green",
    Status.PLANNED: "green",
    Status.PRE_INITIALIZED: "green",
    Status.SKIPPED: "yellow",
    Status.EXCLUDED: "yellow",
}


def show(report: Report, console: Console, *, verbose: bool = False) -> None:
    """Print the table, what needs explaining below it, and the summary."""
    console.print(table(report, verbose))
    noted = [layer for layer in report.layers if layer.notes]
    reasons: dict[str, list[str]] = {}
    for layer in noted:
        for note in layer.notes:
            reasons.setdefault(note, []).append(layer.name)
    for note, names in reasons.items():
        shown = names if verbose else names[:3]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        console.print(Text(f"  {', '.join(shown)}{more}: {note}", style="dim"), soft_wrap=False)
    console.print(summary(report), soft_wrap=True)


def table(report: Report, verbose: bool = False) -> Table:
    """One row for each layer. Columns that say nothing are left out."""
    rows = report.layers
    grid = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold", show_edge=False)
    grid.add_column("layer", overflow="ellipsis", no_wrap=True, ratio=1, min_width=6)
    grid.add_column("op", no_wrap=True)
    grid.add_column("weight", no_wrap=True, overflow="ellipsis", min_width=7)
    columns = [
        ("given", "variance_given"),
        ("at turn", "variance_at_turn"),
        ("scale", "scale"),
        ("variance", "variance"),
        ("std w", "weight_std"),
    ]
    used = [(title, name) for title, name in columns if any(getattr(r, name) is not None for r in rows)]
    for title, _ in used:
        grid.add_column(title, justify="right", no_wrap=True)
    staged = verbose or any(row.status is Status.PLANNED for row in rows)
    if staged:
        grid.add_column("stage", justify="right", no_wrap=True)
    grid.add_column("status", no_wrap=True)
    for row in rows:
        cells: list[str | Text] = [row.name, row.op, "x".join(map(str, row.shape))]
        cells += [_number(getattr(row, name)) for _, name in used]
        if staged:
            cells.append("" if row.stage is None else str(row.stage + 1))
        cells.append(Text(row.status, style=COLOURS.get(row.status, "bold red")))
        grid.add_row(*cells)
    return grid


def _number(value: float | None) -> str:
    """At most seven characters, whatever the size."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4f}"[:6].rstrip(".")
    return f"{value:.1e}"


def summary(report: Report) -> Text:
    """What was done, on what, how long it took, where it went."""
    counts = Counter(layer.status for layer in report.layers)
    bad = [f"{counts[s]} {s}" for s in Status if counts[s] and s not in FINE]
    left = [f"{counts[s]} {s}" for s in (Status.SKIPPED, Status.EXCLUDED) if counts[s]]
    kinds = {Status.OK: "within tolerance", Status.PRE_INITIALIZED: "pre-initialized", Status.PLANNED: "to initialize"}
    good = [f"{counts[s]} layer{'s' if counts[s] != 1 else ''} {text}" for s, text in kinds.items() if counts[s]]
    parts = [*good, *left, *bad]
    text = Text(", ".join(parts), style="bold red" if bad else "bold")
    facts = [f"{report.samples} samples" if report.samples else "", report.device]
    facts.append(f"{report.stages} stage{'s' if report.stages != 1 else ''}" if report.stages else "")
    facts.append(f"{report.trials} trials" if report.trials > 1 else "")
    facts.append(f"{report.seconds['total']:.2f} s" if "total" in report.seconds else "")
    text.append(f" ({'; '.join(f for f in facts if f)})", style="not bold")
    if report.memory:
        text.append(f"\nmemory expected: {memory(report.memory)}", style="not bold")
    if report.output:
        text.append(f" -> {report.output}", style="not bold")
    return text


def memory(expected: dict[str, int | None]) -> str:
    """What a plan will need, for people."""
    return ", ".join(f"{name.replace('_', ' ')} {_size(size)}" for name, size in expected.items())


def _size(size: float | None) -> str:
    if size is None:
        return "unknown"
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def worst(report: Report, count: int = 3) -> list[LayerReport]:
    """The layers that are farthest from where they should be."""
    bad = [layer for layer in report.layers if layer.status not in FINE]

    def distance(layer: LayerReport) -> float:
        if layer.variance is None or not math.isfinite(layer.variance) or layer.variance <= 0:
            return math.inf
        return abs(math.log(layer.variance))

    return sorted(bad, key=distance, reverse=True)[:count]
