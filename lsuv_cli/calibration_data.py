"""A request's data: what the model's inputs ask for, read from wherever the user's data is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from lsuv_cli.data import batches, loaders, random_data, reading
from lsuv_cli.data.batches import Calibration, Data, InputSpec
from lsuv_cli.data.images import ImageOptions
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.model import indices
from lsuv_cli.model.graph import Graph
from lsuv_cli.settings import Settings


def specs(graph: Graph) -> list[InputSpec]:
    """The inputs as the model declares them, with the embedding that each index looks up."""
    tables = indices.tables(graph)
    return [replace(_spec(name, info), table=tables.get(name)) for name, info in graph.inputs.items()]


def read(given: Data | Sequence[str] | Calibration, specs: Sequence[InputSpec], settings: Settings) -> Calibration:
    """The data as batches that fit the model's inputs: from files, at random, from memory, or as it was read before."""
    if isinstance(given, Calibration):
        return given
    size, limit = settings.batch_size, settings.limit
    options = ImageOptions(settings.mean, settings.std, settings.size)
    sources: list[str] = []
    if isinstance(given, list | tuple) and given and all(isinstance(item, str) for item in given):
        sources = [str(item) for item in given]
    if random_data.RANDOM in sources:
        options.refuse("random data")
        wishes = random_data.Wishes.of(settings.input_shapes, settings.val_range, specs)
        beside = [source for source in sources if source != random_data.RANDOM]
        return random_data.random(specs, batch_size=size, limit=limit, seed=settings.seed, wishes=wishes, beside=beside)
    for option in ("input_shapes", "val_range"):
        if getattr(settings, option):
            raise LsuvError(f"`{option}` is for random data; leave it out, or give `data='random'`")
    if sources:
        return reading.read(sources, specs, batch_size=size, limit=limit, image_options=options)
    options.refuse("data in memory")
    return batches.from_arrays(given, specs, batch_size=size, limit=limit)  # type: ignore[arg-type]


def files_of(data: object) -> list[Path]:
    """The files and directories that data comes from: named as the command takes them, or mapped into memory."""
    if isinstance(data, np.memmap):
        return [Path(data.filename)] if data.filename is not None else []
    if isinstance(data, Mapping):
        return [path for array in data.values() for path in files_of(array)]
    if not isinstance(data, list | tuple):
        return []
    paths = []
    for item in data:
        if isinstance(item, str):
            if item == random_data.RANDOM:
                continue
            loader = loaders.named(item)
            parts = (item if loader is None else str(loader.path)).split("=")  # NAME and PATH may both have a = in them
            paths += [Path("=".join(parts[k:])) for k in range(len(parts))]
        else:
            paths += files_of(item)
    return paths


def _spec(name: str, info: onnx.ValueInfoProto) -> InputSpec:
    """An input as the model declares it."""
    kind = info.type.tensor_type
    if not info.type.HasField("tensor_type"):
        raise ModelError(f"input {name!r} is no tensor ({info.type.WhichOneof('value')}); such models cannot be fed")
    shape: tuple[int | str | None, ...] | None = None
    if kind.HasField("shape"):
        shape = tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim)
    return InputSpec(name, _dtype_name(kind.elem_type), shape)


def _dtype_name(code: int) -> str:
    """ONNX's element type under numpy's name."""
    if code in (TensorProto.STRING, TensorProto.BFLOAT16):
        return "string" if code == TensorProto.STRING else "bfloat16"
    try:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(code)).name
    except (KeyError, TypeError):
        raise ModelError(f"an input has the unknown element type {code}") from None
