"""Side by side with PyPI `lsuv`, the authors' package, on networks it has no defect on: plain chains without biases.

Both are given the same weights, and have to scale them alike.
"""

import math
from typing import Any

import numpy as np
import pytest

from helpers import model, normal, tensor
from lsuv_cli import initialize

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
lsuv = pytest.importorskip("lsuv")

LAYERS = 5
ACTIVATIONS = {
    "Relu": torch.nn.ReLU,
    "Tanh": torch.nn.Tanh,
    "LeakyRelu": torch.nn.LeakyReLU,
    "Sigmoid": torch.nn.Sigmoid,
}


def weights(kind: str, sizes: list[float], seed: int) -> list[np.ndarray]:
    """The weights of a chain; each layer has its own size, relative to He's."""
    shapes = [(12, 3 if k == 0 else 12, 3, 3) if kind == "conv" else (24, 24) for k in range(LAYERS)]
    he = [math.sqrt(2 / math.prod(shape[1:])) for shape in shapes]
    return [
        s * h * normal(*shape, seed=seed + k) for k, (shape, s, h) in enumerate(zip(shapes, sizes, he, strict=True))
    ]


def theirs(kind: str, activation: str, start: list[np.ndarray], data: np.ndarray) -> list[float]:
    parts: list[Any] = []
    for weight in start:
        out, fan_in = weight.shape[:2]
        convolution = kind == "conv"
        layer = (
            torch.nn.Conv2d(fan_in, out, 3, padding=1, bias=False)
            if convolution
            else torch.nn.Linear(fan_in, out, bias=False)
        )
        layer.weight.data[:] = torch.from_numpy(weight)
        parts += [layer, ACTIVATIONS[activation]()]
    network = torch.nn.Sequential(*parts)
    lsuv.lsuv_with_singlebatch(network, torch.from_numpy(data), do_orthonorm=False, verbose=False)
    return [scale(layer.weight.detach().numpy(), weight) for layer, weight in zip(parts[::2], start, strict=True)]


def ours(kind: str, activation: str, start: list[np.ndarray], data: np.ndarray) -> list[float]:
    op = "Conv <pads=[1,1,1,1]>" if kind == "conv" else "Gemm <transB=1>"
    nodes = " ".join(f"a{k} = {op} (t{k}, w{k}) t{k + 1} = {activation}(a{k})" for k in range(LAYERS))
    shape = ",".join(map(str, data.shape[1:]))
    net = model(f"g (float[N,{shape}] t0) => (t{LAYERS}) {{ {nodes} }}", **{f"w{k}": w for k, w in enumerate(start)})
    done = initialize(net, data, pre_init="keep", device="cpu").model
    return [scale(tensor(done, f"w{k}"), weight) for k, weight in enumerate(start)]


def scale(after: np.ndarray, before: np.ndarray) -> float:
    """The one number by which a weight was multiplied."""
    ratio = (after / before).astype(np.float64)
    assert ratio.std() < 1e-4 * abs(ratio.mean())
    return float(ratio.mean())


def batch(kind: str, seed: int) -> np.ndarray:
    return normal(16, 3, 10, 10, seed=seed) if kind == "conv" else normal(200, 24, seed=seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_the_same_scales_where_it_corrects_every_layer_once(kind, activation, seed):
    # Every layer starts so far off that it is corrected; after that its standard deviation is 1 to float32's digits.
    start = weights(kind, [4.0, 0.1, 6.0, 0.05, 5.0], 10 * seed)
    data = batch(kind, seed)
    found, expected = ours(kind, activation, start, data), theirs(kind, activation, start, data)
    # It divides by the standard deviation with n - 1 in place of n, and adds 1e-8.
    assert found == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_within_its_tolerance_where_it_leaves_layers_as_they_are(kind, seed):
    start = weights(kind, [0.72, 1.0, 0.95, 1.02, 0.98], 10 * seed)
    data = batch(kind, seed)
    found, expected = ours(kind, "Relu", start, data), theirs(kind, "Relu", start, data)
    assert 1.0 in expected, "it left at least one layer alone, or this shows nothing"
    # A layer's output, and the input it gets from the one before, may each be off by its tolerance of 0.1.
    assert all(0.9 / 1.1 <= a / b <= 1.1 / 0.9 for a, b in zip(found, expected, strict=True))
