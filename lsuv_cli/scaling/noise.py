"""Rounding noise: layers whose output is nothing but rounding errors, such as W·(x - x) computed in two ways.

1. Noise begins at a layer whose input is nearly zero, and goes on to the layers behind it. It is looked for only where
   some layer has such an input.
2. The first batch runs a few times, without optimizers, with data and weights multiplied by 1 + 2⁻¹³ and its like. A
   signal hardly changes; noise becomes other noise. Where such a layer's output is constant in the first batch, two
   neighbouring batches run between which it varies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model.layers import Layer
from lsuv_cli.scaling import precision, runtime, weights
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.pieces import Pieces
from lsuv_cli.scaling.runner import Pass, Runner

Array = NDArray[Any]

# Root mean square of a layer's input below which the layer's output may be nothing but rounding.
SUSPICIOUS_INPUT, SUSPICIOUS_INPUT_IN_HALF = 1e-4, 1e-2
# The factors on data and weights that tell noise from a signal: 1 plus well more than the rounding of the types. There
# are several, because noise of a few elements may happen to stay as it was.
NUDGES = tuple(1.0 + 2.0**-13 * k for k in (1.0, 1.5, -2.0))
NUDGES_IN_HALF = tuple(1.0 + 2.0**-7 * k for k in (1.0, 1.5, -2.0))
LEAST_CORRELATION = 0.98  # between an output and its nudged version; noise has less
LARGEST_CHANGE = 1.4  # of an output's standard deviation by a nudge in float32; noise may change more


def find(pieces: Pieces, moments: Mapping[str, Moments], needs: Pass) -> dict[str, bool]:
    """The outputs of layers that are nothing but rounding -> whether the noise begins there."""
    layers = {layer.output: layer for layer in pieces.layers}
    tiny = SUSPICIOUS_INPUT_IN_HALF if precision.has_half(pieces.graph) else SUSPICIOUS_INPUT
    suspicious = {name for name, found in moments.items() if _has_tiny_input(pieces, layers[name], found, tiny)}
    if not suspicious:
        return {}
    unstable = _unstable_in_some_batch(pieces, needs, suspicious)
    noise: dict[str, bool] = {}
    tainted: set[str] = set()  # values behind noise
    for k, node in enumerate(pieces.graph.nodes):
        behind = not tainted.isdisjoint(pieces.graph.reads(k))
        for name in node.output:
            if name in unstable and (name in suspicious or behind):
                noise[name] = name in suspicious
            if name in noise or (behind and name not in layers):
                tainted.add(name)
    return noise


def _has_tiny_input(pieces: Pieces, layer: Layer, moments: Moments, tiny: float) -> bool:
    """Whether a layer's input, about sd(output) / sqrt(E[w²]·fan_in), is so small that it may be rounding."""
    if layer.weight.place == "folded" or not moments.finite or moments.variance <= 0.0:
        return False
    if layer.activation:  # which may saturate: a tiny variance tells nothing about the input
        return False
    _, square = weights.mean_and_square(pieces.graph.array(layer.weight.base))
    gain = math.sqrt(square * layer.form.fan_in) if math.isfinite(square) else 0.0
    return gain * tiny > math.sqrt(moments.variance)


def _unstable_in_some_batch(pieces: Pieces, needs: Pass, suspicious: Collection[str]) -> set[str]:
    """The outputs of layers that are unstable in the first batch; for suspicious ones, in the first that varies."""
    unstable, constant, unmoved = _unstable(pieces, needs.alone(needs.batches[:1]))
    number = 1
    while number < len(needs.batches) and not constant.isdisjoint(suspicious):
        more, still, _ = _unstable(pieces, needs.alone(needs.batches[number - 1 : number + 1]))
        unstable, constant = unstable | more, constant & still
        number += 1
    return unstable | (unmoved & set(suspicious))


def _unstable(pieces: Pieces, needs: Pass) -> tuple[set[str], set[str], set[str]]:
    """The outputs of layers that a small change of data and weights changes much, constant ones, and unmoved ones.

    An output is unmoved if it varies and no change changes it: the weight has no part in it, only a kept bias has.
    """
    half = precision.has_half(pieces.graph)
    factors = (1.0, *(NUDGES_IN_HALF if half else NUDGES))
    alone = [needs.alone([batch]) for batch in needs.batches]
    runners = {factor: [Runner(pieces.graph, pieces.plan, x, pieces.retype) for x in alone] for factor in factors}
    unstable: set[str] = set()
    constant: set[str] = set()
    moved: set[str] = set()
    try:
        for index, stage in enumerate(pieces.plan.stages):
            names = [layer.output for layer in stage.layers]
            plain: dict[str, Array] = {}
            for factor, parts in runners.items():
                arrays = _joined([pieces.run(stage, names, runner, factor=factor) for runner in parts])
                plain = plain or arrays
                unstable |= {n for n in names if _is_other(plain[n], arrays[n], math.inf if half else LARGEST_CHANGE)}
                moved |= {n for n in names if not np.array_equal(plain[n], arrays[n])}
                for runner in parts:
                    runner.forget(index)
            constant |= {name for name, array in plain.items() if array.size and (array == array[0]).all()}
    finally:
        for runner in (runner for parts in runners.values() for runner in parts):
            runner.close()
    return unstable, constant, {layer.output for layer in pieces.layers} - moved - constant


def _joined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Value -> all its elements."""
    return {name: np.concatenate([runtime.to_numpy(run[name]).ravel() for run in runs]) for name in runs[0]}


def _is_other(one: Array, other: Array, largest_change: float) -> bool:
    """Whether two arrays differ by more than a small change: ratio of their standard deviations, and correlation.

    Where a value decides how many rows there are, the arrays may differ in size, and only the ratio tells.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = (np.asarray(x, np.float64).ravel() for x in (one, other))
        if not a.size or not b.size:
            return False
        a, b = a - a.mean(), b - b.mean()
        squares = float(a @ a) / a.size, float(b @ b) / b.size
        if not all(math.isfinite(x) for x in squares) or max(squares) == 0.0:
            return False
        if min(squares) == 0.0:
            return True
        if math.sqrt(max(squares) / min(squares)) > largest_change:
            return True
        if a.size != b.size:
            return False
        return bool(float(a @ b) / a.size < LEAST_CORRELATION * math.sqrt(squares[0] * squares[1]))
