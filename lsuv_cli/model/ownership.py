"""Who else reads a tensor, and what that allows: a write must never reach a reader that was not meant.

Before any weight is changed, every layer is given a tensor it may write:

1. A weight that is an expression of constants is folded into one tensor.
2. A weight that several layers share stays shared, is copied for each, or is left alone, as the user wants.
   If anything but a layer reads it too (an embedding, an excluded layer, a graph output), its layers are left
   alone, or get a copy.
3. A bias to be zeroed, or a running statistic to be reset, is overwritten only where all its readers want that;
   otherwise the node gets a tensor of its own.

A node inside a function of the model cannot be rewired, so there only the tensors themselves can change.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model.constants import Weight, numpy_type, readers_of
from lsuv_cli.model.draft import Draft
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Found, Layer, Recurrent
from lsuv_cli.settings import Tied

Array = NDArray[Any]


@dataclass
class Ownership:
    """What was decided, by the layers' outputs."""

    left_alone: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def note(self, use: _Use, text: str) -> None:
        self.notes.setdefault(use.item.output, []).append(text)


@dataclass(frozen=True)
class _Use:
    """A layer's reading of a weight."""

    item: Layer | Recurrent
    weight: Weight
    position: int


def settle_weights(draft: Draft, graph: Graph, found: Found, tied: Tied, *, recurrent: bool = False) -> Ownership:
    """Give each layer a weight tensor that can be written, or a reason why not (rules 1 and 2).

    Recurrent layers have a say only where their weights are to be written too.
    """
    decided = Ownership()
    uses: dict[str, list[_Use]] = defaultdict(list)
    for layer in found.layers:
        uses[layer.weight.base].append(_Use(layer, layer.weight, layer.position))
    for item in found.recurrent if recurrent else ():
        for position, (weight, _) in enumerate(item.weights, start=1):
            uses[weight.base].append(_Use(item, weight, position))
    for base, users in uses.items():
        _settle(draft, graph, found, decided, tied, base, users)
    return decided


def _settle(
    draft: Draft, graph: Graph, found: Found, decided: Ownership, tied: Tied, base: str, users: Sequence[_Use]
) -> None:
    mine = Counter((use.item.node, use.weight.value) for use in users)
    others = list((Counter(readers_of(graph, base)) - mine).elements())
    # A recurrent layer's matrices are not scaled, so they cannot be one with a layer's that are.
    mixed = len(users) > 1 and any(isinstance(use.item, Recurrent) for use in users)
    if tied is Tied.UNTIE and (others or len(users) > 1):
        own = users if others else users[1:]
        for use in own:
            _copy(draft, graph, decided, use, found)
        if not others:
            _fold(draft, decided, users[:1], found)
    elif others or mixed:
        reader = _reader(graph, others[0][0] if others else users[0].item.node)
        reason = f"its weight {base} is read by {reader} too; `tied='untie'` gives the layer its own copy"
        decided.left_alone.update({use.item.output: reason for use in users})
    elif len(users) > 1 and tied is Tied.SKIP:
        reason = f"its weight {base} is shared by {len(users)} layers (`tied='skip'`)"
        decided.left_alone.update({use.item.output: reason for use in users})
    else:
        _fold(draft, decided, users, found)
        for use in users if len(users) > 1 else ():
            decided.note(use, f"weight shared by {len(users)} layers")


def _fold(draft: Draft, decided: Ownership, users: Sequence[_Use], found: Found) -> None:
    """Put a tensor in the place of an expression that only these layers read."""
    weight = users[0].weight
    if weight.place == "folded":
        draft.fold(weight.base, found.folded[weight.base])
        for use in users:
            decided.note(use, "weight folded into one tensor")


def _copy(draft: Draft, graph: Graph, decided: Ownership, use: _Use, found: Found) -> None:
    output = next(name for name in graph.nodes[use.item.node].output if name)
    if output not in graph.own:
        decided.left_alone[use.item.output] = "its weight is shared and the layer is inside a function of the model"
        return
    weight = use.weight
    stored = found.folded[weight.base] if weight.place == "folded" else draft.array(weight.base)
    array = weight.seen(stored).astype(numpy_type(weight.read_as))
    draft.rewire(output, use.position, draft.add(f"{weight.base}.{use.item.name}", array))
    decided.note(use, f"weight untied from {weight.base}")


def _reader(graph: Graph, k: int) -> str:
    if k < 0:
        return "a graph output"
    node = graph.nodes[k]
    return f"{node.op_type} {node.name or next((name for name in node.output if name), '')}"


def overwrite(
    draft: Draft, graph: Graph, wanted: Mapping[tuple[int, int], float], stored: Mapping[str, Array]
) -> set[tuple[int, int]]:
    """Set the constants that nodes read at (node, input position) to one number each (rule 3).

    `stored` has the present value of every such constant. Gives the places that could not be set.
    """
    impossible: set[tuple[int, int]] = set()
    for (k, position), number in wanted.items():
        node = graph.nodes[k]
        value = node.input[position]
        present = stored[value]
        if np.all(present == number):
            continue
        readers = graph.readers.get(value, ())
        agreed = all(
            wanted.get((r, i)) == number
            for r in readers
            for i, name in enumerate(graph.nodes[r].input)
            if name == value
        )
        captured = any(value in graph.captured.get(r, ()) for r in readers)
        if value in graph.tensors and agreed and not captured and value not in graph.outputs and draft.holds(value):
            draft.store(value, np.full_like(present, number))
        elif node.output[0] in graph.own:
            name = draft.add(f"{value}.{node.name or node.output[0]}", np.full_like(present, number))
            draft.rewire(node.output[0], position, name)
        else:
            impossible.add((k, position))
    return impossible
