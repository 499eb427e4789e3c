"""How one tensor's elements lie in another: axes permuted, merged, split or reversed, or slabs reordered.

The search tries every permutation of the axes on a sample of the elements, and verifies on all elements the
permutations that pass. Two tensors of random numbers have one layout. Where values repeat (all zeros, a symmetric
matrix) there may be several permutations, and all of them are given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.home import fingerprints

Array = NDArray[Any]
Shape = tuple[int, ...]

SMALLEST = 1e-30  # a tensor whose largest value is smaller is all zeros
SAMPLE = 1024
MOST_AXES = 6


@dataclass(frozen=True, eq=False)
class Layout:
    """there = here.take(order, axis).reshape(split).transpose(permutation), reversed along `flips`, reshaped."""

    here: Shape
    there: Shape
    split: Shape
    permutation: Shape
    flips: Shape = ()  # axes after the permutation
    axis: int = 0
    order: NDArray[np.intp] | None = None

    def forward(self, array: Array) -> Array:
        array = array.reshape(self.here)
        if self.order is not None:
            array = array.take(self.order, self.axis)
        return np.flip(array.reshape(self.split).transpose(self.permutation), self.flips).reshape(self.there)

    def backward(self, array: Array) -> Array:
        moved = np.flip(array.reshape([self.split[axis] for axis in self.permutation]), self.flips)
        array = moved.transpose(np.argsort(self.permutation)).reshape(self.here)
        return array if self.order is None else array.take(np.argsort(self.order), self.axis)


def find(there: Array, here: Array, tolerance: float = 0.0) -> list[Layout]:
    """The layouts that make `here` equal to `there`, within a relative tolerance."""
    if there.size != here.size:
        return []
    found = [layout for layout in hypotheses(there.shape, here.shape) if _holds(layout, there, here, tolerance)]
    if found or tolerance:
        return found
    for layout in itertools.chain(_regrouped(there.shape, here.shape), _reversed(there.shape, here.shape)):
        if _holds(layout, there, here, tolerance):
            return [layout]
    return list(_reordered(there, here))


def _long(shape: Shape) -> Shape:
    """The lengths of the axes longer than 1; axes of length 1 do not affect the order of elements."""
    return tuple(d for d in shape if d != 1)


def hypotheses(there: Shape, here: Shape) -> Iterator[Layout]:
    """Permutations of the axes that turn the shape `here` into `there`, axes of length 1 aside."""
    mine, other = _long(here), _long(there)
    if sorted(mine) == sorted(other) and len(mine) <= MOST_AXES:
        for order in itertools.permutations(range(len(mine))):
            if tuple(mine[axis] for axis in order) == other:
                yield Layout(here, there, mine, order)


def _regrouped(there: Shape, here: Shape) -> Iterator[Layout]:
    """Permutations of the axes on either side, with axes merged or split by a reshape."""
    mine, other = _long(here), _long(there)
    if len(mine) <= MOST_AXES:
        for order in itertools.permutations(range(len(mine))):
            yield Layout(here, there, mine, order)
    if len(other) <= MOST_AXES:
        for order in itertools.permutations(range(len(other))):
            yield Layout(here, there, tuple(other[axis] for axis in order), tuple(int(k) for k in np.argsort(order)))


def _reversed(there: Shape, here: Shape) -> Iterator[Layout]:
    """Permutations with some axes reversed, as a transposed convolution's kernel may be."""
    for layout in hypotheses(there, here):
        axes = range(len(layout.split))
        for count in axes:
            for flips in itertools.combinations(axes, count + 1):
                yield replace(layout, flips=flips)


def _reordered(there: Array, here: Array) -> Iterator[Layout]:
    """Slabs in another order along one axis, as the gates of a recurrent layer are."""
    mine, other = here.reshape(_long(here.shape)), there.reshape(_long(there.shape))
    for a, b in itertools.product(range(mine.ndim), range(other.ndim)):
        if mine.shape[a] != other.shape[b]:
            continue
        from_sums, to_sums = fingerprints.slabs(mine, (a, a + 1)), fingerprints.slabs(other, (b, b + 1))
        from_order, to_order = np.argsort(from_sums), np.argsort(to_sums)
        same = np.array_equal(from_sums[from_order], to_sums[to_order])
        if not same or np.any(np.diff(from_sums[from_order]) == 0):
            continue
        order = np.empty(len(from_order), np.intp)
        order[to_order] = from_order
        for layout in hypotheses(other.shape, mine.shape):
            if layout.permutation[b] == a:
                whole = replace(layout, axis=a, order=order)
                if np.array_equal(whole.forward(mine), other):
                    yield replace(whole, here=mine.shape, there=there.shape)
                    return


def _holds(layout: Layout, there: Array, here: Array, tolerance: float) -> bool:
    """Whether a layout is right: on a sample, then on all elements."""
    if math.prod(layout.split) != here.size:
        return False
    flat_there, flat_here = there.reshape(-1), here.reshape(-1)
    if there.size > SAMPLE:
        places = np.linspace(0, there.size - 1, SAMPLE).astype(np.int64)
        places ^= 1  # the spacing may be a multiple of an axis
        places = np.minimum(places, there.size - 1)
        shape = [layout.split[axis] for axis in layout.permutation]
        at = list(np.unravel_index(places, shape))
        for axis in layout.flips:
            at[axis] = shape[axis] - 1 - at[axis]
        back = [at[int(k)] for k in np.argsort(layout.permutation)]
        from_here = flat_here[np.ravel_multi_index(back, layout.split)]
        if not _equal(flat_there[places], from_here, tolerance):
            return False
    return _equal(there, layout.forward(here), tolerance)


def _equal(one: Array, other: Array, tolerance: float) -> bool:
    if not tolerance:
        return bool(np.array_equal(one, other))
    left, right = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return bool(np.all(np.abs(left - right) <= tolerance * max(float(np.abs(left).max(initial=0.0)), SMALLEST)))
