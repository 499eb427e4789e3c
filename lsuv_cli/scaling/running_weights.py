"""A layer's weight on its way to the file: pre-initialized, run, scaled, stored.

A weight runs with He's standard deviation, √(2 / fan-in), so that a chain of layers with pending scales neither
explodes nor vanishes. The scale that is stored takes that factor back.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model import channels
from lsuv_cli.model.constants import Weight, numpy_type
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer
from lsuv_cli.scaling import weights
from lsuv_cli.scaling.drawing import Draw, Drawn
from lsuv_cli.settings import PreInit

Array = NDArray[Any]

HALVES = frozenset({"float16", "bfloat16"})
LARGEST_RUNNING_FACTOR = 1e30  # a larger factor is near the edge of float32's range


@dataclass(frozen=True)
class RunningWeight:
    """A weight as it runs, in its stored layout, and the factor by which it differs from the pre-initialized one."""

    array: Array
    factor: float

    def seen(self, weight: Weight) -> Array:
        """The array in the operator's layout; a weight that a Dropout reads, in its stored layout."""
        return self.array if weight.dropped else weight.seen(self.array)

    def stored(self, scale: float, types: Collection[str]) -> tuple[Array, float]:
        """scale·W as it is stored, and the effective scale: the least-squares factor from the weight that ran to it.

        The effective scale differs from `scale` in half precision only, where rounding changes small entries much.
        """
        own, *others = types
        if not HALVES.isdisjoint(types):
            array = (self.array * self.array.dtype.type(scale)).astype(numpy_type(own))
            read = array
            for kind in others:
                read = read.astype(numpy_type(kind))
            running = self.array.astype(np.float64).ravel()
            return array, float(running @ read.astype(np.float64).ravel() / (running @ running))
        return _scaled(self.array, scale).astype(numpy_type(own), copy=False), scale

    def times(self, layer: Layer, ratios: Array | None) -> RunningWeight:
        """The weight with the row of each channel multiplied by a number."""
        if ratios is None:
            return self
        return RunningWeight(self.array * channels.spread(layer, ratios).astype(self.array.dtype), self.factor)

    def fits(self, scale: float, dtype: str) -> bool:
        """Whether scale·W is finite in a type, and not all zeros; its smallest and largest entries decide."""
        extremes = np.array([self.array.min(initial=0), self.array.max(initial=0)], self.array.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (extremes * self.array.dtype.type(scale)).astype(numpy_type(dtype))
        return bool(np.isfinite(scaled).all() and (scaled.any() or not extremes.any()))


def pre_initialized(graph: Graph, layer: Layer, pre_init: PreInit, seed: int, drawn: Drawn) -> Array:
    """A layer's weight before scaling, in its stored layout, as float32 (or double, if kept as it is)."""
    weight = layer.weight
    if pre_init is PreInit.KEEP:
        stored = graph.array(weight.base)
        return stored if weight.dtype == "float64" else np.asarray(stored, np.float32)
    matrices = drawn.take(Draw.of(layer, pre_init, seed))
    return np.ascontiguousarray(weight.stored(layer.form.weight(matrices, weight.shape)))


def running_weight(array: Array, layer: Layer, linear: bool) -> RunningWeight:
    """The weight to run: scaled to He's standard deviation, but unchanged where the layer is not linear in it."""
    _, square = weights.mean_and_square(array)
    factor = math.sqrt(2.0 / layer.form.fan_in / square) if 0.0 < square < math.inf else math.inf
    if not linear or not math.isfinite(factor):
        return RunningWeight(array, 1.0)
    if factor < LARGEST_RUNNING_FACTOR:
        return RunningWeight(_scaled(array, factor), factor)
    largest = float(np.max(np.abs(array)))  # entries so small that the factor would leave float32's range
    return RunningWeight(array / array.dtype.type(largest) * array.dtype.type(largest * factor), factor)


def _scaled(array: Array, scale: float) -> Array:
    scaled: Array = np.multiply(array, array.dtype.type(scale), out=array if array.flags.writeable else None)
    return scaled
