# mypy: disable-error-code="arg-type"
"""The model of one stage: what its probes measure and what it hands on, against numpy in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from helpers import model, normal, values
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.scaling import stages
from lsuv_cli.scaling.moments import Probe
from lsuv_cli.scaling.providers import PROVIDERS, Device
from lsuv_cli.scaling.residuals import Sum
from lsuv_cli.scaling.runtime import Session, host_value, to_numpy
from lsuv_cli.scaling.stage_model import Assembler
from working_copies import graph_of

CPU = Device(PROVIDERS["cpu"], 0, 1)
X = normal(20, 8, seed=1)
IMAGES = normal(5, 3, 6, 7, seed=1)


def kept(layer):
    """A layer whose bias stays."""
    return layer if layer.bias is None else replace(layer, bias=replace(layer.bias, kept=True))


def ran(text, feeds, scales=None, change=lambda layer: layer, exact=(), opset=18, sized=True, **tensors):
    """The last stage of a graph's plan: layer output -> its moments, and the stage's model."""
    look = layers_of(graph_of(text, opset=opset, microsoft=True, **tensors))
    layers = [change(layer) for layer in look.layers.layers]
    plan = stages.cut(look.graph, layers)
    stage = plan.stages[-1]
    given = {name: feeds[name] for name in stage.inputs}
    types = {
        name: helper.make_tensor_type_proto(1, array.shape if sized else [None] * array.ndim)
        for name, array in given.items()
    }
    weights = {layer.weight.value: look.graph.array(layer.weight.base) for layer in layers}
    built = Assembler(look.graph, plan, 1e-3).build(stage, types, scales or {}, weights, frozenset(exact))
    _, numbers = Session(built, CPU).run({name: host_value(array) for name, array in given.items()})
    found = {}
    for layer, each, fetched in zip(stage.layers, built.measurements, numbers, strict=True):
        meter = each.meter()
        meter.add(each.sums(fetched))
        found[layer.output] = meter.result()
    return found, built


def wide(array):
    return np.asarray(array, np.float64)


def convolved(images, weight):
    """A convolution by a kernel of one element, in float64."""
    return np.einsum("nchw,oc->nohw", wide(images), weight[:, :, 0, 0])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("opset", [10, 13, 18])
def test_layers_run_without_their_biases(exact, opset):
    text = "g (float[N,8] x) => (y) { a = Gemm(x, v, b) r = Relu(a) y = Gemm<transB=1>(r, w, b) }"
    v, w = normal(8, 8, seed=2), normal(8, 8, seed=3)
    found, built = ran(text, {"x": X}, exact=["a", "y"] if exact else [], opset=opset, v=v, w=w, b=normal(8))
    assert [probe.exact for probe in built.measurements] == [exact, exact]
    a = wide(X) @ v
    y = np.maximum(a, 0) @ w.T
    for name, value in (("a", a), ("y", y)):
        assert found[name].mean == pytest.approx(value.mean(), abs=1e-5)
        assert found[name].variance == pytest.approx(value.var(), rel=1e-5)
        assert found[name].count == value.size


@pytest.mark.parametrize("sized", [True, False])
def test_the_size_of_a_plane_is_known_where_its_shape_is_and_fetched_where_not(sized):
    text = "g (float[N,3,H,W] x) => (y) { y = Conv<pads=[1,1,1,1]>(x, w) }"
    found, built = ran(text, {"x": IMAGES}, sized=sized, w=normal(4, 3, 3, 3))
    (probe,) = built.measurements
    assert isinstance(probe, Probe)
    assert bool(probe.group) == sized
    assert not sized or probe.group == 6 * 7
    expected = values(model(text, w=normal(4, 3, 3, 3)), {"x": IMAGES}, ["y"], reference=True)["y"]
    assert found["y"].count == expected.size
    assert found["y"].variance == pytest.approx(expected.var(), rel=1e-5)


@pytest.mark.parametrize(("beta", "factor"), [("", 1.0), ("<beta=2.0>", 2.0), ("<beta=0.5>", 0.5)])
def test_a_stage_begins_with_the_scale_and_the_kept_bias(beta, factor):
    text = f"g (float[N,8] x) => (y) {{ a = Gemm{beta}(x, v, b) t = Tanh(a) y = MatMul(t, w) }}"
    v, w, b = normal(8, 8, seed=2), normal(8, 8, seed=3), normal(8, seed=4)
    product = (wide(X) @ v).astype(np.float32)
    found, _ = ran(text, {"a": product}, {"a": 0.3}, change=kept, v=v, w=w, b=b)
    y = np.tanh(0.3 * wide(product) + factor * b) @ w
    assert found["y"].variance == pytest.approx(y.var(), rel=1e-5)
    assert found["y"].mean == pytest.approx(y.mean(), rel=1e-4)


def test_a_kept_bias_is_measured_beside_its_layer():
    v, b = normal(8, 8, seed=2), normal(8, seed=4)
    found, _ = ran("g (float[N,8] x) => (y) { y = Gemm<beta=2.0>(x, v, b) }", {"x": X}, change=kept, v=v, b=b)
    bias = np.broadcast_to(2.0 * wide(b), (20, 8))
    covariance = np.cov((wide(X) @ v).ravel(), bias.ravel(), bias=True)
    assert found["y"].variance == pytest.approx(covariance[0, 0], rel=1e-5)
    assert found["y"].bias_variance == pytest.approx(covariance[1, 1], rel=1e-5)
    assert found["y"].covariance == pytest.approx(covariance[0, 1], rel=1e-5)


def test_a_convolutions_kept_bias_is_added_along_its_channels():
    text = "g (float[N,3,6,7] x) => (y) { a = Conv(x, v, b) t = Tanh(a) y = Conv(t, w) }"
    v, w, b = normal(4, 3, 1, 1, seed=2), normal(2, 4, 1, 1, seed=3), normal(4, seed=4)
    product = convolved(IMAGES, v)
    found, _ = ran(text, {"a": product.astype(np.float32)}, {"a": 0.3}, change=kept, v=v, w=w, b=b)
    y = convolved(np.tanh(0.3 * product + b[:, None, None]), w)
    assert found["y"].variance == pytest.approx(y.var(), rel=1e-5)


ACTIVATIONS: dict[str, Any] = {"Tanh": np.tanh, "Relu": lambda value: np.maximum(value, 0)}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_inside_a_layer_is_behind_its_scale(activation):
    """Tanh needs the true value s·y; of a Relu, s·relu(y) = relu(s·y)."""
    text = f"""g (float[N,3,6,7] x) => (y) {{
        a = com.microsoft.FusedConv<activation="{activation}">(x, v) t = Sigmoid(a) y = Conv(t, w) }}"""
    v, w = normal(4, 3, 1, 1, seed=2), normal(2, 4, 1, 1, seed=3)
    product, active = convolved(IMAGES, v), ACTIVATIONS[activation]
    waits = product if activation == "Tanh" else active(product)
    found, _ = ran(text, {"a": waits.astype(np.float32)}, {"a": 0.3}, v=v, w=w)
    y = convolved(1 / (1 + np.exp(-active(0.3 * product))), w)
    assert found["y"].variance == pytest.approx(y.var(), rel=1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_is_measured_behind_the_activation_inside_it(activation):
    text = f"""g (float[N,3,6,7] x) => (y) {{ y = com.microsoft.FusedConv<activation="{activation}">(x, v, b) }}"""
    v, b = normal(4, 3, 1, 1, seed=2), normal(4, seed=4)
    product, active = convolved(IMAGES, v), ACTIVATIONS[activation]
    found, _ = ran(text, {"x": IMAGES}, v=v, b=b)
    assert found["y"].variance == pytest.approx(active(product).var(), rel=1e-5)
    found, _ = ran(text, {"x": IMAGES}, change=kept, v=v, b=b)
    assert found["y"].variance == pytest.approx(active(product + b[:, None, None]).var(), rel=1e-5)


def test_the_scales_of_channels_multiply_each_its_own():
    text = "g (float[N,8] x) => (y) { a = MatMul(x, v) t = Tanh(a) y = MatMul(t, w) }"
    v, w, scales = normal(8, 8, seed=2), normal(8, 8, seed=3), np.linspace(0.1, 0.8, 8)
    product = wide(X) @ v
    found, _ = ran(text, {"a": product.astype(np.float32)}, {"a": scales}, v=v, w=w)
    assert found["y"].variance == pytest.approx((np.tanh(product * scales) @ w).var(), rel=1e-5)


def test_a_layer_whose_channels_are_scaled_one_by_one_is_measured_so():
    v = normal(8, 8, seed=2)
    text = "g (float[N,8] x) => (y) { y = MatMul(x, v) }"
    found, _ = ran(text, {"x": X}, change=lambda layer: replace(layer, by_channel=True), v=v)
    assert found["y"].channels is not None
    np.testing.assert_allclose(found["y"].channels.variance, (wide(X) @ v).var(axis=0), rtol=1e-5)


def test_a_value_for_a_later_stage_is_handed_on():
    text = "g (float[N,8] x) => (y) { a = MatMul(x, v) t = Tanh(a) y = MatMul(t, w) }"
    look = layers_of(graph_of(text, v=normal(8, 8), w=normal(8, 8)))
    plan = stages.cut(look.graph, look.layers.layers)
    kind = helper.make_tensor_type_proto(1, X.shape)
    built = Assembler(look.graph, plan, 1e-3).build(plan.stages[0], {"x": kind}, {}, {"v": 2 * normal(8, 8)})
    made, _ = Session(built, CPU).run({"x": host_value(X)})
    np.testing.assert_allclose(to_numpy(made["a"]), 2 * wide(X) @ normal(8, 8), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("joint", [True, False])
def test_a_residual_stream_is_measured_with_the_layer_that_bounds_it(joint):
    """Where the branch has the layer's scales alone, branch and stream are measured together, else the stream alone."""
    text = f"""g (float[N,8] x) => (y) {{
        u = Tanh(x) d = MatMul(u, w) e = {"Relu" if joint else "Tanh"}(d) y = Add(x, e) }}"""
    look = layers_of(graph_of(text, w=normal(8, 8)))
    plan = stages.cut(look.graph, look.layers.layers, sums={"d": Sum("y", "y", "x", "e", "d", 1, 1, 2)})
    assert (plan.joint == {"d"}) == joint
    kind = helper.make_tensor_type_proto(1, X.shape)
    built = Assembler(look.graph, plan, 1e-3).build(plan.stages[0], {"x": kind}, {}, {"w": normal(8, 8)})
    _, numbers = Session(built, CPU).run({"x": host_value(X)})
    meter = built.measurements[1].meter()
    meter.add(built.measurements[1].sums(numbers[1]))
    found, branch = meter.result(), np.maximum(np.tanh(wide(X)) @ normal(8, 8), 0)
    if joint:
        expected = np.cov(branch.ravel(), wide(X).ravel(), bias=True)
        measured = [found.variance, found.bias_variance, found.covariance]
        assert measured == pytest.approx([expected[0, 0], expected[1, 1], expected[0, 1]], rel=1e-4, abs=1e-5)
    else:
        assert found.variance == pytest.approx(wide(X).var(), rel=1e-6)


def test_the_bias_of_a_centred_layer_is_not_measured():
    """It is decided once the means of the channels are known."""

    def centred(layer):
        return replace(layer, bias=replace(layer.bias, centred=True))

    v = normal(8, 8, seed=2)
    found, _ = ran("g (float[N,8] x) => (y) { y = Gemm(x, v, b) }", {"x": X}, change=centred, v=v, b=normal(8, seed=4))
    assert found["y"].bias_variance == found["y"].covariance == 0
    np.testing.assert_allclose(found["y"].channels.mean, (wide(X) @ v).mean(axis=0), atol=1e-5)
