"""An ONNX file out: the model with other weights, whole and verified under its name, or not there at all.

The result grows in a scratch directory beside the output, is read back and verified there, and is renamed into place
at the end. A result for a pipe or a device grows in memory. Where the input keeps its weights in external files, the
output keeps them in one, `OUT.onnx.data`: new weights are written there as they are made, and unchanged tensors are
copied as byte ranges.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lsuv_cli import outputs, temporary
from lsuv_cli.errors import OutputError
from lsuv_cli.model.file import ModelFile, Range, embed, id_of, is_external, load, tensors
from lsuv_cli.outputs import DATA_SUFFIX, Target
from lsuv_cli.scratch import Scratch

Array = NDArray[Any]

METADATA_PREFIX = "lsuv."
ALIGNMENT = 4096  # so that a tensor can be memory-mapped
MOVED_OUT = 1024  # a new tensor larger than this goes to the data file, where there is one


class Draft:
    """The output in the making. Use it as a context manager; without `publish` nothing remains of it."""

    def __init__(self, file: ModelFile, target: Target | None) -> None:
        self.file = file
        self.target = target
        self._scratch: Scratch | None = None
        self._data: IO[bytes] | None = None
        self._end = 0
        self._placed: dict[tuple[str, ...], Range] = {}

    def __enter__(self) -> Draft:
        if self.target is not None and not self.target.stream:
            try:
                self._scratch = Scratch(self.target.place.parent).__enter__()
                if self.file.has_external_data:
                    self._data = self._data_path.open("w+b")
            except BaseException as problem:  # an interruption too: `with` calls no __exit__ if __enter__ fails
                self.__exit__(None, None, None)
                if isinstance(problem, OSError):
                    raise self.target.failure(problem) from None
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._data is not None:
            self._data.close()
        if self._scratch is not None:
            self._scratch.__exit__(kind, value, trace)

    @property
    def in_memory(self) -> bool:
        """Whether all tensors of the result are in memory; else its external tensors are in the data file."""
        return self._data is None

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
            embed(tensor, data.tobytes())

    def append(self, body: onnx.GraphProto, name: str, array: Array) -> None:
        """Add an initializer to the main graph or to the body of an If."""
        data = np.asarray(array, order="C")  # ascontiguousarray would give a scalar an axis
        if self.file.proto.ir_version < 4 and body is not self.file.proto.graph:
            # Before IR version 4 every initializer is an input as well, and the body of an If has no inputs.
            body.node.insert(0, helper.make_node("Constant", [], [name], value=numpy_helper.from_array(data)))
            return
        tensor = body.initializer.add(name=name, dims=data.shape)
        tensor.data_type = helper.np_dtype_to_tensor_dtype(data.dtype)
        if self._data is not None and data.nbytes > MOVED_OUT:
            tensor.data_location = TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=f"new {name}")
            self._write(tensor, data)
        else:
            tensor.raw_data = data.tobytes()
        # Before IR version 4 every initializer has to be listed as an input as well.
        if self.file.proto.ir_version < 4 and body is self.file.proto.graph:
            body.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))

    # The file

    def earlier_metadata(self) -> dict[str, str]:
        """The entries of an earlier run, to be kept by a run that changes no weight."""
        entries = {str(p.key): p.value for p in self.file.proto.metadata_props}
        return {k.removeprefix(METADATA_PREFIX): v for k, v in entries.items() if k.startswith(METADATA_PREFIX)}

    def finish(self, metadata: dict[str, str]) -> ModelFile:
        """Write the unchanged tensors and the model itself. Returns the model to verify, read back if it is a file."""
        # Entries of an earlier run are dropped. `str`, because protobuf gives a key that is not UTF-8 as bytes.
        kept = [p for p in self.file.proto.metadata_props if not str(p.key).startswith(METADATA_PREFIX)]
        kept += [onnx.StringStringEntryProto(key=METADATA_PREFIX + k, value=v) for k, v in metadata.items()]
        if self._data is None:
            for tensor in tensors(self.file.proto):
                if is_external(tensor):
                    embed(tensor, self.file.raw(tensor))
            result = self.file.proto
        else:
            self._finish_data()
            result = onnx.ModelProto()
            result.CopyFrom(self.file.proto)
            for tensor in tensors(result):
                if is_external(tensor):
                    place = self._placed[id_of(tensor)]
                    _set_external(tensor, self._data_path.name, place)
        del result.metadata_props[:]
        result.metadata_props.extend(kept)
        if self._scratch is None or self.target is None:
            return ModelFile(result, None, "the result")
        try:
            with self._model_path.open("wb") as file:
                file.write(serialized(result))
                file.flush()
                os.fsync(file.fileno())
            if self._data is not None:
                self._data.flush()
                os.fsync(self._data.fileno())
        except OSError as problem:
            raise self.target.failure(problem) from None
        return load(self._model_path)

    def publish(self) -> None:
        """Rename the finished files into place, or send the model to its pipe or device."""
        target = self.target
        if target is None:
            return
        if self._scratch is None:
            target.send(serialized(self.file.proto))
            return
        if self._data is None:
            target.publish(self._model_path)
            return
        if os.name == "nt":  # an open file cannot be renamed there
            self._data.close()
        data = target.with_suffix(DATA_SUFFIX)
        with outputs.alone_in(target.place.parent):
            if target.force:
                # The old model beside the new data file would be a wrong model, so the old model is removed first.
                with contextlib.suppress(OSError):  # the rename below then fails too, and says why
                    target.place.unlink(missing_ok=True)
            data.publish(self._data_path)
            temporary.announce(data.place)  # a data file without its model is useless
            try:
                target.publish(self._model_path)
            except BaseException:  # an interruption too must not leave the data without its model
                data.place.unlink(missing_ok=True)
                raise
            finally:
                temporary.withdraw(data.place)

    @property
    def _model_path(self) -> Path:
        assert self._scratch is not None and self.target is not None
        return self._scratch.path / self.target.place.name

    @property
    def _data_path(self) -> Path:
        return self._model_path.with_name(self._model_path.name + DATA_SUFFIX)

    def _finish_data(self) -> None:
        """Copy the byte ranges of unchanged external tensors into the data file."""
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
            assert self.target is not None
            raise self.target.failure(problem) from None

    def _write(self, tensor: TensorProto, data: Array) -> None:
        assert self._data is not None and self.target is not None
        place = self._placed.get(id_of(tensor)) or self._room(data.nbytes)
        try:
            self._data.seek(place.offset)
            self._data.write(data.reshape(-1).view(np.uint8).data)
        except OSError as problem:
            raise self.target.failure(problem) from None
        self._placed[id_of(tensor)] = place

    def _room(self, length: int) -> Range:
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._end = offset + length
        return Range(self._data_path, offset, length)


def _set_external(tensor: TensorProto, location: str, place: Range) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", place.offset), ("length", place.length)):
        tensor.external_data.add(key=key, value=str(value))


def serialized(model: onnx.ModelProto) -> bytes:
    """A model as one string of bytes, if it is not too large for that."""
    try:
        return model.SerializeToString()
    except MemoryError:
        raise
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
