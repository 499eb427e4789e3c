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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.draft import Draft
from lsuv_cli.graph import Graph
from lsuv_cli.layers import Found, Layer, by_tensor, readers_of

Array = NDArray[Any]


class Tied(StrEnum):
    """What to do with a weight that several layers share."""

    SHARE = "share"
    UNTIE = "untie"
    SKIP = "skip"


@dataclass
class Ownership:
    """What was decided, by the layers' outputs."""

    left_alone: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    changed: bool = False

    def note(self, layer: Layer, text: str) -> None:
        self.notes.setdefault(layer.output, []).append(text)


def settle_weights(draft: Draft, graph: Graph, found: Found, tied: Tied) -> Ownership:
    """Give each layer a weight tensor that can be written, or a reason why not (rules 1 and 2)."""
    decided = Ownership()
    for base, users in by_tensor(found.layers).items():
        mine = {(layer.node, layer.weight.value) for layer in users}
        others = [(k, name) for k, name in readers_of(graph, base) if (k, name) not in mine]
        if users[0].weight.place == "folded":
            _fold(draft, decided, users, bool(others), found.folded[base])
            if len(users) == 1 or tied is Tied.SHARE:
                continue
        if not others and len(users) == 1:
            continue
        if tied is Tied.UNTIE:
            for layer in users if others else users[1:]:
                _copy(draft, graph, decided, layer, found)
        elif others:
            reader = _reader(graph, others[0][0])
            reason = f"its weight {base} is read by {reader} too; --tied untie gives the layer its own copy"
            decided.left_alone.update({layer.output: reason for layer in users})
        elif tied is Tied.SKIP:
            reason = f"its weight {base} is shared by {len(users)} layers (--tied skip)"
            decided.left_alone.update({layer.output: reason for layer in users})
        else:
            for layer in users:
                decided.note(layer, f"weight shared by {len(users)} layers")
    return decided


def _fold(draft: Draft, decided: Ownership, users: Sequence[Layer], others: bool, array: Array) -> None:
    value = users[0].weight.value
    if others:
        name = draft.add(f"{value}.lsuv", array)
        for layer in users:
            draft.rewire(_output(draft, layer), layer.position, name)
    else:
        draft.fold(value, array)
    for layer in users:
        decided.note(layer, "weight folded into one tensor")
    decided.changed = True


def _copy(draft: Draft, graph: Graph, decided: Ownership, layer: Layer, found: Found) -> None:
    output = graph.nodes[layer.node].output[0]
    if output not in graph.own:
        decided.left_alone[layer.output] = "its weight is shared and the layer is inside a function of the model"
        return
    weight = layer.weight
    array = found.folded.get(weight.value) if weight.place == "folded" else weight.seen(draft.array(weight.base))
    assert array is not None
    draft.rewire(output, layer.position, draft.add(f"{weight.base}.{layer.name}", array))
    decided.note(layer, f"weight untied from {weight.base}")
    decided.changed = True


def _output(draft: Draft, layer: Layer) -> str:
    """The first output of a layer's own node, by which the user's graph knows it."""
    if layer.bias is not None and layer.bias.node >= 0:
        add = next(node for node in draft.file.proto.graph.node if layer.output in node.output)
        return str(add.input[1 - layer.bias.position])
    return layer.output


def _reader(graph: Graph, k: int) -> str:
    if k < 0:
        return "a graph output"
    node = graph.nodes[k]
    return f"{node.op_type} {node.name or node.output[0]}"


def overwrite(
    draft: Draft, graph: Graph, wanted: Mapping[tuple[int, int], float], stored: Mapping[str, Array]
) -> tuple[set[tuple[int, int]], bool]:
    """Set the constants that nodes read at (node, input position) to one number each (rule 3).

    `stored` has the present value of every such constant. Gives the places that could not be set, and whether the
    graph's structure changed.
    """
    impossible: set[tuple[int, int]] = set()
    changed = False
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
            changed = True
        else:
            impossible.add((k, position))
    return impossible, changed
