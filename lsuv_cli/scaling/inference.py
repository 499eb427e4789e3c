"""Types and shapes of a graph's values, as onnx infers them when the model is fed one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, TypeProto, helper, numpy_helper

from lsuv_cli.model.graph import SHAPE_BYTES, Graph

SHAPE_TYPES = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT})


def inferred_types(graph: Graph, batch: Mapping[str, NDArray[Any]]) -> dict[str, TypeProto.Tensor]:
    """Value -> type, for every value whose type onnx infers; empty where inference fails on the model."""
    inputs = [
        helper.make_tensor_value_info(name, info.type.tensor_type.elem_type, batch[name].shape)
        for name, info in graph.inputs.items()
        if name in batch
    ]
    body = onnx.GraphProto(name="types", node=graph.nodes, input=inputs)
    for name, tensor in graph.tensors.items():
        if math.prod(tensor.dims) * 8 <= SHAPE_BYTES and tensor.data_type in SHAPE_TYPES:
            body.initializer.append(numpy_helper.from_array(graph.array(name), name))
        else:
            body.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    model = onnx.ModelProto(ir_version=max(graph.ir_version, 4), graph=body)
    model.opset_import.extend(graph.opsets)
    model.functions.extend(graph.functions)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except MemoryError:
        raise
    except Exception:  # inference fails on healthy models too; then nothing is known
        return {}
    return {info.name: info.type.tensor_type for info in (*inferred.graph.value_info, *inferred.graph.output)}
