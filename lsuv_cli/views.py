"""A weight seen two ways: as its file stores it, and as the rows and columns its operator multiplies with.

Between the stored tensor and the operator there may be a chain of Identity, Cast, Transpose, Reshape, Flatten,
Squeeze and Unsqueeze nodes. Each of them only renames elements, so a chain can be walked in both directions.
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


@dataclass(frozen=True)
class MatrixForm:
    """How a weight is a stack of (out, fan-in) matrices, one for each group or batch entry.

    The weight is reshaped to `split`, its axes are put in the order `order` (groups, then outputs, then inputs),
    and the result is reshaped to `shape`.
    """

    split: Shape
    order: Shape
    shape: tuple[int, int, int]

    @property
    def fan_in(self) -> int:
        return self.shape[2]

    def matrices(self, weight: Array) -> Array:
        return weight.reshape(self.split).transpose(self.order).reshape(self.shape)

    def weight(self, matrices: Array, shape: Shape) -> Array:
        ordered = matrices.reshape([self.split[axis] for axis in self.order])
        return ordered.transpose(np.argsort(self.order)).reshape(shape)


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


def convolution(shape: Shape, groups: int) -> MatrixForm:
    """Conv: (out, in/groups, kernel...)."""
    out, *rest = shape
    fan_in = math.prod(rest)
    return MatrixForm((groups, out // groups, fan_in), (0, 1, 2), (groups, out // groups, fan_in))


def transposed_convolution(shape: Shape, groups: int) -> MatrixForm:
    """ConvTranspose: (in, out/groups, kernel...), inputs first; an output sums over inputs and kernel taps."""
    inputs, out, *kernel = shape
    split = (groups, inputs // groups, out, math.prod(kernel))
    return MatrixForm(split, (0, 2, 1, 3), (groups, out, inputs // groups * split[3]))


def product(shape: Shape, outputs: Sequence[int], inputs: Sequence[int]) -> MatrixForm:
    """A matrix product over the axes `inputs`, with results along `outputs`; all other axes are a batch."""
    batch = [axis for axis in range(len(shape)) if axis not in {*outputs, *inputs}]
    order = (*batch, *outputs, *inputs)
    sizes = [math.prod(shape[axis] for axis in part) for part in (batch, outputs, inputs)]
    return MatrixForm(shape, order, (sizes[0], sizes[1], sizes[2]))
