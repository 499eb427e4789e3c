"""Runs the stages of a plan over all batches, one stage after another; values for later stages wait in the frontier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TypeProto, helper

from lsuv_cli.memory import available_memory
from lsuv_cli.model.graph import Graph
from lsuv_cli.scaling import memory_needs, precision
from lsuv_cli.scaling.frontier import Frontier
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.precision import Retype
from lsuv_cli.scaling.providers import Device
from lsuv_cli.scaling.runtime import Session, host_value
from lsuv_cli.scaling.stages import Plan, Stage

Array = NDArray[Any]
Batch = Mapping[str, Array]
Progress = Callable[[int, int], None]  # steps done, steps in all


@dataclass(frozen=True)
class Pass:
    """What every pass over the data needs."""

    batches: Sequence[Batch]
    device: Device
    memory: int  # bytes for values that wait between stages
    progress: Progress
    accuracy: float  # the relative error that a measured variance may have
    few: Batch  # the first few samples


def free_memory(device: Device) -> int | None:
    """The bytes that a stage may take where it runs; None where a device does not tell."""
    if device.is_host:
        return available_memory()
    memory = device.provider.free_memory(device.index)
    return None if memory is None else memory[0]


class Runner:
    """One pass over the data, stage by stage."""

    def __init__(self, graph: Graph, plan: Plan, needs: Pass, retype: Retype) -> None:
        self.graph, self.plan, self.needs, self.retype = graph, plan, needs, retype
        self.frontier = Frontier(needs.memory)
        self._sizes: dict[str, int] | None = None  # value -> bytes for the first batch, where onnx infers the shape

    def run(self, index: int, session: Session) -> list[Moments]:
        """Run a stage over all batches. Returns the moments of its layers.

        The run stops after the first batch if a layer's moments are not trusted: the stage is then measured again.
        """
        stage, batches = self.plan.stages[index], self.needs.batches
        meters = [each.meter() for each in session.model.measurements]
        for number, batch in enumerate(batches):
            if number == 0:
                self._foresee(stage, batch)
            values = {name: self.value(number, batch, name) for name in session.model.feeds}
            kept, fetched = session.run(values)
            for meter, numbers in zip(meters, fetched, strict=True):
                meter.add(numbers)
            self.frontier.put(number, kept)
            self.needs.progress(index * len(batches) + number + 1, len(self.plan.stages) * len(batches))
            if number == 0 and any(not meter.result().trusted for meter in meters):
                break
        return [meter.result() for meter in meters]

    def forget(self, index: int) -> None:
        """Free the waiting values that no stage after this one reads."""
        still_needed = {name for later in self.plan.stages[index + 1 :] for name in later.inputs}
        for batch in range(len(self.needs.batches)):
            self.frontier.keep_only(batch, still_needed)

    def types(self, stage: Stage) -> dict[str, TypeProto]:
        """The types of a stage's inputs; a dimension is fixed where it is the same in all batches."""
        waiting = [name for name in stage.inputs if name not in self.graph.inputs]
        fed = {name: self.input_type(name) for name in stage.inputs if name in self.graph.inputs}
        return {**fed, **self.frontier.types(waiting)}

    def input_type(self, name: str) -> TypeProto:
        """The type of an input of the model, with the dimensions that the data gives it."""
        kind = precision.retyped_type(self.graph.inputs[name].type, self.retype)
        shapes = [np.shape(batch[name]) for batch in self.needs.batches if name in batch]
        if not kind.HasField("tensor_type") or len({len(shape) for shape in shapes}) != 1:
            return kind
        dims = [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)]
        return helper.make_tensor_type_proto(kind.tensor_type.elem_type, dims)

    def value(self, number: int, batch: Batch, name: str) -> Any:
        """An input of a stage for one batch: the user's data, or a value from the frontier."""
        if name not in self.graph.inputs:
            return self.frontier.get(number, name)
        array = batch[name]
        kind = self.graph.inputs[name].type.tensor_type.elem_type
        if kind in precision.ALL:  # the data of a bfloat16 input is float32
            array = np.asarray(array, helper.tensor_dtype_to_np_dtype(self.retype.get(kind, kind)))
        return host_value(array)

    def _foresee(self, stage: Stage, batch: Batch) -> None:
        """Refuse a stage that cannot fit in memory before it runs."""
        if self._sizes is None:
            self._sizes = memory_needs.value_bytes(self.graph, batch)
        memory_needs.check_batch(stage, self._sizes, batch, free_memory(self.needs.device))
        waiting = self.frontier.bytes
        memory_needs.check_waiting(stage, self._sizes, len(self.needs.batches), waiting, self.needs.memory)
