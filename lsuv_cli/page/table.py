"""The table of layers: every field of the report's JSON, a row for each layer, a column for each field in use.

In a comparison a field that has the same values under all initializations has one column; any other field has one
column for each initialization. A field about the layer itself that is the same in all layers is said once, above the
table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lsuv_cli.labels import distinct, label
from lsuv_cli.page.markup import LONGEST, exact, text

TITLES = {
    "name": ("layer", "the node's name"),
    "op": ("op", "the operator"),
    "status": ("status", "how the layer ended"),
    "variance_given": ("given", "variance of the output in the model as given"),
    "variance_at_turn": ("at turn", "variance of the output when the layer's turn came"),
    "scale": ("scale", "what the pre-initialized weight was multiplied by"),
    "variance": ("variance", "variance of the output, measured in the file"),
    "target": ("target", "variance that the output is to have"),
    "variance_home": ("home", "variance of the output in PyTorch"),
    "mean": ("mean", "mean of the output"),
    "channel_variance": ("channel var", "mean over channels of the channel's variance"),
    "channel_mean_square": ("channel mean²", "mean over channels of the channel's squared mean"),
    "dead": ("dead", "fraction of the units that are never above zero"),
    "weight_std": ("std w", "standard deviation of the weight"),
    "shape": ("shape", "of the weight"),
    "stage": ("stage", "the stage that it is measured in"),
    "groups": ("groups", "of a convolution"),
    "dtype": ("type", "of the stored weight"),
    "place": ("place", "where the weight lives"),
    "shared": ("shared", "several layers use the weight"),
    "weight": ("weight", "the tensor that stores the weight"),
    "module": ("module", "the PyTorch module that it was exported from"),
    "notes": ("notes", "remarks"),
}
FIRST = tuple(TITLES)[:-1]  # then fields that this list does not know, then the notes
DETAILS = ("channel_variance", "channel_mean_square")
MEASURED = ("variance", "mean", *DETAILS)
# Fields that are said once if all layers have the same: they are in no chart, and few people sort by them.
SAID_ONCE = frozenset({"target", "shape", "stage", "groups", "dtype", "place", "shared"})
ON_PAPER = frozenset({"name", "status", "variance", "notes"})  # the columns of a table that is too wide for paper
MOST_ON_PAPER = 18
DIGITS, DIGITS_BESIDE_OTHERS = 5, 4  # of numbers: in a comparison a layer has dozens
FINE = frozenset({"ok", "planned", "pre-init", "tied", "skipped", "excluded"})  # all other statuses are bad

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A title, its explanation, and a value for each layer."""

    field: str
    title: str
    about: str
    values: list[Any]
    init: str = ""  # the only initialization that it is about

    @property
    def says_nothing(self) -> bool:
        return all(value is None or value == "" or value == [] for value in self.values)

    @property
    def says_one_thing(self) -> bool:
        """Whether one line can stand for the column."""
        apart = self.field in SAID_ONCE or (self.field == "status" and self.init)
        apart = apart or self.field == "channels_count"
        return bool(apart) and len(self.values) > 1 and all(value == self.values[0] for value in self.values)


def columns(reports: Mapping[str, Report]) -> list[Column]:
    """The columns of one report, or of several by the names of their initializations."""
    each = {init: fields_of(report) for init, report in reports.items()}
    known = {name: None for fields in each.values() for name in fields}
    order = [*(n for n in FIRST if n in known), *(n for n in known if n not in TITLES), "notes"]
    made = []
    for name in order:
        title, about = TITLES.get(name, (name.replace("_", " "), name))
        values = {init: fields[name] for init, fields in each.items() if name in fields}
        first = next(iter(values.values()), [])
        if all(other == first for other in values.values()):
            made.append(Column(name, title, about, first))
        else:
            made += [Column(name, f"{title} {init}", f"{about}: {init}", vs, init) for init, vs in values.items()]
    return [column for column in made if not column.says_nothing]


def fields_of(report: Report) -> dict[str, list[Any]]:
    """Field -> its value for each layer."""
    layers = report["layers"]
    names = list(layers[0]) if layers else ["name"]
    fields = {name: [layer.get(name) for layer in layers] for name in names}
    details = (report.get("details") or {}).get("layers") or []
    fields |= {name: [item[name] for item in details] for name in DETAILS if details}
    for name in MEASURED:
        if name in fields:
            pairs = zip(fields[name], layers, strict=True)
            fields[name] = [math.nan if v is None and _was_measured(report, layer) else v for v, layer in pairs]
    for name in [name for name, values in fields.items() if any(isinstance(value, dict) for value in values)]:
        fields |= _parts(name, fields.pop(name))
    given = fields.get("variance_given", [])
    if any(value is not None for value in given):  # the same pass measured all layers that have a variance now
        pairs = zip(given, fields["variance"], strict=True)
        fields["variance_given"] = [math.nan if v is None and after is not None else v for v, after in pairs]
    return fields


def _parts(name: str, values: Sequence[Mapping[str, Any] | None]) -> dict[str, list[Any]]:
    """The fields of a field's objects, as fields of their own."""
    keys = next(value for value in values if value is not None)
    return {f"{name}_{key}": [None if value is None else value[key] for value in values] for key in keys}


def _was_measured(report: Report, layer: Mapping[str, Any]) -> bool:
    """Whether a layer without a variance has one that is NaN or Inf, which JSON has no word for.

    Every layer is measured if there is data, unless a dry run only plans. Nodes that are no layers have no place.
    """
    planned = report["command"] == "init" and layer["status"] == "planned"
    return bool(report["samples"]) and not planned and layer.get("place", "") != "" and layer["variance"] is None


def target_of(layer: Mapping[str, Any]) -> float:
    """The variance that a layer is to have."""
    target = layer.get("target")
    return 1.0 if target is None else float(target)


def said_once(made: Sequence[Column]) -> str:
    """The columns that a line stands for."""
    facts = [f"{text(column.title)} {_shown(column.values[0])}" for column in made if column.says_one_thing]
    return f'<p class="small" id="once">The same in every layer: {"; ".join(facts)}.</p>' if facts else ""


def table(made: Sequence[Column]) -> str:
    """The table in HTML. Without a script it is whole, in the order of execution."""
    head = "".join(f'<th scope="col" title="{text(column.about)}">{text(column.title)}</th>' for column in made)
    names = distinct([label(name) for name in made[0].values], LONGEST) if made else []
    rows = []
    for k, name in enumerate(names):
        cells = "".join(_cell(column, k) for column in made[1:])
        rows.append(f"<tr id=L{k}><td>{k + 1}<th scope=row>{text(name)}{cells}")
    return (
        '<div class="scroll"><table id="layers"><thead><tr><th scope="col" title="order of execution">#</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def style(made: Sequence[Column]) -> str:
    """Rules by columns, shorter than a class on each cell: numbers flush right, and what is left out on paper."""
    numbers = [k for k, column in enumerate(made, 2) if any(isinstance(v, int | float) for v in column.values)]
    rules = f"{_cells_of([1, *numbers])}{{text-align:right}}"
    if len(made) > MOST_ON_PAPER:
        hidden = [k for k, column in enumerate(made, 2) if column.field not in ON_PAPER]
        rules += f"@media print{{{_cells_of(hidden)}{{display:none}}}}"
    return rules


def left_out_on_paper(made: Sequence[Column]) -> str:
    """A line that is printed only, where the table is too wide to be printed whole."""
    if len(made) <= MOST_ON_PAPER:
        return ""
    fields = {TITLES.get(c.field, (c.field,))[0]: None for c in made if c.field not in ON_PAPER}
    listed = ", ".join(map(text, fields))
    return f'<p class="small on-paper">Left out on paper, and there on the screen and in the JSON: {listed}.</p>'


def _cells_of(places: Sequence[int]) -> str:
    return ",".join(f"#layers td:nth-child({k}),#layers th:nth-child({k})" for k in places)


def _cell(column: Column, k: int) -> str:
    """A cell; its end tag is left out, as HTML allows: there are thousands."""
    value = column.values[k]
    if column.field == "status":
        return f"<td class={'bad' if value not in FINE else 'fine' if value == 'ok' else 'left'}>{text(value)}"
    return f"<td>{_shown(value, DIGITS_BESIDE_OTHERS if column.init else DIGITS)}"


def _shown(value: Any, digits: int = DIGITS) -> str:
    """A value of the report as text."""
    if value is None or value == "" or value == []:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return exact(value, digits) if math.isfinite(value) else "not finite"
    if isinstance(value, list):
        numbers = all(isinstance(item, int) for item in value)
        return text(("x" if numbers else "; ").join(map(str, value)))
    return text(value)
