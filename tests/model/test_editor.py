"""Edits of a graph: what only a folded node read is removed, and nothing else."""

import numpy as np
import pytest

from helpers import model, normal, tensor
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.draft import Draft
from lsuv_cli.model.editor import Fold, Overwrite, Own, apply
from lsuv_cli.model.file import load


def edited(text, *edits, **tensors):
    with Draft(load(model(text, **tensors)), None) as draft:
        apply(edits, graphs.build(draft.file.proto, draft), draft)
        return draft.finish({}).embedded()


def names(proto):
    return [node.op_type for node in proto.graph.node], {t.name for t in proto.graph.initializer}


ONE = normal(2, 2)


@pytest.mark.parametrize(
    ("body", "nodes", "stored"),
    [
        ("w = Mul(a, b) y = MatMul(x, w)", ["MatMul"], {"w", "c"}),
        ("n = Neg(a) w = Mul(n, b) y = MatMul(x, w)", ["MatMul"], {"w", "c"}),
        ("n = Neg(a) w = Mul(n, n) y = MatMul(x, w)", ["MatMul"], {"w", "b", "c"}),
        ("n = Neg(a) w = Mul(n, b) v = MatMul(x, w) y = Add(v, n)", ["Neg", "MatMul", "Add"], {"w", "a", "c"}),
        ("w = Mul(a, b) v = MatMul(x, w) y = Add(v, b)", ["MatMul", "Add"], {"w", "b", "c"}),
        ("w, o = Split<num_outputs=2>(b) y = MatMul(x, w)", ["MatMul"], {"w", "a", "c"}),
        ("w, o = Split<num_outputs=2>(b) v = MatMul(x, w) y = Add(v, o)", ["Split", "MatMul", "Add"], {*"wabc"}),
    ],
)
def test_what_only_a_folded_node_read_is_removed(body, nodes, stored):
    text = f"g (float[N,2] x) => (y) {{ {body} }}"
    made = edited(text, Fold("w", ONE), a=normal(2, 2), b=normal(2, 2), c=normal(2))
    assert names(made) == (nodes, stored)
    np.testing.assert_array_equal(tensor(made, "w"), ONE)


def test_an_initializer_that_is_an_output_or_an_input_stays():
    made = edited("g (float[N,2] x) => (y, a) { w = Neg(a) y = MatMul(x, w) }", Fold("w", ONE), a=normal(2, 2))
    assert names(made) == (["MatMul"], {"w", "a"})
    listed = edited("g (float[N,2] x) => (y) { w = Neg(a) y = MatMul(x, w) }", Fold("w", ONE), ir=3, a=normal(2, 2))
    assert names(listed) == (["MatMul"], {"w", "a"})


def test_a_tensor_of_its_own_has_a_name_that_is_free():
    text = "g (float[N,2] x) => (y) { a = MatMul(x, w) y = MatMul(a, w) }"
    tensors = {"w": normal(2, 2), "w.y": normal(1), "w.y.1": normal(1)}
    made = edited(text, Own("y", 1, "w.y", ONE), Own("a", 1, "w.y", 2 * ONE), **tensors)
    first, second = made.graph.node
    assert len({"w", "w.y", "w.y.1", first.input[1], second.input[1]}) == 5
    np.testing.assert_array_equal(tensor(made, second.input[1]), ONE)
    np.testing.assert_array_equal(tensor(made, first.input[1]), 2 * ONE)


def test_a_constant_that_holds_a_list_is_made_to_hold_a_tensor():
    text = "g (float[N,2] x) => (y) { b = Constant<value_floats=[1.0,2.0]>() y = Add(x, b) }"
    kept = edited(text, Overwrite("b"))
    assert kept.graph.node[0].attribute[0].name == "value"
    np.testing.assert_array_equal(tensor(kept, "b"), [1, 2])
    np.testing.assert_array_equal(tensor(edited(text, Overwrite("b", np.zeros(2, "f"))), "b"), [0, 0])
