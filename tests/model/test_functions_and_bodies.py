"""Local functions, and the bodies of If, Loop and Scan."""

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers import entry, is_orthonormal, model, near_one, normal, square, tensor, unchanged_but, values, variances
from lsuv_cli import LsuvError, initialize

X = normal(64, 8, seed=1)


# Functions


def test_functions_nested_with_weights_from_the_main_graph():
    before = model(
        """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[N,8] x) => (float[N,8] y) { h = local.block(x, u, b) y = local.block(h, v, c) }
        <domain: "local", opset_import: ["" : 18, "local" : 1]>
        block (x, w, b) => (r) { d = local.dense(b, x, w) r = Relu(d) }
        <domain: "local", opset_import: ["" : 18]>
        dense (b, x, w) => (y) { m = MatMul(x, w) y = Add(m, b) }""",
        **square("u", "v"),
        b=normal(8),
        c=normal(8),
    )
    result = initialize(before, X)
    assert len(result.report.layers) == 2
    assert all(layer.status == "ok" for layer in result.report.layers)
    assert not tensor(result.model, "b").any()
    assert is_orthonormal(tensor(result.model, "u"))
    u, v = (tensor(result.model, name).astype(np.float64) for name in ("u", "v"))
    h = X @ u
    assert abs(h.var() - 1) < 1e-3
    assert abs((np.maximum(h, 0) @ v).var() - 1) < 1e-3
    assert unchanged_but(before, result.model, "u", "v", "b", "c")


def test_a_function_called_twice_with_one_weight_shares_it():
    before = model(
        """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[N,8] x, float[N,8] z) => (float[N,8] a, float[N,8] b) { a = local.f(x, u) b = local.f(z, u) }
        <domain: "local", opset_import: ["" : 18]> f (x, w) => (y) { y = MatMul(x, w) }""",
        **square("u"),
    )
    feeds = {"x": X, "z": 3 * normal(64, 8, seed=5)}
    result = initialize(before, feeds)
    found = variances(result.model, feeds, ["a", "b"])
    assert abs((found["a"] + found["b"]) / 2 - 1) < 1e-3
    assert found["b"] > 2 * found["a"]
    assert unchanged_but(before, result.model, "u")
    # A function cannot be rewired for one of its calls.
    untied = initialize(before, feeds, tied="untie")
    assert sum(layer.status == "skipped" for layer in untied.report.layers) == 1


@pytest.mark.parametrize("default", [False, True])
def test_a_constant_in_a_function_takes_its_value_from_the_call(default):
    before = model(
        """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[N,8] x) => (float[N,8] y) { z = local.f <k: tensor = float[1] {3.0}> (x) y = MatMul(z, v) }
        <domain: "local", opset_import: ["" : 18]>
        f <k> (a) => (b) { c = Constant <value: tensor = @k> () b = Mul(a, c) }""",
        **square("v"),
    )
    if default:  # the call does not say, the function does
        held = before.graph.node[0].attribute.pop()
        del before.functions[0].attribute[:]
        before.functions[0].attribute_proto.append(held)
    result = initialize(before, X)
    assert entry(result, "y").status == "ok"
    found = (3 * X) @ tensor(result.model, "v").astype(np.float64)
    assert abs(found.var() - 1) < 1e-3
    assert unchanged_but(before, result.model, "v")


def with_constants(calls, functions, **tensors):
    """A model whose functions hold float tensors of their own; `tensors` are for Constants, by the outputs' names."""
    made = model(f"g (float[N,8] x) => (float[N,8] y) {{ {calls} }} {functions}")
    for function in made.functions:
        for node in function.node:
            if node.output[0] in tensors:
                node.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(tensors[node.output[0]], node.output[0]))
    return made


def held_by(proto, name):
    """The value of a Constant in a function's body, in float64."""
    nodes = [node for function in proto.functions for node in function.node if node.output[0] == name]
    return onnx.numpy_helper.to_array(nodes[0].attribute[0].t).astype(np.float64)


EMPTY = "Constant<value = float[1] {0.0}>()"
DENSE = f"""<domain: "local", opset_import: ["" : 18]>
    dense (p) => (r) {{ w = {EMPTY} b = {EMPTY} m = MatMul(p, w) r = Add(m, b) }}"""


def dense(calls):
    return with_constants(calls, DENSE, w=normal(8, 8), b=normal(8, seed=3))


def test_the_weight_and_the_bias_of_a_function_are_initialized_in_its_body():
    before = dense("h = local.dense(x) y = Relu(h)")
    result = initialize(before, X)
    (layer,) = result.report.layers
    assert (layer.status, layer.place) == ("ok", "constant")
    w = held_by(result.model, "w")
    assert is_orthonormal(w)
    assert not held_by(result.model, "b").any()
    assert abs((X @ w).var() - 1) < 1e-3
    assert result.model.graph == before.graph


def test_calls_of_one_function_share_its_weight():
    result = initialize(dense("h = local.dense(x) r = Relu(h) y = local.dense(r)"), X)
    assert [layer.shared for layer in result.report.layers] == [True, True]
    w = held_by(result.model, "w")
    both = [X @ w, np.maximum(X @ w, 0) @ w]
    assert [layer.variance for layer in result.report.layers] == pytest.approx([y.var() for y in both], rel=1e-4)


def test_the_bias_of_a_function_is_centred():
    result = initialize(dense("r = Relu(x) y = local.dense(r)"), X, bias="center", scale="channel")
    y = np.maximum(X, 0) @ held_by(result.model, "w") + held_by(result.model, "b")
    assert np.abs(y.mean(axis=0)).max() < 1e-5
    assert np.abs(y.var(axis=0) - 1).max() < 1e-4


def test_a_function_that_a_loop_calls_too_keeps_its_weight():
    """Its weight would change inside the loop, where nothing is measured."""
    loop = """z = Loop (trips, yes, x) <body = b (int64 i, bool c, float[N,8] s) => (bool d, float[N,8] t) {
        d = Identity(c) t = local.dense(s) }> h = local.dense(z) y = MatMul(h, v)"""
    before = dense(loop)
    for name, array in {"trips": np.array(2), "yes": np.array(True), "v": normal(8, 8, seed=5)}.items():
        before.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    result = initialize(before, X)
    skipped = [layer for layer in result.report.layers if layer.status == "skipped"]
    assert any("a constant inside a function" in note for layer in skipped for note in layer.notes)
    assert result.model.functions == before.functions
    assert near_one(variances(result.model, {"x": X}, ["y"], reference=False))


def test_a_function_that_puts_out_its_weight_keeps_it():
    function = f"""<domain: "local", opset_import: ["" : 18]> f (p) => (r, w) {{ w = {EMPTY} r = MatMul(p, w) }}"""
    before = with_constants("h, u = local.f(x) k, t = local.f(h) y = MatMul(k, u)", function, w=normal(8, 8))
    with pytest.raises(LsuvError, match=r"no layer that can be initialized .*a constant inside a function"):
        initialize(before, X)


def test_a_list_of_numbers_in_a_function_is_left_alone():
    before = model(
        """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[N,2] x) => (float[N,8] y) { h = local.f(x) u = Unsqueeze(h, one) y = MatMul(u, v) }
        <domain: "local", opset_import: ["" : 18]> f (x) => (y) {
            c = Constant<value_floats = [1.0, 2.0]>() y = MatMul(x, c) }""",
        v=normal(1, 8),
        one=np.array([1]),
    )
    x = normal(64, 2)
    result = initialize(before, x)
    (left, done) = result.report.layers
    assert left.status == "skipped"
    assert "inside a function" in left.notes[0]
    assert done.status == "ok"
    assert near_one(variances(result.model, {"x": x}, ["y"]))
    assert unchanged_but(before, result.model, "v")


def test_a_bias_inside_a_function_is_kept_and_taken_into_account():
    before = model(
        """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[N,8] x) => (float[N,2] y) { y = local.f(x, w) }
        <domain: "local", opset_import: ["" : 18]> f (x, w) => (y) {
            b = Constant<value_floats=[0.5, -0.5]>() m = MatMul(x, w) y = Add(m, b) }""",
        w=normal(8, 2),
    )
    result = initialize(before, X)
    assert "bias kept" in result.report.layers[0].notes
    assert near_one(variances(result.model, {"x": X}, ["y"]))
    assert unchanged_but(before, result.model, "w")


def test_a_weight_computed_inside_a_function_is_left_alone():
    before = model(
        """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[N,8] x) => (float[N,8] y, float[N,8] z) { y = local.f(x, u) z = MatMul(x, v) }
        <domain: "local", opset_import: ["" : 18]> f (x, w) => (y) { n = Neg(w) y = MatMul(x, n) }""",
        **square("u", "v"),
    )
    result = initialize(before, X)
    assert "inside a function" in entry(result, "y").notes[0]
    assert unchanged_but(before, result.model, "v")


def test_a_function_with_a_body_and_a_body_with_a_function():
    before = model(
        """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[N,8] x) => (float[N,8] y) {
            h = local.f(x, u)
            b = If (yes) <then_branch = t () => (float[N,8] p) { p = local.g(h) },
                          else_branch = e () => (float[N,8] q) { q = Identity(h) }>
            y = MatMul(b, v) }
        <domain: "local", opset_import: ["" : 18]> f (x, w) => (y) {
            flag = Constant<value = bool {1}>() m = MatMul(x, w)
            y = If (flag) <then_branch = t () => (p) { p = Tanh(m) }, else_branch = e () => (q) { q = Identity(m) }> }
        <domain: "local", opset_import: ["" : 18]> g (x) => (y) { y = Sigmoid(x) }""",
        **square("u", "v"),
        yes=np.array(True),
    )
    result = initialize(before, X)
    assert [layer.status for layer in result.report.layers] == ["ok", "ok"]
    u, v = (tensor(result.model, name).astype(np.float64) for name in ("u", "v"))
    h = X @ u
    assert near_one({"h": h.var(), "y": (1 / (1 + np.exp(-np.tanh(h))) @ v).var()})
    assert unchanged_but(before, result.model, "u", "v")


# Bodies


IF = """g (float[N,8] x, bool flag) => (float[N,8] y) {{
    a = MatMul(x, u) r = Relu(a)
    b = If (flag) <
        then_branch = yes () => (float[N,8] p) {{ {then} }},
        else_branch = no () => (float[N,8] q) {{ q = Identity(r) }}
    >
    y = MatMul(b, v) }}"""


def flagged(text, **tensors):
    proto = model(text, **tensors)
    proto.graph.input[1].type.tensor_type.shape.SetInParent()
    return proto


@pytest.mark.parametrize("flag", [True, False])
def test_an_if_that_captures_a_layer_output(flag):
    before = flagged(IF.format(then="t = Tanh(a) p = Add(t, r)"), **square("u", "v"))
    feeds = {"x": X, "flag": np.array(flag)}
    after = initialize(before, feeds, batch_size="all").model
    assert near_one(variances(after, feeds, ["a", "y"], reference=False))
    assert unchanged_but(before, after, "u", "v")


BOTH = [{"x": X, "flag": np.array(True)}, {"x": X[::-1], "flag": np.array(False)}]


def pooled_variance(proto, name):
    """Of a value, over data that takes both branches."""
    return np.concatenate([values(proto, feeds, [name])[name] for feeds in BOTH]).var()


def test_a_layer_inside_a_body_is_left_alone_where_the_data_takes_both_branches():
    before = flagged(IF.format(then="p = MatMul(r, w)"), **square("u", "v", "w"))
    result = initialize(before, BOTH, batch_size="all")
    inside = entry(result, "p")
    assert inside.status == "skipped"
    assert "inside the body of If" in inside.notes[0]
    np.testing.assert_allclose([pooled_variance(result.model, name) for name in "ay"], 1.0, atol=1e-3)
    assert unchanged_but(before, result.model, "u", "v")


def test_a_weight_that_a_body_reads_is_not_changed_under_it():
    before = flagged(IF.format(then="p = MatMul(r, u)"), **square("u", "v"))
    result = initialize(before, BOTH, batch_size="all")
    assert "read by If" in entry(result, "a").notes[0]
    assert abs(pooled_variance(result.model, "y") - 1) < 1e-3
    assert unchanged_but(before, result.model, "v")
    untied = initialize(before, BOTH, batch_size="all", tied="untie").model
    np.testing.assert_allclose([pooled_variance(untied, name) for name in "ay"], 1.0, atol=1e-3)
    assert (tensor(untied, "u") == tensor(before, "u")).all()


# A branch that all of the data takes

INSIDE = """g (float[N,8] x, bool flag) => (float[N,8] y) {
    a = MatMul(x, u) r = Relu(a)
    b = If (flag) <
        then_branch = yes () => (float[N,8] p) <float[8,8] w> { s = MatMul(r, w) t = Tanh(s) p = MatMul(t, u2) },
        else_branch = no () => (float[N,8] q) { k = MatMul(r, u3) q = Relu(k) }
    >
    y = MatMul(b, v) }"""


def with_weight_inside():
    """A network most of whose layers are in the branches of an If, one weight among the branch's own initializers."""
    proto = flagged(INSIDE.replace("<float[8,8] w>", ""), **square("u", "v", "u2", "u3"))
    held = next(a.g for n in proto.graph.node if n.op_type == "If" for a in n.attribute if a.name == "then_branch")
    held.initializer.append(onnx.numpy_helper.from_array(normal(8, 8, seed=7), "w"))
    return proto


def inlined(proto, taken):
    """The network with the nodes of one branch in place of the If, by hand."""
    flat = onnx.ModelProto()
    flat.CopyFrom(proto)
    del flat.graph.node[:]
    del flat.graph.input[1]
    for node in proto.graph.node:
        if node.op_type != "If":
            flat.graph.node.append(node)
            continue
        branch = next(a.g for a in node.attribute if a.name == ("then_branch" if taken else "else_branch"))
        flat.graph.node.extend(branch.node)
        flat.graph.initializer.extend(branch.initializer)
        flat.graph.node.append(helper.make_node("Identity", [branch.output[0].name], [node.output[0]]))
    return flat


@pytest.mark.parametrize(("flag", "layers"), [(True, ["a", "s", "p", "y"]), (False, ["a", "k", "y"])])
def test_the_layers_of_a_branch_that_all_data_takes_are_initialized_where_they_live(flag, layers):
    before = with_weight_inside()
    result = initialize(before, {"x": X, "flag": np.array(flag)}, batch_size="all")
    assert near_one(variances(inlined(result.model, flag), {"x": X}, layers, reference=False))
    statuses = Counter(layer.status for layer in result.report.layers)
    assert statuses == {"ok": len(layers), "skipped": 5 - len(layers)}
    # The other branch is as it was, to the last bit.
    kept = ["u3"] if flag else ["u2"]
    assert all((tensor(result.model, name) == tensor(before, name)).all() for name in kept)


def test_a_weight_that_the_other_branch_reads_too_is_not_changed_under_it():
    before = flagged(INSIDE.replace("<float[8,8] w>", "").replace("u3", "u2").replace("w)", "u4)"),
                     **square("u", "v", "u2", "u4"))  # fmt: skip
    result = initialize(before, {"x": X, "flag": np.array(True)}, batch_size="all")
    left = next(layer for layer in result.report.layers if layer.weight == "u2")
    assert left.status == "skipped"
    assert "does not take" in left.notes[0]
    assert (tensor(result.model, "u2") == tensor(before, "u2")).all()


def test_a_loop_that_captures_a_layer_output_and_carries_a_value():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            a = MatMul(x, u) n = Constant<value_int=3>()
            z = Sub(a, a)
            l = Loop (n, go, z) <body = step (int64 i, bool c, float[N,8] s) => (bool d, float[N,8] t)
                { d = Identity(c) h = Tanh(a) t = Add(s, h) }>
            y = MatMul(l, v) }""",
        **square("u", "v"),
        go=np.array(True),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["a", "y"], reference=False))
    assert unchanged_but(before, after, "u", "v")


def test_a_scan_over_a_layer_output():
    before = model(
        """g (float[5,N,8] x) => (float[5,N,8] y) {
            a = MatMul(x, u) z = Constant<value = float[8] {0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0}>()
            f, s = Scan <num_scan_inputs=1, body = step (float[8] c, float[N,8] e) => (float[8] d, float[N,8] o)
                { d = ReduceMean<keepdims=0>(e, k) o = Add(e, c) }> (z, a)
            y = MatMul(s, v) }""",
        **square("u", "v"),
        k=np.array([0]),
    )
    x = normal(5, 16, 8, seed=1)
    after = initialize(before, x, batch_size="all").model
    assert near_one(variances(after, {"x": x}, ["a", "y"], reference=False))
    assert unchanged_but(before, after, "u", "v")
