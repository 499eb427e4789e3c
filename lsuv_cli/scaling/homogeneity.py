"""Which nodes carry a scale: those that give s·f(x) for s·x, so that s need not be known before they run."""

from __future__ import annotations

from onnx import NodeProto

from lsuv_cli.model.graph import Graph, attribute

# f(s·x) = s·f(x) for s > 0, whatever else they read being constant.
CARRIES = frozenset(
    {"Relu", "LeakyRelu", "PRelu", "Identity", "Neg", "Abs", "MaxPool", "AveragePool", "GlobalAveragePool",
     "GlobalMaxPool", "LpPool", "GlobalLpPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice",
     "Split", "Gather", "Dropout", "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "ReduceMean", "ReduceSum",
     "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"}
)  # fmt: skip
# The same for several inputs, where all of them owe the same scale.
CARRIES_TOGETHER = frozenset({"Add", "Sub", "Sum", "Mean", "Max", "Min", "Concat"})
# Scale by a constant.
CARRIES_BY_CONSTANT = frozenset({"Mul", "Div"})


def carries(graph: Graph, node: NodeProto) -> bool:
    """Whether a node gives s·f(x) for s·x, its varying inputs all owing the same."""
    op = node.op_type
    if node.domain not in {"", "ai.onnx"} or (op != "Split" and sum(1 for name in node.output if name) > 1):
        return False
    constant = [name in graph.constant for name in node.input if name]
    if op in CARRIES:
        return not constant[0] and all(constant[1:])
    if op in CARRIES_TOGETHER:
        return not any(constant)
    if op in CARRIES_BY_CONSTANT:
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
