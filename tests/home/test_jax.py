# mypy: disable-error-code="arg-type,var-annotated"
"""There and back with Flax: jax2onnx, init --like, and the state again. `pytest -m jax`."""

import numpy as np
import onnxruntime as ort
import pytest

from helpers import near_one
from lsuv_cli.cli import main

pytestmark = [pytest.mark.jax, pytest.mark.filterwarnings("ignore")]


def images():
    return np.random.default_rng(0).standard_normal((32, 16, 16, 3)).astype(np.float32)


def network(trained):
    """Conv, BatchNorm, depthwise and transposed convolutions, and Linear."""
    import jax.numpy as jnp
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
            self.depthwise = nnx.Conv(8, 16, (3, 3), feature_group_count=8, use_bias=False, rngs=rngs)
            self.up = nnx.ConvTranspose(16, 6, (3, 3), strides=(2, 2), rngs=rngs)
            self.first, self.second = nnx.Linear(6, 10, rngs=rngs), nnx.Linear(10, 10, rngs=rngs)

        def __call__(self, x, seen=None):
            for layer in (self.conv, self.norm, self.depthwise, self.up, None, self.first, self.second):
                x = x.mean((1, 2)) if layer is None else layer(x)
                if layer is not None and seen is not None and layer is not self.norm:
                    seen.append(float(np.asarray(x, np.float64).var()))
                if layer not in (None, self.conv, self.second):
                    x = nnx.relu(x)
            return x

    net = Net(nnx.Rngs(0))
    if trained:
        rng = np.random.default_rng(1)
        net.norm.mean[...] = jnp.asarray(rng.normal(size=8), jnp.float32)
        net.norm.var[...] = jnp.asarray(rng.uniform(0.1, 4, 8), jnp.float32)
        net.first.bias[...] = jnp.asarray(rng.normal(size=10), jnp.float32)
    return net


@pytest.mark.parametrize("trained", [False, True])
def test_there_and_back(tmp_path, capsys, trained):
    import onnx
    from flax import nnx
    from jax2onnx import to_onnx

    net = network(trained)
    given = []
    net(images(), given)
    onnx.save(to_onnx(net, [("B", 16, 16, 3)]), tmp_path / "net.onnx")
    np.save(tmp_path / "calib.npy", images())

    flat = nnx.to_flat_state(nnx.state(net))
    np.savez(tmp_path / "before.npz", **{"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat})
    words = ["net.onnx", "--data", "calib.npy", "--like", "before.npz", "--weights", "after.npz", "-o", "out.onnx"]
    with pytest.raises(SystemExit) as ended:
        main(["init", *(str(tmp_path / word) if "." in word else word for word in words), "--reset-norm"])
    assert ended.value.code == 0
    assert f"carried {8 if trained else 5} of {8 if trained else 5} tensors" in capsys.readouterr().err
    with np.load(tmp_path / "after.npz") as after:
        for path, leaf in flat:
            leaf[...] = after["/".join(map(str, path))]
        nnx.update(net, nnx.from_flat_state(flat))

    session = ort.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {session.get_inputs()[0].name: images()})
    seen = []
    found = np.asarray(net(images(), seen))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert not near_one(dict(enumerate(given)), 0.1)
    assert near_one(dict(enumerate(seen)), 2e-3)
