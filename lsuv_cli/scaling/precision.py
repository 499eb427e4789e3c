"""Element types replaced in a throwaway copy of a model: half precision runs as float32, and doubles if need be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from lsuv_cli.model.graph import Graph
from lsuv_cli.scaling.inference import inferred_types

Retype = Mapping[int, int]  # element type -> its replacement

HALF: Retype = {TensorProto.FLOAT16: TensorProto.FLOAT, TensorProto.BFLOAT16: TensorProto.FLOAT}
ALL: Retype = {**HALF, TensorProto.DOUBLE: TensorProto.FLOAT}
TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "stash_type"})


def has_half(graph: Graph) -> bool:
    """Whether a model computes in half precision, as far as its inputs, tensors and casts tell."""
    kinds = {info.type.tensor_type.elem_type for info in graph.inputs.values()}
    kinds |= {tensor.data_type for tensor in graph.tensors.values()}
    kinds |= {a.i for node in graph.nodes for a in node.attribute if a.name in TYPE_ATTRIBUTES}
    return not kinds.isdisjoint(HALF)


def stored_types(graph: Graph, batch: Mapping[str, NDArray[Any]], retype: Retype) -> dict[str, int]:
    """Value -> the half-precision type it has in the model, for values that run in float32 instead."""
    types = {name: int(kind.elem_type) for name, kind in inferred_types(graph, batch).items()}
    return {name: kind for name, kind in types.items() if kind in retype and kind in HALF}


def retyped_type(kind: TypeProto, retype: Retype) -> TypeProto:
    """A value's type with its element type replaced."""
    copy = TypeProto()
    copy.CopyFrom(kind)
    inner = copy
    while not inner.HasField("tensor_type"):
        if inner.HasField("sequence_type"):
            inner = inner.sequence_type.elem_type
        elif inner.HasField("optional_type"):
            inner = inner.optional_type.elem_type
        else:
            return copy
    inner.tensor_type.elem_type = retype.get(inner.tensor_type.elem_type, inner.tensor_type.elem_type)
    return copy


def retyped_node(node: NodeProto, retype: Retype) -> NodeProto:
    """A node with the element types in its attributes and subgraphs replaced."""
    if not retype or not node.attribute:
        return node
    copy = NodeProto()
    copy.CopyFrom(node)
    for held in copy.attribute:
        if held.type == AttributeProto.INT and held.name in TYPE_ATTRIBUTES:
            held.i = retype.get(held.i, held.i)
        elif held.type == AttributeProto.TENSOR:
            held.t.CopyFrom(_retyped_tensor(held.t, retype))
        elif held.type == AttributeProto.GRAPH:
            _retype_graph(held.g, retype)
        elif held.type == AttributeProto.GRAPHS:
            for graph in held.graphs:
                _retype_graph(graph, retype)
    return copy


def _retype_graph(graph: onnx.GraphProto, retype: Retype) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        info.type.CopyFrom(retyped_type(info.type, retype))
    for tensor in graph.initializer:
        tensor.CopyFrom(_retyped_tensor(tensor, retype))
    for node in graph.node:
        node.CopyFrom(retyped_node(node, retype))


def _retyped_tensor(tensor: TensorProto, retype: Retype) -> TensorProto:
    target = retype.get(tensor.data_type)
    if target is None:
        return tensor
    array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(target))
    return numpy_helper.from_array(array, tensor.name)
