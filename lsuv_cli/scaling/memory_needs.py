"""How much memory a plan will take, from shapes alone, so that a plan that cannot fit is refused before it runs.

Where onnx cannot infer a shape, the answer is "unknown", and nothing is refused.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from lsuv_cli.errors import LsuvError
from lsuv_cli.memory import amount
from lsuv_cli.model.graph import Graph
from lsuv_cli.scaling.inference import inferred_types
from lsuv_cli.scaling.stages import Plan, Stage

Array = NDArray[Any]

# No layer's input and output take more than this times the model's inputs; below that, shapes need not be inferred.
LARGEST_GROWTH = 1000
# What a session takes, in sizes of its largest layer's input and output: to be measured, the output is there in double
# and squared too, and beside it values of other layers.
BESIDE = 6


def stage_weights(graph: Graph, plan: Plan) -> int:
    """The largest number of bytes that the weights of one stage take."""
    bases = ({layer.weight.base for layer in stage.layers} for stage in plan.stages)
    return max((sum(graph.nbytes(base) for base in names) for names in bases), default=0)


def between_stages(graph: Graph, plan: Plan, batches: Sequence[Mapping[str, Array]]) -> int | None:
    """The frontier's largest size in bytes, over all batches; None if a shape cannot be inferred."""
    if not any(stage.outputs for stage in plan.stages):
        return 0
    if not batches:
        return None
    sizes = value_bytes(graph, batches[0])
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


def check_batch(stage: Stage, sizes: Mapping[str, int], batch: Mapping[str, Array], available: int | None) -> None:
    """Refuse a batch that cannot fit: at the least, a layer's input and output are in memory at the same time."""
    name, needed = most_needed(stage, sizes)
    if available is None or needed <= available:
        return
    samples = _samples(batch)
    way_out = f"use `batch_size={_fitting(samples, needed, available)}`" if samples > 1 else "it takes more memory"
    raise LsuvError(
        f"a batch of {samples} needs at least {amount(needed)} of memory in layer {name}, and "
        f"{amount(available)} is free; {way_out}"
    )


def fitting_batch(graph: Graph, plan: Plan, batch: Mapping[str, Array], available: int | None) -> int | None:
    """The batch size that is likely to fit; None if that of the batch is, or where it is not known."""
    if available is None or _samples(batch) < 2:
        return None
    if sum(array.nbytes for array in batch.values()) * LARGEST_GROWTH <= available:
        return None
    sizes = value_bytes(graph, batch)
    needed = max((most_needed(stage, sizes)[1] for stage in plan.stages), default=0)
    return _fitting(_samples(batch), needed, available) if BESIDE * needed > available else None


def most_needed(stage: Stage, sizes: Mapping[str, int]) -> tuple[str, int]:
    """The layer of a stage whose input and output take most memory, and the bytes they take."""
    makers = {step.makes[0]: step for step in stage.steps if step.makes}
    needs = {
        layer.name: sum(sizes.get(name, 0) for name in (*makers[layer.output].reads, layer.output))
        for layer in stage.layers
        if layer.output in makers
    }
    name = max(needs, key=lambda name: needs[name], default="")
    return name, needs.get(name, 0)


def _samples(batch: Mapping[str, Array]) -> int:
    return max((array.shape[0] for array in batch.values() if array.ndim), default=1)


def _fitting(samples: int, needed: int, available: int) -> int:
    return max(1, int(samples * max(available, 0) / needed / BESIDE))


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


def value_bytes(graph: Graph, batch: Mapping[str, Array]) -> dict[str, int]:
    """The size of every value whose shape onnx can infer when the model is fed one batch."""
    return {
        name: math.prod(d.dim_value for d in kind.shape.dim) * 4
        for name, kind in inferred_types(graph, batch).items()
        if kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim)
    }
