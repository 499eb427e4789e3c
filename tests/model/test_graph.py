"""The shapes of graphs: order, branches, several inputs and outputs, sequences; and that all else stays."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import lsuv_cli
from helpers import model, near_one, normal, square, tensor, unchanged_but, values, variances
from lsuv_cli import initialize
from lsuv_cli.errors import ModelError
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.graph import Unknown
from working_copies import graph_of

X = normal(64, 8, seed=1)


# Order


def test_nodes_out_of_order_are_repaired_in_the_working_copy_only():
    before = model(
        "g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, u) r = Tanh(a) y = MatMul(r, v) }", **square("u", "v")
    )
    nodes = list(before.graph.node)
    del before.graph.node[:]
    before.graph.node.extend(reversed(nodes))
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["a", "y"], reference=False))
    assert unchanged_but(before, after, "u", "v")


def test_layers_listed_in_another_order_than_they_run_are_scaled_in_the_order_they_run():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            a = MatMul(x, u) r = Relu(a) b = MatMul(r, v) s = Tanh(b) y = MatMul(s, w) }""",
        **square("w", "v", "u"),
    )
    result = initialize(before, X)
    assert [layer.name for layer in result.report.layers] == ["a", "b", "y"]
    assert near_one(variances(result.model, {"x": X}))


def test_a_cycle_is_an_error_that_names_a_node():
    before = model("g (float[N,8] x) => (float[N,8] y) { a = Add(x, y) y = MatMul(a, w) }", **square("w"))
    with pytest.raises(ModelError, match="cycle through node 'a'"):
        initialize(before, X)


def test_a_value_that_nothing_makes_is_an_error_that_names_it():
    before = model("g (float[N,8] x) => (float[N,8] y) { a = Add(x, lost) y = MatMul(a, w) }", **square("w"))
    with pytest.raises(ModelError, match="reads 'lost', which is no input"):
        initialize(before, X)


def test_optional_inputs_and_outputs_that_are_absent():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            c = Clip(x, , top) d, = Dropout(c) y = MatMul(d, w) }""".replace("d, =", "d ="),
        **square("w"),
        top=np.float32(2),
    )
    assert "" in before.graph.node[0].input
    assert near_one(variances(initialize(before, X).model, {"x": X}))


def test_first_outputs_that_are_absent():
    """A recurrent layer of which only the last state is used, between layers, twice."""
    before = model(
        """g (float[T,N,8] x) => (float y) {
            a = MatMul(x, u) gap, s = RNN<hidden_size=8>(a, w, r) t = Tanh(s) b = MatMul(t, v)
            blank, o = RNN<hidden_size=8>(b, w, r) y = MatMul(o, z) }""",
        **square("u", "v", "z"),
        w=normal(1, 8, 8),
        r=normal(1, 8, 8),
    )
    for node in before.graph.node:
        if node.op_type == "RNN":
            node.output[0] = ""
    x = normal(5, 16, 8, seed=1)
    after = initialize(before, x, batch_size="all").model
    assert near_one(variances(after, {"x": x}, ["a", "b", "y"], reference=False))
    assert unchanged_but(before, after, "u", "v", "z")


# Branches


def test_residual():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            a = MatMul(x, u) r = Relu(a) b = MatMul(r, v) s = Add(b, a) t = Relu(s) y = MatMul(t, w) }""",
        **square("u", "v", "w"),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert unchanged_but(before, after, "u", "v", "w")


def test_a_shortcut_around_everything():
    before = model(
        "g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, u) b = MatMul(a, v) s = Add(b, x) y = MatMul(s, w) }",
        **square("u", "v", "w"),
    )
    assert near_one(variances(initialize(before, 3 * X).model, {"x": 3 * X}, ["a", "b", "y"]))


def test_dense_block():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            a = MatMul(x, u) r = Relu(a) c = Concat<axis=1>(x, r) b = MatMul(c, v) s = Relu(b)
            d = Concat<axis=1>(x, r, s) y = MatMul(d, w) }""",
        u=normal(8, 8),
        v=normal(16, 8),
        w=normal(24, 8),
    )
    assert near_one(variances(initialize(before, X).model, {"x": X}))


def test_inception():
    before = model(
        """g (float[N,3,9,9] x) => (float y) {
            s = Conv(x, a) r = Relu(s)
            b1 = Conv(r, b) b2 = Conv(r, c) p2 = Relu(b2) b3 = Conv<pads=[1,1,1,1]>(p2, d)
            m = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(r) b4 = Conv(m, e)
            j = Concat<axis=1>(b1, b3, b4) k = Relu(j) y = Conv(k, f) }""",
        a=normal(4, 3, 3, 3),
        b=normal(2, 4, 1, 1),
        c=normal(3, 4, 1, 1),
        d=normal(4, 3, 3, 3),
        e=normal(2, 4, 1, 1),
        f=normal(5, 8, 3, 3),
    )
    x = normal(8, 3, 9, 9, seed=1)
    result = initialize(before, x)
    assert near_one(variances(result.model, {"x": x}))


def test_several_inputs_and_outputs_one_of_them_a_layers():
    before = model(
        """g (float[N,8] x, float[N,5] z) => (float[N,8] a, float[N,8] b, float[N,8] y) {
            a = MatMul(x, u) b = MatMul(z, v) s = Mul(a, b) y = MatMul(s, w) }""",
        u=normal(8, 8),
        v=normal(5, 8),
        w=normal(8, 8),
    )
    feeds = {"x": X, "z": 4 * normal(64, 5, seed=2)}
    after = initialize(before, feeds).model
    assert near_one(variances(after, feeds))
    assert unchanged_but(before, after, "u", "v", "w")


def test_a_layer_output_that_is_a_graph_output_and_has_a_bias_behind_it():
    before = model(
        "g (float[N,8] x) => (float[N,8] a, float[N,8] y) { a = MatMul(x, u) b = Add(a, c) y = MatMul(b, v) }",
        **square("u", "v"),
        c=normal(8),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["a", "y"]))
    assert unchanged_but(before, after, "u", "v")


def test_a_branch_that_leads_nowhere_and_initializers_that_nothing_reads():
    before = model(
        "g (float[N,8] x) => (float[N,8] y) { dead = MatMul(x, u) y = MatMul(x, v) }",
        **square("u", "v"),
        idle=normal(3, 3),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert unchanged_but(before, after, "u", "v")


def test_an_input_that_no_layer_needs():
    before = model(
        "g (float[N,8] x, float[N,2] other) => (float[N,8] y, float[N,2] z) { y = MatMul(x, w) z = Relu(other) }",
        **square("w"),
    )
    feeds = {"x": X, "other": normal(64, 2)}
    assert near_one(variances(initialize(before, feeds).model, feeds))


def test_two_factors_in_a_row_that_make_onnxruntime_lose_a_value():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            a = Mul(x, half) b = Mul(a, half) c = MatMul(a, u) y = MatMul(b, v) }""",
        **square("u", "v"),
        half=np.float32(0.5),
    )
    assert near_one(variances(initialize(before, X).model, {"x": X}))


# Kinds of inputs


def test_token_ids():
    before = model(
        "g (int64[N,5] ids) => (float[N,5,4] y) { e = Gather(table, ids) y = MatMul(e, w) }",
        table=normal(20, 8),
        w=normal(8, 4),
    )
    ids = np.arange(80).reshape(16, 5) % 20
    after = initialize(before, ids).model
    assert near_one(variances(after, {"ids": ids}, ["y"]))
    assert unchanged_but(before, after, "w")


def test_strings():
    before = model(
        """g (string[N] word, float[N,8] x) => (float[N,4] y) {
            l = com.microsoft.Tokenizer<mark=0, pad_value="", mincharnum=1, separators=[" "]>(word) s = Size(l)
            h = MatMul(x, w) y = Relu(h) }""",
        microsoft=True,
        w=normal(8, 4),
    )
    words = np.array(["good init"] * 64, object)
    after = initialize(before, {"word": words, "x": X}).model
    assert near_one(variances(after, {"word": words, "x": X}, ["h"], reference=False))


def test_strings_that_a_layer_depends_on():
    before = model("g (string[N,8] word) => (float[N,4] y) { x = Cast<to=1>(word) y = MatMul(x, w) }", w=normal(8, 4))
    words = X.astype(str).astype(object)
    after = initialize(before, words).model
    assert near_one(variances(after, {"word": words}, ["y"], reference=False))


def test_an_input_without_axes():
    before = model(
        "g (float[N,8] x, float rate) => (float[N,4] y) { s = Mul(x, rate) y = MatMul(s, w) }", w=normal(8, 4)
    )
    before.graph.input[1].type.tensor_type.shape.SetInParent()
    feeds = {"x": X, "rate": np.array(0.25, np.float32)}
    after = initialize(before, feeds, batch_size="all").model
    assert near_one(variances(after, feeds, ["y"]))


def test_an_output_without_axes():
    before = model("g (float[8] x) => (float y) { y = MatMul(x, w) }", w=normal(8))
    result = initialize(before, X)  # each row is one run
    after = result.model
    found = [float(values(after, {"x": row}, ["y"])["y"]) for row in X]
    assert abs(np.var(found) - 1) < 1e-3


# Other kinds of values


def test_a_sequence_that_crosses_from_one_stage_to_the_next():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            a = MatMul(x, u) t = Tanh(a) list = SequenceConstruct(t, x) b = MatMul(t, v) s = Tanh(b)
            i = Constant<value_int=1>() e = SequenceAt(list, i) m = Add(s, e) y = MatMul(m, w) }""",
        **square("u", "v", "w"),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["a", "b", "y"]))


def test_an_optional_that_crosses_from_one_stage_to_the_next():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            a = MatMul(x, u) t = Tanh(a) maybe = Optional(t) b = MatMul(t, v) s = Tanh(b)
            e = OptionalGetElement(maybe) m = Add(s, e) y = MatMul(m, w) }""",
        **square("u", "v", "w"),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["a", "b", "y"], reference=False))


def test_a_model_that_imports_only_another_domain():
    before = model(
        "g (float[N,8] x) => (float[N,4] y) { y = com.microsoft.FusedMatMul(x, w) }", microsoft=True, w=normal(8, 4)
    )
    del before.opset_import[0]
    assert [o.domain for o in before.opset_import] == ["com.microsoft"]
    result = initialize(before, X)
    assert near_one({"y": float((X.astype(np.float64) @ tensor(result.model, "w")).var())})


def test_a_random_operator_is_no_constant():
    before = model(
        """g (float[64,8] x) => (float[64,4] y) {
            r = RandomNormal<shape=[64,8], seed=1.0>() s = Add(x, r) y = MatMul(s, w) }""",
        w=normal(8, 4),
    )
    result = initialize(before, X)
    assert [layer.name for layer in result.report.layers] == ["y"]


# Everything else stays


def test_what_is_not_a_weight_is_the_same_to_the_last_byte():
    before = model(
        "g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, u) b = Add(a, c) r = Relu(b) y = MatMul(r, v) }",
        **square("u", "v"),
        c=normal(8),
        idle=normal(2, 2),
    )
    before.doc_string, before.producer_name, before.domain, before.model_version = "why", "pytest", "org.acme", 3
    before.metadata_props.add(key="author", value="someone")
    before.graph.doc_string = "a graph"
    before.graph.node[0].doc_string = "a node"
    before.graph.initializer[0].doc_string = "a tensor"
    before.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["N", 8]))
    before.graph.quantization_annotation.add(tensor_name="a")
    before.graph.metadata_props.add(key="k", value="v")
    copy = onnx.ModelProto()
    copy.CopyFrom(before)
    result = initialize(before, X)
    assert before.SerializeToString() == copy.SerializeToString()  # what was given is not changed
    assert unchanged_but(before, result.model, "u", "v", "c")
    kept = {p.key: p.value for p in result.model.metadata_props}
    assert kept["author"] == "someone"
    assert kept["lsuv.version"] == lsuv_cli.__version__


# Parts of the working copy


@pytest.mark.parametrize(
    ("node", "refused"),
    [
        ('y = Einsum<equation="ij,jk->ik">(x, x)', False),
        ('y = Einsum<equation="i?">(x)', True),
        ('y = local.Einsum<equation="i?">(x)', False),
        ('y = Relu<equation="i?">(x)', False),
        ('y = If(c) <then_branch = t () => (p) { p = Einsum<equation="i?">(x) }, '
         "else_branch = e () => (q) { q = Neg(x) }>", True),
    ],
)  # fmt: skip
def test_an_equation_that_is_none_is_refused(node, refused):
    text = f"g (float[8,8] x, bool c) => (y) {{ {node} }}"
    if not refused:
        assert len(graph_of(text).nodes) == 1
        return
    with pytest.raises(ModelError, match="which is no equation"):
        graph_of(text)


@pytest.mark.parametrize("opset", [6, 7])
def test_operators_of_old_sets_are_written_as_opset_7_has_them(opset):
    text = """g (float[N,8] x) => (y) { r = Relu<consumed_inputs=[0]>(x) d = Dropout<is_test=1, ratio=0.5>(r)
        y = local.Odd<is_test=1>(d) }"""
    graph = graph_of(text, opset=opset)
    assert graph.opset() == 7
    found = [[a.name for a in node.attribute] for node in graph.nodes]
    assert found == [[["consumed_inputs"], ["is_test", "ratio"], ["is_test"]], [[], ["ratio"], ["is_test"]]][opset == 6]


def test_a_shape_in_an_attribute_is_written_as_an_input():
    """As opset 5 has it; before, in opset 4, Reshape had one input."""
    graph = graph_of("g (float[N,8] x) => (y) { s = Reshape<shape=[-1,4]>(x) y = Relu(s) }", opset=4)
    reshape = graph.nodes[0]
    assert not reshape.attribute
    np.testing.assert_array_equal(graph.array(reshape.input[1]), [-1, 4])
    with pytest.raises(ModelError, match=r"node 's' \(Reshape\) has 1 of at least 2 inputs"):
        graph_of("g (float[N,8] x) => (y) { s = Reshape<shape=[-1,4]>(x) y = Relu(s) }", opset=7)


def test_the_parts_of_a_constant_expression():
    graph = graph_of(
        "g (float[N,8] x) => (y) { n = Neg(a) m = Mul(n, n) k = Add(m, b) s = Add(x, k) y = Relu(s) }",
        a=normal(8), b=normal(8, seed=1), c=normal(8),
    )  # fmt: skip
    nodes, stored = graph.expression("k")
    assert [graph.nodes[k].op_type for k in sorted(nodes)] == ["Neg", "Mul", "Add"]
    assert stored == {"a", "b"}
    np.testing.assert_allclose(graph.evaluate("k"), normal(8) ** 2 + normal(8, seed=1))
    assert graph.shape("k") == (8,)
    assert graph.nbytes("a") == 32
    assert graph.nbytes("k") == 0
    assert graph.known("s") is None
    with pytest.raises(Unknown, match="depends on the model's input"):
        graph.evaluate("y")


def test_constants_that_are_not_worked_out(monkeypatch):
    graph = graph_of("g (float[N,8] x) => (y) { k = Expand(a, s) y = Add(x, k) }", a=normal(1), s=np.array([10, 8]))
    assert graph.evaluate("k").shape == (10, 8)
    monkeypatch.setattr(graphs, "LARGEST_CONSTANT", 80)
    assert graph.evaluate("k").shape == (10, 8)
    monkeypatch.setattr(graphs, "LARGEST_CONSTANT", 79)
    with pytest.raises(Unknown, match="a tensor of 80 elements"):
        graph.evaluate("k")
    odd = graph_of("g (float[N,8] x) => (y) { k = local.Odd(a) y = Add(x, k) }", a=normal(1))
    with pytest.raises(Unknown, match="computed by Odd, which cannot be folded"):
        odd.evaluate("k")


def test_a_constant_behind_a_body_is_not_worked_out():
    """Neither the body's output nor what other operators make of it."""
    graph = graph_of(
        """g (float[N,8] x) => (y) {
        n = Neg(a)
        z = If(c) <then_branch = t () => (p) { p = Neg(n) }, else_branch = e () => (o) { o = Abs(n) }>
        k = Mul(z, z) y = Add(x, k) }""",
        a=normal(8), c=np.array(True),
    )  # fmt: skip
    assert {"n", "z", "k"} <= graph.constant
    for name in "zk":
        with pytest.raises(Unknown, match=r"If.*, which is not worked out beforehand"):
            graph.evaluate(name)
        assert graph.known(name) is None
    np.testing.assert_array_equal(graph.evaluate("n"), -normal(8))


def test_constant_random_and_varying_values():
    graph = graph_of(
        """g (float[N,8] x) => (y) { n = Neg(a) r = RandomNormal<shape=[8]>() q = Mul(r, n) k = Mul(q, x)
        z = If(c) <then_branch = t () => (p) { p = Neg(n) }, else_branch = e () => (o) { o = Neg(k) }>
        y = Add(z, k) }""",
        a=normal(8), c=np.array(True),
    )  # fmt: skip
    assert graph.constant == {"a", "c", "n"}
    assert graph.random == {"r", "q"}
    at = {node.output[0]: k for k, node in enumerate(graph.nodes)}
    assert graph.captured == {at["z"]: ("k", "n")}
    assert list(graph.reads(at["z"])) == ["c", "k", "n"]
    assert graph.readers["k"] == (at["z"], at["y"])


def test_an_attribute_whose_text_is_not_utf_8():
    node = helper.make_node("Op", [], [], activation=b"Rel\xff")
    assert graphs.attribute(node, "activation") == "Rel\ufffd"


def test_memory_that_runs_out_is_no_failure_of_folding(monkeypatch):
    def full(*given, **more):
        raise MemoryError

    monkeypatch.setattr("onnx.reference.ReferenceEvaluator", full)
    with pytest.raises(MemoryError):
        graph_of("g (float[N,2] x) => (y) { n = Neg(w) y = MatMul(x, n) }", w=normal(2, 2)).evaluate("n")


@pytest.mark.parametrize(("side", "known"), [(1 << 16, False), (1 << 4, True)])
def test_a_constant_that_is_computed_by_way_of_a_huge_one_is_not_worked_out(side, known):
    graph = graph_of("g (float[N,2] x) => (y) { h = Expand(one, s) m = ReduceMean<keepdims=0>(h) y = Mul(x, m) }",
                     one=np.ones((1, 1), "f"), s=np.array([side, side]))  # fmt: skip
    found = graph.known("m")
    assert (found is not None) == known
    assert found is None or found == 1


@pytest.mark.parametrize("microsoft", [False, True])
def test_a_shape_that_was_an_attribute_is_an_input_whatever_other_operators_a_model_imports(microsoft):
    """Before opset 5 Reshape had its shape in an attribute."""
    graph = graph_of("g (float[N,4] x) => (y) { y = Reshape<shape=[-1,2]>(x) }", opset=4, microsoft=microsoft)
    (node,) = graph.nodes
    assert not node.attribute
    np.testing.assert_array_equal(graph.array(node.input[1]), [-1, 2])


@pytest.mark.parametrize(("opset", "raised"), [(4, 7), (7, 7), (18, 18)])
def test_the_operator_sets_of_the_working_copy(opset, raised):
    graph = graph_of("g (float[N,4] x) => (y) { y = Neg(x) }", opset=opset, microsoft=True)
    assert [(each.domain, each.version) for each in graph.opsets] == [("", raised), ("com.microsoft", 1)]
    assert (graph.opset(), graph.opset("com.microsoft"), graph.opset("other")) == (raised, 1, 1)
