"""What must hold after `init`, measured without the code under test: outputs exposed, numpy in float64."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import lsuv_cli
from helpers import unchanged_but
from independent import layer_variances, stored

SAMPLES = Path(__file__).parent.parent / "sample_models"
FITNET = SAMPLES / "fitnet1_relu.onnx"
MNIST = SAMPLES / "fitnet_mnist_maxout.onnx"


@pytest.fixture(scope="module", params=[FITNET, MNIST], ids=lambda path: path.stem)
def sample(request, tmp_path_factory):
    model: Path = request.param
    data = np.load(model.with_suffix(".npy"))
    out = tmp_path_factory.mktemp("out") / "out.onnx"
    lsuv_cli.initialize(model, data, output=out)
    return model, data, out


def test_every_layer_has_variance_one(sample):
    _, data, out = sample
    found = layer_variances(onnx.load(out), {"data": data})
    assert len(found) >= 7
    assert all(abs(variance - 1) < 1e-3 for variance in found.values()), found


def test_each_weight_is_a_multiple_of_an_orthonormal_matrix(sample):
    _, _, out = sample
    for name, weight in stored(onnx.load(out)).items():
        if name.endswith(".weight"):
            matrix = weight.reshape(len(weight), -1).astype(np.float64)
            if len(matrix) > matrix.shape[1]:
                matrix = matrix.T
            matrix /= np.sqrt((matrix**2).sum() / len(matrix))
            assert np.abs(matrix @ matrix.T - np.eye(len(matrix))).max() < 1e-5, name


def test_biases_are_zero(sample):
    _, _, out = sample
    biases = [array for name, array in stored(onnx.load(out)).items() if name.endswith(".bias")]
    assert biases
    assert not any(np.any(array) for array in biases)


def test_all_else_is_as_it_was_byte_for_byte(sample):
    model, _, out = sample
    before = onnx.load(model)
    assert before.SerializeToString() == model.read_bytes()
    assert unchanged_but(before, onnx.load(out), *stored(before))


def test_metadata_tells_how_it_was_made(sample):
    _, data, out = sample
    found = {p.key: p.value for p in onnx.load(out).metadata_props}
    assert found["lsuv.version"] == lsuv_cli.__version__
    assert found["lsuv.seed"] == "0"
    assert found["lsuv.pre_init"] == "orthonormal"
    assert found["lsuv.tolerance"] == "0.01"
    assert found["lsuv.samples"] == str(len(data))


def test_same_request_gives_the_same_bytes(sample, tmp_path):
    model, data, out = sample
    lsuv_cli.initialize(model, data, output=tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == out.read_bytes()


def test_another_seed_gives_other_weights(sample):
    model, data, out = sample
    other = lsuv_cli.initialize(model, data, seed=1).model
    assert not np.allclose(stored(other)["conv11.weight"], stored(onnx.load(out))["conv11.weight"])


def test_the_batch_size_does_not_matter(sample):
    model, data, _ = sample
    one = stored(lsuv_cli.initialize(model, data, batch_size=1).model)
    whole = stored(lsuv_cli.initialize(model, data, batch_size=len(data)).model)
    for name, weight in whole.items():
        assert np.linalg.norm(one[name] - weight) <= 1e-4 * np.linalg.norm(weight), name


def test_excluding_a_layer_changes_no_other_pre_initialization():
    kept = stored(onnx.load(FITNET))["conv13.weight"]
    all_of_it = stored(lsuv_cli.initialize(FITNET, rescale=False).model)
    without = stored(lsuv_cli.initialize(FITNET, rescale=False, exclude=["conv13"]).model)
    np.testing.assert_array_equal(without["conv13.weight"], kept)
    del all_of_it["conv13.weight"], without["conv13.weight"]
    assert all(np.array_equal(all_of_it[name], without[name]) for name in all_of_it)


def test_a_second_run_that_keeps_changes_nothing_beyond_rounding(sample):
    _, data, out = sample
    first = onnx.load(out)
    second = lsuv_cli.initialize(out, data, pre_init="keep").model
    for name, weight in stored(first).items():
        np.testing.assert_allclose(stored(second)[name], weight, rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("target", [0.25, 1.0, 4.0])
def test_the_target_variance_is_the_users(target):
    data = np.load(MNIST.with_suffix(".npy"))
    done = lsuv_cli.initialize(MNIST, data, target_variance=target)
    found = layer_variances(done.model, {"data": data})
    assert all(abs(variance / target - 1) < 1e-3 for variance in found.values()), found


@pytest.mark.parametrize("pre_init", ["orthonormal", "gaussian", "xavier", "msra", "orthonormal-msra", "keep"])
def test_every_pre_init_ends_at_variance_one(pre_init):
    data = np.load(MNIST.with_suffix(".npy"))
    done = lsuv_cli.initialize(MNIST, data, pre_init=pre_init)
    found = layer_variances(done.model, {"data": data})
    assert all(abs(variance - 1) < 1e-3 for variance in found.values()), found


@pytest.mark.parametrize(
    ("pre_init", "std"),
    [
        ("gaussian", 1.0),
        ("xavier", (1 / (64 * 9)) ** 0.5),
        ("msra", (2 / (64 * 9)) ** 0.5),
        ("orthonormal", (1 / (64 * 9)) ** 0.5),
        ("orthonormal-msra", (2 / (64 * 9)) ** 0.5),
    ],
)
def test_without_rescale_the_weights_have_their_textbook_deviation(pre_init, std):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[N,64,8,8] x) => (float[N,96,8,8] y)'
        " { y = Conv <pads = [1,1,1,1]> (x, w) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((96, 64, 3, 3), np.float32), "w"))
    weight = stored(lsuv_cli.initialize(model, pre_init=pre_init, rescale=False).model)["w"]
    assert np.isclose(weight.std(), std, rtol=0.02)


def test_keep_leaves_the_directions_alone():
    data = np.load(MNIST.with_suffix(".npy"))
    before = stored(onnx.load(MNIST))["conv21.weight"]
    after = stored(lsuv_cli.initialize(MNIST, data, pre_init="keep").model)["conv21.weight"]
    ratio = after / before
    assert ratio.std() < 1e-5 * ratio.mean()


def test_the_report_says_what_the_file_does(sample):
    model, data, _ = sample
    report = lsuv_cli.initialize(model, data, before=True).report
    given = layer_variances(onnx.load(model), {"data": data})
    for layer in report.layers:
        assert np.isclose(layer.variance_given, given[layer.name], rtol=1e-3)
        assert abs(layer.variance - 1) < 1e-3
        assert layer.status == "ok"


def test_variance_at_its_turn_is_that_of_the_unscaled_weight():
    # For the first layer this can be had from the pre-initialization alone.
    data = np.load(MNIST.with_suffix(".npy"))
    report = lsuv_cli.initialize(MNIST, data).report
    alone = lsuv_cli.initialize(MNIST, rescale=False).model
    first = report.layers[0]
    assert np.isclose(first.variance_at_turn, layer_variances(alone, {"data": data})["conv11"], rtol=1e-4)
    assert np.isclose(first.scale, 1 / np.sqrt(first.variance_at_turn), rtol=1e-4)


def test_a_model_proto_is_not_changed_and_batches_may_be_an_iterable():
    data = np.load(MNIST.with_suffix(".npy"))
    model = onnx.load(MNIST)
    before = model.SerializeToString()
    done = lsuv_cli.initialize(model, (data[k : k + 50] for k in range(0, 128, 50)))
    assert model.SerializeToString() == before
    assert done.report.samples == 128
    whole = lsuv_cli.initialize(model, {"data": data}).model
    np.testing.assert_allclose(stored(done.model)["ip1.weight"], stored(whole)["ip1.weight"], rtol=1e-3, atol=1e-6)


def test_measure_tells_the_variances_of_a_model_as_it_stands():
    data = np.load(MNIST.with_suffix(".npy"))
    report = lsuv_cli.measure(MNIST, data)
    expected = layer_variances(onnx.load(MNIST), {"data": data})
    assert {layer.name for layer in report.layers} == set(expected)
    for layer in report.layers:
        assert np.isclose(layer.variance, expected[layer.name], rtol=1e-3)
        assert layer.status == "outside"
