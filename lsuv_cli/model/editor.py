"""Edits of a user's graph: collected while its working copy is analysed, then applied together, in place.

1. Fold: an initializer takes the place of one output of a node whose inputs are constants. The node is removed if
   none of its other outputs is read; otherwise only the folded output is renamed. Nodes and initializers that only
   removed nodes read are removed too.
2. Own: a node gets a new initializer, which no other node reads, at one of its inputs.
3. Overwrite: a stored tensor gets other values of its own shape and type.

An edit names values as the working copy does; `Graph.places` tells where they stand in the model. After `apply` the
working copy is out of date: the graph has to be built anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

from lsuv_cli.model.draft import Draft
from lsuv_cli.model.flatten import Place, free_name, inner_graphs
from lsuv_cli.model.graph import Graph

Array = NDArray[Any]


@dataclass(frozen=True)
class Fold:
    """Put an initializer in the place of a value that a node computes from constants."""

    value: str
    array: Array


@dataclass(frozen=True)
class Own:
    """Let the node that makes `output` read a tensor of its own at `position`, under this name or one like it."""

    output: str
    position: int
    name: str
    array: Array


@dataclass(frozen=True)
class Overwrite:
    """Give a stored tensor other values; without an array, only make sure that it is stored as a tensor."""

    name: str
    array: Array | None = None


Edit = Fold | Own | Overwrite


def apply(edits: Iterable[Edit], graph: Graph, draft: Draft) -> None:
    """Apply all edits to the draft's model."""
    editor = _Editor(graph, draft)
    for edit in edits:
        match edit:
            case Fold():
                editor.fold(edit)
            case Own():
                editor.own(edit)
            case Overwrite():
                editor.overwrite(edit)
    editor.drop_unread()


class _Editor:
    def __init__(self, graph: Graph, draft: Draft) -> None:
        self.graph = graph
        self.draft = draft
        self.main = draft.file.proto.graph
        self.reads = Counter(_reads(self.main))
        self.taken = {*self.reads, *graph.tensors, *graph.producer, *graph.inputs}
        self.unread: list[tuple[GraphProto, str]] = []

    def fold(self, edit: Fold) -> None:
        place = self.graph.places[edit.value]
        position = list(self.graph.nodes[self.graph.producer[edit.value]].output).index(edit.value)
        name = place.node.output[position]
        place.node.output[position] = free_name(f"{name}.folded", self.taken)
        self.taken.add(place.node.output[position])
        self.draft.append(place.body, name, edit.array)
        self._drop_if_unread(place)

    def own(self, edit: Own) -> None:
        place = self.graph.places[edit.output]
        name = free_name(edit.name, self.taken)
        self.taken.add(name)
        self.draft.append(place.body, name, edit.array)
        before = place.node.input[edit.position]
        place.node.input[edit.position] = name
        self.reads[before] -= 1
        self.reads[name] += 1

    def overwrite(self, edit: Overwrite) -> None:
        tensor = self._tensor(edit.name)
        if edit.array is not None:
            self.draft.store(tensor, edit.array)

    def _tensor(self, name: str) -> TensorProto:
        """The model's TensorProto of a stored tensor.

        A Constant node that holds its value in another attribute (`value_floats`) is first changed to hold a tensor.
        """
        place = self.graph.places.get(name)
        if name in self.graph.initializers or place is None:
            return self.graph.tensors[name]
        held: AttributeProto = place.node.attribute[0]
        if held.name != "value":
            tensor = numpy_helper.from_array(self.graph.array(name))
            del place.node.attribute[:]
            place.node.attribute.append(helper.make_attribute("value", tensor))
        return place.node.attribute[0].t

    def drop_unread(self) -> None:
        """Remove the nodes and initializers that only folded nodes read."""
        while self.unread:
            body, name = self.unread.pop()
            if self.reads[name] > 0:
                continue
            maker = next((node for node in body.node if name in node.output), None)
            if maker is not None:
                self._drop_if_unread(Place(body, maker))
                continue
            kept = next((k for k, tensor in enumerate(body.initializer) if tensor.name == name), None)
            if kept is not None and not any(i.name == name for i in body.input):
                del body.initializer[kept]

    def _drop_if_unread(self, place: Place) -> None:
        """Remove a node if nothing reads any of its outputs; its inputs are then checked by `drop_unread`."""
        if any(self.reads[name] > 0 for name in place.node.output):
            return
        outputs = list(place.node.output)
        index = next(k for k, node in enumerate(place.body.node) if list(node.output) == outputs)
        names = list(_node_reads(place.node))
        self.reads.subtract(names)
        del place.body.node[index]
        self.unread += [(place.body, name) for name in names]


def _reads(graph: GraphProto) -> Iterator[str]:
    """Every name that a graph's nodes, inner graphs or outputs read, once for each time it is read."""
    for node in graph.node:
        yield from _node_reads(node)
    yield from (output.name for output in graph.output)


def _node_reads(node: NodeProto) -> Iterator[str]:
    yield from (name for name in node.input if name)
    for inner in inner_graphs(node):
        yield from _reads(inner)
