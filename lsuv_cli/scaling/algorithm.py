"""LSUV itself (Mishkin and Matas, "All you need is a good init", Algorithm 1):

    Pre-initialize network with orthonormal matrices
    for each layer L do
        while |Var(B_L) - 1| >= Tol and T_i < T_max do
            do Forward pass with a mini-batch
            calculate Var(B_L)
            W_L = W_L / sqrt(Var(B_L))

Here "each layer" is each stage (stages.py), the mini-batch is all of the data, and one measurement gives the exact
scale, because B_L is linear in W_L: Var(s·y + b) = s²·Var(y) + 2s·Cov(y, b) + Var(b). The while loop's condition
is the verification of the written file, which alone decides whether another trial is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TypeProto, helper

from lsuv_cli.memory import available_memory
from lsuv_cli.model.constants import numpy_type
from lsuv_cli.model.draft import Draft
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer, by_tensor
from lsuv_cli.report import Status
from lsuv_cli.scaling import memory_needs as estimate
from lsuv_cli.scaling import precision, weights
from lsuv_cli.scaling.moments import Accumulator, Moments
from lsuv_cli.scaling.runtime import Device, Frontier, Session, Unsupported
from lsuv_cli.scaling.stage_model import Assembler
from lsuv_cli.scaling.stages import Plan, Stage
from lsuv_cli.settings import PreInit

Array = NDArray[Any]
Batches = Sequence[Mapping[str, Array]]
Progress = Callable[[int, int], None]  # steps done, steps in all


@dataclass(frozen=True)
class Turn:
    """What happened when a layer's turn came."""

    variance: float | None  # of its output, with the pre-initialized weight
    scale: float = 1.0
    status: Status = Status.OK

    def then(self, later: Turn) -> Turn:
        """Two trials as one: the variance before the first, the scale of both."""
        status = later.status if self.status is Status.OK else self.status
        return Turn(self.variance, self.scale * later.scale, status)


@dataclass
class Runner:
    """Runs the stages of a plan over all batches, one stage after another."""

    graph: Graph
    plan: Plan
    batches: Batches
    device: Device
    memory: int
    stored: Callable[[str], Array]
    retype: Mapping[int, int]
    progress: Progress
    units: bool = False

    def __post_init__(self) -> None:
        self.frontier = Frontier(self.device, self.memory)
        self.assembler = Assembler(self.graph, self.plan, self.stored, self.retype, self.units)
        self.scales: dict[str, float] = {}  # of what each layer passes on, relative to the weight that ran
        self.sizes: dict[str, int] | None = None  # of all values for the first batch, as far as they can be known

    def measure(self, index: int, running: Mapping[str, Array]) -> list[Moments]:
        """Run a stage with the given weights; what its layers put out, as if all layers before it were scaled."""
        stage = self.plan.stages[index]
        exact: frozenset[str] = frozenset()
        while True:
            found = self._pass(index, stage, running, exact)
            doubtful = {x.output for x, m in zip(stage.layers, found, strict=True) if not m.trusted} - exact
            if not doubtful:
                break
            exact |= doubtful
        still_needed = {name for later in self.plan.stages[index + 1 :] for name in later.inputs}
        for batch in range(len(self.batches)):
            self.frontier.keep_only(batch, still_needed)
        return found

    def _pass(self, index: int, stage: Stage, running: Mapping[str, Array], exact: frozenset[str]) -> list[Moments]:
        session = Session(self.assembler.build(stage, self._types(stage), self.scales, running, exact), self.device)
        sums = [Accumulator(probe) for probe in session.model.probes]
        total = len(self.plan.stages) * len(self.batches)
        for number, batch in enumerate(self.batches):
            if number == 0:
                self._foresee(stage, batch)
            values = {name: self._value(session, number, batch, name) for name in stage.inputs}
            kept, found = session.run(values)
            for accumulator, numbers in zip(sums, found, strict=True):
                accumulator.add(numbers)
            self.frontier.put(number, kept)
            self.progress(index * len(self.batches) + number + 1, total)
            if number == 0 and any(not s.result().trusted for s in sums):
                break  # no need to go through the rest before measuring exactly
        return [accumulator.result() for accumulator in sums]

    def _foresee(self, stage: Stage, batch: Mapping[str, Array]) -> None:
        """Refuse before it runs what cannot fit."""
        if self.sizes is None:
            self.sizes = estimate.value_bytes(self.graph, batch, self.stored)
        if self.device.kind == "cpu":
            estimate.check_batch(stage, self.sizes, batch, available_memory())
        estimate.check_waiting(stage, self.sizes, len(self.batches), self.frontier.bytes, self.memory)

    def _types(self, stage: Stage) -> dict[str, TypeProto]:
        waiting = [name for name in stage.inputs if name not in self.graph.inputs]
        fed = {
            name: precision.retyped_type(self.graph.inputs[name].type, self.retype)
            for name in stage.inputs
            if name in self.graph.inputs
        }
        return {**fed, **self.frontier.types(waiting)}

    def _value(self, session: Session, number: int, batch: Mapping[str, Array], name: str) -> Any:
        if name not in self.graph.inputs:
            return self.frontier.get(number, name)
        array = batch[name]
        kind = self.graph.inputs[name].type.tensor_type.elem_type
        if kind in precision.ALL:  # the data of a bfloat16 input is float32
            array = np.asarray(array, helper.tensor_dtype_to_np_dtype(self.retype.get(kind, kind)))
        return session.to_device(array)


def scale_layers(
    draft: Draft,
    graph: Graph,
    plan: Plan,
    batches: Batches,
    device: Device,
    *,
    pre_init: PreInit,
    seed: int,
    target: float,
    memory: int,
    progress: Progress,
) -> dict[str, Turn]:
    """Go through the stages: pre-initialize, measure, scale, store. What each layer's turn brought."""

    read = draft.reader(graph.tensors)

    def run(retype: Mapping[int, int]) -> dict[str, Turn]:
        runner = Runner(graph, plan, batches, device, memory, read, retype, progress)
        turns: dict[str, Turn] = {}
        try:
            for index, stage in enumerate(plan.stages):
                turns |= _scale_stage(draft, plan, runner, index, stage, pre_init, seed, target)
        finally:
            runner.frontier.close()
        return turns

    try:
        return run(precision.HALF)
    except Unsupported:
        return run(precision.ALL)  # doubles as well, where the device has no kernel for them


def _scale_stage(
    draft: Draft, plan: Plan, runner: Runner, index: int, stage: Stage, pre_init: PreInit, seed: int, target: float
) -> dict[str, Turn]:
    groups = by_tensor(stage.layers)
    # Weights run with He's standard deviation, so that a chain of them neither explodes nor vanishes.
    running, factors = {}, {}
    for base, users in groups.items():
        linear = all(layer.is_linear(plan.keeps_bias) for layer in users)
        stored, factors[base] = _running_weight(draft, users[0], pre_init, seed, linear)
        running[base] = stored
    as_read = {x.weight.value: x.weight.seen(running[x.weight.base]) for x in stage.layers}
    found = dict(zip([x.output for x in stage.layers], runner.measure(index, as_read), strict=True))
    turns: dict[str, Turn] = {}
    # A layer may owe the scale of another one of this stage: those come first, in the order of execution.
    for base, users in groups.items():
        owed = [_owed_before(plan, runner, layer) for layer in users]
        measured = [_times(found[layer.output], factor) for layer, factor in zip(users, owed, strict=True)]
        scale, status = solve(pooled(measured), target)
        given = factors[base]
        dtype = users[0].weight.dtype
        # It has to fit where it is stored, and through a Cast behind.
        types = {dtype, *(x.weight.cast for x in users if x.weight.cast)}
        if status is Status.OK and not all(_fits(running[base], scale, kind) for kind in types):
            status = Status.OVERFLOW
        if status is not Status.OK:
            scale = 1.0 / given
        # A weight that is kept and cannot be scaled is as it was already, to the last bit.
        if (status is Status.OK or pre_init is not PreInit.KEEP) and _fits(running[base], scale, dtype):
            draft.store(base, _scaled(running[base], scale).astype(numpy_type(dtype), copy=False))
        for layer, moments in zip(users, measured, strict=True):
            runner.scales[layer.output] = scale * plan.multiplied.get(layer.output, 1.0)
            own = moments.variance / given**2 if math.isfinite(moments.variance) else moments.variance
            turns[layer.output] = Turn(own, scale * given, status)
    return turns


def _owed_before(plan: Plan, runner: Runner, layer: Layer) -> float:
    """The factor by which a layer's input is still too small or too large when it is measured."""
    return math.prod(runner.scales[name] for name in plan.chain[layer.output])


def _times(moments: Moments, factor: float) -> Moments:
    if factor == 1.0:
        return moments
    return replace(moments, mean=moments.mean * factor, variance=moments.variance * factor**2)


def pooled(parts: Sequence[Moments]) -> Moments:
    """The moments of several outputs taken together as one sample, each with its own mean."""
    if len(parts) == 1:
        return parts[0]
    count = sum(part.count for part in parts)
    share = [part.count / count for part in parts]

    def average(name: str) -> float:
        return math.fsum(w * getattr(part, name) for w, part in zip(share, parts, strict=True))

    return Moments(average("mean"), average("variance"), average("bias_variance"), average("covariance"), count)


def solve(y: Moments, target: float) -> tuple[float, Status]:
    """The scale s with Var(s·y + b) = target, and how it went.

    It is the larger root of s²·Var(y) + 2s·Cov(y, b) + Var(b) - target = 0. Where no root is positive, which
    takes Var(b) >= target, the layer is out of reach and its weight is not shrunk to nothing.
    """
    if not (y.finite and math.isfinite(y.covariance) and math.isfinite(y.bias_variance)):
        return 1.0, Status.NOT_FINITE
    if y.variance <= 0.0:
        return 1.0, Status.DEAD
    half = y.covariance / y.variance
    discriminant = half * half - (y.bias_variance - target) / y.variance
    if discriminant < 0.0:
        return 1.0, Status.UNREACHABLE
    scale = -half + math.sqrt(discriminant)
    # (-h + sqrt(h² + d)) loses its digits for a large positive h; this is the same number.
    if half > 0.0 and y.bias_variance < target:
        scale = ((target - y.bias_variance) / y.variance) / (half + math.sqrt(discriminant))
    if scale <= 0.0 or not math.isfinite(scale):
        return 1.0, Status.UNREACHABLE
    return scale, Status.OK


def pre_initialized(draft: Draft, layer: Layer, pre_init: PreInit, seed: int) -> Array:
    """A layer's weight before scaling, in its stored layout, as float32 (or double, if kept as it is)."""
    weight = layer.weight
    if pre_init is PreInit.KEEP:
        stored = draft.array(weight.base)
        return stored if weight.dtype == "float64" else np.asarray(stored, np.float32)
    matrices = weights.pre_initialize(pre_init, layer.form.shape, weights.stream(seed, weight.base))
    return np.ascontiguousarray(weight.stored(layer.form.weight(matrices, weight.shape)))


def _running_weight(draft: Draft, layer: Layer, pre_init: PreInit, seed: int, linear: bool) -> tuple[Array, float]:
    """The weight that is run, and the factor by which it differs from the pre-initialized one."""
    array = pre_initialized(draft, layer, pre_init, seed)
    _, square = weights.mean_and_square(array)
    factor = math.sqrt(2.0 / layer.form.fan_in / square) if 0.0 < square < math.inf else math.inf
    if not linear or not math.isfinite(factor):
        return array, 1.0
    if factor < 1e30:
        return _scaled(array, factor), factor
    largest = float(np.max(np.abs(array)))  # so small that the factor would leave float32's range
    return array / array.dtype.type(largest) * array.dtype.type(largest * factor), factor


def _scaled(array: Array, scale: float) -> Array:
    """A weight times a number: in place where it is our own, as new memory takes longer than the product."""
    scaled: Array = np.multiply(array, array.dtype.type(scale), out=array if array.flags.writeable else None)
    return scaled


def _fits(array: Array, scale: float, dtype: str) -> bool:
    """Whether a weight times a number is finite in a type. Its extremes tell."""
    extremes = np.array([array.min(initial=0), array.max(initial=0)], array.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite((extremes * array.dtype.type(scale)).astype(numpy_type(dtype))).all())


def verify(
    graph: Graph,
    plan: Plan,
    stored: Callable[[str], Array],
    batches: Batches,
    device: Device,
    memory: int,
    progress: Progress,
    units: bool = False,
) -> dict[str, Moments]:
    """Measure every layer of a model as it stands, in the model's own types where the device can."""
    problem: Unsupported | None = None
    for retype in ({}, precision.HALF, precision.ALL):
        runner = Runner(graph, plan, batches, device, memory, stored, retype, progress, units)
        try:
            found: dict[str, Moments] = {}
            for index, stage in enumerate(plan.stages):
                moments = runner.measure(index, {})
                found |= dict(zip([x.output for x in stage.layers], moments, strict=True))
            return found
        except Unsupported as why:
            problem = why
        finally:
            runner.frontier.close()
    assert problem is not None
    raise problem
