"""Where in the network's checkpoint the constants of an exported model come from.

Every place where a node reads a constant is a use. The constant is found in the checkpoint by its values, as

1. a copy of a tensor, a slice of one or a join of several (values.py);
2. a weight under weight normalization, or with its BatchNorm folded into it (parametrizations.py);
3. a tensor multiplied by fixed numbers (products.py).

Equal tensors are told apart by the module that the use belongs to (scopes.py), then by the constant's own name.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.errors import LsuvError
from lsuv_cli.home import fingerprints, moves, products, scopes
from lsuv_cli.home import parametrizations as computed
from lsuv_cli.home.checkpoints import Checkpoint, is_float
from lsuv_cli.home.layouts import Layout
from lsuv_cli.home.parametrizations import Multiple, Normalized, Shifted
from lsuv_cli.home.products import Multiplied
from lsuv_cli.home.values import Copies, Finder, Fragment, Tensors
from lsuv_cli.model import batch_norm
from lsuv_cli.model.graph import Graph, attribute
from lsuv_cli.model.layers import Layer, LayerSet

Array = NDArray[Any]
Read = Callable[[str], Array]
Place = tuple[str, int]  # a node's first output, and which of its inputs

FOLDED = 5e-3  # a weight that differs from the checkpoint's by more than this has its BatchNorm folded in
ABSENT = "no tensor of the checkpoint has its values"
UNFOLDED = (
    "export without folding: optimize=False (dynamo=True), or training=torch.onnx.TrainingMode.PRESERVE and "
    "do_constant_folding=False (dynamo=False)"
)


@dataclass(frozen=True)
class Use:
    """A place where a node reads a constant."""

    place: Place
    name: str  # of the constant
    node: str
    op: str
    scope: scopes.Path
    layer: Layer | None = None  # whose weight it is
    bias_of: Layer | None = None
    written: bool = False  # an initialization may change it
    manner: tuple[Any, ...] = ()  # operator, input and transposition: uses alike in these share a layout


@dataclass(frozen=True, eq=False)
class Parts:
    """A constant made of parts of checkpoint tensors. A fragment has several keys if nothing tells them apart."""

    fragments: tuple[Fragment, ...]
    shape: tuple[int, ...]
    others: tuple[str, ...] = ()  # tensors of the same values in another shape or type

    @property
    def keys(self) -> tuple[str, ...]:
        return (*(key for fragment in self.fragments for key in fragment.keys), *self.others)

    @property
    def ambiguous(self) -> bool:
        return bool(self.others) or any(len(fragment.keys) > 1 for fragment in self.fragments)

    def read(self, tensors: Tensors) -> Array:
        if len(self.fragments) == 1:
            return self.fragments[0].read(tensors)
        whole = np.empty(self.shape, np.float64)
        for fragment in self.fragments:
            assert fragment.place is not None
            fragment.place.of(whole)[...] = fragment.read(tensors)
        return whole

    def write(self, value: Array, tensors: Tensors) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for fragment in self.fragments:
            for key in fragment.keys:
                target = found.setdefault(key, np.array(tensors(key), order="C"))
                with np.errstate(over="ignore"):  # found when the value is read back
                    fragment.write(target, value)
        return found


Origin = Parts | Normalized | Multiple | Shifted | Multiplied


@dataclass(frozen=True)
class Matching:
    """The checkpoint tensors that each use's values come from, in the model as exported."""

    checkpoint: Checkpoint
    uses: tuple[Use, ...]
    digests: Mapping[str, bytes]  # of the constants as exported
    origins: Mapping[Place, Origin]
    reasons: Mapping[Place, str]  # why a use has no origin
    copies: tuple[Copies, ...]  # equal tensors of two axes or more

    @property
    def warnings(self) -> Iterator[str]:
        """A warning if BatchNorms are folded into weights: the network has its variance of 1 behind the BatchNorm."""
        folded = [
            x for x in self.origins.values() if isinstance(x, Multiple) and np.any(np.abs(x.factors - 1) > FOLDED)
        ]
        if folded:
            yield (
                f"{len(folded)} weight{'s have their' if len(folded) > 1 else ' has its'} BatchNorm folded in: at home "
                f"variance 1 holds behind the BatchNorm; {UNFOLDED}"
            )


def match(graph: Graph, found: LayerSet, read: Read, checkpoint: Checkpoint) -> Matching:
    """Find the values of every constant in the checkpoint. `graph` is that of the model as exported."""
    return _Matcher(graph, found, read, checkpoint).run()


class _Matcher:
    def __init__(self, graph: Graph, found: LayerSet, read: Read, checkpoint: Checkpoint) -> None:
        self.graph, self.found, self.read, self.checkpoint = graph, found, read, checkpoint
        self.finder = Finder(checkpoint)
        self.uses = list(_uses(graph, found))
        self.readers = Counter(use.name for use in self.uses)
        self.origins: dict[Place, Origin] = {}
        self.reasons: dict[Place, str] = {}
        self.layouts: dict[tuple[Any, ...], set[tuple[int, ...]]] = defaultdict(set)

    def run(self) -> Matching:
        digests: dict[str, bytes] = {}
        by_name: dict[str, list[Use]] = defaultdict(list)
        for use in self.uses:
            by_name[use.name].append(use)
        for name, uses in by_name.items():
            value = self.graph.known(name)
            if value is not None and is_float(value) and value.size:
                digests[name] = fingerprints.digest(value)
                self.constant(value, uses)
        self.settle_layouts()
        uses = [use for use in self.uses if use.name in digests]
        self.complain_if_strange(uses)
        tied = self.tie_tables()
        copies = tuple(
            c for c in self.finder.copies if len(c.keys) > 1 < len(c.shape) and not tied.keys() & set(c.keys)
        )
        checkpoint = replace(self.checkpoint, same={**self.checkpoint.same, **tied})
        return Matching(checkpoint, tuple(uses), digests, self.origins, self.reasons, copies)

    def constant(self, value: Array, uses: list[Use]) -> None:
        """The origin of one constant, for each of its uses."""
        weights = [use for use in uses if use.layer is not None]
        written = any(use.written for use in uses)
        normalized = list(computed.normalized(self.checkpoint, value)) if weights else []
        found = [] if normalized else self.finder.whole(value)
        if not found and not normalized and written:
            found = self.finder.parts(value)
        for use in uses:
            if found:
                self.exact(use, value, found)
            elif use.written and not normalized and (origin := self.multiplied(use)) is not None:
                self.origins[use.place] = origin
            elif use.layer is not None:
                self.recomputed(use, value, normalized)
            if use.place not in self.origins:
                self.reasons.setdefault(use.place, self.missing(use))

    def exact(self, use: Use, value: Array, found: list[tuple[Fragment, ...]]) -> None:
        """Choose among equal tensors by the use's module, then by the constant's own name."""
        if isinstance(self.origins.get(use.place), Shifted):
            return
        others: tuple[str, ...] = ()
        if len(found[0]) > 1:  # a join
            fragments = tuple(replace(p, keys=self.told(use, p.keys)) for p in found[0])
        else:
            keys = self.told(use, [key for (fragment,) in found for key in fragment.keys])
            (first,) = next(fragments for fragments in found if keys[0] in fragments[0].keys)
            fragments = (replace(first, keys=tuple(key for key in keys if key in first.keys)),)
            others = tuple(key for key in keys if key not in first.keys)
        for fragment in fragments:
            if use.layer is not None and (
                key := next((k for k in fragment.keys if _parametrized(self.checkpoint, k)), "")
            ):
                self.reasons[use.place] = f"the module computes its weight from {key}"
                return
            if len(fragment.layouts) == 1 and not fragment.plain:
                self.layouts[use.manner].add(fragment.layouts[0].permutation)
        self.origins[use.place] = Parts(fragments, value.shape, others)

    def multiplied(self, use: Use) -> Multiplied | None:
        """The origin of a constant that is computed as a product of a checkpoint tensor and fixed numbers."""
        product = products.find(self.graph, use.name)
        if product is None:
            return None
        value = self.graph.array(product.tensor)
        found = self.finder.whole(value)
        keys = self.told(use, [key for (fragment,) in found for key in fragment.keys])
        fragments = [replace(fragment, keys=keys) for (fragment,) in found if set(keys) <= set(fragment.keys)]
        if len(keys) != 1 or len(fragments) != 1 or len(fragments[0].layouts) != 1:
            return None
        others = [self.finder.whole(self.graph.array(name)) for name in product.others]
        fixed = tuple(key for found in others for (fragment,) in found for key in fragment.keys)
        return Multiplied(Parts((fragments[0],), value.shape), product, value.shape, fixed)

    def told(self, use: Use, keys: Iterable[str]) -> tuple[str, ...]:
        best = scopes.best(use.scope, list(keys))
        return (use.name,) if use.name in best and self.readers[use.name] == 1 else best

    def recomputed(self, use: Use, value: Array, normalized: list[Normalized]) -> None:
        """The origin of a weight that is no copy: weight normalization, or a folded BatchNorm."""
        assert use.layer is not None
        if normalized:
            best = scopes.best(use.scope, [item.v for item in normalized])
            if len(best) == 1:
                self.origins[use.place] = next(item for item in normalized if item.v == best[0])
            else:
                self.reasons[use.place] = f"it may be of {', '.join(best)}, which are equal"
            return
        keys = [key for copies in self.finder.copies if not copies.plain for key in copies.keys]
        free = [key for key in keys if not _parametrized(self.checkpoint, key)]
        multiples = computed.multiples(self.checkpoint, free, value, use.layer.form)
        best = scopes.best(use.scope, list(dict.fromkeys(item.key for item in multiples)))
        if len(best) != 1:
            return
        multiple = next(item for item in multiples if item.key == best[0])
        if not np.all(multiple.factors):
            self.reasons[use.place] = f"a BatchNorm that multiplies by 0 is folded into it; {UNFOLDED}"
            return
        norms = computed.norms(self.checkpoint, multiple.factors, value.dtype)
        if not norms:
            what = f"it is {multiple.key} multiplied channel by channel"
            self.reasons[use.place] = f"{what}, and no BatchNorm of the checkpoint explains the factors"
            return
        self.origins[use.place] = multiple
        self.fold(use.layer, multiple, norms)

    def fold(self, layer: Layer, multiple: Multiple, norms: list[computed.Norm]) -> None:
        """The origin of a bias into which a BatchNorm was folded."""
        use = next((use for use in self.uses if use.bias_of is layer), None)
        bias = self.graph.known(use.name) if use is not None else None
        if use is None or bias is None or not np.any(bias) or bias.size != multiple.factors.size:
            return
        found = computed.shifted(self.checkpoint, norms, multiple.factors, bias)
        if found is not None:
            self.origins[use.place] = found
            self.reasons.pop(use.place, None)
        elif not isinstance(self.origins.get(use.place), Parts):
            self.reasons[use.place] = f"a BatchNorm is folded into it; {UNFOLDED}"

    def missing(self, use: Use) -> str:
        if use.name in self.graph.tensors:
            return ABSENT
        ops = dict.fromkeys(op for op in _operators(self.graph, use.name) if op != "Constant")
        if ops.keys() <= moves.MOVES:
            return ABSENT
        return f"it is computed by {', '.join(ops)}, which cannot be undone"

    def settle_layouts(self) -> None:
        """Where repeated values allow several layouts, take the one that the constant's own name tells.

        If it tells none, it is the one that all other uses of the same manner have.
        """
        for use in self.uses:
            origin = self.origins.get(use.place)
            if isinstance(origin, Parts) and any(len(fragment.layouts) > 1 for fragment in origin.fragments):
                known = self.layouts.get(use.manner, set())
                fragments = tuple(
                    replace(
                        fragment,
                        layouts=self.layout_by_name(use, fragment)
                        or tuple(x for x in fragment.layouts if {x.permutation} == known)
                        or fragment.layouts,
                    )
                    for fragment in origin.fragments
                )
                self.origins[use.place] = replace(origin, fragments=fragments)

    def layout_by_name(self, use: Use, fragment: Fragment) -> tuple[Layout, ...]:
        """The layout of a constant whose stored tensor has the name and the shape of a checkpoint tensor.

        The name may be that of an equal tensor, which an exporter merged with this one.
        """
        if fragment.part or fragment.place:
            return ()
        found = moves.origins(self.graph, use.name)
        name = found[0].tensor if len(found) == 1 else use.name
        shape = self.checkpoint.tensors[fragment.keys[0]].shape
        stored = self.checkpoint.tensors.get(name)
        if stored is None or name not in self.graph.tensors or not stored.shape == self.graph.shape(name) == shape:
            return ()
        places = np.arange(math.prod(shape))
        if found:
            places[found[0].here] = found[0].there
        indices = np.arange(places.size).reshape(shape)
        return tuple(x for x in fragment.layouts if np.array_equal(x.forward(indices).reshape(-1), places))[:1]

    def tie_tables(self) -> dict[str, str]:
        """Treat checkpoint tensors that equal an embedding table as tied to it: equal random tables are no accident.

        Returns tied key -> the key that stands for all of them.
        """
        first: dict[str, str] = {}
        tables = {key for use in self.uses if use.op == "Gather" for key in keys_of(self.origins.get(use.place))}
        for copies in self.finder.copies:
            if len(copies.keys) > 1 and len(copies.shape) > 1 and not copies.plain and tables & set(copies.keys):
                first |= dict.fromkeys(copies.keys, copies.keys[0])
        for place, origin in self.origins.items():
            if isinstance(origin, Parts) and first.keys() & set(origin.keys):
                fragments = tuple(
                    replace(fragment, keys=tuple(dict.fromkeys(first.get(key, key) for key in fragment.keys)))
                    for fragment in origin.fragments
                )
                self.origins[place] = replace(origin, fragments=fragments)
        return {key: other for key, other in first.items() if key != other}

    def complain_if_strange(self, uses: list[Use]) -> None:
        weights = [use for use in uses if use.layer is not None]
        if weights and not any(use.place in self.origins for use in weights):
            (reason, _), *_ = Counter(self.reasons[use.place] for use in weights).most_common(1)
            subject = f"`like` {self.checkpoint.name}" if self.checkpoint.path else self.checkpoint.name
            hint = "; give the checkpoint of the network as it was exported" if reason == ABSENT else ""
            raise LsuvError(f"{subject} has none of the model's {len(weights)} weights ({reason}){hint}")


def _uses(graph: Graph, found: LayerSet) -> Iterator[Use]:
    weights = {(layer.node, layer.position): layer for layer in found.layers}
    biases = {
        (layer.bias.node if layer.bias.node >= 0 else layer.node, layer.bias.position): layer
        for layer in found.layers
        if layer.bias is not None and layer.bias.constant
    }
    written = {*weights, *biases, *batch_norm.resets(graph, list(batch_norm.behind(graph, found.layers)))}
    written |= {(item.node, k) for item in found.recurrent for k in (1, 2)}
    for k, node in enumerate(graph.nodes):
        output = next((name for name in node.output if name), "")
        if not output or output in graph.constant:
            continue
        for position, name in enumerate([*node.input, *graph.captured.get(k, ())]):
            if not name or name not in graph.constant:
                continue
            bias_of = biases.get((k, position))
            scope = scopes.of_node(node) or (scopes.of_node(graph.nodes[bias_of.node]) if bias_of else ())
            manner = (node.op_type, position, attribute(node, "transA", 0), attribute(node, "transB", 0))
            yield Use(
                (output, position), name, node.name or output, node.op_type, scope,
                weights.get((k, position)), bias_of, (k, position) in written, manner,
            )  # fmt: skip


def keys_of(origin: Origin | None) -> tuple[str, ...]:
    """The checkpoint tensors that a constant comes from."""
    return origin.keys if origin is not None else ()


def _operators(graph: Graph, name: str) -> Iterator[str]:
    wanted, seen = [name], set()
    while wanted:
        k = graph.producer.get(wanted.pop())
        if k is not None and k not in seen:
            seen.add(k)
            yield graph.nodes[k].op_type
            wanted.extend(graph.reads(k))


def _parametrized(checkpoint: Checkpoint, key: str) -> bool:
    """Whether a module computes its weight from this tensor (by torch.nn.utils.parametrize or the older hooks)."""
    stem, _, last = key.rpartition(".")
    older = {"weight_v": "weight_g", "weight_g": "weight_v", "weight_orig": "weight_u"}
    return "parametrizations" in key.split(".") or f"{stem}.{older.get(last, '')}" in checkpoint.tensors
