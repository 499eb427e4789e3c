"""ONNX files as bytes: a model is parsed without its large tensors, and written without ever being one string.

1. Reading: the raw data of a large tensor stays where it is, in the file or in the bytes that the model came in. The
   message that is parsed has a mark in its place, an entry of `external_data` (`is_parked`). Only
   initializers of the main graph and the values of its Constant nodes are parked, because the working copy refers to
   these as tensors; all others stand inside of nodes, which are run as they are.
2. Writing: the message is serialized with its marks, and each mark is replaced by the tensor's bytes while they are
   copied. The result is byte for byte what protobuf would have written.

Messages are walked field by field (https://protobuf.dev/programming-guides/encoding/). Whatever is unusual there is
left to protobuf, which then parses the whole file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO

import onnx
from google.protobuf.message import EncodeError
from onnx import TensorProto

from lsuv_cli.errors import OutputError
from lsuv_cli.model.places import Held, Place, Range

PARKED_BYTES = 1 << 14  # a tensor with at least as many bytes of raw data is parked
MARK = "\0lsuv: parked"  # the key of the mark; a file name cannot have a NUL
LARGEST_MESSAGE = (1 << 31) - 1  # protobuf's limit
TOO_LARGE = (
    "the result is over protobuf's limit of 2 GiB; save the input with external data "
    "(onnx.save_model(..., save_as_external_data=True)) and write to a file"
)

# The types whose values numpy holds as they are stored; others pack several values into a byte, or are no numbers.
PLAIN = frozenset(
    {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.INT8,
     TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, TensorProto.INT32, TensorProto.UINT32,
     TensorProto.INT64, TensorProto.UINT64}
)  # fmt: skip

# Numbers of the fields on the way to a tensor, and of a tensor's own.
GRAPH_OF_MODEL = 7
NODE_OF_GRAPH, INITIALIZER_OF_GRAPH = 1, 5
OP_TYPE_OF_NODE, ATTRIBUTE_OF_NODE, DOMAIN_OF_NODE = 4, 5, 7
NAME_OF_ATTRIBUTE, TENSOR_OF_ATTRIBUTE = 1, 5
INSIDE = {
    "model": {GRAPH_OF_MODEL: "graph"},
    "graph": {INITIALIZER_OF_GRAPH: "tensor", NODE_OF_GRAPH: "node"},
    "node": {ATTRIBUTE_OF_NODE: "attribute"},
    "attribute": {TENSOR_OF_ATTRIBUTE: "tensor"},
}
DATA_TYPE, RAW_DATA, EXTERNAL_DATA, DATA_LOCATION = 2, 9, 13, 14
VALUE_FIELDS = frozenset({4, 5, 6, 7, 10, 11})  # float_data and its like, by number and by name
VALUES = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")

LENGTH = 2  # the wire type of text, bytes and messages
LONGEST_VARINT = 10

Section = bytes | memoryview | Place


class _Unusual(Exception):
    """Something that is left to protobuf."""


@dataclass(frozen=True)
class _Field:
    """One field of a message: where it starts, and where its value starts and stops."""

    number: int
    kind: int
    start: int
    body: int
    stop: int
    value: int  # of a varint


def is_parked(tensor: TensorProto) -> bool:
    """Whether a tensor's raw data is elsewhere."""
    return any(entry.key == MARK for entry in tensor.external_data)


def key_of(tensor: TensorProto) -> str:
    """The key of a parked tensor's mark; empty for any other tensor."""
    return next((entry.value for entry in tensor.external_data if entry.key == MARK), "")


def park(tensor: TensorProto, key: str) -> None:
    """Take a tensor's values out of a message; a mark with this key stays in their place."""
    for field in (*VALUES, "raw_data", "external_data"):
        tensor.ClearField(field)
    if tensor.data_location == TensorProto.EXTERNAL:
        tensor.ClearField("data_location")
    tensor.external_data.add(key=MARK, value=key)


def unpark(tensor: TensorProto, data: bytes) -> None:
    """Put raw data in the place of the mark."""
    kept = [entry for entry in tensor.external_data if entry.key != MARK]
    del tensor.external_data[:]
    tensor.external_data.extend(kept)
    tensor.raw_data = data


def without_large_tensors(stream: IO[bytes], size: int) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """A serialized model with its large tensors parked, and by their keys the offset and length of each."""
    parked: dict[str, tuple[int, int]] = {}
    try:
        whole = _Field(GRAPH_OF_MODEL, LENGTH, 0, 0, size, 0)
        return _rewritten(stream, whole, "model", parked), parked
    except _Unusual:
        stream.seek(0)
        return stream.read(), {}


def chunks(model: onnx.ModelProto, place_of: Callable[[TensorProto], Place]) -> Iterator[bytes | memoryview]:
    """A model as the bytes of a file, a few megabytes at a time; `place_of` tells where a parked tensor's bytes are."""
    try:
        sections = _sections(model, place_of)
    except (EncodeError, ValueError) as problem:  # by protobuf's version
        raise OutputError(TOO_LARGE) from problem
    if _length(sections) > LARGEST_MESSAGE:
        raise OutputError(TOO_LARGE)
    for section in sections:  # before a stream gets its first byte
        if isinstance(section, Range):
            section.check()
    return (
        chunk
        for section in sections
        for chunk in (section.chunks() if isinstance(section, Range | Held) else [section])
    )


def embedded(model: onnx.ModelProto, place_of: Callable[[TensorProto], Place]) -> onnx.ModelProto:
    """A copy of a model that holds all of its tensors itself."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in main_tensors(copy.graph):
        if is_parked(tensor):
            unpark(tensor, place_of(tensor).read())
    return copy


def main_tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    """The tensors that may be parked: initializers, and the values of Constant nodes."""
    yield from graph.initializer
    for node in graph.node:
        if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].name == "value":
            yield node.attribute[0].t


# Reading


def _rewritten(stream: IO[bytes], message: _Field, kind: str, parked: dict[str, tuple[int, int]]) -> bytes:
    """A message of some kind with the large tensors inside parked, all else as it is."""
    if not _leads_to_tensors(stream, message, kind):
        return _copied(stream, message.body, message.stop)
    made: list[bytes] = []
    done = message.body
    for field in _fields(stream, message.body, message.stop):
        if field.kind != LENGTH or field.number not in INSIDE[kind] or field.stop - field.body < PARKED_BYTES:
            continue
        deeper = INSIDE[kind][field.number]
        if deeper == "tensor":
            part = _parked_tensor(stream, field, parked)
        else:
            part = _rewritten(stream, field, deeper, parked)
        made += [_copied(stream, done, field.start), _head(field.number, len(part)), part]
        done = field.stop
    return b"".join([*made, _copied(stream, done, message.stop)])


def _leads_to_tensors(stream: IO[bytes], message: _Field, kind: str) -> bool:
    """Of nodes and attributes, only the `value` of a Constant is a tensor of the working copy."""
    if kind not in {"node", "attribute"}:
        return True
    held = list(_fields(stream, message.body, message.stop))
    if sum(f.number in INSIDE[kind] for f in held) != 1:
        return False
    if kind == "attribute":
        return _texts(stream, held, NAME_OF_ATTRIBUTE) == [b"value"]
    standard = _texts(stream, held, DOMAIN_OF_NODE) in ([], [b""], [b"ai.onnx"])
    return standard and _texts(stream, held, OP_TYPE_OF_NODE) == [b"Constant"]


def _parked_tensor(stream: IO[bytes], field: _Field, parked: dict[str, tuple[int, int]]) -> bytes:
    """A tensor without its raw data if that is large and nothing about the tensor is unusual."""
    held = list(_fields(stream, field.body, field.stop))
    raw = [f for f in held if f.number == RAW_DATA and f.kind == LENGTH]
    kinds = [f.value for f in held if f.number == DATA_TYPE]
    elsewhere = any(f.value for f in held if f.number == DATA_LOCATION)
    others = any(f.number in VALUE_FIELDS or f.number == EXTERNAL_DATA for f in held)
    if len(raw) != 1 or len(kinds) != 1 or kinds[0] not in PLAIN or elsewhere or others:
        return _copied(stream, field.body, field.stop)
    (data,) = raw
    if data.stop - data.body < PARKED_BYTES:
        return _copied(stream, field.body, field.stop)
    key = str(data.body)
    parked[key] = data.body, data.stop - data.body
    mark = TensorProto()
    mark.external_data.add(key=MARK, value=key)
    around = _copied(stream, field.body, data.start) + _copied(stream, data.stop, field.stop)
    return around + mark.SerializeToString()


def _fields(stream: IO[bytes], start: int, stop: int) -> Iterator[_Field]:
    """The fields of the message between two positions."""
    position = start
    while position < stop:
        stream.seek(position)
        tag = _varint(stream)
        body, number, kind, value = stream.tell(), tag >> 3, tag & 7, 0
        match kind:
            case 0:  # VARINT
                value = _varint(stream)
                end = stream.tell()
            case 1:  # FIXED64
                end = body + 8
            case 2:  # LENGTH
                size = _varint(stream)
                body = stream.tell()
                end = body + size
            case 5:  # FIXED32
                end = body + 4
            case _:
                raise _Unusual
        if end > stop or not number:
            raise _Unusual
        yield _Field(number, kind, position, body, end, value)
        position = end


def _varint(stream: IO[bytes]) -> int:
    value = 0
    for k in range(LONGEST_VARINT):
        byte = stream.read(1)
        if not byte:
            raise _Unusual
        value |= (byte[0] & 0x7F) << 7 * k
        if byte[0] < 0x80:
            return value
    raise _Unusual


def _texts(stream: IO[bytes], fields: Iterable[_Field], number: int) -> list[bytes]:
    return [_copied(stream, f.body, f.stop) for f in fields if f.number == number and f.kind == LENGTH]


def _copied(stream: IO[bytes], start: int, stop: int) -> bytes:
    stream.seek(start)
    data = stream.read(stop - start)
    if len(data) != stop - start:
        raise _Unusual
    return data


# Writing


def _sections(model: onnx.ModelProto, place_of: Callable[[TensorProto], Place]) -> list[Section]:
    data = model.SerializeToString()
    if MARK.encode() not in data:
        return [data]
    try:
        return _filled(memoryview(data), "model", place_of)
    except _Unusual:
        return [embedded(model, place_of).SerializeToString()]


def _length(sections: Iterable[Section]) -> int:
    return sum(section.length if isinstance(section, Range | Held) else len(section) for section in sections)


def _filled(data: memoryview, kind: str, place_of: Callable[[TensorProto], Place]) -> list[Section]:
    """A serialized message of some kind with the bytes of parked tensors in the place of their marks."""
    made: list[Section] = []
    done = 0
    for field in _fields(io.BytesIO(data), 0, len(data)):
        inner = data[field.body : field.stop]
        if field.number not in INSIDE[kind] or MARK.encode() not in bytes(inner):
            continue
        deeper = INSIDE[kind][field.number]
        part = _filled_tensor(inner, place_of) if deeper == "tensor" else _filled(inner, deeper, place_of)
        made += [data[done : field.start], _head(field.number, _length(part)), *part]
        done = field.stop
    return [*made, data[done:]]


def _filled_tensor(data: memoryview, place_of: Callable[[TensorProto], Place]) -> list[Section]:
    tensor = TensorProto.FromString(bytes(data))
    if not is_parked(tensor):  # the text of the mark, somewhere else
        return [data]
    place = place_of(tensor)
    unpark(tensor, b"")  # protobuf decides where the field goes
    whole = memoryview(tensor.SerializeToString())
    (raw,) = (f for f in _fields(io.BytesIO(whole), 0, len(whole)) if f.number == RAW_DATA)
    return [whole[: raw.start], _head(RAW_DATA, place.length), place, whole[raw.stop :]]


def _head(number: int, size: int) -> bytes:
    """The tag and length in front of a field's value."""
    return _encoded(number << 3 | LENGTH) + _encoded(size)


def _encoded(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])
