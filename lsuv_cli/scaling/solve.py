"""The scale of a layer, in closed form: Var(s·y + b) = s²·Var(y) + 2s·Cov(y, b) + Var(b) = target."""

from __future__ import annotations

import math

from lsuv_cli.report import Status
from lsuv_cli.scaling.moments import Moments


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
