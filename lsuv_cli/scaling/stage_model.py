"""A stage as a model of its own: the nodes it runs, what it is fed, and the probes that measure its layers.

Tensors are not put into the model but handed over beside it, so that no stage meets protobuf's 2 GiB limit and
none is copied to be parsed. Small constants are inlined: shape logic needs to see them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper

from lsuv_cli.model.constants import numpy_type
from lsuv_cli.model.graph import Graph, attribute
from lsuv_cli.model.layers import CONVOLUTIONS, Layer
from lsuv_cli.scaling import moments
from lsuv_cli.scaling.moments import Probe, Units
from lsuv_cli.scaling.precision import Retype, retyped_node
from lsuv_cli.scaling.stages import Plan, Stage, Step

Array = NDArray[Any]

INLINE_BYTES = 1024


@dataclass(frozen=True)
class StageModel:
    """A model to run, its large tensors, and the names by which it takes and gives values."""

    proto: onnx.ModelProto
    tensors: Mapping[str, Array]
    feeds: Mapping[str, str]  # value -> the model's input that takes it
    fetches: tuple[str, ...]  # values for later stages
    probes: tuple[Probe, ...]


@dataclass
class Assembler:
    """Builds the models of one plan's stages."""

    graph: Graph
    plan: Plan
    stored: Callable[[str], Array]  # a stored tensor's present values
    retype: Retype = field(default_factory=dict)  # element types to be replaced, e.g. half by float
    units: bool = False  # measure the units in front of a Relu one by one too

    def __post_init__(self) -> None:
        self.measured = {layer.output: layer for stage in self.plan.stages for layer in stage.layers}

    def build(
        self,
        stage: Stage,
        types: Mapping[str, TypeProto],
        scales: Mapping[str, float],
        weights: Mapping[str, Array],
        exact: frozenset[str] = frozenset(),
    ) -> StageModel:
        """A stage's model.

        `types` are those of the values it is fed, `scales` those of the layers before it, `weights` the values its
        layers' operators are to read, `exact` the layers to be measured in the exact form.
        """
        work = _Work(self, types)
        for layer in stage.layers:
            if layer.weight.value in weights:
                kind = helper.tensor_dtype_to_np_dtype(self.element_type(layer))
                work.constant(layer.weight.value, weights[layer.weight.value].astype(kind, copy=False))
        for name in stage.inputs:
            work.feed(name, self.plan.owed.get(name, ()), scales)
        for step in stage.steps:
            work.run(step)
        if not self.plan.owed:  # nothing is scaled: the layers are measured as they stand
            behind = self.behind(stage)
            probes = [
                Probe(
                    behind.get(x.output, x.output),
                    _axes(x),
                    exact=x.output in exact,
                    units=self.rectified(x) if self.units else None,
                    divisor=self.plan.multiplied[x.output] if x.output in behind else 1.0,
                )
                for x in stage.layers
            ]
        else:
            probes = [work.measured(layer, layer.output in exact) for layer in stage.layers]
        sizes = work.group_sizes()
        probes = [replace(p, group=sizes.get(p.value, 0)) if p.axes and p.axes[0] == 2 else p for p in probes]
        for probe, layer in zip(probes, stage.layers, strict=True):
            work.nodes += moments.nodes(probe, self.graph.opset(), self.element_type(layer) == TensorProto.FLOAT)
        return work.finish(stage.outputs, probes)

    def behind(self, stage: Stage) -> dict[str, str]:
        """The values behind a BatchNormalization that stand for the layers' outputs in front of it.

        It only multiplies. Measured behind it, onnxruntime can make one operator of the two, as it will in use.
        """
        if self.units or self.retype:
            return {}
        others = [step for step in stage.steps if step.layer is None and self.graph.nodes[step.node].input]
        run = {self.graph.nodes[step.node].input[0]: step for step in others}
        return {name: run[name].makes[0] for name in self.plan.multiplied if name in run}

    def rectified(self, layer: Layer) -> Units | None:
        """A layer's units, if a Relu reads its output or is inside."""
        readers = (self.graph.nodes[k].op_type for k in self.graph.readers.get(layer.output, ()))
        if "Relu" not in (layer.activation, *readers):
            return None
        rank = len(layer.weight.shape)
        if layer.op in CONVOLUTIONS:
            return Units(layer.groups * layer.form.shape[1], tuple(range(2, rank)))
        if rank != 2 or layer.op == "Einsum":
            return None
        return Units(layer.form.shape[1], () if layer.position == 1 else (-1,))

    def element_type(self, layer: Layer) -> int:
        """The type in which a layer runs."""
        kind = helper.np_dtype_to_tensor_dtype(numpy_type(layer.weight.read_as))
        return self.retype.get(kind, kind)


class _Work:
    """One stage's model in the making."""

    def __init__(self, assembler: Assembler, types: Mapping[str, TypeProto]) -> None:
        self.assembler = assembler
        self.graph = assembler.graph
        self.types = types
        self.nodes: list[NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.feeds: dict[str, str] = {}
        self.inline: dict[str, TensorProto] = {}
        self.sparse: list[onnx.SparseTensorProto] = []
        self.tensors: dict[str, Array] = {}
        self.known: set[str] = set()

    def feed(self, name: str, owed: Sequence[str], scales: Mapping[str, float]) -> None:
        """Take a value from outside and pay what it owes: s·y + b, and the activation of a fused operator."""
        source = f"{name}/owed" if owed else name
        self.inputs.append(onnx.ValueInfoProto(name=source, type=self.types[name]))
        self.feeds[name] = source
        self.known.add(name)
        if not owed:
            return
        factor = float(np.prod([scales[layer] for layer in owed]))
        kind = self.types[name].tensor_type.elem_type
        self.inline[f"{name}/factor"] = helper.make_tensor(f"{name}/factor", kind, [], [factor])
        layer = self.assembler.measured.get(name)
        bias = self.bias(layer) if layer else ""
        activation = layer.activation if layer and not layer.is_linear(self.assembler.plan.keeps_bias) else ""
        steps = [
            ("Mul", f"{name}/factor"),
            *([("Add", bias)] if bias else []),
            *([(activation, "")] if activation else []),
        ]
        for k, (op, operand) in enumerate(steps):
            target = name if k == len(steps) - 1 else f"{name}/paid{k}"
            if operand:
                self.nodes.append(helper.make_node(op, [source, operand], [target]))
            else:
                assert layer is not None
                self.nodes.append(self.activation(layer, source, target))
            source = target

    def run(self, step: Step) -> None:
        """Add a node: a scaled layer without its bias, any other as it stands."""
        node = NodeProto()
        node.CopyFrom(self.graph.nodes[step.node])
        layer = step.layer
        if self.assembler.plan.owed and node.input and node.input[0] in self.assembler.plan.multiplied:
            # The number it multiplies by is paid together with the layer's scale.
            self.nodes.append(helper.make_node("Identity", node.input[:1], node.output[:1]))
            return
        for name in self.graph.reads(step.node) if layer is None else node.input[:2]:
            self.need(name)
        if layer is None:
            self.nodes.append(retyped_node(node, self.assembler.retype))
            return
        del node.input[2:]
        if node.op_type == "Gemm" and self.graph.opset() < 11:  # there C is no option
            self.constant(f"{layer.output}/no_bias", np.zeros([], numpy_type(layer.weight.read_as)))
            node.input.append(f"{layer.output}/no_bias")
        carried = layer.activation and layer.is_linear(self.assembler.plan.keeps_bias)
        node.output[0] = f"{layer.output}/linear" if carried else layer.output
        if layer.activation:
            node.op_type, node.domain = node.op_type.removeprefix("Fused"), ""
            kept = [a for a in node.attribute if not a.name.startswith("activation")]
            del node.attribute[:]
            node.attribute.extend(kept)
        self.nodes.append(node)
        if carried:
            self.nodes.append(self.activation(layer, node.output[0], layer.output))

    def measured(self, layer: Layer, exact: bool) -> Probe:
        """The probe of a layer that is to be scaled."""
        value, bias = layer.output, self.bias(layer)
        if not layer.is_linear(self.assembler.plan.keeps_bias):
            source = value
            if bias:
                source = f"{value}/biased"
                self.nodes.append(helper.make_node("Add", [value, bias], [source]))
            self.nodes.append(self.activation(layer, source, f"{value}/active"))
            return Probe(f"{value}/active", _axes(layer), exact=exact)
        return Probe(value, _axes(layer), bias, exact or bool(bias))

    def bias(self, layer: Layer) -> str:
        """A value that can be added to a layer's product as its bias; none where the bias is set to zero."""
        bias = layer.bias
        if bias is None or layer.output not in self.assembler.plan.keeps_bias:
            return ""
        self.need(bias.value)
        name = bias.value
        if bias.shape is not None:
            shaped = f"{layer.output}/bias"
            if shaped not in self.known:
                shape = helper.make_tensor(f"{shaped}/shape", TensorProto.INT64, [len(bias.shape)], bias.shape)
                self.inline[shape.name] = shape
                self.nodes.append(helper.make_node("Reshape", [name, shape.name], [shaped]))
                self.known.add(shaped)
            name = shaped
        if bias.factor != 1.0:
            factored = f"{layer.output}/bias_factored"
            if factored not in self.known:
                kind = self.assembler.element_type(layer)
                factor = helper.make_tensor(f"{factored}/factor", kind, [], [bias.factor])
                self.inline[factor.name] = factor
                self.nodes.append(helper.make_node("Mul", [name, factor.name], [factored]))
                self.known.add(factored)
            name = factored
        return name

    def activation(self, layer: Layer, source: str, target: str) -> NodeProto:
        """The activation inside a fused operator as a node of its own."""
        node = self.graph.nodes[layer.node]
        numbers = list(attribute(node, "activation_params", ()))
        numbers += [x for k in ("alpha", "beta") if (x := attribute(node, f"activation_{k}")) is not None]
        names = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}.get(layer.activation, ())
        return helper.make_node(layer.activation, [source], [target], **dict(zip(names, numbers, strict=False)))

    def need(self, name: str) -> None:
        """Bring in a constant that a node reads, or the nodes that compute it from constants."""
        if not name or name in self.known or name not in self.graph.constant:
            return
        self.known.add(name)
        if name in self.graph.tensors:
            tensor = self.graph.tensors[name]
            if tensor.data_type in self.assembler.retype or tensor.data_type == TensorProto.FLOAT:
                self.constant(name, self.assembler.stored(name))
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
            self.nodes.append(retyped_node(self.graph.nodes[k], self.assembler.retype))

    def constant(self, name: str, array: Array) -> None:
        """A float tensor: inline if it is small, else beside the model."""
        self.known.add(name)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        target = self.assembler.retype.get(kind, kind)
        if target != kind:
            array = array.astype(helper.tensor_dtype_to_np_dtype(target))
        if array.nbytes <= INLINE_BYTES:
            self.inline[name] = numpy_helper.from_array(np.asarray(array, order="C"), name)
        else:
            self.tensors[name] = np.asarray(array, order="C")

    def other_constant(self, name: str, tensor: TensorProto) -> None:
        """A tensor of integers, strings, booleans, doubles or an exotic type, as it is."""
        copy = TensorProto()
        if tensor.data_location == TensorProto.EXTERNAL:
            array = self.assembler.stored(name)
            if array.nbytes > INLINE_BYTES:
                self.tensors[name] = np.asarray(array, order="C")
                return
            copy = numpy_helper.from_array(np.asarray(array, order="C"))
        else:
            copy.CopyFrom(tensor)
        copy.name = name
        self.inline[name] = copy

    def group_sizes(self) -> dict[str, int]:
        """How many positions each image-like value has, where ONNX can tell without running."""
        try:
            inferred = onnx.shape_inference.infer_shapes(self.finish((), ()).proto)
        except Exception:  # it may fail on healthy models, and is only used to save time
            return {}
        shapes = {info.name: info.type.tensor_type.shape.dim for info in inferred.graph.value_info}
        return {name: math.prod(d.dim_value for d in dims[2:]) for name, dims in shapes.items() if len(dims) > 2}

    def finish(self, outputs: Sequence[str], probes: Sequence[Probe]) -> StageModel:
        graph = onnx.GraphProto(name="stage", node=self.nodes, input=self.inputs)
        seen: set[str] = set()
        for node in graph.node:  # onnxruntime wants names to be unique, where there are any
            if node.name in seen:
                node.name = ""
            seen.add(node.name)
        graph.initializer.extend(self.inline.values())
        graph.sparse_initializer.extend(self.sparse)
        for name, array in self.tensors.items():
            stub = graph.initializer.add(name=name, dims=array.shape)
            stub.data_type = helper.np_dtype_to_tensor_dtype(array.dtype)
            stub.data_location = TensorProto.EXTERNAL
            # Never opened: the session gets the tensor itself under this name.
            stub.external_data.add(key="location", value="in-memory")
        # onnxruntime infers the type of an output that has only a name.
        fetched = [*outputs, *(name for probe in probes for name in probe.fetches)]
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in fetched)
        model = onnx.ModelProto(ir_version=max(self.graph.ir_version, 4), graph=graph)
        model.opset_import.extend(self.graph.opsets)
        return StageModel(model, self.tensors, self.feeds, tuple(outputs), tuple(probes))


def _axes(layer: Layer) -> tuple[int, ...] | None:
    """The axes of one group of a layer's output: a channel's positions, or a row."""
    if "Conv" in layer.op:
        return tuple(range(2, len(layer.weight.shape)))
    if len(layer.weight.shape) > 1 and layer.op != "Einsum":
        return (-1,)
    return None
