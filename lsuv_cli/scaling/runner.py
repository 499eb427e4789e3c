"""Runs the stages of a plan over all batches, one stage after another; values for later stages wait in the frontier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from onnx import TypeProto, helper

from lsuv_cli.memory import available_memory
from lsuv_cli.model.graph import Graph, attribute
from lsuv_cli.model.layers import Layer, by_tensor
from lsuv_cli.model.random_ops import is_random
from lsuv_cli.scaling import memory_needs, precision
from lsuv_cli.scaling.drawing import AsUsed, Draw, Drawn
from lsuv_cli.scaling.frontier import Frontier
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.precision import Retype
from lsuv_cli.scaling.providers import Device
from lsuv_cli.scaling.runtime import Session
from lsuv_cli.scaling.shares import Batch, Kinds, Share, Shares, is_trusted
from lsuv_cli.scaling.stages import Plan, Stage
from lsuv_cli.settings import PreInit

Array = NDArray[Any]
Progress = Callable[[int, int], None]  # steps done, steps in all


class Crew(Protocol):
    """Workers, each of them with a share of the batches."""

    def begin(self, kinds: Kinds) -> Shares:
        """The workers' shares for one pass."""

    def draw(self, draws: Sequence[Draw]) -> Drawn:
        """Have random weights drawn by the workers, ahead of their use."""

    def free_memory(self) -> int | None:
        """The bytes that a stage may take where the least is free; None where a device does not tell."""


@runtime_checkable
class Shaped(Protocol):
    """Batches whose shapes are known before they are read."""

    @property
    def shapes(self) -> Sequence[Mapping[str, tuple[int, ...]]]:
        """Input -> shape, for each batch."""


@dataclass(frozen=True)
class Pass:
    """What every pass over the data needs."""

    batches: Sequence[Batch]
    device: Device
    memory: int  # bytes for values that wait between stages
    progress: Progress
    accuracy: float  # the relative error that a measured variance may have
    few: Batch  # the first few samples
    crew: Crew | None = None  # the workers that do it, if not this process

    @cached_property
    def shapes(self) -> Sequence[Mapping[str, tuple[int, ...]]]:
        """Input -> shape, for each batch; a batch is not read for that if the batches know their shapes."""
        if isinstance(self.batches, Shaped):
            return self.batches.shapes
        return [{name: np.shape(array) for name, array in batch.items()} for batch in self.batches]

    def alone(self, batches: Sequence[Batch]) -> Pass:
        """A pass over other batches, in this process, without progress."""
        return replace(self, batches=batches, progress=_silent, crew=None)


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
        kinds = {name: self._fed_as(name) for name in graph.inputs}
        self.share = Share(needs.batches, kinds, needs.device, needs.memory)
        self.shares: Shares = self.share
        self.crew = None if needs.crew is None or _has_memory(graph) else needs.crew
        if self.crew is not None:
            self.shares = self.crew.begin(kinds)
        self._first: Batch = {}  # once it is read
        # A session that has run keeps what it took of a device, and uses it again: so that is asked for beforehand.
        self._free_there = None if needs.device.is_host or self.crew is not None else free_memory(needs.device)
        self._sizes: dict[str, int] | None = None  # value -> bytes for the first batch, where onnx infers the shape

    @property
    def frontier(self) -> Frontier:
        """The values that wait in this process."""
        return self.share.frontier

    def run(self, index: int, model: StageModel, session: Session | None = None) -> list[Moments]:
        """Run a stage over all batches. Returns the moments of its layers. `session`: the model's, if it is open.

        The run stops after the first batch if a layer's moments are not trusted: the stage is then measured again.
        """
        stage, count = self.plan.stages[index], len(self.needs.batches)
        self._foresee(stage)
        self.share.session = session
        meters = [each.meter() for each in model.measurements]

        def done(batches: int) -> None:
            self.needs.progress(index * count + batches, len(self.plan.stages) * count)

        for number, sums in enumerate(self.shares.run(index, model, tuple(model.feeds), done)):
            for meter, part in zip(meters, sums, strict=True):
                meter.add(part)
            if number == 0 and not is_trusted(model, sums):
                break
        return [meter.result() for meter in meters]

    def forget(self, index: int) -> None:
        """Free the waiting values that no stage after this one reads."""
        self.shares.keep_only({name for later in self.plan.stages[index + 1 :] for name in later.inputs})

    def close(self) -> None:
        """Free everything that waits."""
        self.shares.close()

    def types(self, stage: Stage) -> dict[str, TypeProto]:
        """The types of a stage's inputs; a dimension is fixed where it is the same in all batches."""
        waiting = [name for name in stage.inputs if name not in self.graph.inputs]
        fed = {name: self.input_type(name) for name in stage.inputs if name in self.graph.inputs}
        return {**fed, **self.shares.types(waiting)}

    def input_type(self, name: str) -> TypeProto:
        """The type of an input of the model, with the dimensions that the data gives it."""
        kind = precision.retyped_type(self.graph.inputs[name].type, self.retype)
        shapes = [batch[name] for batch in self.needs.shapes if name in batch]
        if not kind.HasField("tensor_type") or len({len(shape) for shape in shapes}) != 1:
            return kind
        dims = [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)]
        return helper.make_tensor_type_proto(kind.tensor_type.elem_type, dims)

    def value(self, number: int, batch: Batch, name: str) -> Any:
        """An input of a stage for one batch: the user's data, or a value from the frontier of this process."""
        return self.share.value(number, batch, name)

    def _fed_as(self, name: str) -> np.dtype[Any] | None:
        kind = self.graph.inputs[name].type.tensor_type.elem_type
        if kind not in precision.ALL:
            return None
        # The data of a bfloat16 input is float32.
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.retype.get(kind, kind)))

    def _foresee(self, stage: Stage) -> None:
        """Refuse a stage that cannot fit in memory before it runs."""
        if self._sizes is None:
            self._first = self.needs.batches[0]
            self._sizes = memory_needs.value_bytes(self.graph, self._first)
        if self.crew is not None:
            free = self.crew.free_memory()
        else:
            free = available_memory() if self.needs.device.is_host else self._free_there
        memory_needs.check_batch(stage, self._sizes, self._first, free)
        waiting = self.shares.waiting
        memory_needs.check_waiting(stage, self._sizes, len(self.needs.batches), waiting, self.needs.memory)


def drawn_ahead(layers: Sequence[Layer], pre_init: PreInit, seed: int, crew: Crew | None) -> Drawn:
    """The random weights of layers, drawn by the crew in the order of their use, or as they are used."""
    if crew is None or pre_init is PreInit.KEEP:
        return AsUsed()
    first = [users[0] for users in by_tensor(layers).values()]
    return crew.draw([Draw.of(layer, pre_init, seed) for layer in first])


def _has_memory(graph: Graph) -> bool:
    """Whether a session's result for a batch depends on the batches before it: random numbers, running statistics."""
    return any(is_random(node, graph.tensors) or attribute(node, "training_mode", 0) for node in graph.nodes)


def _silent(done: int, total: int) -> None:
    pass
