"""A report in a notebook: a table with bars, below a line that sums up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lsuv_cli.labels import distinct, label
from lsuv_cli.page.markup import text
from lsuv_cli.page.table import FINE, fields_of, target_of
from lsuv_cli.text import decades, number, plural, short_names

MOST_ROWS = 60
LONGEST_NAME = 60
WIDEST = 6.0  # decades at each side of a bar's middle
STYLE = "text-align:left;padding:1px 8px;white-space:nowrap"

Report = Mapping[str, Any]


def cells(reports: Mapping[str, Report], told: str) -> str:
    """One report, or several by the names of their initializations, as HTML for a notebook's cell."""
    first = next(iter(reports.values()))
    layers = first["layers"]
    names, prefix = short_names([label(layer["name"]) for layer in layers[:MOST_ROWS]])
    names = distinct(names, LONGEST_NAME)
    variances = [fields_of(report).get("variance", []) for report in reports.values()]
    titles = [
        "layer",
        "op",
        "weight",
        *(init or "variance" for init in reports),
        *([] if len(reports) > 1 else ["status"]),
    ]
    head = "".join(f'<th style="{STYLE}">{text(title)}</th>' for title in titles)
    rows = []
    for k in range(min(len(layers), MOST_ROWS)):
        shown = [names[k], layers[k]["op"], "x".join(map(str, layers[k]["shape"]))]
        made = [f'<td style="{STYLE}">{text(cell, 60)}</td>' for cell in shown]
        made += [_variance(found[k], target_of(layers[k])) for found in variances]
        if len(reports) == 1:
            status = layers[k]["status"]
            colour = "" if status in FINE else ";color:#c02f2f;font-weight:600"
            made.append(f'<td style="{STYLE}{colour}">{text(status)}</td>')
        rows.append(f"<tr>{''.join(made)}</tr>")
    more = f"<p>and {plural(len(layers) - MOST_ROWS, 'layer')} more</p>" if len(layers) > MOST_ROWS else ""
    said = f"<p>names without <code>{text(prefix)}</code>, with which all begin</p>" if prefix else ""
    warnings = "".join(f"<p><b>warning:</b> {text(warning, 800)}</p>" for warning in first["warnings"])
    return (
        f'<div style="overflow-x:auto"><p><b>{text(told, 800)}</b></p>{warnings}{said}'
        f"<table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{more}</div>"
    )


def _variance(variance: float | None, target: float) -> str:
    """A variance and its bar: to the left it vanishes, to the right it explodes."""
    if variance is None or math.isnan(variance):
        return f'<td style="{STYLE}">{"" if variance is None else "not finite"}</td>'
    off = decades(variance, target)
    wide = round(30 * min(abs(off), WIDEST) / WIDEST, 1)
    left = 30 - wide if off < 0 else 30
    colour = "#1a8f63" if abs(off) <= 0.05 else "#3d6cc0" if off < 0 else "#d9682e"
    bar = (
        '<svg width="61" height="9" style="vertical-align:middle"><path d="M30.5 0v9" stroke="#999"/>'
        f'<rect x="{left}" y="1" width="{max(wide, 1)}" height="7" fill="{colour}"/></svg>'
    )
    return f'<td style="{STYLE};font-variant-numeric:tabular-nums">{bar} {number(variance)}</td>'


def plotted(series: Mapping[str, Sequence[float | None]]) -> str:
    """The variances as an image, where matplotlib is installed; else nothing."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    import base64
    import io

    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for line, values in series.items():
        drawn = [v if v is not None and 0 < v < math.inf else math.nan for v in values]
        axes.plot(
            range(1, len(drawn) + 1), drawn, marker="." if len(drawn) <= 80 else None, label=line.replace("$", r"\$")
        )
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("variance")
    axes.grid(axis="y", linewidth=0.4)
    axes.legend(fontsize=8)
    stream = io.BytesIO()
    figure.savefig(stream, format="svg")
    held = base64.b64encode(stream.getvalue()).decode()
    return f'<img alt="variance of each layer\'s output" src="data:image/svg+xml;base64,{held}">'
