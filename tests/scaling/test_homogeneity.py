"""Which nodes commute with a scale: what is said of each is what onnxruntime computes."""

import math
import re

import numpy as np
import pytest

from helpers import model, normal, values
from lsuv_cli.scaling.homogeneity import commutes_with_scale, growth
from working_copies import graph_of


def last_node(text, opset=18, **tensors):
    """The working copy of a graph, and its last node."""
    text = f"g (float[2,4,6,6] x, float[2,4,6,6] z) => (y) {{ {text} }}"
    graph = graph_of(text, opset=opset, **tensors)
    return graph, graph.nodes[-1]


SHAPES = {
    "s": np.array([4, 72]), "one": np.array([1]), "axes": np.array([1, 2]), "four": np.array([2, 2]), "k": np.int64(1),
    "begin": np.array([1]), "end": np.array([3]), "times": np.array([1, 2, 1, 1]), "wide": np.array([3, 2, 4, 6, 6]),
    "slope": np.float32(0.2) * np.ones((4, 1, 1), np.float32), "c": np.float32(3), "two": np.array([0, 0, 1, 1] * 2),
    "w": normal(3, 4, 3, 3), "b": normal(3), "m": normal(6, 5), "half": np.float32(0.5), "zero": np.array([0]),
}  # fmt: skip
COMMUTE = [
    "y = Relu(x)", "y = LeakyRelu(x)", "y = PRelu(x, slope)", "y = Identity(x)", "y = Neg(x)", "y = Abs(x)",
    "y = MaxPool<kernel_shape=[2,2]>(x)", "y = AveragePool<kernel_shape=[2,2]>(x)", "y = GlobalAveragePool(x)",
    "y = GlobalMaxPool(x)", "y = LpPool<kernel_shape=[2,2]>(x)", "y = GlobalLpPool(x)", "y = Reshape(x, s)",
    "y = Flatten(x)", "y = Transpose(x)", "u = Unsqueeze(x, one) y = Squeeze(u, one)", "y = Unsqueeze(x, one)",
    "y = Slice(x, begin, end, one)", "y, q = Split<axis=1>(x, four)", "y = Gather<axis=1>(x, k)",
    "y = Dropout(x, half)", "y = Expand(x, wide)", "y = Tile(x, times)", "y = DepthToSpace<blocksize=2>(x)",
    "y = SpaceToDepth<blocksize=2>(x)", "y = ReduceMean(x, axes)", "y = ReduceSum(x, axes)", "y = ReduceMax(x, axes)",
    "y = ReduceMin(x, axes)", "y = ReduceL1(x, axes)", "y = ReduceL2(x, axes)", "y = Add(x, z)", "y = Sub(x, z)",
    "y = Sum(x, z)", "y = Mean(x, z)", "y = Max(x, z)", "y = Min(x, z)", "y = Concat<axis=1>(x, z)", "y = Mul(x, c)",
    "y = Mul(c, x)", "y = Div(x, c)", "y = Conv(x, w)", "y = MatMul(x, m)", 'y = Pad<mode="reflect">(x, two)',
    "y = Pad(x, two)",
]  # fmt: skip
DO_NOT = [
    "y = Tanh(x)", "y = Softmax(x)", "y = Sqrt(x)", "y = Add(x, c)", "y = Max(x, c)", "y = Mul(x, z)", "y = Div(x, z)",
    "y = Div(c, x)", "y = Conv(x, w, b)", "y = MatMul(x, z)", "y = Pad(x, two, c)", "y = Mul(x, x)",
]  # fmt: skip


def split(text):
    """The tensors that a text reads."""
    words = re.findall(r"\w+", text)
    return {name: value for name, value in SHAPES.items() if name in words}


@pytest.mark.parametrize("text", COMMUTE)
def test_operators_that_commute_with_a_scale(text):
    tensors = split(text)
    proto = model(f"g (float[2,4,6,6] x, float[2,4,6,6] z) => (y) {{ {text} }}", **tensors)
    feeds = {"x": normal(2, 4, 6, 6, seed=1), "z": normal(2, 4, 6, 6, seed=2)}
    one = values(proto, feeds, ["y"])["y"]
    three = values(proto, {name: 3 * array for name, array in feeds.items()}, ["y"])["y"]
    np.testing.assert_allclose(three, 3 * one, rtol=1e-5, atol=1e-5)
    assert commutes_with_scale(*last_node(text, **tensors))


@pytest.mark.parametrize("text", DO_NOT)
def test_operators_that_do_not(text):
    tensors = split(text)
    proto = model(f"g (float[2,4,6,6] x, float[2,4,6,6] z) => (y) {{ {text} }}", **tensors)
    feeds = {"x": np.abs(normal(2, 4, 6, 6, seed=1)), "z": normal(2, 4, 6, 6, seed=2)}
    one = values(proto, feeds, ["y"])["y"]
    three = values(proto, {name: 3 * array for name, array in feeds.items()}, ["y"])["y"]
    assert np.abs(three - 3 * one).max() > 0.1
    assert not commutes_with_scale(*last_node(text, **tensors))


@pytest.mark.parametrize(
    "text",
    [
        "y, i = MaxPool<kernel_shape=[2,2]>(x)",  # indices do not scale
        "y = com.microsoft.Relu(x)",  # whatever it is
        "q = Shape(x) y = Expand(x, q)",  # the other input is not constant
        "y = Relu(c)",
        "y = Mul(c, c)",
    ],
)
def test_operators_of_which_it_is_not_known(text):
    assert not commutes_with_scale(*last_node(text, **split(text)))


def test_padding_before_opset_11_has_its_number_in_an_attribute():
    assert commutes_with_scale(*last_node("y = Pad<pads=[0,0,1,1,0,0,1,1]>(x)", opset=10))
    assert commutes_with_scale(*last_node('y = Pad<mode="edge", pads=[0,0,1,1,0,0,1,1], value=2.0>(x)', opset=10))
    assert not commutes_with_scale(*last_node("y = Pad<pads=[0,0,1,1,0,0,1,1], value=2.0>(x)", opset=10))


@pytest.mark.parametrize(
    ("text", "constant", "expected"),
    [
        ("y = Mul(x, c)", 8.0, 3.0),
        ("y = Mul(c, x)", 8.0, 3.0),
        ("y = Div(x, c)", 4.0, -2.0),
        ("y = Mul(x, c)", -0.5, -1.0),
        ("y = Mul(x, c)", [[1.0, -16.0], [2.0, 0.0]], 4.0),
        ("y = Mul(x, c)", 0.0, 0.0),
        ("y = Mul(x, c)", math.inf, 0.0),
        ("y = Mul(x, z)", 8.0, 0.0),
        ("y = Add(x, c)", 8.0, 0.0),
        ("y = com.microsoft.Mul(x, c)", 8.0, 0.0),
        ("y = Mul(x, c)", np.full(1 << 18, 2.0), 1.0),
        ("y = Mul(x, c)", np.full((1 << 18) + 1, 2.0), 0.0),  # too large to be read for this
    ],
)
def test_how_much_a_constant_multiplies_by(text, constant, expected):
    assert growth(*last_node(text, c=np.array(constant, np.float32))) == expected
