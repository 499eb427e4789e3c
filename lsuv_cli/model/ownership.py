"""Decides whether a tensor may be overwritten in place: only if every reader should see the new value.

Before any weight is changed, every layer is given a tensor it may write:

1. A weight that is an expression of constants is folded into one tensor.
2. A weight that several layers share stays shared, is copied for each, or is left alone, as the user wants.
   If anything but a layer to be initialized reads it too (an embedding, an excluded layer, a graph output), its
   layers are left alone, or get a copy. A node that reads only the weight's shape does not count.
3. A bias to be zeroed, or a running statistic to be reset, is overwritten only if all its readers are to read the new
   value; otherwise the node gets a tensor of its own.

A node inside a function of the model cannot be rewired, so there only the tensors themselves can change.
This module changes nothing: it returns edits for editor.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model.constants import Weight, numpy_type, readers_of
from lsuv_cli.model.editor import Edit, Fold, Overwrite, Own
from lsuv_cli.model.flatten import label
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer, LayerSet, Recurrent
from lsuv_cli.settings import Tied

Array = NDArray[Any]
Spot = tuple[int, int]  # a node, and the position of one of its inputs


@dataclass
class Ownership:
    """The layers that are left alone and notes, both by the layers' outputs, and the edits to apply."""

    left_alone: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)


@dataclass(frozen=True)
class _Use:
    """An input at which a layer reads a weight."""

    item: Layer | Recurrent
    weight: Weight
    position: int


def settle_weights(graph: Graph, layers: LayerSet, tied: Tied, *, recurrent: bool = False) -> Ownership:
    """Give each layer a weight tensor that can be written, or the reason why there is none (rules 1 and 2).

    With `recurrent`, recurrent layers' weights are written too; otherwise a recurrent layer is one more reader.
    """
    uses: dict[str, list[_Use]] = defaultdict(list)
    for layer in layers.layers:
        uses[layer.weight.base].append(_Use(layer, layer.weight, layer.position))
    for item in layers.recurrent if recurrent else ():
        for position, (weight, _) in enumerate(item.weights, start=1):
            uses[weight.base].append(_Use(item, weight, position))
    settlement = _Settlement(graph, layers.folded, tied)
    for base, users in uses.items():
        settlement.settle(base, users)
    return settlement.decided


class _Settlement:
    def __init__(self, graph: Graph, folded: Mapping[str, Array], tied: Tied) -> None:
        self.graph, self.folded, self.tied = graph, folded, tied
        self.decided = Ownership()

    def settle(self, base: str, users: Sequence[_Use]) -> None:
        mine = Counter((use.item.node, use.weight.value) for use in users)
        others = list((Counter(readers_of(self.graph, base)) - mine).elements())
        # A recurrent layer's matrices are not scaled, so it cannot share a weight with a layer whose weight is.
        mixed = len(users) > 1 and any(isinstance(use.item, Recurrent) for use in users)
        if len(users) > 1 and any(use.weight.dropped for use in users):
            self.leave(users, f"its weight {base} is shared by {len(users)} layers and dropped at random")
        elif self.tied is Tied.UNTIE and (others or len(users) > 1):
            for use in users if others else users[1:]:
                self.copy(use)
            if not others:
                self.keep(users[:1])
        elif others or mixed:
            reader = self.reader(others[0][0] if others else users[0].item.node)
            self.leave(users, f"its weight {base} is read by {reader} too; `tied='untie'` gives the layer its own copy")
        elif len(users) > 1 and self.tied is Tied.SKIP:
            self.leave(users, f"its weight {base} is shared by {len(users)} layers (`tied='skip'`)")
        else:
            self.keep(users)
            for use in users if len(users) > 1 else ():
                self.note(use, f"weight shared by {len(users)} layers")

    def keep(self, users: Sequence[_Use]) -> None:
        """Let layers write their weight, which nothing else reads: in place, or, for an expression, once folded."""
        weight = users[0].weight
        if weight.place == "folded":
            self.decided.edits.append(Fold(weight.base, self.folded[weight.base]))
            for use in users:
                self.note(use, "weight folded into one tensor")
        elif weight.place == "constant":
            self.decided.edits.append(Overwrite(weight.base))

    def copy(self, use: _Use) -> None:
        output = next(name for name in self.graph.nodes[use.item.node].output if name)
        if output not in self.graph.places:
            self.leave([use], "its weight is shared and the layer is inside a function of the model")
            return
        weight = use.weight
        if weight.value in self.graph.chosen:
            self.leave([use], f"its weight {weight.base} is shared, and an If chooses it by the data")
            return
        if weight.dropped:
            self.leave([use], f"its weight {weight.base} is read elsewhere too and dropped at random")
            return
        stored = self.folded[weight.base] if weight.place == "folded" else self.graph.array(weight.base)
        array = weight.seen(stored).astype(numpy_type(weight.read_as))
        self.decided.edits.append(Own(output, use.position, f"{weight.base}.{use.item.name}", array))
        self.note(use, f"weight untied from {weight.base}")

    def leave(self, users: Sequence[_Use], reason: str) -> None:
        self.decided.left_alone.update({use.item.output: reason for use in users})

    def note(self, use: _Use, text: str) -> None:
        self.decided.notes.setdefault(use.item.output, []).append(text)

    def reader(self, k: int) -> str:
        if k < 0:
            return "a graph output, or a branch that the data does not take,"
        return f"{self.graph.nodes[k].op_type} {label(self.graph.nodes[k])}"


def overwrite(graph: Graph, wanted: Mapping[Spot, float], values: Mapping[str, Array]) -> tuple[list[Edit], set[Spot]]:
    """Fill the constant that each spot in `wanted` reads with that spot's number (rule 3).

    `values` has the present value of every such constant. Returns the edits, and the spots that cannot be set.
    """
    edits: dict[str, Edit] = {}
    impossible: set[Spot] = set()
    for (k, position), number in wanted.items():
        node = graph.nodes[k]
        value = node.input[position]
        present = values[value]
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
        stored = graph.is_writable(value)
        elsewhere = value in graph.outputs or value in graph.untaken_reads
        if stored and agreed and not captured and not elsewhere:
            edits[value] = Overwrite(value, np.full_like(present, number))
        elif node.output[0] in graph.places and value not in graph.chosen:
            name = f"{value}.{label(node)}"
            edits[f"{k} {position}"] = Own(node.output[0], position, name, np.full_like(present, number))
        else:
            impossible.add((k, position))
    return list(edits.values()), impossible
