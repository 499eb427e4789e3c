"""A weight on its way to the file: how it runs, and what fits its type."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from helpers import normal
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.scaling.noise import _is_other
from lsuv_cli.scaling.running_weights import RunningWeight, running_weight
from working_copies import graph_of


@pytest.mark.parametrize(
    ("entries", "scale", "dtype", "fits"),
    [
        ([1.0, -2.0], 1.0, "float16", True),
        ([1.0, -2.0], 4e4, "float16", False),
        ([2.0, -1.0], 4e4, "float16", False),
        ([1.0, -1.0], 4e4, "float16", True),
        ([1.0, -2.0], 4e4, "bfloat16", True),
        ([1.0, -2.0], 4e38, "float32", False),
        ([1.0, -2.0], 1e-9, "float16", False),  # nothing but zeros
        ([-1.0, -2.0], 1e-9, "float16", False),
        ([1.0, -2.0], 1e-9, "float32", True),
        ([0.0, 0.0], 1.0, "float16", True),
        ([0.0, 0.0], 1e-9, "float16", True),
        ([np.nan, 1.0], 1.0, "float32", False),
        ([], 1.0, "float32", True),
    ],
)
def test_what_fits_a_type(entries, scale, dtype, fits):
    assert RunningWeight(np.array(entries, np.float32), 1.0).fits(scale, dtype) is fits


def test_a_weight_of_half_precision_has_the_scale_that_fits_its_rounded_entries():
    ran = normal(4, 5)
    stored, effective = RunningWeight(ran, 1.0).stored(0.003, ["float16"])
    exact = (ran * np.float32(0.003)).astype(np.float16)
    np.testing.assert_array_equal(stored, exact)
    a, b = ran.astype(np.float64).ravel(), exact.astype(np.float64).ravel()
    assert effective == pytest.approx((a @ b) / (a @ a), rel=1e-12)
    assert effective != 0.003


def test_a_weight_that_is_read_through_a_cast_is_rounded_twice():
    ran = normal(4, 5)
    stored, effective = RunningWeight(ran, 1.0).stored(0.3, ["float32", "bfloat16"])
    read = (ran * np.float32(0.3)).astype(ml_dtypes.bfloat16).astype(np.float64).ravel()
    assert stored.dtype == np.float32
    assert effective == pytest.approx(ran.ravel() @ read / (ran.astype(np.float64).ravel() @ ran.ravel()), rel=1e-6)


def test_a_weight_in_single_precision_has_the_scale_itself():
    stored, effective = RunningWeight(normal(4, 5), 1.0).stored(0.3, ["float32"])
    np.testing.assert_array_equal(stored, normal(4, 5) * np.float32(0.3))
    assert effective == 0.3


# Rounding noise: whether two runs differ by more than a small change


def mixed(correlation):
    """Two samples of 10,000 numbers, with mean 0, deviation 1 and this correlation."""
    table = np.random.default_rng(0).standard_normal((10_000, 2))
    q = np.linalg.qr(table - table.mean(axis=0))[0] * 100
    return q[:, 0], correlation * q[:, 0] + math.sqrt(1 - correlation**2) * q[:, 1]


@pytest.mark.parametrize(
    ("correlation", "factor", "largest", "expected"),
    [
        (0.99, 1.0, 1.4, False),
        (0.97, 1.0, 1.4, True),
        (-1.0, 1.0, 1.4, True),
        (1.0, 1.35, 1.4, False),
        (1.0, 1.45, 1.4, True),
        (1.0, 1 / 1.35, 1.4, False),
        (1.0, 1 / 1.45, 1.4, True),
        (1.0, 1.45, math.inf, False),
    ],
)
def test_two_arrays_are_alike_by_correlation_and_deviation(correlation, factor, largest, expected):
    one, other = mixed(correlation)
    assert _is_other(one, factor * other, largest) is expected
    assert _is_other(one + 5, factor * other - 3, largest) is expected


def test_arrays_without_a_spread():
    one, _ = mixed(0.0)
    flat = np.full(10_000, 3.0)
    assert _is_other(one, flat, 1.4)
    assert _is_other(flat, one, 1.4)
    assert not _is_other(flat, flat, 1.4)
    assert not _is_other(one[:0], one[:0], 1.4)
    assert not _is_other(one, np.full(10_000, np.inf), 1.4)
    assert not _is_other(np.full(10_000, np.nan), one, 1.4)


def test_arrays_with_another_number_of_rows_are_compared_by_their_deviations():
    one, _ = mixed(0.0)
    assert not _is_other(one, one[:9000], 1.4)
    assert not _is_other(one[:9000], one[::-1], 1.4)
    assert _is_other(one, 2 * one[:9000], 1.4)
    assert not _is_other(one, one[:0], 1.4)
    assert not _is_other(one[:0], one, 1.4)


# A weight as it runs


def ran(weight, linear=True):
    (layer,) = layers_of(graph_of("g (float[N,4] x) => (y) { y = MatMul(x, w) }", w=weight)).layers.layers
    return running_weight(weight, layer, linear)


def test_a_weight_runs_with_the_deviation_of_he():
    weight = 5 * normal(4, 30)
    found = ran(weight.copy())
    assert (found.array.astype(np.float64) ** 2).mean() == pytest.approx(2 / 4, rel=1e-6)
    np.testing.assert_allclose(found.array, weight * found.factor, rtol=1e-6)


def test_a_weight_that_its_layer_is_not_linear_in_runs_as_it_is():
    weight = 5 * normal(4, 30)
    found = ran(weight.copy(), linear=False)
    assert found.factor == 1.0
    np.testing.assert_array_equal(found.array, weight)


def test_a_weight_of_zeros_runs_as_it_is():
    found = ran(np.zeros((4, 30), np.float32))
    assert found.factor == 1.0
    assert not found.array.any()


def test_a_weight_at_the_edge_of_float32():
    weight = np.float32(1e-35) * normal(4, 30)
    found = ran(weight.copy())
    assert (found.array.astype(np.float64) ** 2).mean() == pytest.approx(2 / 4, rel=1e-3)
    assert found.factor == pytest.approx(math.sqrt(0.5 / (weight.astype(np.float64) ** 2).mean()), rel=1e-6)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_weight_runs_in_the_layout_that_its_reader_sees(dropped):
    """A Dropout in front of the views reads the stored layout."""
    graph = graph_of("g (float[N,4] x) => (y) { t = Transpose(w) y = MatMul(x, t) }", w=normal(3, 4))
    (layer,) = layers_of(graph).layers.layers
    running = RunningWeight(normal(3, 4), 1.0)
    found = running.seen(replace(layer.weight, dropped=dropped))
    np.testing.assert_array_equal(found, normal(3, 4) if dropped else normal(3, 4).T)
