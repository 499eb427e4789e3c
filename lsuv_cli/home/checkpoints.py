"""A network's checkpoint: its tensors by name, read from and written to .safetensors and .npz files.

Files are data alone: no pickle is ever loaded, and every size is checked against the file before memory is taken.
A written checkpoint has the keys, key order, shapes, types and metadata of the checkpoint that was read.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from lsuv_cli import safetensors_format
from lsuv_cli.errors import LsuvError
from lsuv_cli.safetensors_format import TYPES

Array = NDArray[Any]

FORMATS = frozenset({".safetensors", ".npz"})
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by key, in the order of the file, and the file's own metadata (.safetensors)."""

    tensors: Mapping[str, Array]
    metadata: Mapping[str, str] = field(default_factory=dict)
    name: str = "the checkpoint"  # for messages
    path: Path | None = None  # where it was read from
    # key -> the first key that names the same memory, for tensors that a module has under several names
    same: Mapping[str, str] = field(default_factory=dict)

    @property
    def floats(self) -> Iterator[str]:
        """The keys of tensors that can hold a weight; of keys that name the same memory, only the first."""
        return (key for key, array in self.tensors.items() if is_float(array) and key not in self.same)


def is_float(array: Array) -> bool:
    return array.dtype.name in FLOATS


def read(source: str | os.PathLike[str] | Mapping[str, Any]) -> Checkpoint:
    """A checkpoint from a file, or from a mapping of names to arrays."""
    if isinstance(source, Mapping):
        return _of_mapping(source)
    path = Path(source)
    if path.suffix not in FORMATS:
        raise LsuvError(f"`like` {path} must be a .safetensors or .npz file")
    try:
        with path.open("rb") as file:
            return (_safetensors if path.suffix == ".safetensors" else _npz)(file, path)
    except OSError as problem:
        raise LsuvError(f"`like` {path}: {problem.strerror or problem}") from None
    except MemoryError:
        raise LsuvError(f"`like` {path} does not fit into memory") from None


def _of_mapping(source: Mapping[str, Any]) -> Checkpoint:
    tensors: dict[str, Array] = {}
    same: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for key, given in source.items():
        array = np.asarray(given)
        if array.dtype.hasobject:
            raise LsuvError(f"like: {key!r} is no array of numbers but {type(given).__name__}")
        tensors[str(key)] = array
        place = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)
        if array.size and first.setdefault(place, str(key)) != str(key):
            same[str(key)] = first[place]
    return Checkpoint(tensors, same=same)


def _safetensors(file: IO[bytes], path: Path) -> Checkpoint:
    def wrong(what: str) -> LsuvError:
        return LsuvError(f"`like` {path} is no safetensors file, or is damaged: {what}")

    try:
        header = safetensors_format.read(file, path.stat().st_size)
    except safetensors_format.Damaged as problem:
        raise wrong(str(problem)) from None
    tensors: dict[str, Array] = {}
    for key, entry in header.entries.items():
        file.seek(entry.offset)
        data = file.read(entry.length)
        if len(data) != entry.length:
            raise wrong("it became shorter while it was read")
        tensors[key] = np.frombuffer(data, entry.dtype).reshape(entry.shape)
    return Checkpoint(tensors, header.metadata, str(path), path)


def _npz(file: IO[bytes], path: Path) -> Checkpoint:
    tensors: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                with archive.open(info) as member:
                    tensors[info.filename.removesuffix(".npy")] = _npy(member, info.file_size)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as problem:
        raise LsuvError(f"`like` {path} is no .npz file of plain arrays, or is damaged: {problem}") from None
    return Checkpoint(tensors, name=str(path), path=path)


def _npy(member: IO[bytes], size: int) -> Array:
    version = np.lib.format.read_magic(member)
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if header is None:
        raise ValueError(f"numpy format {version} is not known")
    shape, fortran, dtype = header(member)
    if dtype.hasobject:
        raise ValueError("an array of Python objects; such files are not loaded")
    wanted = math.prod(shape) * dtype.itemsize
    if not 0 <= wanted <= size:
        raise ValueError(f"an array of shape {list(shape)} does not fit its {size} bytes")
    data = member.read(wanted)
    if len(data) != wanted:
        raise ValueError("an array is cut off")
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
        dtype = np.dtype(bfloat16)  # numpy's format has no bfloat16 and stores it as two bytes of no type
    array = np.frombuffer(data, dtype)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def write(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a checkpoint; the end of the file's name tells the format."""
    with path.open("wb") as file:
        (_write_safetensors if path.suffix == ".safetensors" else _write_npz)(file, tensors, metadata)
        file.flush()
        os.fsync(file.fileno())


def _write_safetensors(file: IO[bytes], tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    names = {dtype: name for name, dtype in TYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, array in tensors.items():
        little = array.dtype.newbyteorder("<") if array.dtype.kind in "fiuc" else array.dtype
        if little not in names:
            raise LsuvError(f"`weights`: a safetensors file cannot hold {key!r} of type {array.dtype}; use .npz")
        header[key] = {"dtype": names[little], "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    file.write(struct.pack("<Q", len(text)) + text)
    for array in tensors.values():
        little = array.dtype.newbyteorder("<") if array.dtype.kind in "fiuc" else array.dtype
        file.write(np.ascontiguousarray(array, little).reshape(-1).view(np.uint8).data)


def _write_npz(file: IO[bytes], tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    # Not numpy.savez: it takes the keys as keyword arguments, so that a tensor could not be named `file`.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for key, array in tensors.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
