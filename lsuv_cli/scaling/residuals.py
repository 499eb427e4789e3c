"""Residual streams: where a branch is added to a stream, and the target that keeps the stream's variance bounded.

A *sum* is an Add of two values that depend on the input, x + z: the stream x and the branch z.

1. x goes on a stream if it comes from an earlier sum through operators that let growth through: f(s·x) = s·f(x)
   (homogeneity.py), a Cast, an activation like GELU. A normalization or a layer ends a stream.
2. If both operands go on a stream, or neither does, the one with fewer layers on the way to it is x. With equally many,
   the sum is none of a stream and a branch.
3. The sums that go on one another are the k = 1, ..., N of one stream.
4. The last layer of a branch is the one layer from which z comes through operators that are no layers. A value that
   depends on others by their shapes only, as the shape that an exporter computes for a Reshape, is no way to a layer.
5. A sum that only Softmax reads is one of scores and a mask, and of no stream.

With every branch at variance T = 1 the stream's variance grows to Var(x_0) + N·T. Bounded, the k-th sum is to have

    Var(x + s·z) = Var(x) + 2s·Cov(x, z) + s²·Var(z) = max(Var(x_0), T) + T·k/N

whose root s gives the last layer of the branch its target s²·Var(y), y being the layer's output as it ran. The target
is at most T, and s²·Var(z) at least LEAST·T/N. So a stream that begins at T or below goes from T to 2T: where it begins
far below, as embeddings of standard deviation 0.02 do, the first branch lifts it to T at once. One that begins above T
can only be kept from growing by more than T.

Where m branches of the stream end in one weight, they add up like one branch of m times the size: T/m is in the place
of T, and the first of them lifts the stream by 1/m² of the way to T. All of Var(x), Var(z) and Cov(x, z) are measured.
Cov(x, z) is not known in time, and taken to be 0, where the layer's bias is kept or centred, its channels are scaled
one by one, or an operator between the layer and the sum does not commute with a scale.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import NodeProto

from lsuv_cli.model.constants import SHAPE_OPS
from lsuv_cli.model.flatten import label
from lsuv_cli.model.graph import Graph, is_standard
from lsuv_cli.model.layers import Layer
from lsuv_cli.report import Status
from lsuv_cli.scaling.homogeneity import commutes_with_scale
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.solve import solve
from lsuv_cli.target_variances import TargetVariances

# Activations that are nearly x, or x and 0, for large |x|.
ACTIVATIONS = frozenset({"Cast", "Celu", "Elu", "Gelu", "HardSwish", "Mish", "Selu", "Softplus", "Swish"})
VIEWS = frozenset({"Reshape", "Expand", "Slice", "Squeeze", "Unsqueeze", "Tile"})
LEAST = 0.25  # of T/N: a branch's target is no smaller, so that no branch is silenced


@dataclass(frozen=True)
class Sum:
    """x + z, the k-th of N sums of a stream."""

    name: str
    output: str
    stream: str  # x
    branch: str  # z
    layer: str  # the output of the last layer of the branch; empty if there is no such layer
    number: int  # of the stream, from 1
    k: int
    n: int
    uses: int = 1  # sums of the stream whose branches end in the same weight


def find(graph: Graph, layers: Sequence[Layer], depth: Mapping[str, int]) -> tuple[Sum, ...]:
    """All sums of streams and branches, in the order of execution. `depth`: value -> layers on the way to it."""
    return _Finder(graph, layers, depth).run()


def bounded(
    sums: Sequence[Sum], layers: Sequence[Layer], depth: Mapping[str, int], chosen: TargetVariances
) -> dict[str, Sum]:
    """Layer output -> the sum that its target keeps bounded; a target that the user gave by name stays."""
    free = {x.output: x.weight.base for x in layers if chosen.named(x.name, x.module) is None}
    uses = Counter((s.number, free[s.layer]) for s in sums if s.layer in free)
    return {
        s.layer: replace(s, uses=uses[s.number, free[s.layer]])
        for s in sums
        if s.n > 1 and s.layer in free and depth.get(s.stream, 0) < depth[s.layer]
    }


class _Finder:
    def __init__(self, graph: Graph, layers: Sequence[Layer], depth: Mapping[str, int]) -> None:
        self.graph, self.depth = graph, depth
        self.outputs = {layer.output for layer in layers}
        self.nodes = {layer.node for layer in layers}
        self.still = graph.constant | _by_shape(graph)
        self.found: dict[str, Sum] = {}  # by the sum's output

    def run(self) -> tuple[Sum, ...]:
        streams = 0
        for node in self.graph.nodes:
            operands = self.operands(node)
            if operands is None:
                continue
            x, z, earlier = operands
            streams += earlier is None
            number, k = (earlier.number, earlier.k + 1) if earlier is not None else (streams, 1)
            self.found[node.output[0]] = Sum(label(node), node.output[0], x, z, self.last_layer(z), number, k, 0)
        longest: dict[int, int] = {}
        for each in self.found.values():
            longest[each.number] = max(longest.get(each.number, 0), each.k)
        return tuple(replace(each, n=longest[each.number]) for each in self.found.values())

    def operands(self, node: NodeProto) -> tuple[str, str, Sum | None] | None:
        """x, z and the sum that x goes on, if any; None if a node is no sum of a stream and a branch."""
        if node.op_type not in {"Add", "Sum"} or not is_standard(node):
            return None
        if not len(node.input) == len(set(node.input)) == 2:
            return None
        if any(name in self.still or name in self.graph.random for name in node.input):
            return None
        readers = {self.graph.nodes[k].op_type for k in self.graph.readers.get(node.output[0], ())}
        if readers == {"Softmax"}:
            return None
        both = sorted(node.input, key=lambda name: self.depth.get(name, 0))
        earlier = [self.goes_on(name) for name in both]
        if (earlier[0] is None) == (earlier[1] is None):
            differ = self.depth.get(both[0], 0) < self.depth.get(both[1], 0)
            return (both[0], both[1], earlier[0]) if differ else None
        k = 0 if earlier[0] is not None else 1
        return both[k], both[1 - k], earlier[k]

    def goes_on(self, value: str) -> Sum | None:
        """The sum that a value comes from without a layer or a normalization in between."""
        while value not in self.found:
            k = self.graph.producer.get(value)
            if k is None or k in self.nodes or value in self.outputs:
                return None
            node = self.graph.nodes[k]
            varying = [name for name in node.input if name and name not in self.still]
            through = is_standard(node) and (node.op_type in ACTIVATIONS or self.is_view(node))
            through = through or commutes_with_scale(self.graph, node)
            if len(varying) != 1 or not through:
                return None
            value = varying[0]
        return self.found[value]

    def is_view(self, node: NodeProto) -> bool:
        """Whether a node moves its first input's numbers to other places that a computed shape gives."""
        return node.op_type in VIEWS and node.input[0] not in self.still

    def last_layer(self, value: str) -> str:
        """The one layer that a branch ends in; empty if there are several, or a way that passes no layer."""
        wanted, seen, last = [value], {value}, set()
        while wanted:
            name = wanted.pop()
            if name in self.outputs:
                last.add(name)
                continue
            k = self.graph.producer.get(name)
            if k is None or name in self.found or k in self.nodes:
                return ""
            more = {x for x in self.graph.reads(k) if x not in self.still and x not in self.graph.random}
            wanted += sorted(more - seen)
            seen |= more
        return last.pop() if len(last) == 1 else ""


def _by_shape(graph: Graph) -> frozenset[str]:
    """The values that depend on the data by shapes only."""
    found: set[str] = set()
    for k, node in enumerate(graph.nodes):
        varying = [name for name in graph.reads(k) if name not in graph.constant]
        if varying and (node.op_type in SHAPE_OPS or found.issuperset(varying)):
            found.update(name for name in node.output if name)
    return frozenset(found)


class Streams:
    """The streams of one trial: what each began with, and so what each branch may add."""

    def __init__(self, sums: Mapping[str, Sum], joint: Collection[str]) -> None:
        self.sums, self.joint = sums, joint  # layer output -> the sum it bounds; those whose z is measured with x
        self.begins: dict[int, tuple[float, int]] = {}  # stream -> Var(x_0), and the first sum that was measured
        self.lifted: dict[int, float] = {}  # stream -> what a branch was to lift it to, before the even steps

    def target(self, layer: Layer, y: Moments, measured: Mapping[str, Moments], pending: float) -> float:
        """A layer's target: its own, or the one that bounds the stream it adds to.

        `pending`: the product of the scales that were pending on the layer's input when it was measured.
        """
        if layer.output not in self.sums:
            return layer.target
        place, joint = self.sums[layer.output], layer.output in self.joint
        found = measured[place.output]
        if joint:
            found = found.times(pending * (layer.norm_factor or 1.0))
        return self._bounded(place, layer.target, y, found, joint)

    def _bounded(self, place: Sum, unit: float, y: Moments, measured: Moments, joint: bool) -> float:
        """The target of the last layer of a branch, `unit` without bounds.

        y: the layer's output as it ran. `measured`: z with x in the bias's place (`joint`), or x alone.
        """
        stream = measured.bias_variance if joint else measured.variance
        if not (math.isfinite(stream) and y.finite and y.variance > 0.0):
            return unit
        begin, first = self.begins.setdefault(place.number, (stream, place.k))
        step = unit / (place.n * place.uses)
        lifted = begin + max(unit - begin, 0.0) / place.uses**2
        lifted = self.lifted[place.number] = max(lifted, self.lifted.get(place.number, 0.0))
        goal = lifted + step * (place.k - first + 1)
        branch = max(goal - stream, LEAST * step)  # Var(s·z), if Cov(x, z) is 0
        if not joint or not measured.variance > 0.0:
            return min(branch, unit)
        scale, status = solve(measured, goal)
        if status is Status.OK:
            branch = max(scale * scale * measured.variance, LEAST * step)
        return min(branch / measured.variance * y.variance, unit)
