"""Views: from a stored tensor to the tensor that an operator reads, and back.

Between the two there may be a chain of Identity, Cast, Transpose, Reshape, Flatten, Squeeze and Unsqueeze nodes, which
keep all elements, and of Expand and Tile nodes, which repeat them. A chain can be followed in both directions; the way
back from a repeated tensor is its first copy, so the copies stay equal. A node that does not fit is a ValueError.
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
    """One step from the stored tensor towards the operator: a permutation of the axes, a new shape, copies."""

    before: Shape
    after: Shape
    permutation: Shape | None = None
    copies: Shape | None = None  # along each axis of `after`
    equal: Shape | None = None  # axes along which all slices are equal, and stay so

    def __post_init__(self) -> None:
        if self.copies is None and math.prod(self.before) != math.prod(self.after):
            raise ValueError(f"{self.before} and {self.after} differ in their numbers of elements")

    def forward(self, array: Array) -> Array:
        if self.copies is not None:
            return np.tile(array.reshape(self._one_copy), self.copies)
        if self.equal is not None:
            return array
        return array.reshape(self.after) if self.permutation is None else array.transpose(self.permutation)

    def backward(self, array: Array) -> Array:
        if self.copies is not None:
            return array[tuple(slice(length) for length in self._one_copy)].reshape(self.before)
        if self.equal is not None:
            first = tuple(slice(1) if axis in self.equal else slice(None) for axis in range(array.ndim))
            return np.broadcast_to(array[first], self.before).copy()
        if self.permutation is None:
            return array.reshape(self.before)
        return array.transpose(np.argsort(self.permutation))

    @property
    def _one_copy(self) -> Shape:
        """The shape of one copy, with as many axes as `after` has."""
        return (1,) * (len(self.after) - len(self.before)) + self.before


def transposed(shape: Shape, permutation: Sequence[int] | None) -> View:
    order = tuple(permutation) if permutation else tuple(reversed(range(len(shape))))
    if sorted(order) != list(range(len(shape))):
        raise ValueError(f"{order} is no permutation of {len(shape)} axes")
    return View(shape, tuple(shape[axis] for axis in order), order)


def reshaped(shape: Shape, wanted: Sequence[int], allow_zero: bool = False) -> View:
    """ONNX's Reshape: 0 copies a dimension (unless `allow_zero`), one -1 takes what is left."""
    if not allow_zero and 0 in wanted[len(shape) :]:
        raise ValueError(f"{shape} has no axis for every 0 of {tuple(wanted)}")
    dims = [shape[k] if d == 0 and not allow_zero else d for k, d in enumerate(wanted)]
    if -1 in dims:
        rest = math.prod(d for d in dims if d != -1)
        dims[dims.index(-1)] = math.prod(shape) // rest if rest else 0
    return View(shape, tuple(dims))


def flattened(shape: Shape, axis: int) -> View:
    axis = axis if axis == len(shape) else _axis(axis, len(shape))
    return View(shape, (math.prod(shape[:axis]), math.prod(shape[axis:])))


def squeezed(shape: Shape, axes: Sequence[int] | None) -> View:
    gone = (
        {_axis(axis, len(shape)) for axis in axes} if axes is not None else {k for k, d in enumerate(shape) if d == 1}
    )
    return View(shape, tuple(d for k, d in enumerate(shape) if k not in gone))


def unsqueezed(shape: Shape, axes: Sequence[int]) -> View:
    rank = len(shape) + len(axes)
    new = {_axis(axis, rank) for axis in axes}
    if len(new) != len(axes):
        raise ValueError(f"{tuple(axes)} has an axis twice")
    old = iter(shape)
    return View(shape, tuple(1 if k in new else next(old) for k in range(rank)))


def tiled(shape: Shape, copies: Sequence[int]) -> View:
    return View(shape, tuple(d * times for d, times in zip(shape, copies, strict=True)), copies=tuple(copies))


def expanded(shape: Shape, wanted: Sequence[int]) -> View:
    """ONNX's Expand: numpy's broadcasting of the two shapes."""
    after = np.broadcast_shapes(shape, tuple(wanted))
    ones = (1,) * (len(after) - len(shape))
    return View(
        shape, after, copies=tuple(new if old == 1 else 1 for old, new in zip(ones + shape, after, strict=True))
    )


def of_equal_slices(array: Array, axes: Sequence[int]) -> View | None:
    """That all slices along some of these axes are equal; None if they differ, or if all numbers are the same."""
    long = [axis for axis in axes if array.shape[axis] > 1]
    equal = tuple(axis for axis in long if np.array_equal(array.take([0], axis), array.take([1], axis)))
    equal = tuple(axis for axis in equal if (array == array.take([0], axis)).all())
    if not equal or (array == array.flat[0]).all():
        return None
    return View(array.shape, array.shape, equal=equal)


def _axis(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"there is no axis {axis} of {rank}")
    return axis % rank
