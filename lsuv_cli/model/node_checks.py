"""Malformed nodes, refused before anything reads them: inputs, outputs or attributes that lack, or attributes' types.

onnxruntime refuses such nodes as well, but only when a session is made, long after a node's inputs and attributes are
read for the first time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from onnx import AttributeProto, NodeProto, defs

from lsuv_cli.errors import ModelError
from lsuv_cli.model.flatten import STANDARD_DOMAINS, label, nodes_inside

# Einsum's equation: terms of letters, each with at most one ellipsis, and perhaps a term for the result.
_TERM = r"[a-zA-Z ]*(?:\.\.\.[a-zA-Z ]*)?"
EQUATION = re.compile(rf"{_TERM}(?:,{_TERM})*(?:->{_TERM})?")


@dataclass(frozen=True)
class _Needs:
    """What an operator's schema asks of every node."""

    inputs: int  # how many there must be, some of them perhaps without a name
    outputs: int
    named: tuple[int, ...]  # the inputs that must have a name
    required: frozenset[str]  # attributes
    types: Mapping[str, int]  # attribute -> AttributeProto's number of its type


def check(node: NodeProto, version: int) -> None:
    """Refuse a malformed node of ONNX's operator set in this version, and a malformed node inside its bodies."""
    for inner in (node, *nodes_inside(node)):
        if inner.domain in STANDARD_DOMAINS and (fault := _fault(inner, version)):
            raise ModelError(f"node {label(inner)!r} ({inner.op_type}) {fault}; export the model again")


def _fault(node: NodeProto, version: int) -> str:
    """What is wrong with a node; nothing, mostly."""
    needs = _needs(node.op_type, version)
    if needs is None:
        return ""
    for kind, names, least in (("input", node.input, needs.inputs), ("output", node.output, needs.outputs)):
        if len(names) < least:
            return f"has {len(names)} of at least {least} {kind}{'' if least == 1 else 's'}"
    for k in needs.named:
        if not node.input[k]:
            return f"has no input {k}"
    missing = needs.required.difference(held.name for held in node.attribute)
    if missing:
        return f"has no attribute {min(missing)!r}"
    for held in node.attribute:
        wanted = needs.types.get(held.name, held.type)
        if held.type != wanted and not held.ref_attr_name:
            found, right = (AttributeProto.AttributeType.Name(number) for number in (held.type, wanted))
            return f"has {found} for its attribute {held.name!r}, which is {right}"
    return _no_equation(node) if node.op_type == "Einsum" else ""


@functools.cache
def _needs(op: str, version: int) -> _Needs | None:
    """None for an operator or a version that onnx does not know: onnxruntime may."""
    if not 0 < version <= defs.onnx_opset_version():
        return None
    try:
        schema = defs.get_schema(op, version, "")
    except defs.SchemaError:
        return None
    single = defs.OpSchema.FormalParameterOption.Single
    return _Needs(
        inputs=schema.min_input,
        outputs=schema.min_output,
        named=tuple(k for k, parameter in enumerate(schema.inputs) if parameter.option == single),
        required=frozenset(name for name, held in schema.attributes.items() if held.required),
        types={name: held.type.value for name, held in schema.attributes.items()},  # type: ignore[attr-defined]
    )


def _no_equation(node: NodeProto) -> str:
    """onnx's shape inference never ends for some equations that are none."""
    equation = next(held.s.decode(errors="replace") for held in node.attribute if held.name == "equation")
    return "" if EQUATION.fullmatch(equation) else f"has the equation {equation[:60]!r}, which is no equation"
