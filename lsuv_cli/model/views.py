"""Views: from a stored tensor to the tensor that an operator reads, and back.

Between the two there may be a chain of Identity, Cast, Transpose, Reshape, Flatten, Squeeze and Unsqueeze nodes.
Each of these nodes keeps all elements and has an inverse, so a chain can be followed in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class View:
    """One step from the stored tensor towards the operator: a permutation of the axes, or a new shape."""

    before: Shape
    after: Shape
    permutation: Shape | None = None

    def forward(self, array: Array) -> Array:
        return array.reshape(self.after) if self.permutation is None else array.transpose(self.permutation)

    def backward(self, array: Array) -> Array:
        if self.permutation is None:
            return array.reshape(self.before)
        return array.transpose(np.argsort(self.permutation))


def transposed(shape: Shape, permutation: Sequence[int] | None) -> View:
    order = tuple(permutation) if permutation else tuple(reversed(range(len(shape))))
    return View(shape, tuple(shape[axis] for axis in order), order)


def reshaped(shape: Shape, wanted: Sequence[int], allow_zero: bool = False) -> View:
    """ONNX's Reshape: 0 copies a dimension (unless `allow_zero`), one -1 takes what is left."""
    dims = [shape[k] if d == 0 and not allow_zero else d for k, d in enumerate(wanted)]
    if -1 in dims:
        rest = math.prod(d for d in dims if d != -1)
        dims[dims.index(-1)] = math.prod(shape) // rest if rest else 0
    return View(shape, tuple(dims))


def flattened(shape: Shape, axis: int) -> View:
    axis += len(shape) if axis < 0 else 0
    return View(shape, (math.prod(shape[:axis]), math.prod(shape[axis:])))


def squeezed(shape: Shape, axes: Sequence[int] | None) -> View:
    gone = {axis % len(shape) for axis in axes} if axes is not None else {k for k, d in enumerate(shape) if d == 1}
    return View(shape, tuple(d for k, d in enumerate(shape) if k not in gone))


def unsqueezed(shape: Shape, axes: Sequence[int]) -> View:
    rank = len(shape) + len(axes)
    new = {axis % rank for axis in axes}
    old = iter(shape)
    return View(shape, tuple(1 if k in new else next(old) for k in range(rank)))
