"""Several models at once, by workers.

1. A worker that sees a model, the data and the output directory initializes the model there, as one process would.
2. To any other the driver sends the model's files, and the data, read and fitted to the model's inputs as one process
   would. The report and the output's files come back, and the driver publishes them.

Files go through Ray's object store as mapped memory; no process holds a whole model as memory of its own.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli import api, calibration_data, interruption, outputs
from lsuv_cli.data.batches import Calibration, InputSpec
from lsuv_cli.model import graph as graphs
from lsuv_cli.outputs import DATA_SUFFIX
from lsuv_cli.progress import Listener, silent
from lsuv_cli.report import Report
from lsuv_cli.scratch import Scratch
from lsuv_cli.settings import Settings

Bytes = NDArray[np.uint8]
Files = dict[str, Bytes]  # by name


@dataclass(frozen=True)
class Request:
    """One of several models to initialize, all of whose files are named."""

    model: str
    data: tuple[str, ...]
    output: str | None
    force: bool
    dry_run: bool
    without_weights: bool
    settings: Settings

    @property
    def reads(self) -> list[Path]:
        """The files by which a worker is known to see what the request reads."""
        found = [Path(self.model), *calibration_data.files_of(self.data)]
        inside = (sorted(path.iterdir()) if path.is_dir() else [path] for path in found)
        return [path for paths in inside for path in paths[:1] if path.is_file()]


@dataclass(frozen=True)
class Parcel:
    """A request to be done by a worker that sees none of its files. `names`: of the model's files, the model first."""

    request: Request
    names: tuple[str, ...]


def initialize_each(
    requests: Sequence[Request], settings: Settings, listen: Listener = silent
) -> Iterator[tuple[int, Callable[[], Report]]]:
    """Initialize several models at once, by workers; (place in the list, report or exception) as each ends."""
    from lsuv_cli.workers import models

    written = next((Path(request.output).parent for request in requests if request.output is not None), None)
    trade = models.Trade(lambda request: request.reads, here, Packing().pack, apart, publish)
    return models.at_once(trade, requests, written, settings, listen)


def here(request: Request, threads: int, data: Calibration | None = None) -> Report:
    """Do a request where its files are. `data`: the data, if it was read before."""
    given = replace(request.settings, workers=None, threads=threads)
    read: Any = data or list(request.data) or None
    return api.initialize(
        request.model,
        read,
        output=request.output,
        dry_run=request.dry_run,
        force=request.force,
        without_weights=request.without_weights,
        **given.keywords(),
    ).report


@dataclass
class Packing:
    """Parcels for workers. The data of the last model is kept: the models of most lists have the same inputs."""

    _specs: list[InputSpec] = field(default_factory=list)
    _data: Any = None

    def pack(self, request: Request, put: Callable[[Any], Any]) -> tuple[Parcel, list[Any]]:
        """A parcel, and in the object store: the model's files, then the data. Whatever is refused is refused here."""
        with api.opened(request.model, filling=True, without_weights=request.without_weights) as file:
            sources = [*file.data_files, *calibration_data.files_of(request.data)]
            outputs.check({"`output`": request.output}, [request.model, *sources], force=request.force)
            paths = [Path(request.model).absolute(), *sorted(file.data_files)]
            if request.data:
                self._read(calibration_data.specs(graphs.build(file.proto, file)), request, put)
        names = tuple(os.path.relpath(path.absolute(), paths[0].parent) for path in paths)
        contents = [put(_mapped(path)) for path in paths]
        return Parcel(request, names), [*contents, self._data if request.data else None]

    def _read(self, specs: list[InputSpec], request: Request, put: Callable[[Any], Any]) -> None:
        if self._data is None or specs != self._specs:
            data = calibration_data.read(list(request.data), specs, request.settings)
            self._specs, self._data = specs, put(data.in_memory())


def apart(parcel: Parcel, threads: int, *contents: Any) -> tuple[Report, Files]:
    """Do a request in a directory of its own. Returns the report, and the files to be published."""
    *files, data = contents
    with Scratch(Path(tempfile.gettempdir())) as scratch, contextlib.chdir(scratch.path):
        for name, content in zip(parcel.names, files, strict=True):
            path = Path("in") / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.data)
        out, wanted = Path("out"), parcel.request.output
        out.mkdir()
        output = None if wanted is None else str(out / Path(wanted).name)
        moved = replace(parcel.request, model=str(Path("in") / parcel.names[0]), output=output)
        report = here(moved, threads, data)
        return report, {path.name: _mapped(path) for path in out.iterdir()}  # gone, but mapped


def publish(request: Request, files: Files) -> None:
    """Give the files that came back their names."""
    if request.output is None or not files:
        return
    target = outputs.check({"`output`": request.output}, [], force=request.force)["`output`"]
    name = Path(request.output).name
    try:
        with Scratch(target.place.parent) as scratch:
            for each, content in files.items():
                with (scratch.path / each).open("wb") as file:
                    file.write(content.data)
                    file.flush()
                    os.fsync(file.fileno())
            data = scratch.path / (name + DATA_SUFFIX) if len(files) > 1 else None
            with interruption.held():
                outputs.publish(target, scratch.path / name, data)
    except OSError as problem:
        raise target.failure(problem) from None


def _mapped(path: Path) -> Bytes:
    """The bytes of a file, mapped into memory."""
    if not path.stat().st_size:
        return np.zeros(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, "r"))
