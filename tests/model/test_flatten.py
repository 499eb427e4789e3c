# mypy: disable-error-code="union-attr,arg-type"
"""The flat list of nodes: values of Constant nodes, names of bodies, functions that are counted and not written out."""

import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers import model, normal, values
from lsuv_cli.errors import ModelError
from lsuv_cli.model import flatten, views
from lsuv_cli.model.flatten import constant_value, free_name, inner_graphs, label, outer_reads
from lsuv_cli.model.layers import find
from working_copies import graph_of


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"value": numpy_helper.from_array(np.array([1.0, 2.0], np.float32))}, np.array([1, 2], np.float32)),
        ({"value_float": 1.5}, np.array(1.5, np.float32)),
        ({"value_floats": [1.5, 2.5]}, np.array([1.5, 2.5], np.float32)),
        ({"value_int": 3}, np.array(3, np.int64)),
        ({"value_ints": [3, 4]}, np.array([3, 4], np.int64)),
    ],
)
def test_the_numbers_of_a_constant_node(attributes, expected):
    found = numpy_helper.to_array(constant_value(helper.make_node("Constant", [], ["k"], **attributes), "k"))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype


def test_the_texts_of_a_constant_node():
    one = constant_value(helper.make_node("Constant", [], ["k"], value_string="a"), "k")
    assert (one.name, list(one.dims), list(one.string_data), one.data_type) == ("k", [], [b"a"], TensorProto.STRING)
    two = constant_value(helper.make_node("Constant", [], ["k"], value_strings=["a", "b"]), "k")
    assert (list(two.dims), list(two.string_data), two.data_type) == ([2], [b"a", b"b"], TensorProto.STRING)


def test_what_is_no_constant_node():
    assert constant_value(helper.make_node("Constant", [], ["k"], value_float=1.0, domain="other"), "k") is None
    assert constant_value(helper.make_node("Constants", [], ["k"], value_float=1.0), "k") is None
    assert constant_value(helper.make_node("Constant", [], ["k"]), "k") is None
    assert constant_value(helper.make_node("Constant", [], ["k"], unknown=1.0), "k") is None
    spelled_out = helper.make_node("Constant", [], ["k"], value_float=1.0, domain="ai.onnx")
    assert constant_value(spelled_out, "k") is not None


def sparse():
    values = numpy_helper.from_array(np.array([1, 2], np.float32), "s")
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([3, 9]), "i"), [8, 4])


def test_a_sparse_constant_is_no_weight():
    before = model("g (float[N,8] x) => (y) { y = MatMul(x, s) }")
    before.graph.node.insert(0, helper.make_node("Constant", [], ["s"], sparse_value=sparse()))
    flat = flatten.flatten(before, {})
    assert list(flat.sparse) == ["s"]
    assert list(flat.tensors) == []
    assert [node.op_type for node in flat.nodes] == ["MatMul"]


def test_names_that_are_taken():
    assert free_name("a", {"b"}) == "a"
    assert free_name("a", {"a"}) == "a_2"
    assert free_name("a", {"a", "a_2", "a_3"}) == "a_4"
    assert free_name("a", lambda name: len(name) < 3) == "a_2"


def test_the_name_of_a_node():
    assert label(helper.make_node("Op", ["x"], ["y"], "n")) == "n"
    assert label(helper.make_node("Op", ["x"], ["", "z"])) == "z"
    assert label(helper.make_node("Op", ["x"], [])) == ""


def test_what_a_body_reads_from_outside():
    deep = helper.make_graph([helper.make_node("Add", ["p", "a"], ["q"])], "deep", [], [onnx.ValueInfoProto(name="q")])
    body = helper.make_graph(
        [helper.make_node("Mul", ["a", "", "k", "i"], ["p"]), helper.make_node("If", ["c"], ["r"], then_branch=deep)],
        "body",
        [onnx.ValueInfoProto(name="i")],
        [onnx.ValueInfoProto(name="r"), onnx.ValueInfoProto(name="o")],
        [numpy_helper.from_array(np.float32(1), "k")],
        sparse_initializer=[sparse()],
    )
    body.node.append(helper.make_node("Neg", ["s"], ["t"]))
    assert list(outer_reads(body)) == ["a", "c", "a", "o"]
    several = onnx.NodeProto()
    several.attribute.append(onnx.AttributeProto(name="gs", type=onnx.AttributeProto.GRAPHS, graphs=[deep, body]))
    assert [g.name for g in inner_graphs(several)] == ["deep", "body"]


def nested(depth):
    """Functions that call one another, `depth` of them, twice each."""

    def call_of(k, op, source, target):
        local = k < depth
        return helper.make_node(f"F{k}" if local else op, [source], [target], domain="local" if local else "")

    functions = [
        helper.make_function(
            "local", f"F{k}", ["x"], ["y"],
            [call_of(k + 1, "Relu", "x", "t"), call_of(k + 1, "Neg", "t", "y")],
            [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)],
        )
        for k in range(depth)
    ]  # fmt: skip
    call = helper.make_node("F0", ["x"], ["y"], domain="local")
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    return helper.make_model(
        helper.make_graph([call], "g", info[:1], info[1:]), functions=functions, opset_imports=opsets
    )


def test_a_bomb_of_functions_is_counted_and_not_written_out(monkeypatch):
    monkeypatch.setattr(flatten, "MOST_NODES", 16)
    assert len(flatten.flatten(nested(4), {}).nodes) == 16
    with pytest.raises(ModelError, match="nodes once its functions are written out"):
        flatten.flatten(nested(5), {})


def test_bodies_are_nested_to_a_bound(monkeypatch):
    monkeypatch.setattr(flatten, "DEEPEST", 4)
    assert len(flatten.flatten(nested(4), {}).nodes) == 16
    with pytest.raises(ModelError, match="nested more than 4 deep at 'y/"):
        flatten.flatten(nested(5), {})


def test_functions_that_call_one_another_without_end_are_refused_in_one_line():
    """Deeper than Python itself can call."""
    deep = nested(3 * sys.getrecursionlimit())
    with pytest.raises(ModelError, match="nested more than 100 deep"):
        flatten.flatten(deep, {})


def ifs(depth):
    """Ifs within Ifs, and the branches that they take."""
    value, flag = (helper.make_tensor_value_info(*each) for each in (("", 1, [2]), ("c", TensorProto.BOOL, [])))

    def graph(k):
        out = onnx.ValueInfoProto()
        out.CopyFrom(value)
        out.name = f"y{k}"
        if k == depth:
            return helper.make_graph([helper.make_node("Neg", ["x"], [out.name])], "g", [], [out])
        other = helper.make_graph(
            [helper.make_node("Abs", ["x"], [f"e{k}"])], "e", [], [onnx.ValueInfoProto(name=f"e{k}")]
        )
        node = helper.make_node("If", ["c"], [out.name], then_branch=graph(k + 1), else_branch=other)
        return helper.make_graph([node], "g", [], [out])

    main = graph(0)
    main.input.extend([helper.make_tensor_value_info("x", 1, [2]), flag])
    # The first output of an If inside an If is not the outer one's: an Identity makes that.
    names, name = {}, "y0"
    for k in range(depth):
        names[name] = True
        name = f"{name}/y{k + 1}"
    return helper.make_model(main, opset_imports=[helper.make_opsetid("", 18)]), names


def test_branches_are_nested_to_a_bound(monkeypatch):
    monkeypatch.setattr(flatten, "DEEPEST", 4)
    found = flatten.flatten(*ifs(4))
    assert [node.op_type for node in found.nodes] == ["Neg", "Identity", "Identity", "Identity"]
    with pytest.raises(ModelError, match="nested more than 4 deep at 'y0/"):
        flatten.flatten(*ifs(5))


def test_the_outputs_of_a_branch_that_is_taken():
    """One of its nodes makes each output, unless the branch puts a value out twice or makes none of it."""
    proto = model(
        """g (float[2] x, bool c) => (p, q, r, s) {
        p, q, r, s = If (c) <
            then_branch = t () => (float[2] a, float[2] b, float[2] a, float[2] x) { a = Neg(x) b = Abs(x) },
            else_branch = e () => (float[2] d, float[2] d, float[2] d, float[2] d) { d = Relu(x) }> }"""
    )
    found = flatten.flatten(proto, {"p": True}).nodes
    assert [(node.op_type, *node.input, *node.output) for node in found] == [
        ("Neg", "x", "p/a"),
        ("Abs", "x", "q"),
        ("Identity", "p/a", "p"),
        ("Identity", "p/a", "r"),
        ("Identity", "x", "s"),
    ]


# Nodes that look like layers


QUANTIZED = [
    "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulNBits", "QGemm", "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat", "MatMulBnb4", "MatMulFpQ4", "DynamicQuantizeLSTM",
]  # fmt: skip
OPAQUE = [
    "Attention", "QAttention", "MultiHeadAttention", "PackedAttention", "LongformerAttention", "DecoderAttention",
    "MoE", "QMoE", "DeformConv", "GemmFastGelu", "FusedMatMulActivation", "NhwcFusedConv", "NhwcConv", "GemmFloat8",
]  # fmt: skip


def reasons(op, second="w"):
    graph = graph_of(
        f"g (float[N,4] x, float[N,4] z) => (y) {{ y = com.microsoft.{op}(x, {second}) }}",
        microsoft=True,
        w=normal(4, 4),
    )
    return [(item.op, item.reason) for item in find(graph).skipped]


@pytest.mark.parametrize("op", QUANTIZED)
def test_quantized_operators_have_a_line_with_the_reason(op):
    assert reasons(op) == [(op, "quantized weights cannot be initialized; start from the float model")]


@pytest.mark.parametrize("op", OPAQUE)
def test_operators_with_a_weight_inside_have_a_line_with_the_reason(op):
    assert reasons(op) == [(op, f"{op} is no single matrix product")]
    assert reasons(op, "z") == []


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
@pytest.mark.parametrize(("version", "inlined"), [(18, True), (17, True), (12, False)])
def test_a_function_is_inlined_where_its_operators_have_the_model_s_versions(domain, version, inlined):
    """Relu is the same in opsets 14 to 18, and another in 12."""
    body = [helper.make_node("Relu", ["x"], ["y"], domain=domain)]
    function = helper.make_function("local", "F", ["x"], ["y"], body, [helper.make_opsetid(domain, version)])
    call = helper.make_node("F", ["x"], ["y"], domain="local")
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("local", 1)]
    graph = helper.make_graph([call], "g", info[:1], info[1:])
    flat = flatten.flatten(helper.make_model(graph, functions=[function], opset_imports=opsets), {})
    assert [node.op_type for node in flat.nodes] == (["Relu"] if inlined else ["F"])
    assert len(flat.functions) == (not inlined)


@pytest.mark.parametrize(
    ("axis", "shape"), [(0, (1, 24)), (1, (2, 12)), (2, (6, 4)), (3, (24, 1)), (-1, (6, 4)), (-3, (1, 24))]
)
def test_a_flattened_shape(axis, shape):
    view = views.flattened((2, 3, 4), axis)
    array = normal(2, 3, 4)
    assert view.after == shape
    np.testing.assert_array_equal(view.forward(array), array.reshape(shape))
    np.testing.assert_array_equal(view.backward(array.reshape(shape)), array)


def run_flat(text, **feeds):
    """What a model's flat list of nodes computes, by unoptimized onnxruntime."""
    before = model(text)
    flat = flatten.flatten(before, {})
    body = helper.make_graph(flat.nodes, "flat", before.graph.input, before.graph.output)
    proto = helper.make_model(body, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return values(proto, feeds, [output.name for output in before.graph.output]).values()


X = np.array([[1, -2, 3, -4]], np.float32)


def test_a_function_that_puts_out_its_input_or_one_value_twice():
    text = """g (float[N,4] x) => (float[N,4] y, float[N,4] z, float[N,4] t) { y, z, t = local.f(x) }
        <domain: "local", opset_import: ["" : 18]> f (a) => (a, b, b) { b = Neg(a) }"""
    for found, expected in zip(run_flat(text, x=X), (X, -X, -X), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_names_of_a_functions_body_that_the_main_graph_has_too():
    text = """g (float[N,4] x) => (float[N,4] y, float[N,4] z) { n = Abs(x) "call/t" = Neg(n) [call] y = local.f(x)
            z = Exp("call/t") }
        <domain: "local", opset_import: ["" : 18]> f (a) => (b) { t = Relu(a) b = Sqrt(t) }"""
    before = model(text.replace('"call/t"', "other"))
    before.graph.node[1].output[0] = before.graph.node[3].input[0] = "call/t"
    nodes = flatten.flatten(before, {}).nodes
    made = [name for node in nodes for name in node.output]
    assert len(made) == len(set(made)) == 5
    before = model(text.replace('"call/t"', "other"))
    before.graph.initializer.append(numpy_helper.from_array(np.float32(1), "call/t"))  # which no node reads
    flat = flatten.flatten(before, {})
    assert flat.tensors.keys().isdisjoint(name for node in flat.nodes for name in node.output)


def test_the_inputs_of_a_body_shadow_the_values_of_the_function_around_it():
    text = """g (float[3,4] x) => (float[3,4] y) { y = local.f(x) }
        <domain: "local", opset_import: ["" : 18]>
        f (a) => (b) { b = Scan<num_scan_inputs=1, body = h (float[4] a) => (float[4] o) { o = Neg(a) }>(a) }"""
    (found,) = run_flat(text, x=np.vstack([X, 2 * X, 3 * X]))
    np.testing.assert_array_equal(found, -np.vstack([X, 2 * X, 3 * X]))


@pytest.mark.parametrize("depth", [60, 61])
def test_a_tower_of_functions_is_refused_at_once(depth):
    """2^60 nodes: each function is counted once."""
    with pytest.raises(ModelError, match="nodes once its functions are written out"):
        flatten.flatten(nested(depth), {})


def test_a_node_inside_a_function_is_named_after_the_call():
    text = """g (float[N,4] x) => (float[N,4] y) { [first] a = local.f(x) [second] y = local.f(a) }
        <domain: "local", opset_import: ["" : 18]> f (p) => (r) { [inner] t = Neg(p) r = Relu(t) }"""
    nodes = flatten.flatten(model(text), {}).nodes
    assert [node.name for node in nodes] == ["first/inner", "", "second/inner", ""]
    again = flatten.flatten(model(text.replace("second", "first")), {}).nodes
    assert len({name for node in again for name in node.output}) == 4  # values differ, whatever calls are named


@pytest.mark.parametrize(("given", "slope"), [("<slope=0.5>", 0.5), ("", 0.25)])
def test_an_attribute_of_a_call_reaches_the_nodes_of_bodies_inside_the_function(given, slope):
    text = f"""g (float[N,4] x, bool c) => (float[N,4] y) {{ y = local.f{given}(x, c) }}
        <domain: "local", opset_import: ["" : 18]> f <slope: float = 0.25> (a, c) => (b) {{
            b = If(c) <then_branch = t () => (float[N,4] o) {{ o = LeakyRelu<alpha: float = @slope>(a) }},
                       else_branch = e () => (float[N,4] o) {{ o = Neg(a) }}> }}"""
    (found,) = run_flat(text, x=X, c=np.array(True))
    np.testing.assert_allclose(found, np.where(X > 0, X, slope * X))
