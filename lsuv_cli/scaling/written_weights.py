"""A layer's scaled weight and its centred bias, written to the draft.

W_L = s·r_c·W_L for channel c, with r_c = 1 where the layer has one scale; b_c = -s·r_c·E[y_c] / beta where its bias is
centred. A weight that cannot be scaled stays as pre-initialized, and a bias that cannot be centred is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model import channels
from lsuv_cli.model.draft import Draft
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer
from lsuv_cli.report import Status
from lsuv_cli.scaling.moments import Moments, pooled
from lsuv_cli.scaling.running_weights import RunningWeight
from lsuv_cli.scaling.solve import Solution
from lsuv_cli.scaling.trials import Turn

Array = NDArray[Any]


@dataclass(frozen=True)
class Written:
    """The scale in the end, and by how much the stored weight differs from the weight that ran."""

    solution: Solution
    effective: float

    def factor(self, layer: Layer) -> float | Array:
        """What readers of the layer's output should see it multiplied by; one number for each channel if these differ.

        The c of a BatchNormalization y = c·x behind the layer is in it.
        """
        found = channels.of(layer)
        whole = self.effective * (layer.norm_factor or 1.0)
        if self.solution.ratios is None or found is None:
            return whole
        return whole * self.solution.ratios.reshape(found.shape)


@dataclass(frozen=True)
class Writer:
    """Writes the weights of one trial. `keep`: the trial began with the weights as they are stored."""

    draft: Draft
    graph: Graph
    keep: bool

    def write(
        self,
        users: Sequence[Layer],
        running: RunningWeight,
        solution: Solution,
        outputs: Sequence[Moments],
        undone: Turn | None,
    ) -> Written:
        """Write the weight that `users` share. `undone`: an earlier turn of a layer that proved to be dead."""
        weight = users[0].weight
        # The scaled weight must fit the type it is stored in, and the type of a Cast behind it.
        types = dict.fromkeys([weight.dtype, *(x.weight.cast for x in users if x.weight.cast)])
        if solution.status is Status.OK:
            shaped = running.times(users[0], solution.ratios)
            biases = self._biases(users, outputs, solution)
            finite = all(np.isfinite(array).all() for array in biases.values())
            if not finite or not all(shaped.fits(solution.scale, kind) for kind in types):
                solution = Solution(status=Status.OVERFLOW)
        if solution.status is not Status.OK:
            scale = 1.0 / running.factor
            shaped = running
            if undone is not None and self.keep:
                scale /= undone.scale
                shaped = running.times(users[0], None if undone.ratios is None else 1.0 / undone.ratios)
            solution = replace(solution, scale=scale)
        effective = solution.scale
        # A kept weight that cannot be scaled is not stored again, so that it keeps its bits.
        wanted = solution.status is Status.OK or not self.keep or undone is not None
        if wanted and shaped.fits(solution.scale, weight.dtype):
            array, effective = shaped.stored(solution.scale, types)
            self.draft.store(self.graph.tensors[weight.base], array)
        for name, values in self._biases(users, outputs, replace(solution, scale=effective)).items():
            self.draft.store(self.graph.tensors[name], values)
        return Written(solution, effective)

    def _biases(self, users: Sequence[Layer], outputs: Sequence[Moments], solution: Solution) -> dict[str, Array]:
        """Tensor -> b_c for each channel, in the tensor's shape and type: zeros where the weight is not scaled."""
        measured: dict[str, list[Moments]] = {}
        factor: dict[str, float] = {}
        for layer, moments in zip(users, outputs, strict=True):
            if layer.bias is not None and layer.bias.centred:
                measured.setdefault(layer.bias.value, []).append(moments)
                factor[layer.bias.value] = layer.bias.factor
        found: dict[str, Array] = {}
        for name, parts in measured.items():
            present = self.graph.array(name)
            found[name] = np.zeros_like(present)
            y = pooled(parts).channels
            if solution.status is Status.OK and y is not None:
                ratios = 1.0 if solution.ratios is None else solution.ratios
                with np.errstate(over="ignore"):
                    values = -solution.scale * ratios * y.mean / factor[name]
                    found[name] = values.reshape(present.shape).astype(present.dtype)
        return found
