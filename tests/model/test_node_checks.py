"""Malformed nodes are refused, as onnxruntime refuses them; none is an internal error."""

import contextlib

import numpy as np
import onnxruntime as ort
import pytest
from onnx import AttributeProto, helper

from helpers import model, normal
from lsuv_cli import expose, initialize, inspect, strip
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.model.node_checks import check

X = normal(32, 8, seed=1)
TEXTS = {
    "If": """z = If(c) <then_branch = t () => (p) { p = MatMul(x, w) }, else_branch = e () => (q) { q = Relu(x) }>""",
    "MatMul": "z = MatMul(x, w)",
    "Gemm": "z = Gemm<transB=1, alpha=2.0>(x, w)",
    "Conv": "u = Unsqueeze(x, one) z = Conv<pads=[1,1]>(u, k)",
    "Identity": "v = Identity(w) z = MatMul(x, v)",
    "Transpose": "v = Transpose<perm=[1,0]>(w) z = MatMul(x, v)",
    "BatchNormalization": "y = MatMul(x, w) z = BatchNormalization(y, s, s, s, s)",
    "Cast": "v = Cast<to=1>(half) z = MatMul(x, v)",
    "Flatten": "v = Flatten<axis=1>(w) z = MatMul(x, v)",
    "Concat": "v = Concat<axis=0>(w) z = MatMul(x, v)",
    "Softmax": "y = MatMul(x, w) z = Softmax<axis=-1>(y)",
    "Gather": "y = Gather<axis=0>(w, one) z = MatMul(x, w)",
    "GRU": "y, h = GRU<hidden_size=4>(r, w3, v3) z = MatMul(x, w)",
    "Einsum": 'z = Einsum<equation="ij,jk->ik">(x, w)',
    "Dropout": "y = Dropout(x) z = MatMul(y, w)",
    "Mul": "y = MatMul(x, w) z = Mul(y, y)",
}


def net(op):
    tensors = {"w": normal(8, 8), "k": normal(4, 1, 3), "s": np.ones(8, np.float32), "one": np.array([1]),
               "c": np.array(True), "half": normal(8, 8, dtype=np.float16),
               "r": normal(3, 2, 8), "w3": normal(1, 12, 8), "v3": normal(1, 12, 4)}  # fmt: skip
    return model(f"g (float[N,8] x) => (z) {{ {TEXTS[op]} w9 = Identity(w) }}", **tensors)


def taken(proto):
    try:
        ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True


@pytest.mark.parametrize("damage", ["no inputs", "fewer inputs", "an input without a name", "no outputs"])
@pytest.mark.parametrize("op", TEXTS)
def test_a_node_that_lacks_something_is_refused(op, damage):
    proto = net(op)
    assert taken(proto)
    node = next(n for n in proto.graph.node if n.op_type == op)
    if damage == "no outputs":
        del node.output[:]
    elif damage == "an input without a name":
        node.input[0] = ""
    else:
        del node.input[0 if damage == "no inputs" else -1 :]
    refused(proto)


ATTRIBUTES = [op for op in TEXTS if any(node.op_type == op and node.attribute for node in net(op).graph.node)]


@pytest.mark.parametrize("kind", [None, *AttributeProto.AttributeType.values()])
@pytest.mark.parametrize("op", ATTRIBUTES)
def test_an_attribute_that_is_missing_or_of_another_type_is_refused(op, kind):
    proto = net(op)
    node = next(n for n in proto.graph.node if n.op_type == op)
    if kind is None:
        del node.attribute[:]
    else:
        node.attribute[0].type = kind
    refused(proto)


def refused(proto):
    if taken(proto):
        return  # what the node lacks is optional
    with pytest.raises(ModelError):
        initialize(proto, X, tied="untie")
    with contextlib.suppress(ModelError):  # without data no session is made, which is where onnxruntime refuses a node
        inspect(proto)


def test_the_message_names_the_node_and_what_it_lacks():
    proto = net("If")
    del proto.graph.node[0].input[:]
    with pytest.raises(ModelError, match=r"node 'z' \(If\) has 0 of at least 1 input; export the model again"):
        initialize(proto, X)


def test_optional_inputs_may_lack_their_name_and_unknown_operators_anything():
    proto = model("g (float[N,8] x) => (y) { a = Clip(x, , top) y = MatMul(a, w) }", w=normal(8, 4), top=np.float32(2))
    assert initialize(proto, X).report.exit_code == 0
    unknown = model("g (float[N,8] x) => (y) { a = NoSuchOperator() y = MatMul(x, w) }", w=normal(8, 4))
    assert [layer.name for layer in inspect(unknown).layers] == ["y"]


TYPES = {
    "a Cast of a weight": lambda proto: proto.graph.node[0].attribute[0],
    "a Cast of a value": lambda proto: proto.graph.node[2].attribute[0],
    "a weight": lambda proto: proto.graph.initializer[0],
    "another tensor": lambda proto: proto.graph.initializer[1],
    "an input": lambda proto: proto.graph.input[0].type.tensor_type,
    "an output": lambda proto: proto.graph.output[0].type.tensor_type,
}


@pytest.mark.parametrize("number", [0, 99, 65536, -1])
@pytest.mark.parametrize("place", TYPES)
def test_a_type_that_onnx_does_not_have_is_refused(place, number):
    proto = model(
        "g (float[N,8] x) => (float[N,8] z) { v = Cast<to=1>(w) y = MatMul(x, v) c = Cast<to=1>(y) z = Add(c, b) }",
        w=normal(8, 8), b=normal(8),
    )  # fmt: skip
    held = TYPES[place](proto)
    field = next(name for name in ("i", "data_type", "elem_type") if name in held.DESCRIPTOR.fields_by_name)
    setattr(held, field, number)
    if taken(proto):
        return
    with pytest.raises(LsuvError):
        initialize(proto, X)
    with contextlib.suppress(LsuvError):
        inspect(proto)
    with contextlib.suppress(LsuvError):
        expose(proto)
    with contextlib.suppress(LsuvError):
        strip(proto)


def test_an_equation_that_is_no_text():
    node = helper.make_node("Einsum", ["x", "w"], ["y"], equation=b"ij,\xff->ik")
    with pytest.raises(ModelError, match="which is no equation"):
        check(node, 18)


@pytest.mark.parametrize("version", [2**63 - 1, 2**31, -1, -(2**63)])
@pytest.mark.parametrize("where", ["model", "function"])
def test_a_version_of_the_operator_set_beyond_all_numbers_is_refused_in_one_line(version, where):
    text = """<ir_version: 9, opset_import: ["": 18, "local": 1]>
        g (float[N,4] x) => (y) { h = local.f(x) y = MatMul(h, w) }
        <domain: "local", opset_import: ["": 18]> f (x) => (y) { y = Relu(x) }"""
    net = model(text, w=normal(4, 4))
    sets = net.opset_import if where == "model" else net.functions[0].opset_import
    sets[0].version = version
    with pytest.raises(LsuvError) as problem:
        initialize(net, normal(8, 4))
    assert "\n" not in str(problem.value)
