"""How much memory a plan will take, from shapes alone, so that too much is refused before a stage runs.

Where onnx cannot infer a shape, the answer is "unknown", and nothing is refused.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from lsuv_cli.errors import LsuvError
from lsuv_cli.model.graph import Graph
from lsuv_cli.scaling.stages import Plan, Stage

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
    sizes = value_bytes(graph, batches[0], read)
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


def check_batch(stage: Stage, sizes: Mapping[str, int], batch: Mapping[str, Array], available: int) -> None:
    """Refuse a batch that cannot fit: a layer's input and output are in memory at the same time, if nothing else."""
    makers = {step.makes[0]: step for step in stage.steps if step.makes}
    needs = {
        layer.name: sum(sizes.get(name, 0) for name in (*makers[layer.output].reads, layer.output))
        for layer in stage.layers
        if layer.output in makers
    }
    name = max(needs, key=lambda name: needs[name], default="")
    if not name or needs[name] <= available:
        return
    samples = max((array.shape[0] for array in batch.values() if array.ndim), default=1)
    fitting = max(1, int(samples * available / needs[name] / 2))  # half, because a bare fit is none
    way_out = f"use `batch_size={fitting}`" if samples > 1 else "it takes a machine with more memory"
    raise LsuvError(
        f"a batch of {samples} needs at least {amount(needs[name])} of memory in layer {name}, and "
        f"{amount(available)} is free; {way_out}"
    )


def check_waiting(stage: Stage, sizes: Mapping[str, int], batches: int, waiting: int, budget: int) -> None:
    """Refuse to let more values wait between stages than memory and the temporary directory have room for."""
    more = sum(sizes.get(name, 0) for name in stage.outputs) * batches
    to_file = min(more, waiting + more - budget)
    if to_file <= 0:
        return
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    if to_file > free:
        raise LsuvError(
            f"values of {amount(to_file)} have to wait in a file between stages, and {place} has {amount(free)} "
            "free; use `limit` for fewer samples, a larger `memory`, or another directory (TMPDIR)"
        )


def amount(size: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def value_bytes(graph: Graph, batch: Mapping[str, Array], read: Callable[[str], Array]) -> dict[str, int]:
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
