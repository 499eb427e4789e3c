"""The model's inputs, and the arrays that are matched to them by name and fit their shapes and types.

How an array is fed follows from its rank and the rank that the model declares:

1. Equal: the first axis is the batch.
2. One less: a sample without its batch axis, so a batch of one.
3. One more: each row is one run. This feeds a model without a batch axis, or a scalar that differs from run to run.
4. Both zero: a scalar, the same in every run.
5. Not declared by the model: the first axis is the batch.
6. Equal, and the first axis has the model's fixed length: one whole run of this input. It is the same in every run if
   another input has another fixed length, or if it is one row and another input has more (a recurrent state).

All other axes must have the model's fixed lengths; the names of dynamic axes mean nothing. Integers and all
floats are cast to a float input, integers to another width if their values fit; floats are never cast to
integers.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from lsuv_cli.data.files import UNNAMED, Array, Contents, StoredArray
from lsuv_cli.errors import DataError

Dim = int | str | None
FIRST = "arr_0"  # numpy.savez's name for an array that is given without one

# numpy has no bfloat16: such an input is given as float32, and the runtime converts it.
_FLOATS = {"float16": "float16", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class InputSpec:
    """One input as the model declares it; in `shape` an int is fixed, a name or None is not."""

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None
    required: bool = True
    table: int | None = None  # rows of the embedding that its values are indices of

    @property
    def wanted(self) -> str:
        """Shape and type, for people."""
        if self.shape is None:
            return f"any shape of {self.dtype}"
        unnamed = ("N", *"?" * len(self.shape))
        named = (unnamed[axis] if dim is None else dim for axis, dim in enumerate(self.shape))
        return f"{tuple_text(named)} {self.dtype}"

    @property
    def fed_dtype(self) -> np.dtype[Any]:
        """The numpy type in which this input is fed."""
        if self.dtype in _FLOATS:
            return np.dtype(_FLOATS[self.dtype])
        if self.dtype in _INTEGERS or self.dtype == "bool":
            return np.dtype(self.dtype)
        if self.dtype == "string":
            return np.dtype(object)
        raise DataError(f"input {self.name!r} is of type {self.dtype}, which lsuv cannot feed; cast it in the model")


class Feed(Enum):
    """How the rows of an array go into runs."""

    BATCH = "some rows in each run"
    RUN = "one row in each run, without the row's axis"
    SAME = "everything in each run"


@dataclass(frozen=True)
class InputColumn:
    """The data of one input: arrays one after another along their first axis."""

    spec: InputSpec
    feed: Feed
    parts: tuple[StoredArray, ...]

    @cached_property
    def ends(self) -> list[int]:
        """After which row each part ends."""
        return list(itertools.accumulate(1 if self.feed is Feed.SAME else part.shape[0] for part in self.parts))

    @property
    def rows(self) -> int:
        return self.ends[-1]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.parts[0].shape[1:]) * self.spec.fed_dtype.itemsize

    @property
    def fixed_batch(self) -> int | None:
        """The batch size on which the model insists, if it does."""
        return fixed_length(self.spec.shape[0]) if self.feed is Feed.BATCH and self.spec.shape else None

    @property
    def is_one_run(self) -> bool:
        """Whether the data is one run of an input whose first axis has a fixed length."""
        return self.feed is Feed.BATCH and len(self.parts) == 1 and self.fixed_batch == self.rows

    def take(self, start: int, stop: int) -> Array:
        """Rows `start` to `stop` in the type that is fed; a view of one file where that is possible."""
        if self.feed is Feed.SAME:
            return _cast(self.parts[0].values(), self.spec, self.parts[0])
        pieces = []
        while start < stop:
            part, row = self._locate(start)
            taken = min(stop - start, part.shape[0] - row)
            pieces.append(_cast(part.values(row, row + taken), self.spec, part))
            start += taken
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def in_memory(self, rows: int) -> "InputColumn":
        """The first rows of the column, to be sent to a machine that does not see the files."""
        if self.feed is Feed.SAME:
            return replace(self, parts=(self.parts[0].in_memory(),))
        parts, left = [], rows
        for part in self.parts:
            if left > 0:
                parts.append(part.in_memory(min(left, part.shape[0])))
                left -= part.shape[0]
        return replace(self, parts=tuple(parts))

    def describe(self, row: int, within: Sequence[int]) -> str:
        """A value's index, file and content, for an error message."""
        part, row = self._locate(row)
        index = (row, *within) if part.shape else ()
        shown = index[1:] if part.added_axis else index
        return f"index {tuple_text(shown)} of {part.where} ({part.values()[index]} as {self.spec.dtype})"

    def _locate(self, row: int) -> tuple[StoredArray, int]:
        if self.feed is Feed.SAME:
            return self.parts[0], row
        part = bisect_right(self.ends, row)
        return self.parts[part], row - (self.ends[part - 1] if part else 0)


@dataclass(frozen=True)
class Strangers:
    """Arrays that have no input's name, each with the file or batch that holds it: left out, or taken for an input."""

    left_out: dict[str, str] = field(default_factory=dict)
    taken: dict[tuple[str, str], str] = field(default_factory=dict)  # (array, input)

    def warnings(self) -> Iterator[str]:
        for name, where in self.left_out.items():
            yield f"{where}: {name!r} is not an input of the model, left out"
        for (name, taken), where in self.taken.items():
            yield f"{where}: {name!r} is not an input of the model; as the only array it is fed to {taken!r}"


def fit(spec: InputSpec, array: StoredArray, *, whole: bool) -> InputColumn:
    """The array as data for this input, or a `DataError`. With `whole`, the array must be one whole run."""
    check_type(spec, array)
    rank = len(array.shape)
    feed = Feed.BATCH
    wanted: tuple[Dim, ...] = (None,) * rank if spec.shape is None else spec.shape
    if rank == len(wanted) == 0:
        feed = Feed.SAME
    elif rank == len(wanted) + 1 and not whole:
        feed, wanted = Feed.RUN, (None, *wanted)
    elif not whole:
        wanted = (None, *wanted[1:])
    fed = array.with_batch_axis() if rank == len(wanted) - 1 else array
    if not _matches(fed.shape, wanted):
        raise _misfit(spec, array, _shape_remedy(array.shape, wanted))
    if feed is not Feed.SAME and fed.shape[0] == 0:
        raise _misfit(spec, array, "it holds no samples, give at least one")
    return InputColumn(spec, feed, (fed,))


def check_type(spec: InputSpec, array: StoredArray) -> None:
    """Raises if the array's type cannot be cast to the input's."""
    if remedy := _dtype_remedy(spec.fed_dtype, array.dtype):
        raise _misfit(spec, array, remedy)


def fixed_length(dim: Dim) -> int | None:
    """The length of an axis that the model fixes; some exporters write 0 or -1 for an axis of any length."""
    return dim if isinstance(dim, int) and dim > 0 else None


def same_in_every_run(columns: Sequence[InputColumn]) -> list[InputColumn]:
    """The columns, with those fed the same in every run (rule 6) marked so."""

    def alone(column: InputColumn) -> bool:
        others = [c for c in columns if c is not column and c.feed is Feed.BATCH]
        single = column.fixed_batch == 1  # then no other number of rows can be meant as one batch
        return any(c.fixed_batch != column.fixed_batch or (single and c.rows != column.rows) for c in others)

    same = [k for k, column in enumerate(columns) if column.is_one_run and alone(column)]
    if len(same) == len(columns):
        same = same[1:]  # one run in all, counted by the samples of the first input
    return [replace(column, feed=Feed.SAME) if k in same else column for k, column in enumerate(columns)]


def _matches(shape: Sequence[int], wanted: Sequence[Dim]) -> bool:
    return len(shape) == len(wanted) and all(
        dim == want or not fixed_length(want) for dim, want in zip(shape, wanted, strict=True)
    )


def _shape_remedy(shape: tuple[int, ...], wanted: tuple[Dim, ...]) -> str:
    """What would make the shape fit: its axes in another order, its values in another shape."""
    missing = len(wanted) - len(shape)
    if missing in (0, 1) and len(shape) <= 6:
        kept = () if missing else (0,)
        for order in itertools.permutations(range(len(kept), len(shape))):
            axes = kept + order
            if _matches([shape[axis] for axis in axes], wanted[missing:]):
                return f"transpose it with numpy.transpose(a, {axes})"
    if missing == 0 and _matches(shape[1:], wanted[1:]):
        return 'leave out `batch_size="all"`, so that it is cut into batches'
    sample = [dim for dim in wanted[1:] if isinstance(dim, int) and fixed_length(dim)]
    if shape and len(sample) == len(wanted) - 1 and math.prod(sample) == math.prod(shape[1:]):
        return f"reshape it with a.reshape({', '.join(map(str, (-1, *sample)))})"
    return "give it the shape wanted, samples along the first axis"


def _dtype_remedy(target: np.dtype[Any], dtype: np.dtype[Any]) -> str | None:
    """What to do about a type that cannot be cast to the input's; None if it can."""
    if dtype.kind in {"f": "fiub", "O": "USTO"}.get(target.kind, "iub"):
        return None
    if dtype.name == "bfloat16" and target.kind == "f":  # numpy knows it only by way of ml_dtypes
        return None
    if dtype.kind == "c":
        return "complex numbers do not fit, use a.real or numpy.abs(a)"
    name = {"O": "str", "b": "bool"}.get(target.kind, f"np.{target.name}")
    return f"convert it with a.astype({name})"


def _cast(values: Array, spec: InputSpec, part: StoredArray) -> Array:
    """The values in the type of the input, in C order; a view where they are that already."""
    target = spec.fed_dtype
    if target.kind == "O":
        return _strings(values, spec, part)
    if target.kind in "iub" and values.dtype != target and values.size:
        low, high = (0, 1) if target.kind == "b" else (np.iinfo(target).min, np.iinfo(target).max)
        least, most = int(values.min()), int(values.max())
        if least < low or most > high:
            raise _misfit(
                spec,
                part,
                f"its values go from {least} to {most} and must be {low} to {high}, use other data",
            )
    with np.errstate(over="ignore"):  # values that become Inf are reported when the data is examined
        return values.astype(target, order="C", copy=False)


def _strings(values: Array, spec: InputSpec, part: StoredArray) -> Array:
    try:
        text = np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
        objects: Array = text.astype(object, order="C")
        for value in objects.flat:
            str.encode(value)
    except TypeError:
        raise _misfit(spec, part, "not all of its values are strings, convert it with a.astype(str)") from None
    except (ValueError, SystemError):  # numpy raises SystemError for code points beyond Unicode
        raise _misfit(spec, part, "its text is not valid UTF-8, decode it as what it is") from None
    return objects


def _misfit(spec: InputSpec, array: StoredArray, remedy: str) -> DataError:
    got = f"{tuple_text(array.shape[1:] if array.added_axis else array.shape)} {array.dtype}"
    return DataError(f"{array.where}: input {spec.name!r} wants {spec.wanted}, got {got}; {remedy}")


def tuple_text(items: Iterable[object]) -> str:
    """A tuple as Python writes it, names without quotes."""
    texts = [str(item) for item in items]
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def name_and_path(source: str, inputs: Sequence[InputSpec]) -> tuple[str | None, Path]:
    """NAME=PATH in its two parts if NAME is an input; otherwise all of it is a path."""
    names = [spec.name for spec in inputs if source.startswith(f"{spec.name}=")]
    if names:
        name = max(names, key=len)
        path = source[len(name) + 1 :]
        if not path:
            raise DataError(f"{source}: nothing stands behind the =; give a file, a folder or a number")
        return name, Path(path)
    name, equals, _ = source.partition("=")
    if equals and not Path(source).exists():
        raise DataError(f"{source}: no such file, and the model has no input {name!r}; {_listed(inputs)}")
    return None, Path(source)


def match(
    contents: Contents,
    where: str,
    inputs: Sequence[InputSpec],
    strangers: Strangers,
    name: str | None = None,
    beside: Collection[str] = (),
) -> dict[str, StoredArray]:
    """The arrays of one file or batch by input name; arrays with other names are noted in `strangers`.

    The inputs `beside` have data already. One array is taken for the one input, whatever its name.
    """
    if name is not None:
        if len(contents) > 1 and name not in contents:
            raise DataError(f"{where}: holds {_quoted(contents)}, none of them called {name!r}; rename one")
        return {name: contents.get(name, next(iter(contents.values())))()}
    names = [spec.name for spec in inputs if spec.name in contents]
    for taken in {*names}.intersection(beside):
        raise DataError(f"{where}: input {taken!r} has data already; give it once")
    required = [spec.name for spec in inputs if spec.required and spec.name not in beside]
    if len(contents) == len(required) == 1 and not names:
        (called,) = contents
        if called not in {UNNAMED, FIRST}:
            strangers.taken.setdefault((called, required[0]), where)
        return {required[0]: contents[called]()}
    if UNNAMED in contents and UNNAMED not in names:
        raise DataError(
            f"{where}: an array without a name needs a model with one input; {_listed(inputs)}; "
            "say which one it is for with NAME=PATH, save all in one .npz, or give a dict of arrays by input name"
        )
    strangers.left_out.update((key, where) for key in contents if key not in names)
    return {key: contents[key]() for key in names}


def taking_images(name: str | None, inputs: Sequence[InputSpec], source: str) -> InputSpec:
    """The input that a directory of images is for."""
    if name is None and len(inputs) != 1:
        raise DataError(f"{source}: images are for one input; say which with NAME={source}; {_listed(inputs)}")
    return next(spec for spec in inputs if name in {None, spec.name})


def require(names: Iterable[str], inputs: Sequence[InputSpec], unused: Collection[str]) -> None:
    """Raises if a required input has no array."""
    for spec in inputs:
        if spec.required and spec.name not in names:
            others = f", but for {_quoted(unused)}, which the model does not have" if unused else ""
            raise DataError(f"no data for input {spec.name!r}{others}; {_listed(inputs)}; each needs an array")


def in_memory(batch: object, where: str, inputs: Sequence[InputSpec], copy: bool) -> Contents:
    """An array, a dict of arrays, or a tuple or list of arrays for the inputs in their order, as if it were a file."""
    if isinstance(batch, tuple | list) and batch and hasattr(batch[0], "__array__"):
        # Further arrays (labels of a data loader) are dropped: the model has no input for them.
        batch = {spec.name: array for spec, array in zip(inputs, batch, strict=False)}
    if not isinstance(batch, Mapping) and not hasattr(batch, "__array__"):
        raise DataError(
            f"{where} is a {type(batch).__name__}; give an array, a dict of arrays by input name, "
            "or a tuple or list of arrays"
        )

    def opened(name: str, value: Any) -> StoredArray:
        try:
            return StoredArray.of(np.array(value) if copy else np.asarray(value), where)
        except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors on a GPU
            reason = str(error).splitlines()[0]
            called = f"{where}: {name!r}" if name else where
            raise DataError(f"{called} cannot be made a numpy array ({reason}); convert it") from error

    arrays = batch if isinstance(batch, Mapping) else {UNNAMED: batch}
    return {str(name): partial(opened, str(name), value) for name, value in arrays.items()}


def _listed(inputs: Sequence[InputSpec]) -> str:
    return "the model's inputs are " + (", ".join(f"{s.name!r} {s.wanted}" for s in inputs) or "none")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
