"""The cut: a graph becomes a short list of stages that together run it once.

Layer L's output is s·y, and s is not known until y was measured, so the nodes behind L have to wait, except that
f(s·y) = s·f(y) for ReLU, pooling, reshaping, concatenation and their like. A scale can stay *pending* through these
nodes, and through the next layer, whose measured output it merely multiplies. So:

1. Every value gets a level and the layers whose scales are pending on it. Inputs and constants have level 0 and none.
2. On a layer's output the pending scales of its input are pending, and its own scale.
3. A node that commutes with a scale (homogeneity.py), all of whose inputs have the same pending scales, passes them on;
   its output stays on their level.
4. Any other node (Tanh, Softmax, an Add of differently scaled branches) needs true values, so inputs with pending
   scales are multiplied at the start of the next stage: the node's output is on the next level. The same holds for a
   layer whose bias is kept or centred, whose channels are scaled one by one, whose weight is shared or which has an
   activation inside that does not commute with a scale, and where too much is pending: too many scales, or constants
   that multiply it out of float32's range.
5. The layers of one level form a stage. A stage runs the nodes its layers need and no earlier stage ran; it starts
   with s·y + b on its inputs. Nodes that no layer needs are never run.

Without rule 3, a layer's level would be the number of layers on the longest path to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lsuv_cli.model.constants import SHAPE_OPS
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer, by_tensor
from lsuv_cli.scaling.homogeneity import commutes_with_scale, growth
from lsuv_cli.scaling.residuals import Sum

# With weights of He's standard deviation a ReLU layer roughly keeps its input's variance; a chain of sixteen ReLU
# layers, or of sixteen linear layers, stays far inside float32's range.
MOST_PENDING = 16
# Powers of two by which constants may move the product of pending scales.
LARGEST_GROWTH = 20.0
# Most bytes of weights in one stage, so that the weights of a large model are never all in memory at once.
STAGE_BYTES = 128 << 20

Pending = tuple[str, ...]  # the outputs of the layers whose scales are not yet known


@dataclass(frozen=True)
class Step:
    """A node as it is run: a layer without its bias, or any other node as it stands."""

    node: int
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    layer: Layer | None = None


@dataclass(frozen=True)
class Stage:
    """What runs in one session."""

    steps: tuple[Step, ...]
    layers: tuple[Layer, ...]  # measured here
    inputs: tuple[str, ...]  # values read here and made outside
    outputs: tuple[str, ...]  # values made here and read by later stages


@dataclass(frozen=True)
class Plan:
    """All stages, and the scales that are pending on the values that cross from one to another."""

    stages: tuple[Stage, ...]
    pending: Mapping[str, Pending]
    in_front: Mapping[str, Pending]  # the scales pending on each measured layer's input when the layer is measured
    stage_of: Mapping[str, int]  # of each measured layer's output
    sums: Mapping[str, Sum] = field(default_factory=dict)  # layer output -> the residual sum that this layer bounds
    joint: frozenset[str] = frozenset()  # the layers whose branch can be measured together with the stream


def cut(
    graph: Graph,
    layers: Sequence[Layer],
    most_pending: int = MOST_PENDING,
    sums: Mapping[str, Sum] | None = None,
) -> Plan:
    """The plan for calibration: stages such that every layer is measured with all layers before it scaled.

    A layer that bounds a residual sum is measured where the true values of the stream are known.
    """
    depth = depths(graph, layers)
    first = first_uses(layers, depth)
    steps = _steps(graph, first)
    deciding = {layer.output: layer for layer in first}
    bounded = {name: each for name, each in (sums or {}).items() if name in deciding}
    levels = _Levels(graph, layers, first, most_pending)
    levels.streams = {name: each.stream for name, each in bounded.items()}
    levels.place_all(steps, depth)
    joint = frozenset(n for n, each in bounded.items() if not deciding[n].is_fixed and levels.together(n, each.branch))
    watched = {n: (each.stream, *([each.branch] if n in joint else [])) for n, each in bounded.items()}
    groups: dict[int, list[Layer]] = {}
    for layer in first:
        groups.setdefault(levels.level[layer.output], []).append(layer)
    at = sorted(groups)
    ordered = [groups[k] for k in at]
    stages, ran = _pull(steps, ordered, watched)
    pending = {name: levels.pending[name] if at[ran[name]] == levels.level[name] else () for name in ran}
    stage_of = {layer.output: k for k, group in enumerate(ordered) for layer in group}
    in_front = {layer.output: levels.pending[layer.output][:-1] for layer in first}
    return Plan(stages, pending, in_front, stage_of, bounded, joint)


def in_pieces(graph: Graph, layers: Sequence[Layer], limit: int) -> Plan:
    """The plan for verification: the unchanged graph in pieces of about `limit` bytes of weights; mostly one."""
    groups: list[list[Layer]] = []
    room = 0
    for layer in layers:
        size = graph.nbytes(layer.weight.base)
        if not groups or room + size > limit:
            groups.append([])
            room = 0
        groups[-1].append(layer)
        room += size
    stages, _ = _pull(_steps(graph, ()), groups, {})
    stage_of = {layer.output: k for k, group in enumerate(groups) for layer in group}
    return Plan(stages, {}, {}, stage_of)


def first_uses(layers: Sequence[Layer], depth: Mapping[str, int]) -> list[Layer]:
    """The layers that decide their weight's scale: of the layers with a tied weight, the ones nearest to the input."""
    deciding: list[Layer] = []
    for users in by_tensor(layers).values():
        nearest = min(depth[layer.output] for layer in users)
        deciding += [layer for layer in users if depth[layer.output] == nearest]
    return sorted(deciding, key=lambda layer: layer.node)


def depths(graph: Graph, layers: Sequence[Layer]) -> dict[str, int]:
    """Value -> number of layers on the longest path to it."""
    is_layer = {layer.node for layer in layers}
    depth: dict[str, int] = {}
    for k, node in enumerate(graph.nodes):
        below = max((depth.get(name, 0) for name in graph.reads(k)), default=0)
        depth.update({name: below + (k in is_layer) for name in node.output if name})
    return depth


def _steps(graph: Graph, layers: Iterable[Layer]) -> list[Step]:
    """The graph's nodes as they run: scaled layers lose their bias, which is added later or is zero."""
    by_node = {layer.node: layer for layer in layers}
    absorbed = {layer.bias.node for layer in by_node.values() if layer.bias and layer.bias.node >= 0}
    steps: list[Step] = []
    for k, node in enumerate(graph.nodes):
        makes = tuple(name for name in node.output if name)
        if all(name in graph.constant for name in makes):
            continue
        layer = by_node.get(k)
        if layer is not None:
            reads = list(node.input[:2])
            if layer.bias and layer.bias.kept:
                reads.append(layer.bias.value)
            steps.append(Step(k, _varying(graph, reads), (layer.output,), layer))
        elif k not in absorbed:
            steps.append(Step(k, _varying(graph, graph.reads(k)), makes))
    return steps


def _varying(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name not in graph.constant))


class _Levels:
    """Each value's level, and the scales pending on it for readers on its own level (rules 1 to 4)."""

    def __init__(self, graph: Graph, layers: Sequence[Layer], first: Sequence[Layer], most_pending: int) -> None:
        self.level: dict[str, int] = dict.fromkeys(graph.inputs, 0)
        self.pending: dict[str, Pending] = dict.fromkeys(graph.inputs, ())
        self._growth: dict[str, float] = {}  # powers of two by which constants moved a value with pending scales
        self._graph, self._most_pending = graph, most_pending
        self._only_multiplied = {layer.output for layer in first if layer.norm_factor is not None}
        self._users = by_tensor(first)
        self._shared = {base for base, users in by_tensor(layers).items() if len(users) > 1}
        deciding = {layer.node for layer in first}
        self._later = {layer.node: layer.weight.base for layer in layers if layer.node not in deciding}
        self._fixed = {x.output for x in first if x.is_fixed}
        self._settled_after: dict[str, int] = {}  # the level that knows a shared weight's scale
        self._load: dict[int, int] = {}  # bytes of weights on each level
        self.streams: Mapping[str, str] = {}  # layer output -> the stream that is measured with it

    def place_all(self, steps: Sequence[Step], depth: Mapping[str, int]) -> None:
        # All layers of one depth come before the nodes that read them, and no layer reads another of its depth.
        for step in sorted(steps, key=lambda s: (depth[s.makes[0]], s.layer is None and s.node not in self._later)):
            at, scales = self._place(step)
            if step.layer is not None and step.layer.weight.base in self._shared:
                at = self._gather(step.layer.weight.base, at)
            moved = self._moved(step) if scales else 0.0
            for name in step.makes:
                self.level[name], self.pending[name], self._growth[name] = at, scales, moved

    def _place(self, step: Step) -> tuple[int, Pending]:
        at = max((self.level[name] for name in step.reads), default=0)
        stream = self.streams.get(step.makes[0], "")
        if stream in self.level:
            at = max(at, self.level[stream] + bool(self.pending[stream]))
        if step.node in self._later:
            at = max(at, self._settled_after[self._later[step.node]])
        open_scales = [self.pending[name] for name in step.reads if self.level[name] == at and self.pending[name]]
        same = len(set(open_scales)) == 1 and len(open_scales) == len(step.reads)
        scales = open_scales[0] if open_scales else ()
        movable = same and not self._fixed.intersection(scales) and abs(self._moved(step)) <= LARGEST_GROWTH
        if step.layer is not None:
            return self._place_layer(step.layer, at, scales, movable)
        node = self._graph.nodes[step.node]
        if not open_scales or node.op_type in SHAPE_OPS:
            return at, ()
        if movable and (commutes_with_scale(self._graph, node) or node.input[0] in self._only_multiplied):
            return at, scales
        return at + 1, ()

    def together(self, layer: str, branch: str) -> bool:
        """Whether a branch is on its last layer's level, with the same scales pending."""
        return self.level[layer] == self.level.get(branch) and self.pending[layer] == self.pending[branch]

    def _moved(self, step: Step) -> float:
        """log2 of the factor by which constants moved a step's output: its most moved input's plus its own."""
        own = 0.0 if step.layer is not None else growth(self._graph, self._graph.nodes[step.node])
        return max((self._growth.get(name, 0.0) for name in step.reads), key=abs, default=0.0) + own

    def _place_layer(self, layer: Layer, at: int, scales: Pending, movable: bool) -> tuple[int, Pending]:
        size = self._graph.nbytes(layer.weight.base)
        alone = layer.weight.base in self._shared or layer.output in self._fixed
        too_much = len(scales) >= self._most_pending or self._load.get(at, 0) + size > STAGE_BYTES
        if scales and (alone or too_much or not movable):
            at, scales = at + 1, ()
        self._load[at] = self._load.get(at, 0) + size
        return at, (*scales, layer.output)

    def _gather(self, base: str, at: int) -> int:
        """Put the layers of a tied weight on the highest of their levels: they are measured in one stage."""
        placed = [user.output for user in self._users[base] if user.output in self.level]
        at = max([at, *(self.level[name] for name in placed)])
        self.level |= dict.fromkeys(placed, at)
        self._settled_after[base] = at + 1
        return at


def _pull(
    steps: Sequence[Step], groups: Sequence[Sequence[Layer]], watched: Mapping[str, Sequence[str]]
) -> tuple[tuple[Stage, ...], dict[str, int]]:
    """A stage per group of layers: the steps it needs that no earlier stage ran (rule 5). Also value -> its stage.

    `watched`: layer output -> other values that are measured in its stage.
    """
    maker = {name: k for k, step in enumerate(steps) for name in step.makes}
    bias_of = {
        step.layer.output: step.layer.bias.value
        for step in steps
        if step.layer and step.layer.bias and step.layer.bias.kept and not step.layer.bias.constant
    }
    ran: dict[str, int] = {}
    steps_of: list[list[Step]] = []
    reads: list[set[str]] = []
    for index, group in enumerate(groups):
        others = {name for layer in group for name in watched.get(layer.output, ())}
        wanted = [*(layer.output for layer in group), *others]
        mine: set[int] = set()
        while wanted:
            name = wanted.pop()
            k = maker.get(name)
            if k is not None and k not in mine and name not in ran:
                mine.add(k)
                wanted.extend(steps[k].reads)
        here = [steps[k] for k in sorted(mine)]
        made = {name for step in here for name in step.makes}
        ran.update(dict.fromkeys(made, index))
        outside = ({name for step in here for name in step.reads} | others) - made
        # s·y + b is computed where y is read, so a bias b that nodes compute is an input of that stage too.
        outside |= {bias_of[name] for name in outside if name in bias_of}
        steps_of.append(here)
        reads.append(outside)
    stages = []
    for index, here in enumerate(steps_of):
        later = set().union(*reads[index + 1 :])
        making = [name for step in here for name in step.makes]
        stages.append(
            Stage(
                tuple(here),
                tuple(groups[index]),
                tuple(sorted(reads[index])),
                tuple(name for name in making if name in later),
            )
        )
    return tuple(stages), ran
