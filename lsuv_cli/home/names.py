"""The names in the network's state dict of the tensors in an ONNX file, as far as the file itself tells them.

1. A stored tensor that kept its name (`fc.weight`) goes under that name, in the layout the file stores. Where nodes
   only move its elements (Transpose, Split, Slice, Concat), each element goes back to its place (moves.py).
2. PyTorch's exporter with dynamo=True records the call that each node was exported from, with the module's own name
   of each parameter (calls.py). That name holds even if the tensor was renamed, transposed or merged.
3. The legacy exporter records scopes (model/modules.py). A weight that lost its name (`onnx::MatMul_12`) is named after
   a bias of its module (`fc.bias` -> `fc.weight`), else after its module, if that has no other parameter. A Gemm
   that transposes its weight itself reads it as the module stores it: one without a name is the result of something
   that the exporter folded, such as a product with a mask.
   In nn.MultiheadAttention, known by its out_proj, the products are those of q, k and v in this order.
4. A weight that the exporter multiplied by its BatchNorm, or that is computed from other tensors, gets no name:
   loaded under the old name, it would change what the network computes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto

from lsuv_cli.home import calls, moves
from lsuv_cli.home.calls import Call
from lsuv_cli.model import constants
from lsuv_cli.model.constants import Constants, LeftAlone, Weight, numpy_type
from lsuv_cli.model.graph import Graph, attribute
from lsuv_cli.model.layers import CONVOLUTIONS, PRODUCTS, Layer, LayerSet
from lsuv_cli.model.modules import Modules, parameters
from lsuv_cli.model.prepare import Look

Array = NDArray[Any]

MULTIPLIED = (
    "the exporter multiplied it by its BatchNorm; export with optimize=False (dynamo=True), or with "
    "training=TrainingMode.PRESERVE and do_constant_folding=False (dynamo=False)"
)
COMPUTED = "it is computed from other tensors"
UNKNOWN = "the file does not tell its name in the module"
RULES = "pkg.onnxscript.rewriter.rule_name"
# Operator -> the positions of the weight and of the bias among a call's arguments; -1 if it has none.
OPERATORS = {
    "linear": (1, 2), "conv1d": (1, 2), "conv2d": (1, 2), "conv3d": (1, 2), "convolution": (1, 2),
    "conv_transpose1d": (1, 2), "conv_transpose2d": (1, 2), "conv_transpose3d": (1, 2), "addmm": (2, 0),
    "mm": (1, -1), "matmul": (1, -1), "bmm": (1, -1),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of the module that a constant, or some of its elements, is written to."""

    name: str
    arrange: Callable[[Array], Array]  # from the operator's layout to the module's
    places: NDArray[np.int64] | None = None  # flat places in the module's tensor; None for all of it
    rest: Array | None = None  # the module's tensor as exported, for its other places
    shape: tuple[int, ...] = ()  # of the module's tensor, if `places` are given and `rest` is not


@dataclass(frozen=True, eq=False)
class Home:
    """The tensors of the module that a constant is written to, or the reason why there are none."""

    parts: tuple[Part, ...] = ()
    reason: str = ""
    assumed: bool = False  # named after its scope alone
    taken: bool = False  # without a name in the file: taken for the weight of the module that its bias belongs to
    before: Array | None = None  # the exported value; of biases and statistics only


@dataclass(frozen=True)
class Homes:
    """The homes of all constants that may be written, by (output of the layer or node, kind of constant)."""

    by_use: dict[tuple[str, str], Home]
    parameters: dict[str, str]  # the module's name of a parameter -> its name in calls (dynamo=True)

    def of(self, output: str, kind: str) -> Home:
        return self.by_use.get((output, kind), Home(reason=UNKNOWN))


def find(model: onnx.ModelProto, look: Look) -> Homes:
    """The homes of all tensors of a model as it was exported."""
    return _Finder(model, look.graph, look.layers).run()


class _Finder:
    def __init__(self, model: onnx.ModelProto, graph: Graph, found: LayerSet) -> None:
        self.graph, self.found = graph, found
        self.signature = calls.signature(model)
        self.real = set(self.signature.values()) if self.signature else parameters(graph)
        self.modules = Modules(graph)
        self.lost: dict[str, list[Layer]] = defaultdict(list)  # layers without a name of their own, by module

    def run(self) -> Homes:
        by_use: dict[tuple[str, str], Home] = {}
        for layer in self.found.layers:
            home = self.weight(layer)
            if home is None:
                self.lost[layer.module].append(layer)
            else:
                by_use[layer.output, "weight"] = home
            if layer.bias is not None and layer.bias.constant:
                reader = layer.bias.node if layer.bias.node >= 0 else layer.node
                by_use[layer.output, "bias"] = self.bias(reader, layer.bias.value)
        for module, group in self.lost.items():
            by_use |= self.by_scope(module, group)
        for item in self.found.recurrent:
            for position, (weight, _) in enumerate(item.weights, start=1):
                by_use[item.output, f"input {position}"] = self.constant(weight.value, "")
        for node in self.graph.nodes:
            if node.op_type == "BatchNormalization" and len(node.input) >= 5:
                for position in (3, 4):
                    by_use[node.output[0], f"input {position}"] = self.statistic(node, position)
        return Homes(by_use, {target: name for name, target in self.signature.items()})

    def weight(self, layer: Layer) -> Home | None:
        """The home of a layer's weight by rules 1, 2 and 4; None if only rule 3 can name it."""
        node = self.graph.nodes[layer.node]
        call = calls.of_node(node, self.signature)
        if _is_multiplied(node, call):
            return Home(reason=MULTIPLIED)
        if layer.weight.place == "folded":
            return self.moved(layer.weight.value)
        place = _place(call, "weight")
        told = call.argument(place) if call else ""
        own = self.own_name(layer.weight.value)
        if told and own:
            return self.whole(told, layer.weight)
        if told and call and len(layer.weight.shape) == 2:
            return Home((Part(told, _arranged(layer, call)),))
        if told and layer.op in CONVOLUTIONS:
            return self.whole(told, layer.weight)
        if own:
            name = self.owner(own, self.first_reader(layer.weight))
            return self.whole(name, layer.weight) if name else Home(reason=UNKNOWN)
        if self.signature:
            return Home(reason=COMPUTED if layer.weight.base not in self.graph.tensors else UNKNOWN)
        return None

    def whole(self, name: str, weight: Weight) -> Home:
        kind = numpy_type(weight.dtype)
        return Home((Part(name, lambda array: weight.stored(array).astype(kind)),))

    def moved(self, value: str) -> Home:
        """The home of a constant whose elements come from tensors that kept their names (rule 1)."""
        parts = []
        for origin in moves.origins(self.graph, value):
            names = {self.owner(self.own_name(origin.tensor), reader) for reader in origin.readers}
            name = names.pop()
            if not name or names:
                return Home(reason=UNKNOWN)
            before = np.array(self.graph.array(origin.tensor))

            def taken(array: Array, here: NDArray[np.int64] = origin.here, kind: Any = before.dtype) -> Array:
                return np.asarray(array.reshape(-1)[here].astype(kind))

            parts.append(Part(name, taken, origin.there, before))
        return Home(tuple(parts)) if parts else Home(reason=COMPUTED)

    def bias(self, reader: int, value: str) -> Home:
        before = self.graph.known(value)
        if before is None:
            return Home(reason=COMPUTED)
        call = calls.of_node(self.graph.nodes[reader], self.signature)
        told = call.argument(_place(call, "bias")) if call else ""
        home = self.constant(value, told)
        return Home(home.parts, home.reason, before=before)

    def statistic(self, node: NodeProto, position: int) -> Home:
        """The home of a running mean or variance, which --reset-norm changes."""
        before = self.graph.known(node.input[position])
        call = calls.of_node(node, self.signature)
        told = call.argument(position) if call and "batch_norm" in call.operator else ""
        home = self.constant(node.input[position], told) if before is not None else Home(reason=COMPUTED)
        return Home(home.parts, home.reason, before=before)

    def constant(self, value: str, told: str) -> Home:
        """The home of a bias, a statistic or a recurrent weight. `told`: its name in the node's call, or empty."""
        try:
            weight = Constants(self.graph).weight(value)
        except LeftAlone:
            return Home(reason=UNKNOWN)
        if weight.place == "folded":
            return self.moved(value)
        own = self.own_name(value)
        name = told or (self.owner(own, self.first_reader(weight)) if own else "")
        return self.whole(name, weight) if name else Home(reason=UNKNOWN)

    def own_name(self, value: str) -> str:
        """The first name of a parameter on the way from a value back through views; empty if there is none."""
        name = value
        while name not in self.real:
            maker = self.graph.producer.get(name)
            if maker is None or not constants.is_view(self.graph.nodes[maker]):
                return ""
            name = self.graph.nodes[maker].input[0]
        return name

    def first_reader(self, weight: Weight) -> int | None:
        """The view that reads the stored tensor itself; None if the operator reads it without views."""
        name, reader = weight.value, None
        while name != weight.base:
            reader = self.graph.producer[name]
            name = self.graph.nodes[reader].input[0]
        return reader

    def owner(self, name: str, reader: int | None) -> str:
        """The parameter that a node reads as tensor `name`, as exporters merge equal ones; empty if that is unclear."""
        if not name or reader is None:
            return name
        node = self.graph.nodes[reader]
        if not self.signature:  # the legacy exporter gives the other names to Identity nodes
            return node.output[0] if node.op_type == "Identity" and node.output[0] in self.real else name
        call = calls.of_node(node, self.signature)
        mentioned = {argument for argument in call.arguments if argument} if call else set()
        if not mentioned or name in mentioned:
            return name
        return mentioned.pop() if len(mentioned) == 1 else ""

    def by_scope(self, module: str, group: list[Layer]) -> dict[tuple[str, str], Home]:
        """The homes, by rule 3, of the weights of one module that lost their names."""
        homes: dict[tuple[str, str], Home] = {}
        if any(layer.op not in PRODUCTS or len(layer.weight.shape) != 2 for layer in group):
            reason = MULTIPLIED if module and any(layer.op in CONVOLUTIONS for layer in group) else UNKNOWN
            return {(layer.output, "weight"): Home(reason=reason) for layer in group}
        bases = {layer.weight.base for layer in group}
        for layer in group:
            if layer.op == "Gemm" and attribute(self.graph.nodes[layer.node], "transB", 0):
                homes[layer.output, "weight"] = Home(reason=COMPUTED)
                continue
            if self.is_tied(layer):
                homes[layer.output, "weight"] = Home(reason="another node reads a tensor equal to it")
                continue
            if bias := self.bias_name(layer):
                name, assumed = f"{bias.removesuffix('bias')}weight", False
            elif module and self.is_plain(module, bases):
                name, assumed = f"{module}.weight", not self.modules.is_known(module)
            else:
                continue
            if name not in self.real:
                homes[layer.output, "weight"] = Home((Part(name, _out_in(layer)),), assumed=assumed, taken=True)
        if not homes and f"{module}.out_proj.weight" in {layer.weight.base for layer in self.found.layers}:
            homes |= _attention(module, group)
            for (output, kind), home in list(homes.items()):
                if kind == "bias":
                    value = next(x.bias.value for x in group if x.output == output and x.bias is not None)
                    before = self.graph.known(value)
                    homes[output, kind] = Home(home.parts, before=before)
        return {(layer.output, "weight"): Home(reason=UNKNOWN) for layer in group} | homes

    def bias_name(self, layer: Layer) -> str:
        """The name of a layer's bias, if it is one of the layer's own module."""
        if layer.bias is None or not layer.bias.constant:
            return ""
        name = self.own_name(layer.bias.value)
        if layer.module:
            pattern = rf"{re.escape(layer.module)}\.(\w+_)?bias"
        elif self.graph.nodes[layer.node].name.startswith("/"):  # the network's own scope
            pattern = r"(\w+_)?bias"
        elif len(list(constants.readers_of(self.graph, name))) == 1:  # no scope; one reader: not a merged tensor
            pattern = r"(.*\.)?(\w+_)?bias"
        else:
            return ""
        return name if re.fullmatch(pattern, name) else ""

    def is_plain(self, module: str, bases: set[str]) -> bool:
        """Whether a module has one weight and perhaps a bias, but no other parameter and no layer inside."""
        inside = any(name.startswith(f"{module}.") and name != f"{module}.bias" for name in self.real)
        deeper = any(layer.module.startswith(f"{module}.") for layer in self.found.layers)
        return len(bases) == 1 and not inside and not deeper

    def is_tied(self, layer: Layer) -> bool:
        """Whether an initializer that is no layer's weight has the same values or their transpose: a tied embedding."""
        mine = self.graph.array(layer.weight.base)
        layers = {x.weight.base for x in self.found.layers}
        for name in self.graph.initializers.keys() - layers:
            dims = tuple(self.graph.tensors[name].dims)
            if dims in {mine.shape, mine.shape[::-1]} and len(dims) == 2:
                other = self.graph.array(name)
                if np.array_equal(other, mine) or np.array_equal(other, mine.T):
                    return True
        return False


def _is_multiplied(node: NodeProto, call: Call | None) -> bool:
    """Whether an exporter's optimizer folded a BatchNorm or another affine map into a layer's weight."""
    if call is not None and "batch_norm" in call.operator:
        return True
    rules = " ".join(entry.value for entry in node.metadata_props if entry.key == RULES)
    return "BatchNorm" in rules or "Affine" in rules


def _place(call: Call | None, kind: str) -> int:
    """The position of the weight or the bias among a call's arguments; -1 if it is not known."""
    if call is None:
        return -1
    if call.operator == "add" and kind == "bias":
        named = [k for k, argument in enumerate(call.arguments) if argument]
        return named[0] if len(named) == 1 else -1
    weight, bias = OPERATORS.get(call.operator, (-1, -1))
    return weight if kind == "weight" else bias


def _out_in(layer: Layer) -> Callable[[Array], Array]:
    return lambda array: layer.form.matrices(array)[0]


def _arranged(layer: Layer, call: Call) -> Callable[[Array], Array]:
    """A product's weight in the layout of the call: (out, in) for linear, (in, out) for a product of matrices."""
    if call.operator == "linear":
        return _out_in(layer)
    return lambda array: layer.form.matrices(array)[0].T


def _attention(module: str, group: list[Layer]) -> dict[tuple[str, str], Home]:
    """The projections of nn.MultiheadAttention, one product each for q, k and v, or for q and for k with v."""
    sizes = [layer.form.shape[1:] for layer in group]
    width = sizes[0][0]
    if len(group) == 3 and all(out == width for out, _ in sizes):
        if any(size != (width, width) for size in sizes):
            separate = {
                (layer.output, "weight"): Home((Part(f"{module}.{letter}_proj_weight", _out_in(layer)),))
                for layer, letter in zip(group, "qkv", strict=True)
            }
            return separate | dict(_rows(module, group, width, ("bias",)))
        return dict(_rows(module, group, width, ("weight", "bias")))
    if len(group) == 2 and sizes == [(width, width), (2 * width, width)]:
        return dict(_rows(module, group, width, ("weight", "bias")))
    return {}


def _rows(
    module: str, group: list[Layer], width: int, kinds: tuple[str, ...]
) -> Iterator[tuple[tuple[str, str], Home]]:
    """The rows of in_proj_weight and in_proj_bias that each layer's weight and bias are."""
    first = 0
    for layer in group:
        out = layer.form.shape[1]
        for kind in kinds:
            columns = width if kind == "weight" else 1
            places = np.arange(first * columns, (first + out) * columns)
            shape = (3 * width, width) if kind == "weight" else (3 * width,)
            if kind == "weight":
                part = Part(f"{module}.in_proj_weight", _out_in(layer), places, None, shape)
            else:
                part = Part(f"{module}.in_proj_bias", lambda array: array.reshape(-1), places, None, shape)
            if kind == "weight" or (layer.bias is not None and layer.bias.constant):
                yield (layer.output, kind), Home((part,))
        first += out
