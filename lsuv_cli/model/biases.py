"""What becomes of the layers' biases: zeroed, kept, or centred.

1. `zero`: a bias is set to 0, so that y = W·x.
2. `keep`: a bias stays as it is, and y = s·W·x + b.
3. `center`: a bias takes away the mean of each channel, b_c = -s·E[(W·x)_c], as soon as that mean is measured. Until
   then it is 0. A centred bias is a tensor with one number for each channel, which only its layer reads; layers that
   share their weight and their bias go on sharing both. The graph's nodes stay as they are: a layer without a bias gets
   none, and a note says so.

A bias that is no constant, or whose value cannot be worked out or written, stays as it is in all three cases.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model import channels, ownership
from lsuv_cli.model.channels import Channels
from lsuv_cli.model.editor import Edit, Overwrite, Own
from lsuv_cli.model.flatten import label
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer, LayerSet
from lsuv_cli.model.ownership import Spot
from lsuv_cli.settings import Bias, Tied

Array = NDArray[Any]


@dataclass
class Biases:
    """The edits to apply; the layers, by their outputs, whose bias is kept or centred; and notes about layers."""

    edits: list[Edit] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)
    centred: set[str] = field(default_factory=set)
    notes: dict[str, list[str]] = field(default_factory=dict)


def settle(graph: Graph, layer_set: LayerSet, bias: Bias, tied: Tied) -> Biases:
    """Decide on every layer's bias; changes nothing."""
    decided = Biases()
    zeroed: dict[Spot, float] = {}
    centred: dict[Spot, Layer] = {}
    values: dict[str, Array] = {}
    for layer in layer_set.layers:
        value = graph.known(layer.bias.value) if layer.bias and layer.bias.constant else None
        why_not = _not_centred(layer, value) if bias is Bias.CENTER else ""
        if why_not:
            decided.notes[layer.output] = [f"not centred: {why_not}"]
        if layer.bias is None:
            continue
        if value is None or (bias is Bias.KEEP and np.any(value)):
            decided.kept.add(layer.output)
            continue
        values[layer.bias.value] = value
        if bias is Bias.CENTER and not why_not:
            centred[_spot(layer)] = layer
        elif np.any(value):
            zeroed[_spot(layer)] = 0.0
    edits, impossible = ownership.overwrite(graph, zeroed, values)
    decided.edits += edits
    owners: dict[str, str] = {}
    for spot, layer in centred.items():
        # Layers that share their weight go on sharing their bias; of all others one keeps the stored tensor.
        owner = layer.output if tied is Tied.UNTIE else layer.weight.base
        assert layer.bias is not None
        alone = _read_by(graph, layer.bias.value) <= centred.keys()
        edit = _own_bias(graph, spot, layer, alone and owners.setdefault(layer.bias.value, owner) == owner)
        if edit is None:
            impossible.add(spot)
            where = "chosen by an If" if layer.bias.value in graph.chosen else "inside a function of the model"
            decided.notes[layer.output] = [f"not centred: its bias is {where}"]
        else:
            decided.edits.append(edit)
            decided.centred.add(layer.output)
    decided.kept |= {x.output for x in layer_set.layers if x.bias and _spot(x) in impossible}
    return decided


def marked(layer_set: LayerSet, decided: Biases) -> LayerSet:
    """The layers of the edited model, their biases marked as kept or centred.

    With a bias b, c·(s·W·x + b) is no multiple of W·x, so such a layer has no norm factor.
    """

    def mark(layer: Layer) -> Layer:
        kept, centred = layer.output in decided.kept, layer.output in decided.centred
        if layer.bias is None or not (kept or centred):
            return layer
        return replace(layer, bias=replace(layer.bias, kept=kept, centred=centred), norm_factor=None)

    return replace(layer_set, layers=tuple(mark(layer) for layer in layer_set.layers))


def _not_centred(layer: Layer, value: Array | None) -> str:
    """Why a layer cannot be centred; empty if it can."""
    if layer.bias is None or layer.bias.factor == 0.0:
        return "it has no bias"
    if layer.activation:
        return f"the {layer.activation} is inside the {layer.op}"
    if value is None:
        return "its bias is computed"
    if channels.of(layer) is None:
        return f"its output has no single axis of channels ({layer.op})"
    return ""


def _own_bias(graph: Graph, spot: Spot, layer: Layer, in_place: bool) -> Edit | None:
    """The edit that gives a layer a bias of zeros, one for each channel; None if there is none."""
    found = channels.of(layer)
    assert found is not None
    k, position = spot
    node = graph.nodes[k]
    value = node.input[position]
    present = graph.evaluate(value)
    if in_place and _has_every_channel(present.shape, found, layer):
        return Overwrite(value, np.zeros_like(present))
    if node.output[0] not in graph.places or value in graph.chosen:
        return None
    shape = (found.count,) if layer.bias and layer.bias.shape is not None else found.shape
    return Own(node.output[0], position, f"{value}.{label(node)}", np.zeros(shape, present.dtype))


def _has_every_channel(shape: tuple[int, ...], found: Channels, layer: Layer) -> bool:
    """Whether a bias of this shape is one number for each channel."""
    if layer.bias is not None and layer.bias.shape is not None:  # a convolution's own
        return shape == (found.count,)
    return shape[-len(found.shape) :] == found.shape and np.prod(shape) == found.count


def _read_by(graph: Graph, value: str) -> set[Spot]:
    """Where a stored tensor is read; a spot of node -1 if it is not stored, or read where no edit reaches."""
    readers = graph.readers.get(value, ())
    stored = graph.is_writable(value)
    captured = any(value in graph.captured.get(k, ()) for k in readers)
    if not stored or captured or value in graph.outputs or value in graph.untaken_reads:
        return {(-1, 0)}
    return {(k, i) for k in readers for i, name in enumerate(graph.nodes[k].input) if name == value}


def _spot(layer: Layer) -> Spot:
    """The node and the input position at which a layer's bias is read."""
    assert layer.bias is not None
    return (layer.bias.node if layer.bias.node >= 0 else layer.node, layer.bias.position)
