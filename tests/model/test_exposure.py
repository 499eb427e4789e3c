"""Layers' values as outputs: which, in which type and shape, and which cannot be."""

from onnx import TensorProto, helper

from helpers import model, normal
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.exposure import expose
from lsuv_cli.model.prepare import layers_of
from working_copies import Source


def exposed(proto):
    look = layers_of(graphs.build(proto, Source()))
    return expose(proto, look, look.layers.layers)


def described(proto):
    return {
        o.name: (o.type.tensor_type.elem_type, [d.dim_value or d.dim_param for d in o.type.tensor_type.shape.dim])
        for o in proto.graph.output
    }


FUNCTION = """<domain: "local", opset_import: ["" : 18]> f (p) => (r) { r = Relu(p) }"""


def test_types_and_shapes_go_through_functions_and_small_constants():
    text = f"""g (float[N,6] x) => (float[N,2] y) {{
        f = local.f(x) r = Reshape(f, s) a = MatMul(r, w) y = MatMul(a, v) }} {FUNCTION}"""
    proto = model(text, s=[-1, 3], w=normal(3, 4), v=normal(4, 2))
    done = exposed(proto)
    assert [name for _, name in done.layers] == ["a", "y"]
    assert not done.hidden
    found = described(proto)
    assert list(found) == ["y", "a"]
    assert found["a"][0] == TensorProto.FLOAT
    assert found["a"][1][-1] == 4


def test_a_value_that_was_described_is_described_once():
    proto = model("g (float[N,6] x) => (float[N,2] y) { a = MatMul(x, w) t = Tanh(a) y = MatMul(t, v) }",
                  w=normal(6, 4), v=normal(4, 2))  # fmt: skip
    proto.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["N", 4]))
    proto.graph.value_info.append(helper.make_tensor_value_info("t", TensorProto.FLOAT, ["N", 4]))
    exposed(proto)
    assert described(proto) == {"y": (TensorProto.FLOAT, ["N", 2]), "a": (TensorProto.FLOAT, ["N", 4])}
    assert [info.name for info in proto.graph.value_info] == ["t"]


def test_where_inference_fails_the_type_is_that_of_the_weight():
    proto = model("g (double[N,6] x) => (y) { a = MatMul(x, w) b = local.Odd(a) y = MatMul(b, v) }",
                  w=normal(6, 4, dtype="d"), v=normal(4, 2, dtype="d"))  # fmt: skip
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    exposed(proto)
    assert described(proto)["a"][0] == TensorProto.DOUBLE


def test_a_layer_inside_a_function_is_hidden():
    text = """g (float[N,6] x) => (y) { f = local.f(x) y = MatMul(f, w) }
        <domain: "local", opset_import: ["" : 18]> f (p) => (r) {
            c = Constant<value_floats=[1.0,2.0,3.0,4.0,5.0,6.0]>() m = MatMul(p, c) u = Unsqueeze(m, o)
            o = Constant<value_ints=[1]>() r = Tanh(u) }"""
    proto = model(text, w=normal(1, 2))
    look = layers_of(graphs.build(proto, Source()))
    done = expose(proto, look, look.layers.layers)
    assert [name for _, name in done.layers] == ["y"]
    assert len(done.hidden) == len(look.layers.layers) - 1


def test_what_the_model_tells_of_a_value_is_taken_where_it_cannot_be_inferred():
    proto = model("g (float[N,6] x) => (float[N,2] y) { o = com.microsoft.Odd(x) a = MatMul(o, w) y = MatMul(a, v) }",
                  microsoft=True, w=normal(3, 4), v=normal(4, 2))  # fmt: skip
    proto.graph.value_info.append(helper.make_tensor_value_info("o", TensorProto.FLOAT, ["N", 3]))
    exposed(proto)
    assert described(proto)["a"] == (TensorProto.FLOAT, ["N", 4])
