"""Inputs that are indices: the embedding that each one looks up, and how many rows it has."""

from __future__ import annotations

from lsuv_cli.model.constants import is_view
from lsuv_cli.model.graph import Graph, Unknown, attribute, is_standard

MICROSOFT = "com.microsoft"


def tables(graph: Graph) -> dict[str, int]:
    """Graph input -> rows of the smallest constant table that it indexes, directly or through views of itself."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        pairs: list[tuple[str, str, int]] = []
        if node.op_type == "Gather" and is_standard(node):
            pairs = [(node.input[1], node.input[0], attribute(node, "axis", 0))]
        elif node.op_type == "EmbedLayerNormalization" and node.domain == MICROSOFT and len(node.input) > 4:
            pairs = [(node.input[0], node.input[2], 0), (node.input[1], node.input[4], 0)]
        for index, table, axis in pairs:
            name = _origin(graph, index)
            if name in graph.inputs and table in graph.constant:
                try:
                    shape = graph.shape(table)
                except Unknown:
                    continue
                if -len(shape) <= axis < len(shape):
                    found[name] = min(shape[axis], found.get(name, shape[axis]))
    return {name: rows for name, rows in found.items() if rows}


def _origin(graph: Graph, name: str) -> str:
    """The value at the start of a chain of views."""
    while name not in graph.inputs and name in graph.producer:
        node = graph.nodes[graph.producer[name]]
        if not is_view(node):
            break
        name = node.input[0]
    return name
