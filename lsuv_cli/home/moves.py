"""Where the elements of a constant expression come from, if its nodes only move elements.

The expression (Split, Slice, Concat, Transpose, ...) is evaluated once more with the elements of each stored tensor
replaced by their indices. The result is the index of the stored element behind each element of the constant, and is
verified with the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from lsuv_cli.model.graph import Graph, Source

Array = NDArray[Any]
MOVES = frozenset(
    {"Identity", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Split", "Slice", "Concat", "Gather",
     "SplitToSequence", "SequenceAt"}
)  # fmt: skip


@dataclass(frozen=True)
class _Numbers:
    """A source that gives the tensors in `first` as the indices of their elements, and all other tensors as values."""

    source: Source
    first: Mapping[int, int]  # id of a tensor -> the index of its first element

    def array(self, tensor: TensorProto) -> Array:
        if id(tensor) not in self.first:
            return self.source.array(tensor)
        first = self.first[id(tensor)]
        return np.arange(first, first + math.prod(tensor.dims), dtype=np.int64).reshape(tuple(tensor.dims))


@dataclass(frozen=True, eq=False)
class Origin:
    """A stored tensor, the elements of it that a constant is made of, and where they are in the constant."""

    tensor: str
    there: NDArray[np.int64]  # flat places in the stored tensor
    here: NDArray[np.int64]  # flat places in the constant
    readers: tuple[int, ...]  # the nodes of the expression that read the tensor


def origins(graph: Graph, value: str) -> tuple[Origin, ...]:
    """The stored tensors whose elements a constant consists of; none if any node computes with the elements."""
    sources = _sources(graph, value)
    stored = sorted(sources)
    first: dict[str, int] = {}
    total = 0
    for name in stored:
        first[name], total = total, total + math.prod(graph.tensors[name].dims)
    numbers = _Numbers(graph.source, {id(graph.tensors[name]): at for name, at in first.items()})
    values = graph.known(value) if stored else None
    places = replace(graph, source=numbers).known(value) if stored else None
    if values is None or places is None or places.dtype != np.int64 or places.size != values.size:
        return ()
    places, values = places.reshape(-1), values.reshape(-1)
    found: list[Origin] = []
    for name in stored:
        here = np.flatnonzero((places >= first[name]) & (places < first[name] + math.prod(graph.tensors[name].dims)))
        there = places[here] - first[name]
        if not np.array_equal(graph.array(name).reshape(-1)[there], values[here]):
            return ()
        if here.size:
            found.append(Origin(name, there, here, tuple(sources[name])))
    return tuple(found) if sum(part.here.size for part in found) == values.size else ()


def _sources(graph: Graph, value: str) -> dict[str, list[int]]:
    """The stored tensors whose elements reach a constant by moves alone, with the nodes that read them.

    Empty if there is any other node on the way.
    """
    stored: dict[str, list[int]] = {}
    seen: set[str] = set()
    wanted = [value]
    while wanted:
        name = wanted.pop()
        if name in seen or name in graph.tensors:
            continue
        seen.add(name)
        if name not in graph.producer:
            return {}
        k = graph.producer[name]
        node = graph.nodes[k]
        if node.op_type not in MOVES or node.domain not in {"", "ai.onnx"}:
            return {}
        for source in node.input if node.op_type == "Concat" else node.input[:1]:
            wanted.append(source)
            if source in graph.tensors:
                stored.setdefault(source, []).append(k)
    return stored
