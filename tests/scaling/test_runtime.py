"""Sessions: which optimizers are off for which graphs, values there and back, and models opened as they are."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from helpers import model, normal
from lsuv_cli.errors import ModelError
from lsuv_cli.scaling import runtime
from lsuv_cli.scaling.translation import Unsupported

ALWAYS = ["MatMulScaleFusion", "GemmTransposeFusion"]
NORM = "BatchNormalization<training_mode={}>(x, one, one, one, one)"
TRANSPOSED = "t = Transpose<perm=[1,0]>(x)"
IF = "y = If(yes) <then_branch = t () => (p) {{ {} }}, else_branch = e () => (q) {{ q = Neg(x) }}>"


@pytest.mark.parametrize(
    ("body", "off"),
    [
        ("y = Relu(x)", []),
        (f"{TRANSPOSED} y = MatMul(t, vector)", ["MatmulTransposeFusion"]),
        (f"{TRANSPOSED} w = Neg(vector) y = MatMul(t, w)", ["MatmulTransposeFusion"]),
        (f"{TRANSPOSED} c = Cast<to=1>(t) i = Identity(c) y = MatMul(i, vector)", ["MatmulTransposeFusion"]),
        (f"{TRANSPOSED} y = MatMul(t, matrix)", []),
        (f"{TRANSPOSED} r = Relu(t) y = MatMul(r, vector)", []),
        (f"{TRANSPOSED} y = MatMul(matrix, t)", []),
        (f"{TRANSPOSED} y = Add(t, vector)", []),
        ("c = Cast<to=1>(x) y = MatMul(c, vector)", []),
        (f"y, m, v = {NORM.format(1)}", ["ConstantSharing"]),
        (f"y = {NORM.format(0)}", []),
        (IF.format(f"p, m, v = {NORM.format(1)}"), ["ConstantSharing"]),
        ("y = Dropout(x, half, yes)", ["EliminateDropout"]),
        ("y = Dropout(x, half, no)", []),
        ("y = Dropout(x)", []),
        (IF.format("p = Dropout(x, half, yes)"), ["EliminateDropout"]),
    ],
)
def test_optimizers_that_would_change_what_a_model_computes_are_off(body, off):
    tensors = {"one": np.ones(4, "f"), "vector": normal(4), "matrix": normal(4, 4), "half": np.float32(0.5)}
    proto = model(f"g (float[4,4] x) => (y) {{ {body} }}", **tensors, yes=np.array(True), no=np.array(False))
    assert runtime._broken(proto) == [*ALWAYS, *off]


def test_the_nodes_of_functions_count_too():
    text = """g (float[4,4] x) => (y) { y = local.f(x) }
        <domain: "local", opset_import: ["" : 18]> f (p) => (r) {
            o = Constant<value_float=0.5>() b = Constant<value = bool {1}>() r = Dropout(p, o, b) }"""
    assert runtime._broken(model(text)) == [*ALWAYS, "EliminateDropout"]


BFLOAT16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)


@pytest.mark.parametrize(
    "array",
    [
        normal(3, 4),
        normal(3, 4).T,
        np.float32(2.5).reshape(()),
        np.zeros((0, 3), np.float32),
        normal(2, 2).astype(np.float16),
        normal(2, 2).astype(np.float64),
        np.arange(5),
        np.array([True, False]),
        np.array([["a", "bc"], ["", "ü"]], object),
        np.array(["one", "two"]),
    ],
)
def test_a_value_there_and_back(array):
    value = runtime.host_value(array)
    found = runtime.to_numpy(value)
    assert found.shape == array.shape
    np.testing.assert_array_equal(found, array)


def test_bfloat16_comes_back_as_float32():
    given = np.array([[1.5, -2.0], [0.0, 3e38]]).astype(BFLOAT16)
    value = runtime.host_value(given)
    assert value.data_type() == "tensor(bfloat16)"
    found = runtime.to_numpy(value)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, given.astype(np.float32))
    assert runtime.own_array(value).dtype == given.dtype
    assert runtime.to_numpy(runtime.host_value(given[:0])).shape == (0, 2)


def test_a_model_as_it_is():
    proto = model("g (float[N,2] x) => (y, s) { y = Neg(x) s = SequenceConstruct(x) }")
    proto.graph.output[1].CopyFrom(
        helper.make_value_info("s", helper.make_sequence_type_proto(proto.graph.input[0].type))
    )
    x = normal(3, 2)
    found = runtime.run_whole(proto.SerializeToString(), {"x": x, "unread": x}, 1)
    assert list(found) == ["y"]
    np.testing.assert_array_equal(found["y"], -x)
    assert runtime.refusal(proto.SerializeToString()) == ""


def test_a_model_in_bfloat16_is_fed_in_it():
    proto = model("g (bfloat16[N,2] x) => (y) { y = Cast<to=1>(x) }")
    x = np.array([[1.0, 1.0 + 2.0**-10]], np.float32)
    np.testing.assert_array_equal(runtime.run_whole(proto.SerializeToString(), {"x": x}, 1)["y"], [[1, 1]])


def test_a_model_that_onnxruntime_refuses():
    wrong = model("g (float[2,3] x) => (y) { y = MatMul(x, w) }", w=normal(4, 5))
    assert "MatMul" in runtime.refusal(wrong.SerializeToString())
    with pytest.raises(ModelError, match="onnxruntime does not take the model"):
        runtime.run_whole(wrong.SerializeToString(), {"x": normal(2, 3)}, 1)
    with pytest.raises(ModelError, match="onnxruntime does not take the model"):
        runtime.open_without_weights(wrong)


def test_a_model_is_opened_without_its_weights():
    """Weights that are elsewhere, whether initializers or in Constant nodes, are never read."""
    text = """g (float[N,4] x) => (y) { v = Constant<value = float[1] {0.0}>()
        a = MatMul(x, u) b = local.f(a) c = MatMul(b, v) y = Reshape(c, shape) }
        <domain: "local", opset_import: ["" : 18]> f (p) => (r) { r = Relu(p) }"""
    proto = model(text, u=normal(4, 4), shape=np.array([-1, 2]))
    proto.graph.name = ""
    held = [proto.graph.initializer[0], proto.graph.node[0].attribute[0].t]
    for each in held:
        each.CopyFrom(TensorProto(name=each.name, data_type=TensorProto.FLOAT, dims=[4, 4]))
        each.data_location = TensorProto.EXTERNAL
        each.external_data.add(key="location", value="nowhere.bin")
    proto.graph.input.append(helper.make_tensor_value_info("u", TensorProto.FLOAT, [4, 4]))
    before = proto.SerializeToString()
    runtime.open_without_weights(proto)
    assert proto.SerializeToString() == before


def test_large_weights_become_inputs_and_small_ones_stay(monkeypatch):
    given: list[bytes] = []
    real = ort.InferenceSession
    monkeypatch.setattr(ort, "InferenceSession", lambda data, *a, **k: given.append(data) or real(data, *a, **k))
    runtime.open_without_weights(
        model("g (float[N,400] x) => (y) { a = MatMul(x, w) y = Add(a, c) }", w=normal(400, 8), c=normal(8))
    )
    graph = onnx.ModelProto.FromString(given[0]).graph
    assert [i.name for i in graph.input] == ["x", "w"]
    assert [t.name for t in graph.initializer] == ["c"]


def test_a_model_runs_as_it_is_unless_optimizers_are_asked_for():
    """onnxruntime has no Dropout of opset 6, but its optimizers remove one that drops nothing."""
    proto = model("g (float[N,2] x) => (y) { n = Neg(x) d = Dropout<is_test=1>(n) y = Neg(d) }", opset=6)
    x = normal(3, 2)
    with pytest.raises(Unsupported):
        runtime.run_whole(proto.SerializeToString(), {"x": x}, 1)
    np.testing.assert_array_equal(runtime.run_whole(proto.SerializeToString(), {"x": x}, 1, optimized=True)["y"], x)
