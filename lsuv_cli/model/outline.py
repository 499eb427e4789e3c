"""A graph's outline: its layers, and the nodes where branches join; everything between them is left out.

1. A layer, or a node that looks like one, is in the outline.
2. Of any other node, the sources are those of its inputs: the outline's nodes from which they come. Constants have no
   source, and neither have shapes (Shape, Size), which say nothing about the signal.
3. A node with several sources is a joint: it is in the outline too, and the source of its outputs.
4. A joint that no layer and no output of the graph depends on is left out again.
"""

from __future__ import annotations

from collections.abc import Mapping

from lsuv_cli.details import OutlineNode
from lsuv_cli.model.constants import SHAPE_OPS
from lsuv_cli.model.graph import Graph

INPUT = -1  # the source of the graph's inputs


def outline(graph: Graph, layers: Mapping[int, int]) -> tuple[OutlineNode, ...]:
    """The outline of a graph whose layers are given as node -> place in the report."""
    made: list[OutlineNode] = []
    sources: dict[str, tuple[int, ...]] = dict.fromkeys(graph.inputs, (INPUT,))
    for k, node in enumerate(graph.nodes):
        above = sorted({s for name in graph.reads(k) for s in sources.get(name, ())})
        if node.op_type in SHAPE_OPS or all(name in graph.constant for name in node.output if name):
            continue
        if k in layers or len(above) > 1:
            made.append(OutlineNode(node.op_type, layers.get(k), tuple(above)))
            above = [len(made) - 1]
        sources.update({name: tuple(above) for name in node.output if name})
    ends = {s for name in graph.outputs for s in sources.get(name, ())}
    return _needed(made, ends)


def _needed(made: list[OutlineNode], ends: set[int]) -> tuple[OutlineNode, ...]:
    needed = ends | {k for k, node in enumerate(made) if node.layer is not None}
    for k in range(len(made) - 1, -1, -1):
        if k in needed:
            needed.update(made[k].after)
    kept = [k for k in range(len(made)) if k in needed]
    place = {INPUT: INPUT, **{k: n for n, k in enumerate(kept)}}
    return tuple(OutlineNode(made[k].op, made[k].layer, tuple(place[s] for s in made[k].after)) for k in kept)
