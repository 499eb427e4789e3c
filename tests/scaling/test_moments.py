"""Variances that are hard to measure, and the closed form with a bias that is kept."""

import numpy as np
import pytest

from helpers import entry, model, near_one, normal, tensor, unchanged_but, values, variances
from lsuv_cli import initialize, measure

X = normal(64, 8, seed=1)
DENSE = "g (float[N,8] x) => (float[N,4] y) { y = Gemm(x, w, b) }"
PLAIN = "g (float[N,8] x) => (float[N,4] y) { y = MatMul(x, w) }"


@pytest.mark.parametrize("variance", [1e-14, 1e-40, 1e-60, 1e14, 1e40])
def test_there_is_no_smallest_and_no_largest_variance(variance):
    x = (X * np.sqrt(variance)).astype(np.float32)
    before = model(PLAIN, w=normal(8, 4))
    result = initialize(before, x)
    assert entry(result, "y").status == "ok"
    assert near_one(variances(result.model, {"x": x}))


@pytest.mark.parametrize("scale", [1e-7, 1e-20, 1e-30, 1e20, 1e30])
def test_a_kept_weight_may_be_of_any_size(scale):
    before = model(
        "g (float[N,8] x) => (float[N,4] y) { h = MatMul(x, v) r = Relu(h) y = MatMul(r, w) }",
        v=(scale * normal(8, 8)).astype(np.float32),
        w=(scale * normal(8, 4)).astype(np.float32),
    )
    after = initialize(before, X, pre_init="keep").model
    assert near_one(variances(after, {"x": X}))
    old, new = (tensor(proto, "v").astype(np.float64) for proto in (before, after))
    assert np.allclose(new / np.linalg.norm(new), old / np.linalg.norm(old), atol=1e-6)


@pytest.mark.parametrize("mean", [10, 1e3, 1e4])
def test_a_mean_that_dwarfs_the_spread(mean):
    x = X + np.float32(mean)
    after = initialize(model(PLAIN, w=normal(8, 4)), x).model
    # float64 throughout: what the weights do, not how a float32 product rounds.
    y = x.astype(np.float64) @ tensor(after, "w").astype(np.float64)
    assert abs(y.var() - 1) < 1e-3


@pytest.mark.parametrize("shape", [(3, 1), (3, 7), (3, 4096)])
def test_the_number_of_outputs_does_not_matter(shape):
    before = model("g (float[N,3] x) => (float y) { y = MatMul(x, w) }", w=normal(*shape))
    x = normal(50, 3, seed=1)
    assert near_one(variances(initialize(before, x).model, {"x": x}))


def test_batches_of_different_size_count_by_their_samples():
    before = model(PLAIN, w=normal(8, 4))
    batches = [10 * X[:1], X[1:40], 0.1 * X[40:]]
    after = initialize(before, batches).model
    y = np.concatenate(batches).astype(np.float64) @ tensor(after, "w")
    assert abs(y.var() - 1) < 1e-3


def test_a_constant_output_is_dead_and_stays_as_it_is():
    before = model(PLAIN, w=normal(8, 4))
    ones = np.ones((64, 8), np.float32)
    result = initialize(before, np.zeros_like(ones))
    assert entry(result, "y").status == "dead"
    assert result.report.exit_code == 1
    assert np.isfinite(tensor(result.model, "w")).all()
    assert tensor(result.model, "w").any()
    single = model("g (float[N,8] x) => (float[N,1] y) { y = MatMul(x, w) }", w=normal(8, 1))
    for data in (ones, ones[:1]):
        result = initialize(single, data, pre_init="keep")
        assert entry(result, "y").status == "dead"
        assert unchanged_but(single, result.model)


def test_a_final_layer_of_zeros_that_is_kept_is_reported_and_not_divided():
    before = model(
        "g (float[N,8] x) => (float[N,4] y) { h = MatMul(x, v) y = MatMul(h, w) }",
        v=normal(8, 8),
        w=np.zeros((8, 4), np.float32),
    )
    result = initialize(before, X, pre_init="keep")
    assert entry(result, "y").status == "dead"
    assert unchanged_but(before, result.model, "v")


def test_infinite_weights_are_never_written_anew():
    weight = normal(8, 4)
    weight[2, 3] = np.inf
    before = model("g (float[N,8] x) => (float[N,4] z) { y = MatMul(x, w) r = Relu(y) z = MatMul(x, v) }",
                   w=weight, v=normal(8, 4))  # fmt: skip
    result = initialize(before, X, pre_init="keep")
    assert entry(result, "y").status == "non-finite"
    assert result.report.exit_code == 1
    assert unchanged_but(before, result.model, "v")
    fresh = initialize(before, X).model
    assert np.isfinite(tensor(fresh, "w")).all()


# A bias that is kept


@pytest.mark.parametrize("target", [1.0, 4.0])
def test_the_closed_form_with_a_kept_bias(target):
    before = model(DENSE, w=normal(8, 4), b=np.array([0.9, -0.5, 0.3, 0.1], np.float32))
    result = initialize(before, X, bias="keep", target_variance=target)
    found = variances(result.model, {"x": X})
    assert abs(found["y"] / target - 1) < 1e-3
    assert result.report.trials == 1
    assert "bias kept" in entry(result, "y").notes
    assert unchanged_but(before, result.model, "w")


def test_a_bias_that_leans_on_the_product():
    """The product's own mean differs between outputs, so bias and product are correlated."""
    x = X + 2
    before = model(DENSE, w=normal(8, 4), b=np.array([0.9, -0.5, 0.3, 0.1], np.float32))
    result = initialize(before, x, bias="keep", pre_init="keep")
    y = x.astype(np.float64) @ tensor(before, "w").astype(np.float64)
    b = np.broadcast_to(tensor(before, "b").astype(np.float64), y.shape)
    covariance = (y * b).mean() - y.mean() * b.mean()
    roots = np.roots([y.var(), 2 * covariance, b.var() - 1])
    expected = max(roots.real) * tensor(before, "w")
    assert abs(covariance) > 0.05
    assert np.allclose(tensor(result.model, "w"), expected, rtol=1e-3)


def test_a_bias_with_too_much_variance_is_out_of_reach_and_the_weight_is_not_shrunk():
    before = model(DENSE, w=normal(8, 4), b=np.array([30, -30, 20, 5], np.float32))
    result = initialize(before, X, bias="keep", pre_init="keep")
    assert entry(result, "y").status == "unreachable"
    assert result.report.exit_code == 1
    assert unchanged_but(before, result.model)
    fresh = tensor(initialize(before, X, bias="keep").model, "w")
    assert np.allclose(np.linalg.norm(fresh, axis=0), 1, atol=1e-5)  # orthonormal, not shrunk


def test_a_bias_with_a_large_mean_is_no_variance():
    before = model(DENSE, w=normal(8, 4), b=np.array([1000, 1000, 1000.5, 1000.5], np.float32))
    result = initialize(before, X, bias="keep")
    assert entry(result, "y").status == "ok"
    w, b = (tensor(result.model, name).astype(np.float64) for name in ("w", "b"))
    assert abs((X @ w + b).var() - 1) < 1e-3
    assert unchanged_but(before, result.model, "w")


def test_a_kept_bias_in_the_middle_of_a_chain():
    before = model(
        """g (float[N,3,9,9] x) => (float y) { a = Conv(x, u, b) r = Relu(a) c = Conv<group=2>(r, v) d = Add(c, e)
            s = Relu(d) y = ConvTranspose(s, w, f) }""",
        u=normal(4, 3, 3, 3),
        b=0.4 * normal(4),
        v=normal(6, 2, 3, 3),
        e=0.4 * normal(6, 1, 1),
        w=normal(6, 2, 3, 3),
        f=0.4 * normal(2),
    )
    x = normal(8, 3, 9, 9, seed=1)
    after = initialize(before, x, bias="keep").model
    assert near_one(variances(after, {"x": x}, ["a", "d", "y"]))
    assert unchanged_but(before, after, "u", "v", "w")


def test_a_second_run_that_keeps_everything_changes_nothing():
    before = model(
        "g (float[N,8] x) => (float[N,4] y) { h = Gemm(x, v, b) r = Relu(h) y = MatMul(r, w) }",
        v=normal(8, 8),
        b=normal(8),
        w=normal(8, 4),
    )
    once = initialize(before, X).model
    twice = initialize(once, X, pre_init="keep").model
    for name in ("v", "w"):
        assert np.allclose(tensor(once, name), tensor(twice, name), rtol=1e-6, atol=0)


# What is reported


def test_measure_tells_what_numpy_tells():
    before = model(
        "g (float[N,3,9,9] x) => (float y) { a = Conv(x, u, b) r = Tanh(a) y = ConvTranspose(r, w) }",
        u=normal(4, 3, 3, 3),
        b=5 * normal(4),
        w=normal(4, 2, 3, 3),
    )
    x = normal(20, 3, 9, 9, seed=1)
    expected = values(before, {"x": x}, ["a", "y"])
    for layer in measure(before, x, batch_size=7).layers:
        assert layer.variance == pytest.approx(expected[layer.name].var(), rel=1e-4)
        assert layer.mean == pytest.approx(expected[layer.name].mean(), abs=1e-4)


def test_the_report_tells_what_is_in_the_file():
    before = model(DENSE, w=7 * normal(8, 4), b=normal(4))
    result = initialize(before, X, before=True)
    line = entry(result, "y")
    assert line.variance_given == pytest.approx(variances(before, {"x": X})["y"], rel=1e-4)
    assert line.variance == pytest.approx(variances(result.model, {"x": X})["y"], rel=1e-4)
    assert line.weight_std == pytest.approx(tensor(result.model, "w").std(), rel=1e-4)
    assert line.scale == pytest.approx(line.variance_at_turn**-0.5, rel=1e-4)
