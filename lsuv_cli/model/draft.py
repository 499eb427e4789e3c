"""An ONNX file out: the model with other weights, whole and verified under its name, or not there at all.

The result grows in a directory of its own beside the output (`.lsuv-...`), is read back and verified there, and
is renamed into place at the end. A killed run leaves such a directory; the next run on the same output directory
removes it. Where the input keeps its weights in external files, the output keeps them in one, `OUT.onnx.data`:
new weights are written there as they come, all others are copied as byte ranges.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from lsuv_cli import temporary
from lsuv_cli.errors import OutputError
from lsuv_cli.model.file import ModelFile, Range, id_of, is_external, load, tensors

Array = NDArray[Any]

SCRATCH_PREFIX = ".lsuv-"
ALIGNMENT = 4096  # so that a tensor can be memory-mapped
MOVED_OUT = 1024  # a new tensor larger than this goes to the data file, where there is one


class Draft:
    """The output in the making. Use it as a context manager; without `publish` nothing remains of it."""

    def __init__(self, file: ModelFile, output: Path | None, *, force: bool = False) -> None:
        self.file = file
        self.output = output
        self.scratch: Path | None = None
        self._data: IO[bytes] | None = None
        self._end = 0
        self._placed: dict[tuple[str, ...], Range] = {}
        self._lock: IO[bytes] | None = None
        if output is not None:
            _check_output(output, file, force)

    def __enter__(self) -> Draft:
        if self.output is not None:
            directory = self.output.absolute().parent
            try:
                _remove_leftovers(directory)
                # Named before it is made, so that an interruption right between the two leaves nothing.
                self.scratch = directory / f"{SCRATCH_PREFIX}{secrets.token_hex(8)}"
                temporary.announce(self.scratch)
                self.scratch.mkdir(mode=0o700)
                self._lock = (self.scratch / "lock").open("wb")
                _lock(self._lock)
                if self.file.has_external_data:
                    self._data = (self.scratch / self._data_name).open("w+b")
            except BaseException as problem:
                self.__exit__(None, None, None)
                if isinstance(problem, OSError):
                    raise _cannot_write(self.output, problem) from None
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._data, self._lock):
            if file is not None:
                file.close()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            temporary.withdraw(self.scratch)

    # Tensors

    def array(self, tensor: TensorProto) -> Array:
        """A tensor's values as they are now."""
        place = self._placed.get(id_of(tensor))
        if place is not None and self._data is not None:
            self._data.flush()
            dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            return np.memmap(place.path, dtype, "r", place.offset, tuple(tensor.dims))
        return self.file.array(tensor)

    def store(self, tensor: TensorProto, array: Array) -> None:
        """Give a tensor of the model other values (of its own shape and type)."""
        data = np.ascontiguousarray(array, helper.tensor_dtype_to_np_dtype(tensor.data_type))
        if is_external(tensor) and self._data is not None:
            self._write(tensor, data)
        else:
            _embed(tensor, data.tobytes())

    def append(self, body: onnx.GraphProto, name: str, array: Array) -> None:
        """Add an initializer to the main graph or to the body of an If."""
        data = np.asarray(array, order="C")  # ascontiguousarray would give a scalar an axis
        tensor = body.initializer.add(name=name, dims=data.shape)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(data.dtype)
        if self._data is not None and data.nbytes > MOVED_OUT:
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=f"new {name}")
            self._write(tensor, data)
        else:
            tensor.raw_data = data.tobytes()
        if (
            self.file.proto.ir_version < 4 and body is self.file.proto.graph
        ):  # then every initializer has to be listed as an input as well
            body.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))

    # The file

    def finish(self, metadata: dict[str, str]) -> ModelFile:
        """Write all that is left to write; the file as written, to be verified."""
        kept = [p for p in self.file.proto.metadata_props if p.key not in metadata]
        kept += [onnx.StringStringEntryProto(key=k, value=v) for k, v in metadata.items()]
        if self._data is None:
            for tensor in tensors(self.file.proto):
                if is_external(tensor):
                    _embed(tensor, self.file.raw(tensor))
            result = self.file.proto
        else:
            self._finish_data()
            result = onnx.ModelProto()
            result.CopyFrom(self.file.proto)
            for tensor in tensors(result):
                if is_external(tensor):
                    place = self._placed[id_of(tensor)]
                    _set_external(tensor, self._data_name, place)
        del result.metadata_props[:]
        result.metadata_props.extend(kept)
        if self.scratch is None or self.output is None:
            return ModelFile(result, None, "the result")
        path = self.scratch / self.output.name
        try:
            with path.open("wb") as file:
                file.write(serialized(result))
                file.flush()
                os.fsync(file.fileno())
            if self._data is not None:
                self._data.flush()
                os.fsync(self._data.fileno())
        except OSError as problem:
            raise _cannot_write(self.output, problem) from None
        return load(path)

    def publish(self) -> None:
        """Rename the finished file to its name."""
        if self.output is None or self.scratch is None:
            return
        try:
            if os.name == "nt" and self._data is not None:  # an open file cannot be renamed there
                self._data.close()
            with _alone_in(self.output.absolute().parent):
                if self._data is not None:
                    # Old weights under a new name or the reverse would be a wrong model: rather none for an instant.
                    self.output.unlink(missing_ok=True)
                    (self.scratch / self._data_name).replace(self.output.with_name(self._data_name))
                (self.scratch / self.output.name).replace(self.output)
        except OSError as problem:
            raise _cannot_write(self.output, problem) from None

    @property
    def _data_name(self) -> str:
        assert self.output is not None
        return f"{self.output.name}.data"

    def _finish_data(self) -> None:
        """Copy the ranges of untouched tensors."""
        assert self._data is not None
        try:
            for tensor in tensors(self.file.proto):
                key = id_of(tensor)
                if is_external(tensor) and key not in self._placed:
                    source = self.file.ranges[key]
                    place = self._room(source.length)
                    with source.path.open("rb") as file:
                        file.seek(source.offset)
                        self._data.seek(place.offset)
                        _copy(file, self._data, source.length)
                    self._placed[key] = place
        except OSError as problem:
            assert self.output is not None
            raise _cannot_write(self.output, problem) from None

    def _write(self, tensor: TensorProto, data: Array) -> None:
        assert self._data is not None and self.output is not None
        place = self._placed.get(id_of(tensor)) or self._room(data.nbytes)
        try:
            self._data.seek(place.offset)
            self._data.write(data.reshape(-1).view(np.uint8).data)
        except OSError as problem:
            raise _cannot_write(self.output, problem) from None
        self._placed[id_of(tensor)] = place

    def _room(self, length: int) -> Range:
        assert self.scratch is not None
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._end = offset + length
        return Range(self.scratch / self._data_name, offset, length)


def _embed(tensor: TensorProto, data: bytes) -> None:
    for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data"):
        tensor.ClearField(field)
    if is_external(tensor):
        tensor.ClearField("data_location")
    tensor.raw_data = data


def _set_external(tensor: TensorProto, location: str, place: Range) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", place.offset), ("length", place.length)):
        tensor.external_data.add(key=key, value=str(value))


def serialized(model: onnx.ModelProto) -> bytes:
    """A model as one string of bytes, if it is not too large for that."""
    try:
        return model.SerializeToString()
    except Exception as problem:  # protobuf's EncodeError, or ValueError, by version
        raise OutputError(
            "the result is over protobuf's limit of 2 GiB; save the input with external data "
            "(onnx.save_model(..., save_as_external_data=True)) and write to a file"
        ) from problem


def _copy(source: IO[bytes], target: IO[bytes], length: int, chunk: int = 1 << 22) -> None:
    while length > 0:
        data = source.read(min(chunk, length))
        if not data:
            raise OSError("the model's external data became shorter while it was copied")
        target.write(data)
        length -= len(data)


def _check_output(output: Path, file: ModelFile, force: bool) -> None:
    """Refuse an output that would destroy something, before any work is done."""
    parent = output.absolute().parent
    if output.is_dir():
        raise OutputError(f"{output} is a directory; give a file name with -o")
    if not parent.is_dir():
        raise OutputError(f"{parent} is not a directory; make it first or choose another -o")
    written = [output, *([output.with_name(f"{output.name}.data")] if file.has_external_data else [])]
    sources = [Path(file.name), *file.data_files] if file.directory is not None else []
    for target in written:
        for source in sources:
            with contextlib.suppress(OSError):
                if target.samefile(source):
                    raise OutputError(f"{target} is the input itself ({source}); choose another -o")
        if target.exists() and not force:
            raise OutputError(f"{target} exists; use --force to overwrite it or choose another -o")
    if not os.access(parent, os.W_OK):
        raise OutputError(f"{parent} is not writable; choose another -o")


def _cannot_write(output: Path, problem: OSError) -> OutputError:
    return OutputError(f"{output} cannot be written: {problem.strerror or problem}; nothing was changed")


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed runs left; a living run holds the lock of its own."""
    for scratch in directory.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(OSError), (scratch / "lock").open("rb") as file:
            _lock(file)
            shutil.rmtree(scratch, ignore_errors=True)


def _lock(file: IO[bytes]) -> None:
    """Hold a file's lock for as long as it is open; OSError if another process does."""
    try:
        import fcntl
    except ImportError:  # Windows refuses to delete an open file, which serves the same end
        return
    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Let one process at a time rename results into a directory, so that model and data belong together."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
