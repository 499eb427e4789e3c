"""A weight as the matrices its operator multiplies with: which axes are outputs, inputs, groups or a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from lsuv_cli.model.constants import LeftAlone
from lsuv_cli.model.graph import attribute
from lsuv_cli.model.views import Shape

Array = NDArray[Any]


@dataclass(frozen=True)
class MatrixForm:
    """How a weight is a stack of (out, fan-in) matrices, one for each group or batch entry.

    The weight is reshaped to `split`, its axes are put in the order `order` (groups, then outputs, then inputs),
    and the result is reshaped to `shape`.
    """

    split: Shape
    order: Shape
    shape: tuple[int, int, int]

    @property
    def fan_in(self) -> int:
        return self.shape[2]

    def matrices(self, weight: Array) -> Array:
        return weight.reshape(self.split).transpose(self.order).reshape(self.shape)

    def weight(self, matrices: Array, shape: Shape) -> Array:
        ordered = matrices.reshape([self.split[axis] for axis in self.order])
        return ordered.transpose(np.argsort(self.order)).reshape(shape)


def of_node(node: NodeProto, shape: Shape, position: int) -> MatrixForm:
    """How a node multiplies with a weight of the given shape at the given input."""
    op, rank = node.op_type, len(shape)
    if op in {"Conv", "FusedConv", "ConvTranspose"}:
        groups = attribute(node, "group", 1)
        if rank < 3 or groups < 1 or shape[0] % groups:
            raise LeftAlone(f"a weight of shape {list(shape)} does not fit {groups} groups")
        return (transposed_convolution if op == "ConvTranspose" else convolution)(shape, groups)
    if op == "Einsum":
        return einsum(attribute(node, "equation", ""), shape, position)
    if attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0):
        raise LeftAlone(f"{op} with transposed batches is not a plain matrix product")
    if attribute(node, "alpha", 1.0) == 0:
        raise LeftAlone("its alpha is 0")
    if rank == 0:
        raise LeftAlone("its weight is a single number")
    if rank == 1:
        return product(shape, (), (0,))
    transposed = bool(attribute(node, "transA" if position == 0 else "transB", 0))
    # Left of the product a matrix is (out, in), right of it (in, out).
    first_is_out = (position == 0) != transposed
    out, fan_in = (rank - 2, rank - 1) if first_is_out else (rank - 1, rank - 2)
    return product(shape, (out,), (fan_in,))


def convolution(shape: Shape, groups: int) -> MatrixForm:
    """Conv: (out, in/groups, kernel...)."""
    out, *rest = shape
    fan_in = math.prod(rest)
    return MatrixForm((groups, out // groups, fan_in), (0, 1, 2), (groups, out // groups, fan_in))


def transposed_convolution(shape: Shape, groups: int) -> MatrixForm:
    """ConvTranspose: (in, out/groups, kernel...), inputs first; an output sums over inputs and kernel taps."""
    inputs, out, *kernel = shape
    split = (groups, inputs // groups, out, math.prod(kernel))
    return MatrixForm(split, (0, 2, 1, 3), (groups, out, inputs // groups * split[3]))


def product(shape: Shape, outputs: Sequence[int], inputs: Sequence[int]) -> MatrixForm:
    """A matrix product over the axes `inputs`, with results along `outputs`; all other axes are a batch."""
    batch = [axis for axis in range(len(shape)) if axis not in {*outputs, *inputs}]
    order = (*batch, *outputs, *inputs)
    sizes = [math.prod(shape[axis] for axis in part) for part in (batch, outputs, inputs)]
    return MatrixForm(shape, order, (sizes[0], sizes[1], sizes[2]))


def einsum(equation: str, shape: Shape, position: int) -> MatrixForm:
    """Einsum of two operands. A letter of the weight is an input axis if it is summed over, an output axis if the
    result has it and the other operand has not, and a batch axis if the result and the other operand have it."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:  # then the result has the letters that occur once
        result = "".join(c for c in left if c.isalpha() and left.count(c) == 1)
    terms = left.split(",")
    if len(terms) != 2 or "." in terms[position]:
        raise LeftAlone(f"Einsum {equation!r} is not a plain matrix product")
    mine, other = terms[position], terms[1 - position]
    distinct = all(len(set(t.replace(".", ""))) == len(t.replace(".", "")) for t in (mine, result))
    inputs = [k for k, c in enumerate(mine) if c not in result]
    outputs = [k for k, c in enumerate(mine) if c in result and c not in other]
    if not distinct or len(mine) != len(shape) or not inputs or any(mine[k] not in other for k in inputs):
        raise LeftAlone(f"Einsum {equation!r} is not a plain matrix product")
    return product(shape, outputs, inputs)


def gates(shape: Shape, count: int) -> MatrixForm:
    """LSTM, GRU, RNN: (directions, gates * hidden, in), one matrix for each direction and gate."""
    directions, rows, columns = shape
    split = (directions * count, rows // count, columns)
    return MatrixForm(split, (0, 1, 2), split)
