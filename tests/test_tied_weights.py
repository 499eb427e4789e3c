"""A weight that several layers share: `init` and `check` judge it alike."""

import numpy as np
import pytest

from helpers import model, normal, variances
from lsuv_cli import initialize, measure

X = normal(64, 8, seed=1)


def statuses(report):
    return [str(layer.status) for layer in report.layers]


def test_what_init_calls_tied_check_calls_tied_too():
    text = "g (float[N,8] x) => (y) { a = MatMul(x, w) r = Relu(a) s = Add(r, one) y = MatMul(s, w) }"
    done = initialize(model(text, w=normal(8, 8), one=np.full(1, 3, np.float32)), X)
    found = variances(done.model, {"x": X})
    assert abs(found["a"] - 1) < 0.001
    assert abs(found["y"] - 1) > 0.1  # so that there is something to judge
    assert statuses(done.report) == ["ok", "tied"]
    report = measure(done.model, X)
    assert statuses(report) == ["ok", "tied"]
    assert report.exit_code == 0


def test_a_shared_weight_whose_first_use_is_off_is_outside_in_all_its_uses():
    text = "g (float[N,8] x) => (y) { a = MatMul(x, w) r = Relu(a) y = MatMul(r, w) }"
    report = measure(model(text, w=normal(8, 8)), X)
    assert statuses(report) == ["outside", "outside"]
    assert report.exit_code == 1


@pytest.mark.parametrize(("scale", "status"), [(1.0, ["tied", "ok"]), (2.0, ["dead", "outside"])])
def test_a_first_use_without_signal_is_judged_by_the_live_uses(scale, status):
    """A recurrence from a zero state: the first product is zero whatever the weight is."""
    text = "g (float[N,8] x) => (y, a) { z = Mul(x, zero) a = MatMul(z, w) b = Add(a, x) y = MatMul(b, w) }"
    w = np.linalg.qr(normal(8, 8))[0] / X.std() * scale
    report = measure(model(text, w=w.astype(np.float32), zero=np.zeros(1, np.float32)), X, tol=0.1)
    assert statuses(report) == status


TWICE = "g (float[N,8] x) => (y) { a = MatMul(x, w) r = Relu(a) m = MatMul(r, w) y = Add(m, b) }"


def test_a_target_for_a_later_use_is_that_of_the_first_and_said():
    wanted = {"m": 3.0}
    done = initialize(model(TWICE, w=normal(8, 8), b=normal(8)), X, target_variance=wanted)
    assert [layer.target for layer in done.report.layers] == [1.0, 1.0]
    assert "its target is that of a, which is the first to use its weight" in done.report.layers[1].notes
    assert statuses(done.report) == ["ok", "tied"]
    assert statuses(measure(done.model, X, target_variance=wanted)) == ["ok", "tied"]


def test_untied_each_use_has_its_own_target():
    done = initialize(model(TWICE, w=normal(8, 8), b=normal(8)), X, target_variance={"m": 3.0}, tied="untie")
    found = variances(done.model, {"x": X}, ["a", "m"])
    assert abs(found["a"] - 1) < 0.001
    assert abs(found["m"] - 3) < 0.003


def test_a_later_use_with_a_bias_is_not_centred_and_said():
    done = initialize(model(TWICE, w=normal(8, 8), b=normal(8)), X, bias="center")
    assert "not centred: its weight is scaled at another use" in done.report.layers[1].notes


@pytest.mark.parametrize(("option", "word"), [({"scale": "channel"}, "channel"), ({"residual": "bounded"}, "branches")])
def test_check_says_that_a_model_was_initialized_to_other_targets(option, word):
    text = "g (float[N,8] x) => (y) { a = MatMul(x, w) m = MatMul(a, v) r = Relu(m) n = MatMul(r, u) y = Add(a, n) }"
    done = initialize(model(text, w=normal(8, 8), v=normal(8, 8), u=normal(8, 8)), X, **option)
    (warning,) = (w for w in measure(done.model, X).warnings if "was initialized with" in w)
    assert word in warning
    assert not measure(initialize(done.model, X).model, X).warnings
