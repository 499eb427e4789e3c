"""Constants: the tensor that stores one, how a node sees it, and what an expression of constants comes to.

1. A constant that a node reads is a stored tensor (an initializer or the value of a Constant node), perhaps behind
   nodes that only rename elements (views.py). A write goes to the stored tensor, through the inverse views.
2. Where the chain of views ends at any other node, that node's value is an expression of constants. It is worked
   out by onnx's reference evaluator, so that it can be folded into one tensor.
3. Quantized and sparse tensors, and those inside a function of the model, cannot be written: LeftAlone says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from lsuv_cli.model import views
from lsuv_cli.model.graph import Graph, attribute
from lsuv_cli.model.views import Shape, View

Array = NDArray[Any]
Read = Callable[[str], Array]  # a stored tensor's present values

FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.DOUBLE: "float64",
}
VIEW_OPS = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})


class LeftAlone(Exception):
    """Why something that looks like a layer, or a weight, is left as it was."""


@dataclass(frozen=True)
class Weight:
    """A constant as an operator reads it, and the stored tensor behind it."""

    value: str  # the name the operator reads
    base: str  # the stored tensor's name, or the name of the expression to be folded into one
    place: str  # "initializer", "external" (one in a data file), "constant" (a Constant node) or "folded"
    dtype: str  # of the stored tensor
    shape: Shape  # as the operator reads it
    steps: tuple[View, ...] = ()
    cast: str = ""  # the type as the operator reads it, where a Cast changes it

    @property
    def read_as(self) -> str:
        return self.cast or self.dtype

    def stored(self, array: Array) -> Array:
        """What the operator is to read, in the stored tensor's layout."""
        for step in reversed(self.steps):
            array = step.backward(array)
        return array

    def seen(self, stored: Array) -> Array:
        """The stored tensor in the layout in which the operator reads it."""
        for step in self.steps:
            stored = step.forward(stored)
        return stored


class Constants:
    """The constants of one graph; expressions are worked out once."""

    def __init__(self, graph: Graph, read: Read) -> None:
        self.graph = graph
        self.read = read
        self.folded: dict[str, Array] = {}

    def weight(self, value: str) -> Weight:
        """Where a constant lives: follow the nodes that only rename elements."""
        chain: list[NodeProto] = []
        base = value
        while base not in self.graph.tensors:
            if base in self.graph.sparse:
                raise LeftAlone("its weight is a sparse tensor")
            node = self.graph.nodes[self.graph.producer[base]]
            if not is_view(node):
                break
            chain.append(node)
            base = node.input[0]
        place, dtype, shape = self._stored(base)
        steps: list[View] = []
        cast = ""
        for node in reversed(chain):
            if node.op_type == "Cast":
                cast = _float_name(attribute(node, "to"), "cast to")
            elif node.op_type != "Identity":
                steps.append(self._step(node, shape))
                shape = steps[-1].after
        return Weight(value, base, place, dtype, shape, tuple(steps), cast if cast != dtype else "")

    def _stored(self, base: str) -> tuple[str, str, Shape]:
        """Place, type and shape of what a chain of views begins with."""
        if base in self.graph.tensors:
            tensor = self.graph.tensors[base]
            dtype = _float_name(tensor.data_type, "stored as")
            if base in self.graph.initializers:
                external = tensor.data_location == TensorProto.EXTERNAL
                return "external" if external else "initializer", dtype, tuple(tensor.dims)
            if base not in self.graph.own:
                raise LeftAlone("its weight is a constant inside a function of the model")
            return "constant", dtype, tuple(tensor.dims)
        if any(self.graph.nodes[k].op_type == "DequantizeLinear" for k in self._expression(base)[0]):
            raise LeftAlone("its weight is quantized (behind DequantizeLinear); start from the float model")
        if base not in self.folded:
            self.folded[base] = self.evaluate(base)
        if base not in self.graph.own:
            raise LeftAlone("its weight is computed inside a function of the model")
        array = self.folded[base]
        return "folded", _float_name(helper.np_dtype_to_tensor_dtype(array.dtype), "of type"), array.shape

    def _step(self, node: NodeProto, shape: Shape) -> View:
        """The view that one node takes of a tensor of the given shape."""
        second = node.input[1] if len(node.input) > 1 and node.input[1] else None
        numbers = [int(x) for x in np.ravel(self.evaluate(second))] if second else None
        match node.op_type:
            case "Transpose":
                return views.transposed(shape, attribute(node, "perm"))
            case "Flatten":
                return views.flattened(shape, attribute(node, "axis", 1))
            case "Squeeze":
                return views.squeezed(shape, attribute(node, "axes", numbers))
            case "Unsqueeze":
                return views.unsqueezed(shape, attribute(node, "axes", numbers) or ())
        wanted = attribute(node, "shape", numbers)
        return views.reshaped(shape, wanted or (), bool(attribute(node, "allowzero", 0)))

    def _expression(self, value: str) -> tuple[set[int], set[str]]:
        """The nodes that make a constant, and the stored tensors they begin with."""
        stored: set[str] = set()
        needed: set[int] = set()
        wanted = [value]
        while wanted:
            name = wanted.pop()
            if name in self.graph.tensors:
                stored.add(name)
            elif name in self.graph.sparse:
                raise LeftAlone("its weight is computed from a sparse tensor")
            elif (k := self.graph.producer[name]) not in needed:
                needed.add(k)
                wanted.extend(self.graph.reads(k))
        return needed, stored

    def shape(self, value: str) -> Shape:
        """The shape of any constant, whether it can be written or not."""
        if value in self.graph.tensors:
            return tuple(self.graph.tensors[value].dims)
        return self.evaluate(value).shape

    def evaluate(self, value: str) -> Array:
        """The value of a constant."""
        if value in self.graph.tensors:
            return np.asarray(self.read(value))
        needed, stored = self._expression(value)
        nodes = [self.graph.nodes[k] for k in sorted(needed)]
        from onnx.reference import ReferenceEvaluator

        try:
            tensors = [numpy_helper.from_array(np.asarray(self.read(name)), name) for name in sorted(stored)]
            body = helper.make_graph(nodes, "constants", [], [onnx.ValueInfoProto(name=value)], tensors)
            model = helper.make_model(body, opset_imports=self.graph.opsets, ir_version=max(self.graph.ir_version, 4))
            with np.errstate(all="ignore"):
                (array,) = ReferenceEvaluator(model).run(None, {})
        except Exception as problem:
            ops = ", ".join(dict.fromkeys(node.op_type for node in nodes))
            raise LeftAlone(f"its weight is computed by {ops}, which cannot be folded") from problem
        return np.asarray(array)


def evaluate(graph: Graph, read: Read, value: str) -> Array | None:
    """The value of any constant of a graph; None if it cannot be worked out."""
    try:
        return Constants(graph, read).evaluate(value)
    except LeftAlone:
        return None


def is_view(node: NodeProto) -> bool:
    """Whether a node only renames the elements of its first input."""
    return node.op_type in VIEW_OPS and node.domain in {"", "ai.onnx"}


def numpy_type(name: str) -> np.dtype[Any]:
    """The numpy type of one of FLOATS."""
    kind = next(kind for kind, known in FLOATS.items() if known == name)
    return np.dtype(helper.tensor_dtype_to_np_dtype(kind))


def readers_of(graph: Graph, base: str) -> Iterator[tuple[int, str]]:
    """Every node that reads a stored tensor, directly or through views, with the name it reads it by.

    A graph output is a reader too; it is given as node -1. A node that reads it at two inputs is given twice.
    """
    names = [base]
    while names:
        name = names.pop()
        if name in graph.outputs:
            yield -1, name
        for k in graph.readers.get(name, ()):
            node = graph.nodes[k]
            times = list(node.input).count(name) + graph.captured.get(k, ()).count(name)
            if is_view(node) and node.input[0] == name and times == 1:
                names.extend(node.output)
            else:
                yield from [(k, name)] * times


def _float_name(kind: int, how: str) -> str:
    if kind not in FLOATS:
        name = TensorProto.DataType.Name(kind).lower()
        raise LeftAlone(f"its weight is {how} {name}, which cannot be initialized")
    return FLOATS[kind]
