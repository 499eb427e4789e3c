"""A stage of calibration as a model of its own: its nodes, its inputs, and the probes that measure its layers.

A layer runs without its bias. A stage starts by applying the pending scales of its inputs: s·y, then + b and the
activation where the input is the output of a layer with a kept bias or a fused activation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, TypeProto, helper

from lsuv_cli.model import channels
from lsuv_cli.model.constants import numpy_type
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer
from lsuv_cli.scaling import fused, moments
from lsuv_cli.scaling.channel_moments import ChannelProbe
from lsuv_cli.scaling.model_builder import ModelBuilder, StageModel, own_prefix
from lsuv_cli.scaling.moments import Probe
from lsuv_cli.scaling.precision import Retype
from lsuv_cli.scaling.stages import Plan, Stage, Step

Array = NDArray[Any]


@dataclass
class Assembler:
    """Builds the models of one plan's stages."""

    graph: Graph
    plan: Plan
    accuracy: float  # the relative error that a measured variance may have
    retype: Retype = field(default_factory=dict)  # element types to be replaced, e.g. half by float

    def __post_init__(self) -> None:
        self.measured = {layer.output: layer for stage in self.plan.stages for layer in stage.layers}
        self.prefix = own_prefix(self.graph)

    def build(
        self,
        stage: Stage,
        types: Mapping[str, TypeProto],
        scales: Mapping[str, float | Array],
        weights: Mapping[str, Array],
        exact: frozenset[str] = frozenset(),
    ) -> StageModel:
        """A stage's model.

        `types`: stage input -> type. `scales`: output of a layer in an earlier stage -> scale. `weights`: name of the
        weight a layer's operator, or the Dropout in front of it, reads -> array. `exact`: outputs of the layers to be
        measured in the exact form.
        """
        work = _Work(self, types)
        for layer in stage.layers:
            weight = layer.weight
            if weight.dropped and weight.base in weights:
                work.constant(weight.base, weights[weight.base].astype(numpy_type(weight.dtype), copy=False))
            elif weight.value in weights:
                kind = helper.tensor_dtype_to_np_dtype(self.element_type(layer))
                work.constant(weight.value, weights[weight.value].astype(kind, copy=False))
        for name in stage.inputs:
            work.feed(name, self.plan.pending.get(name, ()), scales)
        for step in stage.steps:
            work.run(step)
        probes = [work.measured(layer, layer.output in exact) for layer in stage.layers]
        probes = work.with_nodes(probes, stage.layers)
        return work.finish(stage.outputs, [*probes, *work.sums(stage.layers)])

    def element_type(self, layer: Layer) -> int:
        """The type in which a layer runs."""
        kind = helper.np_dtype_to_tensor_dtype(numpy_type(layer.weight.read_as))
        return self.retype.get(kind, kind)


class _Work(ModelBuilder):
    """One stage's model being built."""

    def __init__(self, assembler: Assembler, types: Mapping[str, TypeProto]) -> None:
        super().__init__(assembler.graph, assembler.prefix, types, assembler.retype)
        self.assembler = assembler

    def feed(self, name: str, pending: Sequence[str], scales: Mapping[str, float | Array]) -> None:
        """s·y + b: add a stage input, apply its pending scales s, its kept bias b and a fused operator's activation."""
        source = self.own("unscaled", name) if pending else name
        self.take(name, source)
        if not pending:
            return
        product = np.asarray(math.prod(scales[x] for x in pending))
        kind = self.types[name].tensor_type.elem_type
        factor = helper.make_tensor(self.own("scale", name), kind, product.shape, product.ravel().tolist())
        self.inline[factor.name] = factor
        layer = self.assembler.measured.get(name)
        bias = self.bias(layer) if layer else ""
        activation = layer.activation if layer and not layer.is_linear else ""
        steps = [
            ("Mul", factor.name),
            *([("Add", bias)] if bias else []),
            *([(activation, "")] if activation else []),
        ]
        for k, (op, operand) in enumerate(steps):
            target = name if k == len(steps) - 1 else self.own(f"scaled{k}", name)
            if operand:
                self.nodes.append(helper.make_node(op, [source, operand], [target]))
            else:
                assert layer is not None
                self.nodes += self.activation(layer, source, target)
            source = target

    def run(self, step: Step) -> None:
        """Add a step's node: a scaled layer without its bias, any other node unchanged."""
        node = NodeProto()
        node.CopyFrom(self.graph.nodes[step.node])
        layer = step.layer
        if node.input and self._only_multiplied(node.input[0]):
            # The node is a BatchNormalization y = c·x; c is applied together with the layer's scale.
            self.nodes.append(helper.make_node("Identity", node.input[:1], node.output[:1]))
            return
        for name in self.graph.reads(step.node) if layer is None else node.input[:2]:
            self.need(name)
        if layer is None:
            self.add(node)
            return
        del node.input[2:]
        if layer.activation:
            node = fused.without_activation(node)
        if node.op_type == "Gemm" and self.graph.opset() < 11:  # before opset 11 Gemm's C is required
            self.constant(self.own("no_bias", layer.output), np.zeros([], numpy_type(layer.weight.read_as)))
            node.input.append(self.own("no_bias", layer.output))
        commutes = layer.activation and layer.is_linear
        node.output[0] = self.own("linear", layer.output) if commutes else layer.output
        self.nodes.append(node)
        if commutes:
            self.nodes += self.activation(layer, node.output[0], layer.output)

    def _only_multiplied(self, name: str) -> bool:
        layer = self.assembler.measured.get(name)
        return layer is not None and layer.norm_factor is not None

    def measured(self, layer: Layer, exact: bool) -> Probe | ChannelProbe:
        """The probe of a layer that is to be scaled."""
        value, bias = layer.output, "" if layer.is_centred else self.bias(layer)
        prefix = self.prefix
        by_channel = channels.of(layer) if layer.by_channel or layer.is_centred else None
        if not layer.is_linear:
            source, active = value, self.own("active", value)
            if bias:
                source = self.own("biased", value)
                self.nodes.append(helper.make_node("Add", [value, bias], [source]))
            self.nodes += self.activation(layer, source, active)
            if by_channel is not None:
                return ChannelProbe(active, prefix, by_channel)
            return Probe(active, prefix, _axes(layer), self.assembler.accuracy, exact=exact)
        if by_channel is not None:
            return ChannelProbe(value, prefix, by_channel, bias)
        return Probe(value, prefix, _axes(layer), self.assembler.accuracy, bias, exact or bool(bias))

    def with_nodes(self, probes: Sequence[Probe | ChannelProbe], layers: Sequence[Layer]) -> list[Probe | ChannelProbe]:
        """Add the probes' nodes. Returns the probes with their group sizes, where onnx can infer these."""
        shapes = self.plane_shapes()
        sized = [
            p.over(shapes[p.value]) if isinstance(p, Probe) and p.is_plane and p.value in shapes else p for p in probes
        ]
        for probe, layer in zip(sized, layers, strict=True):
            if isinstance(probe, ChannelProbe):
                self.nodes += probe.nodes(self.graph.opset())
                continue
            is_float32 = self.assembler.element_type(layer) == TensorProto.FLOAT
            self.nodes += moments.nodes(probe, self.graph.opset(), is_float32)
        return sized

    def sums(self, layers: Sequence[Layer]) -> list[Probe]:
        """The probes of residual sums: of branch and stream together, or of the stream alone."""
        plan, probes = self.assembler.plan, []
        for layer in layers:
            if layer.output in plan.sums:
                place = plan.sums[layer.output]
                value, other = (place.branch, place.stream) if layer.output in plan.joint else (place.stream, "")
                prefix = self.own("sum", f"{place.output}/")
                probes.append(Probe(value, prefix, None, self.assembler.accuracy, other, exact=True))
                self.nodes += moments.nodes(probes[-1], self.graph.opset(), is_float32=False)
        return probes

    def bias(self, layer: Layer) -> str:
        """The name of the value to add to a layer's product as its bias; empty where the bias is set to zero."""
        bias = layer.bias
        if bias is None or not (bias.kept or bias.centred):
            return ""
        self.need(bias.value)
        name = bias.value
        if bias.shape is not None:
            shaped = self.own("bias", layer.output)
            if shaped not in self.known:
                shape = helper.make_tensor(
                    self.own("bias_shape", layer.output), TensorProto.INT64, [len(bias.shape)], bias.shape
                )
                self.inline[shape.name] = shape
                self.nodes.append(helper.make_node("Reshape", [name, shape.name], [shaped]))
                self.known.add(shaped)
            name = shaped
        if bias.factor != 1.0:
            factored = self.own("bias_factored", layer.output)
            if factored not in self.known:
                kind = self.assembler.element_type(layer)
                factor = helper.make_tensor(self.own("bias_factor", layer.output), kind, [], [bias.factor])
                self.inline[factor.name] = factor
                self.nodes.append(helper.make_node("Mul", [name, factor.name], [factored]))
                self.known.add(factored)
            name = factored
        return name

    def activation(self, layer: Layer, source: str, target: str) -> list[NodeProto]:
        """The activation inside a fused operator as a node of its own."""
        return fused.activation_nodes(self.graph.nodes[layer.node], source, target, self.graph.opset())

    def plane_shapes(self) -> dict[str, list[int]]:
        """Value -> lengths of its axes behind the channels, for image-like values whose shape onnx can infer."""
        try:
            inferred = onnx.shape_inference.infer_shapes(self.finish((), ()).proto)
        except MemoryError:
            raise
        except Exception:  # inference may fail on healthy models, and its shapes only save time
            return {}
        shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim[2:]] for i in inferred.graph.value_info}
        # A dimension that is not known has the value 0, and some exporters write -1 for one.
        return {name: dims for name, dims in shapes.items() if dims and min(dims) > 0}


def _axes(layer: Layer) -> tuple[int, ...] | None:
    """The axes of one group of a layer's output: a channel's positions, or a row."""
    if "Conv" in layer.op:
        return tuple(range(2, len(layer.weight.shape)))
    if len(layer.weight.shape) > 1 and layer.op != "Einsum":
        return (-1,)
    return None
