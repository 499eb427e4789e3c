"""Which branch an If takes. Where it takes the same branch for all batches, the working copy is that branch.

Layers in the branch can then be scaled, and so can layers outside whose weight the branch holds or chooses. A condition
that depends on a layer, or on random numbers, is not known: another weight may change it.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from lsuv_cli.model.flatten import nodes_inside
from lsuv_cli.model.graph import Graph, is_standard
from lsuv_cli.model.layers import LAYER_OPS, RECURRENT_OPS
from lsuv_cli.model.random_ops import is_random
from lsuv_cli.scaling import runtime
from lsuv_cli.scaling.model_builder import ModelBuilder, own_prefix
from lsuv_cli.scaling.runner import Pass, Runner
from lsuv_cli.scaling.runtime import Session
from lsuv_cli.scaling.stages import Plan


def taken(graph: Graph, needs: Pass | None) -> dict[str, bool]:
    """First output of an If -> its condition, where the condition is the same for all batches."""
    taken_branches: dict[str, bool] = {}
    for node in graph.nodes:
        if node.op_type == "If" and is_standard(node):
            values = _conditions(graph, node, needs)
            if len(values) == 1:
                taken_branches[node.output[0]] = values.pop()
    return taken_branches


def undecided(graph: Graph) -> list[str]:
    """A warning where an If is left whose condition is made of the data: one condition decides for a whole batch."""
    left = [node for node in graph.nodes if node.op_type == "If" and is_standard(node)]
    count = sum(_reads_data(graph, node.input[0]) for node in left)
    if not count:
        return []
    nodes = "nodes choose their branches" if count > 1 else "node chooses its branch"
    return [f"{count} If {nodes} for each batch as a whole: the variances depend on how the data is batched"]


def _conditions(graph: Graph, node: NodeProto, needs: Pass | None) -> set[bool]:
    """The values that an If's condition takes over all batches; empty where the condition is not known."""
    condition = node.input[0]
    if condition in graph.constant:
        known = graph.known(condition)
        return set() if known is None else {bool(np.any(known))}
    if needs is None or not _is_settled(graph, condition):
        return set()
    runner = Runner(graph, Plan((), {}, {}, {}), needs.alone(needs.batches), {})
    builder = ModelBuilder(graph, own_prefix(graph), {}, {})
    if condition in graph.inputs:  # a graph input must not be an output as well (onnxruntime#21922)
        return {bool(np.any(batch[condition])) for batch in needs.batches}
    builder.pull(condition, runner.input_type)
    session = Session(builder.finish([condition], ()), needs.device, optimized=False)
    values: set[bool] = set()
    for batch in needs.batches:
        kept, _ = session.run({name: runner.value(0, batch, name) for name in session.model.feeds})
        values.add(bool(np.any(runtime.to_numpy(kept[condition]))))
    return values


def _is_settled(graph: Graph, name: str) -> bool:
    """Whether a value stays the same whatever weights the layers get: no layer and no random number is in it."""
    makers = (graph.producer[made] for made in _made_of(graph, name) if made in graph.producer)
    nodes = (node for k in makers for node in (graph.nodes[k], *nodes_inside(graph.nodes[k])))
    return not any(
        node.op_type in LAYER_OPS or node.op_type in RECURRENT_OPS or is_random(node, graph.tensors) for node in nodes
    )


def _reads_data(graph: Graph, name: str) -> bool:
    return not graph.inputs.keys().isdisjoint(_made_of(graph, name))


def _made_of(graph: Graph, name: str) -> set[str]:
    """A value and all values that it is computed from."""
    wanted, seen = [name], {name}
    while wanted:
        k = graph.producer.get(wanted.pop())
        new = set() if k is None else set(graph.reads(k)) - seen
        wanted.extend(new)
        seen |= new
    return seen
