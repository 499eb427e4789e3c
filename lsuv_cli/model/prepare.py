"""The model made ready: every layer owns its weight tensor, and biases and statistics are settled.

1. Look: the working copy of the model as given, and its layers (`look`).
2. Decide, on that one look: which weights are folded, copied or left alone; what becomes of biases (biases.py); which
   statistics of BatchNormalization are reset.
3. Edit: apply all decisions together, in place, to the draft's model.
4. Look again: the layers of the edited model hold what was decided (`layer.bias.kept`, `layer.norm_factor`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.errors import ModelError
from lsuv_cli.model import batch_norm, biases, channels, editor, layers, ownership
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.draft import Draft
from lsuv_cli.model.editor import Edit
from lsuv_cli.model.file import ModelFile
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import LayerSet
from lsuv_cli.settings import Bias, PreInit, Scale, Settings, Tied

Array = NDArray[Any]


@dataclass(frozen=True)
class Look:
    """The working copy of a model, and its layers."""

    graph: Graph
    layers: LayerSet


@dataclass(frozen=True)
class Prepared:
    """The edited graph, whose layers' weights can be written, with notes and warnings about the edits."""

    graph: Graph
    layers: LayerSet  # layers to initialize, and skipped ones with the reason
    every: LayerSet  # all layers, before any was excluded or left alone
    notes: Mapping[str, list[str]]  # by the layers' outputs
    warnings: tuple[str, ...]


def look(file: ModelFile | Draft, branches: Mapping[str, bool] | None = None) -> Look:
    """The working copy and the layers of a model as it is now, in a file or in a draft."""
    model = file.proto if isinstance(file, ModelFile) else file.file.proto
    return layers_of(graphs.build(model, file, branches))


def layers_of(graph: Graph) -> Look:
    """A graph together with its layers."""
    every = layers.find(graph)
    return Look(graph, replace(every, layers=batch_norm.with_factors(graph, every.layers)))


def prepare(draft: Draft, given: Look, settings: Settings, branches: Mapping[str, bool] | None = None) -> Prepared:
    """Settle which layer owns which tensor, zero biases and reset statistics. Edits the draft's model in place."""
    every = given.layers
    # A model without weights that has no such layer has values for all that it lacked, which are worth writing.
    if not every.layers and not every.recurrent and not draft.file.filled:
        why = layers.why_none(every)
        raise ModelError(f"{draft.file.name} has no layer that can be initialized{why}; nothing was written")
    selected = layers.choose(every, settings.include, settings.exclude)
    rewrites_recurrent = settings.recurrent and settings.pre_init is not PreInit.KEEP
    owned = ownership.settle_weights(given.graph, selected, settings.tied, recurrent=rewrites_recurrent)
    settled = layers.leave(selected, owned.left_alone)
    warnings: list[str] = []
    shared = 0 if settings.tied is Tied.UNTIE else _shared(settled)
    if shared:
        warnings.append(
            f"{shared} weight{'s are' if shared > 1 else ' is'} shared by several layers; if an exporter merged "
            "equal tensors, `tied='untie'` gives each layer its own"
        )
    decided = biases.settle(given.graph, settled, settings.bias, settings.tied)
    norm_edits, norm_warnings = _settle_norms(given.graph, settled, settings)
    warnings += norm_warnings
    editor.apply([*owned.edits, *decided.edits, *norm_edits], given.graph, draft)

    edited = look(draft, branches)
    edited = replace(edited, layers=layers.with_targets(edited.layers, settings.target_variance))
    remaining = layers.choose(edited.layers, settings.include, settings.exclude)
    remaining = biases.marked(layers.leave(remaining, owned.left_alone), decided)
    every = biases.marked(edited.layers, decided)
    warnings += batch_norm.training_mode(edited.graph)
    if settings.bias is Bias.CENTER and not decided.centred:
        warnings.append("no layer was centred: none has a bias of its own that can take away its mean")
    notes = _together(owned.notes, decided.notes)
    if settings.scale is Scale.CHANNEL:
        remaining, whole = channels.marked(remaining)
        notes = _together(notes, whole)
    return Prepared(edited.graph, remaining, every, notes, tuple(warnings))


def _together(*several: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The notes of all layers."""
    names = dict.fromkeys(name for notes in several for name in notes)
    return {name: [note for notes in several for note in notes.get(name, ())] for name in names}


def _shared(settled: LayerSet) -> int:
    return sum(len(users) > 1 for users in layers.by_tensor(settled.layers).values())


def _settle_norms(graph: Graph, settled: LayerSet, settings: Settings) -> tuple[list[Edit], list[str]]:
    """The edits that reset the statistics of BatchNormalization behind layers, or a warning that these are stale."""
    wanted = batch_norm.resets(graph, batch_norm.behind(graph, settled.layers))
    names = {spot: graph.nodes[spot[0]].input[spot[1]] for spot in wanted}
    known = {name: graph.known(name) for name in names.values()}
    values = {name: value for name, value in known.items() if value is not None}
    wanted = {spot: number for spot, number in wanted.items() if names[spot] in values}
    stale = {spot[0] for spot, number in wanted.items() if np.any(values[names[spot]] != number)}
    if not stale:
        return [], []
    if settings.reset_norm:
        edits, impossible = ownership.overwrite(graph, wanted, values)
        inside = {k for k, _ in impossible}
        kept = f"{len(inside)} BatchNormalization inside functions, or behind an If, keep their statistics"
        return edits, [kept] if inside else []
    return [], [
        f"{len(stale)} BatchNormalization node{'s' if len(stale) > 1 else ''} behind layers keep statistics of the "
        "old weights; `reset_norm=True` sets them to mean 0 and variance 1"
    ]
