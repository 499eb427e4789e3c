"""Constants: the stored tensor, the views through which a node reads it, and the value of a constant expression.

1. A constant that a node reads is a stored tensor (an initializer or the value of a Constant node), perhaps behind
   views (views.py): nodes that change its shape, axis order or type, or repeat it. A write to the stored tensor goes
   back through the views.
2. Where the chain of views ends at any other node, that node's value is an expression of constants (`Graph.evaluate`),
   which can be folded into one tensor.
3. A weight that a Dropout drops in training mode (DropConnect) is the stored tensor in front of the Dropout: what the
   operator reads, Dropout(W), is linear in W.
4. Quantized tensors, sparse tensors and expressions inside a function of the model cannot be written: LeftAlone says
   why.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from lsuv_cli.model import views
from lsuv_cli.model.flatten import label
from lsuv_cli.model.graph import LARGEST_CONSTANT, Graph, Unknown, attribute, is_standard
from lsuv_cli.model.random_ops import drops
from lsuv_cli.model.views import Shape, View

Array = NDArray[Any]

FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.DOUBLE: "float64",
}
VIEW_OPS = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Expand", "Tile"})
LARGEST_COMPARED = 1 << 24  # elements of a stack of matrices that are compared with one another
SHAPE_OPS = frozenset({"Shape", "Size"})


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
    dropped: bool = False  # a Dropout in training mode is among the views

    @property
    def read_as(self) -> str:
        return self.cast or self.dtype

    @property
    def has_equal_slices(self) -> bool:
        return any(step.equal for step in self.steps)

    def stored(self, array: Array) -> Array:
        """An array in the operator's layout, brought into the stored tensor's layout."""
        for step in reversed(self.steps):
            array = step.backward(array)
        return array

    def seen(self, stored: Array) -> Array:
        """An array in the stored tensor's layout, brought into the operator's layout."""
        for step in self.steps:
            stored = step.forward(stored)
        return stored


class Constants:
    """The weights of one graph; each constant expression is evaluated once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.folded: dict[str, Array] = {}

    def weight(self, value: str) -> Weight:
        """The stored tensor behind a constant, found by following the views back from it."""
        chain: list[NodeProto] = []
        base = value
        while base not in self.graph.tensors:
            if base in self.graph.sparse:
                raise LeftAlone("its weight is a sparse tensor")
            node = self.graph.nodes[self.graph.producer[base]]
            if not is_view(node) and not self._drops(node, base):
                break
            chain.append(node)
            base = node.input[0]
        if base in self.graph.random:
            raise LeftAlone("its weight is drawn at random, anew in every run")
        place, dtype, shape = self._stored(base)
        steps: list[View] = []
        cast = ""
        for node in reversed(chain):
            if node.op_type == "Cast":
                cast = _float_name(attribute(node, "to"), "cast to")
            elif node.op_type not in {"Identity", "Dropout"}:
                steps.append(self._step(node, shape))
                shape = steps[-1].after
                if steps[-1].copies and math.prod(shape) > LARGEST_CONSTANT:
                    raise LeftAlone(f"its weight repeats a tensor to {math.prod(shape):,} elements")
        dropped = any(node.op_type == "Dropout" for node in chain)
        return Weight(value, base, place, dtype, shape, tuple(steps), cast if cast != dtype else "", dropped)

    def with_equal_slices(self, weight: Weight) -> Weight:
        """A stack of matrices, with the axes along which all are equal: exporters repeat a matrix for every sample."""
        if len(weight.shape) < 3 or math.prod(weight.shape) > LARGEST_COMPARED or weight.dropped:
            return weight
        stored = self.folded[weight.base] if weight.place == "folded" else self.graph.array(weight.base)
        view = views.of_equal_slices(weight.seen(np.asarray(stored)), range(len(weight.shape) - 2))
        return weight if view is None else replace(weight, steps=(*weight.steps, view))

    def no_weight(self, weight: Weight, products: Collection[str]) -> str:
        """Why a constant is not learned number by number, as a weight is; empty if it may be.

        A weight that is normalized, masked, adapted or packed (v·g/|v|, m·W, W + B·A, Concat(Q, K, V)) is computed from
        stored tensors of as many numbers. A value of fewer is what a layer makes of constants, or a mask, a grid, a
        filter bank; but a ConstantOfShape by itself stands for a weight in a model that was published without weights.
        """
        if weight.place == "folded" and self.graph.nodes[self.graph.producer[weight.base]].op_type == "ConstantOfShape":
            return ""
        if weight.place != "folded":
            alone = math.prod(self.graph.shape(weight.base)) == 1 < math.prod(weight.shape)
            return "its constant is no weight, but one number, repeated" if alone else ""
        graph, seen, wanted = self.graph, set[str](), [weight.base]
        numbers, last = 0, -1  # of stored tensors, and the last product, on the way back to products
        while wanted:
            name = wanted.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in graph.tensors:
                numbers += math.prod(graph.shape(name)) if graph.tensors[name].data_type in FLOATS else 0
            elif graph.nodes[k := graph.producer[name]].op_type in products:
                last = max(last, k)
            else:
                wanted += graph.reads(k)
        if numbers >= self.folded[weight.base].size:
            return ""
        if last < 0:
            return "its constant is no weight: it is computed from fewer numbers than it has"
        node = graph.nodes[last]
        return f"its constant is no weight, but what {node.op_type} {label(node)} makes of others"

    def _drops(self, node: NodeProto, name: str) -> bool:
        return drops(node, self.graph.tensors) and node.output[0] == name

    def _stored(self, base: str) -> tuple[str, str, Shape]:
        """Place, type and shape of the stored tensor, or of the expression, at the start of a chain of views."""
        graph = self.graph
        if base in graph.tensors:
            tensor = graph.tensors[base]
            dtype = _float_name(tensor.data_type, "stored as")
            if base in graph.initializers:
                external = tensor.data_location == TensorProto.EXTERNAL
                return "external" if external else "initializer", dtype, tuple(tensor.dims)
            if not graph.is_writable(base):
                raise LeftAlone("its weight is a constant inside a function of the model that cannot be written there")
            return "constant", dtype, tuple(tensor.dims)
        nodes = self._expression(base)
        if any(graph.nodes[k].op_type == "DequantizeLinear" for k in nodes):
            raise LeftAlone("its weight is quantized (behind DequantizeLinear); start from the float model")
        if any(name in graph.chosen for k in nodes for name in graph.reads(k)):
            raise LeftAlone("its weight is computed from a constant that an If chooses by the data")
        if base not in self.folded:
            self.folded[base] = self._evaluate(base)
        if base not in graph.places:
            raise LeftAlone("its weight is computed inside a function of the model")
        array = self.folded[base]
        return "folded", _float_name(helper.np_dtype_to_tensor_dtype(array.dtype), "of type"), array.shape

    def _expression(self, base: str) -> set[int]:
        try:
            return self.graph.expression(base)[0]
        except Unknown as why:
            raise LeftAlone(str(why).replace("it is", "its weight is", 1)) from why

    def _evaluate(self, value: str) -> Array:
        try:
            return self.graph.evaluate(value)
        except Unknown as why:
            raise LeftAlone(str(why).replace("it is", "its weight is", 1)) from why

    def _step(self, node: NodeProto, shape: Shape) -> View:
        """The view that one node takes of a tensor of the given shape."""
        second = node.input[1] if len(node.input) > 1 and node.input[1] else None
        numbers = [int(x) for x in np.ravel(self._evaluate(second))] if second else None
        try:
            return _view(node, shape, numbers)
        except ValueError as why:
            raise LeftAlone(f"its weight is behind {node.op_type} {label(node)}, which does not fit it") from why


def _view(node: NodeProto, shape: Shape, numbers: list[int] | None) -> View:
    """The view that a node takes of a tensor; `numbers` are its second input. A ValueError if it does not fit."""
    match node.op_type:
        case "Transpose":
            return views.transposed(shape, attribute(node, "perm"))
        case "Flatten":
            return views.flattened(shape, attribute(node, "axis", 1))
        case "Squeeze":
            return views.squeezed(shape, attribute(node, "axes", numbers))
        case "Unsqueeze":
            return views.unsqueezed(shape, attribute(node, "axes", numbers) or ())
        case "Tile":
            return views.tiled(shape, numbers or ())
        case "Expand":
            return views.expanded(shape, numbers or ())
    wanted = attribute(node, "shape", numbers)
    return views.reshaped(shape, wanted or (), bool(attribute(node, "allowzero", 0)))


def is_view(node: NodeProto) -> bool:
    """Whether a node changes no more than the shape, axis order or type of its first input, or repeats it."""
    return node.op_type in VIEW_OPS and is_standard(node)


def numpy_type(name: str) -> np.dtype[Any]:
    """The numpy type of one of FLOATS."""
    kind = next(kind for kind, known in FLOATS.items() if known == name)
    return np.dtype(helper.tensor_dtype_to_np_dtype(kind))


def readers_of(graph: Graph, base: str) -> Iterator[tuple[int, str]]:
    """(node, name) for every input at which a node reads a stored tensor, directly or through views.

    `name` is the tensor's name at that input, so a node that reads the tensor at two inputs is given twice. Graph
    outputs and untaken branches of an If are readers too, given as node -1. Shape and Size are no readers, because no
    edit changes a tensor's shape.
    """
    names = [base]
    while names:
        name = names.pop()
        if name in graph.outputs or name in graph.untaken_reads:
            yield -1, name
        for k in graph.readers.get(name, ()):
            node = graph.nodes[k]
            if node.op_type in SHAPE_OPS and is_standard(node):
                continue
            times = list(node.input).count(name) + graph.captured.get(k, ()).count(name)
            if (is_view(node) or drops(node, graph.tensors)) and node.input[0] == name and times == 1:
                names.append(node.output[0])
            else:
                yield from [(k, name)] * times


def _float_name(kind: int, how: str) -> str:
    if kind not in FLOATS:
        known = kind in TensorProto.DataType.values()
        name = TensorProto.DataType.Name(kind).lower() if known else f"type {kind}"
        raise LeftAlone(f"its weight is {how} {name}, which cannot be initialized")
    return FLOATS[kind]
