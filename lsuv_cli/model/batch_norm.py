"""Parts of a model that remember or depend on more than its weights: batch statistics and training mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model.graph import Graph, attribute
from lsuv_cli.model.layers import Layer

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


def multipliers(graph: Graph, layers: Iterable[Layer], read: Callable[[str], Array]) -> dict[str, float]:
    """The layers, by their outputs, that only a BatchNormalization reads which multiplies by one number; that number.

    All do in a network that was never trained: mean and shift are zero, the factors the same for all channels.
    """
    found: dict[str, float] = {}
    for layer in layers:
        readers = [graph.nodes[k] for k in graph.readers.get(layer.output, ())]
        if layer.activation or [node.op_type for node in readers] != ["BatchNormalization"]:
            continue
        node = readers[0]
        if attribute(node, "training_mode", 0) or not all(name in graph.tensors for name in node.input[1:]):
            continue
        scale, shift, mean, variance = (np.asarray(read(name), np.float64) for name in node.input[1:5])
        with np.errstate(all="ignore"):
            factors = scale / np.sqrt(variance + attribute(node, "epsilon", 1e-5))
        if np.any(shift) or np.any(mean) or not factors.size or not np.all(factors == factors.flat[0]):
            continue
        if 1e-6 < factors.flat[0] < 1e6:
            found[layer.output] = float(factors.flat[0])
    return found


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
