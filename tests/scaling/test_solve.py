"""The closed form of a layer's scale, against its definition worked out in exact fractions."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from lsuv_cli.report import Status
from lsuv_cli.scaling.moments import ChannelMoments, Moments, pooled
from lsuv_cli.scaling.solve import dead_channels, solve, solve_channels, without_means


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


# Channels


def of(variance, mean=0.0):
    variance = np.asarray(variance, np.float64)
    zeros = np.zeros_like(variance)
    return ChannelMoments(zeros + mean, variance, zeros, zeros, zeros)


@pytest.mark.parametrize(
    ("variance", "mean", "lengths", "dead"),
    [
        ([1, 0, 4], 0, [[1, 1, 1]], [False, True, False]),
        ([1, 1e-13, 4], 0, [[1, 1, 1]], [False, True, False]),
        ([1, 1e-11, 4], 0, [[1, 1, 1]], [False, False, False]),
        ([1, 1e-13, 4], 0, [[1, 1e-13, 1]], [False, False, False]),  # a short row gives a small variance
        ([1, 1e-3, 4], 0, [[1, 1e12, 1]], [False, True, False]),
        ([1e-13, 4], [100.0, 0], [[1, 1]], [True, False]),
        ([1e-9, 1e-9], 1000.0, [[1, 1]], [True, True]),  # beside E[y²] = 10⁶
        ([1e-13, 4], 0, [[1], [1]], [False, False]),  # each group by itself
        ([1, 2], 0, [[0, 1]], [True, False]),
        ([1, 1e-13], 0, [[100, 1]], [False, False]),  # a long row gives a large one
    ],
)
def test_dead_channels(variance, mean, lengths, dead):
    assert dead_channels(of(variance, mean), np.array(lengths, np.float64)).tolist() == dead


def test_a_scale_for_each_channel():
    """Variances 4 and 1 of target 9: scales 3/2 and 3; a dead channel keeps the scale it is given."""
    y = Moments(0.0, 2.0, channels=of([4.0, 0.0, 1.0]))
    found = solve_channels(y, 9.0, np.ones((1, 3)), 0.25)
    size = math.sqrt((1.5**2 + 3**2) / 2)
    assert found.status is Status.OK
    assert found.scale == pytest.approx(size)
    np.testing.assert_allclose(found.ratios, np.array([1.5, 0.25, 3]) / size)
    assert found.dead.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("y", "status"),
    [
        (Moments(math.nan, 1.0, channels=of([1.0, 1.0])), Status.NOT_FINITE),
        (Moments(0.0, 0.0, channels=of([0.0, 0.0])), Status.DEAD),
        (Moments(0.0, 1.0, channels=replace(of([1.0, 1.0]), bias_variance=np.array([0.0, 2.0]))), Status.UNREACHABLE),
    ],
)
def test_channels_that_have_no_scale(y, status):
    assert solve_channels(y, 1.0, np.ones((1, 2)), 1.0).status is status


def test_a_channels_kept_bias_counts():
    """s²·1 + 2s·0.5 + 0.25 = 1: s = 0.5·(√4 - 1) = 0.5."""
    channels = replace(of([1.0]), bias_variance=np.array([0.25]), covariance=np.array([0.5]))
    found = solve_channels(Moments(0.0, 1.0, channels=channels), 1.0, np.ones((1, 1)), 1.0)
    assert found.scale == pytest.approx(0.5)


def test_moments_without_the_means_of_channels():
    y = Moments(2.0, 9.0, count=7, channels=of([1.0, 3.0], [1.0, 5.0]))
    found = without_means(y)
    assert (found.mean, found.variance, found.count) == (0.0, 2.0, 7)
