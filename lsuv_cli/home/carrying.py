"""The new weights in the network's own checkpoint.

1. Each use of a constant (matching.py) is compared between the exported and the edited model. If its values changed,
   the new values are written to the checkpoint tensors that the old values came from.
2. Then every use is read back from the new checkpoint. A tensor that does not reproduce the model's values for all its
   uses (one tensor in the checkpoint, two in the model) keeps its old values, and its changed uses are reported as
   not carried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.errors import LsuvError
from lsuv_cli.home import fingerprints
from lsuv_cli.home.layouts import SMALLEST
from lsuv_cli.home.matching import Matching, Origin, Parts, Place, Read, Use, keys_of
from lsuv_cli.home.parametrizations import Multiple, Shifted, precision
from lsuv_cli.home.products import Multiplied
from lsuv_cli.home.values import Region
from lsuv_cli.model.graph import Graph
from lsuv_cli.report import Carried, NotCarried

Array = NDArray[Any]

FEW_VALUES = 8  # a tensor of no more different values may equal another one by chance


def carry(matching: Matching, graph: Graph, read: Read) -> tuple[dict[str, Array], Carried, list[str]]:
    """The whole checkpoint with the edited model's values, the counts for the report, and warnings."""
    return _Carrier(matching, graph, read).run()


class _Carrier:
    def __init__(self, matching: Matching, graph: Graph, read: Read) -> None:
        self.matching, self.graph, self.read = matching, graph, read
        self.before = matching.checkpoint.tensors
        self.after: dict[str, Array] = {}
        self.names = {use.place: _name(graph, use.place) for use in matching.uses}
        self.digests = {name: fingerprints.digest(self.value(name)) for name in dict.fromkeys(self.names.values())}
        self.changed = [use for use in matching.uses if self.digest(use) != matching.digests[use.name]]
        self.places = {use.place for use in self.changed}
        self.origins = dict(matching.origins)
        self.failed: dict[Place, str] = {}
        self.followed: dict[str, str] = {}  # unread copy -> the tensor whose new values it was given

    def value(self, name: str) -> Array:
        value = self.graph.known(name)
        assert value is not None  # it could be worked out before the model was edited
        return value

    def digest(self, use: Use) -> bytes:
        return self.digests[self.names[use.place]]

    def tensor(self, key: str) -> Array:
        return self.after.get(key, self.before[key])

    def run(self) -> tuple[dict[str, Array], Carried, list[str]]:
        self.settle_equal()
        for use in self.changed:
            self.write(use)
        self.verify()
        self.leave_half_folded()
        self.verify()
        self.settle_unread()
        same = self.matching.checkpoint.same
        tensors = {key: self.tensor(same.get(key, key)) for key in self.before}
        return tensors, self.summary(), self.warnings()

    def warnings(self) -> list[str]:
        """A warning if tensors that the model does not read were given new values, as copies of others."""
        if not self.followed:
            return []
        (copy, first), *more = self.followed.items()
        others = f", and {len(more)} more like it" if more else ""
        return [
            f"{copy} equals {first} in the checkpoint and was given its new values too{others}: the exporter may have "
            "merged them; if the copy is one by design (a target network, an anchor), copy it again or restore it"
        ]

    def write(self, use: Use) -> None:
        """Write the values of one use to the checkpoint tensors that its old values came from."""
        origin = self.origins.get(use.place)
        if origin is None:
            self.failed[use.place] = self.matching.reasons[use.place]
            return
        if isinstance(origin, Parts) and any(len(fragment.layouts) > 1 for fragment in origin.fragments):
            key = origin.keys[0]
            self.failed[use.place] = f"the values of {key} repeat, so that its axes cannot be told apart"
            return
        written = origin.write(self.value(self.names[use.place]), self.tensor)
        for key, array in written.items():
            with np.errstate(over="ignore"):
                self.after[key] = np.asarray(array).astype(self.before[key].dtype).reshape(self.before[key].shape)

    def settle_equal(self) -> None:
        """Equal tensors that nothing tells apart must get the same new values from all their uses, else an error."""
        rivals: dict[tuple[str, Region | None], list[Use]] = defaultdict(list)
        for use in self.matching.uses:
            for region in _regions(self.origins.get(use.place)):
                rivals[region].append(use)
        unclear: dict[str, tuple[str, ...]] = {}
        for use in self.changed:
            origin = self.origins.get(use.place)
            if not isinstance(origin, Parts) or not origin.ambiguous:
                continue
            others = (other for region in _regions(origin) for other in rivals[region])
            if origin.others or any(self.digest(other) != self.digest(use) for other in others):
                unclear[use.name] = origin.keys
        if unclear:
            listed = "; ".join(f"{name} may be {' or '.join(keys)}" for name, keys in unclear.items())
            raise LsuvError(
                f"`like` {self.matching.checkpoint.name}: equal tensors that no module scope tells apart: {listed}; "
                "give them different values before the export"
            )

    def settle_unread(self) -> None:
        """Give unread copies of a tensor the new values of the copies that uses read.

        A copy that no use reads was merged with the others by the exporter, or the network does not use it. Copies of
        random values get the same new values in both cases, and a warning names them. Tensors of a few values that
        repeat (ones, an identity matrix) may be equal by chance, so there nothing is written.
        """
        claimed = {key for use in self.matching.uses for key in keys_of(self.origins.get(use.place))}
        for copies in self.matching.copies:
            read = [key for key in copies.keys if key in claimed]
            unread = [key for key in copies.keys if key not in claimed]
            first = self.after.get(read[0]) if read else None
            if first is None or not unread:
                continue
            if copies.plain or len(np.unique(self.before[read[0]])) <= FEW_VALUES:
                for use in (use for use in self.changed if set(read) & set(keys_of(self.origins.get(use.place)))):
                    self.failed[use.place] = f"{unread[0]} has the same few values, and may be merged with it"
                self.revert(read)
            elif all(np.array_equal(self.tensor(key), first) for key in read):
                self.after |= dict.fromkeys(unread, first)
                self.followed |= dict.fromkeys(unread, read[0])

    def leave_half_folded(self) -> None:
        """A weight with a folded BatchNorm is carried only together with its bias."""
        places = {use.bias_of.output: use for use in self.matching.uses if use.bias_of is not None}
        for use in self.changed:
            if not isinstance(self.origins.get(use.place), Multiple) or use.layer is None:
                continue
            bias = places.get(use.layer.output)
            if bias is not None and bias.place in self.failed:
                self.failed[use.place] = self.failed[bias.place]
                self.revert(self.origins[use.place].keys)

    def revert(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.after.pop(key, None)

    def verify(self) -> None:
        """Read every use back; a tensor that does not reproduce all its uses keeps its old values (rule 2)."""
        uses = [use for use in self.matching.uses if use.place in self.origins and use.place not in self.failed]
        doomed = {key for use in uses if not self.serves(use) for key in self.keys(use)}
        count = 0
        while len(doomed) > count:  # a use is carried whole or not at all: uses that share a tensor fail together
            count = len(doomed)
            for use in self.changed:
                if use.place in self.origins and use.place not in self.failed and doomed & self.keys(use):
                    self.failed[use.place] = self.conflict(use, uses)
                    doomed |= self.keys(use)
        self.revert(doomed)

    def keys(self, use: Use) -> set[str]:
        """The keys of the tensors that a use reads."""
        return set(self.origins[use.place].keys)

    def serves(self, use: Use) -> bool:
        """Whether the new checkpoint has the values that a use has in the edited model."""
        origin = self.origins[use.place]
        if isinstance(origin, Multiplied) and self.after.keys() & set(origin.fixed):
            return False  # the factors at home are others then
        if not self.after.keys() & set(origin.keys):
            return use.place not in self.places
        if isinstance(origin, Parts) and origin.ambiguous and use.place not in self.places:
            return not self.after.keys() >= set(origin.keys)  # it may read a copy that keeps its values
        given = self.value(self.names[use.place])
        value = np.asarray(given, np.float64)
        found = np.asarray(origin.read(self.tensor), np.float64).reshape(value.shape)
        tolerance = max(4 * precision(kind) for kind in [given.dtype, *(self.before[key].dtype for key in origin.keys)])
        # f·t + offset: the rounding error is relative to the summands, which may be far larger than the sum.
        offset = np.abs(origin.offset).max() if isinstance(origin, Shifted) else 0.0
        size = max(np.abs(value).max(), offset, SMALLEST)
        return bool(np.all(np.abs(found - value) <= tolerance * size))

    def conflict(self, use: Use, uses: list[Use]) -> str:
        key = next(iter(self.origins[use.place].keys))
        others = [other for other in uses if other.place != use.place and self.keys(other) & self.keys(use)]
        other = next((other for other in others if self.digest(other) != self.digest(use)), None)
        if other is None:
            return f"{key} of type {self.before[key].dtype} cannot hold the new values"
        return f"{key} is one tensor in the checkpoint, and {other.op} {other.node} reads it too, with other values"

    def summary(self) -> Carried:
        names: dict[str, str] = {}
        for use in self.changed:
            names.setdefault(self.names[use.place], "")
            if use.place in self.failed:
                names[self.names[use.place]] = self.failed[use.place]
        left = tuple(NotCarried(name, reason) for name, reason in names.items() if reason)
        return Carried(len(names) - len(left), len(names), left)


def _name(graph: Graph, place: Place) -> str:
    """The name of the constant that a node reads at a place, in the edited model."""
    k = graph.producer[place[0]]
    return [*graph.nodes[k].input, *graph.captured.get(k, ())][place[1]]


def _regions(origin: Origin | None) -> Iterator[tuple[str, Region | None]]:
    """The parts of checkpoint tensors that a use reads."""
    if isinstance(origin, Parts):
        yield from ((key, fragment.part) for fragment in origin.fragments for key in fragment.keys)
    else:
        yield from ((key, None) for key in keys_of(origin))
