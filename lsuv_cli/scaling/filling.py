"""Values for tensors that have none, by their role: norms 1 and 0, embeddings and weights drawn from the seed.

Each tensor's random stream depends on the seed and its name alone, and the numbers come from numpy's generator, not
through BLAS. The orthonormal weights that LSUV makes afterwards do go through BLAS: on one machine equal seeds give
equal bytes, between builds of BLAS the weights differ by rounding (docs/how-it-works.md).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from onnx import TensorProto, helper

from lsuv_cli.errors import ModelError
from lsuv_cli.memory import available_memory
from lsuv_cli.model import graph as graphs
from lsuv_cli.model import number_lists, roles
from lsuv_cli.model.file import BITS, ModelFile, byte_size, embed
from lsuv_cli.model.places import Range
from lsuv_cli.model.roles import Role
from lsuv_cli.model.stripping import check_can_be_made, role_of
from lsuv_cli.scaling import quanta
from lsuv_cli.scaling.quanta import Quantum
from lsuv_cli.scaling.weights import stream

Array = NDArray[Any]

CONSTANTS = {
    Role.VARIANCE: 1.0, Role.SCALE: 1.0, Role.BIAS: 0.0, Role.SLOPE: 0.25, Role.QUANTUM: 1 / 32, Role.STRUCTURE: 1.0,
}  # fmt: skip
TABLE_STD = 0.02
QUANTIZED_STD = 32.0  # of the sum over the fan-in
EMBEDDED = 1 << 30  # bytes; a model with more missing values keeps them in a data file


def fill(file: ModelFile, seed: int, scratch: Path | None = None) -> str:
    """Give values to every tensor that has none, in place; one line about what was made.

    Values of more than EMBEDDED bytes in all go to a file in the directory `scratch`, if there is one.
    """
    of_graph = graphs.build(file.proto, file)
    by_id = {id(of_graph.tensors[name]): role for name, role in roles.roles(of_graph).items()}
    lists = number_lists.stripped(file.proto)
    total = sum(byte_size(tensor) for tensor in file.absent)
    if 4 * sum(numbers.count for numbers in lists) > available_memory() // 2:
        raise ModelError(f"{file.name}: lists of numbers to make do not fit into half of the memory available")
    if scratch is None and total > available_memory() // 2:
        raise ModelError(
            f"{file.name}: the values to make have {total:,} bytes; give a file to write them to (`output`)"
        )
    store = _Store(file, scratch if total > EMBEDDED else None)
    absent = {id(tensor) for tensor in file.absent}
    named = {name: tensor for name, tensor in of_graph.tensors.items() if id(tensor) in absent}
    by_quanta = {id(named[name]): quantum for name, quantum in quanta.find(of_graph, named).items()}
    found: dict[str, Role] = {}
    for number, tensor in enumerate(file.absent):
        check_can_be_made(file, tensor)
        name = tensor.name or f"constant {number}"
        found[name] = role_of(tensor, by_id.get(id(tensor), Role.TABLE))
        quantum = by_quanta.get(id(tensor))
        if quantum is None:
            store.put(tensor, values(found[name], tuple(tensor.dims), seed, name))
        else:
            store.put(tensor, *_quantized(found[name], tensor, quantum, stream(seed, name)))
    for numbers in lists:
        found[numbers.name] = Role.NUMBERS
        numbers.fill(stream(seed, numbers.name))
    file.absent.clear()
    file.filled = True
    return f"{len(found)} tensors had no values and were made by their role: {roles.counted(found)}"


def values(role: Role, shape: tuple[int, ...], seed: int, name: str) -> Array:
    """The values of a role, float32, for a tensor of this shape."""
    if role in CONSTANTS:
        return np.full(shape, CONSTANTS[role], np.float32)
    numbers = stream(seed, name).standard_normal(shape, np.float32)
    reach = shape[-1] if role is Role.TIED else quanta.reach(shape)
    match role:
        case Role.EMBEDDING:
            return numbers
        case Role.TABLE:
            numbers *= np.float32(TABLE_STD)
        case Role.QUANTIZED:
            numbers *= np.float32(max(QUANTIZED_STD / math.sqrt(reach), 1.0))
            np.rint(numbers, out=numbers)
        case _:
            numbers *= np.float32(1 / math.sqrt(reach))
    return numbers


def _quantized(role: Role, tensor: TensorProto, quantum: Quantum, rng: Generator) -> tuple[Array, int]:
    """A quantized weight, its zero point or its scale; and the bits of each number, where bytes hold several."""
    shape = tuple(tensor.dims)
    if role is Role.QUANTUM:
        return np.full(shape, quantum.step, np.float32), 0
    fields = 8 // quantum.bits if quantum.bits and tensor.data_type == TensorProto.UINT8 else 1
    numbers = np.zeros((*shape, fields) if fields > 1 else shape, np.float32)
    if role is Role.QUANTIZED:
        rng.standard_normal(dtype=np.float32, out=numbers)
        numbers *= np.float32(quantum.std)
        numbers += np.float32(quantum.offset)
    return (np.rint(numbers) if quantum.bits else numbers), quantum.bits if fields > 1 else 0


class _Store:
    """Where values go: into the model, or into a data file beside it."""

    def __init__(self, file: ModelFile, scratch: Path | None) -> None:
        self.file = file
        self.path = None if scratch is None else scratch / "filled.data"
        self.end = 0

    def put(self, tensor: TensorProto, numbers: Array, bits: int = 0) -> None:
        """Store values in the tensor's own type; several in a byte, if it is said how many bits each has."""
        tensor.ClearField("doc_string")
        data = quanta.packed(tensor, numbers, bits) if bits else _raw(tensor, numbers)
        if self.path is None:
            embed(tensor, data)
            return
        with self.path.open("r+b" if self.path.exists() else "w+b") as stored:
            stored.seek(self.end)
            stored.write(data)
        self.file.put(tensor, Range(self.path, self.end, len(data)))
        self.end += len(data)


def _raw(tensor: TensorProto, numbers: Array) -> bytes:
    """Values as bytes of the tensor's type; unsigned integers around the middle of their range."""
    if tensor.data_type in quanta.INTEGERS and tensor.data_type in BITS:
        return quanta.packed(tensor, numbers, BITS[tensor.data_type])
    if tensor.data_type in BITS:
        return bytes(byte_size(tensor))  # packed floats: zeros
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        numbers = np.clip(numbers + (128 if dtype == np.uint8 else 0), limits.min, limits.max)
    return np.ascontiguousarray(numbers.astype(dtype)).tobytes()
