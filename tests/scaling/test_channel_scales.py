"""`scale="channel"`: every output channel has its own scale. Checked channel by channel in unoptimized onnxruntime."""

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from helpers import entry, model, normal, square, tensor, unchanged_but, values
from lsuv_cli import initialize
from lsuv_cli.model import channels
from lsuv_cli.model.layers import find
from lsuv_cli.scaling import channel_moments
from working_copies import graph_of

X = normal(24, 4, 9, 9) * np.array([1, 3, 0.5, 2], np.float32)[:, None, None] + 0.3
ROWS = normal(50, 6, seed=3) + 1.0


def by_channel(value: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the variance of each channel."""
    others = tuple(k for k in range(value.ndim) if k != axis % value.ndim)
    return value.mean(axis=others), value.var(axis=others)


def assert_unit(value: np.ndarray, axis: int, centred: bool, fine: float = 1e-3, target: float = 1.0) -> None:
    means, variances = by_channel(value, axis)
    assert np.abs(variances / target - 1).max() < fine
    assert not centred or np.abs(means).max() < fine


def network(**tensors: Any) -> ModelProto:
    """Layers behind whatever a layer's one scale commutes with, and a scale for each channel does not."""
    text = """g (float[N,4,9,9] x) => (float[N,7] y) {
        [one] a = Conv<pads=[1,1,1,1]>(x, A, p) b = Relu(a) c = MaxPool<kernel_shape=[2,2]>(b)
        [two] d = Conv<group=4>(c, B, q) e = LeakyRelu(d) f = Concat<axis=1>(e, e)
        [three] h = ConvTranspose<group=2, strides=[2,2]>(f, C, r) k = Relu(h)
        l = GlobalAveragePool(k) m = Flatten(l) n = Concat<axis=1>(m, m)
        [four] o = Gemm<transB=1, alpha=0.5>(n, D, s) t = Abs(o) u = Transpose(t) v = Transpose(u)
        [five] w = MatMul(v, E) [six] y = MatMul(w, F) }"""
    given = {
        "A": normal(8, 4, 3, 3), "p": normal(8, seed=10), "B": normal(8, 2, 3, 3, seed=1), "q": normal(8, seed=11),
        "C": normal(16, 3, 3, 3, seed=2), "r": normal(6, seed=12), "D": normal(9, 12, seed=3), "s": normal(9, seed=13),
        "E": normal(9, 7, seed=4), "F": normal(7, 7, seed=5),
    }  # fmt: skip
    return model(text, **{**given, **tensors})


@pytest.mark.parametrize("bias", ["zero", "keep", "center"])
@pytest.mark.parametrize("batch", [24, 5])
def test_every_channel_has_variance_1(bias: Any, batch: int):
    before = network()
    done = initialize(before, X, scale="channel", bias=bias, batch_size=batch)
    assert {str(layer.status) for layer in done.report.layers} == {"ok"}
    found = values(done.model, {"x": X}, ["a", "d", "h", "o", "w", "y"])
    for name, value in found.items():
        assert_unit(value, 1, bias == "center" and name not in "wy")
    assert unchanged_but(before, done.model, *"ABCDEF", *("" if bias == "keep" else "pqrs"))
    assert all(layer.channels.dead == 0 for layer in done.report.layers)
    assert all(layer.channels.most_variance < 1.001 for layer in done.report.layers)


@pytest.mark.parametrize("pre_init", ["orthonormal", "keep", "xavier"])
def test_the_rows_keep_their_directions(pre_init: Any):
    """s_c·w_c: the new row of each channel is the pre-initialized one, times one number."""
    plain, scaled = (initialize(network(), X, scale=scale, pre_init=pre_init) for scale in ("layer", "channel"))
    assert plain.model is not None
    one, other = (tensor(done.model, "A").reshape(8, -1).astype(np.float64) for done in (plain, scaled))
    ratio = (one * other).sum(axis=1) / (one * one).sum(axis=1)
    assert np.allclose(one * ratio[:, None], other, rtol=1e-4, atol=1e-7)
    line = entry(scaled, "one")
    assert line.channels.least_scale < line.scale < line.channels.most_scale
    assert np.isclose(ratio.max() / ratio.min(), line.channels.most_scale / line.channels.least_scale, rtol=1e-3)


FORMS = {
    "Gemm": ("y = Gemm(x, W)", (6, 5), -1),
    "a matrix on the left": ("t = Transpose(x) y = MatMul(W, t)", (5, 6), -2),
    "behind Transpose": ("V = Transpose(W) y = MatMul(x, V)", (5, 6), -1),
    "a batch of matrices": ("y = MatMul(x, W)", (3, 6, 5), -1),
    "a weight that is an expression": ("V = Mul(W, W) y = MatMul(x, V)", (6, 5), -1),
    "a fused ReLU": ('y = com.microsoft.FusedGemm<activation="Relu">(x, W)', (6, 5), -1),
    "a fused Tanh": ('y = com.microsoft.FusedGemm<activation="Tanh">(x, W)', (6, 5), -1),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_weight(form: str):
    body, shape, axis = FORMS[form]
    proto = model(f"g (float[N,6] x) => (y) {{ {body} }}", microsoft=True, W=normal(*shape))
    target = 0.3 if "Tanh" not in form else 0.02
    done = initialize(proto, ROWS, scale="channel", target_variance=target)
    assert [str(layer.status) for layer in done.report.layers] == ["ok"]
    value = values(done.model, {"x": ROWS}, ["y"])["y"]
    assert_unit(value, axis, False, 1e-2 if "fused" in form else 1e-3, target)


def test_an_einsum_is_scaled_as_a_whole():
    proto = model('g (float[N,6] x) => (y) { [e] y = Einsum<equation="ni,io->no">(x, W) }', W=normal(6, 5))
    done = initialize(proto, ROWS, scale="channel")
    assert entry(done, "e").notes == ("scaled as a whole: its output has no single axis of channels (Einsum)",)
    assert abs(values(done.model, {"x": ROWS}, ["y"])["y"].var() - 1) < 1e-3


def test_dead_channels_are_told_and_left():
    weight = normal(5, 6)
    weight[[1, 3]] = 0
    proto = model("g (float[N,6] x) => (y) { [dying] y = Gemm<transB=1>(x, W, b) }", W=weight, b=np.ones(5, np.float32))
    for bias in ("zero", "keep", "center"):
        done = initialize(proto, ROWS, scale="channel", pre_init="keep", bias=bias)
        line = entry(done, "dying")
        assert str(line.status) == "ok"
        assert line.channels.dead == 2
        assert "2 of 5 channels are dead: constant, and not scaled" in line.notes
        means, variances = by_channel(values(done.model, {"x": ROWS}, ["y"])["y"], -1)
        assert np.allclose(variances, [1, 0, 1, 0, 1], atol=1e-3)
        assert np.array_equal(tensor(done.model, "W")[[1, 3]], weight[[1, 3]])
        assert bias != "center" or np.abs(means).max() < 1e-3


def test_a_constant_channel_of_a_depthwise_convolution_keeps_its_row():
    x = normal(16, 3, 8, 8)
    x[:, 1] = 2.5
    proto = model("g (float[N,3,8,8] x) => (y) { y = Conv<group=3>(x, W) }", W=normal(3, 1, 3, 3))
    done = initialize(proto, x, scale="channel", pre_init="keep")
    assert done.report.layers[0].channels is not None
    assert done.report.layers[0].channels.dead == 1
    assert np.allclose(tensor(done.model, "W")[1], tensor(proto, "W")[1], rtol=1e-6)
    assert np.allclose(by_channel(values(done.model, {"x": x}, ["y"])["y"], 1)[1], [1, 0, 1], atol=1e-3)


def test_a_faint_group_is_not_dead():
    """A group's channels are compared with one another only: its input may be a million times smaller."""
    x = normal(16, 3, 8, 8) * np.array([1, 1e-7, 1], np.float32)[:, None, None]
    done = initialize(
        model("g (float[N,3,8,8] x) => (y) { y = Conv<group=3>(x, W) }", W=normal(3, 1, 3, 3)), x, scale="channel"
    )
    assert done.report.layers[0].channels is not None
    assert done.report.layers[0].channels.dead == 0
    assert_unit(values(done.model, {"x": x}, ["y"])["y"], 1, False)


def test_a_layer_without_a_live_channel_is_dead():
    proto = model("g (float[N,6] x) => (y) { y = Gemm(x, W) }", W=np.zeros((6, 5), np.float32))
    done = initialize(proto, ROWS, scale="channel", pre_init="keep")
    assert [str(layer.status) for layer in done.report.layers] == ["dead"]
    assert not tensor(done.model, "W").any()


def test_a_bias_that_varies_within_channels_is_solved_channel_by_channel():
    """Var(s_c·y_c + b_c) = 1 with a bias for each row and channel: its variance and covariance count."""
    proto = model("g (float[50,6] x) => (y) { y = Gemm(x, W, b) }", W=normal(6, 5), b=0.4 * normal(50, 5, seed=8))
    done = initialize(proto, ROWS, scale="channel", bias="keep", batch_size="all")
    assert_unit(values(done.model, {"x": ROWS}, ["y"])["y"], -1, False)
    loud = model("g (float[50,6] x) => (y) { y = Gemm(x, W, b) }", W=normal(6, 5), b=9 * normal(50, 5, seed=8))
    done = initialize(loud, ROWS, scale="channel", bias="keep", batch_size="all")
    assert [str(layer.status) for layer in done.report.layers] == ["unreachable"]


def test_tied_weights_share_their_channels_scales_or_have_one_scale():
    text = "g (float[N,6] x) => (y) { a = MatMul(x, A) b = Tanh(a) y = MatMul(b, A) }"
    done = initialize(model(text, **square("A", size=6)), ROWS, scale="channel")
    found = values(done.model, {"x": ROWS}, ["a", "y"])
    assert_unit(found["a"], -1, False)
    assert [str(layer.status) for layer in done.report.layers] == ["ok", "tied"]
    text = "g (float[N,6] x) => (y) { a = MatMul(x, A) b = Tanh(a) t = Transpose(A) y = MatMul(b, t) }"
    done = initialize(model(text, **square("A", size=6)), ROWS, scale="channel")
    assert abs(values(done.model, {"x": ROWS}, ["a"])["a"].var() - 1) < 1e-3
    note = "scaled as a whole: its weight is shared by layers that read it differently"
    assert all(note in layer.notes for layer in done.report.layers)


@pytest.mark.parametrize("options", [{"scale": "channel"}, {"bias": "center"}])
def test_one_sample_has_no_variance_within_channels(options: Any):
    """One number for each channel: the layer has a variance, its channels have none, and its weight is left."""
    proto = model("g (float[N,6] x) => (y) { y = Gemm(x, W, b) }", W=normal(6, 5), b=normal(5))
    done = initialize(proto, ROWS[:1], pre_init="keep", **options)
    (line,) = done.report.layers
    assert line.status == "dead"
    assert "every channel of its output is constant" in line.notes
    assert line.channels is not None
    assert line.channels.dead == line.channels.count
    assert np.array_equal(tensor(done.model, "W"), tensor(proto, "W"))


def test_two_first_uses_are_pooled_channel_by_channel():
    text = "g (float[N,6] x) => (y) { h = Mul(x, x) a = MatMul(x, A) b = MatMul(h, A) y = Add(a, b) }"
    done = initialize(model(text, **square("A", size=6)), ROWS, scale="channel")
    found = values(done.model, {"x": ROWS}, ["a", "b"])
    both = (by_channel(found["a"], -1)[1] + by_channel(found["b"], -1)[1]) / 2
    assert np.allclose(both, 1, atol=1e-3)


def test_a_norm_that_multiplies_and_a_norm_that_shifts():
    ones, shift = np.ones(8, np.float32), 0.5 * np.ones(8, np.float32)
    text = """g (float[N,4,9,9] x) => (y) { a = Conv(x, A) b = BatchNormalization(a, two, zero, zero, one)
        c = Conv(b, B) d = BatchNormalization(c, two, half, zero, one) e = Relu(d) y = Conv(e, C) }"""
    proto = model(
        text, A=normal(8, 4, 3, 3), B=normal(8, 8, 3, 3, seed=1), C=normal(8, 8, 1, 1, seed=2),
        one=ones, two=2 * ones, zero=0 * ones, half=shift,
    )  # fmt: skip
    done = initialize(proto, X, scale="channel")
    for value in values(done.model, {"x": X}, ["a", "c", "y"]).values():
        assert_unit(value, 1, False)


def test_verification_would_notice_a_wrong_channel(monkeypatch):
    """If calibration swapped two channels, the written file would be called outside."""
    right = channel_moments.ChannelAccumulator.result

    def swapped(self):
        found = right(self)
        found.channels.variance[:2] = found.channels.variance[[1, 0]]
        return found

    monkeypatch.setattr(channel_moments.ChannelAccumulator, "result", swapped)
    done = initialize(network(), X, scale="channel", max_trials=1)
    assert entry(done, "one").status == "outside"


def test_only_layers_that_are_scaled_as_a_whole_have_a_note():
    text = """g (float[N,8] x) => (y) {
        a = MatMul(x, v) b = MatMul(x, w) t = Transpose(w) c = MatMul(b, t) y = Add(a, c) }"""
    found, notes = channels.marked(find(graph_of(text, **square("v", "w"))))
    assert [layer.output for layer in found.layers if layer.by_channel] == ["a"]
    assert list(notes) == ["b", "c"]
    assert notes["b"] == ["scaled as a whole: its weight is shared by layers that read it differently"]
