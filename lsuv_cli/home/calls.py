"""The PyTorch call that each node was exported from, as PyTorch's exporter (dynamo=True) records it in metadata.

Each node carries the text of its call, `%linear = call_function[target=torch.ops.aten.linear.default](args = (%x,
%p_fc_weight, %p_fc_bias), ...)`, and the graph's metadata says which parameter `p_fc_weight` is. So a weight's name in
the module is known even if its tensor was renamed, transposed or merged with another in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import NodeProto

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
CALL = "pkg.torch.onnx.fx_node"

# Buffers that are not persistent, and tensors that are plain attributes, are not in a state dict.
_INPUT = re.compile(r"^(\w+): (?:PARAMETER|BUFFER) target='([^']+)'(?! persistent=False)", re.MULTILINE)
_CALL = re.compile(r"target=torch\.ops\.aten\.(\w+)\.\w+\]\(args = \((.*)\), kwargs = ", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """An operator of PyTorch and its positional arguments: names of parameters, or "" for anything else."""

    operator: str
    arguments: tuple[str, ...]

    def argument(self, index: int) -> str:
        return self.arguments[index] if 0 <= index < len(self.arguments) else ""


def signature(model: onnx.ModelProto) -> dict[str, str]:
    """Name in calls -> name in the state dict, for parameters and buffers; empty if the file has no signature."""
    for entry in model.graph.metadata_props:
        if entry.key == SIGNATURE:
            return dict(_INPUT.findall(entry.value))
    return {}


def of_node(node: NodeProto, known: Mapping[str, str]) -> Call | None:
    """The call that a node was exported from; None if its metadata has none."""
    for entry in node.metadata_props:
        if entry.key == CALL and (found := _CALL.search(entry.value)):
            names = (part.strip().removeprefix("%") for part in _split(found[2]))
            return Call(found[1], tuple(known.get(name, "") for name in names))
    return None


def _split(text: str) -> list[str]:
    """The text of each argument, split at commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
