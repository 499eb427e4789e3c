"""An ONNX file in: its structure without its weights, and each tensor's bytes when they are asked for.

The raw data of a large tensor stays in the file itself (wire.py). External data is read as ranges of plain files that
lie beside the model. A model that names anything else (an absolute path, a way out of its directory, a link) is
refused, because onnx has been tricked that way again and again (CVE-2022-25882, CVE-2024-27318, CVE-2025-51480).
"""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from lsuv_cli.errors import ModelError
from lsuv_cli.model import wire
from lsuv_cli.model.places import Held, Place, Range, stamp_of
from lsuv_cli.outputs import absolute
from lsuv_cli.spool import Spool

Array = NDArray[Any]

# Bits per value of the types that pack several values into a byte. Older versions of onnx lack some of them.
PACKED = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
BITS = {getattr(TensorProto, name): bits for name, bits in PACKED.items() if hasattr(TensorProto, name)}
COMPLEX: tuple[int, ...] = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
STRIPPED, WEIGHTLESS = "lsuv.stripped", "TRT_WEIGHTLESS"  # in the doc_string of a tensor without values
STREAM = "<stdin>"  # the name of a model that came as bytes
MOST_BYTES = 1 << 50  # of a tensor without values; a damaged shape can promise anything
VALUES = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


class ModelFile:
    """A model whose external and parked tensors stay where they are until they are read.

    `parked` tells where the parked ones are, by the keys of their marks. With `without_weights`, tensors whose data
    file is missing are among the absent ones.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        directory: Path | None,
        name: str,
        parked: Mapping[str, Place] | None = None,
        *,
        without_weights: bool = False,
    ) -> None:
        self.proto = proto
        self.directory = directory
        self.name = name  # for messages
        self.given: bytes | Spool | None = None  # the file's bytes, if they came without a path
        self.parked = parked or {}
        self.ranges: dict[tuple[str, ...], Range] = {}  # of external tensors
        self._made: set[Path] = set()  # files of values that were made up
        self.without_weights = without_weights
        self.absent: list[TensorProto] = []  # tensors without values: stripped, or in a missing file
        self.filled = False  # whether values were made up for them
        for tensor in tensors(proto):
            if is_stripped(tensor) or (without_weights and self._is_missing(tensor)):
                self._check_shape(tensor)
                self.absent.append(tensor)
            elif is_external(tensor):
                self.ranges[id_of(tensor)] = self._range(tensor)
            elif problem := _disagreement(tensor, self.parked.get(wire.key_of(tensor))):
                raise ModelError(f"{name}: tensor {tensor.name!r} {problem}; it is damaged, export the model again")

    @property
    def path(self) -> Path | None:
        """Where the model was read from; None if it was in memory."""
        return None if self.directory is None else self.directory / Path(self.name).name

    @property
    def has_external_data(self) -> bool:
        return bool(self.ranges)

    @property
    def data_files(self) -> set[Path]:
        """The files that the model came with."""
        return {r.path for r in self.ranges.values()} - self._made

    def copy(self) -> ModelFile:
        """The same model to be edited apart; tensors that stay where they are cost nothing."""
        copied = onnx.ModelProto()
        copied.CopyFrom(self.proto)
        return ModelFile(copied, self.directory, self.name, self.parked, without_weights=self.without_weights)

    def place(self, tensor: TensorProto) -> Place:
        """Where the bytes of an external or a parked tensor are."""
        return self.ranges[id_of(tensor)] if is_external(tensor) else self.parked[wire.key_of(tensor)]

    def put(self, tensor: TensorProto, where: Range) -> None:
        """Make a tensor an external one whose bytes lie there."""
        embed(tensor, b"")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", where.path.name), ("offset", where.offset), ("length", where.length)):
            tensor.external_data.add(key=key, value=str(value))
        self.ranges[id_of(tensor)] = where
        self._made.add(where.path)

    def array(self, tensor: TensorProto) -> Array:
        """A tensor's values; NaN for one that was stripped."""
        if self.absent and is_stripped(tensor):
            return np.broadcast_to(np.array(np.nan, np.float32), tuple(tensor.dims))
        if is_elsewhere(tensor):
            return from_place(tensor, self.place(tensor))
        try:
            return numpy_helper.to_array(tensor)
        except (ValueError, TypeError) as problem:
            raise ModelError(f"{self.name}: tensor {tensor.name!r} is damaged: {problem}") from problem

    def chunks(self) -> Iterator[bytes | memoryview]:
        """The model as the bytes of a file, which are read while they are written."""
        return wire.chunks(self.proto, self.place)

    def embedded(self) -> onnx.ModelProto:
        """The model with its parked tensors in the message."""
        return wire.embedded(self.proto, self.place)

    def _is_missing(self, tensor: TensorProto) -> bool:
        """Whether an external tensor's file is not there."""
        if not is_external(tensor):
            return False
        location = next((e.value for e in tensor.external_data if e.key == "location"), "")
        if self.directory is None:
            return True
        try:
            return isinstance(location, str) and bool(location) and not (self.directory / location).exists()
        except (OSError, ValueError):
            return False

    def _check_shape(self, tensor: TensorProto) -> None:
        size = byte_size(tensor) if min(tensor.dims, default=0) >= 0 else -1
        if not 0 <= size <= MOST_BYTES:
            raise ModelError(f"{self.name}: tensor {tensor.name!r} has no values and the shape {list(tensor.dims)[:8]}")

    def _range(self, tensor: TensorProto) -> Range:
        """The place of an external tensor, checked."""

        def wrong(what: str, todo: str) -> ModelError:
            return ModelError(f"{self.name}: external data of tensor {tensor.name!r} {what}; {todo}")

        keys = {e.key: e.value for e in tensor.external_data}
        location = keys.get("location", "")
        if self.directory is None:
            raise wrong("cannot be found", "give the model as a file beside its data, not as a stream")
        if not location or not isinstance(location, str) or "\0" in location:  # bytes, if it is not UTF-8
            raise wrong("names no file", "export the model again")
        relative = Path(location.replace("\\", "/"))
        if relative.is_absolute() or ".." in relative.parts or relative.drive:
            raise wrong(f"lies outside the model's directory ({location})", "move it beside the model")
        path = self.directory / relative
        try:
            for part in [path, *path.parents][: len(relative.parts)]:
                if part.is_symlink():
                    raise wrong(
                        f"is behind a symbolic link ({part})", "copy model and data with cp -L and use the copy"
                    )
            status = path.stat()
        except OSError as problem:
            todo = "keep it beside the model"
            if isinstance(problem, FileNotFoundError):
                todo += ", or let `lsuv init` make the values up with `without_weights`"
            raise wrong(f"cannot be read ({path}: {problem.strerror})", todo) from None
        if not path.is_file():
            raise wrong(f"is not a file ({path})", "keep it beside the model")
        if status.st_nlink > 1:
            raise wrong(f"is a hard link ({path})", "copy model and data with cp and use the copy")
        try:
            offset = int(keys.get("offset") or 0)
            length = int(keys["length"]) if keys.get("length") else byte_size(tensor)
        except ValueError:
            raise wrong("has an offset or length that is no number", "export the model again") from None
        if offset < 0 or length < 0 or offset + length > status.st_size:
            raise wrong(
                f"ends at byte {offset + length} of {path}, which has {status.st_size}",
                "the file is incomplete: copy or export it again",
            )
        if length != byte_size(tensor):
            raise wrong(f"has {length} bytes, its shape wants {byte_size(tensor)}", "export the model again")
        return Range(path, offset, length)


def from_place(tensor: TensorProto, place: Place) -> Array:
    """The values of a tensor whose bytes are elsewhere."""
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if math.prod(tensor.dims) * dtype.itemsize == place.length:
        return place.array(dtype).reshape(tuple(tensor.dims))
    # Packed: two or more values in a byte.
    whole = TensorProto(dims=tensor.dims, data_type=tensor.data_type, raw_data=place.read())
    return numpy_helper.to_array(whole)


def load(source: str | os.PathLike[str] | bytes | onnx.ModelProto, *, without_weights: bool = False) -> ModelFile:
    """Read a model from a path, from bytes, or take a copy of one in memory.

    With `without_weights`, tensors whose data file is missing are listed as `absent`.
    """
    if isinstance(source, onnx.ModelProto):
        return _copy_of(source, without_weights)
    if isinstance(source, bytes):
        held = _from_bytes(source, None, STREAM, without_weights)
        held.given = source
        return held
    path = Path(source)
    called = STREAM if isinstance(source, Spool) else str(path)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):  # a pipe is read once
                return _from_bytes(file.read(), absolute(path).parent, called, without_weights)
            model, found = _parsed(file, status.st_size, called)
    except IsADirectoryError:
        raise ModelError(f"{path} is a directory; give an ONNX file") from None
    except (OSError, ValueError) as problem:  # a NUL in the name
        absolute(path)
        raise ModelError(f"{path}: {getattr(problem, 'strerror', None) or problem}") from None
    directory = absolute(path).parent
    here, stamp = directory / path.name, stamp_of(status)
    spool = source if isinstance(source, Spool) else None
    parked = {key: Range(here, offset, length, stamp, spool) for key, (offset, length) in found.items()}
    beside = directory if spool is None else None  # no data file is beside a stream
    made = ModelFile(model, beside, called, parked, without_weights=without_weights)
    made.given = spool
    return made


def moved(file: ModelFile, path: Path) -> ModelFile:
    """A model whose file was renamed, with its tensors where they are now."""
    parked = {key: replace(place, path=path) for key, place in file.parked.items() if isinstance(place, Range)}
    return ModelFile(file.proto, path.parent, str(path), parked)


def _copy_of(model: onnx.ModelProto, without_weights: bool) -> ModelFile:
    """A copy of a model in memory. As bytes it can have parked tensors, but protobuf limits them to 2 GiB."""
    try:
        data = _checked(model, "model").SerializeToString()
    except (EncodeError, ValueError):  # by protobuf's version
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return ModelFile(copy, None, "model", without_weights=without_weights)
    return _from_bytes(data, None, "model", without_weights)


def _from_bytes(data: bytes, directory: Path | None, name: str, without_weights: bool) -> ModelFile:
    model, found = _parsed(io.BytesIO(data), len(data), name)
    whole = memoryview(data)
    parked = {key: Held(whole[offset : offset + length]) for key, (offset, length) in found.items()}
    return ModelFile(model, directory, name, parked, without_weights=without_weights)


def tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model, including tensors in attributes, inner graphs, functions and training graphs."""
    yield from _graph_tensors(model.graph)
    for training in model.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)
    for function in model.functions:
        yield from _attribute_tensors(function.attribute_proto)
        for node in function.node:
            yield from _attribute_tensors(node.attribute)


def id_of(tensor: TensorProto) -> tuple[str, ...]:
    """Identifies an external tensor by where its bytes lie; names repeat between inner graphs."""
    return (tensor.name, *(f"{e.key}={e.value}" for e in tensor.external_data))


def is_external(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def is_elsewhere(tensor: TensorProto) -> bool:
    """Whether a tensor's values are not in the message: in a data file, or parked."""
    return is_external(tensor) or wire.is_parked(tensor)


def is_stripped(tensor: TensorProto) -> bool:
    """Whether a tensor's values were taken out, by `lsuv strip` or by Polygraphy's `surgeon weight-strip`."""
    if is_elsewhere(tensor) or WEIGHTLESS not in str(tensor.doc_string):
        return False
    return 0 not in tensor.dims and not tensor.raw_data and not any(len(getattr(tensor, field)) for field in VALUES)


def stripped_mark(role: str) -> str:
    """The doc_string of a tensor without values: our word, the role, and Polygraphy's mark."""
    return f"{STRIPPED} {role} {WEIGHTLESS}/"


def embed(tensor: TensorProto, data: bytes) -> None:
    """Give a tensor these bytes, in the model itself."""
    for field in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data"):
        tensor.ClearField(field)
    if is_external(tensor):
        tensor.ClearField("data_location")
    tensor.raw_data = data


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _attribute_tensors(node.attribute)


def _attribute_tensors(attributes: Iterable[AttributeProto]) -> Iterator[TensorProto]:
    for held in attributes:
        if held.ref_attr_name:  # of a function's node: the call has the value
            continue
        match held.type:
            case AttributeProto.TENSOR:
                yield held.t
            case AttributeProto.TENSORS:
                yield from held.tensors
            case AttributeProto.SPARSE_TENSOR:
                yield from (held.sparse_tensor.values, held.sparse_tensor.indices)
            case AttributeProto.SPARSE_TENSORS:
                for sparse in held.sparse_tensors:
                    yield from (sparse.values, sparse.indices)
            case AttributeProto.GRAPH:
                yield from _graph_tensors(held.g)
            case AttributeProto.GRAPHS:
                for graph in held.graphs:
                    yield from _graph_tensors(graph)


def _disagreement(tensor: TensorProto, parked: Place | None) -> str:
    """How an embedded or parked tensor's values disagree with its shape; empty if they do not."""
    if min(tensor.dims, default=0) < 0:
        return f"has the shape {list(tensor.dims)}"
    if wire.is_parked(tensor) and parked is None:  # by a file that has such a mark itself
        return "has a mark in place of its values"
    if parked is not None or tensor.HasField("raw_data"):
        # Each access to raw_data copies it, so there is only one.
        held, wanted = parked.length if parked is not None else len(tensor.raw_data), byte_size(tensor)
        return "" if held == wanted else f"has {held} bytes, its shape wants {wanted}"
    held = sum(len(getattr(tensor, field)) for field in VALUES)
    wanted = math.prod(tensor.dims) * (2 if tensor.data_type in COMPLEX else 1)
    if held == wanted or (tensor.data_type in BITS and held == byte_size(tensor)):
        return ""
    return f"has {held} values, its shape {list(tensor.dims)} wants {wanted}"


def byte_size(tensor: TensorProto) -> int:
    """The bytes of a tensor's values in ONNX's raw layout."""
    count = math.prod(tensor.dims)
    if tensor.data_type in BITS:
        return (count * BITS[tensor.data_type] + 7) // 8
    try:
        return count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except (KeyError, TypeError):
        raise ModelError(f"tensor {tensor.name!r} has the unknown type {tensor.data_type}") from None


def _parsed(stream: IO[bytes], size: int, name: str) -> tuple[onnx.ModelProto, dict[str, tuple[int, int]]]:
    """A model with its large tensors parked, and the offset and length of each by the key of its mark."""
    if not size:
        raise ModelError(f"{name} is empty; give an ONNX file")
    data, found = wire.without_large_tensors(stream, size)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise ModelError(f"{name} is not an ONNX file, or is damaged or cut off") from None
    return _checked(model, name), found


def _checked(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    if not model.HasField("graph") or not (model.graph.node or model.graph.initializer):
        raise ModelError(f"{name} holds no graph; give an ONNX model")
    if not model.opset_import:
        raise ModelError(f"{name} imports no operator set; it is damaged or not an ONNX model")
    for text in _names(model):
        if not isinstance(text, str):  # protobuf gives text that it cannot decode as bytes
            raise ModelError(f"{name}: the name {text!r} is not UTF-8, as ONNX wants it; export the model again")
    return model


def _names(model: onnx.ModelProto) -> Iterator[str | bytes]:
    """Every name and domain in a model. Descriptions and metadata are no names and may hold any bytes."""
    yield from (entry.domain for entry in model.opset_import)
    yield from _graph_names(model.graph)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output, *function.attribute)
        yield from (entry.domain for entry in function.opset_import)
        yield from (text for node in function.node for text in _node_names(node))


def _graph_names(graph: onnx.GraphProto) -> Iterator[str | bytes]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    yield from (text for node in graph.node for text in _node_names(node))


def _node_names(node: onnx.NodeProto) -> Iterator[str | bytes]:
    yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
    for held in node.attribute:
        yield held.name
        yield held.ref_attr_name
        for graph in (*([held.g] if held.type == AttributeProto.GRAPH else ()), *held.graphs):
            yield from _graph_names(graph)
