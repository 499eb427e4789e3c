"""Fused operators in parts, against onnxruntime's own fused kernels; and moments from parts, against numpy."""

import numpy as np
import pytest
from onnx import helper

from helpers import model, normal, values
from lsuv_cli.scaling.fused import activation_nodes, split, without_activation
from lsuv_cli.scaling.moments import ChannelMoments, Moments, of_channels, pooled

X = normal(2, 3, 6, 6, seed=1)
ACTIVATIONS = {
    "Relu": "", "Tanh": "", "Sigmoid": "", "LeakyRelu": ", activation_params=[0.3]",
    "HardSigmoid": ", activation_params=[0.3, 0.4]", "Clip": ", activation_params=[-0.5, 0.7]",
}  # fmt: skip


def fused(activation, inputs="x, w, b", opset=18):
    text = f"""g (float[N,3,6,6] x, float[N,4,4,4] r) => (y) {{
        y = com.microsoft.FusedConv<activation="{activation}"{ACTIVATIONS[activation]}, dilations=[1,1]>({inputs}) }}"""
    return model(text, opset=opset, microsoft=True, w=normal(4, 3, 3, 3), b=normal(4, seed=2))


@pytest.mark.parametrize("opset", [10, 18])
@pytest.mark.parametrize("inputs", ["x, w", "x, w, b", "x, w, b, r"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_convolution_in_parts_computes_the_same(activation, inputs, opset):
    whole = fused(activation, inputs, opset)
    feeds = {"x": X, "r": normal(2, 4, 4, 4, seed=3)}
    parts = split(whole, {activation})
    np.testing.assert_allclose(values(parts, feeds, ["y"])["y"], values(whole, feeds, ["y"])["y"], atol=1e-5)
    assert "FusedConv" not in [node.op_type for node in parts.graph.node]
    assert len(whole.graph.node) == 1


def test_what_need_not_be_split_is_left():
    whole = fused("Relu")
    assert split(whole, {"Tanh"}) is whole
    plain = model("g (float[N,3,6,6] x) => (y) { c = Conv(x, w) y = Relu(c) }", w=normal(4, 3, 3, 3))
    assert split(plain, {"", "Relu"}) is plain


def test_an_operator_without_its_activation_keeps_its_other_attributes():
    node = without_activation(fused("LeakyRelu").graph.node[0])
    assert (node.op_type, node.domain) == ("Conv", "")
    assert [a.name for a in node.attribute] == ["dilations"]


@pytest.mark.parametrize("opset", [10, 11])
def test_activations_with_numbers_of_their_own_names(opset):
    """Some fused operators have `activation_alpha` and `activation_beta` in place of `activation_params`."""
    node = helper.make_node("FusedGemm", ["x", "w"], ["y"], activation="HardSigmoid", activation_alpha=0.3)
    (made,) = activation_nodes(node, "a", "y", opset)
    assert {a.name: pytest.approx(a.f) for a in made.attribute} == {"alpha": 0.3}
    node.attribute.append(helper.make_attribute("activation_beta", 0.4))
    (made,) = activation_nodes(node, "a", "y", opset)
    assert {a.name: pytest.approx(a.f) for a in made.attribute} == {"alpha": 0.3, "beta": 0.4}
    assert (list(made.input), list(made.output)) == (["a"], ["y"])


# Moments from parts


def whole_of(y, b):
    """Moments of channels (last axis), by numpy."""
    covariance = ((y - y.mean(0)) * (b - b.mean(0))).mean(0)
    return ChannelMoments(y.mean(0), y.var(0), b.mean(0), b.var(0), covariance)


def test_the_moments_of_a_whole_from_its_channels():
    rng = np.random.default_rng(0)
    y = rng.standard_normal((50, 4)) * [1, 2, 3, 4] + [0, 5, 1, 2]
    b = rng.standard_normal((50, 4)) * [2, 1, 0, 1] + [3, 1, 1, 0] + 0.5 * y
    found = of_channels(whole_of(y, b), 200)
    assert found.count == 200
    assert found.mean == pytest.approx(y.mean())
    assert found.variance == pytest.approx(y.var())
    assert found.bias_variance == pytest.approx(b.var())
    assert found.covariance == pytest.approx(((y - y.mean()) * (b - b.mean())).mean())


def test_pooled_moments_weigh_by_the_number_of_values():
    parts = [Moments(1.0, 2.0, 3.0, 4.0, count=10), Moments(5.0, 6.0, 7.0, 8.0, count=30)]
    found = pooled(parts)
    assert (found.mean, found.variance, found.bias_variance, found.covariance, found.count) == (4, 5, 6, 7, 40)
    assert found.channels is None
    assert pooled(parts[:1]) is parts[0]


def test_pooled_moments_of_channels():
    one = ChannelMoments(*np.arange(10.0).reshape(5, 2))
    two = ChannelMoments(*np.arange(10.0, 20.0).reshape(5, 2))
    parts = [Moments(0, 1, count=1, channels=one), Moments(0, 1, count=3, channels=two)]
    found = pooled(parts).channels
    np.testing.assert_allclose(found.mean, [7.5, 8.5])
    np.testing.assert_allclose(found.covariance, [15.5, 16.5])
    assert pooled([parts[0], Moments(0, 1, count=3)]).channels is None


def test_the_moments_of_a_multiple():
    y = Moments(1.0, 2.0, 3.0, 4.0, count=10)
    found = y.times(3.0)
    assert (found.mean, found.variance, found.bias_variance, found.covariance, found.count) == (3, 18, 3, 12, 10)
    assert y.times(1.0) is y


def test_a_fused_convolution_among_other_nodes_is_split():
    whole = fused("Tanh")
    whole.graph.node.append(helper.make_node("Neg", ["y"], ["z"]))
    assert [node.op_type for node in split(whole, {"Tanh"}).graph.node] == ["Conv", "Tanh", "Neg"]


def test_the_moments_of_a_whole_are_those_of_its_channels():
    """Channels of different mean, spread and bias, against numpy's over all values at once."""
    y = normal(500, 3) * [1, 2, 3] + [4, -5, 6]
    b = normal(500, 3, seed=1) * [0.3, 0.2, 0.1] + 0.4 * y + [-7, 8, 9]
    covariance = ((y - y.mean(axis=0)) * (b - b.mean(axis=0))).mean(axis=0)
    parts = ChannelMoments(y.mean(axis=0), y.var(axis=0), b.mean(axis=0), b.var(axis=0), covariance)
    found = of_channels(parts, 1500)
    whole = np.cov(y.ravel(), b.ravel(), bias=True)
    assert found.mean == pytest.approx(y.mean())
    assert [found.variance, found.bias_variance] == pytest.approx([whole[0, 0], whole[1, 1]])
    assert found.covariance == pytest.approx(whole[0, 1])
    assert found.count == 1500
