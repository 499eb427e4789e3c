"""Write commands.md from the commands themselves, the table of settings in python.md, stages.svg, and the JSON Schema.

python docs/generate.py
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any

from typer.main import get_command

from lsuv_cli.cli import app
from lsuv_cli.settings import ABOUT, CHECK_TOL, GROUPS, INSPECT, JUDGE, Settings, SettingsDict

DOCS = Path(__file__).parent

INTRO = """\
# Commands

This page is made from the commands by `python docs/generate.py`. `lsuv COMMAND --help` shows the same.

| command | what it does | what it prints on stdout |
|---|---|---|
| [`lsuv init`](#lsuv-init) | initializes models and writes them | nothing; JSON with `--json`, the model with `-o -` |
| [`lsuv inspect`](#lsuv-inspect) | shows the layers and, with data, what they put out | a table, JSON or CSV |
| [`lsuv expose`](#lsuv-expose) | makes the layers' outputs outputs of the model | nothing; the model with `-o -` |
| [`lsuv strip`](#lsuv-strip) | writes the model without its weights | nothing; the model with `-o -` |
| [`lsuv check`](#lsuv-check) | says whether every layer's output has variance 1 | the worst layers, or JSON |
| [`lsuv compare`](#lsuv-compare) | shows several initializations side by side | two tables, or JSON |
| [`lsuv doctor`](#lsuv-doctor) | tells what a device has, and tries it against the CPU | a block to paste, or JSON |

Progress, warnings and errors go to stderr, and so does the table of `init`. Colours, bars and progress appear on a
terminal only; `NO_COLOR=1` turns colours off. `LSUV_DEBUG=1` shows the traceback of an error.

Exit codes, the same for all commands:

| code | meaning |
|---:|---|
| 0 | done |
| 1 | done, but some layer is outside the tolerance, no layer was initialized, a tensor has no way into `--weights`, \
or `doctor` found something off |
| 2 | the request or an input is wrong, and nothing was written for it; or standard output cannot be written, and the \
line on stderr says what was |
| 130 | interrupted; the line on stderr says whether anything was written |

`lsuv --version` prints the version, `lsuv --install-completion` installs completion for the shell it runs in (tried
in bash).
"""

EXAMPLES = {
    "init": """\
    lsuv init model.onnx --data calib.npy                      # writes model.lsuv.onnx
    lsuv init model.onnx --data photos/ --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225
    lsuv init model.onnx --data ids=ids.npy --data mask=mask.npy -o start.onnx
    lsuv init *.onnx --data calib.npy --output-dir initialized
    cat model.onnx | lsuv init - --data calib.npy -o - > start.onnx
""",
    "inspect": """\
    lsuv inspect model.onnx
    lsuv inspect model.onnx --data calib.npy --csv > layers.csv
    lsuv inspect model.onnx --data calib.npy --limit 8 --dump values
""",
    "expose": """\
    lsuv expose model.onnx -o exposed.onnx --include 'layer1*'
""",
    "strip": """\
    lsuv strip model.onnx -o small.onnx --keep '*mel*'
    lsuv init small.onnx --data random -o full.onnx
""",
    "check": """\
    lsuv check model.onnx --data calib.npy --tol 0.2 || echo "not a good start"
""",
    "compare": """\
    lsuv compare model.onnx --data calib.npy --inits lsuv,msra,keep --plot compare.png
""",
    "doctor": """\
    lsuv doctor
    lsuv doctor --device cuda:1 --json
""",
}


def commands() -> str:
    """The command reference."""
    parts = [INTRO]
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join(["lsuv", name, "[OPTIONS]", *(p.metavar for p in arguments)])
        parts.append(f"## lsuv {name}\n\n    {usage}\n\n{_paragraphs(command.help)}\n\n{EXAMPLES[name]}")
        groups: dict[str, list[str]] = {"Arguments": [f"| `{p.metavar}` | {p.help} | |" for p in arguments]}
        for param in command.params:
            if param.param_type_name == "option":
                groups.setdefault(param.rich_help_panel or "Options", []).append(_row(param))
        for title, rows in groups.items():
            if not rows:
                continue
            parts.append(f"### {title}\n\n| | | default |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*sorted(option.opts, key=len), *option.secondary_opts])
    flag = isinstance(option.default, bool)
    value = "" if flag else " `" + (option.metavar or "").replace("|", "\\|") + "`"
    default = option.default.value if isinstance(option.default, Enum) else option.default
    if flag:
        default = option.opts[0] if option.default and option.secondary_opts else None
    text = option.help.replace("|", "\\|")
    return f"| {names}{value} | {text} | {'' if default is None else f'`{default}`'} |"


START, END = "<!-- settings: made by docs/generate.py -->\n", "<!-- end of settings -->\n"


def python() -> str:
    """The page on Python with its table of settings made anew."""
    before, _, rest = (DOCS / "python.md").read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    rows = ["| keyword | type | default | what it is | used by |", "|---|---|---|---|---|"]
    types = SettingsDict.__annotations__
    for group in GROUPS:
        for name, about in ABOUT.items():
            if about.group == group:
                kind = re.sub(r"\b\w+Name\b", "str", types[name].__forward_arg__).replace("|", "\\|")
                default = getattr(Settings, name)
                shown = f'`"{default}"`' if isinstance(default, str) else f"`{default!r}`"
                shown += f"; `measure`: `{CHECK_TOL}`" if name == "tol" else ""
                text = about.help.replace("|", "\\|")
                rows.append(f"| `{name}` | `{kind}` | {shown} | {text} | {_users(name)} |")
    return before + START + "\n".join(rows) + "\n" + END + after


def _users(name: str) -> str:
    if name in INSPECT:
        return "all"
    if name in JUDGE:
        return "all but `inspect`"
    return "`initialize`" if name in {"rescale", "before"} else "`initialize`, `compare`"


def figure() -> str:
    """Two stages of a small network, as an SVG drawing."""
    shapes: list[str] = []

    def box(x: int, y: int, text: str, kind: str, width: int = 92) -> None:
        shapes.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="34" rx="5"/>')
        shapes.append(f'<text x="{x + width / 2}" y="{y + 21}">{text}</text>')

    def arrow(*points: tuple[int, int]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        shapes.append(f'<polyline points="{path}" marker-end="url(#tip)"/>')

    def label(x: int, y: int, text: str, kind: str = "label") -> None:
        shapes.append(f'<text class="{kind}" x="{x}" y="{y}">{text}</text>')

    for x, width, title in ((130, 330, "stage 1"), (520, 330, "stage 2")):
        shapes.append(f'<rect class="stage" x="{x}" y="38" width="{width}" height="212" rx="8"/>')
        label(x + 12, 60, title, "title")
    box(12, 125, "data", "plain", 76)
    box(150, 75, "conv a", "layer")
    box(150, 175, "conv b", "layer")
    box(268, 75, "Relu", "plain", 64)
    box(352, 75, "conv c", "layer")
    box(540, 125, "Add, Tanh", "plain")
    box(660, 125, "gemm d", "layer")
    arrow((88, 142), (108, 142), (108, 92), (148, 92))
    arrow((88, 142), (108, 142), (108, 192), (148, 192))
    arrow((242, 92), (266, 92))
    arrow((332, 92), (350, 92))
    arrow((444, 92), (490, 92), (490, 135), (538, 135))
    arrow((242, 192), (490, 192), (490, 149), (538, 149))
    arrow((632, 142), (658, 142))
    arrow((752, 142), (800, 142))
    for x, y, name in ((196, 128, "a"), (196, 228, "b"), (398, 128, "c"), (706, 178, "d")):
        label(x, y, f"Var(y) → s<tspan class='sub' dy='3'>{name}</tspan>", "probe")
    label(306, 70, "pending s<tspan class='sub' dy='3'>a</tspan>", "pending")
    label(490, 84, "pending s<tspan class='sub' dy='3'>a</tspan><tspan dy='-3'>·s</tspan>"
          "<tspan class='sub' dy='3'>c</tspan>", "pending")  # fmt: skip
    label(490, 210, "pending s<tspan class='sub' dy='3'>b</tspan>", "pending")
    label(586, 116, "pending scales first", "pending")
    label(490, 275, "the frontier: values that wait between stages", "caption")
    shapes.append('<line class="cut" x1="490" y1="20" x2="490" y2="258"/>')
    body = "\n".join(shapes)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 870 290" font-family="sans-serif" font-size="13">
<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">
<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>
<style>
text {{ text-anchor: middle; fill: #222 }} rect.stage {{ fill: #f3f6fa; stroke: #b9c6d6 }}
rect.plain {{ fill: #fff; stroke: #888 }} rect.layer {{ fill: #ffe9c7; stroke: #d08a1d }}
polyline {{ fill: none; stroke: #555 }} text.title {{ text-anchor: start; font-weight: bold }}
text.probe {{ fill: #a05a00; font-size: 12px }} text.pending {{ fill: #1f5fa8; font-size: 11px;
  paint-order: stroke; stroke: #f8fafc; stroke-width: 4px }}
text.caption {{ fill: #1f5fa8; font-size: 12px }} .sub {{ font-size: 9px }}
line.cut {{ stroke: #1f5fa8; stroke-dasharray: 5 4 }}
</style>
<rect width="870" height="290" fill="#fff"/>
{body}
</svg>
"""


if __name__ == "__main__":
    (DOCS / "commands.md").write_text(commands(), encoding="utf-8")
    (DOCS / "python.md").write_text(python(), encoding="utf-8")
    (DOCS / "stages.svg").write_text(figure(), encoding="utf-8")
    from schema import schema

    (DOCS.parent / "lsuv_cli" / "report.schema.json").write_text(schema(), encoding="utf-8")
