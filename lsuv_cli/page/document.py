"""The page put together: warnings first, then what can be seen, then every number, then how to repeat it.

The policy in the page's head lets the browser run the page's own script and style, known by their SHA-256, and nothing
else, whatever a name in the model says; and it lets no request leave.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import html
import importlib.resources
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from lsuv_cli.page.chart import bars, chart
from lsuv_cli.page.drawing import SHADES, drawing
from lsuv_cli.page.markup import data, text
from lsuv_cli.page.table import FINE, Column, columns, fields_of, style, table, target_of
from lsuv_cli.text import decades, plural, printable, short_names

LARGEST_PLAIN = 300_000  # bytes of JSON that are embedded as they are; more are compressed
COMMANDS = {"measure": "check"}
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
    made = columns(reports)
    charts = _charts(reports)
    body = [
        _head(reports, first, prefix),
        _warnings(reports),
        '<main><section aria-label="Charts">',
        *(_drawn(key, lines, reports, shown) for key, lines in charts.items()),
        *_residuals(reports),
        "</section>",
        _graph(first),
        _chosen(first),
        '<section><h2>Every layer</h2><p class="tools" hidden><label>Filter <input id="filter" type="search" '
        'placeholder="name, op, status, note …"></label> <output id="found"></output></p>',
        table(made),
        "</section>",
        _facts(first, command),
        "</main>",
    ]
    for_script = {
        "prefix": len(printable(prefix)),
        "targets": [target_of(layer) for layer in first["layers"]],
        "shades": SHADES,
        "inits": list(reports),
        "charts": {key: {line: _place(made, *of) for line, of in lines.items()} for key, lines in charts.items()},
        "worst": _worst(first),
    }
    return _document(first, "".join(body), style(made), for_script, content)


def embedded(page: str) -> Any:
    """The JSON that a page holds."""
    found = re.search(r'<script id="report" type="([^"]*)">(.*?)</script>', page, re.S)
    if found is None:
        raise ValueError("this is no page of a report")
    kind, held = found.groups()
    return json.loads(gzip.decompress(base64.b64decode(held)) if "gzip" in kind else held)


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


def _details(report: Report) -> Sequence[Mapping[str, Any]]:
    return (report.get("details") or {}).get("layers") or ()


def _residuals(reports: Mapping[str, Report]) -> list[str]:
    """The residual stream at every sum, where the reports have it."""
    lines = {init or "sum": report.get("sums") or [] for init, report in reports.items()}
    names = [item["name"] for item in next(iter(lines.values()))]
    if not names:
        return []
    series = {init: [item["variance"] for item in items] for init, items in lines.items()}
    return [chart("residual", "Residual stream: variance at every sum", short_names(names)[0], series)]


def _band(report: Report) -> tuple[float, float]:
    target, tol = _target(report), float(report["settings"].get("tol", 0.01))
    return target * (1 - tol), target * (1 + tol)


def _target(report: Report) -> float:
    """The target of the first layer that has one."""
    return next((target_of(layer) for layer in report["layers"] if layer.get("target") is not None), 1.0)


def _worst(report: Report) -> int:
    """The layer whose variance is farthest from the target."""
    off = [abs(decades(layer["variance"], target_of(layer))) for layer in report["layers"]]
    known = [(distance, -k) for k, distance in enumerate(off) if not math.isnan(distance)]
    return -max(known)[1] if known else 0


def _head(reports: Mapping[str, Report], report: Report, prefix: str) -> str:
    command = "compare" if "" not in reports else COMMANDS.get(report["command"], report["command"])
    model = PurePath(report["model"]).name or report["model"]
    statuses = [layer["status"] for layer in report["layers"]]
    judged = [status for status in statuses if status == "ok" or status not in FINE]
    bad = sum(status not in FINE for status in statuses)
    verdict = plural(len(statuses), "layer")
    kind = ""
    if "" not in reports:
        verdict = f"{plural(len(reports), 'initialization')} of {plural(len(statuses), 'layer')}"
    elif judged:
        verdict = f"{len(judged) - bad} of {plural(len(judged), 'layer')} within tolerance"
        kind = "bad" if bad else "fine"
    facts = [
        plural(report["samples"], "sample") if report["samples"] else "no data",
        report["device"],
        plural(report["stages"], "stage") if report["stages"] else "",
        plural(report["trials"], "trial") if report["trials"] else "",
        f"{report['seconds']['total']:.2f} s" if "total" in report["seconds"] else "",
    ]
    tiles = "".join(f"<li>{text(fact)}</li>" for fact in facts if fact)
    dropped = f"<p>Names without <code>{text(prefix)}</code>, with which all begin, in charts.</p>" if prefix else ""
    return (
        f"<header><h1>lsuv {text(command)} <span>{text(model)}</span></h1>"
        f'<p class="verdict {kind}">{text(verdict)}</p><ul class="tiles">{tiles}</ul>{dropped}</header>'
    )


def _warnings(reports: Mapping[str, Report]) -> str:
    """Warnings, then layers that are not fine, then every note once with its layers."""
    lines: dict[str, None] = {}
    notes: dict[str, list[str]] = {}
    for init, report in reports.items():
        at = f"{init}: " if init else ""
        lines |= dict.fromkeys(f'<li class="warning">{text(warning, 2000)}' for warning in report["warnings"])
        for status in sorted({layer["status"] for layer in report["layers"]} - FINE):
            names = [layer["name"] for layer in report["layers"] if layer["status"] == status]
            if names and (not at or init == "lsuv"):
                lines[f'<li class="bad">{text(at)}{text(status)}: {_some(names)}'] = None
        for layer in report["layers"]:
            for note in layer["notes"]:
                if layer["name"] not in notes.setdefault(note, []):
                    notes[note].append(layer["name"])
    lines |= dict.fromkeys(f"<li>{_some(names)}: {text(note, 2000)}" for note, names in notes.items())
    return f'<section class="warnings"><h2>Remarks</h2><ul>{"".join(lines)}</ul></section>' if lines else ""


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(f'<code>{text(name)}</code>' for name in names[:most])}{more}"


def _graph(report: Report) -> str:
    outline = (report.get("details") or {}).get("outline")
    if not outline:
        return ""
    return (
        '<section><h2>Graph</h2><p class="tools" hidden><label>Colour by <select id="colour"></select></label></p>'
        f"{drawing(outline, report['layers'])}</section>"
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


def _facts(report: Report, command: str) -> str:
    details = report.get("details") or {}
    groups: dict[str, Mapping[str, Any]] = {
        "Run": {
            "model": report["model"],
            **({"written": report["output"]} if report["output"] else {}),
            "data": report["data"] or "none",
            "samples": f"{report['samples']} in {plural(report['batches'], 'batch').replace('batchs', 'batches')}",
            "device": report["device"],
        },
        "Input files, SHA-256": details.get("files") or {},
        "Versions": details.get("versions") or {"lsuv": report["version"]},
        "Settings": report["settings"],
        "Seconds": report["seconds"],
        "Memory expected, bytes": report["memory"],
        "Carried into the weights file": _carried(report.get("carried")),
    }
    lists = "".join(
        f"<div><h3>{title}</h3><dl>"
        + "".join(f"<dt>{text(key)}</dt><dd>{_value(value)}</dd>" for key, value in facts.items())
        + "</dl></div>"
        for title, facts in groups.items()
        if facts
    )
    repeat = f"<h3>To repeat it</h3><pre><code>{text(command, 4000)}</code></pre>" if command else ""
    return (
        f'<section class="facts"><h2>How it was made</h2>{repeat}<div class="columns">{lists}</div>'
        '<p class="tools" hidden><button id="save" type="button">Save the report as JSON</button></p></section>'
    )


def _carried(account: Mapping[str, Any] | None) -> dict[str, Any]:
    if account is None:
        return {}
    return {"tensors": f"{account['tensors']} of {account['total']}"} | {
        item["name"]: item["reason"] for item in account["left"]
    }


def _value(value: object) -> str:
    if isinstance(value, list | tuple):
        return text(", ".join(map(str, value)) or "none")
    return "none" if value is None or value == "" else text(json.dumps(value) if isinstance(value, bool) else value)


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
    kind, held = "application/json", data(content)
    if len(held) > LARGEST_PLAIN:
        kind, packed = "application/json;encoding=gzip,base64", gzip.compress(held.encode(), mtime=0)
        held = base64.b64encode(packed).decode()
    title = text(f"lsuv: {PurePath(report['model']).name or report['model']}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style></head><body>{body}'
        f'<div id="tip" role="status" hidden></div>'
        f'<script id="report" type="{kind}">{held}</script>\n'
        f'<script id="data" type="application/json">{data(for_script)}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )
