"""Parts of a model that remember or depend on more than its weights: batch statistics and training mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.graph import Graph, attribute
from lsuv_cli.layers import Layer

Array = NDArray[Any]


def behind(graph: Graph, layers: tuple[Layer, ...]) -> Iterator[int]:
    """The BatchNormalization nodes that read a layer's output: their statistics belong to its old weight."""
    outputs = {layer.output for layer in layers}
    for k, node in enumerate(graph.nodes):
        if node.op_type == "BatchNormalization" and node.input[0] in outputs and len(node.input) >= 5:
            yield k


def resets(graph: Graph, nodes: list[int]) -> dict[tuple[int, int], float]:
    """What --reset-norm writes: running mean 0 and variance 1, at (node, input position)."""
    return {
        (k, position): number
        for k in nodes
        for position, number in ((3, 0.0), (4, 1.0))
        if graph.nodes[k].input[position] in graph.constant
    }


def training_mode(graph: Graph, read: Callable[[str], Array]) -> Iterator[str]:
    """A warning for each kind of node that behaves as in training, so that what it gives is not repeatable."""
    for op, effect in (("Dropout", "drops values at random"), ("BatchNormalization", "uses each batch's statistics")):
        count = 0
        for node in graph.nodes:
            if node.op_type == op:
                flag = attribute(node, "training_mode", 0)
                if op == "Dropout" and len(node.input) > 2 and node.input[2] in graph.tensors:
                    flag = bool(np.any(read(node.input[2])))
                count += bool(flag)
        if count:
            plural = "nodes are" if count > 1 else "node is"
            yield f"{count} {op} {plural} in training mode and {effect}: the variances are not repeatable"
