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
