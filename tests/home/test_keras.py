"""There and back with Keras 3: export, init --like, set_weights. `pytest -m keras` (KERAS_BACKEND: tensorflow, jax)."""

import os
import warnings

import numpy as np
import onnxruntime as ort
import pytest

from helpers import near_one
from lsuv_cli.cli import main

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytestmark = [pytest.mark.keras, pytest.mark.filterwarnings("ignore")]

CONVOLUTIONS, NORMS = {"conv", "separable"}, {"norm_1", "norm_2"}


def network(trained=False):
    """Dense, Conv, depthwise, separable and transposed convolutions, and BatchNorm behind two of them."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            layers.Conv2D(8, 3, padding="same", use_bias=False, name="conv"),
            layers.BatchNormalization(name="norm_1"), layers.ReLU(),
            layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2), layers.ReLU(),
            layers.SeparableConv2D(12, 3, name="separable"), layers.BatchNormalization(name="norm_2"), layers.ReLU(),
            layers.Conv2DTranspose(6, 3, strides=2), layers.ReLU(),
            layers.GlobalAveragePooling2D(), layers.Dense(10), layers.ReLU(), layers.Dense(10),
        ]
    )  # fmt: skip
    net.build((None, 16, 16, 3))
    if trained:
        rng = np.random.default_rng(1)
        for layer in net.layers:
            if isinstance(layer, layers.BatchNormalization):
                size = layer.gamma.shape[0]
                layer.set_weights([rng.uniform(0.5, 2, size), *rng.normal(size=(2, size)), rng.uniform(0.1, 4, size)])
    return net


def images():
    return np.random.default_rng(0).standard_normal((32, 16, 16, 3)).astype(np.float32)


def there_and_back(net, directory, data=None, *options):
    """The two lines in Keras, with the command between them; the written model's output."""
    data = images() if data is None else data
    net(data)  # Keras exports networks that have run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.export(directory / "net.onnx", format="onnx", verbose=False)
    np.save(directory / "calib.npy", data)
    np.savez(directory / "before.npz", *net.get_weights())
    words = ["net.onnx", "--data", "calib.npy", "--like", "before.npz", "--weights", "after.npz", "-o", "out.onnx"]
    with pytest.raises(SystemExit) as ended:
        main(["init", *(str(directory / word) if "." in word else word for word in words), *options])
    assert ended.value.code == 0
    with np.load(directory / "after.npz") as after:
        net.set_weights([after[name] for name in after.files])
    session = ort.InferenceSession(directory / "out.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: data})[0]


def variances(net):
    """The variance of every output at home: of layers with a kernel, and of BatchNorms."""
    found, value = {}, images()
    for layer in net.layers:
        if layer.__class__.__name__ == "SeparableConv2D":
            import keras

            inner = keras.ops.depthwise_conv(value, layer.depthwise_kernel)
            found[f"{layer.name} depthwise"] = float(np.asarray(inner, np.float64).var())
        value = layer(value)
        if layer.weights:
            found[layer.name] = float(np.asarray(value, np.float64).var())
    return found


def test_a_fresh_network(tmp_path, capsys):
    net = network()
    given = variances(net)
    expected = there_and_back(net, tmp_path)
    assert "carried 7 of 7 tensors" in capsys.readouterr().err
    np.testing.assert_allclose(np.asarray(net(images())), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert not near_one(given, 0.1)
    assert near_one(variances(net), 2e-3)  # the exporter folded BatchNorms with epsilon 0.001


def test_a_network_whose_batch_norms_were_trained(tmp_path):
    net = network(trained=True)
    expected = there_and_back(net, tmp_path)
    np.testing.assert_allclose(np.asarray(net(images())), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # tf2onnx folds a BatchNorm, so that the output behind it has variance 1; jax2onnx leaves it as it is.
    import keras

    folded = keras.config.backend() == "tensorflow"
    scaled = {name: v for name, v in variances(net).items() if name not in CONVOLUTIONS | NORMS}
    scaled |= {name: v for name, v in variances(net).items() if name in (NORMS if folded else CONVOLUTIONS)}
    assert len(scaled) == 7
    assert near_one(scaled, 2e-3)


def sequences():
    return np.random.default_rng(0).standard_normal((32, 12, 6)).astype(np.float32)


def test_convolutions_attention_and_a_recurrent_layer_on_sequences(tmp_path, capsys):
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    given = keras.Input((12, 6))
    seen = [layers.Conv1D(16, 3)(given)]
    x = layers.ReLU()(seen[-1])
    seen.append(layers.MultiHeadAttention(2, 8)(x, x))
    seen.append(layers.Conv1DTranspose(12, 3, strides=2)(seen[-1]))
    hidden = layers.LSTM(10)(layers.ReLU()(seen[-1]))
    seen.append(layers.Dense(5)(hidden))
    net = keras.Model(given, seen[-1])
    folded = keras.config.backend() == "tensorflow"  # where the exporter writes an LSTM, not a loop
    before = net.get_weights()
    expected = there_and_back(net, tmp_path, sequences(), *(["--recurrent"] if folded else []))
    carried = capsys.readouterr().err
    assert f"carried {9 if folded else 7} of {9 if folded else 7} tensors" in carried
    found = np.asarray(net(sequences()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    outputs = keras.Model(given, seen)(sequences())
    assert near_one({str(k): float(np.asarray(y, np.float64).var()) for k, y in enumerate(outputs)}, 2e-3)
    kernels = [k for k, (one, other) in enumerate(zip(before, net.get_weights(), strict=True)) if (one != other).any()]
    assert len(kernels) == (9 if folded else 7)


def test_a_network_is_stripped_and_filled(tmp_path):
    """The head's output has variance 1 in the filled file, and no value of a trained kernel was in the small one."""
    net, data = network(trained=True), images()
    net(data)
    net.export(tmp_path / "net.onnx", format="onnx", verbose=False)
    np.save(tmp_path / "calib.npy", data)
    small, filled = str(tmp_path / "small.onnx"), str(tmp_path / "filled.onnx")
    for words in (
        ["strip", str(tmp_path / "net.onnx"), "-o", small],
        ["init", small, "--data", str(tmp_path / "calib.npy"), "-o", filled],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    content = (tmp_path / "small.onnx").read_bytes()
    for array in net.get_weights():
        values = [x for x in array.reshape(-1) if x not in (0, 1)]
        assert not any(np.float32(x).tobytes() in content for x in values[:100])
    session = ort.InferenceSession(filled, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: data})[0].astype(np.float64)
    assert abs(found.var() - 1) < 0.01
