"""The variances as node data of Google's Model Explorer, which shows them over the graph.

One object, its `GraphNodeData`: `results`, node -> value; `thresholds`, for values up to each one the node's colours.
Nodes are known by their names there, so that the layer of a node without a name is not coloured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lsuv_cli.page.drawing import SHADES
from lsuv_cli.page.table import target_of

COLOURS = ("#253f8e", "#3d6cc0", "#7ea6dd", "#c3d7ef", "#bfe3c8", "#f7d9b5", "#f0a869", "#d9682e", "#a01f16")
LIGHT_TEXT = frozenset({0, 1, 8})  # colours on which dark text cannot be read
HIGHEST = 1e308  # of the last colour


def node_data(report: Mapping[str, Any]) -> dict[str, Any]:
    """The variance of every measured layer, coloured by its distance from the target."""
    target = next((target_of(layer) for layer in report["layers"] if layer.get("target") is not None), 1.0)
    limits = [*(target * 10.0**limit for limit in SHADES), HIGHEST]
    return {
        "name": "lsuv: variance of the output",
        "results": {
            layer["name"]: {"value": layer["variance"]} for layer in report["layers"] if layer["variance"] is not None
        },
        "thresholds": [
            {"value": limit, "bgColor": colour, "textColor": "#ffffff" if k in LIGHT_TEXT else "#1b2027"}
            for k, (limit, colour) in enumerate(zip(limits, COLOURS, strict=True))
        ],
    }
