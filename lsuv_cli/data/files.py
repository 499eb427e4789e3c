"""Arrays in files that may be broken or hostile: found, opened safely, and read in pieces.

1. Nothing is ever unpickled, and no header is believed: an array that promises more bytes than its file (or
   its member of a zip archive) holds is refused before memory is set aside for it.
2. An .npy file is mapped into memory anew for each piece, so that a large one is never copied whole and a
   directory of thousands keeps no file open.
3. A member of an .npz archive is unpacked whole, once, when its values are first asked for, and only if it
   fits into half of the memory there is.
4. A tensor of a .safetensors file is mapped like an .npy file; a .pb file (a TensorProto, as onnx stores test data)
   is parsed whole, if it fits into half of the memory there is.
5. Whatever numpy, zipfile, zlib or protobuf raise on the way leaves here as a `DataError` of one line.

A further kind of file is one more entry in `READERS`.
"""

import math
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from lsuv_cli import safetensors_format
from lsuv_cli.errors import DataError
from lsuv_cli.memory import available_memory
from lsuv_cli.safetensors_format import Entry

Array = npt.NDArray[Any]

UNNAMED = ""
"""The name of the one array in a file that gives its array no name."""

SETS = "test_data_set_*"
"""The names of directories with test data in onnx's own layout."""
INPUT_FILE = re.compile(r"input_(\d{1,4})\.pb")

_LONGEST_EMPTY_AXIS = 2**20


@dataclass(frozen=True)
class StoredArray:
    """An array whose shape and type are known and whose values are read when asked for."""

    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    load: Callable[[], Array]
    added_axis: bool = False  # the first axis, of length 1, was added: the file does not have it
    file: Path | None = None  # that it is read from whenever it is asked for; None for an array in memory

    @classmethod
    def of(cls, array: Array, where: str) -> "StoredArray":
        """An array that is in memory already."""
        return cls(where, array.shape, array.dtype, partial(np.asarray, array))

    def with_batch_axis(self) -> "StoredArray":
        """The same values with a first axis of length 1."""
        return replace(self, shape=(1, *self.shape), load=lambda: self.load()[None], added_axis=True)

    def in_memory(self, rows: int | None = None) -> "StoredArray":
        """The array, or its first rows, without its file; mapped memory is not copied."""
        array = self.values(None if rows is None else 0, rows)
        return replace(StoredArray.of(np.asarray(array), self.where), added_axis=self.added_axis)

    def values(self, start: int | None = None, stop: int | None = None) -> Array:
        """Rows `start` to `stop` along the first axis, or everything; a view where the file allows it."""
        array = self.load()
        if array.shape != self.shape or array.dtype != self.dtype:
            raise DataError(f"{self.where}: changed while it was being read; run again when it is complete")
        return array if start is None else array[start:stop]


Contents = Mapping[str, Callable[[], StoredArray]]
"""The arrays of a file by name; each is opened, its header checked, when called."""


def find(path: Path) -> list[Path]:
    """The data at a path: the file itself, the data files in a directory, or its test data sets, 2 before 10."""
    if path.is_dir():
        files, sets = inside(path), test_sets(path)
        if files and sets and sets != [path]:
            raise DataError(
                f"{path}: holds arrays ({files[0].name}) and test data sets ({sets[0].name}); give one of them"
            )
        if not (files or sets):
            raise DataError(f"{path}: no {KNOWN} files, images or {SETS} in this directory; give another")
        return sets or files
    if not path.exists():
        raise DataError(f"{path}: no such file; give an {KNOWN} file or a directory of them")
    if not path.is_file() or path.suffix.lower() not in READERS:
        raise DataError(f"{path}: not an {KNOWN} file; save the data with numpy.save or numpy.savez")
    return [path]


def inside(directory: Path) -> list[Path]:
    """The files of arrays in a directory, in the order of their names."""
    with reading(directory):
        entries = [entry for entry in directory.iterdir() if not entry.name.startswith(".")]
        return by_name(entry for entry in entries if entry.suffix.lower() in READERS and entry.is_file())


def test_sets(directory: Path) -> list[Path]:
    """The directories of onnx's test data at a path: the directory itself, or those in it."""
    with reading(directory):
        if _set_inputs(directory):
            return [directory]
        return by_name(entry for entry in directory.glob(SETS) if entry.is_dir() and _set_inputs(entry))


def by_name(files: Iterable[Path]) -> list[Path]:
    """Files in the order of their names, with 2 before 10."""
    return sorted(files, key=_natural)


def contents(path: Path, names: Sequence[str] = ()) -> Contents:
    """The arrays in a data file, or in a directory of onnx's test data for inputs of these names."""
    return _test_set(path, names) if path.is_dir() else READERS[path.suffix.lower()](path)


def _set_inputs(directory: Path) -> dict[int, Path]:
    """The files input_0.pb, input_1.pb ... by their numbers; the outputs beside them are not data."""
    found = ((INPUT_FILE.fullmatch(entry.name), entry) for entry in directory.iterdir())
    return {int(match[1]): entry for match, entry in found if match and entry.is_file()}


def _test_set(directory: Path, names: Sequence[str]) -> Contents:
    """A directory of onnx's test data: input_K.pb is for the K-th input."""
    with reading(directory):
        files = _set_inputs(directory)
    if files and max(files) >= len(names):
        raise DataError(f"{files[max(files)]}: the model has {len(names)} inputs; leave the file out")
    return {names[number]: partial(_pb_array, file) for number, file in sorted(files.items())}


def _pb(path: Path) -> Contents:
    return {UNNAMED: partial(_pb_array, path)}


def _pb_array(path: Path) -> StoredArray:
    """A TensorProto, whose values may be in no other file."""
    from onnx import TensorProto, numpy_helper

    with reading(path):
        _refuse_large(str(path), path.stat().st_size)
        tensor = TensorProto.FromString(path.read_bytes())
        if tensor.data_location == TensorProto.EXTERNAL:
            raise DataError(f"{path}: its values are in another file, which is not opened; save them inside it")
        if min(tensor.dims, default=0) < 0:
            raise ValueError(f"its shape is {list(tensor.dims)}")
        array = np.asarray(numpy_helper.to_array(tensor))
    return StoredArray.of(array.astype(np.str_) if tensor.data_type == TensorProto.STRING else array, str(path))


def _safetensors(path: Path) -> Contents:
    with reading(path), path.open("rb") as file:
        try:
            header = safetensors_format.read(file, path.stat().st_size)
        except safetensors_format.Damaged as problem:
            raise DataError(f"{path}: no safetensors file, or damaged: {problem}; save it again") from None
    if not header.entries:
        raise DataError(f"{path}: holds no tensors; save them under the names of the model's inputs")
    return {name: partial(_safetensor, path, name, entry) for name, entry in header.entries.items()}


def _safetensor(path: Path, name: str, entry: Entry) -> StoredArray:
    def mapped() -> Array:
        with reading(path):
            if not entry.length:
                return np.empty(entry.shape, entry.dtype)
            array: Array = np.memmap(path, entry.dtype, "r", entry.offset, entry.shape)
            return array

    return StoredArray(f"{path}[{name!r}]", entry.shape, entry.dtype, mapped, file=path)


def _npy(path: Path) -> Contents:
    def opened() -> StoredArray:
        with reading(path), path.open("rb") as stream:
            shape, dtype = _header(stream, str(path), path.stat().st_size)
        return StoredArray(str(path), shape, dtype, partial(_mapped, path), file=path)

    return {UNNAMED: opened}


def _mapped(path: Path) -> Array:
    with reading(path):
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))


def _npz(path: Path) -> Contents:
    with reading(path), zipfile.ZipFile(path) as archive:
        members = [name for name in archive.namelist() if name.endswith(".npy")]
    if not members:
        raise DataError(f"{path}: holds no arrays; save them with numpy.savez(path, name=array)")
    return {name.removesuffix(".npy"): partial(_member, path, name) for name in members}


def _member(path: Path, name: str) -> StoredArray:
    where = f"{path}[{name.removesuffix('.npy')!r}]"
    with reading(path), zipfile.ZipFile(path) as archive, archive.open(name) as stream:
        shape, dtype = _header(stream, where, archive.getinfo(name).file_size)
    return StoredArray(where, shape, dtype, _Unpacked(path, name, where), file=path)


@dataclass
class _Unpacked:
    """A member of an archive, unpacked once in each process."""

    path: Path
    name: str
    where: str
    array: Array | None = None

    def __call__(self) -> Array:
        if self.array is None:
            self.array = _unpacked(self.path, self.name, self.where)
        return self.array

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unpacked, (self.path, self.name, self.where)


def _unpacked(path: Path, name: str, where: str) -> Array:
    with reading(path), zipfile.ZipFile(path) as archive, archive.open(name) as stream:
        size = archive.getinfo(name).file_size
        _refuse_large(where, size)
        _header(stream, where, size)
        stream.seek(0)
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
        stream.read(1)  # at the end zipfile compares the checksum
        return array


def _refuse_large(where: str, size: int) -> None:
    if size > (available := available_memory()) // 2:
        raise DataError(
            f"{where}: unpacks to {size:,} bytes, more than half of the {available:,} bytes of memory "
            "available; save it with numpy.save, an .npy file is read in pieces"
        )


def _header(stream: IO[bytes], where: str, size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and type in an array's header, once it is checked that a stream of `size` bytes can hold them."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:  # numpy writes 3.0 for structured arrays with field names beyond latin-1 only
        raise DataError(
            f"{where}: its format {version[0]}.{version[1]} is not one for plain arrays; save a plain array"
        )
    if dtype.hasobject:
        raise DataError(f"{where}: holds pickled Python objects, which are never loaded; save an array of numbers")
    promised = math.prod(shape) * dtype.itemsize
    held = size - stream.tell()
    if min(shape, default=0) < 0 or (promised == 0 and max(shape, default=0) > _LONGEST_EMPTY_AXIS):
        raise DataError(f"{where}: its header gives the shape {shape}, which cannot be; save the array again")
    if promised > held:
        raise DataError(
            f"{where}: its header promises {shape} {dtype}, {promised:,} bytes, but it holds {held:,}; "
            "the file is truncated, save or copy it again"
        )
    return shape, dtype


def _natural(path: Path) -> tuple[list[tuple[str, int]], str]:
    """Sorts frame2 before frame10: text and number in turn."""
    parts = [*re.split(r"(\d+)", path.name), ""]
    return [(text, int(digits or 0)) for text, digits in zip(parts[::2], parts[1::2], strict=True)], path.name


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns any exception on the way into a `DataError` of one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as numpy's warning about headers written by Python 2
            yield
    except (DataError, MemoryError):
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # numpy and zipfile raise nearly anything on a broken file
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        way = " with numpy.save or numpy.savez" if path.suffix in {".npy", ".npz"} else ""
        raise DataError(f"{path}: not a whole {path.suffix} file ({reason}); save it again{way}") from error


READERS: dict[str, Callable[[Path], Contents]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".pb": _pb,
}
"""How to open each kind of file, by the end of its name."""
KNOWN = ", ".join([*READERS][:-1]) + f" or {[*READERS][-1]}"
