"""The cut: a graph becomes a short list of stages that together run it once.

Layer L's output is s·y with s not known until y was measured, so whatever follows it has to wait, but for this:
ReLU, pooling, reshaping, concatenation and their like give s·f(y) for s·y. A scale that is still *owed* can be
carried through them, and through the next layer, whose own measurement it merely multiplies. So:

1. Every value gets a level and the layers whose scales it owes. Inputs and constants have level 0 and owe nothing.
2. A layer's output owes what its input owes, and its own scale.
3. A node that carries scales, all of whose inputs owe the same, owes that too; it stays on their level.
4. Any other node must know its inputs: those that owe anything are settled first, which takes the next level.
   The same holds for a layer whose bias is kept, whose weight is shared or which has an activation inside that
   carries no scale, and where a chain gets too long.
5. The layers of one level form a stage. A stage runs the nodes its layers need and no earlier stage ran; it starts
   with s·y + b on what it is fed. Nodes that no layer needs are never run.

With rule 3 left out this is "layers that share the number of layers on the longest path to them".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer, by_tensor
from lsuv_cli.scaling.homogeneity import carries

IGNORES_SCALE = frozenset({"Shape", "Size"})
# With weights of He's standard deviation a ReLU layer keeps its input's scale roughly; sixteen of them, and sixteen
# linear ones too, stay far inside float32's range.
LONGEST_CHAIN = 16
# So that the weights of a large model are never all in memory at once.
STAGE_BYTES = 128 << 20

Owed = tuple[str, ...]  # the outputs of the layers whose scales are still missing


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
    inputs: tuple[str, ...]  # read here and made outside
    outputs: tuple[str, ...]  # made here and read later


@dataclass(frozen=True)
class Plan:
    """All stages, and what the values that cross from one to another owe."""

    stages: tuple[Stage, ...]
    owed: Mapping[str, Owed]
    chain: Mapping[str, Owed]  # what each measured layer's input owes when the layer is measured
    stage_of: Mapping[str, int]  # of each measured layer's output
    keeps_bias: frozenset[str]  # outputs of the layers whose bias is added after scaling
    # Outputs of the layers that only a BatchNormalization reads which multiplies by this one number.
    multiplied: Mapping[str, float] = field(default_factory=dict)


def cut(
    graph: Graph,
    layers: Sequence[Layer],
    keeps_bias: Collection[str],
    bytes_of: Mapping[str, int],
    multiplied: Mapping[str, float] | None = None,
) -> Plan:
    """The stages in which the layers can be scaled one after another, each with all before it scaled."""
    depth = _depths(graph, layers)
    first = first_uses(graph, layers, depth)
    steps = _steps(graph, first, keeps_bias)
    scaled = {layer.output for layer in first} - set(keeps_bias)
    multiplied = {name: number for name, number in (multiplied or {}).items() if name in scaled}
    levels = _Levels(graph, layers, first, keeps_bias, bytes_of, multiplied)
    levels.place_all(steps, depth)
    level, owed = levels.level, levels.owed
    groups: dict[int, list[Layer]] = {}
    for layer in first:
        groups.setdefault(level[layer.output], []).append(layer)
    ordered = [groups[k] for k in sorted(groups)]
    stages, ran = _pull(graph, steps, ordered, keeps_bias)
    at = sorted(groups)
    crossing = {name: owed[name] if at[ran[name]] == level[name] else () for name in ran}
    stage_of = {layer.output: k for k, group in enumerate(ordered) for layer in group}
    chain = {layer.output: owed[layer.output][:-1] for layer in first}
    return Plan(stages, crossing, chain, stage_of, frozenset(keeps_bias), multiplied)


def segments(
    graph: Graph,
    layers: Sequence[Layer],
    bytes_of: Mapping[str, int],
    limit: int,
    multiplied: Mapping[str, float] | None = None,
) -> Plan:
    """The whole graph as it stands, in as few pieces as its weights' size allows: one, for most models."""
    groups: list[list[Layer]] = []
    room = 0
    for layer in layers:
        size = bytes_of.get(layer.weight.base, 0)
        if not groups or room + size > limit:
            groups.append([])
            room = 0
        groups[-1].append(layer)
        room += size
    stages, _ = _pull(graph, _steps(graph, (), ()), groups, ())
    stage_of = {layer.output: k for k, group in enumerate(groups) for layer in group}
    return Plan(stages, {}, {}, stage_of, frozenset(), multiplied or {})


def first_uses(graph: Graph, layers: Sequence[Layer], depth: Mapping[str, int] | None = None) -> list[Layer]:
    """The layers that decide their weight's scale: of those that share one, the ones nearest to the input."""
    depth = depth if depth is not None else _depths(graph, layers)
    chosen: list[Layer] = []
    for users in by_tensor(layers).values():
        nearest = min(depth[layer.output] for layer in users)
        chosen += [layer for layer in users if depth[layer.output] == nearest]
    return sorted(chosen, key=lambda layer: layer.node)


def _depths(graph: Graph, layers: Sequence[Layer]) -> dict[str, int]:
    """For each value the number of layers on the longest path to it."""
    is_layer = {layer.node for layer in layers}
    depth: dict[str, int] = {}
    for k, node in enumerate(graph.nodes):
        below = max((depth.get(name, 0) for name in graph.reads(k)), default=0)
        depth.update({name: below + (k in is_layer) for name in node.output if name})
    return depth


def _steps(graph: Graph, layers: Iterable[Layer], keeps_bias: Collection[str]) -> list[Step]:
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
            reads = [name for i, name in enumerate(node.input[:2]) if i != layer.position]
            if layer.bias and layer.output in keeps_bias:
                reads.append(layer.bias.value)
            steps.append(Step(k, _varying(graph, reads), (layer.output,), layer))
        elif k not in absorbed:
            steps.append(Step(k, _varying(graph, graph.reads(k)), makes))
    return steps


def _varying(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name not in graph.constant))


class _Levels:
    """Each value's level, and what it owes to readers on its own level (rules 1 to 4)."""

    def __init__(
        self,
        graph: Graph,
        layers: Sequence[Layer],
        first: Sequence[Layer],
        keeps_bias: Collection[str],
        bytes_of: Mapping[str, int],
        multiplied: Collection[str],
    ) -> None:
        self.level: dict[str, int] = dict.fromkeys(graph.inputs, 0)
        self.owed: dict[str, Owed] = dict.fromkeys(graph.inputs, ())
        self._graph, self._bytes_of, self._multiplied = graph, bytes_of, multiplied
        self._users = by_tensor(first)
        self._shared = {base for base, users in by_tensor(layers).items() if len(users) > 1}
        deciding = {layer.node for layer in first}
        self._later = {layer.node: layer.weight.base for layer in layers if layer.node not in deciding}
        self._fixed = {x.output for x in first if x.output in keeps_bias or not x.is_linear(keeps_bias)}
        self._settled_after: dict[str, int] = {}  # the level that knows a shared weight's scale
        self._load: dict[int, int] = {}  # bytes of weights on each level

    def place_all(self, steps: Sequence[Step], depth: Mapping[str, int]) -> None:
        # All layers of one depth come before what reads them, and none of them reads another.
        for step in sorted(steps, key=lambda s: (depth[s.makes[0]], s.layer is None and s.node not in self._later)):
            at, scales = self._place(step)
            if step.layer is not None and step.layer.weight.base in self._shared:
                at = self._gather(step.layer.weight.base, at)
            for name in step.makes:
                self.level[name], self.owed[name] = at, scales

    def _place(self, step: Step) -> tuple[int, Owed]:
        at = max((self.level[name] for name in step.reads), default=0)
        if step.node in self._later:
            at = max(at, self._settled_after[self._later[step.node]])
        open_scales = [self.owed[name] for name in step.reads if self.level[name] == at and self.owed[name]]
        same = len(set(open_scales)) == 1 and len(open_scales) == len(step.reads)
        carried = open_scales[0] if open_scales else ()
        movable = same and not self._fixed.intersection(carried)
        if step.layer is not None:
            return self._place_layer(step.layer, at, carried, movable)
        node = self._graph.nodes[step.node]
        if not open_scales or node.op_type in IGNORES_SCALE:
            return at, ()
        if movable and (carries(self._graph, node) or node.input[0] in self._multiplied):
            return at, carried
        return at + 1, ()

    def _place_layer(self, layer: Layer, at: int, carried: Owed, movable: bool) -> tuple[int, Owed]:
        size = self._bytes_of.get(layer.weight.base, 0)
        alone = layer.weight.base in self._shared or layer.output in self._fixed
        too_much = len(carried) >= LONGEST_CHAIN or self._load.get(at, 0) + size > STAGE_BYTES
        if carried and (alone or too_much or not movable):
            at, carried = at + 1, ()
        self._load[at] = self._load.get(at, 0) + size
        return at, (*carried, layer.output)

    def _gather(self, base: str, at: int) -> int:
        """The level of a shared weight's uses, which are measured together, in the stage of the last of them."""
        placed = [user.output for user in self._users[base] if user.output in self.level]
        at = max([at, *(self.level[name] for name in placed)])
        self.level |= dict.fromkeys(placed, at)
        self._settled_after[base] = at + 1
        return at


def _pull(
    graph: Graph, steps: Sequence[Step], groups: Sequence[Sequence[Layer]], keeps_bias: Collection[str]
) -> tuple[tuple[Stage, ...], dict[str, int]]:
    """For each group of layers the steps it needs that no earlier group ran (rule 5), and where each value is made."""
    maker = {name: k for k, step in enumerate(steps) for name in step.makes}
    bias_of = {
        step.layer.output: step.layer.bias.value
        for step in steps
        if step.layer and step.layer.bias and not step.layer.bias.constant and step.layer.output in keeps_bias
    }
    ran: dict[str, int] = {}
    chosen: list[list[Step]] = []
    reads: list[set[str]] = []
    for index, group in enumerate(groups):
        wanted = [layer.output for layer in group]
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
        outside = {name for step in here for name in step.reads} - made
        # A bias that is itself computed has to be there when the layer's output is put together.
        outside |= {bias_of[name] for name in outside if name in bias_of}
        chosen.append(here)
        reads.append(outside)
    stages = []
    for index, here in enumerate(chosen):
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
