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
from dataclasses import replace

from lsuv_cli.model.draft import Draft
from lsuv_cli.model.layers import Layer, by_tensor
from lsuv_cli.model.prepare import Prepared
from lsuv_cli.scaling import precision
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.precision import Retype
from lsuv_cli.scaling.residuals import Streams
from lsuv_cli.scaling.runner import Pass, Runner, drawn_ahead
from lsuv_cli.scaling.running_weights import RunningWeight, pre_initialized, running_weight
from lsuv_cli.scaling.solve import solve_weight
from lsuv_cli.scaling.stage_model import Assembler
from lsuv_cli.scaling.stages import Plan, Stage
from lsuv_cli.scaling.translation import Unsupported
from lsuv_cli.scaling.trials import Scaled, Trials, Turn
from lsuv_cli.scaling.written_weights import Array, Writer
from lsuv_cli.settings import PreInit, Settings

WORTHWHILE = 0.9  # a trial that leaves more than this of the worst deviation did not help

Verify = Callable[[], Mapping[str, Moments]]  # writes the file, measures every layer in it


def lsuv(draft: Draft, prepared: Prepared, plan: Plan, settings: Settings, needs: Pass, verify: Verify) -> Scaled:
    """Algorithm 1: scale every layer, verify the written file; repeat while a layer is outside and trials help."""
    state = Trials(prepared, settings, plan)
    worst = math.inf
    for trial in range(1, settings.max_trials + 1):
        state.take(scale_layers(draft, state, needs))
        if state.lost_behind_pending_scales():
            state.cut_shorter()
            state.take(scale_layers(draft, state, needs))
        verified = verify()
        if state.learn(verified) and trial < settings.max_trials:
            continue
        previous, worst = worst, state.worst(verified)
        if worst <= settings.tol:
            break
        if not worst < WORTHWHILE * previous:
            if not state.settle(verified):
                break
            worst = math.inf
    return state.result(verified, trial)


def scale_layers(draft: Draft, state: Trials, needs: Pass) -> dict[str, Turn]:
    """One trial: pre-initialize, measure, scale and store, stage by stage. Returns layer output -> turn."""
    try:
        return _Trial(draft, state, needs, precision.HALF).run()
    except Unsupported:
        # The device has no kernel for an operator in double: run doubles as float32 too.
        return _Trial(draft, state, needs, precision.ALL).run()


class _Trial:
    """One trial: one pass through all stages."""

    def __init__(self, draft: Draft, state: Trials, needs: Pass, retype: Retype) -> None:
        self.draft, self.state, self.graph, self.plan = draft, state, state.graph, state.plan
        self.pre_init, self.settings = state.pre_init, state.settings
        self.runner = Runner(self.graph, self.plan, needs, retype)
        self.assembler = Assembler(self.graph, self.plan, needs.accuracy, retype)
        self.writer = Writer(draft, self.graph, self.pre_init is PreInit.KEEP)
        # Layer output -> s, or s for each channel: readers should see s times the output that was run.
        self.scales: dict[str, float | Array] = {}
        layers = [layer for stage in self.plan.stages for layer in stage.layers]
        self.drawn = drawn_ahead(layers, self.pre_init, self.settings.seed, needs.crew)
        self.streams = Streams(self.plan.sums, self.plan.joint)
        self.turns: dict[str, Turn] = {}

    def run(self) -> dict[str, Turn]:
        try:
            for index, stage in enumerate(self.plan.stages):
                self._stage(index, stage)
                self.runner.forget(index)
        finally:
            self.drawn.close()
            self.runner.close()
        return self.turns

    def _stage(self, index: int, stage: Stage) -> None:
        """Measure, solve, store; a stage's weights are gone from memory when it ends."""
        groups = by_tensor(stage.layers)
        running = {base: self._running(users) for base, users in groups.items()}
        measured = self._measure(index, stage, running)
        # A layer may have the scale of another layer of this stage pending; groups are in order of execution, so the
        # other layer's scale is known by then.
        for base, users in groups.items():
            self._scale(users, running.pop(base), measured)

    def _running(self, users: Sequence[Layer]) -> RunningWeight:
        linear = all(layer.is_linear for layer in users)
        array = pre_initialized(self.graph, users[0], self.pre_init, self.settings.seed, self.drawn)
        return running_weight(array, users[0], linear)

    def _measure(self, index: int, stage: Stage, running: Mapping[str, RunningWeight]) -> dict[str, Moments]:
        """Run a stage: layer output -> moments, in the exact form where the fast form is not accurate enough."""
        as_read = {
            x.weight.base if x.weight.dropped else x.weight.value: running[x.weight.base].seen(x.weight)
            for x in stage.layers
        }
        exact: frozenset[str] = frozenset()
        while True:
            model = self.assembler.build(stage, self.runner.types(stage), self.scales, as_read, exact)
            found = self.runner.run(index, model)
            sums = [self.plan.sums[x.output].output for x in stage.layers if x.output in self.plan.sums]
            measured = dict(zip([*(x.output for x in stage.layers), *sums], found, strict=True))
            doubtful = {output for output, moments in measured.items() if not moments.trusted} - exact
            if not doubtful:
                return measured
            exact |= doubtful

    def _scale(self, users: Sequence[Layer], running: RunningWeight, measured: Mapping[str, Moments]) -> None:
        """W_L = s·W_L for the layers that share one weight, with s from the pooled moments of their outputs."""
        outputs = [measured[x.output].times(self._pending_factor(x)) for x in users]
        target = self.streams.target(users[0], outputs[0], measured, self._pending_factor(users[0]))
        users = [replace(layer, target=target) for layer in users]
        live = self.state.live(users, outputs)
        solution = self.state.decided(users, running) or solve_weight(users[0], running, live)
        written = self.writer.write(users, running, solution, outputs, self.state.undone(users))
        for layer, moments in zip(users, outputs, strict=True):
            self.scales[layer.output] = written.factor(layer)
            self.turns[layer.output] = self.state.turn(layer, moments, written.solution, running)

    def _pending_factor(self, layer: Layer) -> float:
        """The product of the scales that were pending on a layer's input when it was measured."""
        return math.prod(float(self.scales[name]) for name in self.plan.in_front[layer.output])
