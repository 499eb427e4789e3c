"""What a stored tensor is for, told by the operators that read it: the role by which a tensor without values is filled.

1. A reader's operator and input position give the role (`ROLES`); views in between do not matter. Of several readers'
   roles the first in the order of `Role` counts, so that an embedding that is a layer's weight too is TIED.
2. A constant added to a value is a bias if it has one axis longer than 1, and a table (position embeddings, relative
   position biases) if it has several.
3. STRUCTURE is no parameter: it shapes the computation (scales of Resize, bounds of Clip, small constants that shapes
   are computed from) and is kept where weights are stripped. So are masks of 0 and minus infinity (`is_mask`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from lsuv_cli.model.constants import readers_of
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import LAYER_OPS, RECURRENT_OPS

Array = NDArray[Any]


class Role(StrEnum):
    """What a tensor is for, and what it is filled with; the order is that of precedence."""

    STRUCTURE = "structure"  # never stripped
    TIED = "tied embedding"  # N(0, 1/fan-in): an embedding that a layer multiplies with too
    WEIGHT = "weight"  # N(0, 1/fan-in), before LSUV
    EMBEDDING = "embedding"  # N(0, 1)
    VARIANCE = "running variance"  # 1
    SCALE = "norm scale"  # 1
    BIAS = "bias"  # 0
    SLOPE = "slope"  # 0.25, of PRelu
    QUANTUM = "quantization scale"  # 1/32, or what a weight behind it needs (scaling/quanta.py)
    TABLE = "table"  # N(0, 0.02²): position embeddings, class tokens, and whatever is not known
    QUANTIZED = "quantized weight"  # small integers
    NUMBERS = "list of numbers"  # by the name of the attribute that has it (number_lists.py)


PRODUCTS = {**dict.fromkeys(LAYER_OPS, (0, 1)), "Attention": (1,), "QAttention": (1,), "DeformConv": (1,)}
_NORMS = ("LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization",
          "SimplifiedLayerNormalization", "GroupNorm")  # fmt: skip
_SKIPPED_NORMS = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
_STRUCTURE = {
    "Resize": (1, 2, 3), "Upsample": (1,), "Clip": (1, 2), "Pad": (2,), "OneHot": (2,), "Range": (0, 1, 2), "Pow": (1,),
    "NonMaxSuppression": (3, 4), "Dropout": (1,), "STFT": (2,), "Min": (0, 1), "Max": (0, 1),
}  # fmt: skip

ROLES: dict[tuple[str, int], Role] = {
    **{(op, k): Role.WEIGHT for op, places in PRODUCTS.items() for k in places},
    **{(op, 2): Role.BIAS for op in (*LAYER_OPS, "Attention", "QAttention")},
    ("DeformConv", 3): Role.BIAS,
    **{(op, k): Role.WEIGHT for op in RECURRENT_OPS for k in (1, 2)},
    **{(op, k): Role.BIAS for op in RECURRENT_OPS for k in (3, 5, 6, 7)},
    ("BatchNormalization", 1): Role.SCALE,
    ("BatchNormalization", 2): Role.BIAS,
    ("BatchNormalization", 3): Role.BIAS,
    ("BatchNormalization", 4): Role.VARIANCE,
    **{(op, k): role for op in _NORMS for k, role in ((1, Role.SCALE), (2, Role.BIAS))},
    **{(op, k): role for op in _SKIPPED_NORMS for k, role in ((2, Role.SCALE), (3, Role.BIAS), (4, Role.BIAS))},
    **{("EmbedLayerNormalization", k): Role.EMBEDDING for k in (2, 3, 4)},
    ("EmbedLayerNormalization", 5): Role.SCALE,
    ("EmbedLayerNormalization", 6): Role.BIAS,
    **{(op, 0): Role.EMBEDDING for op in ("Gather", "GatherND", "GatherElements")},
    ("PRelu", 1): Role.SLOPE,
    **{(op, k): Role.SCALE for op in ("Mul", "Div") for k in (0, 1)},
    **{(op, k): Role.BIAS for op in ("Add", "Sub", "Sum", "Where") for k in (0, 1, 2)},
    **{(op, 1): Role.BIAS for op in ("BiasGelu", "FastGelu", "BiasSplitGelu", "BiasAdd")},
    ("MultiHeadAttention", 3): Role.BIAS,
    **{(op, 1): Role.QUANTUM for op in ("QuantizeLinear", "DequantizeLinear")},
    **{(op, 2): Role.BIAS for op in ("QuantizeLinear", "DequantizeLinear")},  # the zero point
    **{(op, 2): Role.QUANTUM for op in ("MatMulNBits", "GatherBlockQuantized")},
    **{(op, 3): Role.BIAS for op in ("MatMulNBits", "GatherBlockQuantized")},
    ("MatMulNBits", 5): Role.BIAS,
    **{(op, k): Role.QUANTUM for op in ("QLinearConv", "QLinearMatMul") for k in (1, 4, 6)},
    **{(op, k): Role.BIAS for op in ("QLinearConv", "QLinearMatMul") for k in (2, 5, 7)},
    **{(op, k): Role.STRUCTURE for op, places in _STRUCTURE.items() for k in places},
}
# Inputs that are shapes, and how far back small constants are looked for that they are computed from.
SHAPES = {"Reshape": (1,), "Expand": (1,), "Resize": (2, 3), "Tile": (1,), "ConstantOfShape": (0,), "Range": (0, 1, 2),
          "Slice": (1, 2, 3, 4), "Pad": (1,), "TopK": (1,), "Upsample": (1,), "OneHot": (1,)}  # fmt: skip
SMALL = 64  # values
MASKED = -100.0  # at most, for the second value of a mask of two values


def roles(graph: Graph) -> dict[str, Role]:
    """Stored tensor -> its role, for every tensor of the flat graph."""
    shaping = _shaping(graph)
    found: dict[str, Role] = {}
    for name, tensor in graph.tensors.items():
        if name in shaping and np.prod(tensor.dims, dtype=float) <= SMALL:
            found[name] = Role.STRUCTURE
            continue
        wide = sum(dim > 1 for dim in tensor.dims) > 1
        seen = set(_by_readers(graph, name, wide))
        if {Role.EMBEDDING, Role.WEIGHT} <= seen:
            seen.add(Role.TIED)
        found[name] = next((role for role in Role if role in seen), Role.TABLE)
    return found


def is_mask(array: Array) -> bool:
    """Whether an array has the two values of a mask that is added: 0, and a number that no signal outweighs."""
    numbers = np.asarray(array)  # of any type: complex numbers too are 0 or one other
    return bool(numbers.size > 1 and np.all((numbers == 0) | (numbers == numbers.min())) and numbers.min() <= MASKED)


def _by_readers(graph: Graph, name: str, wide: bool) -> Iterator[Role]:
    for k, value in readers_of(graph, name):
        if k < 0:
            continue
        node = graph.nodes[k]
        for position in _positions(node, value):
            role = ROLES.get((node.op_type, position), Role.TABLE)
            yield Role.TABLE if role is Role.BIAS and wide and node.op_type in {"Add", "Sub", "Sum"} else role


def _positions(node: NodeProto, value: str) -> Iterator[int]:
    yield from (k for k, name in enumerate(node.input) if name == value)


def _shaping(graph: Graph) -> set[str]:
    """The stored tensors that shapes are computed from, other than through the shape of a value or through a layer."""
    wanted = [node.input[k] for node in graph.nodes for k in SHAPES.get(node.op_type, ()) if k < len(node.input)]
    stored: set[str] = set()
    seen: set[str] = set()
    while wanted:
        value = wanted.pop()
        if value in seen or not value:
            continue
        seen.add(value)
        if value in graph.tensors:
            stored.add(value)
        elif value in graph.producer:
            node = graph.nodes[graph.producer[value]]
            if node.op_type not in {"Shape", "Size", *LAYER_OPS}:
                wanted.extend(graph.reads(graph.producer[value]))
    return stored


def counted(roles_of: Mapping[str, Role]) -> str:
    """How many tensors there are of each role, for a message: 12 weights, 3 embeddings."""
    counts = {role: sum(found is role for found in roles_of.values()) for role in Role}
    plurals = {Role.BIAS: "biases", Role.NUMBERS: "lists of numbers"}
    return ", ".join(
        f"{count} {role if count == 1 else plurals.get(role, f'{role}s')}" for role, count in counts.items() if count
    )
