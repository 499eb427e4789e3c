"""Operators with an activation inside (FusedConv, FusedGemm), taken apart."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import NodeProto, TensorProto, helper

from lsuv_cli.model.flatten import STANDARD_DOMAINS
from lsuv_cli.model.graph import attribute

CLIP_HAS_INPUTS = 11  # the operator set since which Clip's bounds are inputs


def activation_nodes(fused: NodeProto, source: str, target: str, opset: int) -> list[NodeProto]:
    """The activation inside a fused operator as a node of its own; Clip has its bounds in Constant nodes."""
    kind = str(attribute(fused, "activation", ""))
    numbers = list(attribute(fused, "activation_params", ()))
    numbers += [x for k in ("alpha", "beta") if (x := attribute(fused, f"activation_{k}")) is not None]
    if kind == "Clip" and opset >= CLIP_HAS_INPUTS:
        bounds = [f"{source}|{target}|{name}" for name in ("min", "max")][: len(numbers)]
        constants = [
            helper.make_node("Constant", [], [name], value=helper.make_tensor(name, TensorProto.FLOAT, [], [number]))
            for name, number in zip(bounds, numbers, strict=False)
        ]
        return [*constants, helper.make_node(kind, [source, *bounds], [target])]
    names = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Clip": ("min", "max")}.get(kind, ())
    return [helper.make_node(kind, [source], [target], **dict(zip(names, numbers, strict=False)))]


def without_activation(fused: NodeProto) -> NodeProto:
    """A fused operator as the plain one, without its activation."""
    node = NodeProto()
    node.CopyFrom(fused)
    node.op_type, node.domain = node.op_type.removeprefix("Fused"), ""
    kept = [a for a in node.attribute if not a.name.startswith("activation")]
    del node.attribute[:]
    node.attribute.extend(kept)
    return node


def split(model: onnx.ModelProto, activations: Collection[str], prefix: str = "lsuv:split/") -> onnx.ModelProto:
    """A model whose convolutions have none of these activations inside: y = f(conv(x, w, b) + z) in up to three nodes.

    The model itself where there is nothing to split, else a copy.
    """
    if not any(_is_to_split(node, activations) for node in model.graph.node):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    opset = max((o.version for o in copy.opset_import if o.domain in STANDARD_DOMAINS), default=1)
    nodes = list(copy.graph.node)
    del copy.graph.node[:]
    for node in nodes:
        copy.graph.node.extend(_parts(node, prefix, opset) if _is_to_split(node, activations) else [node])
    return copy


def _parts(fused: NodeProto, prefix: str, opset: int) -> list[NodeProto]:
    target = fused.output[0]
    source = f"{prefix}linear/{target}"
    conv = without_activation(fused)
    conv.output[0] = source
    parts = [conv]
    if len(conv.input) > 3:  # a value to add in front of the activation
        other = conv.input[3]
        del conv.input[3:]
        if other:
            total = f"{prefix}sum/{target}"
            parts.append(helper.make_node("Add", [source, other], [total]))
            source = total
    return [*parts, *activation_nodes(fused, source, target, opset)]


def _is_to_split(node: NodeProto, activations: Collection[str]) -> bool:
    return node.op_type == "FusedConv" and attribute(node, "activation", "") in activations
