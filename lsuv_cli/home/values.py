"""Where in a checkpoint the values of a constant come from.

1. A checkpoint tensor with the constant's fingerprint has the same values; its layout is searched and verified.
2. Else the constant may be a slice of a packed tensor: a run of the tensor's slabs with the constant's fingerprint.
3. Else it may be a join: runs of the constant's slabs, each with the fingerprint of one checkpoint tensor.

All comparisons are made in the constant's own type, so that a float32 checkpoint fits a float16 model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.home import fingerprints, layouts
from lsuv_cli.home.checkpoints import Checkpoint
from lsuv_cli.home.layouts import Layout, Shape

Array = NDArray[Any]
Tensors = Callable[[str], Array]  # a checkpoint tensor by its key

MOST_SLABS = 1 << 17


@dataclass(frozen=True)
class Region:
    """Places `start` to `stop` along the axes from first up to last (exclusive), merged into one axis."""

    axes: tuple[int, int]
    start: int
    stop: int

    def of(self, array: Array) -> Array:
        """A view of the region, for reading and, if the array is contiguous, for writing."""
        first, last = self.axes
        merged = array.reshape(*array.shape[:first], -1, *array.shape[last:])
        return merged[(slice(None),) * first + (slice(self.start, self.stop),)]


@dataclass(frozen=True, eq=False)
class Fragment:
    """A part of a constant that is a part of a checkpoint tensor; a region of None is the whole tensor."""

    keys: tuple[str, ...]  # checkpoint tensors that are equal
    layouts: tuple[Layout, ...]  # from the checkpoint's part to the constant's; one, unless values repeat
    part: Region | None = None  # of the checkpoint's tensor
    place: Region | None = None  # in the constant
    plain: bool = False  # all values are the same

    def read(self, tensors: Tensors) -> Array:
        """The constant's part as the checkpoint has it."""
        whole = tensors(self.keys[0])
        return self.layouts[0].forward(self.part.of(whole) if self.part else whole)

    def write(self, whole: Array, value: Array) -> None:
        """Put the constant's part into a checkpoint tensor, which must be contiguous."""
        there = self.part.of(whole) if self.part else whole
        part = self.place.of(value) if self.place else value
        there[...] = self.layouts[0].backward(part).reshape(there.shape)


@dataclass(frozen=True)
class Copies:
    """Checkpoint tensors that are equal in type, shape and values."""

    keys: tuple[str, ...]
    shape: Shape
    plain: bool


class Finder:
    """Finds the values of constants in one checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.copies = tuple(_copies(checkpoint))
        self._totals: dict[str, dict[tuple[int, int], list[Copies]]] = {}
        self._slabs: dict[tuple[str, str, tuple[int, int]], fingerprints.Sums] = {}

    def whole(self, value: Array) -> list[tuple[Fragment, ...]]:
        """Checkpoint tensors that are the constant (rule 1)."""
        plain = is_plain(value)
        found: list[tuple[Fragment, ...]] = []
        for copies in self._of_total(value.dtype)[fingerprints.total(value), value.size]:
            known = self._layouts(value, self._cast(copies.keys[0], value.dtype), plain)
            if known:
                found.append((Fragment(copies.keys, known, plain=plain),))
        return found

    def parts(self, value: Array) -> list[tuple[Fragment, ...]]:
        """Slices and joins of checkpoint tensors that are the constant (rules 2 and 3)."""
        if value.size < 2 or is_plain(value):
            return []
        return [*self._slices(value), *self._joins(value)]

    def _slices(self, value: Array) -> Iterator[tuple[Fragment, ...]]:
        wanted = fingerprints.total(value)
        for copies in self.copies:
            if copies.plain or np.prod(copies.shape) <= value.size:
                continue
            for axes in _axes(copies.shape):
                _, count, _ = fingerprints.split(copies.shape, axes)
                width, rest = divmod(value.size * count, int(np.prod(copies.shape)))
                if rest or not 0 < width < count:
                    continue
                sums = self._sums(copies.keys[0], value.dtype, axes)
                for start in np.flatnonzero(fingerprints.windows(sums, width) == np.uint64(wanted)):
                    part = Region(axes, int(start), int(start) + width)
                    known = self._layouts(value, part.of(self._cast(copies.keys[0], value.dtype)), False)
                    if known:
                        yield (Fragment(copies.keys, known, part),)

    def _joins(self, value: Array) -> Iterator[tuple[Fragment, ...]]:
        totals = self._of_total(value.dtype)
        sizes = sorted({size for _, size in totals if 1 < size < value.size}, reverse=True)
        for axes in _axes(value.shape):
            _, count, _ = fingerprints.split(value.shape, axes)
            each = value.size // count
            sums = np.concatenate([[np.uint64(0)], np.cumsum(fingerprints.slabs(value, axes), dtype=np.uint64)])
            fragments: list[Fragment] = []
            at = 0
            while at < count:
                fragment = None
                for width in (size // each for size in sizes if size % each == 0 and at + size // each <= count):
                    with np.errstate(over="ignore"):
                        wanted = int(sums[at + width] - sums[at])
                    fragment = self._join(value, Region(axes, at, at + width), totals.get((wanted, width * each), []))
                    if fragment is not None:
                        break
                if fragment is None or fragment.place is None:
                    break
                fragments.append(fragment)
                at = fragment.place.stop
            if at == count and len(fragments) > 1:
                yield tuple(fragments)
                return

    def _join(self, value: Array, place: Region, candidates: list[Copies]) -> Fragment | None:
        for copies in candidates:
            known = self._layouts(place.of(value), self._cast(copies.keys[0], value.dtype), copies.plain)
            if known:
                return Fragment(copies.keys, known, place=place, plain=copies.plain)
        return None

    def _layouts(self, there: Array, here: Array, plain: bool) -> tuple[Layout, ...]:
        found = layouts.find(there, here)
        if plain and found and max(_rank(there.shape), _rank(here.shape)) > 1:
            exact = sorted(d for d in there.shape if d != 1) == sorted(d for d in here.shape if d != 1)
            return tuple(found) if exact else ()  # one repeated value fits any reshape
        return tuple(found)

    def _cast(self, key: str, dtype: np.dtype[Any]) -> Array:
        with np.errstate(all="ignore"):
            return self.checkpoint.tensors[key].astype(dtype, copy=False)

    def _of_total(self, dtype: np.dtype[Any]) -> dict[tuple[int, int], list[Copies]]:
        if dtype.name not in self._totals:
            known: dict[tuple[int, int], list[Copies]] = defaultdict(list)
            for copies in self.copies:
                array = self._cast(copies.keys[0], dtype)
                known[fingerprints.total(array), array.size].append(copies)
            self._totals[dtype.name] = known
        return self._totals[dtype.name]

    def _sums(self, key: str, dtype: np.dtype[Any], axes: tuple[int, int]) -> fingerprints.Sums:
        place = (key, dtype.name, axes)
        if place not in self._slabs:
            self._slabs[place] = fingerprints.slabs(self._cast(key, dtype), axes)
        return self._slabs[place]


def is_plain(array: Array) -> bool:
    """Whether all values of a tensor are the same."""
    return bool(array.size and np.all(array == array.reshape(-1)[0]))


def _copies(checkpoint: Checkpoint) -> Iterator[Copies]:
    """The checkpoint's floating-point tensors, equal tensors grouped together."""
    groups: dict[bytes, list[str]] = defaultdict(list)
    for key in checkpoint.floats:
        if checkpoint.tensors[key].size:
            groups[fingerprints.digest(checkpoint.tensors[key])].append(key)
    for keys in groups.values():
        array = checkpoint.tensors[keys[0]]
        yield Copies(tuple(keys), array.shape, is_plain(array))


def _axes(shape: Shape) -> Iterator[tuple[int, int]]:
    """The axes along which slabs are taken: each axis, and the first two or more axes together."""
    for axis, length in enumerate(shape):
        if length > 1 and length <= MOST_SLABS:
            yield axis, axis + 1
    for last in range(2, len(shape)):
        if shape[0] > 1 and np.prod(shape[:last]) <= MOST_SLABS:
            yield 0, last


def _rank(shape: Shape) -> int:
    return sum(d != 1 for d in shape)
