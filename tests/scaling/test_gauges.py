"""Verification's measurement of one value: nodes run by onnxruntime, against numpy in float64."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from helpers import normal, rng
from lsuv_cli.model.channels import Channels
from lsuv_cli.scaling.gauges import Gauge, GaugeSums, Sounding, Units
from lsuv_cli.scaling.moments import Moments

TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16, np.float64: TensorProto.DOUBLE}


def measured(gauge, batches, opset=18):
    """The moments that a gauge finds over all batches."""
    kind = TYPES[batches[0].dtype.type]
    nodes = gauge.nodes(opset, kind)
    given = helper.make_tensor_value_info("y", kind, [None] * batches[0].ndim)
    outputs = [onnx.ValueInfoProto(name=name) for name in gauge.fetches]
    graph = helper.make_graph(nodes, "g", [given], outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    meter = gauge.meter()
    for batch in batches:
        meter.add(gauge.sums(session.run(list(gauge.fetches), {"y": batch})))
    return meter.result()


def gauge_for(batches, **more):
    return Gauge("y", "own", sounding=Sounding.of(batches[0]), **{"is_plane": batches[0].ndim > 2, **more})


def exact(batches):
    return np.concatenate([np.asarray(batch, np.float64).ravel() for batch in batches])


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (4, 3, 7), (4, 3, 5, 6), (2, 3, 4, 5, 6)])
def test_mean_and_variance(shape, dtype, opset):
    batches = [(1.5 + normal(*shape, seed=k)).astype(dtype) for k in range(3)]
    found = measured(gauge_for(batches, is_plane=len(shape) > 3), batches, opset)
    assert found.mean == pytest.approx(exact(batches).mean(), rel=1e-4)
    assert found.variance == pytest.approx(exact(batches).var(), rel=1e-4)
    assert found.count == exact(batches).size
    assert found.trusted
    assert found.channels is None


def test_a_single_number():
    batches = [np.array(k, np.float32) for k in (1, 2, 6)]
    found = measured(gauge_for(batches, is_plane=False), batches)
    assert (found.mean, found.variance, found.count) == pytest.approx((3, 14 / 3, 3))


@pytest.mark.parametrize("equal", [True, False])
def test_planes_of_one_size_and_of_several(equal):
    sizes = [(4, 3, 6, 6), (2, 3, 6, 6)] if equal else [(4, 3, 6, 6), (4, 3, 2, 9), (1, 3, 11, 1)]
    batches = [(k + 1) * normal(*shape, seed=k) for k, shape in enumerate(sizes)]
    gauge = gauge_for(batches, equal_groups=equal, rows=(4, 2))
    found = measured(gauge, batches)
    assert ("own.count" in gauge.fetches) != equal
    assert found.variance == pytest.approx(exact(batches).var(), rel=1e-5)
    assert found.trusted


def test_planes_that_were_taken_to_be_equal_are_measured_again():
    """The first axis is not that of the samples, and so the planes may have any size."""
    batches = [normal(4, 3, 6, 6), 3 * normal(4, 3, 2, 9, seed=1)]
    gauge = gauge_for(batches, equal_groups=True, rows=(4, 2))
    found = measured(gauge, batches)
    assert not found.trusted
    again = measured(gauge.more_careful(found), batches)
    assert again.trusted
    assert again.variance == pytest.approx(exact(batches).var(), rel=1e-9)


def test_planes_above_4096_elements_are_measured_row_by_row_and_such_rows_in_double():
    assert gauge_for([normal(2, 2, 64, 64)]).group == (2, 3)
    assert gauge_for([normal(2, 2, 65, 64)]).group == (3,)
    assert not gauge_for([normal(2, 4096)]).in_double
    assert gauge_for([normal(2, 4097)]).in_double
    for shape in ((2, 2, 65, 64), (2, 4097)):
        batches = [np.float32(100) + normal(*shape)]
        assert measured(gauge_for(batches, equal_groups=True), batches).variance == pytest.approx(
            exact(batches).var(), rel=1e-6
        )


@pytest.mark.parametrize("factor", [1e-25, 1e-13, 1e13, 1e25])
def test_squares_that_leave_the_range_of_float32(factor):
    batches = [np.float32(factor) * normal(6, 5)]
    gauge = gauge_for(batches)
    assert gauge.in_double
    assert measured(gauge, batches).variance == pytest.approx(exact(batches).var(), rel=1e-6)


@pytest.mark.parametrize(("mean", "shifted"), [(1.0, False), (1.9, False), (2.2, True), (1e4, True)])
def test_a_large_mean_is_taken_away_first(mean, shifted):
    sample = normal(200, 50)
    batches = [np.float32(mean) + sample / sample.std()]
    gauge = gauge_for(batches)
    assert bool(gauge.shift) == shifted
    found = measured(gauge, batches)
    assert found.mean == pytest.approx(mean, abs=0.01)
    assert found.variance == pytest.approx(exact(batches).var(), rel=1e-4)


def test_a_variance_that_float32_does_not_give_is_not_trusted():
    plain = Sounding((200, 10), 0.0, 1.0, 1.0)
    batches = [np.float32(300) + normal(200, 10, seed=k) for k in range(2)]
    found = measured(Gauge("y", "own", False, plain, accuracy=1e-4), batches)
    assert not found.trusted
    again = measured(Gauge("y", "own", False, plain, accuracy=1e-4).more_careful(found), batches)
    assert again.trusted
    assert again.variance == pytest.approx(exact(batches).var(), rel=1e-9)


def test_a_constant_value_has_no_variance():
    assert measured(gauge_for([np.full((40, 10), 0.1, np.float32)]), [np.full((40, 10), 0.1, np.float32)]).variance == 0


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_has_no_variance(wrong):
    batches = [normal(6, 5), normal(6, 5)]
    batches[1][2, 3] = wrong
    found = measured(gauge_for(batches), batches)
    assert not found.finite
    assert not found.trusted
    assert found.dead_units is None


def test_nothing_has_no_moments():
    batches = [np.zeros((0, 5), np.float32)]
    assert np.isnan(measured(gauge_for(batches), batches).variance)
    several = [normal(3, 5), *batches]
    assert measured(gauge_for(several), several).variance == pytest.approx(exact(several).var(), rel=1e-5)


def test_a_value_behind_a_norm_is_divided_by_its_factor():
    batches = [np.float32(2) * (5 + normal(40, 6, seed=k)) for k in range(2)]
    found = measured(Gauge("y", "own", False, Sounding.of(batches[0] / 2), divisor=2.0), batches)
    assert found.mean == pytest.approx(exact(batches).mean() / 2, rel=1e-5)
    assert found.variance == pytest.approx(exact(batches).var() / 4, rel=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("opset", [13, 18])
def test_units_that_are_never_above_zero(opset, dtype):
    batches = [np.abs(normal(5, 4, 3, 3, seed=k)).astype(dtype) for k in range(2)]
    for batch in batches:
        batch[:, 1] *= -1
        batch[:, 2] = 0
    found = measured(gauge_for(batches, units=Units(4, (2, 3))), batches, opset)
    assert found.dead_units == 0.5
    rows = [batch[:, :, 0, 0] for batch in batches]
    rows[1][0, 1] = 7
    assert measured(gauge_for(rows, is_plane=False, units=Units(4, ())), rows, opset).dead_units == 0.25


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize(
    ("shape", "axis", "plane"), [((6, 4, 5, 5), 1, True), ((6, 5, 4), 2, False), ((6, 4), 1, False)]
)
def test_the_moments_of_channels_on_average(shape, axis, plane, opset):
    batches = [normal(*shape, seed=k) for k in range(2)]
    offsets = np.arange(4, dtype=np.float32).reshape([4 if k == axis else 1 for k in range(len(shape))])
    batches = [offsets * (1 + batch) for batch in batches]
    found = measured(gauge_for(batches, is_plane=plane, channel_axis=axis), batches, opset)
    table = np.concatenate([np.moveaxis(b, axis, -1).reshape(-1, 4) for b in batches]).astype(np.float64)
    assert found.channel_variance == pytest.approx(table.var(axis=0).mean(), rel=1e-4)
    assert found.channel_mean_square == pytest.approx((table.mean(axis=0) ** 2).mean(), rel=1e-4)
    assert found.variance == pytest.approx(table.var(), rel=1e-4)
    assert gauge_for(batches).meter().result().channel_variance is None


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize(
    ("shape", "channels"), [((6, 4, 5, 5), Channels(4, -3)), ((6, 5, 4), Channels(4, -1)), ((6, 4), Channels(4, -1))]
)
def test_channels_one_by_one(shape, channels, opset):
    position = len(shape) + channels.axis
    spread = np.array([1, 2, 0.5, 3], np.float32).reshape([4 if k == position else 1 for k in range(len(shape))])
    batches = [spread * (1 + normal(*shape, seed=k)) for k in range(2)]
    gauge = gauge_for(batches, channels=channels, is_plane=len(shape) == 4)
    found = measured(gauge, batches, opset)
    table = np.concatenate([np.moveaxis(b, position, -1).reshape(-1, 4) for b in batches]).astype(np.float64)
    assert gauge.in_double
    np.testing.assert_allclose(found.channels.mean, table.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.channels.variance, table.var(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(found.channels.bias_variance, np.zeros(4))
    assert found.variance == pytest.approx(table.var(), rel=1e-6)


def test_a_sounding_is_what_numpy_says():
    array = rng().uniform(-3, 1, (4, 5)).astype(np.float32)
    found = Sounding.of(array)
    wide = array.astype(np.float64)
    assert found.shape == (4, 5)
    assert (found.mean, found.variance, found.largest) == pytest.approx((wide.mean(), wide.var(), np.abs(wide).max()))
    assert Sounding.of(array[:0]) == Sounding((0, 5), 0.0, 0.0, 0.0)


@pytest.mark.parametrize("opset", [13, 18])
def test_channels_behind_a_norm_are_divided_by_its_factor(opset):
    batches = [np.float32(3) * (5 + np.arange(1, 5, dtype=np.float32) * normal(40, 4, seed=k)) for k in range(2)]
    sounding = Sounding.of(batches[0] / 3)
    table = np.concatenate(batches).astype(np.float64) / 3
    whole = measured(Gauge("y", "own", False, sounding, divisor=3.0, channel_axis=1), batches, opset)
    assert whole.channel_variance == pytest.approx(table.var(axis=0).mean(), rel=1e-4)
    assert whole.channel_mean_square == pytest.approx((table.mean(axis=0) ** 2).mean(), rel=1e-4)
    each = measured(Gauge("y", "own", False, sounding, divisor=3.0, channels=Channels(4, -1)), batches, opset)
    np.testing.assert_allclose(each.channels.mean, table.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(each.channels.variance, table.var(axis=0), rtol=1e-6)


def meter_of(gauge, *parts):
    meter = gauge.meter()
    for part in parts:
        meter.add(part)
    return meter


PLAIN = Gauge("y", "own", False, Sounding((4, 10), 0.0, 1.0, 3.0))


def test_a_variance_below_the_rounding_of_the_mean_is_none():
    """float32's unit roundoff is 2⁻²⁴: beside a mean of 1000, a variance up to 2⁻⁴⁸·10⁶ = 3.6e-9 is rounding."""
    for variance, kept in ((2e-9, False), (6e-9, True)):
        found = meter_of(PLAIN, GaugeSums(4, 10.0, 1e4, 10 * (1e6 + variance), 10.0)).result()
        assert (found.variance > 0) == kept


@pytest.mark.parametrize(("accuracy", "trusted"), [(1.1e-6, True), (0.9e-6, False)])
def test_the_error_of_float32_is_that_of_a_sum_over_a_group(accuracy, trusted):
    """n·2⁻²⁴·E[d²] beside Var = E[d²] - E[d]²: 8·2⁻²⁴·2 beside 1 is 9.5e-7."""
    gauge = replace(PLAIN, accuracy=accuracy)
    assert meter_of(gauge, GaugeSums(4, 10.0, 10.0, 20.0, 8.0)).result().trusted == trusted


def test_sums_that_overflow_are_not_trusted_and_have_no_variance():
    found = meter_of(PLAIN, GaugeSums(4, 10.0, np.inf, np.inf, 8.0)).result()
    assert not found.trusted
    assert np.isnan(found.variance)
    found = meter_of(replace(PLAIN, careful=True), GaugeSums(4, 10.0, np.inf, np.inf, 8.0)).result()
    assert found.trusted


@pytest.mark.parametrize(
    ("shape", "plane", "channels", "group"),
    [
        ((4, 3, 5, 6), True, None, (2, 3)),
        ((4, 3, 5, 6), False, None, (3,)),
        ((4, 3), True, None, (1,)),
        ((4,), False, None, (0,)),
        ((), False, None, None),
        ((4, 3, 0, 6), True, None, (3,)),
        ((4, 3, 5, 6), True, Channels(3, -3), (2, 3)),
        ((4, 5, 3), False, Channels(3, -1), (0,)),
        ((4, 3, 5), False, Channels(3, -2), (2,)),
    ],
)
def test_the_axes_of_a_group(shape, plane, channels, group):
    gauge = Gauge("y", "own", plane, Sounding(shape, 0.0, 1.0, 1.0), channels=channels)
    assert gauge.group == group


@pytest.mark.parametrize(
    ("largest", "in_double"), [(1e-12, True), (1e-11, False), (1.0, False), (1e11, False), (1e12, True), (np.nan, True)]
)
def test_magnitudes_that_float32_squares(largest, in_double):
    assert replace(PLAIN, sounding=replace(PLAIN.sounding, largest=largest)).in_double == in_double


@pytest.mark.parametrize(
    ("more", "kinds"),
    [
        ({}, "d d2 count"),
        ({"equal_groups": True}, "d d2"),
        ({"units": Units(4, ())}, "d d2 count most"),
        ({"channel_axis": 1}, "d d2 count channel_d channel_d2"),
        ({"channel_axis": 1, "is_plane": True}, "d d2 count"),
    ],
)
def test_what_is_fetched(more, kinds):
    assert replace(PLAIN, **more).fetches == tuple(f"own.{kind}" for kind in kinds.split())


@pytest.mark.parametrize(("mean", "expected"), [(7.0, 7.0), (np.nan, 0.5)])
def test_a_more_careful_gauge_is_shifted_by_the_mean_found_so_far(mean, expected):
    gauge = replace(PLAIN, equal_groups=True, sounding=replace(PLAIN.sounding, mean=0.5))
    again = gauge.more_careful(Moments(mean, 1.0))
    assert again.sounding.mean == expected
    assert again.careful
    assert again.in_double
    assert not again.equal_groups
