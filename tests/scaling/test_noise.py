"""Rounding noise: where it begins, how far it goes, and that it is found whatever the size of the model."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers import entry, model, near_one, normal, square, tensor, variances
from lsuv_cli import initialize
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.scaling import noise, verification
from lsuv_cli.scaling.moments import Moments
from working_copies import graph_of

X = normal(64, 8, seed=1)
# Zero on paper; in float32 a few elements are off by one unit in the last place.
NOISE = "a = Mul(x, three) b = Div(a, three) s = Sub(b, x)"


def statuses(result):
    return {layer.name: str(layer.status) for layer in result.report.layers}


def test_noise_is_found_in_a_model_that_is_verified_in_pieces(monkeypatch):
    monkeypatch.setattr(verification, "VERIFY_BYTES", 300)
    proto = model(
        f"""g (float[N,8] x) => (y, z) {{ {NOISE} h = MatMul(s, w) t = Tanh(h) y = MatMul(t, v)
        p = MatMul(x, u) q = Relu(p) z = MatMul(q, k) }}""",
        w=normal(8, 8), v=normal(8, 8), u=normal(8, 8), k=normal(8, 8), three=np.float32(3),
    )  # fmt: skip
    result = initialize(proto, X)
    assert statuses(result) == {"h": "dead", "y": "dead", "p": "ok", "z": "ok"}
    assert np.abs(tensor(result.model, "w")).max() <= 1  # orthonormal, not blown up
    assert near_one(variances(result.model, {"x": X}, ["p", "z"], reference=False))


def test_layers_behind_several_with_kept_biases_are_scaled_for_the_biases():
    """y is noise again whenever it is scaled, since only its kept bias is a signal; what is behind it is not."""
    proto = model(
        f"""g (float[N,8] x) => (z) {{ {NOISE} h = MatMul(s, w) g = Mul(h, big) y = Gemm(g, v, c) t = Tanh(y)
        z = MatMul(t, u) q = Tanh(z) r = MatMul(q, k) }}""",
        w=normal(8, 4), v=normal(4, 4), c=0.3 * normal(4), u=normal(4, 4), k=normal(4, 4, seed=7), three=np.float32(3),
        big=np.float32(1e5),
    )  # fmt: skip
    result = initialize(proto, X, bias="keep")
    assert statuses(result) == {"h": "dead", "y": "dead", "z": "ok", "r": "ok"}
    assert near_one(variances(result.model, {"x": X}, ["z", "r"], reference=False), 0.01)
    assert np.abs(tensor(result.model, "v")).max() <= 1


@pytest.mark.parametrize("pre_init", ["orthonormal", "keep"])
def test_layers_behind_noise_with_a_kept_bias_are_scaled_for_the_bias(pre_init):
    proto = model(
        f"""g (float[N,8] x) => (z) {{ {NOISE} h = MatMul(s, w) y = Gemm(h, v, c) t = Tanh(y) z = MatMul(t, u) }}""",
        w=normal(8, 4), v=normal(4, 4), c=0.3 * normal(4), u=normal(4, 4), three=np.float32(3),
    )  # fmt: skip
    result = initialize(proto, X, bias="keep", pre_init=pre_init)
    assert statuses(result) == {"h": "dead", "y": "dead", "z": "ok"}
    assert near_one(variances(result.model, {"x": X}, ["z"], reference=False), 0.01)


def test_a_weight_that_a_dead_and_a_live_layer_share_is_scaled_for_the_live_one():
    proto = model(
        f"g (float[N,8] x) => (y, z) {{ {NOISE} y = MatMul(s, w) z = MatMul(x, w) }}",
        w=7 * normal(8, 4), three=np.float32(3),
    )  # fmt: skip
    result = initialize(proto, X)
    assert entry(result, "y").status == "dead"
    assert entry(result, "z").status == "ok"
    assert near_one(variances(result.model, {"x": X}, ["z"], reference=False), 0.01)


def test_noise_of_a_few_elements_is_noise():
    """Most elements of the noise are exactly zero, and one small change may leave the others as they were."""
    x = normal(2, 8)
    proto = model(f"g (float[N,8] x) => (y) {{ {NOISE} y = MatMul(s, w) }}", w=normal(8, 4), three=np.float32(3))
    for seed in range(5):
        result = initialize(proto, np.float32(1 + seed / 7) * x, seed=seed)
        assert entry(result, "y").status == "dead"


def test_noise_that_only_calibration_sees_beside_a_kept_bias_leaves_the_weight_alone():
    """f has eleven bits, so that f·3/3 - f is exactly 0; calibration runs float16 in float32, where it is not."""
    proto = model(
        """g (float[N,8] x) => (y) { a = MatMul(x, w) h = Cast<to=10>(a) f = Cast<to=1>(h)
        m = Mul(f, three) d = Div(m, three) s = Sub(d, f) y = Gemm(s, v, c) }""",
        w=normal(8, 8), v=normal(8, 4), c=0.3 * normal(4), three=np.float32(3),
    )  # fmt: skip
    result = initialize(proto, X, bias="keep")
    assert statuses(result) == {"a": "ok", "y": "dead"}
    assert np.abs(tensor(result.model, "v")).max() <= 1


def test_noise_that_varies_only_between_batches_is_noise():
    """z is the same in every sample; a product of 144 terms is rounded otherwise for two samples than for four."""
    x = np.abs(normal(14, 4))
    for seed in range(12):
        proto = model(
            """g (float[N,4] x) => (y) { n = Neg(x) p = Relu(n) s = ReduceSum(p, axis) z = Add(s, c)
            y = Einsum <equation = "nd,dk->nk"> (z, w) }""",
            c=normal(1, 144, seed=seed), w=normal(144, 1, seed=50 + seed), axis=np.array([1]),
        )  # fmt: skip
        result = initialize(proto, x, batch_size=4, seed=seed)
        assert statuses(result) == {"y": "dead"}
        assert np.abs(tensor(result.model, "w")).max() <= 1


def test_a_signal_that_varies_only_between_batches_is_no_noise():
    """The first batch is constant, and so is the second; the layer's input is tiny in both."""
    x = np.repeat(np.array([1.0, 1.0, 3.0], np.float32), 4)[:, None] * normal(1, 8)
    proto = model("g (float[N,8] x) => (y) { s = Mul(x, k) y = MatMul(s, w) }", w=normal(8, 1), k=np.float32(1e-6))
    result = initialize(proto, x, batch_size=4)
    assert statuses(result) == {"y": "ok"}
    assert near_one(variances(result.model, {"x": x}, ["y"], reference=False))


def test_a_layer_that_no_noise_reaches_is_not_noise_for_being_sensitive():
    """Floor turns a small change into a large one; the noise is elsewhere."""
    proto = model(
        f"""g (float[N,8] x) => (y, z) {{ {NOISE} y = MatMul(s, w)
        f = Mul(x, many) i = Floor(f) m = Mod<fmod=1>(i, two) z = MatMul(m, v) }}""",
        w=normal(8, 4), v=normal(8, 4), three=np.float32(3), two=np.float32(2), many=np.float32(3e3),
    )  # fmt: skip
    result = initialize(proto, X)
    assert statuses(result) == {"y": "dead", "z": "ok"}
    assert near_one(variances(result.model, {"x": X}, ["z"], reference=False), 0.01)


def test_an_input_that_half_precision_rounds_to_zero_leaves_the_weight_alone():
    proto = model(
        """g (float[N,8] x) => (y) { s = Mul(x, tiny) h = Cast<to=10>(s) r = Relu(h) f = Cast<to=1>(r)
        y = MatMul(f, w) }""",
        w=normal(8, 4), tiny=np.float32(1e-10),
    )  # fmt: skip
    result = initialize(proto, X)
    assert entry(result, "y").status == "dead"
    assert np.abs(tensor(result.model, "w")).max() <= 1


def test_noise_beside_a_layer_whose_number_of_rows_a_small_change_decides():
    """Rows above a threshold that lies between x and x·(1 + 2⁻¹³): the changed run has more of them."""
    proto = model(
        f"""g (float[N,8] x) => (y, z) {{ {NOISE} h = MatMul(s, w) y = Relu(h)
        f = ReduceMax <axes: ints = [1], keepdims: int = 0> (x) c = Greater(f, k) r = Compress <axis: int = 0> (x, c)
        z = MatMul(r, v) }}""",
        w=normal(8, 8), v=normal(8, 8), three=np.float32(3), k=np.float32(2), opset=13,
    )  # fmt: skip
    x = X.copy()
    x[0, 0], x[1:32, 0] = 2 - 2e-5, 3  # the first row is above 2 with 2⁻¹³ more
    result = initialize(proto, x)
    assert statuses(result) == {"h": "dead", "z": "ok"}
    assert near_one(variances(result.model, {"x": x}, ["z"], reference=False))


# The parts


def test_nudges_are_well_above_the_rounding_of_their_type_and_small():
    for nudges, step in ((noise.NUDGES, 2.0**-13), (noise.NUDGES_IN_HALF, 2.0**-7)):
        sizes = sorted(abs(nudge - 1) / step for nudge in nudges)
        assert sizes == [1.0, 1.5, 2.0]
        assert min(nudges) < 1 < max(nudges)


A = normal(50, seed=3)


@pytest.mark.parametrize(
    ("one", "other", "largest", "expected"),
    [
        (A, A, 1.4, False),
        (A, 1.3 * A, 1.4, False),
        (A, 1.5 * A, 1.4, True),
        (1.5 * A, A, 1.4, True),
        (A, 1.5 * A, np.inf, False),
        (A, A + 5, 1.4, False),  # the mean does not count
        (A, -A, np.inf, True),
        (A, A + 0.1 * normal(50, seed=4), 1.4, False),  # correlation 0.995
        (A, A + 0.4 * normal(50, seed=4), 1.4, True),  # 0.93
        (A, 0 * A, np.inf, True),
        (0 * A, A, np.inf, True),
        (0 * A, 0 * A + 1, 1.4, False),
        (A, A[:0], 1.4, False),
        (A[:0], A, 1.4, False),
        (A, np.append(A, A), 1.4, False),  # of other sizes, only the ratio tells
        (A, 2 * np.append(A, A), 1.4, True),
        (A, np.where(A > 1, np.nan, A), 1.4, False),
        (A, np.where(A > 1, np.inf, A), 1.4, False),
    ],
)
def test_arrays_that_differ_by_more_than_a_small_change(one, other, largest, expected):
    assert noise._is_other(one, other, largest) is expected


@pytest.mark.parametrize(
    ("body", "variance", "tiny"),
    [
        # w = 2 everywhere, fan-in 4: an input of root mean square r gives an output of standard deviation 4·r.
        ("y = MatMul(x, w)", (4 * 0.9e-4) ** 2, True),
        ("y = MatMul(x, w)", (4 * 1.1e-4) ** 2, False),
        ("y = MatMul(x, w)", 0.0, False),
        ("y = MatMul(x, w)", np.nan, False),
        ("n = Neg(w) y = MatMul(x, n)", 1e-12, False),
        ('y = com.microsoft.FusedGemm<activation="Sigmoid">(x, w)', 1e-12, False),
    ],
)
def test_a_layer_whose_input_is_nearly_zero(body, variance, tiny):
    look = layers_of(graph_of(f"g (float[N,4] x) => (y) {{ {body} }}", microsoft=True, w=np.full((4, 3), 2, "f")))
    (layer,) = look.layers.layers
    pieces: Any = SimpleNamespace(graph=look.graph)
    assert noise._has_tiny_input(pieces, layer, Moments(0.0, variance), noise.SUSPICIOUS_INPUT) is tiny


@pytest.mark.parametrize(
    ("suspicious", "unstable", "expected"),
    [
        ("", "abyz", {}),
        ("a", "", {}),
        ("a", "a", {"a": True}),
        ("a", "ab", {"a": True, "b": False}),
        ("a", "aby", {"a": True, "b": False, "y": False}),
        ("a", "ay", {"a": True}),  # b is stable, and so is what is behind it
        ("a", "az", {"a": True}),  # z is not behind a
        ("ab", "ab", {"a": True, "b": True}),
        ("b", "aby", {"b": True, "y": False}),
        ("a", "b", {}),
    ],
)
def test_where_noise_begins_and_how_far_it_goes(suspicious, unstable, expected, monkeypatch):
    body = "a = MatMul(x, u) t = Tanh(a) b = MatMul(t, v) s = Tanh(b) y = MatMul(s, w) z = MatMul(x, w)"
    look = layers_of(graph_of(f"g (float[N,8] x) => (y, z) {{ {body} }}", **square("u", "v", "w")))
    monkeypatch.setattr(noise, "_has_tiny_input", lambda pieces, layer, found, tiny: layer.output in suspicious)
    monkeypatch.setattr(noise, "_unstable_in_some_batch", lambda pieces, needs, among: set(unstable))
    pieces: Any = SimpleNamespace(graph=look.graph, layers=look.layers.layers)
    assert noise.find(pieces, {name: Moments(0.0, 1.0) for name in "abyz"}, None) == expected
