"""The user's data as batches that fit the model's inputs.

1. Every input gets one array, found by name; a model with one input takes an array of any name or none.
2. Rows are cut into batches of the model's fixed size, of the size asked for, or of about 512 KiB. Rows
   that do not fill a last batch of fixed size are left out with a warning.
3. All inputs have the same number of samples. With `batch_size="all"` they need not have: each file is one batch.
4. The files of a directory are joined along the batch axis if their samples have one shape; otherwise no
   batch crosses from one file into the next, and a file is one batch unless the size is fixed or asked for.
5. All values that are used are read once beforehand: NaN and Inf are errors, and so are indices outside of the
   embedding that they are for; a mean far from 0 or a variance far from 1 is a warning.

Which arrays fit an input, and how they are fed, is decided in inputs.py.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

import numpy as np

from lsuv_cli.data.files import Array
from lsuv_cli.data.inputs import (
    Feed,
    InputColumn,
    InputSpec,
    Strangers,
    fit,
    fixed_length,
    in_memory,
    match,
    require,
    same_in_every_run,
)
from lsuv_cli.data.sources import Data
from lsuv_cli.errors import DataError
from lsuv_cli.memory import available_memory

__all__ = [
    "Batch",
    "BatchSize",
    "Calibration",
    "Data",
    "InputSpec",
    "automatic_batch_size",
    "by_file",
    "calibrate",
    "from_arrays",
    "join",
]

Batch = Mapping[str, Array]
BatchSize = int | Literal["all"] | None

BATCH_BYTES = 2**19  # above it, the outputs of a network's first layers no longer fit a processor's cache
LARGEST_AUTOMATIC_BATCH = 1024
FEW, FEW_BYTES = 4, 2**22  # a few large samples together keep all threads busy
FEW_SAMPLES = 4  # in the batch for verification's soundings
EMBEDDING = 128  # times the bytes of an index: about those of its embedding
LEAST_VARIANCE, MOST_VARIANCE, MOST_MEAN = 0.25, 4.0, 0.5

_HOW_TO_AGREE = 'give them the same number, or feed every input whole in one run with `batch_size="all"`'


@dataclass(frozen=True)
class Calibration:
    """Data that fits the model. `batches` reads a batch when it is indexed, and may be iterated many times."""

    batches: Batches
    samples: int
    dropped: int
    warnings: tuple[str, ...]
    source: str

    def at_most(self, size: int) -> Calibration:
        """The same data in batches of at most this size, where the size of a batch was chosen automatically."""
        return replace(self, batches=Batches([table.at_most(size) for table in self.batches.tables]))

    def in_memory(self) -> Calibration:
        """The same batches without the files, to be sent to a machine that does not see them."""
        tables = self.batches.tables
        held = [replace(t, columns=[column.in_memory(t.used(column)) for column in t.columns]) for t in tables]
        return replace(self, batches=Batches(held))

    @property
    def files(self) -> list[Path] | None:
        """The files that all of the data is read from; None if some of it is in memory."""
        parts = [part for table in self.batches.tables for column in table.columns for part in column.parts]
        found = [part.file for part in parts if part.file is not None]
        return list(dict.fromkeys(found)) if len(found) == len(parts) else None

    @property
    def few(self) -> Batch:
        """The first few samples, as one batch; the whole first batch where the model fixes its size."""
        return self.batches.few(FEW_SAMPLES)


def from_arrays(
    data: Data,
    inputs: Sequence[InputSpec],
    *,
    batch_size: BatchSize = None,
    limit: int | None = None,
    beside: Sequence[InputColumn] = (),
    source: str = "",
) -> Calibration:
    """The data in memory: an array, a dict of arrays by input name, or an iterable of batches.

    A batch is an array, a dict, or a tuple or list: its arrays are for the inputs in their order, and what follows
    them (the labels of a data loader) is left out. Batches are all kept, because several passes are made, and used
    as they come unless the model's batch is fixed or `batch_size` asks for another. `beside` is data that is the same
    in every run, for inputs that the batches do not have; `source` says where iterated batches come from.
    """
    strangers = Strangers()
    whole = batch_size == "all"
    given = {column.spec.name for column in beside}

    def table(batch: object, where: str, copy: bool) -> list[InputColumn]:
        arrays = match(in_memory(batch, where, inputs, copy), where, inputs, strangers, beside=given)
        require([*arrays, *given], inputs, strangers.left_out)
        columns = [fit(s, arrays[s.name], whole=whole) for s in inputs if s.name in arrays]
        return [*(columns if whole else same_in_every_run(columns)), *beside]

    if isinstance(data, Mapping) or hasattr(data, "__array__"):
        return calibrate([table(data, "array", False)], batch_size, limit, whole, "array", strangers)
    if not isinstance(data, Iterable):
        raise DataError(f"data is a {type(data).__name__}; give an array, a dict of arrays or an iterable of batches")
    copy = not isinstance(data, Sequence)  # a generator may fill one buffer again and again
    prefix = f"{source}: " if source else ""
    tables = (table(batch, f"{prefix}batch {i}", copy) for i, batch in enumerate(data))
    return calibrate(_within_memory(tables, source or "data"), batch_size, limit, True, source or "batches", strangers)


def _within_memory(tables: Iterable[list[InputColumn]], source: str) -> Iterator[list[InputColumn]]:
    """The tables, as long as all together fit into half of the memory that was available at first."""
    most, taken = available_memory() // 2, 0
    for columns in tables:
        taken += sum(math.prod(part.shape) * part.dtype.itemsize for column in columns for part in column.parts)
        if taken > most:
            raise DataError(
                f"{source}: the batches so far have {taken:,} bytes, more than half of the memory available, and there "
                "are more; stop them with `limit`, or save the data in .npy files"
            )
        yield columns


def automatic_batch_size(bytes_per_sample: int) -> int:
    """About 512 KiB of input per batch, or a few samples up to 4 MiB: a power of two from 1 to 1024."""
    sample = max(bytes_per_sample, 1)
    fitting = max(min(BATCH_BYTES // sample, LARGEST_AUTOMATIC_BATCH), min(FEW_BYTES // sample, FEW))
    return 1 << (max(fitting, 1).bit_length() - 1)


@dataclass(frozen=True)
class Table:
    """Columns that are fed together, `size` rows of each per run; all rows if `size` is None."""

    columns: Sequence[InputColumn]
    size: int | None
    samples: int
    runs: int
    dropped: int = 0
    automatic: bool = False  # whether the size is neither asked for nor fixed, nor that of a given batch

    def at_most(self, size: int) -> Table:
        """The table with a smaller size, if its size may be changed."""
        if not self.automatic or self.size is None or self.size <= size:
            return self
        return replace(self, size=size, runs=math.ceil(self.samples / size))

    def used(self, column: InputColumn) -> int:
        """How many rows of a column are fed at all."""
        if column.feed is Feed.BATCH and self.size is not None:
            return self.samples
        return self.runs if column.feed is Feed.RUN else column.rows

    def batch(self, run: int) -> Batch:
        return {column.spec.name: self._fed(column, run) for column in self.columns}

    def shapes(self, run: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a batch, without reading it."""
        return {column.spec.name: self._shape(column, run) for column in self.columns}

    def _shape(self, column: InputColumn, run: int) -> tuple[int, ...]:
        shape = column.parts[0].shape
        if column.feed is Feed.SAME:
            return shape
        if column.feed is Feed.RUN:
            return shape[1:]
        rows = column.rows if self.size is None else min(self.size, self.samples - run * self.size)
        return rows, *shape[1:]

    def _fed(self, column: InputColumn, run: int) -> Array:
        if column.feed is Feed.RUN:
            return column.take(run, run + 1).reshape(column.parts[0].shape[1:])
        if self.size is None:
            return column.take(0, column.rows)
        return column.take(run * self.size, min((run + 1) * self.size, self.samples))


@dataclass(frozen=True)
class Batches(Sequence[Batch]):
    """The batches of all tables, one per run; a batch is read when it is indexed."""

    tables: Sequence[Table]

    @cached_property
    def ends(self) -> list[int]:
        return list(itertools.accumulate(table.runs for table in self.tables))

    def __len__(self) -> int:
        return self.ends[-1]

    @cached_property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Input -> shape, for each batch."""
        return [table.shapes(run) for table in self.tables for run in range(table.runs)]

    def few(self, count: int) -> Batch:
        """The first `count` rows, at most, of the first run."""
        table = self.tables[0]
        if table.size is None or any(
            column.fixed_batch or (column.feed is Feed.SAME and column.parts[0].shape) for column in table.columns
        ):
            return table.batch(0)
        return replace(table, size=min(table.size, count), samples=min(table.samples, count)).batch(0)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if isinstance(index, slice):
            return [self[run] for run in range(len(self))[index]]
        run = range(len(self))[index]
        table = bisect_right(self.ends, run)
        return self.tables[table].batch(run - (self.ends[table - 1] if table else 0))


def join(fitted: Sequence[Sequence[InputColumn]]) -> list[InputColumn] | None:
    """The files of each input as one column; None where they do not form one."""
    for files in fitted:
        kinds = {(column.feed, column.parts[0].shape[1:]) for column in files}
        if len(kinds) > 1 or (len(files) > 1 and files[0].feed is Feed.SAME):
            return None
    return [replace(files[0], parts=tuple(column.parts[0] for column in files)) for files in fitted]


def by_file(fitted: Sequence[Sequence[InputColumn]]) -> Iterator[list[InputColumn]]:
    """The first file of every input, then the second of every input; a single scalar goes with each."""
    most = max(fitted, key=len, default=[])
    for files in fitted:
        if len(files) != len(most) and not (len(files) == 1 and files[0].feed is Feed.SAME):
            name, most_name = files[0].spec.name, most[0].spec.name
            raise DataError(
                f"input {name!r} has {len(files)} files, input {most_name!r} {len(most)}, "
                "and they are fed one by one; give every input the same number of files"
            )
    return ([files[min(i, len(files) - 1)] for files in fitted] for i in range(max(len(most), 1)))


def calibrate(
    tables: Iterable[list[InputColumn]],
    batch_size: BatchSize,
    limit: int | None,
    as_given: bool,
    source: str,
    strangers: Strangers,
) -> Calibration:
    """Plans the runs within the limit, then examines every value that the runs use."""
    for name, number in (("batch_size", batch_size), ("limit", limit)):
        if isinstance(number, int) and number < 1:
            raise DataError(f"`{name}` must be at least 1, got {number}")
    plan: list[Table] = []
    left = math.inf if limit is None else limit
    for columns in tables:
        plan.append(_plan(columns, batch_size, left, as_given))
        left -= plan[-1].samples + plan[-1].dropped
        if left <= 0:
            break
    if not plan:
        raise DataError("there is no batch in the data; give at least one")
    samples, dropped = sum(table.samples for table in plan), sum(table.dropped for table in plan)
    size = plan[0].size
    if samples == 0:
        cut = limit is not None and size is not None and limit < size
        way_out = f"raise the limit to at least {size}" if cut else f"give at least {size}"
        raise DataError(f"{source}: {dropped} samples do not fill the model's fixed batch of {size}; {way_out}")
    warnings = list(strangers.warnings())
    if dropped:
        warnings.append(f"{dropped} of {samples + dropped} samples do not fill a batch of {size} and are left out")
    return Calibration(Batches(plan), samples, dropped, (*warnings, *_examine(plan)), source)


def _plan(columns: Sequence[InputColumn], batch_size: BatchSize, limit: float, as_given: bool) -> Table:
    """How many rows of each column go into a run, and how many runs there are."""
    batched = [column for column in columns if column.feed is Feed.BATCH]
    by_run = [column for column in columns if column.feed is Feed.RUN]
    counts = {column.rows: column.spec.name for column in batched}
    fixed = {column.fixed_batch: column.spec.name for column in batched if column.fixed_batch}
    fixed |= _held_batches(columns)
    if len(counts) > 1 and batch_size == "all":
        if limit < math.inf:
            raise DataError(
                f'inputs whose first axes differ are fed whole with `batch_size="all"`; leave out `limit={limit:g}`'
            )
        return Table(columns, size=None, samples=1, runs=1)
    for what, sizes in (("samples", counts), ("samples in each of its fixed batches", fixed)):
        if len(sizes) > 1:
            (one, one_name), (other, other_name), *_ = sizes.items()
            raise DataError(f"input {one_name!r} has {one} {what}, input {other_name!r} {other}; {_HOW_TO_AGREE}")
    for size, name in fixed.items():
        if batch_size not in (None, "all", size):
            raise DataError(f"input {name!r} has a batch fixed at {size}; leave out `batch_size={batch_size!r}`")
    rows = next((column.rows for column in batched + by_run), 1)
    if fixed:
        size = next(iter(fixed))
    elif not batched:
        size = 1
    elif isinstance(batch_size, int):
        size = batch_size
    elif as_given:
        size = rows
    else:
        size = 1 if by_run else automatic_batch_size(max(_weight(column) for column in batched))
    automatic = bool(batched) and not fixed and batch_size is None and not as_given and not by_run
    runs = rows // size if fixed else math.ceil(rows / size)
    for column in by_run:
        name = column.spec.name
        if not batched and batch_size not in (None, 1, *column.parts[0].shape[1:2]):
            raise DataError(f"each row for input {name!r} is one run; leave out `batch_size={batch_size!r}`")
        if column.rows != runs:
            raise DataError(
                f"input {name!r} has rows for {column.rows} runs, "
                f"input {(batched + by_run)[0].spec.name!r} for {runs}; {_HOW_TO_AGREE}"
            )
    used = int(min(rows, limit))
    dropped = used % size if fixed else 0
    return Table(columns, size, used - dropped, math.ceil((used - dropped) / size), dropped, automatic)


def _held_batches(columns: Sequence[InputColumn]) -> dict[int, str]:
    """Batch size -> an input that is the same in every run and was made for this size, along an axis left open."""
    batch_names = {column.spec.shape[0] for column in columns if column.feed is Feed.BATCH and column.spec.shape}
    held: dict[int, str] = {}
    for column in columns:
        if column.feed is Feed.SAME and column.spec.shape:
            open_axes = [
                length
                for dim, length in zip(column.spec.shape, column.parts[0].shape, strict=True)
                if fixed_length(dim) is None and (not isinstance(dim, str) or dim in batch_names)
            ]
            held |= dict.fromkeys(open_axes[:1], column.spec.name)
    return held


def _weight(column: InputColumn) -> int:
    """The bytes of a row; an index counts as the embedding that the model looks up for it."""
    dtype = column.spec.fed_dtype
    return column.row_bytes * (EMBEDDING if dtype.kind == "i" and dtype.itemsize >= 4 else 1)


@dataclass
class InputStatistics:
    """Mean and variance of values that come in pieces, in float64, merged as by Chan, Golub and LeVeque."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Array) -> None:
        flat = values.reshape(-1)
        for start in range(0, flat.size, BATCH_BYTES):
            piece = flat[start : start + BATCH_BYTES].astype(np.float64)
            mean = float(piece.mean())
            delta, total = mean - self.mean, self.count + piece.size
            piece -= mean
            piece *= piece  # in place: new arrays of this size would take most of the time
            self.squares += float(piece.sum()) + delta * delta * self.count * piece.size / total
            self.mean += delta * piece.size / total
            self.count = total

    def warning(self, name: str) -> Iterator[str]:
        """A warning if the mean is far from 0 or the variance far from 1; none for a mask of zeros and ones."""
        variance = self.squares / max(self.count, 1)
        if "mask" in name.lower() and math.isclose(variance, self.mean * (1 - self.mean), abs_tol=1e-9):
            return  # of all numbers between 0 and 1, zeros and ones alone have the variance m·(1 - m)
        if self.count > 1 and not (abs(self.mean) <= MOST_MEAN and LEAST_VARIANCE <= variance <= MOST_VARIANCE):
            yield (
                f"input {name!r} has mean {self.mean:.4g} and variance {variance:.4g}, not about 0 and 1; "
                "scale it as you will in training"
            )


def _examine(tables: Sequence[Table]) -> Iterator[str]:
    """Reads every value that is used, once, in pieces; yields the warnings."""
    statistics: dict[str, InputStatistics] = {}
    bad: dict[str, int] = {}
    first: dict[str, str] = {}
    for table in tables:
        for column in table.columns:
            name, used = column.spec.name, table.used(column)
            step = max(1, BATCH_BYTES // max(column.row_bytes, 1))
            for start in range(0, used, step):
                values = column.take(start, min(start + step, used))
                if values.dtype.kind != "f":
                    _check_indices(column, start, values)
                    continue
                finite = np.isfinite(values)
                if not finite.all():
                    row, *within = [*map(int, np.argwhere(~finite)[0])] or [0]
                    first.setdefault(name, column.describe(start + row, within))
                    bad[name] = bad.get(name, 0) + int(np.count_nonzero(~finite))
                elif column.feed is not Feed.SAME and column.spec.table is None:
                    with np.errstate(over="ignore", invalid="ignore"):
                        statistics.setdefault(name, InputStatistics()).add(values)
    for name, count in bad.items():
        raise DataError(f"input {name!r} has {count} NaN or Inf, the first at {first[name]}; remove or replace them")
    for name, seen in statistics.items():
        yield from seen.warning(name)


def _check_indices(column: InputColumn, start: int, values: Array) -> None:
    """Raises if a value lies outside of the embedding that it is an index of."""
    rows, name = column.spec.table, column.spec.name
    if rows is None or values.dtype.kind not in "iu" or not values.size:
        return
    if (outside := (values < -rows) | (values >= rows)).any():
        row, *within = [*map(int, np.argwhere(outside)[0])] or [0]
        raise DataError(
            f"input {name!r} has indices from {values.min()} to {values.max()}, but the embedding that they are for "
            f"has {rows} rows, 0 to {rows - 1}; the first outside is at {column.describe(start + row, within)}; use "
            "the tokenizer of this model"
        )
