"""A page's words: what came out, warnings and remarks, and how it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from lsuv_cli.page.markup import text
from lsuv_cli.page.table import FINE
from lsuv_cli.text import plural

COMMANDS = {"measure": "check"}

Report = Mapping[str, Any]


def head(reports: Mapping[str, Report], report: Report, prefix: str) -> str:
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
        plural(len(report["workers"]), "worker") if report.get("workers") else "",
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


def remarks(reports: Mapping[str, Report]) -> str:
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


def made(report: Report, command: str) -> str:
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
        "Workers": {
            f"{worker['host']}, process {worker['pid']}": f"{worker['device']}, {worker['batches']} of the batches"
            for worker in report.get("workers") or ()
        },
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
