"""The values that wait between stages, for each batch; above a budget they wait in a temporary file.

They are on the host whatever the device is, so that the budget, the file and the foresight of memory hold everywhere.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, TypeProto, helper

from lsuv_cli.errors import ModelError, OutputError
from lsuv_cli.scaling.runtime import host_value, own_array


@dataclass
class Spilled:
    """A tensor that waits in the temporary file."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass
class Frontier:
    """The values that wait between stages, for each batch; above a budget they wait in a temporary file."""

    budget: int
    kept: list[dict[str, Any]] = field(default_factory=list)
    bytes: int = 0
    spilled: int = 0
    peak: int = 0
    _file: Any = None
    _end: int = 0

    def put(self, batch: int, values: Mapping[str, Any]) -> None:
        while len(self.kept) <= batch:
            self.kept.append({})
        for name, value in values.items():
            self._forget(batch, name)
            size = _size(value)
            if size and self.bytes + size > self.budget:
                self.kept[batch][name] = self._spill(value)
            else:
                self.kept[batch][name] = value
                self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def get(self, batch: int, name: str) -> Any:
        value = self.kept[batch][name]
        if not isinstance(value, Spilled):
            return value
        count = int(np.prod(value.shape, dtype=np.int64))
        self._file.seek(value.offset)
        data = self._file.read(count * value.dtype.itemsize)
        return host_value(np.frombuffer(data, value.dtype).reshape(value.shape))

    def keep_only(self, batch: int, names: set[str]) -> None:
        """Free a batch's waiting values, except those with these names."""
        for name in [name for name in self.kept[batch] if name not in names] if batch < len(self.kept) else []:
            self._forget(batch, name)

    def _forget(self, batch: int, name: str) -> None:
        value = self.kept[batch].pop(name, None)
        if value is not None and not isinstance(value, Spilled):
            self.bytes -= _size(value)

    def types(self, names: Sequence[str]) -> dict[str, TypeProto]:
        """The types of waiting values, as a graph input declares them."""
        types = {}
        for name in names:
            value = self.kept[0][name]
            shape = self._shape(name)
            if isinstance(value, Spilled):
                types[name] = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), shape)
            else:
                types[name] = _type_of(value, shape)
        return types

    def _shape(self, name: str) -> list[int | None] | None:
        """The dimensions that are the same in all batches; None if even their number is not."""
        values = [batch[name] for batch in self.kept]
        if not all(isinstance(value, Spilled) or value.is_tensor() for value in values):
            return None
        shapes = [value.shape if isinstance(value, Spilled) else value.shape() for value in values]
        if len({len(shape) for shape in shapes}) > 1:
            return None
        return [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)]

    def close(self) -> None:
        self.kept.clear()
        if self._file is not None:
            self._file.close()

    def _spill(self, value: Any) -> Spilled:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="lsuv-")  # noqa: SIM115  it lives as long as the frontier
        array = np.ascontiguousarray(own_array(value))
        try:
            self._file.seek(self._end)
            self._file.write(array.reshape(-1).view(np.uint8).data)
        except OSError as problem:
            raise OutputError(
                f"values cannot wait in a temporary file: {problem.strerror}; use `limit` for fewer samples, a "
                "larger `memory`, or another directory (TMPDIR)"
            ) from None
        place = Spilled(self._end, array.shape, array.dtype)
        self._end += array.nbytes
        self.spilled += array.nbytes
        return place


def _size(value: Any) -> int:
    """The bytes of a tensor that could be spilled; 0 for strings, sequences and empty optionals."""
    if not value.is_tensor() or value.data_type() == "tensor(string)" or not value.shape():
        return 0
    return int(value.tensor_size_in_bytes())


def _type_of(value: Any, shape: Sequence[int | None] | None) -> TypeProto:
    """onnxruntime's description of a value's type, such as seq(tensor(float)), as ONNX writes it."""
    text = value.data_type()
    wrappers = re.findall(r"(seq|optional)\(", text)
    match = re.search(r"tensor\((\w+)\)", text)
    if match is None:
        raise ModelError(f"a value of type {text} has to pass from one stage to the next, which is not possible")
    code = TensorProto.DataType.Value(match[1].upper())
    kind = helper.make_tensor_type_proto(code, shape)
    for wrapper in reversed(wrappers):
        make = helper.make_sequence_type_proto if wrapper == "seq" else helper.make_optional_type_proto
        kind = make(kind)
    return kind
