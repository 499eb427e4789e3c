"""The sample models are the networks they say they are, and the kept files are what the scripts make."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from math import erf, sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest

SAMPLES = Path(__file__).resolve().parent.parent / "sample_models"
Array = npt.NDArray[Any]


def load(name: str) -> ModuleType:
    """A script of sample_models, which is a directory of scripts and not a package."""
    spec = importlib.util.spec_from_file_location(f"sample_models_{name}", SAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


script = load("build")
build = script.build

FITNETS = ("fitnet1", "fitnet4", "fitresnet4", "fitnet_mnist")
FITNET4_LAYERS = [
    *("conv11", "conv12", "conv13", "conv14", "conv15"),
    *("conv21", "conv22", "conv23", "conv24", "conv25", "conv26"),
    *("conv31", "conv32", "conv33", "conv34", "conv35", "conv36"),
    *("ip1", "ip2"),
]


def run(model: onnx.ModelProto, data: Array, fetches: Sequence[str] = ()) -> list[Array]:
    """The model's outputs, or the values named in `fetches`."""
    if fetches:
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in fetches)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {session.get_inputs()[0].name: data}))


def noise(model: onnx.ModelProto, batch: int) -> Array:
    dims = model.graph.input[0].type.tensor_type.shape.dim
    assert dims[0].dim_param == "N"
    shape = (batch, *(dim.dim_value for dim in dims[1:]))
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def layers(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in model.graph.node if node.op_type in ("Conv", "Gemm")]


def weight(model: onnx.ModelProto, name: str) -> Array:
    return next(onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == name)


@pytest.fixture
def blank_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros instead of random numbers, where a large network's shapes are all that matters."""

    def zeros(net: Any, name: str, shape: tuple[int, ...]) -> str:
        return str(net.constant(name, np.zeros(shape, np.float32)))

    monkeypatch.setattr(script.Net, "gaussian", zeros)


@pytest.mark.parametrize("activation", script.ACTIVATIONS)
@pytest.mark.parametrize("name", FITNETS)
def test_every_fitnet_runs_with_every_activation_and_any_batch(name: str, activation: str) -> None:
    model = build(name, activation=activation)
    onnx.checker.check_model(model, full_check=True)
    for batch in (1, 3):
        (logits,) = run(model, noise(model, batch))
        assert logits.shape == (batch, 10)
        assert np.isfinite(logits).all()


# Counted by hand: 9 * in * out + out for each convolution, in * out + out for each inner product.
@pytest.mark.parametrize(
    ("name", "activation", "count"),
    [
        ("fitnet1", "maxout", 348_694),
        ("fitnet1", "relu", 128_102),
        ("fitnet4", "maxout", 2_742_102),
        ("fitnet4", "relu", 1_276_806),
        ("fitresnet4", "maxout", 2_765_174),
        ("fitresnet4", "relu", 1_288_342),
        ("fitnet_mnist", "maxout", 21_426),
        ("fitnet_mnist", "relu", 11_258),
    ],
)
def test_parameter_counts_of_the_fitnets(name: str, activation: str, count: int) -> None:
    assert script.parameter_count(build(name, activation=activation)) == count


def test_layers_bear_the_papers_names() -> None:
    assert layers(build("fitnet4")) == FITNET4_LAYERS
    assert layers(build("fitresnet4")) == FITNET4_LAYERS
    assert layers(build("fitnet1"))[6:] == ["conv31", "conv32", "conv33", "ip1", "ip2"]
    assert layers(build("fitnet_mnist")) == [
        "conv11",
        "conv12",
        "conv21",
        "conv22",
        "conv31",
        "conv32",
        "ip1",
    ]


def test_files_are_for_old_readers_too() -> None:
    model = build("fitnet4")
    assert (model.ir_version, model.opset_import[0].version) == (8, 13)
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["data", "logits"]


def test_weights_are_gaussian_with_std_one_hundredth_and_biases_zero() -> None:
    model = build("fitnet4", activation="relu")
    values = weight(model, "conv36.weight")
    assert values.shape == (128, 128, 3, 3)
    assert abs(values.mean()) < 1e-4
    assert values.std() == pytest.approx(0.01, rel=0.01)
    assert not weight(model, "conv36.bias").any()


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (weight(build("fitnet1", seed=seed), "ip1.weight") for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_variance_vanishes_in_a_network_that_is_not_initialized() -> None:
    model = build("fitnet4", activation="relu")
    first, last = run(model, noise(model, 2), ["conv11", "logits"])
    assert first.std() > 0.01
    assert last.std() < 1e-12


def test_maxout_takes_the_larger_half_of_the_channels() -> None:
    model = build("fitnet_mnist", activation="maxout")
    conv, after = run(model, noise(model, 2), ["conv11", "conv11.max2"])
    assert np.array_equal(after, np.maximum(conv[:, :16], conv[:, 16:]))


def test_maxout_of_the_fully_connected_layer_has_five_pieces() -> None:
    model = build("fitnet1", activation="maxout")
    linear, after = run(model, noise(model, 2), ["ip1", "ip1.max5"])
    assert np.array_equal(after, linear.reshape(2, 5, 500).max(axis=1))


def test_very_leaky_relu_keeps_a_third_of_what_is_negative() -> None:
    model = build("fitnet_mnist", activation="vlrelu")
    conv, after = run(model, noise(model, 2), ["conv11", "conv11.vlrelu"])
    np.testing.assert_allclose(after, np.where(conv < 0, 0.333 * conv, conv), rtol=1e-6)


def test_residual_sum_comes_before_the_activation() -> None:
    model = build("fitresnet4", activation="relu")
    names = ["conv11.relu", "conv12", "conv12.relu"]
    before, conv, after = run(model, noise(model, 2), names)
    np.testing.assert_allclose(after, np.maximum(conv + before, 0), rtol=1e-6)
    sums = [node.name for node in model.graph.node if node.op_type == "Add"]
    assert sums == [f"conv{i}.sum" for i in (12, 14, 22, 24, 26, 32, 34, 36)]


def test_residual_sum_with_maxout_adds_to_every_piece() -> None:
    model = build("fitresnet4", activation="maxout")
    before, conv, after = run(model, noise(model, 2), ["conv11.max2", "conv12", "conv12.sum"])
    np.testing.assert_allclose(after, np.maximum(conv[:, :32] + before, conv[:, 32:] + before), rtol=1e-5)


@pytest.mark.parametrize(
    ("where", "order"), [("before", ["conv11", "bn", "relu"]), ("after", ["conv11", "relu", "bn"])]
)
def test_batch_norm_stands_where_it_was_asked_for(where: str, order: list[str]) -> None:
    model = build("fitnet4", activation="relu", batch_norm=where)
    onnx.checker.check_model(model, full_check=True)
    assert [node.name.split(".")[-1] for node in model.graph.node[:3]] == order
    assert sum(node.op_type == "BatchNormalization" for node in model.graph.node) == 18
    # It has seen no data: but for its epsilon it changes nothing.
    plain, normalized = (run(m, noise(m, 2))[0] for m in (build("fitnet4", activation="relu"), model))
    np.testing.assert_allclose(normalized, plain, rtol=1e-2)


def test_pooling_rounds_up_as_in_caffe() -> None:
    model = build("fitnet_mnist")
    sizes = [value.shape[-1] for value in run(model, noise(model, 1), ["pool1", "pool2", "pool3"])]
    assert sizes == [13, 6, 3]


@pytest.mark.parametrize("activation", ["relu", "maxout"])
def test_chain_is_as_deep_as_asked(activation: str) -> None:
    model = build("chain", depth=7, width=4, size=8, activation=activation)
    onnx.checker.check_model(model, full_check=True)
    assert layers(model) == [f"conv{i}" for i in range(1, 8)] + ["ip1"]
    assert run(model, noise(model, 3))[0].shape == (3, 10)


# As published: BVLC's CaffeNet and GoogLeNet (without and with auxiliary classifiers), and ResNet-50.
@pytest.mark.parametrize(
    ("name", "options", "count", "number_of_layers"),
    [
        ("caffenet", {}, 60_965_224, 8),
        ("googlenet", {}, 6_998_552, 58),
        ("googlenet", {"aux": True}, 13_378_280, 64),
        ("resnet50", {}, 25_557_032, 54),
    ],
)
@pytest.mark.usefixtures("blank_weights")
def test_imagenet_networks(name: str, options: dict[str, Any], count: int, number_of_layers: int) -> None:
    model = build(name, **options)
    onnx.checker.check_model(model)
    assert script.parameter_count(model) == count
    assert len(layers(model)) == number_of_layers


@pytest.mark.usefixtures("blank_weights")
def test_resnet50_without_batch_norm_has_biases_instead() -> None:
    model = build("resnet50", fold_bn=True, classes=10)
    assert not any(node.op_type == "BatchNormalization" for node in model.graph.node)
    assert all(len(node.input) == 3 for node in model.graph.node if node.op_type == "Conv")


def test_caffenet_has_two_groups_where_alexnet_had_two_gpus(blank_weights: None) -> None:
    model = build("caffenet", classes=10)
    groups = {
        node.name: attribute.i for node in model.graph.node for attribute in node.attribute if attribute.name == "group"
    }
    assert groups == {"conv1": 1, "conv2": 2, "conv3": 1, "conv4": 2, "conv5": 2}
    assert weight(model, "conv2.weight").shape == (256, 48, 5, 5)


def test_a_small_bert_runs() -> None:
    model = build("bert", hidden=128, layers=2, length=8, vocabulary=50, classes=3)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 17
    for batch in (1, 3):
        tokens = np.random.default_rng(0).integers(0, 50, (batch, 8))
        (logits,) = run(model, tokens)
        assert logits.shape == (batch, 3)
        assert np.isfinite(logits).all()
    # 50 word and 8 position embeddings and their norm; per block query, key, value and output, the two inner
    # products of the feed-forward part and two norms; the pooler and the classifier.
    h = 128
    block = 4 * (h * h + h) + (4 * h * h + 4 * h) + (4 * h * h + h) + 2 * 2 * h
    assert script.parameter_count(model) == 58 * h + 2 * h + 2 * block + (h * h + h) + (3 * h + 3)


def test_berts_gelu_is_gelu() -> None:
    model = build("bert", hidden=64, layers=1, length=8, vocabulary=50)
    x, y = run(model, np.arange(8).reshape(1, 8), ["layer0.intermediate.add", "layer0.gelu"])
    expected = [v * (1 + erf(v / sqrt(2))) / 2 for v in x.ravel().tolist()]
    np.testing.assert_allclose(y.ravel(), expected, rtol=1e-4, atol=1e-8)


def test_a_wrong_request_is_explained() -> None:
    with pytest.raises(ValueError, match="no network 'fitnet5'; there are fitnet1"):
        build("fitnet5")
    with pytest.raises(ValueError, match="caffenet has no option 'depth'; it has classes, seed"):
        build("caffenet", depth=3)
    with pytest.raises(ValueError, match="no activation 'elu'; there are maxout"):
        build("fitnet4", activation="elu")


def test_command_line_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.onnx"
    script.main(["fitnet_mnist", "--activation", "tanh", "--classes", "5", "-o", str(path)])
    assert onnx.load(path) == build("fitnet_mnist", activation="tanh", classes=5)
    assert capsys.readouterr().out.startswith("small.onnx: 10,713 parameters")


def test_command_line_lists_the_networks(capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--list"])
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{listed}" for name in script.NETWORKS)


def test_command_line_refuses_an_option_the_network_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main(["fitnet4", "--depth", "3"])
    assert "fitnet4 has no option 'depth'" in capsys.readouterr().err


@pytest.mark.parametrize("file", script.KEPT)
def test_kept_files_are_what_the_script_builds(file: str) -> None:
    name, options = script.KEPT[file]
    assert build(name, **options).SerializeToString(deterministic=True) == (SAMPLES / file).read_bytes()


@pytest.mark.parametrize(
    ("file", "shape"), [("fitnet1_relu", (32, 3, 32, 32)), ("fitnet_mnist_maxout", (128, 1, 28, 28))]
)
def test_calibration_data_is_normalized_and_fits_its_model(file: str, shape: tuple[int, ...]) -> None:
    data = np.load(SAMPLES / f"{file}.npy", allow_pickle=False)
    assert (data.shape, data.dtype) == (shape, np.float32)
    np.testing.assert_allclose(data.mean((0, 2, 3), dtype=np.float64), 0, atol=1e-6)
    np.testing.assert_allclose(data.var((0, 2, 3), dtype=np.float64), 1, atol=1e-5)
    (logits,) = run(onnx.load(SAMPLES / f"{file}.onnx"), data)
    assert logits.shape == (shape[0], 10)
    assert logits.std() < 1e-5


def test_calibration_data_is_what_the_script_makes() -> None:
    pytest.importorskip("skimage", reason="the photographs come from scikit-image")
    script = load("make_data")
    for file, made in (
        ("fitnet1_relu.npy", script.samples(script.COLOUR, count=32, size=32)),
        ("fitnet_mnist_maxout.npy", script.samples(script.GREY, count=128, size=28)),
    ):
        np.testing.assert_allclose(made, np.load(SAMPLES / file), atol=1e-6)
