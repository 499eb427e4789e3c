"""Which branch an If takes, where it takes one for all of the data: then its layers are layers like any other."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from lsuv_cli.model.flatten import nodes_inside
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import LAYER_OPS
from lsuv_cli.scaling import runtime
from lsuv_cli.scaling.model_builder import ModelBuilder, own_prefix
from lsuv_cli.scaling.runner import Pass, Runner
from lsuv_cli.scaling.runtime import Session
from lsuv_cli.scaling.stages import Plan


def taken(graph: Graph, needs: Pass | None) -> dict[str, bool]:
    """The branch of each If that has layers inside, by its first output, where the condition is one for all data."""
    taken_branches: dict[str, bool] = {}
    for node in graph.nodes:
        if node.op_type == "If" and any(inner.op_type in LAYER_OPS for inner in nodes_inside(node)):
            values = _conditions(graph, node, needs)
            if len(values) == 1:
                taken_branches[node.output[0]] = values.pop()
    return taken_branches


def _conditions(graph: Graph, node: NodeProto, needs: Pass | None) -> set[bool]:
    """All values that an If's condition has."""
    condition = node.input[0]
    if condition in graph.constant:
        known = graph.known(condition)
        return set() if known is None else {bool(np.any(known))}
    if needs is None:
        return set()
    runner = Runner(graph, Plan((), {}, {}, {}), needs, {})
    builder = ModelBuilder(graph, own_prefix(graph), {}, {})
    if condition in graph.inputs:  # a value that goes straight through is not to be an output (onnxruntime#21922)
        return {bool(np.any(batch[condition])) for batch in needs.batches}
    builder.pull(condition, runner.input_type)
    session = Session(builder.finish([condition], ()), needs.device, optimized=False)
    values: set[bool] = set()
    for batch in needs.batches:
        kept, _ = session.run({name: runner.value(session, 0, batch, name) for name in session.model.feeds})
        values.add(bool(np.any(runtime.to_numpy(kept[condition]))))
    return values
