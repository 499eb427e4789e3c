"""What a page and random data need to know about a graph: its outline, and the inputs that are indices."""

import numpy as np
import pytest

from helpers import normal
from lsuv_cli.model.indices import tables
from lsuv_cli.model.outline import outline
from working_copies import graph_of


def drawn(text, **tensors):
    """The outline as (operator, place of the layer, sources); MatMul and Conv are layers."""
    graph = graph_of(text, **tensors)
    at = [k for k, node in enumerate(graph.nodes) if node.op_type in {"MatMul", "Conv"}]
    return [(n.op, n.layer, n.after) for n in outline(graph, {k: place for place, k in enumerate(at)})]


def test_a_chain_is_its_layers():
    text = "g (float[N,4] x) => (y) { a = MatMul(x, v) r = Relu(a) t = Tanh(r) y = MatMul(t, w) }"
    assert drawn(text, v=normal(4, 4), w=normal(4, 4)) == [("MatMul", 0, (-1,)), ("MatMul", 1, (0,))]


def test_a_joint_is_where_branches_meet():
    text = """g (float[N,4] x) => (y) {
        a = MatMul(x, v) r = Relu(a) b = MatMul(r, w) s = Add(r, b) q = Relu(s) p = Add(q, c) y = MatMul(p, u) }"""
    found = drawn(text, v=normal(4, 4), w=normal(4, 4), u=normal(4, 4), c=normal(4))
    assert found == [("MatMul", 0, (-1,)), ("MatMul", 1, (0,)), ("Add", None, (0, 1)), ("MatMul", 2, (2,))]


def test_a_shape_is_no_signal():
    text = """g (float[N,4] x, float[N,4] z) => (y) {
        a = MatMul(x, v) s = Shape(z) n = Size(z) e = Expand(a, s) y = MatMul(e, w) }"""
    found = drawn(text, v=normal(4, 4), w=normal(4, 4))
    assert found == [("MatMul", 0, (-1,)), ("MatMul", 1, (0,))]


def test_constants_have_no_source():
    text = "g (float[N,4] x) => (y) { k = Mul(v, c) a = MatMul(x, k) y = Add(a, c) }"
    assert drawn(text, v=normal(4, 4), c=np.float32(2)) == [("MatMul", 0, (-1,))]


def test_a_joint_that_nothing_depends_on_is_left_out():
    text = """g (float[N,4] x) => (y) {
        a = MatMul(x, v) b = MatMul(x, w) j = Add(a, b) t = Tanh(j) y = MatMul(b, u) }"""
    found = drawn(text, v=normal(4, 4), w=normal(4, 4), u=normal(4, 4))
    assert found == [("MatMul", 0, (-1,)), ("MatMul", 1, (-1,)), ("MatMul", 2, (1,))]


def test_a_joint_in_front_of_an_output_stays_and_so_does_what_it_needs():
    text = """g (float[N,4] x) => (j) { a = MatMul(x, v) b = MatMul(x, w) i = Mul(a, b) j = Add(i, a) }"""
    found = drawn(text, v=normal(4, 4), w=normal(4, 4))
    assert found == [
        ("MatMul", 0, (-1,)),
        ("MatMul", 1, (-1,)),
        ("Mul", None, (0, 1)),
        ("Add", None, (0, 2)),
    ]


# Inputs that are indices


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Gather(w, i)", {"i": 10}),
        ("y = Gather<axis=1>(w, i)", {"i": 6}),
        ("y = Gather<axis=-1>(w, i)", {"i": 6}),
        ("y = Gather<axis=-2>(w, i)", {"i": 10}),
        ("c = Cast<to=6>(i) u = Unsqueeze(c, one) y = Gather(w, u)", {"i": 10}),
        ("a = Gather(w, i) b = Gather(v, i) y = Add(a, b)", {"i": 4}),
        ("b = Gather(v, i) a = Gather(w, i) y = Add(a, b)", {"i": 4}),
        ("t = Transpose(w) y = Gather(t, i)", {"i": 6}),
        ("d = Add(i, one) y = Gather(w, d)", {}),
        ("s = Cast<to=1>(i) y = Gather(s, i)", {}),
        ("y = Gather(empty, i)", {}),
        ("y = Identity(i)", {}),
    ],
)
def test_an_input_that_looks_up_a_table(body, expected):
    tensors = {"w": normal(10, 6), "v": normal(4, 6), "one": np.array([1]), "empty": normal(0, 6)}
    assert tables(graph_of(f"g (int64[N] i) => (y) {{ {body} }}", **tensors)) == expected


@pytest.mark.parametrize(("domain", "expected"), [("com.microsoft", {"i": 10, "s": 4}), ("other", {})])
def test_an_embedding_of_words_and_segments(domain, expected):
    body = f"y, m = {domain}.EmbedLayerNormalization(i, s, w, p, v, g, b)"
    more = {"w": normal(10, 6), "p": normal(9, 6), "v": normal(4, 6), "g": normal(6), "b": normal(6)}
    assert tables(graph_of(f"g (int32[N,9] i, int32[N,9] s) => (y) {{ {body} }}", microsoft=True, **more)) == expected
