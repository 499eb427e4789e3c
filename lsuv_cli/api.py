"""The whole job as one Python call: `initialize`, `measure`, `inspect`, `compare`.

The command line is a thin shell over them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from lsuv_cli.data.batches import Data
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.home import checkpoints, named
from lsuv_cli.model.file import ModelFile, load
from lsuv_cli.pipeline import Initialized, Job, Listener
from lsuv_cli.report import Report
from lsuv_cli.scaling import runtime
from lsuv_cli.settings import PreInit, Settings

Model = str | os.PathLike[str] | bytes | onnx.ModelProto


def _silent(phase: str, done: int, total: int) -> None:
    pass


def initialize(
    model: Model,
    data: Data | Sequence[str] | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    force: bool = False,
    dry_run: bool = False,
    listen: Listener = _silent,
    **settings: Any,
) -> Initialized:
    """Initialize a model's weights by LSUV.

    `model` is a path, the bytes of a file or a ModelProto (which is not changed). `data` is an array, a dict of
    arrays, an iterable of batches, or a list of file names as `--data` takes them. With `output` the result is
    written there; with `weights` the initialized tensors go to a .safetensors or .npz file of their own. `like` is the
    network's checkpoint as it was exported, a file or a mapping of names to arrays: then the weights file, and the
    result's `weights`, are that whole checkpoint with the initialized values. The other arguments are the fields of
    `Settings`.
    """
    with _opened(model) as file:
        job = Job(file, Settings.of(settings), data, listen, checkpoints.read(like) if like is not None else None)
        carried = named.check(weights, force) if weights is not None else None
        return job.initialize(Path(output) if output is not None else None, carried, force, dry_run)


def measure(model: Model, data: Data | Sequence[str], *, listen: Listener = _silent, **settings: Any) -> Report:
    """The variance of every layer's output in a model as it stands."""
    with _opened(model) as file:
        return Job(file, Settings.of(settings), data, listen).look("measure")


def inspect(
    model: Model, data: Data | Sequence[str] | None = None, *, listen: Listener = _silent, **settings: Any
) -> Report:
    """The layers of a model and where their weights live; with data, what they put out."""
    with _opened(model) as file:
        return Job(file, Settings.of(settings), data, listen).look("inspect")


def compare(
    model: Model,
    data: Data | Sequence[str],
    inits: Sequence[str] = ("lsuv", "orthonormal", "xavier", "msra", "keep"),
    *,
    listen: Listener = _silent,
    **settings: Any,
) -> dict[str, Report]:
    """A report for each initialization of the same model: "lsuv", or a pre-initialization without scaling.

    "keep" is the model as given. Nothing is written.
    """
    known = ("lsuv", *PreInit)
    unknown = [name for name in inits if name not in known]
    if unknown or not inits:
        raise LsuvError(f"--inits {','.join(unknown) or 'none'}: choose among {', '.join(known)}")
    if not isinstance(data, Mapping | Sequence) and not hasattr(data, "__array__"):
        data = list(data)  # gone through once for each initialization
    reports = {}
    with _opened(model) as file:
        for name in dict.fromkeys(inits):
            chosen = {**settings, "rescale": name == "lsuv"}
            if name == PreInit.KEEP:
                reports[name] = measure(model, data, listen=listen, **settings)
                continue
            if name != "lsuv":
                chosen["pre_init"] = name
            job = Job(ModelFile(_copied(file.proto), file.directory, file.name), Settings.of(chosen), data, listen)
            reports[name] = job.initialize(None, None, False, False).report
    return reports


@contextlib.contextmanager
def _opened(model: Model) -> Iterator[ModelFile]:
    """A model to work on. What goes wrong unforeseen is blamed on it, if onnxruntime does not take it either."""
    file = load(model)
    try:
        yield file
    except (LsuvError, MemoryError):
        raise
    except Exception as problem:
        given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
        if reason := runtime.refusal(given if isinstance(given, bytes) else os.fspath(given)):
            raise ModelError(f"{file.name}: onnxruntime does not take the model: {reason}") from problem
        raise


def _copied(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy
