"""The model made ready: every layer owns what will be written, biases and statistics are as the user wants them.

All changes of structure happen here, before any number is computed; afterwards the graph is looked at anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.errors import ModelError
from lsuv_cli.model import batch_norm as norms
from lsuv_cli.model import constants, layers, ownership
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.draft import Draft
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Found, Layer
from lsuv_cli.settings import Bias, PreInit, Settings

Array = NDArray[Any]


@dataclass(frozen=True)
class Prepared:
    """A graph whose layers can be written, and what had to be done for that."""

    graph: Graph
    found: Found  # layers to initialize, and all that is left alone
    every: Found  # the same before anything was left out
    keeps_bias: frozenset[str]  # outputs of the layers whose bias stays and is not zero
    notes: dict[str, list[str]]  # by the layers' outputs
    warnings: tuple[str, ...]


def prepare(draft: Draft, settings: Settings) -> Prepared:
    """Settle who owns which tensor, zero biases and reset statistics as asked."""
    warnings: list[str] = []
    graph, every, found = _look(draft, settings, {})
    if not every.layers and not every.recurrent:
        why = f" ({every.skipped[0].name}: {every.skipped[0].reason})" if every.skipped else ""
        raise ModelError(f"{draft.file.name} has no layer that can be initialized{why}; nothing was written")
    rewrites_recurrent = settings.recurrent and settings.pre_init is not PreInit.KEEP
    decided = ownership.settle_weights(draft, graph, found, settings.tied, recurrent=rewrites_recurrent)
    graph, every, found = _look(draft, settings, decided.left_alone)
    shared = sum(len(users) > 1 for users in layers.by_tensor(found.layers).values())
    if shared:
        warnings.append(
            f"{shared} weight{'s are' if shared > 1 else ' is'} shared by several layers; if an exporter merged "
            "equal tensors, `tied='untie'` gives each layer its own"
        )
    keeps_bias = _settle_biases(draft, graph, found, settings)
    graph, every, found = _look(draft, settings, decided.left_alone)
    warnings += _settle_norms(draft, graph, found, settings)
    graph, every, found = _look(draft, settings, decided.left_alone)
    warnings += norms.training_mode(graph, draft.reader(graph.tensors))
    return Prepared(graph, found, every, keeps_bias, decided.notes, tuple(warnings))


def _look(draft: Draft, settings: Settings, left_alone: dict[str, str]) -> tuple[Graph, Found, Found]:
    graph = graphs.build(draft.file.proto)
    every = layers.find(graph, draft.reader(graph.tensors))
    return graph, every, layers.leave(layers.choose(every, settings.include, settings.exclude), left_alone)


def _settle_biases(draft: Draft, graph: Graph, found: Found, settings: Settings) -> frozenset[str]:
    """Zero the biases or keep them; the outputs of the layers that keep one which is not zero anyway."""
    kept: set[str] = set()
    wanted: dict[tuple[int, int], float] = {}
    values: dict[str, Array] = {}
    for layer in found.layers:
        if layer.bias is None:
            continue
        if not layer.bias.constant:
            kept.add(layer.output)
            continue
        value = constants.evaluate(graph, draft.reader(graph.tensors), layer.bias.value)
        if value is not None and not np.any(value):
            continue
        if value is None or settings.bias is Bias.KEEP:
            kept.add(layer.output)
        else:
            wanted[_place(layer)] = 0.0
            values[layer.bias.value] = value
    impossible = ownership.overwrite(draft, graph, wanted, values)
    return frozenset(kept | {layer.output for layer in found.layers if layer.bias and _place(layer) in impossible})


def _place(layer: Layer) -> tuple[int, int]:
    """The node and the input position at which a layer's bias is read."""
    assert layer.bias is not None
    return (layer.bias.node if layer.bias.node >= 0 else layer.node, layer.bias.position)


def _settle_norms(draft: Draft, graph: Graph, found: Found, settings: Settings) -> list[str]:
    """Reset the statistics of BatchNormalization behind layers, or warn that they are those of the old weights."""
    wanted = norms.resets(graph, list(norms.behind(graph, found.layers)))
    names = {place: graph.nodes[place[0]].input[place[1]] for place in wanted}
    found_values = {name: constants.evaluate(graph, draft.reader(graph.tensors), name) for name in names.values()}
    values = {name: value for name, value in found_values.items() if value is not None}
    wanted = {place: number for place, number in wanted.items() if names[place] in values}
    stale = {place[0] for place, number in wanted.items() if np.any(values[names[place]] != number)}
    if not stale:
        return []
    if settings.reset_norm:
        inside = {k for k, _ in ownership.overwrite(draft, graph, wanted, values)}
        return [f"{len(inside)} BatchNormalization inside functions keep their statistics"] if inside else []
    return [
        f"{len(stale)} BatchNormalization node{'s' if len(stale) > 1 else ''} behind layers keep statistics of the "
        "old weights; `reset_norm=True` sets them to mean 0 and variance 1"
    ]
