"""The nine defects of other implementations (each reproduced in one of them), as cases that must go right here."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import lsuv_cli
from independent import layer_variances, stored

HEAD = '<ir_version: 8, opset_import: ["" : 13]>'
rng = np.random.default_rng(7)


def model(text: str, **weights: tuple[int, ...] | np.ndarray) -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(f"{HEAD} {text}")
    for name, value in weights.items():
        array = value if isinstance(value, np.ndarray) else rng.standard_normal(value) * 0.3
        parsed.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return parsed


def ones(found: dict[str, float]) -> bool:
    return bool(found) and all(abs(variance - 1) < 1e-3 for variance in found.values())


def test_1_a_correction_reaches_its_own_layer():
    net = model(
        "g (float[N,16] x) => (float[N,16] d) { a = MatMul(x, A) b = Tanh(a) c = MatMul(b, B) d = Sigmoid(c) }",
        A=(16, 16),
        B=(16, 16),
    )
    x = rng.standard_normal((64, 16)).astype(np.float32)
    assert ones(layer_variances(lsuv_cli.initialize(net, x).model, {"x": x}))


def test_2_the_first_layer_is_scaled_too_and_within_the_variance_tolerance():
    net = model("g (float[N,3,8,8] x) => (float[N,8,6,6] y) { y = Conv(x, W) }", W=(8, 3, 3, 3))
    x = 0.9 * rng.standard_normal((32, 3, 8, 8)).astype(np.float32)
    assert ones(layer_variances(lsuv_cli.initialize(net, x).model, {"x": x}))


def test_3_layers_are_taken_in_the_order_of_execution():
    net = model(
        "g (float[N,16] x) => (float[N,16] c) { c = MatMul(t, C) a = MatMul(x, A) t = Relu(a) }", A=(16, 16), C=(16, 16)
    )
    x = rng.standard_normal((64, 16)).astype(np.float32)
    report = lsuv_cli.initialize(net, x).report
    assert [layer.name for layer in report.layers] == ["a", "c"]
    assert all(abs(layer.variance - 1) < 1e-3 for layer in report.layers)


def test_4_a_dead_input_gives_a_status_and_no_infinite_weight():
    net = model(
        "g (float[N,8] x) => (float[N,8] b) { a = MatMul(x, A) t = Relu(a) b = MatMul(t, B) }", A=(8, 8), B=(8, 8)
    )
    done = lsuv_cli.initialize(net, np.zeros((16, 8), np.float32))
    assert [layer.status for layer in done.report.layers] == ["dead", "dead"]
    assert done.report.exit_code == 1
    for weight in stored(done.model).values():
        assert np.isfinite(weight).all()
        np.testing.assert_allclose(weight @ weight.T, np.eye(8), atol=1e-5)


def test_5_a_layer_used_three_times_and_tied_weights():
    net = model(
        "g (float[N,16] x) => (float[N,16] y)"
        " { a = MatMul(x, W) s = Relu(a) b = MatMul(s, W) t = Relu(b) y = MatMul(t, W) }",
        W=(16, 16),
    )
    x = rng.standard_normal((64, 16)).astype(np.float32)
    done = lsuv_cli.initialize(net, x)
    found = layer_variances(done.model, {"x": x})
    assert abs(found["a"] - 1) < 1e-3
    assert np.abs(stored(done.model)["W"]).max() < 10
    for layer in done.report.layers:
        assert np.isclose(layer.variance, found[layer.name], rtol=1e-3)
    siamese = model(
        "g (float[N,16] x, float[N,16] z) => (float[N,16] a, float[N,16] b) { a = MatMul(x, W) b = MatMul(z, W) }",
        W=(16, 16),
    )
    feeds = {"x": x, "z": 3 * x[::-1].copy()}
    found = layer_variances(lsuv_cli.initialize(siamese, feeds).model, feeds)
    assert abs((found["a"] + found["b"]) / 2 - 1) < 1e-3


def test_6_a_large_bias_that_is_kept_does_not_drive_the_weight_to_nothing():
    bias = 5 * rng.standard_normal(16)
    net = model("g (float[N,16] x) => (float[N,16] y) { y = Gemm(x, W, b) }", W=(16, 16), b=bias)
    x = rng.standard_normal((64, 16)).astype(np.float32)
    done = lsuv_cli.initialize(net, x, bias="keep")
    assert done.report.layers[0].status == "unreachable"
    assert done.report.exit_code == 1
    weight = stored(done.model)["W"]
    np.testing.assert_allclose(weight @ weight.T, np.eye(16), atol=1e-5)
    np.testing.assert_array_equal(stored(done.model)["b"], bias.astype(np.float32))
    shifted = model("g (float[N,16] x) => (float[N,16] y) { y = Gemm(x, W, b) }", W=(16, 16), b=np.full(16, 1000.0))
    assert ones(layer_variances(lsuv_cli.initialize(shifted, x, bias="keep").model, {"x": x}))


def test_7_depthwise_filters_have_norm_one_and_transposed_convolutions_their_own_axes():
    depthwise = model("g (float[N,12,8,8] x) => (float[N,12,6,6] y) { y = Conv <group = 12> (x, W) }", W=(12, 1, 3, 3))
    weight = stored(lsuv_cli.initialize(depthwise, rescale=False).model)["W"]
    np.testing.assert_allclose(np.linalg.norm(weight.reshape(12, 9), axis=1), 1, atol=1e-5)
    transposed = model("g (float[N,6,4,4] x) => (float[N,10,6,6] y) { y = ConvTranspose(x, W) }", W=(6, 10, 3, 3))
    weight = stored(lsuv_cli.initialize(transposed, rescale=False).model)["W"]
    rows = weight.transpose(1, 0, 2, 3).reshape(10, 54)
    np.testing.assert_allclose(rows @ rows.T, np.eye(10), atol=1e-5)


def test_8_half_precision_and_several_inputs():
    net = onnx.parser.parse_model(
        f"{HEAD} g (float16[N,32] x, float16[N,32] z) => (float16[N,32] y)"
        " { a = MatMul(x, A) b = MatMul(z, B) s = Add(a, b) t = Relu(s) y = MatMul(t, C) }"
    )
    for name in "ABC":
        array = rng.standard_normal((32, 32)).astype(np.float16)
        net.graph.initializer.append(numpy_helper.from_array(array, name))
    feeds = {name: rng.standard_normal((256, 32)).astype(np.float16) for name in "xz"}
    done = lsuv_cli.initialize(net, feeds)
    assert [layer.status for layer in done.report.layers] == ["ok"] * 3
    found = layer_variances(done.model, feeds)
    assert all(abs(variance - 1) < 1e-2 for variance in found.values()), found


@pytest.mark.parametrize("seed", [0, 3])
def test_9_seed_dry_run_report_and_failure_status(seed, tmp_path):
    net = model("g (float[N,8] x) => (float[N,8] y) { y = MatMul(x, W) }", W=(8, 8))
    x = rng.standard_normal((16, 8)).astype(np.float32)
    first, second = (lsuv_cli.initialize(net, x, seed=seed) for _ in range(2))
    assert first.model.SerializeToString() == second.model.SerializeToString()
    plan = lsuv_cli.initialize(net, x, output=tmp_path / "y.onnx", dry_run=True)
    assert not list(tmp_path.iterdir())
    assert plan.report.layers[0].status == "planned"
    assert first.report.to_json()["schema"] == "lsuv-report/1"
    assert lsuv_cli.initialize(net, 0 * x).report.exit_code == 1
