"""The data that sources name, as `--data` takes them, gathered by input.

A source is one of these, and NAME= in front says which input it is for:

1. A file of arrays, a directory of them, or onnx's test data (files.py).
2. An image, a directory of images, or one of class subdirectories with images (images.py).
3. Standard input or a FIFO (streams.py).
4. Numbers written out, NAME=16000, the same in every run (literals.py).
5. A Python file that yields the data (loaders.py). Beside it, other sources may only be the same in every run.

Options for images are refused where there are none, so that no option is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lsuv_cli.data import files, images, literals, loaders, streams
from lsuv_cli.data.batches import BatchSize, Calibration, by_file, calibrate, from_arrays, join
from lsuv_cli.data.files import Contents, StoredArray
from lsuv_cli.data.images import ImageOptions
from lsuv_cli.data.inputs import (
    Feed,
    InputColumn,
    InputSpec,
    Strangers,
    fit,
    match,
    name_and_path,
    require,
    same_in_every_run,
    taking_images,
)
from lsuv_cli.data.loaders import Loader
from lsuv_cli.errors import DataError


def read(
    sources: Sequence[str],
    inputs: Sequence[InputSpec],
    *,
    batch_size: BatchSize = None,
    limit: int | None = None,
    image_options: ImageOptions | None = None,
) -> Calibration:
    """The data that the sources name, as batches that fit the inputs."""
    options = image_options or ImageOptions()
    found = [loaders.named(source) for source in sources]
    gathered = _Gathered(inputs, options)
    for source, loader in zip(sources, found, strict=True):
        if loader is None:
            gathered.add(source)
    if not gathered.has_images:
        options.refuse(", ".join(sources))
    fitted = gathered.fitted(whole=batch_size == "all")
    loading = [loader for loader in found if loader is not None]
    if loading:
        batches = _only(loading, inputs).batches()
        beside = [_same(parts) for parts in fitted]
        return from_arrays(batches, inputs, batch_size=batch_size, limit=limit, beside=beside, source=str(loading[0]))
    require([parts[0].spec.name for parts in fitted], inputs, gathered.strangers.left_out)
    joined = None if batch_size == "all" else join(fitted)
    tables = by_file(fitted) if joined is None else [joined]
    return calibrate(tables, batch_size, limit, joined is None, ", ".join(sources), gathered.strangers)


def beside(sources: Sequence[str], inputs: Sequence[InputSpec], options: ImageOptions) -> list[InputColumn]:
    """Data that is the same in every run, beside data that comes from elsewhere."""
    gathered = _Gathered(inputs, options)
    for source in sources:
        gathered.add(source)
    return [_same(parts) for parts in gathered.fitted(whole=False)]


@dataclass
class _Gathered:
    """The arrays for each input, in the order of their files."""

    inputs: Sequence[InputSpec]
    options: ImageOptions
    arrays: dict[str, list[StoredArray]] = field(default_factory=dict)
    literals: dict[str, InputColumn] = field(default_factory=dict)
    strangers: Strangers = field(default_factory=Strangers)
    has_images: bool = False

    def add(self, source: str) -> None:
        """Gather what one source holds."""
        try:
            name, path = name_and_path(source, self.inputs)
            spec = next((spec for spec in self.inputs if spec.name == name), None)
            if spec is not None and self._add_literal(spec, path):
                return
            if streams.is_stream(path):
                self._add(source, [(str(path), streams.contents(path))], name)
                return
            if image_files := images.find(path):
                taking = taking_images(name, self.inputs, source)
                self._new(taking.name, source)
                self.arrays[taking.name] = images.arrays(image_files, taking, self.options)
                self.has_images = True
                return
            names = [spec.name for spec in self.inputs]
            self._add(source, [(str(file), files.contents(file, names)) for file in files.find(path)], name)
        except OSError as problem:  # a name that is too long, a directory that may not be read
            raise DataError(f"{source}: {problem.strerror or problem}; give other `data`") from None

    def fitted(self, *, whole: bool) -> list[list[InputColumn]]:
        """Each input's data, one column for each of its files; what is the same in every run is marked so."""
        by_input = {
            spec.name: [fit(spec, part, whole=whole) for part in self.arrays[spec.name]]
            for spec in self.inputs
            if spec.name in self.arrays
        }
        if not whole:
            joined = [replace(parts[0], parts=tuple(c.parts[0] for c in parts)) for parts in by_input.values()]
            marked = zip(joined, same_in_every_run(joined), strict=True)
            by_input |= {after.spec.name: [after] for before, after in marked if after.feed is not before.feed}
        by_input |= {name: [column] for name, column in self.literals.items()}
        return [by_input[spec.name] for spec in self.inputs if spec.name in by_input]

    def _add_literal(self, spec: InputSpec, text: Path) -> bool:
        """Whether the text behind NAME= is a literal, which is then added."""
        value = literals.parsed(str(text))
        if value is None or text.exists():
            return False
        self._new(spec.name, f"{spec.name}={text}")
        self.literals[spec.name] = literals.column(spec, value)
        return True

    def _add(self, source: str, opened: Sequence[tuple[str, Contents]], name: str | None) -> None:
        """Add the arrays of some files, which must all have the same names."""
        matches = [match(contents, where, self.inputs, self.strangers, name) for where, contents in opened]
        for (where, _), arrays in zip(opened, matches, strict=True):
            for key in arrays.keys() ^ matches[0].keys():
                raise DataError(f"{where} and {opened[0][0]}: only one of them has {key!r}; give both the same arrays")
        for key in matches[0]:
            self._new(key, source)
            self.arrays[key] = [arrays[key] for arrays in matches]

    def _new(self, name: str, source: str) -> None:
        if name in self.arrays or name in self.literals:
            raise DataError(f"{source}: input {name!r} has data already; put its files into one directory")


def _only(loading: Sequence[Loader], inputs: Sequence[InputSpec]) -> Loader:
    if len(loading) > 1:
        raise DataError(f"{loading[0]} and {loading[1]}: one loader gives the data; let it yield all inputs")
    for spec in inputs:
        if str(loading[0].path).startswith(f"{spec.name}=") and not loading[0].path.exists():
            raise DataError(f"{loading[0]}: a loader yields all inputs by name; leave out {spec.name}=")
    return loading[0]


def _same(parts: Sequence[InputColumn]) -> InputColumn:
    """Data beside a loader, which must be the same in every run."""
    column = parts[0]
    if len(parts) > 1 or not (column.feed is Feed.SAME or column.is_one_run):
        raise DataError(
            f"{column.parts[0].where}: beside a loader or random data only data that is the same in every run is "
            f"taken, of the shape {column.spec.wanted}; leave this file out"
        )
    return replace(column, feed=Feed.SAME)
