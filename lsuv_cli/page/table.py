"""The table of layers: every field of the report's JSON, a row for each layer, a column for each field in use.

In a comparison a field that has the same values under all initializations has one column; any other field has one
column for each initialization.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lsuv_cli.page.markup import exact, text

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
    return fields | {name: [item[name] for item in details] for name in DETAILS if details}


def target_of(layer: Mapping[str, Any]) -> float:
    """The variance that a layer is to have."""
    target = layer.get("target")
    return 1.0 if target is None else float(target)


def table(made: Sequence[Column]) -> str:
    """The table in HTML. Without a script it is whole, in the order of execution."""
    head = "".join(f'<th scope="col" title="{text(column.about)}">{text(column.title)}</th>' for column in made)
    rows = []
    for k in range(len(made[0].values) if made else 0):
        cells = "".join(_cell(column, k) for column in made[1:])
        rows.append(f'<tr id="L{k}"><td>{k + 1}<th scope="row">{text(made[0].values[k])}</th>{cells}')
    return (
        '<div class="scroll"><table id="layers"><thead><tr><th scope="col" title="order of execution">#</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def style(made: Sequence[Column]) -> str:
    """A rule that sets columns of numbers flush right: shorter than a class on each of their cells."""
    numbers = [k for k, column in enumerate(made, 2) if any(isinstance(v, int | float) for v in column.values)]
    cells = ",".join(f"#layers td:nth-child({k}),#layers th:nth-child({k})" for k in (1, *numbers))
    return f"{cells}{{text-align:right}}"


def _cell(column: Column, k: int) -> str:
    """A cell; its end tag is left out, as HTML allows: there are thousands."""
    value = column.values[k]
    if value is None or value == "" or value == []:
        return "<td>"
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}"
    if isinstance(value, float):
        return f"<td>{exact(value)}"
    if isinstance(value, dict):
        parts = (f"{key.replace('_', ' ')} {exact(v) if isinstance(v, float) else v}" for key, v in value.items())
        return f"<td>{text('; '.join(parts))}"
    if isinstance(value, list):
        numbers = all(isinstance(item, int) for item in value)
        return f"<td>{text(('x' if numbers else '; ').join(map(str, value)))}"
    if column.title.startswith("status"):
        return f"<td class={'bad' if value not in FINE else 'fine' if value == 'ok' else 'left'}>{text(value)}"
    return f"<td>{text(value)}"
