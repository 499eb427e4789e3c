"""Constants behind views, as a node reads them, against what onnx's reference evaluator says."""

import numpy as np
import pytest

from helpers import model, normal, values
from lsuv_cli.model.constants import Constants, LeftAlone, readers_of
from working_copies import graph_of

STORED = normal(1, 2, 3)


def found(body, opset=18, **tensors):
    text = f"g (float[N] x) => (y) {{ {body} y = Identity(x) }}"
    return Constants(graph_of(text, opset=opset, **{"s": STORED, **tensors})).weight("w")


@pytest.mark.parametrize(
    ("opset", "body"),
    [
        (11, "w = Squeeze<axes=[0]>(s)"),
        (11, "w = Squeeze(s)"),
        (11, "t = Unsqueeze<axes=[2]>(s) w = Squeeze<axes=[0]>(t)"),
        (18, "t = Unsqueeze(s, two) w = Squeeze(t, zero)"),
        (11, "w = Unsqueeze<axes=[0,2]>(s)"),
        (18, "w = Squeeze(s, zero)"),
        (18, "w = Squeeze(s)"),
        (18, "w = Unsqueeze(s, zero)"),
        (18, "w = Transpose<perm=[2,0,1]>(s)"),
        (18, "w = Transpose(s)"),
        (18, "w = Flatten(s)"),
        (18, "w = Flatten<axis=2>(s)"),
        (18, "w = Flatten<axis=0>(s)"),
        (18, "w = Reshape(s, shape)"),
        (18, "w = Reshape(s, keep)"),
        (18, "t = Transpose(s) i = Identity(t) f = Flatten(i) w = Reshape(f, shape)"),
    ],
)
def test_views_there_and_back(opset, body):
    tensors = {"zero": np.array([0]), "two": np.array([2]), "shape": np.array([3, -1]), "keep": np.array([0, 3, -1])}
    weight = found(body, opset, **tensors)
    proto = model(f"g (float[N] x) => (w) {{ {body} }}", opset=opset, s=STORED, **tensors)
    expected = values(proto, {"x": normal(1)}, ["w"], reference=True)["w"]
    assert weight.base == "s"
    assert weight.shape == expected.shape
    np.testing.assert_array_equal(weight.seen(STORED), expected.astype(np.float32))
    np.testing.assert_array_equal(weight.stored(weight.seen(STORED)), STORED)


def test_what_a_cast_makes_of_a_weight():
    assert (found("w = Cast<to=10>(s)").read_as, found("w = Cast<to=10>(s)").dtype) == ("float16", "float32")
    assert found("w = Cast<to=1>(s)").cast == ""
    assert found("h = Cast<to=10>(s) w = Cast<to=11>(h)").read_as == "float64"
    with pytest.raises(LeftAlone, match="cast to int64"):
        found("w = Cast<to=7>(s)")
    with pytest.raises(LeftAlone, match="stored as int64"):
        found("w = Identity(i)", i=np.arange(3))


def test_what_is_computed_from_constants_is_folded():
    weight = found("n = Neg(s) w = Transpose(n)")
    assert (weight.base, weight.place, weight.shape) == ("n", "folded", (3, 2, 1))
    assert found("w = Identity(s)").place == "initializer"
    assert found("c = Constant<value_floats=[1.0,2.0]>() w = Identity(c)").place == "constant"
    with pytest.raises(LeftAlone, match="of type int64"):
        found("w = Shape(s)")


@pytest.mark.parametrize(
    ("body", "readers"),
    [
        ("y = MatMul(x, s)", ["MatMul s"]),
        ("n = Shape(s) k = Size(s) y = MatMul(x, s)", ["MatMul s"]),  # a shape stays as it is
        ("t = Transpose(s) y = MatMul(x, t)", ["MatMul t"]),
        ("y = Add(s, s)", ["Add s", "Add s"]),
        ("a = MatMul(x, s) y = Add(a, s)", ["Add s", "MatMul s"]),
        ("k = local.Size(s) y = Neg(x)", ["Size s"]),
    ],
)
def test_who_reads_a_stored_tensor(body, readers):
    graph = graph_of(f"g (float[N,2] x) => (y) {{ {body} }}", s=normal(2, 2))
    assert sorted(f"{graph.nodes[k].op_type} {name}" for k, name in readers_of(graph, "s")) == readers
    shown = graph_of("g (float[N,2] x) => (y, s) { y = Neg(x) }", s=normal(2, 2))
    assert list(readers_of(shown, "s")) == [(-1, "s")]
