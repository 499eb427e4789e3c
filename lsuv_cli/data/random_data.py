"""Random calibration data, for a quick look at a model without data, or for a model without weights.

1. Floats are standard normal, or uniform in the range that `val_range` gives. Indices are uniform among the rows of the
   embedding that they are for, other integers 0 or 1, positions 0, 1, 2 ... along the last axis, and masks are ones.
   A single integer, such as a rate or a length, is 1.
2. The first axis has 64 samples, or `limit`. An axis that the model leaves open has the length that `input_shapes`
   gives; otherwise IMAGE_LENGTH for height and width of images, OPEN_LENGTH for any other, and a warning says so. Axes
   of one name have one length, and an axis named `a + b` the sum of both.
3. `input_shapes` gives the shape of one run, first axis included.
4. An input whose first axis has another fixed length than the first input's is a state: the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lsuv_cli.data import reading
from lsuv_cli.data.batches import BatchSize, Calibration, from_arrays
from lsuv_cli.data.files import Array, StoredArray
from lsuv_cli.data.images import ImageOptions
from lsuv_cli.data.inputs import Dim, Feed, InputColumn, InputSpec, fixed_length
from lsuv_cli.errors import DataError
from lsuv_cli.memory import available_memory
from lsuv_cli.setting_values import named_list

RANDOM = "random"  # the value of `--data` that asks for random data
SAMPLES = 64
IMAGE_LENGTH, OPEN_LENGTH = 224, 16
STATE_BATCH = 8  # samples in a run, where a state has an axis for them
CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Wishes:
    """Shapes and ranges that the user asks for, by input; a range under "" is for every input of numbers."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, input_shapes: Sequence[str], val_range: Sequence[str], inputs: Sequence[InputSpec]) -> Wishes:
        """The wishes as the settings hold them, checked against the model's inputs."""
        names = [spec.name for spec in inputs]
        shapes, ranges = (dict(map(named_list, given)) for given in (input_shapes, val_range))
        if "" in shapes and len(names) == 1:
            shapes[names[0]] = shapes.pop("")
        for option, given, known in (("input_shapes", shapes, names), ("val_range", ranges, ["", *names])):
            for name in given.keys() - known:
                asked = f"{name!r} is no input of the model" if name else "needs the name of an input, NAME:[...]"
                raise DataError(f"`{option}`: {asked}; the inputs are {', '.join(map(repr, names))}")
        return cls(
            {name: tuple(map(int, shape)) for name, shape in shapes.items()},
            {name: (low, high) for name, (low, high) in ranges.items()},
        )


def random(
    inputs: Sequence[InputSpec],
    *,
    batch_size: BatchSize = None,
    limit: int | None = None,
    seed: int = 0,
    wishes: Wishes | None = None,
    beside: Sequence[str] = (),
) -> Calibration:
    """Random data for every input; the sources `beside` give data that is the same in every run for some of them."""
    given = reading.beside(beside, inputs, ImageOptions())
    drawn = [spec for spec in inputs if spec.name not in {column.spec.name for column in given}]
    shapes = _Shapes(drawn, wishes or Wishes(), limit or SAMPLES)
    rng = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    states = list(given)
    for spec in drawn:
        values = _values(spec, shapes.of(spec), rng, wishes or Wishes())
        if shapes.is_state(spec):
            states.append(InputColumn(spec, Feed.SAME, (StoredArray.of(values, RANDOM),)))
        else:
            made[spec.name] = values
    data = from_arrays(made, inputs, batch_size=batch_size or shapes.run, limit=limit, beside=states)
    return replace(data, source=RANDOM, warnings=(*data.warnings, *shapes.told))


def _values(spec: InputSpec, shape: tuple[int, ...], rng: np.random.Generator, wishes: Wishes) -> Array:
    kind, name = spec.fed_dtype.kind, spec.name.lower()
    wish = wishes.ranges.get(spec.name)
    if wish is None and spec.table is None and "mask" not in name:
        wish = wishes.ranges.get("")
    numbers: Array
    if wish is not None and kind == "f":
        most = float(np.finfo(spec.fed_dtype).max)
        if not (-most <= wish[0] <= wish[1] <= most and math.isfinite(wish[1] - wish[0])):
            raise DataError(f"`val_range` of input {spec.name!r} is wider than {spec.fed_dtype} holds; give another")
        numbers = rng.uniform(*wish, shape)
    elif wish is not None:
        low, high = math.ceil(wish[0]), math.floor(wish[1])
        if low > high:
            raise DataError(f"`val_range` of input {spec.name!r} holds no whole number; give another")
        if spec.table is not None and not -spec.table <= low <= high < spec.table:
            raise DataError(
                f"`val_range` of input {spec.name!r} is {low} to {high}, but the embedding that it is for has "
                f"{spec.table} rows, 0 to {spec.table - 1}; give another"
            )
        numbers = rng.integers(low, high, shape, endpoint=True)
    elif "mask" in name or (kind in "iu" and not shape and spec.table is None):
        numbers = np.ones(shape)
    elif kind == "f":
        numbers = rng.standard_normal(shape)
    elif "position" in name and shape:
        numbers = np.broadcast_to(np.arange(shape[-1]) % (spec.table or shape[-1] or 1), shape)
    else:
        numbers = rng.integers(0, spec.table or 2, shape)
    return np.asarray(numbers, spec.fed_dtype)


class _Shapes:
    """The shape of each input's random data; axes of one name have one length."""

    def __init__(self, inputs: Sequence[InputSpec], wishes: Wishes, samples: int) -> None:
        self.wishes = wishes
        self.known: dict[str, int] = {}
        self.leads: dict[str, int] = {}  # lengths that the user gives named first axes
        self.told: list[str] = []
        for spec in inputs:
            if (spec.shape is None and spec.name not in wishes.shapes) or spec.fed_dtype.kind not in "fiub":
                raise DataError(
                    f"random data does not fit input {spec.name!r} {spec.wanted}; give data, or `input_shapes`"
                )
            self._learn(spec)
        self.batched = [spec for spec in inputs if self._shape(spec)]
        self.first = self._lead(self.batched[0]) if self.batched else None
        names = {spec.shape[0] for spec in self.batched if spec.shape and not self.is_state(spec)}
        self.batch_names = {name for name in names if isinstance(name, str)}
        self.run = self.first
        if self.run is None and any(self._is_batch(d) for s in inputs if self.is_state(s) for d in self._shape(s)):
            self.run = min(STATE_BATCH, samples)
        self.samples = max(samples // (self.run or 1), 1) * (self.run or 1)

    def is_state(self, spec: InputSpec) -> bool:
        """Whether an input is the same in every run: its first axis has another fixed length than the batch."""
        lead = self._lead(spec) if self._shape(spec) else None
        return lead is not None and lead != self.first

    def of(self, spec: InputSpec) -> tuple[int, ...]:
        """The shape of an input's data over all runs."""
        shape = self._shape(spec)
        asked = self.wishes.shapes.get(spec.name)
        lengths: list[int] = []
        for axis, dim in enumerate(shape):
            if not axis and not self.is_state(spec):
                lengths.append(self.samples)
            elif asked is not None:
                lengths.append(asked[axis])
            else:
                lengths.append(fixed_length(dim) or self._open(spec, axis, dim))
        need = math.prod(lengths) * spec.fed_dtype.itemsize
        if need > available_memory() // 2:
            raise DataError(
                f"random data for input {spec.name!r} would have the shape {tuple(lengths)}, {need:,} bytes, more than "
                "half of the memory available; give fewer samples with `limit`, or `input_shapes`"
            )
        return tuple(lengths)

    def _shape(self, spec: InputSpec) -> tuple[Dim, ...]:
        return spec.shape if spec.shape is not None else self.wishes.shapes[spec.name]

    def _lead(self, spec: InputSpec) -> int | None:
        """The fixed length of the first axis, or the one that the user gives it."""
        asked = self.wishes.shapes.get(spec.name)
        return asked[0] if asked else fixed_length(self._shape(spec)[0])

    def _is_batch(self, dim: Dim) -> bool:
        return fixed_length(dim) is None and (not isinstance(dim, str) or dim in self.batch_names)

    def _learn(self, spec: InputSpec) -> None:
        """Check the shape that the user gives an input, and note the lengths of its named axes."""
        asked, shape = self.wishes.shapes.get(spec.name), spec.shape
        if asked is None or shape is None:
            return
        if len(asked) != len(shape) or any(fixed_length(d) not in {None, n} for d, n in zip(shape, asked, strict=True)):
            raise DataError(
                f"`input_shapes`: input {spec.name!r} wants {spec.wanted}, got {asked}; give a shape that fits"
            )
        for axis, (dim, length) in enumerate(zip(shape, asked, strict=True)):
            lengths = self.known if axis else self.leads
            if isinstance(dim, str) and lengths.setdefault(dim, length) != length:
                raise DataError(
                    f"`input_shapes`: the axis {dim!r} has the lengths {lengths[dim]} and {length}; give it one"
                )

    def _open(self, spec: InputSpec, axis: int, dim: Dim) -> int:
        """The length of an axis that the model leaves open."""
        if self.is_state(spec) and self._is_batch(dim) and self.run is not None:
            return self.run
        if isinstance(dim, str):
            terms = [term.strip() for term in dim.split("+")]
            values = [int(term) if term.isdecimal() else self.known.get(term) for term in terms]
            if len(terms) > 1 and None not in values:
                return sum(value or 0 for value in values)
            if dim in self.known:
                return self.known[dim]
        length = IMAGE_LENGTH if _is_side(spec, axis) else OPEN_LENGTH
        if isinstance(dim, str):
            self.known[dim] = length
        called = f"axis {dim!r}" if isinstance(dim, str) else f"axis {axis}"
        shown = f"input {spec.name!r} leaves {called} open: {length} in random data"
        self.told.append(f"{shown}, see `input_shapes`")
        return length


def _is_side(spec: InputSpec, axis: int) -> bool:
    """Whether an axis is the height or width of images."""
    shape = spec.shape or ()
    if len(shape) != 4 or spec.fed_dtype.kind == "i":
        return False
    last = shape[3] in CHANNELS and shape[1] not in CHANNELS
    return axis in ((1, 2) if last else (2, 3)) and (last or shape[1] in CHANNELS)
