"""How data is cut into runs, seen from the outside: fixed batches, no batch, whole inputs, memory."""

import numpy as np
import pytest

from helpers import model, near_one, normal, tensor, values, variances
from lsuv_cli import initialize


def test_a_fixed_batch_is_filled_and_the_tail_left_out_with_a_warning():
    before = model("g (float[4,8] x) => (float[4,8] y) { a = MatMul(x, w) t = Tanh(a) y = MatMul(t, v) }",
                   w=normal(8, 8), v=normal(8, 8, seed=1))  # fmt: skip
    x = normal(18, 8, seed=2)
    result = initialize(before, x)
    assert result.report.samples == 16
    assert result.report.batches == 4
    assert any("2" in warning and "left out" in warning for warning in result.report.warnings)
    runs = [values(result.model, {"x": x[k : k + 4]}, ["y"])["y"] for k in range(0, 16, 4)]
    assert abs(np.concatenate(runs).var() - 1) < 1e-3


def test_a_model_without_a_batch_axis_takes_each_row_as_a_run():
    before = model("g (float[5,8] x) => (float[5,4] y) { y = MatMul(x, w) }", w=normal(8, 4))
    x = normal(6, 5, 8, seed=3)
    result = initialize(before, x)
    assert result.report.batches == 6
    outputs = x.astype(np.float64) @ tensor(result.model, "w").astype(np.float64)
    assert abs(outputs.var() - 1) < 1e-3


def test_a_sample_without_its_batch_axis_is_a_batch_of_one():
    before = model("g (float[N,3,6,6] x) => (float[N,4,4,4] y) { y = Conv(x, w) }", w=normal(4, 3, 3, 3))
    x = normal(3, 6, 6, seed=4)
    result = initialize(before, x)
    assert result.report.samples == 1
    assert near_one(variances(result.model, {"x": x[None]}))


def test_inputs_with_other_leading_axes_are_fed_whole():
    before = model(
        "g (float[T,B,8] x, float[2,B,8] state, float rate) => (float[T,B,8] y)"
        " { a = MatMul(x, w) m = ReduceMean<keepdims=1>(state, axes) b = Add(a, m) c = Mul(b, rate) y = MatMul(c, v) }",
        w=normal(8, 8), v=normal(8, 8, seed=1), axes=np.array([0]),
    )  # fmt: skip
    feeds = {"x": normal(5, 3, 8, seed=2), "state": normal(2, 3, 8, seed=3), "rate": np.array(0.5, np.float32)}
    result = initialize(before, feeds, batch_size="all")
    assert near_one(variances(result.model, feeds))


def test_the_same_axis_may_carry_different_symbols():
    before = model(
        "g (float[N,8] x, float[M,8] z) => (float[N,8] y) { s = Add(x, z) y = MatMul(s, w) }", w=normal(8, 8)
    )
    feeds = {"x": normal(12, 8), "z": normal(12, 8, seed=1)}
    assert near_one(variances(initialize(before, feeds, batch_size=4).model, feeds))


@pytest.mark.parametrize("activation", ["Tanh", "Relu"])
def test_values_that_wait_in_a_file_change_nothing(activation):
    before = model(
        f"g (float[N,16] x) => (float[N,16] y)"
        f" {{ a = MatMul(x, w) b = {activation}(a) c = MatMul(b, v) d = Sigmoid(c) e = Add(d, b) y = MatMul(e, u) }}",
        w=normal(16, 16), v=normal(16, 16, seed=1), u=normal(16, 16, seed=2),
    )  # fmt: skip
    x = normal(64, 16, seed=5)
    plain = initialize(before, x, batch_size=8).model
    spilled = initialize(before, x, batch_size=8, memory=1).model
    assert plain.SerializeToString() == spilled.SerializeToString()
