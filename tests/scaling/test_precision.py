"""Half precision, bfloat16, double, and mixtures: calibrated in float32, written in the stored type."""

import ml_dtypes
import numpy as np
import onnx
import pytest

from helpers import entry, is_orthonormal, model, near_one, normal, tensor, unchanged_but, variances
from lsuv_cli import initialize

X = normal(256, 16, seed=1)
NAMES = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "double": np.float64}


def two_layers(kind, **more):
    dtype = NAMES[kind]
    return model(
        f"""g ({kind}[N,16] x) => ({kind}[N,8] y) {{
            h = Gemm(x, v, b) r = Relu(h) y = MatMul(r, w) }}""",
        v=normal(16, 32).astype(dtype),
        b=normal(32).astype(dtype),
        w=normal(32, 8).astype(dtype),
        **more,
    )


def by_hand(proto, x):
    """The two layers in float64, with the weights as they are stored."""
    v, w = (tensor(proto, name).astype(np.float64) for name in ("v", "w"))
    h = x.astype(np.float64) @ v
    return {"h": h.var(), "y": (np.maximum(h, 0) @ w).var()}


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("float", 1e-3), ("double", 1e-3), ("float16", 3e-3), ("bfloat16", 2e-2)]
)
def test_a_model_of_one_type(kind, tolerance):
    before = two_layers(kind)
    x = X.astype(np.float32 if kind == "bfloat16" else NAMES[kind])
    result = initialize(before, x)
    assert near_one(by_hand(result.model, x), tolerance)
    assert {layer.status for layer in result.report.layers} == {"ok"}
    assert tensor(result.model, "v").dtype == NAMES[kind]
    assert not tensor(result.model, "b").any()
    assert is_orthonormal(tensor(result.model, "w"), {"float16": 2e-3, "bfloat16": 2e-2}.get(kind, 1e-5))
    assert unchanged_but(before, result.model, "v", "b", "w")


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_convolutions(kind):
    before = model(
        f"g ({kind}[N,3,9,9] x) => ({kind} y) {{ a = Conv(x, u, b) r = Tanh(a) y = ConvTranspose(r, w) }}",
        u=normal(4, 3, 3, 3).astype(NAMES[kind]),
        b=normal(4).astype(NAMES[kind]),
        w=normal(4, 2, 3, 3).astype(NAMES[kind]),
    )
    x = normal(8, 3, 9, 9, seed=1).astype(NAMES[kind])
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["a", "y"]), 5e-3)
    assert unchanged_but(before, after, "u", "b", "w")


def test_convolutions_of_bfloat16():
    before = model(
        "g (bfloat16[N,3,9,9] x) => (bfloat16 y) { y = Conv(x, u) }",
        opset=22,
        ir=10,
        u=normal(4, 3, 3, 3).astype(ml_dtypes.bfloat16),
    )
    x = normal(8, 3, 9, 9, seed=1)
    result = initialize(before, x)
    assert entry(result, "y").status == "ok"
    float_copy = model("g (float[N,3,9,9] x) => (float y) { y = Conv(x, u) }",
                       u=tensor(result.model, "u").astype(np.float32))  # fmt: skip
    assert near_one(variances(float_copy, {"x": x}), 2e-2)


@pytest.mark.parametrize("inner", ["float16", "bfloat16", "double"])
def test_mixed_precision(inner):
    code = {"float16": 10, "bfloat16": 16, "double": 11}[inner]
    before = model(
        f"""g (float[N,16] x) => (float[N,8] y) {{
            a = MatMul(x, u) c = Cast<to={code}>(a) r = Tanh(c) b = MatMul(r, v) d = Cast<to=1>(b)
            y = MatMul(d, w) }}""",
        u=normal(16, 16),
        v=normal(16, 16).astype(NAMES[inner]),
        w=normal(16, 8),
    )
    result = initialize(before, X)
    assert {layer.status for layer in result.report.layers} == {"ok"}
    u, v, w = (tensor(result.model, name).astype(np.float64) for name in "uvw")
    a = X.astype(np.float64) @ u
    b = np.tanh(a) @ v
    found = {"a": a.var(), "b": b.var(), "y": (b @ w).var()}
    assert near_one(found, 1e-3 if inner == "double" else 2e-2)
    assert unchanged_but(before, result.model, "u", "v", "w")


def test_a_half_input_that_is_cast_at_once():
    for kind in ("float16", "bfloat16"):
        before = model(
            f"g ({kind}[N,16] x) => (float[N,8] y) {{ c = Cast<to=1>(x) y = MatMul(c, w) }}", w=normal(16, 8)
        )
        result = initialize(before, X)
        assert entry(result, "y").status == "ok"
        x = X.astype(NAMES[kind]).astype(np.float64)
        assert near_one({"y": (x @ tensor(result.model, "w")).var()}, 5e-3)


def test_what_is_reported_is_measured_after_rounding():
    before = two_layers("float16")
    x = X.astype(np.float16)
    result = initialize(before, x)
    found = variances(result.model, {"x": x}, ["h", "y"], reference=False)
    for name in ("h", "y"):
        assert entry(result, name).variance == pytest.approx(found[name], rel=2e-3)


@pytest.mark.parametrize("pre_init", ["orthonormal", "keep"])
def test_a_scaled_weight_that_does_not_fit_is_reported_and_not_written(pre_init):
    before = model(
        """g (float16[N,16] x) => (float16[N,8] y, float16[N,8] z) {
            y = MatMul(x, w) s = Mul(x, big) z = MatMul(s, v) }""",
        w=normal(16, 8).astype(np.float16),
        v=normal(16, 8).astype(np.float16),
        big=np.float16(1e4),
    )
    x = (1e-6 * X).astype(np.float16)
    result = initialize(before, x, pre_init=pre_init)
    assert entry(result, "y").status == "overflow"
    assert result.report.exit_code == 1
    assert entry(result, "z").status == "ok"
    weight = tensor(result.model, "w")
    assert np.isfinite(weight).all()
    assert np.abs(weight.astype(float)).max() < 10
    if pre_init == "keep":
        assert unchanged_but(before, result.model, "v")


def test_a_scaled_weight_that_does_not_fit_through_a_cast_is_not_written_either():
    before = model("g (float16[N,16] x) => (float16[N,8] y) { w = Cast<to=10>(v) y = MatMul(x, w) }", v=normal(16, 8))
    result = initialize(before, (1e-6 * X).astype(np.float16), pre_init="keep")
    assert entry(result, "y").status == "overflow"
    assert unchanged_but(before, result.model)


@pytest.mark.parametrize("pre_init", ["orthonormal", "keep"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_scaled_weight_that_would_be_zero_is_not_written_either(kind, pre_init):
    factor = 1e11 if kind == "float16" else 1e43
    before = model("g (double[N,16] x) => (double[N,8] y) { c = Cast<to=11>(w) y = MatMul(x, c) }",
                   w=normal(16, 8).astype(NAMES[kind]))  # fmt: skip
    x = factor * X.astype(np.float64)
    result = initialize(before, x, pre_init=pre_init)
    written = tensor(result.model, "w").astype(np.float64)
    assert entry(result, "y").status == "overflow"
    assert result.report.exit_code == 1
    assert np.abs(written).max() > 0.1
    assert entry(result, "y").variance == pytest.approx((x @ written).var(), rel=1e-2)


def test_a_scale_that_is_too_large_for_float32_is_not_written_either():
    before = model("g (float[N,16] x) => (float[N,8] y) { y = MatMul(x, w) }", w=normal(16, 8))
    result = initialize(before, (X * 1e-39).astype(np.float32))
    assert entry(result, "y").status in {"overflow", "dead"}
    assert result.report.exit_code == 1
    assert np.abs(tensor(result.model, "w")).max() < 10


def test_double_weights_are_scaled_in_double():
    before = two_layers("double")
    x = X.astype(np.float64)
    after = initialize(before, x, pre_init="keep").model
    old, new = tensor(before, "v"), tensor(after, "v")
    ratio = new / old
    assert np.ptp(ratio) < 1e-14 * abs(ratio).max()


def test_integers_beside_floats_stay_integers():
    before = model(
        """g (float[N,16] x) => (float[N,8] y) {
            s = Shape(x) h = MatMul(x, w) i = Cast<to=7>(h) f = Cast<to=1>(i) y = MatMul(f, v) }""",
        w=normal(16, 16),
        v=normal(16, 8),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["h", "y"]))
    onnx.checker.check_model(after)


def test_data_may_be_bfloat16_too():
    before = model("g (float[N,8] x) => (float[N,8] y) { y = MatMul(x, w) }", w=normal(8, 8))
    x = normal(64, 8, seed=3).astype(ml_dtypes.bfloat16)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x.astype(np.float32)}))


def test_a_layer_in_float32_whose_model_puts_out_bfloat16():
    before = model("g (float[N,16] x) => (z) { y = MatMul(x, w) z = Cast<to=16>(y) }", w=normal(16, 4))
    result = initialize(before, X)
    assert entry(result, "y").status == "ok"
    assert near_one(variances(result.model, {"x": X}, ["y"], reference=False))
