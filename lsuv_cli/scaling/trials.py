"""The state between the trials of Algorithm 1: each layer's turn so far, and what verification found in the file.

1. The first trial begins with new random weights. Later trials begin with the stored weights, so that scales multiply.
2. A layer that had no finite variance behind pending scales may have lost it to float32's range: then all stages are
   cut anew, with no layer's scale pending on another layer, and the trial begins again.
3. A layer whose output proves to be nothing but rounding is dead: the next trial leaves its weight unscaled. Noise that
   was scaled up spoils all layers behind it. A layer that proves to have a signal, once nothing in front of it is
   scaled-up noise, is freed, and the next trial scales it. If noise then begins at it (a signal that is only its kept
   bias), or it is the first layer to be noise again, it is dead for good; and so is a layer that was scaled and is
   constant in a later trial.
4. A layer with an activation inside (FusedConv with Sigmoid) whose scale saturates it, so that its output is constant,
   is left unscaled for good.
5. A shared weight whose first use is dead (an unrolled recurrence from a zero state) is scaled by what its live uses,
   taken together, had in the written file.
6. Where a trial helps no more, the first layer outside is *settled*: its weight stays, since its type cannot hold a
   better one, and the next trial scales the layers behind it for what it puts out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model.layers import Layer, by_tensor
from lsuv_cli.model.prepare import Prepared
from lsuv_cli.report import Status
from lsuv_cli.scaling import stages
from lsuv_cli.scaling.moments import Floats, Moments, pooled
from lsuv_cli.scaling.running_weights import RunningWeight
from lsuv_cli.scaling.solve import Solution
from lsuv_cli.scaling.stages import Plan
from lsuv_cli.settings import PreInit, Settings

MOST_FREED = 3  # times that a layer is given another chance


@dataclass(frozen=True, eq=False)
class Turn:
    """A layer's measured variance, its scale and its status after one trial, or after several (`then`)."""

    variance: float | None  # of its output, with the pre-initialized weight
    scale: float = 1.0
    status: Status = Status.OK
    target: float = 1.0
    ratios: Floats | None = None  # r_c, where channel c has the scale scale·r_c
    dead: NDArray[np.bool_] | None = None  # the channels that are constant, where channels are scaled one by one
    centred: bool = False

    def then(self, later: Turn) -> Turn:
        """Two trials as one: the variance before the first, the scale of both."""
        known = [ratios for ratios in (self.ratios, later.ratios) if ratios is not None]
        ratios = np.prod(known, axis=0) if known else None
        return replace(later, variance=self.variance, scale=self.scale * later.scale, ratios=ratios)

    def deviation(self, found: Moments) -> float:
        """|Var / target - 1|, of the worst live channel where channels are scaled one by one.

        Of a centred layer also |E[y_c]| / sqrt(target), of the worst channel.
        """
        c = found.channels
        off = abs(found.variance / self.target - 1)
        if c is None:
            return off
        live = np.ones(len(c.mean), bool) if self.dead is None else ~self.dead
        if self.ratios is not None:
            off = float(np.max(np.abs(c.variance[live] / self.target - 1)))
        if self.centred:
            off = max(off, float(np.max(np.abs(c.mean[live]))) / math.sqrt(self.target))
        return off


@dataclass(frozen=True)
class Scaled:
    """The result of Algorithm 1: the plan, each layer's turn, and the moments measured in the written file."""

    plan: Plan
    turns: Mapping[str, Turn]
    verified: Mapping[str, Moments]  # in the written file
    of_live_uses: Collection[str]  # weights whose first use is dead: their scale is that of all live uses together
    noise: Collection[str]  # layers whose output proved to be nothing but rounding
    trials: int


class Trials:
    """All trials so far."""

    def __init__(self, prepared: Prepared, settings: Settings, plan: Plan) -> None:
        self.graph, self.layers, self.settings, self.plan = prepared.graph, prepared.layers.layers, settings, plan
        self.turns: dict[str, Turn] = {}
        # Output of a layer that is left unscaled, because it is noise or saturated -> the turn to undo in the next
        # trial, or None once it is undone.
        self.unscaled: dict[str, Turn | None] = {}
        self.freed: Counter[str] = Counter()  # layers that were dead because of noise in front of them, how many times
        self.lost: set[str] = set()  # layers at which noise began although they had been freed, and saturated ones
        self.saturated: set[str] = set()  # layers whose activation makes a constant of the scaled output
        self.died: set[str] = set()  # layers that were scaled in one trial and had no variance in the next
        self.settled: set[str] = set()  # weights that stay as they are stored
        self.feedback: dict[str, float] = {}  # tied weight whose first use is dead -> its next scale
        self.anew = True  # the next trial begins with new random weights

    @property
    def pre_init(self) -> PreInit:
        return self.settings.pre_init if self.anew else PreInit.KEEP

    @property
    def noise(self) -> set[str]:
        """The layers whose output is nothing but rounding."""
        return self.unscaled.keys() - self.saturated

    def live(self, users: Sequence[Layer], outputs: Sequence[Moments]) -> list[Moments]:
        """The outputs that a weight's scale is solved from: those of all its layers but noise and saturated ones."""
        return [y for layer, y in zip(users, outputs, strict=True) if layer.output not in self.unscaled]

    def decided(self, users: Sequence[Layer], running: RunningWeight) -> Solution | None:
        """The scale of a weight whose layers are all left unscaled, that is settled, or that verification decided."""
        if all(layer.output in self.unscaled for layer in users):
            return Solution(status=Status.DEAD)
        base = users[0].weight.base
        if base in self.settled:
            return Solution(1.0 / running.factor)
        return Solution(self.feedback[base] / running.factor) if base in self.feedback else None

    def undone(self, users: Sequence[Layer]) -> Turn | None:
        """The turn of an earlier trial that is to be undone, because the layer is to be left unscaled."""
        return next((self.unscaled[x.output] for x in users if x.output in self.unscaled), None)

    def turn(self, layer: Layer, y: Moments, solution: Solution, running: RunningWeight) -> Turn:
        """A layer's turn: Var(y) as if the pre-initialized weight had run, and the scale of that weight."""
        variance = y.variance / running.factor / running.factor if math.isfinite(y.variance) else y.variance
        scale, centred = solution.scale * running.factor, layer.is_centred and solution.status is Status.OK
        status = solution.status
        if layer.output in self.unscaled:
            status = Status.OUTSIDE if layer.output in self.saturated else Status.DEAD
        return Turn(variance, scale, status, layer.target, solution.ratios, solution.dead, centred)

    def result(self, verified: Mapping[str, Moments], trials: int) -> Scaled:
        return Scaled(self.plan, self.turns, verified, self.feedback.keys(), self.noise, trials)

    def take(self, latest: Mapping[str, Turn]) -> None:
        """Add the turns of one pass through the stages."""
        fresh = not self.turns or (self.anew and self.settings.pre_init is not PreInit.KEEP)
        scaled = {k for k, turn in self.turns.items() if turn.status is Status.OK and not fresh}
        self.died = {k for k in scaled if latest[k].status is Status.DEAD and k not in self.unscaled}
        self.turns = {k: turn if fresh else self.turns[k].then(turn) for k, turn in latest.items()}
        self.unscaled = dict.fromkeys(self.unscaled)  # what there was to undo is undone
        self.anew = False

    def lost_behind_pending_scales(self) -> bool:
        """Whether a layer had no finite variance behind pending scales that may have left float32's range."""
        lost = {Status.NOT_FINITE, Status.DEAD}
        return any(t.status in lost and self.plan.in_front[k] and k not in self.unscaled for k, t in self.turns.items())

    def cut_shorter(self) -> None:
        self.plan = stages.cut(self.graph, self.layers, most_pending=1, sums=self.plan.sums)
        self.anew = True

    def learn(self, verified: Mapping[str, Moments]) -> bool:
        """Note noise and dead first uses in the written file (rules 3 to 5); whether they call for another trial."""
        of_live_uses = {x.output for x in self.layers if x.weight.base in self.feedback}
        scaled = {k: t for k, t in self.turns.items() if t.status is Status.OK and k not in of_live_uses}
        # Calibration does not round to half precision, where a tiny input is zero.
        new = {k: t for k, t in scaled.items() if k not in self.unscaled and (verified[k].noise or verified[k].is_zero)}
        new |= {k: self.turns[k] for k in self.died}
        self.lost |= self.died
        alive = {
            k for k in self.unscaled if verified[k].finite and verified[k].variance > 0.0 and not verified[k].noise
        }
        self.lost |= {k for k in new if self.freed[k] and (verified[k].begins or self.freed[k] >= MOST_FREED)}
        # Noise that comes back begins at the first layer that has it; the layers behind it may only have it from there.
        first_new = next((x.output for x in self.layers if x.output in new), "")
        self.lost |= {first_new} if self.freed[first_new] else set()
        bent = {x.output for x in self.layers if not x.is_linear}
        self.saturated |= {k for k in new if k in bent and verified[k].is_zero}
        self.lost |= self.saturated
        freed = alive - self.lost
        self.freed.update(freed)
        self.unscaled = {k: turn for k, turn in (self.unscaled | new).items() if k not in freed}
        self.anew = bool(new or freed)
        self.settled = set() if self.anew else self.settled
        first = set(self.feedback)
        for base, users in by_tensor(self.layers).items():
            deciding = [self.turns[x.output].status for x in users if x.output in self.turns]
            live = self._signals(users, verified)
            if live and (base in first or set(deciding) == {Status.DEAD}) and len(users) > len(deciding):
                self.feedback[base] = math.sqrt(users[0].target / pooled(live).variance)
        return bool(new or freed) or set(self.feedback) != first

    def _signals(self, users: Sequence[Layer], verified: Mapping[str, Moments]) -> list[Moments]:
        """The uses of a weight that have a finite variance above zero in the written file, and are no noise."""
        found = [verified[x.output] for x in users]
        return [m for m in found if m.finite and m.variance > 0.0 and not m.noise]

    def worst(self, verified: Mapping[str, Moments]) -> float:
        """The largest |Var / target - 1| among the layers that can be scaled."""
        return max(self._deviations(verified).values(), default=0.0)

    def settle(self, verified: Mapping[str, Moments]) -> bool:
        """Settle the first weight whose layers are outside; whether others are outside, so that a trial may help."""
        outside = [base for base, off in self._deviations(verified).items() if self.settings.tol < off < math.inf]
        self.settled.update(outside[:1])
        return len(outside) > 1

    def _deviations(self, verified: Mapping[str, Moments]) -> dict[str, float]:
        """Weight, in the order of execution -> |Var / target - 1|, where it can be scaled."""
        deviations: dict[str, float] = {}
        for base, users in by_tensor(self.layers).items():
            scaled = [x.output for x in users if x.output in self.turns and x.output not in self.unscaled]
            turns = [self.turns[output] for output in scaled]
            found = self._signals(users, verified) if base in self.feedback else [verified[output] for output in scaled]
            if base in self.settled or not found or any(turn.status is not Status.OK for turn in turns):
                continue
            if turns and not math.isnan(off := turns[0].deviation(pooled(found))):
                deviations[base] = off
        return deviations
