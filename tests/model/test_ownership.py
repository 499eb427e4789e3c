"""Shared tensors: what is tied stays tied or is untied as asked, and no write reaches a reader that was not meant."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from helpers import entry, is_orthonormal, model, near_one, normal, tensor, unchanged_but, values, variances
from lsuv_cli import initialize
from lsuv_cli.model.editor import Fold, Overwrite, Own
from lsuv_cli.model.ownership import overwrite, settle_weights
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.settings import Tied
from working_copies import graph_of

X = normal(64, 8, seed=1)
Z = 3 * normal(64, 8, seed=2)


def outputs(result, name):
    return values(result, {"x": X}, [name])[name]


# Tied weights


SIAMESE = """g (float[N,8] x, float[N,8] z) => (float[N,4] y) {
    a = MatMul(x, w) b = MatMul(z, w) d = Sub(a, b) t = Tanh(d) y = MatMul(t, v) }"""


def siamese():
    return model(SIAMESE, w=normal(8, 8), v=normal(8, 4))


def test_a_siamese_pair_has_variance_1_on_average():
    feeds = {"x": X, "z": Z}
    result = initialize(siamese(), feeds)
    found = variances(result.model, feeds, ["a", "b", "y"])
    assert abs((found["a"] + found["b"]) / 2 - 1) < 1e-3
    assert abs(found["y"] - 1) < 1e-3
    for name in ("a", "b"):
        line = entry(result, name)
        assert line.status == "tied"
        assert line.shared
        assert "weight shared by 2 layers" in line.notes
        assert line.variance == pytest.approx(found[name], rel=1e-4)
    assert is_orthonormal(tensor(result.model, "w"))
    assert any("1 weight is shared by several layers" in w and "`tied='untie'`" in w for w in result.report.warnings)
    assert unchanged_but(siamese(), result.model, "w", "v")


def test_a_siamese_pair_untied():
    feeds = {"x": X, "z": Z}
    result = initialize(siamese(), feeds, tied="untie")
    assert near_one(variances(result.model, feeds, ["a", "b", "y"]))
    first, second = (n.input[1] for n in result.model.graph.node[:2])
    assert first != second
    assert not np.allclose(tensor(result.model, first), tensor(result.model, second))
    assert "weight untied from w" in entry(result, "b").notes
    assert not any("shared by several layers" in warning for warning in result.report.warnings)
    onnx.checker.check_model(result.model)


def test_a_siamese_pair_skipped():
    feeds = {"x": X, "z": Z}
    result = initialize(siamese(), feeds, tied="skip")
    assert entry(result, "a").status == "skipped"
    assert "shared by 2 layers" in entry(result, "b").notes[0]
    assert near_one(variances(result.model, feeds, ["y"]))
    assert unchanged_but(siamese(), result.model, "v")


UNROLLED = """g (float[N,8] x) => (float[N,4] y) {
    a = MatMul(x, w) r = Relu(a) b = MatMul(r, w) s = Relu(b) c = MatMul(s, w) t = Relu(c) y = MatMul(t, v) }"""


def test_a_layer_used_three_times_in_a_row_is_scaled_at_its_first_use():
    result = initialize(model(UNROLLED, w=normal(8, 8), v=normal(8, 4)), X)
    found = variances(result.model, {"x": X}, ["a", "b", "c", "y"])
    assert near_one({"a": found["a"], "y": found["y"]})
    assert np.abs(tensor(result.model, "w")).max() < 2
    for name in ("b", "c"):
        assert entry(result, name).variance == pytest.approx(found[name], rel=1e-4)
        assert "scaled at the first use of its weight" in entry(result, name).notes


def test_a_layer_used_three_times_untied():
    result = initialize(model(UNROLLED, w=normal(8, 8), v=normal(8, 4)), X, tied="untie")
    assert near_one(variances(result.model, {"x": X}, ["a", "b", "c", "y"]))


def test_a_shared_weight_whose_uses_have_biases_of_their_own():
    before = model(
        """g (float[N,8] x, float[N,8] z) => (float[N,8] y) {
            a = Gemm(x, w, b) p = Tanh(a) q = Gemm(z, w, c) s = Add(p, q) y = MatMul(s, v) }""",
        w=normal(8, 8),
        b=0.3 * normal(8),
        c=0.3 * normal(8, seed=5),
        v=normal(8, 8),
    )
    feeds = {"x": X, "z": Z}
    for bias in ("zero", "keep"):
        after = initialize(before, feeds, bias=bias).model
        found = variances(after, feeds, ["a", "q", "y"])
        assert abs((found["a"] + found["q"]) / 2 - 1) < 1e-3
        assert abs(found["y"] - 1) < 1e-3


GPT2 = """g (int64[N,5] ids) => (float[N,5,20] logits) {
    e = Gather(table, ids) h = MatMul(e, w) t = Tanh(h)
    head = Transpose<perm=[1,0]>(table) logits = MatMul(t, head) }"""


def test_a_head_tied_to_the_embedding_is_left_alone():
    before = model(GPT2, table=normal(20, 8), w=normal(8, 8))
    ids = np.arange(80).reshape(16, 5) % 20
    result = initialize(before, ids)
    line = entry(result, "logits")
    assert line.status == "skipped"
    assert "is read by Gather e too" in line.notes[0]
    assert near_one(variances(result.model, {"ids": ids}, ["h"]))
    assert unchanged_but(before, result.model, "w")


def test_a_head_untied_from_the_embedding():
    before = model(GPT2, table=normal(20, 8), w=normal(8, 8))
    ids = np.arange(80).reshape(16, 5) % 20
    after = initialize(before, ids, tied="untie").model
    assert near_one(variances(after, {"ids": ids}, ["h", "logits"]))
    assert (tensor(after, "table") == tensor(before, "table")).all()
    onnx.checker.check_model(after)


def test_weights_that_an_exporter_merged_behind_identity():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            u = Identity(w) a = MatMul(x, w) r = Tanh(a) b = MatMul(r, u) y = Relu(b) }""",
        w=normal(8, 8),
    )
    shared = initialize(before, X)
    assert near_one(variances(shared.model, {"x": X}, ["a"]))
    assert entry(shared, "b").shared
    assert unchanged_but(before, shared.model, "w")
    untied = initialize(before, X, tied="untie").model
    assert near_one(variances(untied, {"x": X}, ["a", "b"]))


def test_one_weight_seen_in_two_ways():
    before = model(
        "g (float[N,8] x) => (float[N,8] y) { u = Transpose(w) a = MatMul(x, w) r = Tanh(a) y = MatMul(r, u) }",
        w=normal(8, 8),
    )
    result = initialize(before, X)
    assert near_one(variances(result.model, {"x": X}, ["a"]))
    untied = initialize(before, X, tied="untie").model
    assert near_one(variances(untied, {"x": X}, ["a", "y"]))


def test_an_autoencoder_of_different_shapes_tied_by_a_transpose():
    before = model(
        "g (float[N,8] x) => (float[N,8] y) { u = Transpose(w) a = MatMul(x, w) r = Tanh(a) y = MatMul(r, u) }",
        w=normal(8, 3),
    )
    result = initialize(before, X)
    assert near_one(variances(result.model, {"x": X}, ["a"]))
    assert is_orthonormal(tensor(result.model, "w"))


@pytest.mark.parametrize(
    "reader", ["e = Relu(w)", "e = Identity(w)", "e = Transpose(w)", "e = ReduceSum<keepdims=1>(w)", "e = Mul(w, w)"]
)
def test_a_weight_that_anything_else_reads_is_left_alone(reader):
    before = model(
        f"g (float[N,8] x) => (float[N,8] y, float e) {{ {reader} a = MatMul(x, w) t = Tanh(a) y = MatMul(t, v) }}",
        w=normal(8, 8),
        v=normal(8, 8),
    )
    result = initialize(before, X)
    assert entry(result, "a").status == "skipped"
    assert "too; `tied='untie'`" in entry(result, "a").notes[0]
    assert near_one(variances(result.model, {"x": X}, ["y"]))
    assert unchanged_but(before, result.model, "v")
    untied = initialize(before, X, tied="untie").model
    assert near_one(variances(untied, {"x": X}, ["a", "y"]))
    assert (outputs(untied, "e") == outputs(before, "e")).all()


def test_a_weight_that_is_a_graph_output():
    before = model("g (float[N,8] x) => (float[N,8] y, float[8,8] w) { y = MatMul(x, w) z = MatMul(x, v) }",
                   w=normal(8, 8), v=normal(8, 8))  # fmt: skip
    result = initialize(before, X)
    assert "a graph output" in entry(result, "y").notes[0]
    assert unchanged_but(before, result.model, "v")


def test_a_weight_shared_with_an_excluded_layer_is_left_alone():
    before = siamese()
    result = initialize(before, {"x": X, "z": Z}, exclude=["b"])
    assert entry(result, "a").status == "skipped"
    assert entry(result, "b").status == "excluded"
    assert unchanged_but(before, result.model, "v")


def test_a_weight_that_is_its_own_bias():
    before = model("g (float[8,8] x) => (float[8,8] y) { y = Gemm(x, w, w) z = MatMul(x, v) }",
                   w=normal(8, 8), v=normal(8, 8))  # fmt: skip
    result = initialize(before, X)
    assert entry(result, "y").status == "skipped"
    assert unchanged_but(before, result.model, "v")


@pytest.mark.parametrize("tied", ["share", "untie", "skip"])
def test_an_expression_that_two_layers_share(tied):
    before = model(
        """g (float[N,8] x, float[N,8] z) => (float[N,8] y) {
            w = Mul(p, q) a = MatMul(x, w) b = MatMul(z, w) s = Mul(a, b) y = MatMul(s, v) }""",
        p=normal(8, 8),
        q=normal(8, 1),
        v=normal(8, 8),
    )
    feeds = {"x": X, "z": Z}
    result = initialize(before, feeds, tied=tied)
    found = variances(result.model, feeds, ["a", "b", "y"])
    assert abs(found["y"] - 1) < 1e-3
    if tied == "share":
        assert abs((found["a"] + found["b"]) / 2 - 1) < 1e-3
    elif tied == "untie":
        assert near_one(found)
    else:
        assert unchanged_but(before, result.model, "v")


# Biases that are shared


ZERO_OR_NOT = [np.zeros(8, np.float32), normal(8, seed=3)]


@pytest.mark.parametrize("vector", ZERO_OR_NOT, ids=["zeros", "numbers"])
@pytest.mark.parametrize(
    ("reader", "is_layer"),
    [
        ("o = LayerNormalization(r, one, b)", False),
        ("o = Gemm(r, fixed, b)", True),
        ("i = Identity(b) o = Sub(r, i)", False),
        ("o = Sub(r, b)", False),
        ("c = Add(b, b) o = Add(r, c)", False),
    ],
    ids=["layer norm", "excluded layer", "identity", "sub", "expression"],
)
def test_a_bias_is_not_zeroed_under_another_reader(vector, reader, is_layer):
    before = model(
        f"g (float[N,8] x) => (float[N,8] y) {{ a = Gemm(x, w, b) r = Relu(a) {reader} y = Gemm(o, v, b) }}",
        w=normal(8, 8),
        v=normal(8, 8),
        b=vector,
        **({"one": np.ones(8, np.float32)} if "one" in reader else {}),
        **({"fixed": normal(8, 8, seed=4)} if is_layer else {}),
    )
    after = initialize(before, X, exclude=["o"] if is_layer else []).model
    assert near_one(variances(after, {"x": X}, ["a", "y"]))
    assert (tensor(after, "b") == vector).all()
    for node in after.graph.node:
        if node.output[0] in ("a", "y"):
            assert not tensor(after, node.input[2]).any()
    onnx.checker.check_model(after)


def test_a_bias_that_only_layers_read_is_zeroed_in_its_place():
    before = model(
        "g (float[N,8] x) => (float[N,8] y) { a = Gemm(x, w, b) r = Relu(a) m = MatMul(r, v) y = Add(b, m) }",
        w=normal(8, 8),
        v=normal(8, 8),
        b=normal(8),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["a", "y"]))
    assert not tensor(after, "b").any()
    assert unchanged_but(before, after, "w", "v", "b")


def test_a_bias_behind_identity_gets_a_tensor_of_its_own():
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            c = Identity(b) a = Gemm(x, w, c) r = Relu(a) n = Mul(r, b) y = MatMul(n, v) }""",
        w=normal(8, 8),
        v=normal(8, 8),
        b=normal(8),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["a", "y"]))
    assert (tensor(after, "b") == tensor(before, "b")).all()


def test_a_bias_that_a_body_reads():
    before = model(
        """g (float[N,8] x, bool flag) => (float[N,8] y) {
            a = Gemm(x, w, b)
            c = If (flag) < then_branch = yes () => (float[N,8] p) { p = Add(a, b) },
                            else_branch = no () => (float[N,8] q) { q = Identity(a) } >
            y = MatMul(c, v) }""",
        w=normal(8, 8),
        v=normal(8, 8),
        b=normal(8),
    )
    before.graph.input[1].type.tensor_type.shape.SetInParent()
    feeds = {"x": X, "flag": np.array(True)}
    after = initialize(before, feeds, batch_size="all").model
    assert near_one(variances(after, feeds, ["a", "y"], reference=False))
    assert (tensor(after, "b") == tensor(before, "b")).all()


def test_a_scalar_bias_that_is_shared_keeps_its_shape():
    before = model(
        "g (float[N,8] x) => (float[N,8] y) { h = MatMul(x, w) a = Add(h, c) p = Pow(a, c) y = MatMul(p, v) }",
        w=normal(8, 8),
        v=normal(8, 8),
        c=np.float32(2),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["a", "y"]))
    assert tensor(after, "c") == 2
    (own,) = [t for t in after.graph.initializer if t.name not in ("w", "v", "c")]
    assert list(own.dims) == []
    assert numpy_helper.to_array(own) == 0


def test_one_zero_vector_that_feeds_many_nodes():
    """As PyTorch's dynamo exporter leaves a BERT: the biases of all layers and of all norms."""
    nodes, last = [], "x"
    for k in range(6):
        nodes.append(f"h{k} = Gemm({last}, w{k}, zero) n{k} = LayerNormalization(h{k}, one, zero)")
        last = f"n{k}"
    weights = {f"w{k}": normal(8, 8, seed=k) for k in range(6)}
    before = model(
        f"g (float[N,8] x) => (float[N,8] {last}) {{ {' '.join(nodes)} }}",
        zero=np.zeros(8, np.float32),
        one=np.ones(8, np.float32),
        **weights,
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert unchanged_but(before, after, *weights)  # nothing to zero, so no new tensors either


def test_a_bias_of_an_ir_3_model_gets_a_listed_initializer():
    before = model(
        "g (float[N,8] x) => (float[N,8] y) { a = Gemm(x, w, b) n = Mul(a, b) y = Relu(n) }",
        opset=9,
        ir=3,
        w=normal(8, 8),
        b=normal(8),
    )
    after = initialize(before, X).model
    onnx.checker.check_model(after)
    assert near_one(variances(after, {"x": X}, ["a"]))
    assert {t.name for t in after.graph.initializer} <= {i.name for i in after.graph.input}


@pytest.mark.parametrize(
    ("bias", "tensors"),
    [
        ("b = DequantizeLinear(q, s)", {"q": np.arange(-4, 4, dtype=np.int8), "s": np.float32(0.1)}),
        ("b = Mul(p, s)", {"p": normal(8), "s": np.float32(0.1)}),
        ("b = ConstantOfShape<value=float[1] {0.7}>(n)", {"n": np.array([8])}),
        ("b = com.microsoft.Gelu(p)", {"p": 0.3 * normal(8)}),
    ],
    ids=["quantized", "expression", "constant of shape", "unknown to onnx"],
)
def test_a_bias_that_is_computed_is_replaced_or_kept(bias, tensors):
    before = model(
        f"g (float[N,8] x) => (float[N,8] y) {{ {bias} a = Gemm(x, w, b) r = Tanh(a) y = MatMul(r, v) }}",
        microsoft=True,
        w=normal(8, 8),
        v=normal(8, 8),
        **tensors,
    )
    result = initialize(before, X)
    assert near_one(variances(result.model, {"x": X}, ["a", "y"], reference=False))
    assert all((tensor(result.model, name) == value).all() for name, value in tensors.items())
    if "Gelu" in bias:
        assert "bias kept" in entry(result, "a").notes
        assert unchanged_but(before, result.model, "w", "v")


def test_a_function_whose_norm_cannot_be_reset_is_warned_about():
    before = model(
        """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[N,4,3,3] x) => (float y) { y = local.block(x, w) }
        <domain: "local", opset_import: ["" : 18]> block (x, w) => (y) {
            one = Constant<value_floats=[1.0, 1.0]>() two = Constant<value_floats=[2.0, 2.0]>()
            c = Conv(x, w) y = BatchNormalization(c, one, one, two, two) }""",
        w=normal(2, 4, 1, 1),
    )
    result = initialize(before, normal(16, 4, 3, 3), reset_norm=True)
    assert any("inside functions, or behind an If, keep their statistics" in w for w in result.report.warnings)
    assert unchanged_but(before, result.model, "w")


# The edits


def named(edit):
    return f"{type(edit).__name__} {edit.value if isinstance(edit, Fold) else edit.name}"


@pytest.mark.parametrize(
    ("body", "tied", "edits", "left", "notes"),
    [
        ("y = MatMul(x, w)", "share", [], [], []),
        ("n = Neg(w) y = MatMul(x, n)", "share", ["Fold n"], [], ["y: weight folded into one tensor"]),
        ("c = Constant<value_floats=[1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0]>() y = MatMul(x, c)", "share",
         ["Overwrite c"], [], []),
        ("a = MatMul(x, w) y = MatMul(a, w)", "share", [], [],
         ["a: weight shared by 2 layers", "y: weight shared by 2 layers"]),
        ("a = MatMul(x, w) y = MatMul(a, w)", "skip", [], ["a", "y"], []),
        ("a = MatMul(x, w) y = MatMul(a, w)", "untie", ["Own w.y"], [], ["y: weight untied from w"]),
        ("n = Neg(w) a = MatMul(x, n) y = MatMul(a, n)", "untie", ["Own n.y", "Fold n"], [],
         ["y: weight untied from n", "a: weight folded into one tensor"]),
        ("a = MatMul(x, w) y = Add(a, w)", "share", [], ["a"], []),
        ("a = MatMul(x, w) y = Add(a, w)", "untie", ["Own w.a"], [], ["a: weight untied from w"]),
        ("a = MatMul(x, w) b = MatMul(a, w) y = Add(b, w)", "untie", ["Own w.a", "Own w.b"], [],
         ["a: weight untied from w", "b: weight untied from w"]),
    ],
)  # fmt: skip
def test_what_is_decided_on_a_weight(body, tied, edits, left, notes):
    look = layers_of(graph_of(f"g (float[N,8] x) => (y) {{ {body} }}", w=normal(8, 8)))
    decided = settle_weights(look.graph, look.layers, Tied(tied))
    assert [named(edit) for edit in decided.edits] == edits
    assert list(decided.left_alone) == left
    assert [f"{name}: {note}" for name, found in decided.notes.items() for note in found] == notes


@pytest.mark.parametrize(
    ("body", "number", "edit"),
    [
        ("y = Add(x, b)", 0.0, "Overwrite b"),
        ("y = Add(x, b)", 1.0, None),  # it is 1 already
        ("a = Add(x, b) y = Mul(a, b)", 0.0, "Own b.a"),
        ("y = Add(x, b) z = Add(y, b)", 0.0, "Own b.y"),
    ],
)
def test_a_constant_is_overwritten_only_if_every_reader_wants_that(body, number, edit):
    graph = graph_of(f"g (float[N,8] x) => (y) {{ {body} }}", b=np.ones(8, np.float32))
    edits, impossible = overwrite(graph, {(0, 1): number}, {"b": np.ones(8, np.float32)})
    assert not impossible
    assert [named(made) for made in edits] == ([edit] if edit else [])
    for made in edits:
        np.testing.assert_array_equal(made.array, np.full(8, number))


def test_readers_that_want_the_same_number_are_one():
    graph = graph_of("g (float[N,8] x) => (y) { a = Add(x, b) y = Mul(a, b) }", b=np.ones(8, np.float32))
    values = {"b": np.ones(8, np.float32)}
    same, _ = overwrite(graph, {(0, 1): 0.0, (1, 1): 0.0}, values)
    assert [type(edit) for edit in same] == [Overwrite]
    apart, _ = overwrite(graph, {(0, 1): 0.0, (1, 1): 2.0}, values)
    assert [type(edit) for edit in apart] == [Own, Own]
    shown = graph_of("g (float[N,8] x) => (y, b) { y = Add(x, b) }", b=np.ones(8, np.float32))
    (edit,), _ = overwrite(shown, {(0, 1): 0.0}, values)
    assert isinstance(edit, Own)


@pytest.mark.parametrize(
    ("body", "tied", "left", "reason"),
    [
        ("a = MatMul(x, d) y = MatMul(a, d)", "share", ["a", "y"], "shared by 2 layers and dropped at random"),
        ("a = MatMul(x, d) y = MatMul(a, d)", "untie", ["a", "y"], "shared by 2 layers and dropped at random"),
        ("a = MatMul(x, d) y = Add(a, w)", "untie", ["a"], "read elsewhere too and dropped at random"),
        ("y = MatMul(x, d)", "share", [], ""),
    ],
)
def test_a_weight_that_is_dropped_at_random_is_written_only_if_one_layer_has_it_for_itself(body, tied, left, reason):
    text = f"g (float[N,8] x) => (y) {{ d = Dropout<seed=5>(w, r, t) {body} }}"
    look = layers_of(graph_of(text, w=normal(8, 8), r=np.float32(0.5), t=np.array(True)))
    decided = settle_weights(look.graph, look.layers, Tied(tied))
    assert list(decided.left_alone) == left
    assert all(reason in found for found in decided.left_alone.values())
    assert not decided.edits


def test_a_model_whose_layers_have_weights_of_their_own_is_not_warned_about():
    result = initialize(model("g (float[N,8] x) => (y) { y = MatMul(x, w) }", w=normal(8, 8)), X)
    assert not any("shared by several layers" in warning for warning in result.report.warnings)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("h = RNN<hidden_size=8>(x, w, r) y = Neg(h)", []),
        ("h = RNN<hidden_size=8>(x, w, r) y = MatMul(x, w)", ["h", "y"]),
        ("h = RNN<hidden_size=8>(x, w, r) y = RNN<hidden_size=8>(x, w, s)", ["h", "y"]),
    ],
)
def test_a_recurrent_layer_shares_its_weights_with_no_layer(body, left):
    """Its matrices are not scaled, so that a shared one could not be both."""
    tensors = {name: normal(1, 8, 8, seed=k) for k, name in enumerate("wrs")}
    look = layers_of(graph_of(f"g (float[T,N,8] x) => (y) {{ {body} }}", **tensors))
    decided = settle_weights(look.graph, look.layers, Tied.SHARE, recurrent=True)
    assert sorted(decided.left_alone) == left


def test_a_constant_that_a_body_reads_too_is_not_overwritten():
    text = """g (float[N,8] x, bool c) => (y) { a = Add(x, b)
        y = If(c) <then_branch = t () => (float[N,8] o) { o = Add(a, b) }, else_branch = e () => (float[N,8] o) {
            o = Neg(a) }> }"""
    graph = graph_of(text, b=np.ones(8, np.float32))
    (edit,), impossible = overwrite(graph, {(0, 1): 0.0}, {"b": np.ones(8, np.float32)})
    assert isinstance(edit, Own)
    assert not impossible
