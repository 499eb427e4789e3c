"""Which nodes are layers, where each one's weight and bias live, and why the others are left alone.

A layer is a convolution or an inner product with a constant weight:

1. Conv, ConvTranspose, Gemm, MatMul, their com.microsoft Fused forms, and an Einsum that is a matrix product.
2. Its weight is a stored tensor, perhaps behind nodes that only rename elements (views.py), or any other
   expression of constants, which is folded into one tensor.
3. Its bias is the operator's own bias input or a constant that an Add puts right behind it.
4. The measured value is what stands after the bias and before the activation; an activation inside a fused
   operator cannot be told apart from it, so there it is what the operator puts out.

Whatever looks like a layer and cannot be initialized is listed too, with the reason.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from lsuv_cli import views
from lsuv_cli.errors import LsuvError
from lsuv_cli.graph import Graph, inner_nodes
from lsuv_cli.views import MatrixForm, View

Array = NDArray[Any]

MICROSOFT = "com.microsoft"
FLOATS: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.DOUBLE: "float64",
}
LAYER_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "FusedConv", "FusedGemm", "FusedMatMul"})
RECURRENT_OPS = {"LSTM": 4, "GRU": 3, "RNN": 1}
QUANTIZED_OPS = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulNBits", "QGemm", "DynamicQuantizeMatMul",
     "MatMulIntegerToFloat", "MatMulBnb4", "MatMulFpQ4"}
)  # fmt: skip
OPAQUE_OPS = frozenset({"Attention", "QAttention", "MultiHeadAttention", "PackedAttention", "LongformerAttention",
                        "DecoderAttention", "MoE", "QMoE", "DeformConv"})  # fmt: skip
VIEW_OPS = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
SHARED = "its weight is shared"


@dataclass(frozen=True)
class Weight:
    """A constant as an operator reads it, and the stored tensor behind it."""

    value: str  # the name the operator reads
    base: str  # the stored tensor's name; equal to `value` where the expression is folded
    place: str  # "initializer", "constant" (a Constant node) or "folded"
    dtype: str  # of the stored tensor
    shape: tuple[int, ...]  # as the operator reads it
    steps: tuple[View, ...] = ()

    def stored(self, array: Array) -> Array:
        """What the operator is to read, in the stored tensor's layout."""
        for step in reversed(self.steps):
            array = step.backward(array)
        return array

    def seen(self, stored: Array) -> Array:
        """The stored tensor as the operator reads it."""
        for step in self.steps:
            stored = step.forward(stored)
        return stored


@dataclass(frozen=True)
class Bias:
    """What is added to a layer's product: `factor` times a value, which may be constant."""

    value: str
    factor: float = 1.0
    position: int = 2  # which input of its node it is
    node: int = -1  # the Add behind the layer, or -1 for the layer's own node
    shape: tuple[int, ...] | None = None  # as it must be reshaped to be added to the output
    constant: bool = True


@dataclass(frozen=True)
class Layer:
    """A node whose weight can be initialized and, where `linear`, scaled in closed form."""

    node: int  # its place in Graph.nodes
    name: str
    op: str
    weight: Weight
    position: int  # which input of the node the weight is
    form: MatrixForm
    output: str  # the measured value
    bias: Bias | None
    activation: str = ""  # inside a fused operator
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> int:
        return self.form.shape[0]


@dataclass(frozen=True)
class Recurrent:
    """An LSTM, GRU or RNN: its matrices can be made orthonormal gate by gate, but not scaled."""

    node: int
    name: str
    op: str
    weights: tuple[tuple[Weight, MatrixForm], ...]
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A node that looks like a layer and is left as it was."""

    node: int
    name: str
    op: str
    reason: str
    shape: tuple[int, ...] = ()
    excluded: bool = False


@dataclass(frozen=True)
class Found:
    """All that looks like a layer, in the order of execution."""

    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    recurrent: tuple[Recurrent, ...] = ()
    folded: Mapping[str, Array] = field(default_factory=dict)  # the value of each folded expression


class _LeftAlone(Exception):
    """Why a node is not a layer after all."""


def find(graph: Graph, read: Any) -> Found:
    """All layers of a graph; `read` gives a stored tensor's values."""
    return _Finder(graph, read).run()


def choose(found: Found, include: Sequence[str], exclude: Sequence[str]) -> Found:
    """Leave out the layers whose names the user's patterns do not want."""
    both: list[Layer | Recurrent] = [*found.layers, *found.recurrent]
    names = [item.name for item in both]
    for option, patterns in (("--include", include), ("--exclude", exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in [*names, *(s.name for s in found.skipped)]):
                known = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
                raise LsuvError(f"{option} {pattern!r} matches no layer; the layers are {known or 'none'}")

    def unwanted(name: str) -> str:
        if include and not any(fnmatchcase(name, p) for p in include):
            return "no --include pattern matches it"
        hit = next((p for p in exclude if fnmatchcase(name, p)), None)
        return f"--exclude {hit}" if hit is not None else ""

    out = [
        Skipped(item.node, item.name, item.op, why, item.weight.shape if isinstance(item, Layer) else (), True)
        for item in both
        if (why := unwanted(item.name))
    ]
    return replace(
        found,
        layers=tuple(layer for layer in found.layers if not unwanted(layer.name)),
        recurrent=tuple(item for item in found.recurrent if not unwanted(item.name)),
        skipped=tuple(sorted([*found.skipped, *out], key=lambda s: s.node)),
    )


def leave(found: Found, reasons: Mapping[str, str]) -> Found:
    """Move some layers, named by their outputs, to the skipped ones, each with its reason."""
    moved = [
        Skipped(x.node, x.name, x.op, reasons[x.output], x.weight.shape) for x in found.layers if x.output in reasons
    ]
    return replace(
        found,
        layers=tuple(layer for layer in found.layers if layer.output not in reasons),
        skipped=tuple(sorted([*found.skipped, *moved], key=lambda s: s.node)),
    )


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """An attribute's value, or a default where it is absent."""
    for item in node.attribute:
        if item.name == name:
            value = helper.get_attribute_value(item)
            return value.decode() if isinstance(value, bytes) else value
    return default


class _Finder:
    def __init__(self, graph: Graph, read: Any) -> None:
        self.graph = graph
        self.read = read
        self.folded: dict[str, Array] = {}
        names = Counter(node.name for node in graph.nodes)
        self.unique = {name for name, count in names.items() if name and count == 1}

    def name(self, node: NodeProto) -> str:
        output = next((name for name in node.output if name), "")
        return node.name if node.name in self.unique else output

    def run(self) -> Found:
        layers: list[Layer] = []
        skipped: list[Skipped] = []
        recurrent: list[Recurrent] = []
        for k, node in enumerate(self.graph.nodes):
            op, name = node.op_type, self.name(node)
            domain = "" if node.domain == "ai.onnx" else node.domain
            try:
                if domain not in {"", MICROSOFT}:
                    if op in LAYER_OPS:
                        raise _LeftAlone(f"operators of domain {domain} are not known here")
                elif op in LAYER_OPS:
                    layer = self.layer(k, node, name)
                    if layer is not None:
                        layers.append(layer)
                elif op in QUANTIZED_OPS:
                    raise _LeftAlone("quantized weights cannot be initialized; start from the float model")
                elif op in OPAQUE_OPS and any(n in self.graph.constant for n in node.input[1:2]):
                    raise _LeftAlone(f"{op} is no single matrix product")
                elif op in RECURRENT_OPS and not domain:
                    recurrent.append(self.recurrent(k, node, name))
                for inner in inner_nodes(node):
                    if inner.op_type in LAYER_OPS | QUANTIZED_OPS | set(RECURRENT_OPS):
                        skipped.append(
                            Skipped(k, self.name(inner), inner.op_type, f"it is inside the body of a {op} node")
                        )
            except _LeftAlone as why:
                skipped.append(Skipped(k, name, op, str(why)))
        return Found(tuple(layers), tuple(skipped), tuple(recurrent), self.folded)

    def layer(self, k: int, node: NodeProto, name: str) -> Layer | None:
        """The layer that a node is; None for a product of two activations."""
        op = node.op_type
        constant = [bool(n) and n in self.graph.constant for n in node.input]
        if op in {"MatMul", "Einsum", "FusedMatMul", "Gemm", "FusedGemm"}:
            sides = [i for i in range(min(2, len(node.input))) if constant[i]]
            if op == "Einsum" and len(node.input) != 2:
                return None
        else:
            sides = [1] if len(constant) > 1 and constant[1] else []
        if constant and all(c for c, n in zip(constant[:2], node.input[:2], strict=True) if n):
            raise _LeftAlone("no input of the model reaches it")
        if not sides:
            if op.startswith(("Conv", "FusedConv")):
                raise _LeftAlone("its weight is computed from the input")
            return None
        position = sides[0]
        weight = self.weight(node.input[position])
        form = self.form(node, weight.shape, position)
        if 0 in form.shape:
            raise _LeftAlone("its weight is empty")
        output = node.output[0]
        activation = attribute(node, "activation", "") if op.startswith("Fused") else ""
        bias = self.own_bias(node)
        if bias is None and not activation:
            bias, output = self.added_bias(k, weight, form, position, output)
        notes = []
        if activation:
            notes.append(f"measured after the {activation} that is inside the {op}")
        if op == "FusedConv" and len(node.input) > 3 and node.input[3]:
            raise _LeftAlone("the operator adds another value inside")
        if weight.place == "folded":
            notes.append("weight folded into one tensor")
        return Layer(k, name, op, weight, position, form, output, bias, activation, tuple(notes))

    def form(self, node: NodeProto, shape: tuple[int, ...], position: int) -> MatrixForm:
        """How the operator multiplies with its weight."""
        op, rank = node.op_type, len(shape)
        if op in {"Conv", "FusedConv", "ConvTranspose"}:
            groups = attribute(node, "group", 1)
            if rank < 3 or groups < 1 or shape[1 if op == "ConvTranspose" else 0] < 1 or shape[0] % groups:
                raise _LeftAlone(f"a weight of shape {list(shape)} does not fit {groups} groups")
            if op == "ConvTranspose":
                return views.transposed_convolution(shape, groups)
            return views.convolution(shape, groups)
        if op == "Einsum":
            return self.einsum_form(attribute(node, "equation", ""), shape, position)
        if op == "FusedMatMul" and (attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0)):
            raise _LeftAlone("FusedMatMul with transposed batches is not a plain matrix product")
        if attribute(node, "alpha", 1.0) == 0:
            raise _LeftAlone("its alpha is 0")
        if rank == 1:
            return views.product(shape, (), (0,))
        transposed = bool(attribute(node, "transA" if position == 0 else "transB", 0))
        # Left of the product a matrix is (out, in), right of it (in, out).
        first_is_out = (position == 0) != transposed
        out, fan_in = (rank - 2, rank - 1) if first_is_out else (rank - 1, rank - 2)
        return views.product(shape, (out,), (fan_in,))

    def einsum_form(self, equation: str, shape: tuple[int, ...], position: int) -> MatrixForm:
        """Which letters of an Einsum are the weight's outputs, inputs and batch."""
        left, arrow, result = equation.replace(" ", "").partition("->")
        terms = left.split(",")
        if not arrow or len(terms) != 2 or "." in terms[position]:
            raise _LeftAlone(f"Einsum {equation!r} is not a plain matrix product")
        mine, other = terms[position], terms[1 - position]
        distinct = all(len(set(t)) == len(t) for t in (mine, result))
        inputs = [k for k, c in enumerate(mine) if c not in result]
        outputs = [k for k, c in enumerate(mine) if c in result and c not in other]
        if not distinct or len(mine) != len(shape) or not inputs or any(mine[k] not in other for k in inputs):
            raise _LeftAlone(f"Einsum {equation!r} is not a plain matrix product")
        return views.product(shape, outputs, inputs)

    def own_bias(self, node: NodeProto) -> Bias | None:
        """The bias that an operator takes as its third input."""
        if node.op_type not in {"Conv", "ConvTranspose", "FusedConv", "Gemm", "FusedGemm"}:
            return None
        if len(node.input) < 3 or not node.input[2]:
            return None
        value = node.input[2]
        constant = value in self.graph.constant
        if "Gemm" in node.op_type:
            return Bias(value, float(attribute(node, "beta", 1.0)), constant=constant)
        kernel = attribute(node, "kernel_shape")
        weight = self.weight(node.input[1])
        rank = len(weight.shape) if kernel is None else len(kernel) + 2
        return Bias(value, shape=(-1, *[1] * (rank - 2)), constant=constant)

    def added_bias(
        self, k: int, weight: Weight, form: MatrixForm, position: int, output: str
    ) -> tuple[Bias | None, str]:
        """The constant that the only reader of a layer's output adds to it, if it is shaped like a bias."""
        readers = self.graph.readers.get(output, ())
        if len(readers) != 1 or output in self.graph.outputs:
            return None, output
        (index,) = readers
        node = self.graph.nodes[index]
        if node.op_type != "Add" or node.domain or len(node.input) != 2 or list(node.input).count(output) != 1:
            return None, output
        side = 1 - list(node.input).index(output)
        value = node.input[side]
        if value not in self.graph.constant:
            return None, output
        try:
            shape = self.weight(value).shape
        except _LeftAlone:
            return None, output
        op = self.graph.nodes[k].op_type
        channels = form.shape[1] * (form.shape[0] if op.startswith("Conv") else 1)
        if op.startswith("Conv"):
            wanted: list[tuple[int, ...]] = [(channels, *[1] * (len(weight.shape) - 2))]
            wanted.append((1, *wanted[0]))
        elif position == 1 and len(weight.shape) > 1:
            wanted = [(channels,)]
        else:
            wanted = [(channels, 1)]
        if (shape not in wanted and math.prod(shape) > 1) or len(shape) > max(len(w) for w in wanted):
            return None, output
        return Bias(value, position=side, node=index), node.output[0]

    def weight(self, value: str) -> Weight:
        """Where a constant lives: follow the nodes that only rename elements to the stored tensor."""
        chain: list[NodeProto] = []
        name = value
        while name not in self.graph.tensors:
            if name in self.graph.sparse:
                raise _LeftAlone("its weight is a sparse tensor")
            node = self.graph.nodes[self.graph.producer[name]]
            if node.op_type not in VIEW_OPS or node.domain not in {"", "ai.onnx"}:
                return self.fold(value, node)
            chain.append(node)
            name = node.input[0]
        tensor = self.graph.tensors[name]
        if tensor.data_type not in FLOATS:
            kind = TensorProto.DataType.Name(tensor.data_type).lower()
            raise _LeftAlone(f"its weight is stored as {kind}, which cannot be initialized")
        shape = tuple(tensor.dims)
        steps: list[View] = []
        for node in reversed(chain):
            if node.op_type in {"Identity", "Cast"}:
                continue
            steps.append(self.step(node, shape))
            shape = steps[-1].after
        place = "constant" if not self.is_initializer(name) else "initializer"
        return Weight(value, name, place, FLOATS[tensor.data_type], shape, tuple(steps))

    def is_initializer(self, name: str) -> bool:
        return bool(self.graph.tensors[name].name == name) and name not in self.graph.own

    def step(self, node: NodeProto, shape: tuple[int, ...]) -> View:
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

    def fold(self, value: str, last: NodeProto) -> Weight:
        """The value of an expression of constants, to be stored as one tensor."""
        if last.op_type == "DequantizeLinear":
            raise _LeftAlone("its weight is quantized (behind DequantizeLinear); start from the float model")
        if value not in self.graph.own:
            raise _LeftAlone("its weight is computed inside a function of the model")
        if value not in self.folded:
            self.folded[value] = self.evaluate(value)
        array = self.folded[value]
        dtype = str(array.dtype)
        if dtype not in FLOATS.values():
            raise _LeftAlone(f"its weight is of type {dtype}, which cannot be initialized")
        return Weight(value, value, "folded", dtype, array.shape)

    def evaluate(self, value: str) -> Array:
        """The value of a constant; expressions are worked out by onnx's reference evaluator."""
        if value in self.graph.tensors:
            return np.asarray(self.read(value))
        nodes: list[NodeProto] = []
        stored: set[str] = set()
        wanted, seen = [value], set()
        while wanted:
            name = wanted.pop()
            if name in self.graph.tensors:
                stored.add(name)
            elif name in self.graph.sparse:
                raise _LeftAlone("its weight is computed from a sparse tensor")
            elif (k := self.graph.producer[name]) not in seen:
                seen.add(k)
                wanted.extend(self.graph.reads(k))
        nodes = [self.graph.nodes[k] for k in sorted(seen)]
        if any(node.op_type == "DequantizeLinear" for node in nodes):
            raise _LeftAlone("its weight is quantized (behind DequantizeLinear); start from the float model")
        tensors = []
        for name in sorted(stored):
            tensor = numpy_helper.from_array(np.asarray(self.read(name)), name)
            tensors.append(tensor)
        body = helper.make_graph(nodes, "constants", [], [onnx.ValueInfoProto(name=value)], tensors)
        model = helper.make_model(body, opset_imports=self.graph.opsets, ir_version=max(self.graph.ir_version, 4))
        from onnx.reference import ReferenceEvaluator

        try:
            (array,) = ReferenceEvaluator(model).run(None, {})
        except Exception as problem:
            ops = ", ".join(dict.fromkeys(node.op_type for node in nodes))
            raise _LeftAlone(f"its weight is computed by {ops}, which cannot be folded") from problem
        return np.asarray(array)

    def recurrent(self, k: int, node: NodeProto, name: str) -> Recurrent:
        """The input and recurrence matrices of an LSTM, GRU or RNN, one matrix for each direction and gate."""
        gates = RECURRENT_OPS[node.op_type]
        weights = []
        for value in node.input[1:3]:
            if value not in self.graph.constant:
                raise _LeftAlone("its weights are computed from the input")
            weight = self.weight(value)
            directions, rows, columns = weight.shape
            split = (directions * gates, rows // gates, columns)
            weights.append((weight, MatrixForm(split, (0, 1, 2), split)))
        return Recurrent(k, name, node.op_type, tuple(weights))


def evaluate(graph: Graph, read: Any, value: str) -> Array:
    """The value of any constant of a graph."""
    try:
        return _Finder(graph, read).evaluate(value)
    except _LeftAlone as problem:
        raise LsuvError(f"the constant {value!r} cannot be worked out: {problem}") from problem


def readers_of(graph: Graph, base: str) -> Iterable[tuple[int, str]]:
    """Every node that reads a stored tensor, directly or through views, with the name it reads it by.

    A graph output is a reader too; it is given as node -1.
    """
    names = [base]
    while names:
        name = names.pop()
        if name in graph.outputs:
            yield -1, name
        for k in graph.readers.get(name, ()):
            node = graph.nodes[k]
            if node.op_type in VIEW_OPS and node.input[0] == name and name not in node.input[1:]:
                names.extend(node.output)
            else:
                yield k, name


def by_tensor(found: Iterable[Layer]) -> dict[str, list[Layer]]:
    """The layers that read each stored tensor as their weight."""
    users: dict[str, list[Layer]] = defaultdict(list)
    for layer in found:
        users[layer.weight.base].append(layer)
    return users
