"""`bias="center"`: the bias takes away the mean of each channel; then the scale. Checked by unoptimized onnxruntime."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from helpers import entry, layer_outputs, model, normal, tensor, unchanged_but, values
from lsuv_cli import LsuvError, initialize
from shell import RELU

X = normal(24, 3, 9, 9) + 0.5
ROWS = normal(40, 6, seed=3) + 1.0


def centred(value: np.ndarray, axis: int = 1, target: float = 1.0, fine: float = 1e-3) -> bool:
    """Whether every channel has mean 0 and the whole has the target variance."""
    others = tuple(k for k in range(value.ndim) if k != axis % value.ndim)
    means = value.mean(axis=others)
    return bool(np.abs(means).max() < fine * np.sqrt(target) and abs(value.var() / target - 1) < fine)


def convolutions(**tensors: Any) -> ModelProto:
    text = """g (float[N,3,9,9] x) => (float[N,6,9,9] y) {
        [one] a = Conv<pads=[1,1,1,1]>(x, A, p) b = Relu(a) c = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(b)
        [two] d = Conv<group=2, pads=[1,1,1,1]>(c, B, q) e = Relu(d)
        [three] y = ConvTranspose<pads=[1,1,1,1]>(e, C, r) }"""
    given = {
        "A": normal(4, 3, 3, 3), "p": normal(4, seed=5),
        "B": normal(8, 2, 3, 3, seed=1), "q": normal(8, seed=6),
        "C": normal(8, 6, 3, 3, seed=2), "r": np.zeros(6, np.float32),
    }  # fmt: skip
    return model(text, **{**given, **tensors})


@pytest.mark.parametrize("batch", [24, 7, 1])
def test_convolutions_have_mean_0_in_every_channel_and_variance_1(batch: int):
    before = convolutions()
    done = initialize(before, X, bias="center", batch_size=batch)
    assert {str(layer.status) for layer in done.report.layers} == {"ok"}
    found = values(done.model, {"x": X}, ["a", "d", "y"])
    assert all(centred(value) for value in found.values())
    assert unchanged_but(before, done.model, *"ABCpqr")
    for name in ("one", "two", "three"):
        line = entry(done, name)
        assert "bias centred" in line.notes
        assert line.channels.largest_mean < 1e-3
        assert line.channels.least_scale is None
    assert done.report.stages == 3  # a cut behind each centred layer, and nothing is run twice


def test_the_bias_is_minus_the_mean_of_the_scaled_product():
    """b_c = -s·E[(W·x)_c] and s² = 1 / E_c[Var((W·x)_c)], from the written weight by numpy in float64."""
    text = "g (float[N,6] x) => (float[N,5] y) { y = Gemm<transB=1>(x, W, b) }"
    done = initialize(model(text, W=normal(5, 6), b=normal(5)), ROWS, bias="center")
    product = ROWS.astype(np.float64) @ tensor(done.model, "W").astype(np.float64).T
    assert np.allclose(tensor(done.model, "b"), -product.mean(axis=0), atol=1e-5)
    assert abs(product.var(axis=0).mean() - 1) < 1e-5


FORMS = {
    "Gemm with beta": ("y = Gemm<transB=1, beta=0.25>(x, W, b)", (5, 6), (5,), -1),
    "Gemm with a row": ("y = Gemm<transB=1>(x, W, b)", (5, 6), (1, 5), -1),
    "Gemm with one number": ("y = Gemm(x, W, b)", (6, 5), (), -1),
    "Gemm with one number in an axis": ("y = Gemm(x, W, b)", (6, 5), (1,), -1),
    "MatMul and Add": ("m = MatMul(x, W) y = Add(b, m)", (6, 5), (5,), -1),
    "MatMul and Add of a scalar": ("m = MatMul(x, W) y = Add(m, b)", (6, 5), (), -1),
    "MatMul and Add of a row": ("m = MatMul(x, W) y = Add(m, b)", (6, 5), (1, 5), -1),
    "a bias behind Identity": ("c = Identity(b) m = MatMul(x, W) y = Add(m, c)", (6, 5), (5,), -1),
    "a bias that is an expression": ("c = Mul(b, b) y = Gemm(x, W, c)", (6, 5), (5,), -1),
    "a weight on the left": ("t = Transpose(x) m = MatMul(W, t) y = Add(m, b)", (5, 6), (5, 1), -2),
    "a Gemm's weight on the left": ("y = Gemm<transB=1>(W, x, b)", (5, 6), (5, 1), -2),
    "a full matrix as the bias": ("y = Gemm(x, W, b)", (6, 5), (40, 5), -1),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_bias_can_be_centred(form: str):
    body, shape, bias, axis = FORMS[form]
    proto = model(
        f"g (float[40,6] x) => (float[P,Q] y) {{ {body} }}", W=normal(*shape), b=normal(*bias) + np.float32(1)
    )
    done = initialize(proto, ROWS, bias="center", batch_size="all")
    assert [str(layer.status) for layer in done.report.layers] == ["ok"]
    value = values(done.model, {"x": ROWS}, ["y"])["y"]
    assert value.shape == ((40, 5) if axis == -1 else (5, 40))
    assert centred(value, axis)
    assert [node.op_type for node in done.model.graph.node] == [node.op_type for node in proto.graph.node]


def test_layers_that_cannot_be_centred_say_so_and_are_scaled_as_always():
    text = """g (float[N,6] x) => (float[N,6] y) {
        [bare] a = MatMul(x, A) b = Relu(a) [nil] c = Gemm<beta=0.0>(b, B, p)
        [fused] d = com.microsoft.FusedGemm<activation="Relu">(c, C, p) [own] e = Gemm(d, D, p) s = Sum(e, x)
        q = ReduceMean<keepdims=0>(x, zero) [computed] y = Gemm(s, E, q) }"""
    proto = model(
        text,
        microsoft=True,
        **{k: normal(6, 6, seed=n) for n, k in enumerate("ABCDE")},
        p=normal(6),
        zero=np.array([0]),
    )
    done = initialize(proto, ROWS, bias="center")
    reasons = {layer.name: " ".join(layer.notes) for layer in done.report.layers}
    assert "not centred: it has no bias" in reasons["bare"]
    assert "not centred: it has no bias" in reasons["nil"]
    assert "not centred: the Relu is inside the FusedGemm" in reasons["fused"]
    assert "not centred: its bias is computed" in reasons["computed"]
    assert reasons["own"] == "bias centred"
    found = values(done.model, {"x": ROWS}, ["a", "e", "d", "y"])
    assert centred(found["e"])
    assert all(abs(value.var() - 1) < 1e-3 for value in found.values())
    assert np.abs(found["a"].mean(axis=0)).max() > 0.1


def test_a_model_without_biases_is_told():
    done = initialize(
        model("g (float[N,6] x) => (float[N,6] y) { y = MatMul(x, W) }", W=normal(6, 6)), ROWS, bias="center"
    )
    assert "no layer was centred: none has a bias of its own that can take away its mean" in done.report.warnings
    assert int(done.report.exit_code) == 0


def test_a_bias_that_an_exporter_merged_is_given_to_each_layer():
    text = """g (float[N,6] x) => (float[N,6] y, float[6] z) {
        a = Gemm(x, A, p) b = Tanh(a) y = Gemm(b, B, p) z = Identity(p) }"""
    proto = model(text, A=normal(6, 6), B=normal(6, 6, seed=1), p=normal(6))
    done = initialize(proto, ROWS, bias="center")
    found = values(done.model, {"x": ROWS}, ["a", "y", "z"])
    assert centred(found["a"])
    assert centred(found["y"])
    assert np.array_equal(found["z"], tensor(proto, "p"))


@pytest.mark.parametrize("tied", ["share", "untie"])
def test_a_module_that_is_called_twice(tied: Any):
    """It is centred at its first use; its second use has a bias of its own only if it is untied."""
    text = """g (float[N,6] x) => (float[N,6] y) { a = Gemm(x, A, p) b = Tanh(a) y = Gemm(b, A, p) }"""
    done = initialize(model(text, A=normal(6, 6), p=normal(6)), ROWS, bias="center", tied=tied)
    found = values(done.model, {"x": ROWS}, ["a", "y"])
    assert centred(found["a"])
    assert centred(found["y"]) == (tied == "untie")
    assert len(done.model.graph.initializer) == (2 if tied == "share" else 4)


def test_two_first_uses_that_share_a_bias_are_centred_together():
    text = """g (float[N,6] x) => (float[N,6] y) {
        h = Neg(x) g = Abs(x) a = Gemm(h, A, p) b = Gemm(g, A, p) y = Add(a, b) }"""
    done = initialize(model(text, A=normal(6, 6), p=normal(6)), ROWS, bias="center")
    found = values(done.model, {"x": ROWS}, ["a", "b"])
    assert np.abs((found["a"].mean(axis=0) + found["b"].mean(axis=0)) / 2).max() < 1e-3
    assert abs((found["a"].var(axis=0).mean() + found["b"].var(axis=0).mean()) / 2 - 1) < 1e-3


@pytest.mark.parametrize(("kind", "fine"), [("float16", 5e-3), ("bfloat16", 1e-2), ("float64", 1e-6)])
def test_other_types(kind: str, fine: float):
    """The bias is stored in the model's type, and the mean is 0 up to its rounding."""
    code = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float64": TensorProto.DOUBLE}[kind]
    text = """g (float[N,6] x) => (float[N,8] y) { a = Gemm(x, A, p) b = Relu(a) y = Gemm(b, B, q) }"""
    plain = model(text, A=normal(6, 8), B=normal(8, 8, seed=1), p=normal(8), q=normal(8))
    typed = onnx.ModelProto()
    typed.CopyFrom(plain)
    for info in (*typed.graph.input, *typed.graph.output):
        info.type.tensor_type.elem_type = code
    dtype = helper.tensor_dtype_to_np_dtype(code)
    for held in typed.graph.initializer:
        held.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(held).astype(dtype), held.name))
    x = ROWS.astype(dtype)
    done = initialize(typed, x if kind != "bfloat16" else ROWS, bias="center", scale="channel")
    assert {str(layer.status) for layer in done.report.layers} == {"ok"}
    assert done.model is not None
    stored = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in done.model.graph.initializer}
    hidden = np.asarray(x, np.float64) @ stored["A"] + stored["p"]
    y = np.maximum(hidden, 0) @ stored["B"] + stored["q"]
    assert np.abs(hidden.mean(axis=0)).max() < fine
    assert np.abs(y.mean(axis=0)).max() < fine
    assert np.abs(y.var(axis=0) - 1).max() < 2 * fine


def test_the_sample_network():
    done = initialize(str(RELU), str(RELU.with_suffix(".npy")), bias="center")
    data = np.load(RELU.with_suffix(".npy"))
    found = values(done.model, {done.model.graph.input[0].name: data}, layer_outputs(done.model))
    assert all(centred(value) for value in found.values())


def test_new_weights_carry_their_biases_home(tmp_path):
    proto = convolutions()
    before = {name: tensor(proto, name) for name in "ABCpq"}
    done = initialize(proto, X, bias="center", like={**before, "r": tensor(proto, "r") + 7})
    assert done.weights is not None
    assert all(np.array_equal(done.weights[name], tensor(done.model, name)) for name in "ABCpq")


def test_centring_needs_scaling():
    with pytest.raises(LsuvError) as caught:
        initialize(convolutions(), X, bias="center", rescale=False)
    assert str(caught.value) == "`bias='center'` needs measured outputs; `rescale=False` stops before them"
