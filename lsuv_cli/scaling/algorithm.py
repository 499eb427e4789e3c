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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from lsuv_cli.model.constants import numpy_type
from lsuv_cli.model.draft import Draft
from lsuv_cli.model.layers import Layer, by_tensor
from lsuv_cli.model.prepare import Prepared
from lsuv_cli.report import Status
from lsuv_cli.scaling import precision, stages
from lsuv_cli.scaling.moments import Moments, pooled
from lsuv_cli.scaling.precision import Retype
from lsuv_cli.scaling.runner import Pass, Runner
from lsuv_cli.scaling.running_weights import RunningWeight, running_weight
from lsuv_cli.scaling.runtime import Session, Unsupported
from lsuv_cli.scaling.stage_model import Assembler
from lsuv_cli.scaling.stages import Plan, Stage
from lsuv_cli.settings import PreInit, Settings

WORTHWHILE = 0.9  # a trial that leaves more than this of the worst deviation is the last one


@dataclass(frozen=True)
class Turn:
    """What happened when a layer's turn came."""

    variance: float | None  # of its output, with the pre-initialized weight
    scale: float = 1.0
    status: Status = Status.OK

    def then(self, later: Turn) -> Turn:
        """Two trials as one: the variance before the first, the scale of both."""
        return Turn(self.variance, self.scale * later.scale, later.status)


@dataclass(frozen=True)
class Scaled:
    """What Algorithm 1 came to."""

    plan: Plan
    turns: Mapping[str, Turn]
    verified: Mapping[str, Moments]  # in the written file
    pooled: Collection[str]  # weights whose first use is dead: their scale is that of all other uses taken together
    trials: int


Verify = Callable[[], Mapping[str, Moments]]  # writes the file, measures every layer in it


def lsuv(draft: Draft, prepared: Prepared, plan: Plan, settings: Settings, needs: Pass, verify: Verify) -> Scaled:
    """Algorithm 1: scale every layer, verify the written file, and once more where that is not enough."""
    state = _State(prepared, settings, plan)
    worst = math.inf
    for trial in range(1, settings.max_trials + 1):
        state.take(scale_layers(draft, state, needs))
        if state.lost_in_a_chain():
            state.cut_shorter()
            state.take(scale_layers(draft, state, needs))
        verified = verify()
        if state.learn(verified) and trial < settings.max_trials:
            continue
        previous, worst = worst, state.worst(verified)
        if worst <= settings.tol or not worst < WORTHWHILE * previous:
            break
    return Scaled(state.plan, state.turns, verified, state.feedback.keys(), trial)


class _State:
    """What is known between trials."""

    def __init__(self, prepared: Prepared, settings: Settings, plan: Plan) -> None:
        self.graph, self.layers, self.settings, self.plan = prepared.graph, prepared.layers.layers, settings, plan
        self.turns: dict[str, Turn] = {}
        self.dead: dict[str, float] = {}  # layers whose output is rounding noise, and by what they were multiplied
        self.feedback: dict[str, float] = {}  # a shared weight whose first use is dead, and by what to multiply it
        self.anew = True  # the next trial begins with new random weights

    @property
    def pre_init(self) -> PreInit:
        return self.settings.pre_init if self.anew else PreInit.KEEP

    def take(self, latest: Mapping[str, Turn]) -> None:
        """Take what one go through the stages brought."""
        fresh = not self.turns or (self.anew and self.settings.pre_init is not PreInit.KEEP)
        self.turns = {k: turn if fresh else self.turns[k].then(turn) for k, turn in latest.items()}
        self.anew = False

    def lost_in_a_chain(self) -> bool:
        """Whether a layer had no finite variance behind pending scales that may have left float32's range."""
        lost = {Status.NOT_FINITE, Status.DEAD}
        return any(t.status in lost and self.plan.chain[k] and k not in self.dead for k, t in self.turns.items())

    def cut_shorter(self) -> None:
        self.plan = stages.cut(self.graph, self.layers, longest_chain=1)
        self.anew = True

    def learn(self, verified: Mapping[str, Moments]) -> bool:
        """Whether the written file shows something that another trial has to begin with."""
        scaled = {k: t.scale for k, t in self.turns.items() if t.status is Status.OK}
        noise = {k: scale for k, scale in scaled.items() if verified[k].noise and k not in self.dead}
        self.dead |= noise
        self.anew = bool(noise)
        first = set(self.feedback)
        for base, users in by_tensor(self.layers).items():
            deciding = [self.turns[x.output].status for x in users if x.output in self.turns]
            live = self.live(users, verified)
            if live and (base in first or set(deciding) == {Status.DEAD}) and len(users) > len(deciding):
                self.feedback[base] = math.sqrt(self.settings.target_variance / pooled(live).variance)
        return bool(noise) or set(self.feedback) != first

    def live(self, users: Sequence[Layer], verified: Mapping[str, Moments]) -> list[Moments]:
        found = [verified[x.output] for x in users]
        return [m for m in found if m.finite and m.variance > 0.0 and not m.noise]

    def worst(self, verified: Mapping[str, Moments]) -> float:
        """The largest |Var / target - 1| among the layers that can be scaled."""
        deciding = [
            self.live(users, verified)
            if base in self.feedback
            else [verified[x.output] for x in users if x.output in self.turns]
            for base, users in by_tensor(self.layers).items()
            if all(self.turns[x.output].status is Status.OK for x in users if x.output in self.turns)
        ]
        deviations = [abs(pooled(found).variance / self.settings.target_variance - 1) for found in deciding if found]
        return max(deviations, default=0.0)


def scale_layers(draft: Draft, state: _State, needs: Pass) -> dict[str, Turn]:
    """One go through all stages: pre-initialize, measure, scale, store. What each layer's turn brought."""
    try:
        return _Trial(draft, state, needs, precision.HALF).run()
    except Unsupported:
        # Doubles as well, where the device has no kernel for them.
        return _Trial(draft, state, needs, precision.ALL).run()


class _Trial:
    """One go through all stages."""

    def __init__(self, draft: Draft, state: _State, needs: Pass, retype: Retype) -> None:
        self.draft, self.state, self.graph, self.plan = draft, state, state.graph, state.plan
        self.pre_init, self.settings = state.pre_init, state.settings
        self.runner = Runner(self.graph, self.plan, needs, retype)
        self.assembler = Assembler(self.graph, self.plan, needs.accuracy, retype)
        self.scales: dict[str, float] = {}  # of what each layer passes on, relative to the weight that ran
        self.turns: dict[str, Turn] = {}

    def run(self) -> dict[str, Turn]:
        try:
            for index, stage in enumerate(self.plan.stages):
                groups = by_tensor(stage.layers)
                running = {base: self._running(users) for base, users in groups.items()}
                measured = self._measure(index, stage, running)
                # A layer may have the scale of another one of this stage pending: that one comes first, in this order.
                for base, users in groups.items():
                    self._scale(users, running[base], measured)
                self.runner.forget(index)
        finally:
            self.runner.frontier.close()
        return self.turns

    def _running(self, users: Sequence[Layer]) -> RunningWeight:
        linear = all(layer.is_linear for layer in users)
        return running_weight(self.graph, users[0], self.pre_init, self.settings.seed, linear)

    def _measure(self, index: int, stage: Stage, running: Mapping[str, RunningWeight]) -> dict[str, Moments]:
        """Run a stage; what its layers put out, in the exact form where the fast one is not good enough."""
        as_read = {x.weight.value: x.weight.seen(running[x.weight.base].array) for x in stage.layers}
        exact: frozenset[str] = frozenset()
        while True:
            model = self.assembler.build(stage, self.runner.types(stage), self.scales, as_read, exact)
            found = self.runner.run(index, Session(model, self.runner.needs.device))
            measured = dict(zip([x.output for x in stage.layers], found, strict=True))
            doubtful = {output for output, moments in measured.items() if not moments.trusted} - exact
            if not doubtful:
                return measured
            exact |= doubtful

    def _scale(self, users: Sequence[Layer], running: RunningWeight, measured: Mapping[str, Moments]) -> None:
        """W_L = s·W_L for the layers that share one weight, with s from their outputs taken together."""
        outputs = [measured[x.output].times(self._pending_factor(x)) for x in users]
        weight = users[0].weight
        scale, status = self._solve(users, running, pooled(outputs))
        # It has to fit where it is stored, and through a Cast behind.
        types = {weight.dtype, *(x.weight.cast for x in users if x.weight.cast)}
        if status is Status.OK and not all(running.fits(scale, kind) for kind in types):
            status = Status.OVERFLOW
        undone = next((self.state.dead[x.output] for x in users if x.output in self.state.dead), 1.0)
        if status is not Status.OK:
            scale = 1.0 / running.factor / (undone if self.pre_init is PreInit.KEEP else 1.0)
        # A weight that is kept and cannot be scaled is as it was already, to the last bit.
        wanted = status is Status.OK or self.pre_init is not PreInit.KEEP or undone != 1.0
        if wanted and running.fits(scale, weight.dtype):
            array = running.scaled(scale).astype(numpy_type(weight.dtype), copy=False)
            self.draft.store(self.graph.tensors[weight.base], array)
        for layer, moments in zip(users, outputs, strict=True):
            self.scales[layer.output] = scale * (layer.norm_factor or 1.0)
            finite = math.isfinite(moments.variance)
            variance = moments.variance / running.factor**2 if finite else moments.variance
            self.turns[layer.output] = Turn(variance, scale * running.factor, status)

    def _solve(self, users: Sequence[Layer], running: RunningWeight, y: Moments) -> tuple[float, Status]:
        """The scale of a weight: from its layers' outputs, unless the last verification told more about it."""
        if any(x.output in self.state.dead for x in users):
            return 1.0, Status.DEAD
        base = users[0].weight.base
        if base in self.state.feedback:
            return self.state.feedback[base] / running.factor, Status.OK
        return solve(y, self.settings.target_variance)

    def _pending_factor(self, layer: Layer) -> float:
        """The product of the scales that were pending on a layer's input when it was measured."""
        return math.prod(self.scales[name] for name in self.plan.chain[layer.output])


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
