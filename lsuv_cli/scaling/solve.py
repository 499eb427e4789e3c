"""The scale of a layer in closed form, one for the whole layer or one for each channel.

    layer:           Var(s·y + b) = s²·Var(y) + 2s·Cov(y, b) + Var(b) = target
    channel:         the same for each channel c: s_c from Var(y_c), Cov(y_c, b_c), Var(b_c)
    centred layer:   b_c = -s·E[y_c], so that Var(s·y + b) = s²·E_c[Var(y_c)] = target
    centred channel: b_c = -s_c·E[y_c], s_c² = target / Var(y_c)

"Channel" is Krähenbühl's (data-dependent initializations, 2016) and weight normalization's (Salimans and Kingma, 2016),
"centred" also that of fastai's LSUV and of ActNorm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.model import channels
from lsuv_cli.model.layers import Layer
from lsuv_cli.report import Status
from lsuv_cli.scaling.moments import ChannelMoments, Floats, Moments, of_channels, pooled
from lsuv_cli.scaling.running_weights import RunningWeight

# A channel with a smaller ratio of its variance to what a row of its length may give is dead: only rounding is left.
LEAST_VARIANCE = 1e-12


@dataclass(frozen=True, eq=False)
class Solution:
    """What a weight is multiplied by: s, or s·r_c for channel c, with the mean square of r_c over live channels 1."""

    scale: float = 1.0
    status: Status = Status.OK
    ratios: Floats | None = None  # r_c
    dead: NDArray[np.bool_] | None = None  # channels that are constant: their rows are not scaled


def solve(y: Moments, target: float) -> tuple[float, Status]:
    """The scale s with Var(s·y + b) = target, and the status of the layer.

    s is the larger root of s²·Var(y) + 2s·Cov(y, b) + Var(b) - target = 0. Where no root is positive, which
    takes Var(b) >= target, the layer is out of reach and its weight is not shrunk to nothing. Where Var(y) is so small
    that s is infinite, no weight of any type could hold the product: an overflow.
    """
    if not (y.finite and math.isfinite(y.covariance) and math.isfinite(y.bias_variance)):
        return 1.0, Status.NOT_FINITE
    if y.variance <= 0.0:
        return 1.0, Status.DEAD
    half = y.covariance / y.variance
    discriminant = half * half - (y.bias_variance - target) / y.variance
    if discriminant < 0.0:
        return 1.0, Status.UNREACHABLE
    scale = -half + math.sqrt(discriminant)
    # (-h + sqrt(h² + d)) loses its digits for a large positive h; this is the same number.
    if half > 0.0 and y.bias_variance < target:
        scale = ((target - y.bias_variance) / y.variance) / (half + math.sqrt(discriminant))
    if not math.isfinite(scale):
        return 1.0, Status.OVERFLOW
    if scale <= 0.0:
        return 1.0, Status.UNREACHABLE
    return scale, Status.OK


def solve_weight(layer: Layer, running: RunningWeight, outputs: Sequence[Moments]) -> Solution:
    """The scale of a weight, from the pooled moments of the outputs of the layers that share it."""
    y = pooled(outputs)
    if layer.is_centred and y.finite:
        y = without_means(y)
    if layer.by_channel:
        return solve_channels(y, layer.target, channels.lengths(layer, running.array), 1.0 / running.factor)
    return Solution(*solve(y, layer.target))


def without_means(y: Moments) -> Moments:
    """The moments of y_c - E[y_c]: what is left when the bias takes away the mean of each channel."""
    assert y.channels is not None
    return of_channels(replace(y.channels, mean=np.zeros_like(y.channels.mean)), y.count)


def solve_channels(y: Moments, target: float, lengths: Floats, unscaled: float) -> Solution:
    """A scale for each channel. `lengths`: Σw² of each channel's row, by groups. `unscaled`: that of a dead channel."""
    c = y.channels
    assert c is not None
    if not y.finite:
        return Solution(status=Status.NOT_FINITE)
    dead = dead_channels(c, lengths)
    if dead.all():
        return Solution(status=Status.DEAD)
    scales = np.full(len(dead), unscaled)
    columns = (c.mean, c.variance, c.bias_variance, c.covariance)
    for k in np.flatnonzero(~dead):
        mean, variance, bias_variance, covariance = (float(column[k]) for column in columns)
        scales[k], status = solve(Moments(mean, variance, bias_variance, covariance), target)
        if status is not Status.OK:
            return Solution(status=status)
    size = math.sqrt(float(np.mean(scales[~dead] ** 2)))
    return Solution(size, Status.OK, scales / size, dead)


def dead_channels(c: ChannelMoments, lengths: Floats) -> NDArray[np.bool_]:
    """Which channels are constant: Var(y_c) / Σw² is 0, or rounding beside the largest E[y²] / Σw² of their group."""
    variance, mean = (numbers.reshape(lengths.shape) for numbers in (c.variance, c.mean))
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.where(lengths > 0.0, variance / lengths, 0.0)
        squares = np.where(lengths > 0.0, (variance + mean**2) / lengths, 0.0)
    largest = squares.max(axis=1, keepdims=True)
    return np.asarray((variance <= 0.0) | (spread <= LEAST_VARIANCE * largest)).ravel()
