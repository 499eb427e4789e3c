"""An ONNX file out: the model with other weights, whole and verified under its name, or not there at all.

The result grows in a scratch directory beside the output, is read back and verified there, and is renamed into place
at the end. New weights are written to a file as they are made, and unchanged tensors are copied as byte ranges, so that
no model is ever whole in memory:

1. Where the input keeps its weights in external files, the output keeps them in one, `OUT.onnx.data`.
2. Else the new values of parked tensors (wire.py) wait in a file of the scratch directory, from which they go into the
   model when it is written.
3. A result for a pipe, a device or Python grows in memory, and beyond IN_MEMORY bytes in a temporary file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lsuv_cli import outputs
from lsuv_cli.errors import OutputError
from lsuv_cli.model import wire
from lsuv_cli.model.file import (
    ModelFile,
    byte_size,
    embed,
    from_place,
    id_of,
    is_elsewhere,
    is_external,
    load,
    moved,
    tensors,
)
from lsuv_cli.model.places import Held, Place, Range
from lsuv_cli.outputs import DATA_SUFFIX, Target
from lsuv_cli.scratch import Scratch
from lsuv_cli.spool import Spool, room

Array = NDArray[Any]

METADATA_PREFIX = "lsuv."
ALIGNMENT = 4096  # so that a tensor can be memory-mapped
IN_MEMORY = 1 << 27  # bytes of new weights in all, where no output is a file
MOVED_OUT = 1024  # a new tensor larger than this goes to the data file, where there is one


class Draft:
    """The output in the making. Use it as a context manager; without `publish` nothing remains of it."""

    def __init__(self, file: ModelFile, target: Target | None) -> None:
        self.file = file
        self.target = target
        self.result: ModelFile | None = None  # the finished model; None if its weights are in a file beside it
        self._scratch: Scratch | None = None
        self._data: _Weights | None = None  # the output's data file
        self._waiting: _Weights | None = None  # new values of parked tensors
        self._placed: dict[tuple[str, ...], Place] = {}
        self._held = 0  # bytes of new weights, where no output is a file

    def __enter__(self) -> Draft:
        if self.target is not None and not self.target.stream:
            try:
                self._scratch = Scratch(self.target.place.parent).__enter__()
                self._waiting = _Weights(self._scratch.path / f"{secrets.token_hex(8)}.waiting", self.target)
                if self.file.has_external_data:
                    self._data = _Weights(self._data_path, self.target)
            except BaseException as problem:  # an interruption too: `with` calls no __exit__ if __enter__ fails
                self.__exit__(None, None, None)
                if isinstance(problem, OSError):
                    raise self.target.failure(problem) from None
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for weights in (self._data, self._waiting):
            if weights is not None:
                weights.file.close()
        if self._scratch is not None:
            self._scratch.__exit__(kind, value, trace)

    # Tensors

    def array(self, tensor: TensorProto) -> Array:
        """A tensor's values as they are now."""
        place = self._placed.get(id_of(tensor))
        if isinstance(place, Range):
            self._flush()
            dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            return np.memmap(place.path, dtype, "r", place.offset, tuple(tensor.dims))
        return self.file.array(tensor) if place is None else from_place(tensor, place)

    def store(self, tensor: TensorProto, array: Array) -> None:
        """Give a tensor of the model other values (of its own shape and type)."""
        data = np.ascontiguousarray(array, helper.tensor_dtype_to_np_dtype(tensor.data_type))
        if is_elsewhere(tensor):
            self._write(tensor, data, self._data if is_external(tensor) else self._waiting)
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
            self._write(tensor, data, self._data)
        elif body is self.file.proto.graph and data.nbytes >= wire.PARKED_BYTES:
            wire.park(tensor, f"new {name}")
            self._write(tensor, data, self._waiting)
        else:
            tensor.raw_data = data.tobytes()
        # Before IR version 4 every initializer has to be listed as an input as well.
        if self.file.proto.ir_version < 4 and body is self.file.proto.graph:
            body.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))

    # The file

    def finish(self, metadata: dict[str, str]) -> ModelFile:
        """Write the unchanged tensors and the model itself. Returns the model to verify, read back if it is a file."""
        # Entries of an earlier run are dropped. `str`, because protobuf gives a key that is not UTF-8 as bytes.
        kept = [p for p in self.file.proto.metadata_props if not str(p.key).startswith(METADATA_PREFIX)]
        kept += [onnx.StringStringEntryProto(key=METADATA_PREFIX + k, value=v) for k, v in metadata.items()]
        if self._data is None:
            self._bring_in()
            proto = self.file.proto
        else:
            self._finish_data()
            proto = onnx.ModelProto()
            proto.CopyFrom(self.file.proto)
            for tensor in tensors(proto):
                if is_external(tensor):
                    place = self._placed[id_of(tensor)]
                    assert isinstance(place, Range)
                    _set_external(tensor, self._data_path.name, place)
        del proto.metadata_props[:]
        proto.metadata_props.extend(kept)
        if self._scratch is None:
            self.result = self.in_memory()
            return self.result
        written = self._written(proto)
        self.result = None if self._data is not None else written
        return written

    def in_memory(self) -> ModelFile:
        """The model as it is now; its parked tensors stay where they are."""
        self._flush()
        proto = self.file.proto
        parked = {wire.key_of(t): self._place(t) for t in tensors(proto) if wire.is_parked(t)}
        beside = self.file.directory if any(map(is_external, tensors(proto))) else None
        return ModelFile(proto, beside, "the result", parked)

    def _written(self, proto: onnx.ModelProto) -> ModelFile:
        """Write the model, and read it back."""
        assert self.target is not None
        self._flush()
        try:
            with self._model_path.open("wb") as file:
                file.writelines(wire.chunks(proto, self._place))
                file.flush()
                os.fsync(file.fileno())
            if self._data is not None:
                os.fsync(self._data.file.fileno())
        except OSError as problem:
            raise self.target.failure(problem) from None
        return load(self._model_path)

    def _place(self, tensor: TensorProto) -> Place:
        """Where the bytes of a parked tensor are now."""
        return self._placed.get(id_of(tensor)) or self.file.place(tensor)

    def _bring_in(self) -> None:
        """Make external tensors parked ones, or embed them, where the whole model goes to one place."""
        for tensor in wire.main_tensors(self.file.proto.graph):
            if is_external(tensor) and tensor.data_type in wire.PLAIN:
                place = self._place(tensor)
                wire.park(tensor, f"brought in {len(self._placed)}")
                self._placed[id_of(tensor)] = place
        for tensor in tensors(self.file.proto):
            if is_external(tensor):
                embed(tensor, self._place(tensor).read())

    def publish(self) -> None:
        """Rename the finished files into place, or send the model to its pipe or device."""
        target = self.target
        if target is None:
            return
        if self._scratch is None:
            assert self.result is not None
            target.send(self.result.chunks())
            return
        if self._data is None:
            assert self.result is not None
            outputs.publish(target, self._model_path, None)
            self.result = moved(self.result, target.place)
            return
        if os.name == "nt":  # an open file cannot be renamed there
            self._data.file.close()
        outputs.publish(target, self._model_path, self._data_path)

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
        for tensor in tensors(self.file.proto):
            key = id_of(tensor)
            if is_external(tensor) and key not in self._placed:
                source = self.file.place(tensor)
                self._placed[key] = self._data.write(source.chunks(), source.length)

    def _flush(self) -> None:
        for weights in (self._data, self._waiting):
            if weights is not None:
                weights.flush()

    def _write(self, tensor: TensorProto, data: Array, weights: _Weights | None) -> None:
        """Put a tensor's new values into a file of weights, or keep them in memory if there is none."""
        key, flat = id_of(tensor), data.reshape(-1).view(np.uint8).data
        weights = weights or self._spooled(flat.nbytes)
        if weights is None:
            self._placed[key] = Held(memoryview(bytes(flat)))
            return
        place = self._placed.get(key)
        self._placed[key] = weights.write([flat], flat.nbytes, place if isinstance(place, Range) else None)

    def _spooled(self, more: int) -> _Weights | None:
        """A temporary file for new weights, once they are too large for memory; None before, or if there is no room."""
        self._held += more
        if self._waiting is None and self._held > IN_MEMORY:
            with contextlib.suppress(OSError):
                if room() < sum(map(byte_size, tensors(self.file.proto))):
                    return None
                spool = Spool("weights")
                self._waiting = _Weights(spool.path, self.target, spool)
        return self._waiting


class _Weights:
    """A file of tensors that grows."""

    def __init__(self, path: Path, target: Target | None, spool: Spool | None = None) -> None:
        self.file: IO[bytes] = path.open("w+b")
        self._path = path
        self._target = target
        self._spool = spool
        self._end = 0

    def write(self, data: Iterable[bytes | memoryview], length: int, place: Range | None = None) -> Range:
        """Write a tensor to its place, or to a new one at the end."""
        if place is None:
            place = Range(self._path, -(-self._end // ALIGNMENT) * ALIGNMENT, length, spool=self._spool)
            self._end = place.offset + length
        try:
            self.file.seek(place.offset)
            self.file.writelines(data)
        except OSError as problem:
            raise self._failure(problem) from None
        return place

    def _failure(self, problem: OSError) -> OutputError:
        if self._target is not None and self._spool is None:
            return self._target.failure(problem)
        return OutputError(f"the temporary file {self._path} cannot be written: {problem.strerror or problem}")

    def flush(self) -> None:
        try:
            self.file.flush()
        except OSError as problem:
            raise self._failure(problem) from None


def _set_external(tensor: TensorProto, location: str, place: Range) -> None:
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", place.offset), ("length", place.length)):
        tensor.external_data.add(key=key, value=str(value))


def earlier_metadata(model: onnx.ModelProto) -> dict[str, str]:
    """What an earlier run wrote into a model about itself; kept by a run that changes no weight."""
    entries = {str(p.key): p.value for p in model.metadata_props}
    return {k.removeprefix(METADATA_PREFIX): v for k, v in entries.items() if k.startswith(METADATA_PREFIX)}
