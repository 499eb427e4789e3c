"""The closed form of a layer's scale, against its definition worked out in exact fractions."""

import math
from fractions import Fraction

import pytest

from lsuv_cli.report import Status
from lsuv_cli.scaling.moments import Moments, pooled
from lsuv_cli.scaling.solve import solve


def moments(variance, covariance=0.0, bias_variance=0.0, count=10.0, mean=0.0):
    return Moments(mean, variance, bias_variance, covariance, count)


def reached(y, scale):
    """Var(s·y + b), exactly."""
    s, v, c, b = (Fraction(number) for number in (scale, y.variance, y.covariance, y.bias_variance))
    return float(s * s * v + 2 * s * c + b)


@pytest.mark.parametrize("target", [1.0, 0.01, 25.0])
@pytest.mark.parametrize(
    "y",
    [
        moments(4.0),
        moments(1e-12),
        moments(1e12),
        moments(2.0, 0.5, 0.005),
        moments(2.0, -0.05, 0.005),
        moments(1.0, 1e9, 0.0),  # -h + sqrt(h² + d) would lose every digit
        moments(1.0, 1e7, 0.005),
    ],
)
def test_the_scale_reaches_the_target(y, target):
    scale, status = solve(y, target)
    assert status is Status.OK
    assert scale > 0
    assert reached(y, scale) == pytest.approx(target, rel=1e-6)


def test_of_two_positive_roots_the_larger():
    y = moments(1.0, -3.0, 9.0 - 1e-9)  # (s - 3)² - 1e-9 = 1 - 1e-9: s is 2 or 4
    assert solve(y, 1.0)[0] == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize("y", [moments(1.0, 0.0, 1.5), moments(1.0, 0.5, 1.0), moments(1.0, 0.1, 4.0)])
def test_a_bias_with_more_variance_than_the_target_is_unreachable(y):
    assert solve(y, 1.0) == (1.0, Status.UNREACHABLE)


def test_no_variance_is_dead_and_no_number_is_not_finite():
    assert solve(moments(0.0), 1.0) == (1.0, Status.DEAD)
    assert solve(moments(math.nan), 1.0) == (1.0, Status.NOT_FINITE)
    assert solve(moments(1.0, math.inf), 1.0) == (1.0, Status.NOT_FINITE)
    assert solve(moments(1.0, 0.0, math.nan), 1.0) == (1.0, Status.NOT_FINITE)


def test_a_scale_beyond_all_numbers_is_an_overflow():
    assert solve(moments(5e-324), 1e300) == (1.0, Status.OVERFLOW)


def test_pooled_moments_count_every_value_once():
    """1000 values of variance 1 and 10 of variance 100, all of mean 0."""
    together = pooled([moments(1.0, count=1000.0), moments(100.0, count=10.0)])
    assert together.variance == pytest.approx((1000 * 1.0 + 10 * 100.0) / 1010)
