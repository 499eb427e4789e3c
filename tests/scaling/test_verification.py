# mypy: disable-error-code="arg-type"
"""Small decisions of verification: which outputs are the same, which shapes may differ between batches."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers import normal
from lsuv_cli.errors import ModelError
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.scaling import verification
from lsuv_cli.scaling.gauges import Units
from lsuv_cli.scaling.precision import ALL, HALF, has_half, retyped_node, retyped_type, stored_types
from lsuv_cli.scaling.providers import PROVIDERS, Device
from lsuv_cli.scaling.runner import Pass
from lsuv_cli.scaling.shares import common_type
from working_copies import graph_of

CPU = Device(PROVIDERS["cpu"], 0, 1)


def made(body, **tensors):
    return graph_of(f"g (float[N,4] x, int64[M] i) => (y) {{ {body} }}", **tensors)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Relu(x)", False),
        ("y = Reshape(x, s)", False),
        ("y = Reshape(x, i)", True),
        ("y = NonZero(x)", True),
        ("y = Compress(x, i)", True),
        ("y = Unique(x)", True),
        ("y = Range(z, k, k)", True),
        ("y = Expand(x, i)", True),
        ("y = Tile(x, i)", True),
        ("y = Slice(x, i, i)", True),
        ("y = Slice(x, s, s)", False),
        ("y = Pad(x, i)", True),
        ("y = ConstantOfShape(i)", True),
        ("y = ConstantOfShape(s)", False),
        ("y, q = TopK(x, i)", True),
        ("y, q = Split(x, i)", True),
        ("y = Squeeze(x, i)", True),
        ("y = OneHot(i, k, s)", False),
        ("y = Clip(x, k)", False),
    ],
)
def test_operators_that_make_shapes(body, expected):
    assert verification._makes_shapes(made(body, s=np.array([4, -1]), k=np.int64(1), z=np.int64(0))) is expected


@pytest.mark.parametrize(
    ("shapes", "first", "expected"),
    [
        ([(4, 3), (4, 3)], 0, True),
        ([(4, 3), (2, 3)], 0, False),
        ([(4, 3), (2, 3)], 1, True),
        ([(4, 3), (4, 5)], 1, False),
        ([(4, 3)], 0, True),
    ],
)
def test_batches_of_one_shape(shapes, first, expected):
    batches = [{"x": shape, "n": (3,)} for shape in shapes]
    assert verification._equal_shapes(batches, first_axis=first) is expected


@pytest.mark.parametrize(
    ("off", "half", "expected"),
    [
        (0.0, False, True),
        (9e-4, False, True),
        (2e-3, False, False),
        (2e-3, True, True),
        (4e-2, True, True),
        (6e-2, True, False),
    ],
)
def test_outputs_that_are_the_same(off, half, expected):
    one = np.array([[1.0, -10.0], [0.1, 3.0]])
    other = one.copy()
    other[1, 0] += 10 * off
    assert verification._same(one, other, half) is expected
    assert verification._same(one, other.reshape(-1), half) is False


def test_outputs_of_zeros_are_the_same():
    zeros = np.zeros(4)
    assert verification._same(zeros, zeros, half=False)
    assert not verification._same(zeros, zeros + 1e-20, half=False)
    assert verification._same(zeros, zeros + 1e-7, half=True)
    assert not verification._same(zeros, zeros + 1e-3, half=True)


def kind(*dims):
    return helper.make_tensor_type_proto(TensorProto.FLOAT, dims)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (kind(3, 4), kind(3, 4), kind(3, 4)),
        (kind(3, 4), kind(2, 4), kind(None, 4)),
        (kind(3, 4), kind(2, 5), kind(None, None)),
        (kind(3, 4), kind(None, 4), kind(None, 4)),
        (kind("N", 4), kind("N", 4), kind("N", 4)),
    ],
)
def test_the_type_that_two_batches_fit(one, other, expected):
    assert common_type(one, other) == expected


def test_the_type_that_batches_of_two_ranks_fit():
    found = common_type(kind(3, 4), kind(3, 4, 1))
    assert not found.tensor_type.HasField("shape")
    assert found.tensor_type.elem_type == TensorProto.FLOAT
    open_rank = onnx.TypeProto()
    open_rank.tensor_type.elem_type = TensorProto.FLOAT
    assert common_type(kind(3, 4), open_rank) == open_rank
    assert common_type(open_rank, kind(3, 4)) == open_rank


def test_a_path_that_is_not_utf8():
    assert verification._is_utf8("grün.onnx")
    assert not verification._is_utf8("gr\udcfcn.onnx")


# Types that are replaced in a copy of a model


@pytest.mark.parametrize("name", ["to", "dtype", "output_dtype", "stash_type"])
def test_types_in_attributes_are_replaced(name):
    node = helper.make_node("Op", ["x"], ["y"], **{name: TensorProto.FLOAT16, "axis": TensorProto.FLOAT16})
    found = {a.name: a.i for a in retyped_node(node, HALF).attribute}
    assert found == {name: TensorProto.FLOAT, "axis": TensorProto.FLOAT16}
    wide = helper.make_node("Op", ["x"], ["y"], **{name: TensorProto.DOUBLE})
    assert retyped_node(wide, HALF) == wide
    assert retyped_node(wide, ALL).attribute[0].i == TensorProto.FLOAT
    assert retyped_node(wide, {}) is wide


def test_types_of_tensors_and_bodies_are_replaced():
    held = numpy_helper.from_array(np.array([1.5], np.float16), "k")
    inner = helper.make_graph(
        [helper.make_node("Cast", ["k"], ["o"], to=TensorProto.FLOAT16)],
        "inner",
        [],
        [helper.make_tensor_value_info("o", TensorProto.FLOAT16, [1])],
        [held, numpy_helper.from_array(np.array([2]), "whole")],
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=inner, value=held)
    found = {a.name: a for a in retyped_node(node, HALF).attribute}
    body = found["then_branch"].g
    assert numpy_helper.to_array(found["value"].t).dtype == np.float32
    assert numpy_helper.to_array(found["value"].t) == 1.5
    assert [t.data_type for t in body.initializer] == [TensorProto.FLOAT, TensorProto.INT64]
    assert body.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert body.node[0].attribute[0].i == TensorProto.FLOAT
    several = onnx.NodeProto(op_type="Op", output=["y"])
    several.attribute.append(onnx.AttributeProto(name="gs", type=onnx.AttributeProto.GRAPHS, graphs=[inner]))
    assert retyped_node(several, HALF).attribute[0].graphs[0].node[0].attribute[0].i == TensorProto.FLOAT


def test_types_of_sequences_and_optionals_are_replaced():
    half = helper.make_tensor_type_proto(TensorProto.FLOAT16, [2])
    full = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    for wrap in (helper.make_sequence_type_proto, helper.make_optional_type_proto):
        assert retyped_type(wrap(half), HALF) == wrap(full)
    nested = helper.make_optional_type_proto(helper.make_sequence_type_proto(half))
    assert retyped_type(nested, HALF) == helper.make_optional_type_proto(helper.make_sequence_type_proto(full))
    assert retyped_type(half, HALF) == full
    whole = helper.make_tensor_type_proto(TensorProto.INT64, [2])
    assert retyped_type(whole, HALF) == whole
    mapping = onnx.TypeProto()
    mapping.map_type.key_type = TensorProto.INT64
    assert retyped_type(mapping, HALF) == mapping


def test_where_half_precision_is():
    assert not has_half(made("y = Relu(x)"))
    assert has_half(made("y = Cast<to=10>(x)"))
    assert has_half(made("y = Cast<to=16>(x)"))
    assert not has_half(made("y = Cast<to=11>(x)"))
    assert has_half(made("y = Cast<to=1>(k)", k=np.float16(1)))
    assert has_half(graph_of("g (float16[N] x) => (y) { y = Relu(x) }"))
    graph = made("h = Cast<to=10>(x) r = Relu(h) d = Cast<to=11>(r) y = Relu(d)")
    feeds = {"x": normal(2, 4), "i": np.array([1])}
    assert stored_types(graph, feeds, HALF) == {"h": TensorProto.FLOAT16, "r": TensorProto.FLOAT16}
    assert stored_types(graph, feeds, ALL) == {"h": TensorProto.FLOAT16, "r": TensorProto.FLOAT16}
    assert stored_types(graph, feeds, {}) == {}


# Axes of channels


@pytest.mark.parametrize(
    ("body", "weight", "shape", "expected"),
    [
        ("y = MatMul(x, w)", (4, 6), (5, 6), 1),
        ("y = MatMul(x, w)", (4, 6), (5, 3, 6), 2),
        ("y = MatMul(w, x)", (6, 4), (6, 5), 0),
        ("y = Gemm(x, w)", (4, 6), (5, 6), 1),
        ("y = MatMul(x, w)", (4, 6), (6,), None),
        ("y = MatMul(x, w)", (4, 6), (0, 6), None),
        ("y = MatMul(x, w)", (2, 4, 6), (2, 5, 6), None),
        ('y = Einsum<equation="nd,dk->nk">(x, w)', (4, 6), (5, 6), None),
        ("y = Conv(x, w)", (6, 4, 3), (5, 6, 2), 1),
    ],
)
def test_the_axis_of_channels(body, weight, shape, expected):
    (layer,) = layers_of(made(body, w=normal(*weight))).layers.layers
    assert verification._channel_axis(layer, shape) == expected


SHAPED_BY_THEMSELVES = "NonZero Compress Unique NonMaxSuppression Loop Scan If Range"
SHAPED_BY_AN_INPUT = """Reshape Expand Tile Resize Upsample Slice Pad OneHot TopK Split CenterCropPad RandomNormal
    RandomUniform SequenceAt SplitToSequence GatherND Squeeze"""


@pytest.mark.parametrize("op", [*SHAPED_BY_THEMSELVES.split(), *SHAPED_BY_AN_INPUT.split()])
def test_every_operator_that_makes_shapes(op):
    """By an input that varies, behind the first one, which is data; some whatever their inputs are."""

    def makes_shapes(*inputs):
        node = helper.make_node(op, inputs, ["y"])
        return verification._makes_shapes(SimpleNamespace(nodes=[node], constant={"c"}))

    alone = op in SHAPED_BY_THEMSELVES.split()
    assert makes_shapes("x", "c", "", "x")
    assert makes_shapes("x", "c") == alone
    assert makes_shapes("x") == alone


@pytest.mark.parametrize(
    ("body", "units", "axis"),
    [
        ("z = MatMul(x, w) y = Relu(z)", Units(3, ()), 1),
        ("z = MatMul(w, x) y = Relu(z)", Units(4, (-1,)), 0),
        ("z = MatMul(x, w) y = Tanh(z)", None, 1),
        ("z = MatMul(x, w) y = Relu(z) u = Neg(z)", Units(3, ()), 1),
        ('z = Einsum<equation="ij,jk->ik">(x, w) y = Relu(z)', None, None),
        ("z = MatMul(x, t) y = Relu(z)", None, None),
        ("z = Conv(p, k) y = Relu(z)", Units(6, (2,)), 1),
        ("z = Conv<group=2>(p, h) y = Relu(z)", Units(6, (2,)), 1),
        ('z = com.microsoft.FusedConv<activation="Relu">(p, k) y = Neg(z)', Units(6, (2,)), 1),
        ('z = com.microsoft.FusedConv<activation="Tanh">(p, k) y = Neg(z)', None, 1),
    ],
)
def test_the_units_and_the_channels_of_a_layer(body, units, axis):
    tensors = {"w": normal(4, 3), "t": normal(2, 4, 3), "k": normal(6, 2, 3), "h": normal(6, 1, 3)}
    text = f"g (float[3,4] x, float[N,2,9] p) => (y) {{ {body} }}"
    look = layers_of(graph_of(text, microsoft=True, **tensors))
    (layer,) = look.layers.layers
    measuring = SimpleNamespace(graph=look.graph)
    assert verification._Measuring._rectified(measuring, layer) == units
    assert verification._channel_axis(layer, (5, 6)) == axis
    if axis != 1 or "Conv" not in body:
        assert verification._channel_axis(layer, (5,)) is None
        assert verification._channel_axis(layer, (0, 6)) is None


@pytest.mark.parametrize(
    ("rows", "equal_samples", "few", "shape", "expected"),
    [
        (None, False, {"x": (5, 3)}, (9, 4, 6, 6), True),  # all batches have one shape
        ((8, 2), True, {"x": (5, 3)}, (5, 4, 6, 6), True),
        ((8, 2), True, {"x": (5, 3), "z": (5, 7)}, (5, 4, 6, 6), True),
        ((8, 2), False, {"x": (5, 3)}, (5, 4, 6, 6), False),
        ((8, 2), True, {"x": (5, 3)}, (9, 4, 6, 6), False),  # samples are elsewhere
        ((8, 2), True, {"x": (5, 3), "z": (1, 7)}, (5, 4, 6, 6), False),
        ((8, 2), True, {"x": (5, 3)}, (5, 4, 6, 5), False),  # and perhaps along a plane
        ((8, 2), True, {"x": (5, 3)}, (5, 5, 6, 6), True),
    ],
)
def test_planes_that_seem_to_have_one_size(rows, equal_samples, few, shape, expected):
    needs = SimpleNamespace(few={name: np.zeros(size) for name, size in few.items()})
    measuring = SimpleNamespace(rows=rows, equal_samples=equal_samples, needs=needs)
    assert verification._Measuring._equal_planes(measuring, shape) is expected


def test_a_model_that_takes_one_batch_size_only_is_tried_with_a_whole_batch(monkeypatch):
    """If any input of the few samples is shorter than in a batch; what fails with whole batches fails."""
    tried = []

    def fails(file, look, needs, wanted):
        tried.append({name: len(array) for name, array in needs.few.items()})
        raise ModelError("no")

    monkeypatch.setattr(verification, "_measure", fails)
    whole = {"x": np.zeros((8, 2)), "state": np.zeros((3, 2))}
    needs = Pass([whole], CPU, 1, lambda *_: None, 1e-3, {"x": whole["x"][:5], "state": whole["state"]})
    with pytest.raises(ModelError):
        verification.measure(None, None, needs)
    assert tried == [{"x": 5, "state": 3}, {"x": 8, "state": 3}]
    tried.clear()
    with pytest.raises(ModelError):
        verification.measure(None, None, replace(needs, few=whole))
    assert tried == [{"x": 8, "state": 3}]


@pytest.mark.parametrize(
    ("file", "copy", "more", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], {}, []),
        ([1.0, 2.0], [1.0, 2.0005], {}, []),
        ([1.0, 2.0], [1.0, 3.0], {}, "another 'y' than the file itself"),
        ([1.0, 2.0], [1.0, 3.0], {"random": True}, []),
        ([1.0, 2.0], [1.0, 3.0], {"trains": True}, []),
        ([1.0, 2.0], [1.0, 3.0], {"retype": HALF}, []),
        ([1.0, np.inf], [1.0, 2.0], {}, ["the output 'y' has Inf or NaN on the first samples"]),
        ([1.0, 2.0], [1.0, np.nan], {}, ["the output 'y' has Inf or NaN on the first samples"]),
        ([1, 2], [1, 3], {}, []),  # whole numbers are not compared
        ([1.0, 2.0], None, {}, []),  # a value that the working copy does not have
        ([], [], {}, []),
    ],
)
def test_the_files_outputs_are_those_of_the_working_copy(file, copy, more, expected):
    raw = {} if copy is None else {"y": np.asarray(copy)}
    measuring = SimpleNamespace(**{"raw": raw, "random": False, "trains": False, "retype": {}, "half": False, **more})
    if isinstance(expected, list):
        assert verification._Measuring._check_outputs(measuring, {"y": np.asarray(file)}) == expected
        return
    with pytest.raises(ModelError, match=expected):
        verification._Measuring._check_outputs(measuring, {"y": np.asarray(file)})


@pytest.mark.parametrize(("pieces", "expected"), [(1, ["s", "t", "late"]), (2, ["s", "t"])])
def test_sums_are_measured_in_the_piece_that_makes_them(pieces, expected):
    """In a single piece all of them are: what stands behind the last layer is no step of it."""
    stage = SimpleNamespace(steps=[SimpleNamespace(makes=("a", "t")), SimpleNamespace(makes=("s",))])
    plan = SimpleNamespace(stages=[stage] * pieces)
    measuring = SimpleNamespace(plan=plan, wanted=verification.Wanted(sums=("s", "t", "late")))
    assert verification._Measuring._sums(measuring, stage) == expected


@pytest.mark.parametrize(
    ("body", "shape", "by_channel", "plane", "equal"),
    [
        ("y = Conv(p, k)", (5, 6, 7), False, True, True),
        ("y = Conv(p, k)", (5, 6, 1), False, True, True),
        ("y = Conv(p, k)", (5, 6, 0), False, True, False),  # nothing to take the mean of
        ("y = Conv(p, k)", (5, 6, 7), True, True, False),
        ("y = MatMul(x, w)", (5, 3), False, False, False),
    ],
)
def test_the_gauge_of_a_layer(body, shape, by_channel, plane, equal):
    text = f"g (float[3,4] x, float[N,2,9] p) => (y) {{ {body} }}"
    look = layers_of(graph_of(text, w=normal(4, 3), k=normal(6, 2, 3)))
    (layer,) = look.layers.layers
    names = frozenset({"y"} if by_channel else ())
    measuring = SimpleNamespace(
        graph=look.graph, wanted=verification.Wanted(channels=names), needs=SimpleNamespace(accuracy=1e-3), retype={},
        pieces=SimpleNamespace(prefix="own:"), names={"y": 7}, rows=None, _equal_planes=lambda _: True,
    )  # fmt: skip
    sounding = SimpleNamespace(shape=shape)
    found = verification._Measuring._gauge(measuring, layer, SimpleNamespace(steps=[]), sounding)
    assert (found.value, found.name, found.divisor) == ("y", "own:layer7", 1.0)
    assert (found.is_plane, found.equal_groups, found.channels is not None) == (plane, equal, by_channel)
