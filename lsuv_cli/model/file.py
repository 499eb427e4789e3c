"""An ONNX file in: its structure without its weights, and each tensor's bytes when they are asked for.

External data is read as ranges of plain files that lie beside the model. A model that names anything else
(an absolute path, a way out of its directory, a link) is refused, because onnx has been tricked that way again
and again (CVE-2022-25882, CVE-2024-27318, CVE-2025-51480).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from lsuv_cli.errors import ModelError
from lsuv_cli.outputs import absolute

Array = NDArray[Any]

# Bits per value of the types that pack several values into a byte. Older versions of onnx lack some of them.
PACKED = {"INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "UINT2": 2, "FLOAT6E2M3": 6, "FLOAT6E3M2": 6}
BITS = {getattr(TensorProto, name): bits for name, bits in PACKED.items() if hasattr(TensorProto, name)}
COMPLEX: tuple[int, ...] = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
STRIPPED, WEIGHTLESS = "lsuv.stripped", "TRT_WEIGHTLESS"  # in the doc_string of a tensor without values
MOST_BYTES = 1 << 50  # of a tensor without values; a damaged shape can promise anything
VALUES = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


@dataclass(frozen=True)
class Range:
    """Where an external tensor's bytes lie."""

    path: Path
    offset: int
    length: int


class ModelFile:
    """A model whose external tensors stay on disk until they are read."""

    def __init__(
        self, proto: onnx.ModelProto, directory: Path | None, name: str, *, without_weights: bool = False
    ) -> None:
        self.proto = proto
        self.directory = directory
        self.name = name  # for messages
        self.ranges: dict[tuple[str, ...], Range] = {}
        self.absent: list[TensorProto] = []  # tensors without values: stripped, or in a missing file
        for tensor in tensors(proto):
            if is_stripped(tensor) or (without_weights and self._is_missing(tensor)):
                self._check_shape(tensor)
                self.absent.append(tensor)
            elif is_external(tensor):
                self.ranges[id_of(tensor)] = self._range(tensor)
            elif problem := _disagreement(tensor):
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
        return {r.path for r in self.ranges.values()}

    def place(self, tensor: TensorProto, where: Range) -> None:
        """Make a tensor an external one whose bytes lie there."""
        embed(tensor, b"")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", where.path.name), ("offset", where.offset), ("length", where.length)):
            tensor.external_data.add(key=key, value=str(value))
        self.ranges[id_of(tensor)] = where

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

    def raw(self, tensor: TensorProto) -> bytes:
        """A tensor's bytes in ONNX's raw layout."""
        if is_external(tensor):
            where = self.ranges[id_of(tensor)]
            with where.path.open("rb") as file:
                file.seek(where.offset)
                data = file.read(where.length)
            if len(data) != where.length:
                raise ModelError(f"{where.path}: the file became shorter while it was read")
            return data
        if tensor.HasField("raw_data"):
            return tensor.raw_data
        return numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data

    def array(self, tensor: TensorProto) -> Array:
        """A tensor's values."""
        if not is_external(tensor):
            try:
                return numpy_helper.to_array(tensor)
            except (ValueError, TypeError) as problem:
                raise ModelError(f"{self.name}: tensor {tensor.name!r} is damaged: {problem}") from problem
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        where = self.ranges[id_of(tensor)]
        if math.prod(tensor.dims) * dtype.itemsize != where.length:  # packed: two or more values in a byte
            whole = TensorProto()
            whole.CopyFrom(tensor)
            whole.ClearField("external_data")
            whole.data_location = TensorProto.DEFAULT
            whole.raw_data = self.raw(tensor)
            return numpy_helper.to_array(whole)
        # Read, not memory-mapped: if another program truncates the file, access to a mapping kills this process.
        array = np.fromfile(where.path, dtype, math.prod(tensor.dims), offset=where.offset)
        if array.nbytes != where.length:
            raise ModelError(f"{where.path}: the file became shorter while it was read")
        return array.reshape(tuple(tensor.dims))

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
            raise wrong(f"cannot be read ({path}: {problem.strerror})", "keep it beside the model") from None
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


def load(source: str | os.PathLike[str] | bytes | onnx.ModelProto, *, without_weights: bool = False) -> ModelFile:
    """Read a model from a path, from bytes, or take a copy of one in memory.

    With `without_weights`, tensors whose data file is missing are listed as `absent`.
    """
    if isinstance(source, onnx.ModelProto):
        copy = onnx.ModelProto()
        copy.CopyFrom(source)
        return ModelFile(_checked(copy, "model"), None, "model", without_weights=without_weights)
    if isinstance(source, bytes):
        return ModelFile(_parsed(source, "<stdin>"), None, "<stdin>", without_weights=without_weights)
    path = Path(source)
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise ModelError(f"{path} is a directory; give an ONNX file") from None
    except (OSError, ValueError) as problem:  # a NUL in the name
        absolute(path)
        raise ModelError(f"{path}: {getattr(problem, 'strerror', None) or problem}") from None
    model = _parsed(data, str(path))
    return ModelFile(model, absolute(path).parent, str(path), without_weights=without_weights)


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


def is_stripped(tensor: TensorProto) -> bool:
    """Whether a tensor's values were taken out, by `lsuv strip` or by Polygraphy's `surgeon weight-strip`."""
    if is_external(tensor) or WEIGHTLESS not in str(tensor.doc_string):
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


def _disagreement(tensor: TensorProto) -> str:
    """How an embedded tensor's values disagree with its shape; empty if they do not."""
    if min(tensor.dims, default=0) < 0:
        return f"has the shape {list(tensor.dims)}"
    if tensor.HasField("raw_data"):
        # Each access to raw_data copies it, so there is only one.
        held, wanted = len(tensor.raw_data), byte_size(tensor)
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


def _parsed(data: bytes, name: str) -> onnx.ModelProto:
    if not data:
        raise ModelError(f"{name} is empty; give an ONNX file")
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise ModelError(f"{name} is not an ONNX file, or is damaged or cut off") from None
    return _checked(model, name)


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
