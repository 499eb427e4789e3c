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
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2
from numpy.typing import NDArray

from lsuv_cli.errors import LsuvError

Array = NDArray[Any]

FORMATS = frozenset({".safetensors", ".npz"})
HEADER_LIMIT = 100_000_000  # bytes; the limit of the safetensors library
TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(bfloat16),
    "F8_E4M3": np.dtype(float8_e4m3fn), "F8_E5M2": np.dtype(float8_e5m2), "C64": np.dtype("<c8"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"), "U32": np.dtype("<u4"), "U16": np.dtype("<u2"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip
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

    size = path.stat().st_size
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise wrong("its header has no valid length")
    try:
        header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {}) or {}
        entries = {str(key): _entry(value) for key, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise wrong("its header cannot be read") from None
    tensors: dict[str, Array] = {}
    begin = 8 + length
    for key, (dtype, shape, first, last) in entries.items():
        if not 0 <= first <= last <= size - begin or last - first != math.prod(shape) * dtype.itemsize:
            raise wrong(f"tensor {key!r} does not fit the file")
        file.seek(begin + first)
        data = file.read(last - first)
        if len(data) != last - first:
            raise wrong("it became shorter while it was read")
        tensors[key] = np.frombuffer(data, dtype).reshape(shape)
    return Checkpoint(tensors, {str(k): str(v) for k, v in metadata.items()}, str(path), path)


def _entry(value: dict[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    shape = tuple(value["shape"])
    first, last = value["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, first, last)):
        raise ValueError
    return TYPES[value["dtype"]], shape, first, last


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
