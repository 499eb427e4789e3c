"""Where the nodes of an outline are drawn: columns by depth, stage after stage; lanes for branches.

1. A node's column is one more than the highest of its predecessors', and layers of a stage stand behind all layers of
   the stages before it.
2. A node takes the lane of the predecessor in front of it if that lane is free, else the lowest free lane.
3. An edge that passes columns takes a lane that is free in all of them, its source's own if it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_LANES = 12  # edges that would need more share the last lane


@dataclass(frozen=True)
class Node:
    """A node to be placed: the nodes it reads, by their places in the list, and its stage if it is a layer's."""

    after: tuple[int, ...]
    stage: int | None


@dataclass(frozen=True)
class Edge:
    """From one node to another, on a lane while it passes the columns between them."""

    source: int
    target: int
    lane: int


@dataclass(frozen=True)
class Layout:
    """Columns and lanes of all nodes, the lanes of all edges, and the first column of each stage."""

    columns: tuple[int, ...]
    lanes: tuple[int, ...]
    edges: tuple[Edge, ...]
    starts: tuple[int, ...]


def lay_out(nodes: Sequence[Node]) -> Layout:
    """Place nodes that are listed in the order of execution."""
    columns, starts = _columns(nodes)
    taken: set[tuple[int, int]] = set()
    lanes: list[int] = []
    edges: list[Edge] = []
    for k, node in enumerate(nodes):
        column = columns[k]
        near = [lanes[p] for p in node.after if columns[p] == column - 1]
        wanted = [*sorted(near), *range(MOST_LANES)]
        lane = next((x for x in wanted if (x, column) not in taken), MOST_LANES)
        taken.add((lane, column))
        lanes.append(lane)
        for p in node.after:
            between = range(columns[p] + 1, column)
            passing = next(
                (x for x in (lanes[p], *range(MOST_LANES)) if not any((x, c) in taken for c in between)), MOST_LANES
            )
            taken.update((passing, c) for c in between)
            edges.append(Edge(p, k, passing if between else lane))
    return Layout(tuple(columns), tuple(lanes), tuple(edges), tuple(starts))


def _columns(nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
    stages = 1 + max((node.stage for node in nodes if node.stage is not None), default=-1)
    starts = [0] * stages
    columns = [0] * len(nodes)
    for stage in range(max(stages, 1)):
        for k, node in enumerate(nodes):
            behind = max((columns[p] + 1 for p in node.after), default=0)
            columns[k] = max(behind, starts[node.stage]) if node.stage is not None else behind
        if stage + 1 < stages:
            before = [columns[k] for k, node in enumerate(nodes) if node.stage is not None and node.stage <= stage]
            starts[stage + 1] = max(before, default=-1) + 1
    return columns, starts
