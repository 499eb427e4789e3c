"""What a tensor is for, by the operators that read it, and what fills a tensor without values."""

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers import normal
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.roles import Role, counted, is_mask, roles
from lsuv_cli.scaling.filling import _raw, values
from working_copies import Source, graph_of

LAYERS = "Conv ConvTranspose FusedConv Gemm MatMul Einsum FusedGemm FusedMatMul"
NORMS = "LayerNormalization InstanceNormalization GroupNormalization RMSNormalization SimplifiedLayerNormalization"
# Operators, the inputs at which they read a tensor, and its role.
TABLE = [
    (LAYERS, "0 1", "weight"),
    (LAYERS, "2", "bias"),
    ("Attention QAttention DeformConv", "1", "weight"),
    ("Attention QAttention", "2", "bias"),
    ("DeformConv", "3", "bias"),
    ("LSTM GRU RNN", "1 2", "weight"),
    ("LSTM GRU RNN", "3 5 6 7", "bias"),
    ("LSTM GRU RNN", "4", "table"),
    ("BatchNormalization", "1", "norm scale"),
    ("BatchNormalization", "2 3", "bias"),
    ("BatchNormalization", "4", "running variance"),
    (f"{NORMS} GroupNorm", "1", "norm scale"),
    (f"{NORMS} GroupNorm", "2", "bias"),
    ("SkipLayerNormalization SkipSimplifiedLayerNormalization", "2", "norm scale"),
    ("SkipLayerNormalization SkipSimplifiedLayerNormalization", "3 4", "bias"),
    ("EmbedLayerNormalization", "2 3 4", "embedding"),
    ("EmbedLayerNormalization", "5", "norm scale"),
    ("EmbedLayerNormalization", "6", "bias"),
    ("Gather GatherND GatherElements", "0", "embedding"),
    ("PRelu", "1", "slope"),
    ("Mul Div", "0 1", "norm scale"),
    ("Add Sub Sum Where", "0 1 2", "bias"),
    ("BiasGelu FastGelu BiasSplitGelu BiasAdd", "1", "bias"),
    ("MultiHeadAttention", "3", "bias"),
    ("QuantizeLinear DequantizeLinear", "1", "quantization scale"),
    ("QLinearConv QLinearMatMul", "1 4 6", "quantization scale"),
    ("QLinearConv QLinearMatMul", "2 5 7", "bias"),
    ("QLinearConv QLinearMatMul", "3", "table"),
    ("Resize", "1 2 3", "structure"),
    ("Upsample Pow Dropout", "1", "structure"),
    ("Pow Dropout Clip Pad", "0", "table"),
    ("Clip", "1 2", "structure"),
    ("Pad OneHot STFT", "2", "structure"),
    ("Range", "0 1 2", "structure"),
    ("NonMaxSuppression", "3 4", "structure"),
    ("NonMaxSuppression", "2 5", "table"),
    ("Min Max", "0 1", "structure"),
    ("Softmax Unknown", "0", "table"),
]
CASES = [(op, int(at), role) for ops, places, role in TABLE for op in ops.split() for at in places.split()]


def read_by(op, position, dims=(100,), **attributes):
    """A graph with one node that reads a tensor at one of its inputs."""
    inputs = [f"x{k}" for k in range(8)]
    inputs[position] = "t"
    needed: dict[str, dict[str, Any]] = {"Einsum": {"equation": "a,b->ab"}, "GroupNormalization": {"num_groups": 1}}
    node = helper.make_node(op, inputs, ["y", "indices"] if op == "TopK" else ["y"], **needed.get(op, {}), **attributes)
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in [*inputs, "y"] if n != "t"]
    tensor = numpy_helper.from_array(np.ones(dims, np.float32), "t")
    return helper.make_model(helper.make_graph([node], "g", infos[:-1], infos[-1:], [tensor]))


@pytest.mark.parametrize(("op", "position", "role"), CASES)
def test_the_role_of_a_tensor_that_one_node_reads(op, position, role):
    assert roles(graphs.build(read_by(op, position), Source())) == {"t": role}


@pytest.mark.parametrize(
    ("op", "position"),
    [
        ("Reshape", 1), ("Expand", 1), ("Resize", 2), ("Resize", 3), ("Tile", 1), ("ConstantOfShape", 0), ("Range", 1),
        ("Slice", 1), ("Slice", 2), ("Slice", 3), ("Slice", 4), ("Pad", 1), ("TopK", 1), ("Upsample", 1), ("OneHot", 1),
    ],
)  # fmt: skip
def test_small_tensors_that_are_shapes_are_structure(op, position):
    assert roles(graphs.build(read_by(op, position, (64,)), Source())) == {"t": "structure"}
    large = roles(graphs.build(read_by(op, position, (65,)), Source()))["t"]
    assert (large == "structure") == (op in {"Resize", "Range", "Upsample"})


def test_what_a_shape_is_computed_from_is_structure():
    text = """g (float[N,8] x) => (y) {
        s = Shape(x) f = Cast<to=1>(s) h = Mul(f, two) c = Ceil(h) i = Cast<to=7>(c) r = Reshape(x, i)
        m = MatMul(r, w) k = Shape(m) y = Expand(m, k) }"""
    found = roles(graph_of(text, two=np.float32(1), w=normal(8, 8)))
    assert found == {"two": "structure", "w": "weight"}


def test_the_role_that_comes_first_is_taken():
    text = """g (int64[N] i, float[N,8] x) => (y) {
        e = Gather(w, i) t = Transpose(w) m = MatMul(x, t) y = Add(e, b) z = Mul(x, b) }"""
    found = roles(graph_of(text, w=normal(8, 8), b=normal(8)))
    assert found == {"w": "tied embedding", "b": "norm scale"}


@pytest.mark.parametrize(
    ("shape", "role"),
    [((8,), "bias"), ((1, 8), "bias"), ((4, 8), "table"), ((2, 8), "table"), ((1, 4, 1, 8), "table"), ((), "bias")],
)
def test_what_is_added_along_several_axes_is_a_table(shape, role):
    for op in ("Add", "Sub", "Sum"):
        text = f"g (float[N,4,4,8] x) => (y) {{ y = {op}(x, b) }}"
        assert roles(graph_of(text, b=np.ones(shape, np.float32))) == {"b": role}
    text = "g (bool[8] c, float[N,8] x) => (y) { y = Where(c, x, b) }"
    assert roles(graph_of(text, b=normal(4, 8))) == {"b": "bias"}


def test_a_tensor_that_nothing_reads_is_a_table():
    assert roles(graph_of("g (float[N] x) => (y) { y = Relu(x) }", b=normal(8))) == {"b": "table"}
    assert roles(graph_of("g (float[N] x) => (y, b) { y = Mul(x, b) }", b=normal(1))) == {"b": "norm scale"}


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0, -1e9], True), ([0, -100], True), ([0, -99], False), ([0, -np.inf], True), ([0, -1e9, -1e8], False),
        ([0, 0], False), ([-1e9], False), ([1, -1e9], False), ([-1e9, -1e9], True), ([0, 5], False),
    ],
)  # fmt: skip
def test_masks(numbers, expected):
    assert is_mask(np.array(numbers, np.float32)) is expected


def test_counts_for_a_message():
    found = {"a": Role.WEIGHT, "b": Role.BIAS, "c": Role.BIAS, "d": Role.EMBEDDING, "e": Role.EMBEDDING}
    assert counted(found) == "1 weight, 2 embeddings, 2 biases"
    assert counted({"b": Role.BIAS}) == "1 bias"
    assert counted({}) == ""


# What tensors without values are filled with


@pytest.mark.parametrize(
    ("role", "number"),
    [
        ("running variance", 1),
        ("norm scale", 1),
        ("bias", 0),
        ("slope", 0.25),
        ("quantization scale", 1 / 32),
        ("structure", 1),
    ],
)
def test_roles_that_are_constants(role, number):
    np.testing.assert_array_equal(values(Role(role), (3, 4), 0, "t"), np.full((3, 4), number, np.float32))


@pytest.mark.parametrize(
    ("role", "shape", "deviation"),
    [
        ("embedding", (300, 400), 1.0),
        ("table", (300, 400), 0.02),
        ("weight", (300, 400), 1 / math.sqrt(400)),
        ("weight", (400, 300), 1 / math.sqrt(400)),
        ("weight", (100, 30, 3, 3), 1 / math.sqrt(30 * 9)),
        ("weight", (2000,), 1.0),
        ("tied embedding", (400, 300), 1 / math.sqrt(300)),
        ("quantized weight", (300, 400), 32 / math.sqrt(400)),
        ("quantized weight", (40, 4000), 1.04),  # numbers of deviation 1, rounded to integers: 1 + 1/12 in variance
    ],
)
def test_roles_that_are_drawn(role, shape, deviation):
    found = values(Role(role), shape, 0, "t")
    assert found.dtype == np.float32
    assert found.std(dtype=np.float64) == pytest.approx(deviation, rel=0.05)
    assert abs(found.mean(dtype=np.float64)) < 5 * deviation / math.sqrt(found.size)
    np.testing.assert_array_equal(found, values(Role(role), shape, 0, "t"))
    assert not np.array_equal(found, values(Role(role), shape, 1, "t"))
    assert not np.array_equal(found, values(Role(role), shape, 0, "other"))
    if role == "quantized weight":
        np.testing.assert_array_equal(found, np.round(found))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (TensorProto.FLOAT, np.array([-200, -1.5, 0, 3, 300], np.float32)),
        (TensorProto.FLOAT16, np.array([-200, -1.5, 0, 3, 300], np.float16)),
        (TensorProto.INT8, np.array([-128, -1, 0, 3, 127], np.int8)),
        (TensorProto.UINT8, np.array([0, 126, 128, 131, 255], np.uint8)),
        (TensorProto.INT16, np.array([-200, -1, 0, 3, 300], np.int16)),
    ],
)
def test_values_in_the_type_of_a_tensor(kind, expected):
    tensor = onnx.TensorProto(data_type=kind, dims=[5])
    assert _raw(tensor, np.array([-200, -1.5, 0, 3, 300], np.float32)) == expected.tobytes()


def test_packed_integers():
    """Two in a byte, the first in its lower half."""
    tensor = onnx.TensorProto(data_type=TensorProto.INT4, dims=[5])
    assert _raw(tensor, np.array([1, 2, 3, -1, 5], np.float32)) == b"\x21\xf3\x05"


@pytest.mark.parametrize(
    ("op", "position"),
    [
        ("Reshape", 1), ("Expand", 1), ("Resize", 2), ("Resize", 3), ("Tile", 1), ("ConstantOfShape", 0), ("Range", 0),
        ("Range", 1), ("Range", 2), ("Slice", 1), ("Slice", 2), ("Slice", 3), ("Slice", 4), ("Pad", 1), ("TopK", 1),
        ("Upsample", 1), ("OneHot", 1),
    ],
)  # fmt: skip
def test_a_number_that_a_shape_is_computed_from_is_structure_whichever_operator_reads_the_shape(op, position):
    proto = read_by(op, position, ())
    proto.graph.node.insert(0, helper.make_node("Mul", ["x7", "t"], ["s"]))
    reader = proto.graph.node[1]
    reader.input[position] = "s"
    assert roles(graphs.build(proto, Source())) == {"t": "structure"}
    reader.input[position], reader.input[6] = f"x{position}", "s"  # an input that is no shape
    proto.graph.input.add(name=f"x{position}")
    assert roles(graphs.build(proto, Source())) == {"t": "norm scale"}


@pytest.mark.parametrize("op", ["Shape", "Size"])
def test_a_tensor_whose_shape_alone_is_read_shapes_nothing(op):
    text = f"g (float[N,8] x) => (y) {{ s = {op}(b) u = Unsqueeze(s, o) r = Reshape(x, u) y = Add(r, b) }}"
    assert roles(graph_of(text, b=normal(8), o=np.array([0])))["b"] == "bias"
