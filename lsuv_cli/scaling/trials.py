"""The state between the trials of Algorithm 1: each layer's turn so far, and what verification found in the file.

1. The first trial begins with new random weights. Later trials begin with the stored weights, so that scales multiply.
2. A layer that had no finite variance behind pending scales may have lost it to float32's range: then all stages are
   cut anew, with no layer's scale pending on another layer, and the trial begins again.
3. A layer whose output proves to be nothing but rounding is dead: the next trial leaves its weight unscaled. Noise that
   was scaled up spoils all layers behind it. A layer that proves to have a signal, once nothing in front of it is
   scaled-up noise, is freed, and the next trial scales it; a layer can be freed once.
4. A shared weight whose first use is dead (an unrolled recurrence from a zero state) is scaled by what its live uses,
   taken together, had in the written file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lsuv_cli.model.layers import Layer, by_tensor
from lsuv_cli.model.prepare import Prepared
from lsuv_cli.report import Status
from lsuv_cli.scaling import stages
from lsuv_cli.scaling.moments import Moments, pooled
from lsuv_cli.scaling.stages import Plan
from lsuv_cli.settings import PreInit, Settings


@dataclass(frozen=True)
class Turn:
    """A layer's measured variance, its scale and its status after one trial, or after several (`then`)."""

    variance: float | None  # of its output, with the pre-initialized weight
    scale: float = 1.0
    status: Status = Status.OK

    def then(self, later: Turn) -> Turn:
        """Two trials as one: the variance before the first, the scale of both."""
        return Turn(self.variance, self.scale * later.scale, later.status)


class Trials:
    """All trials so far."""

    def __init__(self, prepared: Prepared, settings: Settings, plan: Plan) -> None:
        self.graph, self.layers, self.settings, self.plan = prepared.graph, prepared.layers.layers, settings, plan
        self.turns: dict[str, Turn] = {}
        self.dead: dict[str, float] = {}  # layer output that is rounding noise -> the scale to undo in the next trial
        self.freed: set[str] = set()  # layers that were dead only because of scaled-up noise in front of them
        self.feedback: dict[str, float] = {}  # tied weight whose first use is dead -> its next scale
        self.anew = True  # the next trial begins with new random weights

    @property
    def pre_init(self) -> PreInit:
        return self.settings.pre_init if self.anew else PreInit.KEEP

    def take(self, latest: Mapping[str, Turn]) -> None:
        """Add the turns of one pass through the stages."""
        fresh = not self.turns or (self.anew and self.settings.pre_init is not PreInit.KEEP)
        self.turns = {k: turn if fresh else self.turns[k].then(turn) for k, turn in latest.items()}
        self.dead = dict.fromkeys(self.dead, 1.0)
        self.anew = False

    def lost_in_a_chain(self) -> bool:
        """Whether a layer had no finite variance behind pending scales that may have left float32's range."""
        lost = {Status.NOT_FINITE, Status.DEAD}
        return any(t.status in lost and self.plan.chain[k] and k not in self.dead for k, t in self.turns.items())

    def cut_shorter(self) -> None:
        self.plan = stages.cut(self.graph, self.layers, longest_chain=1)
        self.anew = True

    def learn(self, verified: Mapping[str, Moments]) -> bool:
        """Note noise and dead first uses in the written file (rules 3, 4); whether they call for another trial."""
        scaled = {k: t.scale for k, t in self.turns.items() if t.status is Status.OK}
        noise = {k: scale for k, scale in scaled.items() if verified[k].noise and k not in self.dead}
        alive = {k for k in self.dead if verified[k].finite and verified[k].variance > 0.0 and not verified[k].noise}
        freed = alive - self.freed
        self.freed |= freed
        self.dead = {k: scale for k, scale in (self.dead | noise).items() if k not in freed}
        self.anew = bool(noise or freed)
        first = set(self.feedback)
        for base, users in by_tensor(self.layers).items():
            deciding = [self.turns[x.output].status for x in users if x.output in self.turns]
            live = self.live(users, verified)
            if live and (base in first or set(deciding) == {Status.DEAD}) and len(users) > len(deciding):
                self.feedback[base] = math.sqrt(self.settings.target_variance / pooled(live).variance)
        return bool(noise or freed) or set(self.feedback) != first

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
