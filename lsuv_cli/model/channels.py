"""The channels of a layer's output: how many there are, on which axis they lie, and how each is scaled or shifted.

Channel c of the output is computed by row c of the layer's matrices (matrices.py), so s_c·y_c comes of multiplying that
row by s_c. A convolution's channels are on axis 1 of its output, all groups together. A matrix product's are on the
last axis, or on the one before it if the weight is on the left. The matrices of a batched product share their channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model.layers import CONVOLUTIONS, Layer, LayerSet, by_tensor
from lsuv_cli.model.views import Shape

Array = NDArray[Any]


@dataclass(frozen=True)
class Channels:
    """How many channels a layer's output has, and their axis, counted from the last axis, -1."""

    count: int
    axis: int

    @property
    def shape(self) -> Shape:
        """The shape in which one number for each channel can be multiplied with the output, or added to it."""
        return (self.count, *[1] * (-1 - self.axis))


def of(layer: Layer) -> Channels | None:
    """A layer's channels; None where its output has no single axis of them (Einsum, a weight that is a vector)."""
    groups, out, _ = layer.form.shape
    rank = len(layer.weight.shape)
    if layer.op in CONVOLUTIONS:
        return Channels(groups * out, 1 - rank)
    if layer.op == "Einsum" or rank < 2:
        return None
    return Channels(out, -1 if layer.position == 1 else -2)


def rows(layer: Layer, numbers: Array) -> Array:
    """One number for each channel as a stack of (out, 1) matrices, to multiply the layer's matrices with."""
    groups, out, _ = layer.form.shape
    return numbers.reshape(groups if layer.op in CONVOLUTIONS else 1, out, 1)


def spread(layer: Layer, numbers: Array) -> Array:
    """One number for each channel, repeated for every entry of the weight's row, in the stored tensor's layout."""
    whole = np.broadcast_to(rows(layer, numbers), layer.form.shape)
    return layer.weight.stored(layer.form.weight(whole, layer.weight.shape))


def lengths(layer: Layer, stored: Array) -> Array:
    """The squared length of each channel's row, in float64, as (groups, channels of a group)."""
    matrices = layer.form.matrices(layer.weight.seen(stored)).astype(np.float64)
    squares = np.einsum("gof,gof->go", matrices, matrices)
    found: Array = squares if layer.op in CONVOLUTIONS else squares.sum(axis=0, keepdims=True)
    return found


def alike(users: Sequence[Layer]) -> bool:
    """Whether layers that share a weight read the same channels from it."""
    ways = {(of(x), x.form, x.weight.steps, x.op in CONVOLUTIONS) for x in users}
    return len(ways) == 1


def marked(layer_set: LayerSet) -> tuple[LayerSet, dict[str, list[str]]]:
    """The layers whose channels can be scaled one by one marked as such, and notes about the others."""
    notes: dict[str, list[str]] = {}
    able: set[str] = set()
    for users in by_tensor(layer_set.layers).values():
        if of(users[0]) is not None and alike(users):
            able |= {layer.output for layer in users}
            continue
        why = "its weight is shared by layers that read it differently"
        if of(users[0]) is None:
            why = f"its output has no single axis of channels ({users[0].op})"
        notes |= {layer.output: [f"scaled as a whole: {why}"] for layer in users}
    layers = tuple(replace(x, by_channel=True) if x.output in able else x for x in layer_set.layers)
    return replace(layer_set, layers=layers), notes
