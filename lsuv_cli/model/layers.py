"""Which nodes are layers, where each one's weight and bias live, and why the others are left alone.

A layer is a convolution or an inner product with a constant weight:

1. Conv, ConvTranspose, Gemm, MatMul, their com.microsoft Fused forms, and an Einsum that is a matrix product.
2. Its weight is a stored tensor, perhaps behind views, or an expression of constants that can be folded into one
   (constants.py).
3. Its bias is the operator's own bias input, or a constant that an Add right behind the operator adds to its output.
4. The measured value is the output after the bias and before the activation. A fused operator with an activation
   inside shows only its output after the activation, so that output is measured.

Nodes that look like a layer and cannot be initialized are listed too, with the reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray
from onnx import NodeProto

from lsuv_cli.errors import LsuvError
from lsuv_cli.model import matrices
from lsuv_cli.model.constants import Constants, LeftAlone, Weight, is_view
from lsuv_cli.model.flatten import label, nodes_inside
from lsuv_cli.model.graph import Graph, Unknown, attribute, is_standard
from lsuv_cli.model.matrices import MatrixForm
from lsuv_cli.model.modules import Modules
from lsuv_cli.model.views import Shape
from lsuv_cli.target_variances import TargetVariances, matches

Array = NDArray[Any]

MICROSOFT = "com.microsoft"
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "FusedConv"})
PRODUCTS = frozenset({"Gemm", "MatMul", "Einsum", "FusedGemm", "FusedMatMul"})
HOMOGENEOUS_ACTIVATIONS = frozenset({"Relu", "LeakyRelu"})  # f(s·x) = s·f(x) for s > 0
LAYER_OPS = CONVOLUTIONS | PRODUCTS
GATHERS = frozenset({"Gather", "GatherND", "GatherElements"})
RECURRENT_OPS = {"LSTM": 4, "GRU": 3, "RNN": 1}  # and the number of their gates
QUANTIZED_OPS = frozenset(
    {"QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulNBits", "QGemm", "DynamicQuantizeMatMul",
     "MatMulIntegerToFloat", "MatMulBnb4", "MatMulFpQ4", "DynamicQuantizeLSTM"}
)  # fmt: skip
OPAQUE_OPS = frozenset({"Attention", "QAttention", "MultiHeadAttention", "PackedAttention", "LongformerAttention",
                        "DecoderAttention", "MoE", "QMoE", "DeformConv", "GemmFastGelu", "FusedMatMulActivation",
                        "NhwcFusedConv", "NhwcConv", "GemmFloat8"})  # fmt: skip


@dataclass(frozen=True)
class LayerBias:
    """A layer's bias, y = W·x + factor·value; the value may be constant or computed."""

    value: str
    factor: float = 1.0
    position: int = 2  # the input of its node at which it is read
    node: int = -1  # the Add behind the layer, or -1 for the layer's own node
    shape: tuple[int, ...] | None = None  # in which the bias can be added to the output
    constant: bool = True
    kept: bool = False  # not zeroed: the layer becomes y = s·W·x + bias
    centred: bool = False  # -s times the mean of each channel of W·x, once that is measured


@dataclass(frozen=True)
class Layer:
    """A node whose weight can be initialized and scaled."""

    node: int  # index in Graph.nodes
    name: str
    op: str
    weight: Weight
    position: int  # the input of the node at which the weight is read
    form: MatrixForm
    output: str  # the measured value
    bias: LayerBias | None
    activation: str = ""  # inside a fused operator
    notes: tuple[str, ...] = ()
    module: str = ""  # path of the PyTorch module, if the file tells
    target: float = 1.0  # the variance that its output is to have
    by_channel: bool = False  # each channel of its output has a scale of its own
    norm_factor: float | None = None  # c, where its only reader is a BatchNormalization that reduces to y = c·x

    @property
    def groups(self) -> int:
        return self.form.shape[0]

    @property
    def keeps_bias(self) -> bool:
        return self.bias is not None and self.bias.kept

    @property
    def is_centred(self) -> bool:
        return self.bias is not None and self.bias.centred

    @property
    def is_fixed(self) -> bool:
        """Whether nodes behind the layer need its true output: s·y with one s pending says not enough."""
        return self.keeps_bias or self.is_centred or self.by_channel or not self.is_linear

    @property
    def is_linear(self) -> bool:
        """Whether y(s·W) = s·y(W) for the measured value y, apart from the bias.

        An activation inside a fused operator may break this; then each trial's scale is only a good guess.
        """
        return not self.activation or (self.activation in HOMOGENEOUS_ACTIVATIONS and not self.keeps_bias)


@dataclass(frozen=True)
class Recurrent:
    """An LSTM, GRU or RNN: its matrices can be made orthonormal gate by gate, but not scaled."""

    node: int
    name: str
    op: str
    weights: tuple[tuple[Weight, MatrixForm], ...]
    output: str  # its first output
    module: str = ""


@dataclass(frozen=True)
class Skipped:
    """A node that looks like a layer and is left as it was."""

    node: int
    name: str
    op: str
    reason: str
    shape: tuple[int, ...] = ()
    excluded: bool = False
    module: str = ""


@dataclass(frozen=True)
class LayerSet:
    """All nodes that look like a layer, in execution order."""

    layers: tuple[Layer, ...]
    skipped: tuple[Skipped, ...]
    recurrent: tuple[Recurrent, ...] = ()
    folded: Mapping[str, Array] = field(default_factory=dict)  # the value of each folded expression


def find(graph: Graph) -> LayerSet:
    """All layers of a graph."""
    return _LayerFinder(graph).run()


def choose(layer_set: LayerSet, include: Sequence[str], exclude: Sequence[str]) -> LayerSet:
    """Move layers that `include` does not match, or that `exclude` matches, to the skipped ones."""
    both: list[Layer | Recurrent] = [*layer_set.layers, *layer_set.recurrent]
    check_patterns(layer_set, "include", include)
    check_patterns(layer_set, "exclude", exclude)

    out = [
        Skipped(item.node, item.name, item.op, why, _shape(item), excluded=True, module=item.module)
        for item in both
        if (why := _unwanted(item, include, exclude))
    ]
    return replace(
        layer_set,
        layers=tuple(layer for layer in layer_set.layers if not _unwanted(layer, include, exclude)),
        recurrent=tuple(item for item in layer_set.recurrent if not _unwanted(item, include, exclude)),
        skipped=tuple(sorted([*layer_set.skipped, *out], key=lambda s: s.node)),
    )


def skipped_among(layer_set: LayerSet, include: Sequence[str], exclude: Sequence[str]) -> list[Skipped]:
    """The skipped nodes that the patterns choose."""
    return [item for item in layer_set.skipped if not item.excluded and not _unwanted(item, include, exclude)]


def _unwanted(item: Layer | Recurrent | Skipped, include: Sequence[str], exclude: Sequence[str]) -> str:
    """Why a user's patterns do not choose an item; empty if they do."""
    if include and not any(_matches(item, p) for p in include):
        return "no `include` pattern matches it"
    hit = next((p for p in exclude if _matches(item, p)), None)
    return f"`exclude={hit!r}`" if hit is not None else ""


def check_patterns(layer_set: LayerSet, option: str, patterns: Iterable[str]) -> None:
    """Refuse a user's pattern that matches no node that looks like a layer."""
    both: list[Layer | Recurrent] = [*layer_set.layers, *layer_set.recurrent]
    for pattern in patterns:
        if not any(_matches(item, pattern) for item in [*both, *layer_set.skipped]):
            names = [item.module or item.name for item in both]
            known = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            raise LsuvError(f"`{option}` {pattern!r} matches no layer; the layers are {known or 'none'}")


def with_targets(layer_set: LayerSet, wanted: TargetVariances) -> LayerSet:
    """The layers with their target variances; layers that share a weight have that of its first use."""
    check_patterns(layer_set, "target_variance", wanted.globs)
    first = {base: users[0] for base, users in by_tensor(layer_set.layers).items()}

    def aimed(layer: Layer) -> Layer:
        decides = first[layer.weight.base]
        target, own = wanted.of(decides.name, decides.module), wanted.of(layer.name, layer.module)
        told = () if own == target else (f"its target is that of {decides.name}, which is the first to use its weight",)
        return replace(layer, target=target, notes=(*layer.notes, *told))

    return replace(layer_set, layers=tuple(map(aimed, layer_set.layers)))


def why_none(layer_set: LayerSet) -> str:
    """For an error about a model in which there is no layer: the first thing that looks like one, and its reason."""
    first = next(iter(layer_set.skipped), None)
    return f" ({first.name}: {first.reason})" if first is not None else ""


def _matches(item: Layer | Recurrent | Skipped, pattern: str) -> bool:
    return matches(pattern, item.name, item.module)


def leave(layer_set: LayerSet, reasons: Mapping[str, str]) -> LayerSet:
    """Move some layers, named by their outputs, to the skipped ones, each with its reason."""
    both: list[Layer | Recurrent] = [*layer_set.layers, *layer_set.recurrent]
    moved = [
        Skipped(x.node, x.name, x.op, reasons[x.output], _shape(x), module=x.module)
        for x in both
        if x.output in reasons
    ]
    return replace(
        layer_set,
        layers=tuple(layer for layer in layer_set.layers if layer.output not in reasons),
        recurrent=tuple(item for item in layer_set.recurrent if item.output not in reasons),
        skipped=tuple(sorted([*layer_set.skipped, *moved], key=lambda s: s.node)),
    )


def _shape(item: Layer | Recurrent) -> Shape:
    return item.weight.shape if isinstance(item, Layer) else item.weights[0][0].shape


def by_tensor(layers: Iterable[Layer]) -> dict[str, list[Layer]]:
    """The layers that read each stored tensor as their weight."""
    users: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        users[layer.weight.base].append(layer)
    return users


class _LayerFinder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.constants = Constants(graph)
        self.modules = Modules(graph)
        names = Counter(node.name for node in graph.nodes)
        self.unique = {name for name, count in names.items() if name and count == 1}

    def name(self, node: NodeProto) -> str:
        return node.name if node.name in self.unique else _first_output(node)

    def run(self) -> LayerSet:
        layers: list[Layer] = []
        skipped: list[Skipped] = []
        recurrent: list[Recurrent] = []
        for k, node in enumerate(self.graph.nodes):
            try:
                match self.recognized(k, node):
                    case Layer() as layer:
                        layers.append(layer)
                    case Recurrent() as item:
                        recurrent.append(item)
            except LeftAlone as why:
                module = self.modules.of(node)
                skipped.append(Skipped(k, self.name(node), node.op_type, str(why), module=module))
            for inner in nodes_inside(node):
                if inner.op_type in LAYER_OPS | QUANTIZED_OPS | set(RECURRENT_OPS):
                    why_inner = f"it is inside the body of {node.op_type} {self.name(node)}"
                    skipped.append(Skipped(k, self.name(inner), inner.op_type, why_inner))
        for name, branch in self.graph.untaken:
            why_untaken = f"it is in the branch of If {name} that the data does not take"
            inside = [n for node in branch.node for n in (node, *nodes_inside(node))]
            unreached = [n for n in inside if n.op_type in LAYER_OPS | QUANTIZED_OPS | set(RECURRENT_OPS)]
            skipped += [Skipped(len(self.graph.nodes), self.name(n), n.op_type, why_untaken) for n in unreached]
        return LayerSet(tuple(layers), tuple(skipped), tuple(recurrent), self.constants.folded)

    def recognized(self, k: int, node: NodeProto) -> Layer | Recurrent | None:
        """A node as a layer or as a recurrent layer; None if it does not look like one."""
        op = node.op_type
        domain = "" if node.domain == "ai.onnx" else node.domain
        if domain not in {"", MICROSOFT}:
            if op in LAYER_OPS:
                raise LeftAlone(f"operators of domain {domain} are not known here")
            return None
        if op in LAYER_OPS:
            return self.layer(k, node)
        if op in QUANTIZED_OPS:
            raise LeftAlone("quantized weights cannot be initialized; start from the float model")
        if op in OPAQUE_OPS and any(name in self.graph.constant for name in node.input[1:2]):
            raise LeftAlone(f"{op} is no single matrix product")
        if op in RECURRENT_OPS and not domain:
            return self.recurrent(k, node)
        return None

    def layer(self, k: int, node: NodeProto) -> Layer | None:
        """A node as a layer; None for a product of two activations."""
        op = node.op_type
        constant = [name in self.graph.constant or name in self.graph.random for name in node.input]
        if all(constant[:2]):
            raise LeftAlone("no input of the model reaches it")
        if chooser := next((maker for name in node.input[:2] if (maker := self._chooser(name))), ""):
            raise LeftAlone(f"its weight is chosen by {chooser}, as the input has it")
        if op in CONVOLUTIONS and not constant[1]:
            raise LeftAlone("its weight is computed from the input")
        if op == "Einsum" and len(node.input) != 2:
            if any(constant):
                raise LeftAlone(f"an Einsum of {len(node.input)} operands is not a plain matrix product")
            return None
        if not any(constant[:2]):
            if chooser := next((maker for name in node.input[:2] if (maker := self._gather(name))), ""):
                raise LeftAlone(f"its weight is chosen by {chooser}, as the input has it")
            return None
        position = constant.index(True)
        if op in CONVOLUTIONS:
            position = 1
        if op == "FusedConv" and len(node.input) > 3 and node.input[3]:
            raise LeftAlone("the operator adds another value inside")
        weight = self.constants.weight(node.input[position])
        if reason := self.constants.no_weight(weight, LAYER_OPS):
            raise LeftAlone(reason)
        if op == "MatMul":
            weight = self.constants.with_equal_slices(weight)
        form = matrices.of_node(node, weight.shape, position)
        if 0 in form.shape:
            raise LeftAlone("its weight is empty")
        output = node.output[0]
        activation = attribute(node, "activation", "") if op.startswith("Fused") else ""
        bias = self.own_bias(node, weight)
        if bias is None and not activation:
            bias, output = self.added_bias(op, weight, form, position, output)
        notes = [f"measured after the {activation} that is inside the {op}"] if activation else []
        if weight.place == "folded":
            notes.append("weight computed from constants")
        if weight.has_equal_slices:
            notes.append("its weight has equal matrices, which stay equal")
        if weight.dropped:
            notes.append("its weight is dropped at random")
        module = self.modules.of(node, weight.base)
        return Layer(k, self.name(node), op, weight, position, form, output, bias, activation, tuple(notes), module)

    def _chooser(self, name: str) -> str:
        """The If that makes a value by choosing among constants; empty if no such If makes it."""
        k = self.graph.producer.get(name)
        if k is None or self.graph.nodes[k].op_type != "If":
            return ""
        constant = all(outer in self.graph.constant for outer in self.graph.captured.get(k, ()))
        return f"If {label(self.graph.nodes[k])}" if constant else ""

    def _gather(self, name: str) -> str:
        """The node that gathers a value from a stack of constant matrices (experts), as the input has it; or none."""
        while (k := self.graph.producer.get(name)) is not None and is_view(self.graph.nodes[k]):
            name = self.graph.nodes[k].input[0]
        if k is None or not is_standard(node := self.graph.nodes[k]) or node.op_type not in GATHERS:
            return ""
        stack = node.input[0] in self.graph.constant and len(self._known_shape(node.input[0])) > 2
        return f"{node.op_type} {label(node)}" if stack else ""

    def _known_shape(self, name: str) -> Shape:
        try:
            return self.graph.shape(name)
        except Unknown:
            return ()

    def own_bias(self, node: NodeProto, weight: Weight) -> LayerBias | None:
        """The bias that an operator takes as its third input."""
        if node.op_type not in CONVOLUTIONS | {"Gemm", "FusedGemm"} or len(node.input) < 3 or not node.input[2]:
            return None
        constant = node.input[2] in self.graph.constant
        if node.op_type in CONVOLUTIONS:
            return LayerBias(node.input[2], shape=(-1, *[1] * (len(weight.shape) - 2)), constant=constant)
        return LayerBias(node.input[2], float(attribute(node, "beta", 1.0)), constant=constant)

    def added_bias(
        self, op: str, weight: Weight, form: MatrixForm, position: int, output: str
    ) -> tuple[LayerBias | None, str]:
        """The constant that the only reader of a layer's output adds to it, if it is shaped like a bias."""
        readers = self.graph.readers.get(output, ())
        if len(readers) != 1 or output in self.graph.outputs:
            return None, output
        (index,) = readers
        node = self.graph.nodes[index]
        if node.op_type != "Add" or not is_standard(node) or list(node.input).count(output) != 1:
            return None, output
        side = 1 - list(node.input).index(output)
        value = node.input[side]
        if value not in self.graph.constant:
            return None, output
        try:
            shape = self.graph.shape(value)
        except Unknown:
            return None, output
        rank = len(weight.shape)
        if op in CONVOLUTIONS:
            core: Shape = (form.shape[0] * form.shape[1], *[1] * (rank - 2))
        else:
            core = (form.shape[1],) if position == 1 and rank > 1 else (form.shape[1], 1)
        if not _is_bias(shape, core, rank if op in CONVOLUTIONS else rank + 2):
            return None, output
        return LayerBias(value, position=side, node=index), node.output[0]

    def recurrent(self, k: int, node: NodeProto) -> Recurrent:
        """The input and recurrence matrices of an LSTM, GRU or RNN."""
        weights = []
        for value in node.input[1:3]:
            if value not in self.graph.constant:
                raise LeftAlone("its weights are computed from the input")
            weight = self.constants.weight(value)
            gates = RECURRENT_OPS[node.op_type]
            if len(weight.shape) != 3 or weight.shape[1] % gates or 0 in weight.shape:
                raise LeftAlone(f"weights of shape {list(weight.shape)} do not fit {gates} gates")
            weights.append((weight, matrices.gates(weight.shape, gates)))
        module = self.modules.of(node)
        return Recurrent(k, self.name(node), node.op_type, tuple(weights), _first_output(node), module)


def _first_output(node: NodeProto) -> str:
    return next((name for name in node.output if name), "")


def _is_bias(shape: Shape, core: Shape, rank: int) -> bool:
    """Whether a constant of this shape, added to an output, is one number for each channel, or one for all.

    Axes of length 1 may precede those of `core`, as long as the constant has no more than `rank` axes, as the output.
    """
    ones = (1,) * (len(shape) - len(core))
    return len(shape) <= rank and (shape == (*ones, *core) or all(d == 1 for d in shape))
