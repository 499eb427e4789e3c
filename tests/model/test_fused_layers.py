"""Layers of com.microsoft, which onnxruntime's optimizer fuses, and of domains that it does not know."""

import numpy as np
import pytest

from helpers import (
    entry,
    is_orthonormal,
    model,
    near_one,
    normal,
    tensor,
    unchanged_but,
    variances,
)
from lsuv_cli import initialize


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu", "Tanh", "HardSigmoid", "Clip"])
def test_fused_conv_is_measured_behind_its_activation(activation):
    numbers = {"LeakyRelu": "0.1", "HardSigmoid": "0.2, 0.5", "Clip": "-1.0, 1.0"}.get(activation)
    extra = f", activation_params=[{numbers}]" if numbers else ""
    before = model(
        f"""g (float[N,3,8,8] x) => (float[N,4,4,4] y) {{
            a = com.microsoft.FusedConv<activation="{activation}"{extra}>(x, w, b)
            y = com.microsoft.FusedConv<activation="{activation}"{extra}>(a, v) }}""",
        microsoft=True,
        w=normal(4, 3, 3, 3),
        b=normal(4),
        v=normal(4, 4, 3, 3),
    )
    x = normal(8, 3, 8, 8, seed=1)
    result = initialize(before, x)
    found = variances(result.model, {"x": x}, ["a", "y"], reference=False)
    assert f"measured after the {activation} that is inside the FusedConv" in entry(result, "a").notes
    if "Relu" in activation:
        assert near_one(found)
        assert result.report.stages == 1
    else:  # what is between -1 and 1 can come near variance 1, no more; the report tells what it got
        assert found["a"] == pytest.approx(entry(result, "a").variance, rel=1e-3)
        assert found["y"] == pytest.approx(entry(result, "y").variance, rel=1e-3)
        assert np.isfinite(tensor(result.model, "w")).all()


def test_a_layer_that_its_activation_saturates_is_left_unscaled():
    """The sigmoid of a mean of 30 hardly varies; scaled up, it does not vary at all. That is no rounding error."""
    weight = 0.02 * np.abs(normal(3, 8, 1))
    before = model(
        """g (float[N,8,10] x) => (y, z) {
            y = com.microsoft.FusedConv<activation="Sigmoid">(x, w) z = Conv(x, v) }""",
        microsoft=True,
        w=weight,
        v=normal(3, 8, 1, seed=1),
    )
    x = 30 + 0.1 * normal(12, 8, 10, seed=2)
    result = initialize(before, x, pre_init="keep")
    found = variances(result.model, {"x": x}, ["y", "z"], reference=False)
    told = entry(result, "y")
    assert 0 < found["y"] < 0.25
    assert told.variance == pytest.approx(found["y"], rel=1e-3)
    assert told.status == "outside"
    assert "not scaled: with its scale, the Sigmoid inside makes its output constant" in told.notes
    assert not any("rounding" in note for note in told.notes)
    np.testing.assert_allclose(tensor(result.model, "w"), weight, rtol=1e-6)
    assert near_one({"z": found["z"]})


def test_fused_conv_that_adds_another_value_is_left_alone():
    before = model(
        """g (float[N,3,8,8] x) => (float[N,3,8,8] y) {
            a = Conv<pads=[1,1,1,1]>(x, w)
            y = com.microsoft.FusedConv<activation="Relu", pads=[1,1,1,1]>(x, v, b, a) }""",
        microsoft=True,
        w=normal(3, 3, 3, 3),
        v=normal(3, 3, 3, 3),
        b=normal(3),
    )
    result = initialize(before, normal(8, 3, 8, 8))
    assert entry(result, "y").status == "skipped"
    assert unchanged_but(before, result.model, "w")


@pytest.mark.parametrize("bias", ["zero", "keep"])
def test_fused_gemm(bias):
    before = model(
        """g (float[N,8] x) => (float[N,4] y) {
            y = com.microsoft.FusedGemm
                <activation="LeakyRelu", activation_alpha=0.2, transB=1, alpha=0.5>(x, w, b) }""",
        microsoft=True,
        w=normal(4, 8),
        b=0.1 * normal(4),
    )
    x = normal(256, 8, seed=1)
    after = initialize(before, x, bias=bias, tol=1e-3).model
    assert near_one(variances(after, {"x": x}, ["y"], reference=False))


@pytest.mark.parametrize("trans_b", [0, 1])
def test_fused_matmul(trans_b):
    before = model(
        f"g (float[N,8] x) => (float[N,12] y) {{ y = com.microsoft.FusedMatMul<alpha=0.125, transB={trans_b}>(x, w) }}",
        microsoft=True,
        w=normal(*((12, 8) if trans_b else (8, 12))),
    )
    x = normal(64, 8, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, reference=False))
    assert is_orthonormal(tensor(after, "w"))


def test_operators_of_a_domain_that_onnxruntime_knows_run_as_they_are():
    before = model(
        """g (float[N,8] x) => (float[N,4] y) {
            h = MatMul(x, w) a = com.microsoft.BiasGelu(h, b) i = MatMul(a, v) c = com.microsoft.QuickGelu(i)
            j = MatMul(c, u) d = com.microsoft.Gelu(j) y = MatMul(d, t) }""",
        microsoft=True,
        w=normal(8, 16),
        b=normal(16),
        v=normal(16, 16),
        u=normal(16, 16),
        t=normal(16, 4),
    )
    x = normal(64, 8, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["h", "i", "j", "y"], reference=False))
    assert unchanged_but(before, after, "w", "v", "u", "t")


def test_layers_in_front_of_an_operator_that_onnxruntime_does_not_know_are_initialized_with_a_warning():
    before = model('<ir_version: 9, opset_import: ["" : 18, "acme" : 1]> g (float[N,8] x) => (float[N,4] y) '
                   "{ h = MatMul(x, w) y = acme.Swirl(h) }", w=normal(8, 4))  # fmt: skip
    result = initialize(before, normal(64, 8))  # nothing behind the last layer has to run
    assert entry(result, "h").status == "ok"
