"""Random weights that are drawn ahead of their use, or when they are used.

A weight depends on the seed and its name alone, so it is the same wherever and whenever it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from lsuv_cli.model.layers import Layer
from lsuv_cli.scaling import weights
from lsuv_cli.settings import PreInit

Array = NDArray[Any]


@dataclass(frozen=True)
class Draw:
    """A random weight: what is drawn, its (groups, out, fan_in), and the random stream."""

    kind: PreInit
    shape: tuple[int, int, int]
    seed: int
    name: str

    @classmethod
    def of(cls, layer: Layer, kind: PreInit, seed: int) -> Draw:
        return cls(kind, layer.form.shape, seed, layer.weight.base)

    def make(self) -> Array:
        """The matrices, float32."""
        return weights.pre_initialize(self.kind, self.shape, weights.stream(self.seed, self.name))


class Drawn(Protocol):
    """Weights that are being drawn."""

    def take(self, draw: Draw) -> Array:
        """A weight's matrices, once."""

    def close(self) -> None:
        """Draw no more."""


class AsUsed:
    """Weights that this process draws when they are taken."""

    def take(self, draw: Draw) -> Array:
        return draw.make()

    def close(self) -> None:
        pass
