"""A model to run, put together node by node.

Large tensors are handed to the session beside the model, so that no model meets protobuf's 2 GiB limit and no tensor is
copied to be parsed. Small constants are inlined, because shape inference has to see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper

from lsuv_cli.model.file import is_elsewhere
from lsuv_cli.model.flatten import inner_graphs, nodes_inside
from lsuv_cli.model.graph import SHAPE_BYTES, Graph, attribute
from lsuv_cli.model.random_ops import is_random, seeded
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.precision import HALF, Retype, retyped_node

Array = NDArray[Any]

# Operators whose output onnxruntime keeps in the memory of their input.
SAME_MEMORY = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"})


class Meter(Protocol):
    """Accumulates one layer's moments, batch after batch, from the sums of each."""

    def add(self, sums: Any) -> None:
        """Add the sums of one batch."""

    def result(self) -> Moments:
        """The layer's moments over all runs so far."""


class Measurement(Protocol):
    """How one layer is measured: a probe in calibration, a gauge in verification."""

    @property
    def fetches(self) -> tuple[str, ...]:
        """The model's outputs that its sums are made of."""

    def sums(self, fetched: Sequence[Array]) -> Any:
        """The few sums that one batch adds to a meter, from its fetched outputs."""

    def meter(self) -> Meter:
        """A new meter at zero."""


@dataclass(frozen=True)
class StageModel:
    """A model to run, its large tensors, and the names of its inputs and outputs."""

    proto: onnx.ModelProto
    tensors: Mapping[str, Array]
    feeds: Mapping[str, str]  # value -> the model's input that takes it
    fetches: tuple[str, ...]  # values for later stages
    measurements: tuple[Measurement, ...]


class ModelBuilder:
    """A model being built: nodes of the graph, with element types replaced, and nodes that the tool adds."""

    def __init__(
        self,
        graph: Graph,
        prefix: str,
        types: Mapping[str, TypeProto],
        retype: Retype,
        rounded: Mapping[str, int] | None = None,
    ) -> None:
        self.graph = graph
        self.prefix = prefix
        self.types = types
        self.retype = retype
        self.rounded = rounded or {}  # value -> the narrower type to round it to, as the model would
        self.nodes: list[NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.feeds: dict[str, str] = {}
        self.inline: dict[str, TensorProto] = {}
        self.sparse: list[onnx.SparseTensorProto] = []
        self.tensors: dict[str, Array] = {}
        self.known: set[str] = set()
        self.put_out: list[str] = []  # values that nobody reads, but that onnxruntime must not write over others

    def own(self, kind: str, value: str) -> str:
        """The name of a value that the tool adds, of some kind and derived from a value of the graph."""
        return f"{self.prefix}{kind}/{value}"

    def take(self, name: str, source: str) -> None:
        """Make a value an input of the model, under the name `source`."""
        self.inputs.append(onnx.ValueInfoProto(name=source, type=self.types[name]))
        self.feeds[name] = source
        self.known.add(name)

    def pull(self, name: str, input_type: Callable[[str], TypeProto]) -> None:
        """Add everything that computes a value: nodes, constants, inputs of the model."""
        wanted = [name]
        indices: set[int] = set()
        made = {output for node in self.nodes for output in node.output} | self.known
        while wanted:
            value = wanted.pop()
            if value in made:
                continue
            if value in self.graph.constant:
                self.need(value)
            elif value in self.graph.inputs:
                self.types = {**self.types, value: input_type(value)}
                self.take(value, value)
                made.add(value)
            elif (k := self.graph.producer[value]) not in indices:
                indices.add(k)
                wanted.extend(self.graph.reads(k))
        for k in sorted(indices):
            self.add(self.graph.nodes[k])

    def add(self, node: NodeProto) -> None:
        """Add a node of the graph, with its element types replaced and, if it draws random numbers, with a seed."""
        if is_random(node, self.graph.tensors):
            node = seeded(node)
        node = retyped_node(node, self.retype)
        narrow = [name for name in node.output if name in self.rounded]
        if narrow:
            copied = NodeProto()
            copied.CopyFrom(node)
            copied.output[:] = [self.own("wide", name) if name in narrow else name for name in node.output]
            node = copied
        self.nodes.append(node)
        if node.op_type == "BatchNormalization" and attribute(node, "training_mode", 0) and not self.keeps(node):
            self.put_out += filter(None, node.output[1:])
        for name in narrow:
            kind = self.rounded[name]
            cast = helper.make_node("Cast", [self.own("wide", name)], [self.own("narrow", name)], to=kind)
            back = helper.make_node("Cast", [self.own("narrow", name)], [name], to=self.retype[kind])
            self.nodes += [cast, back]

    def keeps(self, node: NodeProto) -> bool:
        """Whether unoptimized onnxruntime keeps a BatchNormalization's new running statistics for the next batch.

        It writes them over the old ones, unless they are put out. That lasts if the old ones are a tensor, or the
        same memory under another name; in half precision they are cast anew for each batch, and what other nodes
        make is made anew as well. An optimizer, or our own replacement of types, would make a float32 tensor of them.
        """
        for name in node.input[3:5]:
            while name in self.graph.producer and self.graph.nodes[self.graph.producer[name]].op_type in SAME_MEMORY:
                name = self.graph.nodes[self.graph.producer[name]].input[0]
            if name not in self.graph.tensors or self.graph.tensors[name].data_type in HALF:
                return False
        return True

    def need(self, name: str) -> None:
        """Add a constant that a node reads, or the nodes that compute it from other constants."""
        if not name or name in self.known or name not in self.graph.constant:
            return
        self.known.add(name)
        if name in self.graph.tensors:
            tensor = self.graph.tensors[name]
            if tensor.data_type in self.retype or tensor.data_type == TensorProto.FLOAT:
                self.constant(name, self.graph.array(name))
            else:
                self.other_constant(name, tensor)
        elif name in self.graph.sparse:
            sparse = onnx.SparseTensorProto()
            sparse.CopyFrom(self.graph.sparse[name])
            sparse.values.name = name
            self.sparse.append(sparse)
        else:
            k = self.graph.producer[name]
            for read in self.graph.reads(k):
                self.need(read)
            self.known.update(self.graph.nodes[k].output)
            self.add(self.graph.nodes[k])

    def constant(self, name: str, array: Array) -> None:
        """Add a float tensor: inline if it is small, else beside the model."""
        self.known.add(name)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        target = self.retype.get(kind, kind)
        if target != kind:
            array = array.astype(helper.tensor_dtype_to_np_dtype(target))
        if array.nbytes <= SHAPE_BYTES:
            self.inline[name] = numpy_helper.from_array(np.asarray(array, order="C"), name)
        else:
            self.tensors[name] = np.asarray(array, order="C")

    def other_constant(self, name: str, tensor: TensorProto) -> None:
        """Add a tensor of integers, strings, booleans, doubles or an exotic type, unchanged."""
        copy = TensorProto()
        if is_elsewhere(tensor):
            array = self.graph.array(name)
            if array.nbytes > SHAPE_BYTES:
                self.tensors[name] = np.asarray(array, order="C")
                return
            copy = numpy_helper.from_array(np.asarray(array, order="C"))
        else:
            copy.CopyFrom(tensor)
        copy.name = name
        self.inline[name] = copy

    def finish(self, outputs: Sequence[str], measurements: Sequence[Measurement]) -> StageModel:
        graph = onnx.GraphProto(name="stage", node=self.nodes, input=self.inputs)
        seen: set[str] = set()
        for node in graph.node:  # onnxruntime wants node names to be unique or empty
            if node.name in seen:
                node.name = ""
            seen.add(node.name)
        graph.initializer.extend(self.inline.values())
        graph.sparse_initializer.extend(self.sparse)
        for name, array in self.tensors.items():
            stub = graph.initializer.add(name=name, dims=array.shape)
            stub.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
            stub.data_location = TensorProto.EXTERNAL
            # This location is never opened: the session gets the tensor in memory under the same name.
            stub.external_data.add(key="location", value="in-memory")
        # onnxruntime infers the type of an output that has only a name.
        fetched = [*outputs, *(name for each in measurements for name in each.fetches)]
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys((*fetched, *self.put_out)))
        model = onnx.ModelProto(ir_version=max(self.graph.ir_version, 4), graph=graph)
        model.opset_import.extend(self.graph.opsets)
        model.functions.extend(self.graph.functions)
        return StageModel(model, self.tensors, self.feeds, tuple(outputs), tuple(measurements))


def own_prefix(graph: Graph) -> str:
    """A prefix for the names of values that the tool adds: no name in the graph or its subgraphs starts with it."""
    inside = (inner for node in graph.nodes for inner in (node, *nodes_inside(node)))
    names = {*graph.inputs, *graph.tensors, *graph.sparse, *(n for node in inside for n in (*node.input, *node.output))}
    names |= {i.name for node in graph.nodes for inner in inner_graphs(node) for i in inner.input}
    prefix = "lsuv:"
    while any(name.startswith(prefix) for name in names):
        prefix = f"_{prefix}"
    return prefix
