"""The plot of a report: variance per layer in the order of execution, on a log scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lsuv_cli import outputs
from lsuv_cli.outputs import Target
from lsuv_cli.report import Comparison, Report
from lsuv_cli.text import printable

MOST_NAMES = 40  # layers that are named on the axis; more are numbered
MOST_MARKERS = 80  # layers whose points are marked
Series = Mapping[str, Sequence[float | None]]  # one value for each layer


def draw_shown(shown: Report | Comparison, to: Target) -> None:
    """Write the plot of one run, or of several initializations side by side."""
    report = shown if isinstance(shown, Report) else next(iter(shown.values()))
    series = of_report(shown) if isinstance(shown, Report) else of_comparison(shown)
    names = [layer.name for layer in report.layers]
    known = [layer.target for layer in report.layers if layer.target is not None]
    # A layer that is left alone has no target: its band is that of the first layer.
    targets = [layer.target if layer.target is not None else (known or [1.0])[0] for layer in report.layers]
    draw(names, series, to, targets=targets, tol=report.settings["tol"], title=Path(report.model).name)


def of_report(report: Report) -> Series:
    """The variances that one run measured: as given, after pre-init alone, after LSUV."""
    if report.command != "init":
        return {"as given": [layer.variance for layer in report.layers]}
    series = {
        "as given": [layer.variance_given for layer in report.layers],
        "pre-initialized, when its turn came": [layer.variance_at_turn for layer in report.layers],
        "after LSUV" if report.settings["rescale"] else "pre-initialized": [layer.variance for layer in report.layers],
    }
    return {label: values for label, values in series.items() if any(v is not None for v in values)}


def of_comparison(reports: Mapping[str, Report]) -> Series:
    """The variances under several initializations."""
    return {name: [layer.variance for layer in report.layers] for name, report in reports.items()}


def draw(names: Sequence[str], series: Series, to: Target, *, targets: Sequence[float], tol: float, title: str) -> None:
    """Write the plot. Up to MOST_NAMES layers are named; more are numbered. A cross at the edge: 0 below, Inf above."""
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    from matplotlib import pyplot

    count = len(names)
    figure, axes = pyplot.subplots(figsize=(min(16.0, max(6.4, 0.28 * count + 2)), 4.0), layout="constrained")
    marker = "o" if count <= MOST_MARKERS else None
    for label, values in series.items():
        known = [(k, v) for k, v in enumerate(values, 1) if v is not None]
        shown = [(k, v if 0 < v < math.inf else math.nan) for k, v in known]  # a NaN is a gap in the line
        (line,) = axes.plot(
            *zip(*shown, strict=True) if shown else ((), ()), marker=marker, markersize=4, linewidth=1.4, label=label
        )
        off = [(k, 0.02 if v <= 0 else 0.98) for k, v in known if not 0 < v < math.inf]
        if off:
            edge = axes.get_xaxis_transform()  # heights from 0 to 1
            axes.plot(
                *zip(*off, strict=True),
                "x",
                color=line.get_color(),
                markersize=4,
                transform=edge,
                label="0, or not finite",
            )
    _band(axes, targets or [1.0], tol)
    axes.set_yscale("log")
    axes.set_ylabel("variance of the output")
    axes.set_title(_short(title, 80), fontsize=10)
    axes.set_xlim(0.5, max(count, 1) + 0.5)
    if count <= MOST_NAMES:
        axes.set_xticks(range(1, count + 1), [_short(name) for name in names], rotation=60, ha="right", fontsize=8)
    else:
        axes.set_xlabel("layer, in the order of execution")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(fontsize=8)
    try:
        with outputs.growing(to) as path, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # matplotlib warns about characters that the font lacks
            figure.savefig(path, dpi=130, format=to.given.suffix[1:].lower())
            to.deliver(path)
    finally:
        pyplot.close(figure)


def _band(axes: Any, targets: Sequence[float], tol: float) -> None:
    """target·(1 ± tol) in grey: one band, or a step for each layer where targets differ."""
    if len(set(targets)) == 1:
        low, high = targets[0] * (1 - tol), targets[0] * (1 + tol)
        axes.axhspan(low, high, color="0.85", zorder=0, label=f"target {targets[0]:g} ± {tol:g}")
        return
    edges = [k + 0.5 for k in range(len(targets) + 1)]
    steps = [*targets, targets[-1]]
    low_steps, high_steps = ([t * factor for t in steps] for factor in (1 - tol, 1 + tol))
    axes.fill_between(edges, low_steps, high_steps, step="post", color="0.85", zorder=0, label=f"target ± {tol:g}")


def _short(name: str, most: int = 24) -> str:
    shown = printable(name if len(name) <= most else f"…{name[-most + 1 :]}")
    return shown.replace("$", r"\$")  # a bare $ begins a formula
