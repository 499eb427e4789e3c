"""Which nodes commute with a scale: f(s·x) = s·f(x) for s > 0, so that s need not be known before they run."""

from __future__ import annotations

import math

import numpy as np
from onnx import NodeProto

from lsuv_cli.model.graph import Graph, attribute, is_standard

# f(s·x) = s·f(x) for s > 0, where every other input is constant.
HOMOGENEOUS = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Identity", "Neg", "Abs", "MaxPool", "AveragePool", "GlobalAveragePool",
     "GlobalMaxPool", "LpPool", "GlobalLpPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice",
     "Split", "Gather", "Dropout", "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "ReduceMean", "ReduceSum",
     "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"}
)  # fmt: skip
# f(s·x, s·y) = s·f(x, y), where the same scales are pending on all inputs.
HOMOGENEOUS_TOGETHER = frozenset({"Add", "Sub", "Sum", "Mean", "Max", "Min", "Concat"})
# Multiply by a constant.
MULTIPLYING = frozenset({"Mul", "Div"})
LARGEST_MULTIPLIER_BYTES = 1 << 20  # a larger constant is not read just to find its largest entry


def commutes_with_scale(graph: Graph, node: NodeProto) -> bool:
    """Whether f(s·x) = s·f(x) holds for a node whose varying inputs all have the same pending scales."""
    op = node.op_type
    if not is_standard(node) or (op != "Split" and sum(1 for name in node.output if name) > 1):
        return False
    constant = [name in graph.constant for name in node.input if name]
    if op in HOMOGENEOUS:
        return not constant[0] and all(constant[1:])
    if op in HOMOGENEOUS_TOGETHER:
        return not any(constant)
    if op in MULTIPLYING:
        return len(constant) == 2 and constant.count(True) == 1 and not (op == "Div" and constant[0])
    if op == "Conv":
        return len(constant) == 2 and constant[1]
    if op == "MatMul":
        return constant.count(True) == 1
    if op == "Pad":
        return attribute(node, "mode", "constant") != "constant" or (
            len(constant) < 3 and attribute(node, "value", 0.0) == 0.0
        )
    return False


def growth(graph: Graph, node: NodeProto) -> float:
    """log2 of the factor by which a Mul or Div by a constant multiplies its other input; 0 for any other node."""
    if node.op_type not in MULTIPLYING or not is_standard(node) or len(node.input) != 2:
        return 0.0
    name = next((name for name in node.input if name in graph.tensors), "")
    if not name or graph.nbytes(name) > LARGEST_MULTIPLIER_BYTES:
        return 0.0
    largest = float(np.max(np.abs(np.asarray(graph.array(name), np.float64)), initial=0.0))
    if not 0.0 < largest < math.inf:
        return 0.0
    return math.log2(largest) if node.op_type == "Mul" else -math.log2(largest)
