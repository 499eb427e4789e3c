"""The graph as SVG: stages and branches in rows, layers coloured by their variance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lsuv_cli.page.layout import Edge, Layout, Node, lay_out
from lsuv_cli.page.markup import text
from lsuv_cli.page.table import target_of
from lsuv_cli.text import decades

WIDTH, CELL, BOX, LANE, HEAD, GAP = 960, 30, 24, 24, 16, 10
IN_ROW = (WIDTH - CELL) // CELL  # columns
MOST_ROWS = 6  # that are shown at once
JOINT = 7  # radius
SIGNS = {"Add": "+", "Sum": "+", "Sub": "-", "Mul": "\u00d7", "Div": "÷", "Concat": "‖", "MatMul": "·", "in": "▸"}
# Colours from vanishing (v0) over right (v4) to exploding (v8): decades from the target up to which each one goes.
SHADES = (-4.0, -2.0, -1.0, -0.05, 0.05, 1.0, 2.0, 4.0)
MEANINGS = ("below 10⁻⁴", "10⁻⁴", "10⁻²", "10⁻¹", "target", "10", "10²", "10⁴", "above 10⁴")


def shade(variance: float | None, target: float) -> str:
    """The class of a variance's colour; `vx` where there is none, `vn` where it is not finite."""
    if variance is None or math.isnan(variance):
        return "vx" if variance is None else "vn"
    return f"v{sum(decades(variance, target) > limit for limit in SHADES)}"


def drawing(
    outline: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]], variances: Sequence[float | None]
) -> str:
    """The drawing of an outline, with a link from each layer to its row of the table."""
    shades = [shade(v, target_of(layer)) for v, layer in zip(variances, layers, strict=True)]
    # The model's input is a node of its own in front of the others.
    nodes = [Node((), None)]
    for item in outline:
        stage = layers[item["layer"]]["stage"] if item["layer"] is not None else None
        nodes.append(Node(tuple(p + 1 for p in item["after"]), None if stage is None else stage - 1))
    layout = lay_out(nodes)
    places = [None, *(item["layer"] for item in outline)]
    picture = _Picture(layout, [JOINT if layer is None else BOX // 2 for layer in places])
    body = [picture.bands(), f'<path class="edge" d="{"".join(map(picture.edge, layout.edges))}"/>']
    ops = ["in", *(item["op"] for item in outline)]
    for k, (op, layer) in enumerate(zip(ops, places, strict=True)):
        x, y = picture.at(layout.columns[k], layout.lanes[k])
        body.append(_joint(x, y, op) if layer is None else _layer(x, y, layer, shades[layer]))
    legend = "".join(f'<li><i class="v{k}"></i>{meaning}</li>' for k, meaning in enumerate(MEANINGS))
    scroll = ' class="graph-scroll" tabindex="0"' if picture.rows > MOST_ROWS else ""
    return (
        f"<figure{scroll}><figcaption>The graph: layers by number and variance / target, stage after stage</figcaption>"
        f'<ul class="legend">{legend}<li><i class="vn"></i>not finite</li><li><i class="vx"></i>not measured</li></ul>'
        f'<svg id="graph" class="graph" viewBox="0 0 {WIDTH} {picture.height}" role="group" '
        f'aria-label="Layers of the graph">{"".join(body)}</svg></figure>'
    )


class _Picture:
    """Coordinates: columns wrap into rows, and a row is as high as its lanes need."""

    def __init__(self, layout: Layout, halves: Sequence[int]) -> None:
        self.layout, self.halves = layout, halves  # half the width of each node
        self.rows = max(layout.columns, default=0) // IN_ROW + 1
        deepest = [0] * self.rows
        for column, lane in zip(layout.columns, layout.lanes, strict=True):
            deepest[column // IN_ROW] = max(deepest[column // IN_ROW], lane)
        for edge in layout.edges:
            for row in range(layout.columns[edge.source] // IN_ROW, layout.columns[edge.target] // IN_ROW + 1):
                deepest[row] = max(deepest[row], edge.lane)
        self.heights = [HEAD + LANE * (deep + 1) + GAP for deep in deepest]
        self.tops = [sum(self.heights[:k]) for k in range(self.rows)]
        self.height = sum(self.heights)

    def at(self, column: int, lane: int) -> tuple[float, float]:
        row = column // IN_ROW
        return CELL * (column % IN_ROW + 1), self.tops[row] + HEAD + LANE * lane + LANE / 2

    def edge(self, edge: Edge) -> str:
        """The path of an edge: out of its source, along its lane, row by row, into its target."""
        layout, half, gap = self.layout, self.halves, BOX // 2
        start, end = layout.columns[edge.source], layout.columns[edge.target]
        first, last = start // IN_ROW, end // IN_ROW
        x, y = self.at(start, layout.lanes[edge.source])
        path = f"M{x + half[edge.source]} {y:g}"
        for row in range(first, last + 1):
            along = self.tops[row] + HEAD + LANE * edge.lane + LANE / 2
            if row > first:
                path += f"M{CELL // 2 - 8} {along:g}"
            elif end > start + 1 or row < last:
                path += f"L{x + CELL - gap} {along:g}"
            if row < last:
                path += f"H{WIDTH - 8}"
        x, y = self.at(end, layout.lanes[edge.target])
        into = f"L{x - half[edge.target]} {y:g}"
        return f"{path}H{x - CELL + gap}{into}" if end > start + 1 else f"{path}{into}"

    def bands(self) -> str:
        """A band behind the columns of every second stage, and the number of each stage."""
        starts = [*self.layout.starts, max(self.layout.columns, default=0) + 1]
        bands, parts = [], []
        for stage, (start, end) in enumerate(itertools.pairwise(starts)):
            column = start
            while column < end:
                until = min(end, (column // IN_ROW + 1) * IN_ROW)
                row, x, width = column // IN_ROW, CELL * (column % IN_ROW) + CELL // 2, CELL * (until - column)
                if stage % 2 == 0:
                    height = self.heights[row] - 4
                    bands.append(f"M{x} {self.tops[row]}h{width}v{height}h-{width}z")
                if column == start:
                    label = f"stage {stage + 1}" if width >= 2 * CELL else f"{stage + 1}"
                    parts.append(f"<text class=stage x={x + 4} y={self.tops[row] + 12}>{label}</text>")
                column = until
        return f'<path class="band" d="{"".join(bands)}"/>{"".join(parts)}'


def _layer(x: float, y: float, k: int, colour: str) -> str:
    """A box. Its size is in the style sheet, and the script gives it a label from the table."""
    return f'<a href=#L{k} class={colour} transform="translate({x:g} {y:g})"><rect/><text>{k + 1}</text></a>'


def _joint(x: float, y: float, op: str) -> str:
    return (
        f'<g class=joint transform="translate({x:g} {y:g})"><title>{text(op)}</title><circle/>'
        f"<text>{SIGNS.get(op, '•')}</text></g>"
    )
