"""BatchNormalization behind layers: running statistics of the old weights, and norms that reduce to y = c·x."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from lsuv_cli.model.graph import Graph, attribute
from lsuv_cli.model.layers import Layer
from lsuv_cli.model.random_ops import RANDOM_OPS, drops

# A factor outside this range could take a chain of pending scales out of float32's range.
SMALLEST_FACTOR, LARGEST_FACTOR = 1e-6, 1e6
DEFAULT_EPSILON = 1e-5


def behind(graph: Graph, layers: Iterable[Layer]) -> Iterator[int]:
    """The BatchNormalization nodes that read a layer's output: their statistics belong to its old weight."""
    outputs = {layer.output for layer in layers}
    for k, node in enumerate(graph.nodes):
        if node.op_type == "BatchNormalization" and node.input[0] in outputs and len(node.input) >= 5:
            yield k


def resets(graph: Graph, nodes: Iterable[int]) -> dict[tuple[int, int], float]:
    """(node, input position) -> what `reset_norm` writes there: 0 for a running mean, 1 for a running variance."""
    return {
        (k, position): number
        for k in nodes
        for position, number in ((3, 0.0), (4, 1.0))
        if graph.nodes[k].input[position] in graph.constant
    }


def with_factors(graph: Graph, layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """The layers with their `norm_factor`: c, where the BatchNormalization behind a layer reduces to y = c·x."""
    return tuple(replace(layer, norm_factor=_factor(graph, layer)) for layer in layers)


def _factor(graph: Graph, layer: Layer) -> float | None:
    """c, where a layer's only reader is a BatchNormalization that reduces to y = c·x.

    In an untrained network every BatchNormalization does: mean and shift are 0, and all channels have one factor.
    """
    readers = [graph.nodes[k] for k in graph.readers.get(layer.output, ())]
    if layer.activation or [n.op_type for n in readers] != ["BatchNormalization"]:
        return None
    node = readers[0]
    if attribute(node, "training_mode", 0) or not all(name in graph.tensors for name in node.input[1:]):
        return None
    scale, shift, mean, variance = (np.asarray(graph.array(name), np.float64) for name in node.input[1:5])
    with np.errstate(all="ignore"):
        factors = scale / np.sqrt(variance + attribute(node, "epsilon", DEFAULT_EPSILON))
    if np.any(shift) or np.any(mean) or not factors.size or not np.all(factors == factors.flat[0]):
        return None
    factor = float(factors.flat[0])
    return factor if SMALLEST_FACTOR < factor < LARGEST_FACTOR else None


def training_mode(graph: Graph) -> Iterator[str]:
    """A warning for each kind of node that behaves as in training."""
    dropping = sum(drops(node, graph.tensors) for node in graph.nodes)
    if dropping:
        nodes = "nodes are" if dropping > 1 else "node is"
        yield (
            f"{dropping} Dropout {nodes} in training mode: values are dropped at random, the same ones in calibration "
            "and verification, and the variances are those of training"
        )
    drawing = sorted({node.op_type for node in graph.nodes if node.op_type in RANDOM_OPS})
    if drawing:
        yield (
            f"{', '.join(drawing)} draws random numbers, the same ones in calibration and verification; elsewhere "
            "others are drawn, and the variances are as near to the target as the number of samples allows"
        )
    # One of a constant standardizes a weight, whatever the batch is.
    norms = [x for x in graph.nodes if x.op_type == "BatchNormalization" and x.input[0] not in graph.constant]
    training = sum(bool(attribute(node, "training_mode", 0)) for node in norms)
    if training:
        nodes = "nodes are in training mode and use" if training > 1 else "node is in training mode and uses"
        yield (
            f"{training} BatchNormalization {nodes} each batch's statistics: the variances depend on how the data is "
            "batched"
        )
