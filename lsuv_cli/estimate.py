"""How much memory a plan will take, from shapes alone. Where onnx cannot infer a shape, the answer is "unknown"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from lsuv_cli.graph import Graph
from lsuv_cli.stages import Plan

Array = NDArray[Any]
SMALL = 1024  # bytes; constants up to this size may be shapes, which inference has to see


def stage_weights(graph: Graph, plan: Plan) -> int:
    """The bytes of the largest stage's weights while it runs."""
    sizes = {name: math.prod(tensor.dims) * 4 for name, tensor in graph.tensors.items()}
    return max(
        (sum({x.weight.base: sizes.get(x.weight.base, 0) for x in stage.layers}.values()) for stage in plan.stages),
        default=0,
    )


def between_stages(
    graph: Graph, plan: Plan, batches: Sequence[Mapping[str, Array]], read: Callable[[str], Array]
) -> int | None:
    """The most bytes that wait between two stages for all batches; None if a shape cannot be inferred."""
    if not any(stage.outputs for stage in plan.stages):
        return 0
    if not batches:
        return None
    sizes = _value_bytes(graph, batches[0], read)
    waiting: set[str] = set()
    most = 0
    for index, stage in enumerate(plan.stages):
        waiting |= set(stage.outputs)
        if any(name not in sizes for name in waiting):
            return None
        most = max(most, sum(sizes[name] for name in waiting))
        needed = {name for later in plan.stages[index + 1 :] for name in later.inputs}
        waiting &= needed
    return most * len(batches)


def _value_bytes(graph: Graph, batch: Mapping[str, Array], read: Callable[[str], Array]) -> dict[str, int]:
    """The size of every value whose shape onnx can infer when the model is fed one batch."""
    inputs = [
        helper.make_tensor_value_info(name, info.type.tensor_type.elem_type, batch[name].shape)
        for name, info in graph.inputs.items()
        if name in batch
    ]
    body = onnx.GraphProto(name="shapes", node=graph.nodes, input=inputs)
    for name, tensor in graph.tensors.items():
        array_bytes = math.prod(tensor.dims) * 8
        if array_bytes <= SMALL and tensor.data_type in {TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT}:
            small = body.initializer.add()
            small.CopyFrom(onnx.numpy_helper.from_array(read(name), name))
        else:
            body.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    model = onnx.ModelProto(ir_version=max(graph.ir_version, 4), graph=body)
    model.opset_import.extend(graph.opsets)
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # inference fails on healthy models too; then the size is simply not known
        return {}
    sizes: dict[str, int] = {}
    for info in (*inferred.graph.value_info, *inferred.graph.output):
        kind = info.type.tensor_type
        if kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim):
            sizes[info.name] = math.prod(d.dim_value for d in kind.shape.dim) * 4
    return sizes
