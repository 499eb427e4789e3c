"""Calibration's measurement of one value: the probes' nodes run by onnxruntime, against numpy in float64."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from helpers import normal
from lsuv_cli.errors import ModelError
from lsuv_cli.model.channels import Channels
from lsuv_cli.scaling import moments
from lsuv_cli.scaling.channel_moments import ChannelProbe
from lsuv_cli.scaling.moments import Probe, Sums

TYPES = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}


def measured(probe, batches, opset=18, bias=None):
    """The moments that a probe finds over all batches."""
    kind = TYPES[batches[0].dtype.type]
    if isinstance(probe, ChannelProbe):
        nodes = probe.nodes(opset)
    else:
        nodes = moments.nodes(probe, opset, is_float32=kind == TensorProto.FLOAT)
    given = [helper.make_tensor_value_info("y", kind, [None] * batches[0].ndim)]
    feeds = {}
    if bias is not None:
        given.append(helper.make_tensor_value_info("b", kind, bias.shape))
        feeds["b"] = bias
    graph = helper.make_graph(nodes, "g", given, [onnx.ValueInfoProto(name=name) for name in probe.fetches])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    meter = probe.meter()
    for batch in batches:
        meter.add(probe.sums(session.run(list(probe.fetches), {"y": batch, **feeds})))
    return meter.result()


def whole(batches):
    return np.concatenate([np.asarray(batch, np.float64).ravel() for batch in batches])


def probe(axes, exact=False, bias="", **more):
    return Probe("y", "own:", axes, 1e-3, bias, exact, **more)


@pytest.mark.parametrize("opset", [7, 13, 18])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("shape", "axes"), [((6, 5), (-1,)), ((4, 3, 5, 6), (2, 3)), ((4, 3, 7), (2,)), ((6, 5), None)]
)
def test_mean_and_variance(shape, axes, dtype, exact, opset):
    batches = [(0.5 + (1 + k) * normal(*shape, seed=k)).astype(dtype) for k in range(3)]
    found = measured(probe(axes, exact), batches, opset)
    assert found.mean == pytest.approx(whole(batches).mean(), rel=1e-4)
    assert found.variance == pytest.approx(whole(batches).var(), rel=1e-5)
    assert found.count == whole(batches).size
    assert found.trusted


def test_a_single_number_in_each_batch():
    batches = [np.array(k, np.float32) for k in (1, 2, 6)]
    for exact in (False, True):
        found = measured(probe(None, exact), batches)
        assert (found.mean, found.variance, found.count) == pytest.approx((3, 14 / 3, 3))


def test_batches_of_several_sizes():
    batches = [normal(4, 3, 6, 6), 3 * normal(2, 3, 2, 9, seed=1), normal(0, 3, 2, 2), 2 * normal(1, 3, 1, 1, seed=2)]
    for exact in (False, True):
        assert measured(probe((2, 3), exact), batches).variance == pytest.approx(whole(batches).var(), rel=1e-5)
    assert np.isnan(measured(probe((2, 3)), [normal(0, 3, 2, 2)]).variance)


@pytest.mark.parametrize(
    ("plane", "group", "axes"), [((64, 64), 4096, (2, 3)), ((65, 64), 64, (-1,)), ((4097,), 4097, (-1,))]
)
def test_the_size_of_a_group_that_is_known_beforehand(plane, group, axes):
    sized = probe((2, 3)[: len(plane)]).over(plane)
    assert (sized.group, sized.axes) == (group, axes)
    batches = [normal(2, 2, *plane), normal(1, 2, *plane, seed=1)]
    found = measured(sized, batches)
    assert found.variance == pytest.approx(whole(batches).var(), rel=1e-5)
    assert found.count == whole(batches).size
    assert not any("size" in name for name in sized.fetches)
    biased = probe((2, 3), True, "b").over((65, 64))  # a bias is spread over the whole plane
    assert (biased.group, biased.axes) == (65 * 64, (2, 3))


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize(
    ("shape", "axes", "bias"),
    [((6, 5), (-1,), (5,)), ((4, 3, 5, 6), (2, 3), (3, 1, 1)), ((6, 5), None, (5,)), ((4,), (-1,), ())],
)
def test_a_bias_that_is_kept(shape, axes, bias, opset):
    batches = [(0.5 + (1 + k) * normal(*shape, seed=k)) for k in range(2)]
    added = 2 + normal(*bias, seed=9) if bias else np.array(1.5, np.float32)
    found = measured(probe(axes, True, "b"), batches, opset, added)
    spread = whole([np.broadcast_to(added, shape)] * 2)
    y = whole(batches)
    assert found.variance == pytest.approx(y.var(), rel=1e-6)
    assert found.bias_variance == pytest.approx(spread.var(), rel=1e-6, abs=1e-12)
    expected = ((y - y.mean()) * (spread - spread.mean())).mean()
    assert found.covariance == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_what_float32_does_not_measure_is_not_trusted():
    batches = [np.float32(300) + normal(50, 40, seed=k) for k in range(2)]
    assert not measured(probe((-1,)), batches).trusted
    found = measured(probe((-1,), True), batches)
    assert found.trusted
    assert found.variance == pytest.approx(whole(batches).var(), rel=1e-9)


@pytest.mark.parametrize(("factor", "trusted"), [(1e-16, False), (1e-14, True), (1e14, True), (1e16, False)])
def test_the_range_in_which_squares_are_trusted(factor, trusted):
    batches = [np.float32(factor) * normal(50, 40)]
    assert measured(probe((-1,)), batches).trusted is trusted


def test_the_accuracy_that_is_asked_for():
    batches = [np.float32(10) + normal(50, 40)]
    square, variance = (whole(batches) ** 2).mean(), whole(batches).var()
    error = float(40 * np.finfo(np.float32).eps / 2 * square / variance)
    for accuracy, trusted in ((1.01 * error, True), (0.99 * error, False)):
        assert measured(Probe("y", "own:", (-1,), accuracy), batches).trusted is trusted


def test_a_constant_value_has_no_variance():
    batches = [np.full((40, 10), 0.1, np.float32), np.full((3, 10), 0.1, np.float32)]
    assert measured(probe((-1,), True), batches).variance == 0
    close = [np.float32(1) + np.float32(1e-5) * normal(40, 10)]
    assert measured(probe((-1,), True), close).variance == pytest.approx(whole(close).var(), rel=1e-6)


# Channel by channel


def table(batches, axis):
    return np.concatenate([np.moveaxis(b, axis, -1).reshape(-1, b.shape[axis]) for b in batches]).astype(np.float64)


@pytest.mark.parametrize("opset", [7, 13, 18])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((6, 4, 5, 5), -3), ((6, 5, 4), -1), ((6, 4), -1), ((6, 4, 5), -2)])
def test_the_moments_of_channels(shape, axis, biased, opset):
    channels = Channels(4, axis)
    spread = np.array([1, 2, 0.5, 3], np.float32).reshape(channels.shape)
    batches = [spread * (1 + normal(*shape, seed=k)) for k in range(2)] + [2 * spread * normal(3, *shape[1:], seed=5)]
    # A bias that varies within channels, as one that nodes compute may.
    bias = normal(*shape[1:], seed=7) if biased else None
    found = measured(ChannelProbe("y", "own:", channels, "b" if biased else ""), batches, opset, bias)
    y = table(batches, axis)
    np.testing.assert_allclose(found.channels.mean, y.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.channels.variance, y.var(axis=0), rtol=1e-6)
    assert found.mean == pytest.approx(y.mean(), rel=1e-6)
    assert found.variance == pytest.approx(y.var(), rel=1e-6)
    assert found.count == y.size
    if biased:
        b = table([np.broadcast_to(bias, batch.shape) for batch in batches], axis)
        np.testing.assert_allclose(found.channels.bias_mean, b.mean(axis=0), rtol=1e-6)
        np.testing.assert_allclose(found.channels.bias_variance, b.var(axis=0), rtol=1e-6)
        covariance = ((y - y.mean(axis=0)) * (b - b.mean(axis=0))).mean(axis=0)
        np.testing.assert_allclose(found.channels.covariance, covariance, rtol=1e-5, atol=1e-9)
        assert found.covariance == pytest.approx(((y - y.mean()) * (b - b.mean())).mean(), rel=1e-5)


@pytest.mark.parametrize(("shape", "axis"), [((6, 4, 5, 5), -3), ((6, 4, 5), -2), ((6, 4), -1)])
def test_a_bias_with_other_numbers_for_each_sample(shape, axis):
    """The bias's variance in a channel is that within the samples and that between them."""
    batches = [1 + normal(*shape, seed=k) for k in range(2)]
    bias = 2 + 3 * normal(shape[0], *[1] * (len(shape) - 1), seed=8) * normal(*shape, seed=9)
    found = measured(ChannelProbe("y", "own:", Channels(4, axis), "b"), batches, bias=bias)
    y, b = table(batches, axis), table([bias, bias], axis)
    np.testing.assert_allclose(found.channels.bias_variance, b.var(axis=0), rtol=1e-6)
    covariance = ((y - y.mean(axis=0)) * (b - b.mean(axis=0))).mean(axis=0)
    np.testing.assert_allclose(found.channels.covariance, covariance, rtol=1e-5)
    assert found.bias_variance == pytest.approx(b.var(), rel=1e-6)


def test_a_constant_channel_has_no_variance_and_nothing_has_no_moments():
    batch = normal(6, 4)
    batch[:, 2] = 0.1
    found = measured(ChannelProbe("y", "own:", Channels(4, -1)), [batch, batch[:3], batch[:0]])
    assert found.channels.variance[2] == 0
    assert (found.channels.variance[[0, 1, 3]] > 0).all()
    assert np.isnan(measured(ChannelProbe("y", "own:", Channels(4, -1)), [batch[:0]]).variance)


def test_an_output_without_as_many_channels_as_its_weight():
    with pytest.raises(ModelError, match="'y' has no axis of 4 channels"):
        measured(ChannelProbe("y", "own:", Channels(4, -2)), [normal(6, 3, 5)])


# The parts


@pytest.mark.parametrize(
    ("axes", "plane"), [((2, 3), True), ((2,), True), ((-1,), False), ((3,), False), (None, False)]
)
def test_a_plane_is_a_channels_positions(axes, plane):
    assert Probe("y", "p.", axes, 1e-3).is_plane is plane


@pytest.mark.parametrize(
    ("plane", "bias", "group", "axes"),
    [((64, 64), "", 4096, (2, 3)), ((64, 65), "", 65, (-1,)), ((64, 65), "b", 4160, (2, 3)), ((5,), "", 5, (2, 3))],
)
def test_planes_above_4096_elements_are_reduced_row_by_row(plane, bias, group, axes):
    sized = Probe("y", "p.", (2, 3), 1e-3, bias).over(plane)
    assert (sized.group, sized.axes) == (group, axes)


@pytest.mark.parametrize(
    ("accuracy", "square", "trusted"),
    [(1.3e-6, 2.0, True), (1.1e-6, 2.0, False), (1.0, 1e-31, False), (1.0, 1e31, False), (1.0, 1e-29, True)],
)
def test_the_fast_form_is_trusted_up_to_its_error(accuracy, square, trusted):
    """n·eps/2·E[y²] beside Var(y): 10·2⁻²⁴·2 beside 1 is 1.2e-6; squares outside 1e-30 to 1e30 are never trusted."""
    meter = Probe("y", "p.", (1,), accuracy).meter()
    mean = 10.0 if square == 2.0 else 0.0
    meter.add(Sums(10, (mean, 10 * square, 0.0), 10.0))
    assert meter.result().trusted is trusted


@pytest.mark.parametrize(("accuracy", "trusted"), [(1.3e-6, True), (1.1e-6, False)])
def test_the_error_is_relative_to_the_variance(accuracy, trusted):
    """n·eps/2·E[y²] beside Var(y): 10·2⁻²⁴·8 beside 4 is 1.2e-6 of it."""
    meter = Probe("y", "p.", (1,), accuracy).meter()
    meter.add(Sums(10, (20.0, 80.0, 0.0), 10.0))
    assert meter.result().variance == pytest.approx(4.0)
    assert meter.result().trusted is trusted
