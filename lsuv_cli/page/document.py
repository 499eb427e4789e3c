"""The page put together: warnings first, then what can be seen, then every number, then how to repeat it.

The policy in the page's head lets the browser run the page's own script and style, known by their SHA-256, and nothing
else, whatever a name in the model says; and it lets no request leave.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from lsuv_cli.page import packing, prose
from lsuv_cli.page.chart import bars, chart
from lsuv_cli.page.drawing import SHADES, drawing
from lsuv_cli.page.markup import data, text
from lsuv_cli.page.table import Column, columns, fields_of, left_out_on_paper, said_once, style, table, target_of
from lsuv_cli.text import decades, printable, short_names

TITLES = {
    "variance": "Variance of each layer's output",
    "channels": "Signal propagation: moments of channels",
    "channel_variance": "Signal propagation: mean channel variance",
    "channel_mean_square": "Signal propagation: mean squared channel mean",
    "dead": "Dead units: fraction never above zero, where a ReLU follows",
}

Lines = Mapping[str, tuple[str, str]]  # label -> initialization and field

Report = Mapping[str, Any]


def render(content: Mapping[str, Any], command: str = "") -> str:
    """The page of a report or of a comparison, given as JSON; `command` is the line that repeats it."""
    reports: dict[str, Report] = dict(content["inits"]) if "inits" in content else {"": content}
    first = next(iter(reports.values()))
    shown, prefix = short_names([layer["name"] for layer in first["layers"]])
    every = columns(reports)
    made = [column for column in every if not column.says_one_thing]
    charts = _charts(reports)
    body = [
        prose.head(reports, first, prefix),
        prose.remarks(reports),
        '<main><section aria-label="Charts">',
        *(_drawn(key, lines, reports, shown) for key, lines in charts.items()),
        *_residuals(reports),
        "</section>",
        _graph(first),
        _chosen(first),
        '<section><h2>Every layer</h2><p class="tools" hidden><label>Filter <input id="filter" type="search" '
        'placeholder="name, op, status, note …"></label> <output id="found"></output></p>',
        said_once(every),
        left_out_on_paper(made),
        table(made),
        "</section>",
        prose.made(first, command),
        "</main>",
    ]
    for_script = {
        "prefix": printable(prefix),
        "targets": [target_of(layer) for layer in first["layers"]],
        "shades": SHADES,
        "inits": list(reports),
        "charts": {key: {line: _place(made, *of) for line, of in lines.items()} for key, lines in charts.items()},
        "status": _status(made, every, next(iter(reports))),
        "worst": _worst(first),
    }
    return _document(first, "".join(body), style(made), for_script, content)


def _lines(reports: Mapping[str, Report]) -> dict[str, Lines]:
    """Chart -> its lines."""
    if "" not in reports:
        return {key: {init: (init, key) for init in reports} for key in TITLES}
    report = reports[""]
    variances = {"as given": ("", "variance")}
    if report["command"] == "init":
        after = "after LSUV" if report["settings"].get("rescale", True) else "pre-initialized"
        variances = {
            "as given": ("", "variance_given"),
            "at its turn": ("", "variance_at_turn"),
            after: ("", "variance"),
        }
    if len({target_of(layer) for layer in report["layers"]}) > 1:
        variances["target"] = ("", "target")
    channels = {"mean channel variance": ("", "channel_variance"), "mean squared mean": ("", "channel_mean_square")}
    return {"variance": variances, "channels": channels, "dead": {"dead units": ("", "dead")}}


def _charts(reports: Mapping[str, Report]) -> dict[str, Lines]:
    """The charts that have something to show."""
    fields = {init: fields_of(report) for init, report in reports.items()}
    found: dict[str, Lines] = {}
    for key, lines in _lines(reports).items():
        known = {
            label: (init, field)
            for label, (init, field) in lines.items()
            if any(v is not None for v in fields[init].get(field, ()))
        }
        if known and (key != "dead" or any(any(fields[init][field]) for init, field in known.values())):
            found[key] = known
    return found


def variances(reports: Mapping[str, Report]) -> dict[str, list[float | None]]:
    """The variances of one report by what they are, or of several by their initializations."""
    lines = _charts(reports).get("variance", {})
    return {label: fields_of(reports[init])[field] for label, (init, field) in lines.items()}


def _drawn(key: str, lines: Lines, reports: Mapping[str, Report], names: Sequence[str]) -> str:
    series = {label: fields_of(reports[init])[field] for label, (init, field) in lines.items()}
    if key == "dead":
        return bars(key, TITLES[key], names, series)
    first = next(iter(reports.values()))
    return chart(key, TITLES[key], names, series, _band(first) if key == "variance" else None)


def _place(made: Sequence[Column], init: str, field: str) -> int:
    """The cell of a row, counted from 0, that shows a field under an initialization; the number comes first."""
    return next(k for k, column in enumerate(made, 1) if column.field == field and column.init in ("", init))


def _status(made: Sequence[Column], every: Sequence[Column], init: str) -> int | str:
    """The cell of a row that shows its status, or the status that all layers have."""
    if any(column.field == "status" and column.init in ("", init) for column in made):
        return _place(made, init, "status")
    return str(every[_place(every, init, "status") - 1].values[0])


def _details(report: Report) -> Sequence[Mapping[str, Any]]:
    return (report.get("details") or {}).get("layers") or ()


def _residuals(reports: Mapping[str, Report]) -> list[str]:
    """The residual stream at every sum, where the reports have it."""
    lines = {init or "sum": report.get("sums") or [] for init, report in reports.items()}
    names = [item["name"] for item in next(iter(lines.values()))]
    if not names:
        return []
    if all(item["variance"] is None for items in lines.values() for item in items):
        return []
    # All sums are measured in the same pass: one without a variance is not finite.
    series = {
        init: [math.nan if item["variance"] is None else item["variance"] for item in items]
        for init, items in lines.items()
    }
    return [chart("residual", "Residual stream: variance at every sum", short_names(names)[0], series, noun="sum")]


def _band(report: Report) -> tuple[float, float]:
    target, tol = _target(report), float(report["settings"].get("tol", 0.01))
    return target * (1 - tol), target * (1 + tol)


def _target(report: Report) -> float:
    """The target of the first layer that has one."""
    return next((target_of(layer) for layer in report["layers"] if layer.get("target") is not None), 1.0)


def _worst(report: Report) -> int:
    """The first layer whose variance is not finite, or else is farthest from the target."""
    variances = fields_of(report).get("variance", [])
    known = [
        (math.inf if math.isnan(variance) else abs(decades(variance, target_of(layer))), -k)
        for k, (variance, layer) in enumerate(zip(variances, report["layers"], strict=True))
        if variance is not None
    ]
    return -max(known)[1] if known else 0


def _graph(report: Report) -> str:
    outline = (report.get("details") or {}).get("outline")
    if not outline:
        return ""
    return (
        '<section><h2>Graph</h2><p class="tools" hidden><label>Colour by <select id="colour"></select></label></p>'
        f"{drawing(outline, report['layers'], fields_of(report)['variance'])}</section>"
    )


def _chosen(report: Report) -> str:
    if not _details(report):
        return ""
    return (
        '<section id="chosen" hidden aria-live="polite"><h2>Layer <span id="which"></span></h2>'
        '<p id="numbers"></p><div class="pair"><figure><figcaption>Weights</figcaption><svg id="weights" '
        'class="histogram" viewBox="0 0 460 170" role="img"></svg></figure><figure><figcaption>Outputs on the first '
        'few samples</figcaption><svg id="outputs" class="histogram" viewBox="0 0 460 170" role="img"></svg></figure>'
        '</div><p class="small">Of at most 65,536 entries; entries beyond five standard deviations are counted in the '
        "outermost bins.</p></section>"
    )


@functools.cache
def _part(name: str) -> str:
    return importlib.resources.files("lsuv_cli.page").joinpath(name).read_text(encoding="utf-8")


def _allowed(part: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"


def _document(
    report: Report, body: str, more_style: str, for_script: Mapping[str, Any], content: Mapping[str, Any]
) -> str:
    style, script = _part("page.css") + more_style, _part("page.js")
    policy = (
        f"default-src 'none'; style-src {_allowed(style)}; script-src {_allowed(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = text(f"lsuv: {PurePath(report['model']).name or report['model']}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style></head><body>{body}'
        f'<div id="tip" role="status" hidden></div>'
        f"{packing.element(content)}\n"
        f'<script id="data" type="application/json">{data(for_script)}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )
