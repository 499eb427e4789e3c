"""Which of several equal checkpoint tensors a node reads, told by the node's module.

A node's module is in its metadata (PyTorch's exporter, dynamo=True) or its name (`/encoder/layers.0/fc/MatMul`); a
tensor's module is the path in its key (`encoder.layers.0.fc.weight`, `params/Dense_0/kernel`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from onnx import NodeProto

SCOPES = "pkg.torch.onnx.name_scopes"
Path = tuple[str, ...]


def of_node(node: NodeProto) -> Path:
    """The path of the module that a node belongs to; empty if nothing tells."""
    for entry in node.metadata_props:
        if entry.key == SCOPES:
            try:
                return _parts(str(ast.literal_eval(entry.value)[-2]))
            except (ValueError, SyntaxError, IndexError, TypeError, RecursionError, MemoryError):
                break
    return _parts(node.name)[:-1] if "/" in node.name else ()


def best(scope: Path, keys: Sequence[str]) -> tuple[str, ...]:
    """The keys whose paths fit a scope best; all keys if no path shares a part with the scope."""
    if len(keys) < 2 or not scope:
        return tuple(keys)
    ranked = {key: _fit(scope, _parts(key)[:-1]) for key in keys}
    most = max(ranked.values())
    return tuple(key for key, rank in ranked.items() if rank == most) if most[0] else tuple(keys)


def _parts(text: str) -> Path:
    return tuple(part for part in re.split(r"[/.]", text) if part)


def _fit(scope: Path, path: Path) -> tuple[int, int]:
    """(n, n - len(path)), where n is the length of the longest common subsequence of the two paths' parts."""
    row = [0] * (len(path) + 1)
    for part in scope:
        row, previous = [0], row
        for k, other in enumerate(path):
            row.append(previous[k] + 1 if part == other else max(previous[k + 1], row[-1]))
    return row[-1], row[-1] - len(path)
