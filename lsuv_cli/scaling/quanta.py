"""Quantized weights without values: integers and the scale between them, so that a layer's output has variance about 1.

A weight W = (q - z)·s, z the zero point and s the scale, gives outputs of variance fan-in·Var(q)·s² = 1 for

    s = 1 / (Std(q)·√fan-in)           where the scale is made up too, with Std(q) by the type (`STDS`)
    Std(q) = 1 / (s·√fan-in)           where the scale is known: strip keeps a single number

Integers of fewer than 8 bits are packed, in their own types or, for MatMulNBits, in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto, TensorProto

from lsuv_cli.model.file import BITS, PACKED
from lsuv_cli.model.graph import Graph, attribute, is_standard
from lsuv_cli.model.roles import Array

STDS = {8: 32.0, 4: 2.5, 2: 0.7}  # of integers of so many bits
FLOAT_STD = 1.0  # of floats of 8 and fewer bits
MOST, LEAST = 40.0, 0.5  # of Std(q) that a known scale asks for
SIGNED = {getattr(TensorProto, name) for name in ("INT8", "INT4", "INT2") if hasattr(TensorProto, name)}
INTEGERS = {TensorProto.INT8: 8, TensorProto.UINT8: 8} | {
    getattr(TensorProto, name): bits for name, bits in PACKED.items() if "INT" in name and hasattr(TensorProto, name)
}
PACKING = ("MatMulNBits", "GatherBlockQuantized")  # operators of onnxruntime that read packed bytes


@dataclass(frozen=True)
class Quantum:
    """How a quantized weight is made."""

    std: float  # of the integers
    bits: int  # of each; 0 for floats
    step: float  # the scale
    offset: float = 0.0  # of a known zero point from the middle of the type


def reach(shape: tuple[int, ...]) -> int:
    """The fan-in by the shape alone: a matrix may be stored transposed, and the longer axis is the safe one."""
    return max(shape) if len(shape) == 2 else max(math.prod(shape[1:]), 1)


def find(graph: Graph, absent: Mapping[str, TensorProto]) -> dict[str, Quantum]:
    """Quantized weight without values, and what belongs to it and has no values either -> how they are made."""
    found: dict[str, Quantum] = {}
    for node in graph.nodes:
        packing = node.op_type in PACKING and node.domain == "com.microsoft"
        if not packing and not (node.op_type == "DequantizeLinear" and is_standard(node)):
            continue
        place = (1, 2) if node.op_type == "MatMulNBits" else (0, 2) if packing else (0, 1)
        weight, scale = (node.input[k] for k in place)
        zero = next(iter(node.input[place[1] + 1 :]), "")
        if weight in absent:
            made = _quantum(graph, absent, node, weight, scale)
            if zero not in absent and not packing:
                made = replace(made, offset=_offset(graph, absent[weight], zero))
            found |= {name: made for name in (weight, scale, *((zero,) if packing else ())) if name in absent}
    return found


def _quantum(graph: Graph, absent: Mapping[str, TensorProto], node: NodeProto, weight: str, scale: str) -> Quantum:
    tensor = absent[weight]
    bits = INTEGERS.get(tensor.data_type, 0)
    inputs = reach(tuple(tensor.dims))
    if node.op_type in PACKING:
        bits = int(attribute(node, "bits", 4)) if bits == 8 else bits
        inputs = int(attribute(node, "K", 1))  # an embedding's rows have variance 1
    std = STDS.get(bits, FLOAT_STD)
    known = graph.known(scale) if scale in graph.constant and scale not in absent else None
    if known is None or not known.size:
        return Quantum(std, bits, 1 / (std * math.sqrt(inputs)))
    step = float(np.abs(known.astype(np.float64)).mean())
    wanted = 1 / (step * math.sqrt(inputs)) if step > 0 else std
    return Quantum(min(max(wanted, LEAST), MOST if bits in {0, 8} else std), bits, step)


def _offset(graph: Graph, weight: TensorProto, zero: str) -> float:
    """Where a zero point that is known lies, or 0 without one, from the middle of the weight's type."""
    known = graph.known(zero) if zero in graph.constant else None
    at = float(known.astype(np.float64).mean()) if known is not None and known.size else 0.0
    return at - _middle(weight.data_type, INTEGERS.get(weight.data_type, 0))


def _middle(data_type: int, bits: int) -> int:
    return 0 if not bits or data_type in SIGNED else 1 << (bits - 1)


def packed(tensor: TensorProto, numbers: Array, bits: int) -> bytes:
    """Integers in their own packed type, or packed into bytes; around 0, or around the middle of unsigned ones."""
    own = tensor.data_type in BITS
    middle = _middle(tensor.data_type, bits)
    low, high = middle - (1 << (bits - 1)), middle + (1 << (bits - 1)) - 1
    whole = np.clip(np.rint(numbers) + middle, low, high).astype(np.int64) & ((1 << bits) - 1)
    each = 8 // bits
    flat = whole.reshape(-1)
    if own:
        flat = np.concatenate([flat, np.zeros(-len(flat) % each, np.int64)])
    fields = flat.reshape(-1, each) << (bits * np.arange(each))
    data: bytes = fields.sum(axis=1).astype(np.uint8).tobytes()
    return data
