"""What is decided on each layer's bias, and which tensors are written for it."""

import numpy as np
import pytest

from helpers import normal
from lsuv_cli.model import biases
from lsuv_cli.model.editor import Overwrite, Own
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.settings import Bias, Tied
from working_copies import graph_of

ZERO, B = np.zeros(4, np.float32), normal(4, seed=5)
TENSORS = {"w": normal(4, 4), "v": normal(4, 4), "b": B, "o": ZERO}


def settled(body, bias, tied=Tied.SHARE, inputs="float[N,4] x", outputs="y", **tensors):
    text = f"g ({inputs}) => ({outputs}) {{ {body} }}"
    look = layers_of(graph_of(text, **{**TENSORS, **tensors}))
    return biases.settle(look.graph, look.layers, bias, tied)


@pytest.mark.parametrize(
    ("bias", "body", "zeroed", "kept"),
    [
        (Bias.ZERO, "y = Gemm(x, w, b)", True, False),
        (Bias.ZERO, "y = Gemm(x, w, o)", False, False),
        (Bias.ZERO, "m = MatMul(x, w) y = Add(m, b)", True, False),
        (Bias.ZERO, "y = MatMul(x, w)", False, False),
        (Bias.ZERO, "t = Tanh(x) y = Gemm(x, w, t)", False, True),
        (Bias.KEEP, "y = Gemm(x, w, b)", False, True),
        (Bias.KEEP, "y = Gemm(x, w, o)", False, False),
        (Bias.KEEP, "y = MatMul(x, w)", False, False),
        (Bias.KEEP, "t = Tanh(x) y = Gemm(x, w, t)", False, True),
    ],
)
def test_zeroed_and_kept(bias, body, zeroed, kept):
    decided = settled(body, bias)
    assert decided.kept == ({"y"} if kept else set())
    assert not decided.centred
    assert not decided.notes
    assert [edit.name for edit in decided.edits] == (["b"] if zeroed else [])
    for edit in decided.edits:
        assert isinstance(edit, Overwrite)
        np.testing.assert_array_equal(edit.array, ZERO)


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("y = MatMul(x, w)", "it has no bias"),
        ("y = Gemm<beta=0.0>(x, w, b)", "it has no bias"),
        ("t = Tanh(x) y = Gemm(x, w, t)", "its bias is computed"),
        ('y = Einsum<equation="ij,jk->ik">(x, w)', "it has no bias"),
        ('e = Einsum<equation="ij,jk->ik">(x, w) y = Add(e, b)', "no single axis of channels"),
    ],
)
def test_layers_that_cannot_be_centred(body, note):
    decided = settled(body, Bias.CENTER)
    assert note in decided.notes["y"][0]
    assert not decided.centred
    assert decided.kept == ({"y"} if "Tanh" in body else set())


@pytest.mark.parametrize("start", ["b", "o"])
def test_a_bias_that_only_its_layer_reads_is_centred_in_place(start):
    decided = settled(f"y = Gemm(x, w, {start})", Bias.CENTER)
    assert decided.centred == {"y"}
    assert not decided.kept
    (edit,) = decided.edits
    assert isinstance(edit, Overwrite)
    assert edit.name == start
    np.testing.assert_array_equal(edit.array, ZERO)


@pytest.mark.parametrize(
    ("body", "shape", "tensors"),
    [
        ("m = Gemm(x, w, b) y = Add(m, b)", (4,), {}),  # another node reads the bias
        ("y = Gemm(x, w, one)", (4,), {"one": np.ones(1, np.float32)}),  # one number for all channels
        ("m = MatMul(w, x) y = Add(m, one)", (4, 1), {"one": np.ones((1, 1), np.float32)}),
        ("y = Gemm(x, w, s)", (4,), {"s": np.float32(2)}),
    ],
)
def test_any_other_bias_is_replaced_by_one_of_its_own(body, shape, tensors):
    decided = settled(body, Bias.CENTER, inputs="float[4,4] x", **tensors)
    (edit,) = decided.edits
    assert isinstance(edit, Own)
    assert len(decided.centred) == 1
    np.testing.assert_array_equal(edit.array, np.zeros(shape))


def test_a_convolutions_bias():
    conv = {"inputs": "float[N,3,5,5] x", "k": normal(4, 3, 3, 3)}
    (edit,) = settled("y = Conv(x, k, b)", Bias.CENTER, **conv).edits
    assert isinstance(edit, Overwrite)
    added = "c = Conv(x, k) y = Add(c, p)"
    (edit,) = settled(added, Bias.CENTER, **conv, p=normal(4, 1, 1)).edits
    assert isinstance(edit, Overwrite)
    assert edit.array.shape == (4, 1, 1)
    (edit,) = settled(added, Bias.CENTER, **conv, p=normal(1, 1, 1)).edits
    assert isinstance(edit, Own)
    assert edit.array.shape == (4, 1, 1)
    shared = settled("c = Conv(x, k, b) y = Conv(x, k, b)", Bias.CENTER, **conv, outputs="c, y")
    assert [type(edit) for edit in shared.edits] == [Overwrite, Overwrite]  # they share their weight too
    apart = settled("c = Conv(x, k, b) y = Conv(x, l, b)", Bias.CENTER, **conv, outputs="c, y", l=normal(4, 3, 3, 3))
    assert sorted(type(edit).__name__ for edit in apart.edits) == ["Overwrite", "Own"]
    untied = settled("c = Conv(x, k, b) y = Conv(x, k, b)", Bias.CENTER, Tied.UNTIE, **conv, outputs="c, y")
    assert sorted(type(edit).__name__ for edit in untied.edits) == ["Overwrite", "Own"]


FUNCTION = """g (float[N,4] x) => (y) { y = local.f(x, w) }
    <domain: "local", opset_import: ["" : 18]> f (p, q) => (r) {
        c = Constant<value_floats=[1.0,2.0,3.0,4.0]>() r = Gemm(p, q, c) }"""


@pytest.mark.parametrize("bias", [Bias.CENTER, Bias.ZERO])
def test_a_bias_inside_a_function_is_kept(bias):
    look = layers_of(graph_of(FUNCTION, w=normal(4, 4)))
    decided = biases.settle(look.graph, look.layers, bias, Tied.SHARE)
    assert decided.kept == {"y"}
    assert not decided.edits
    assert not decided.centred
    assert decided.notes == (
        {"y": ["not centred: its bias is inside a function of the model"]} if bias is Bias.CENTER else {}
    )


def test_layers_are_marked():
    look = layers_of(graph_of("g (float[N,4] x) => (y) { a = Gemm(x, w, b) y = MatMul(a, v) }", **TENSORS))
    decided = biases.Biases(kept={"a", "y"})
    first, second = biases.marked(look.layers, decided).layers
    assert first.keeps_bias
    assert not first.is_centred
    assert second.bias is None
    (first, _) = biases.marked(look.layers, biases.Biases(centred={"a"})).layers
    assert first.is_centred
    assert not first.keeps_bias
    assert biases.marked(look.layers, biases.Biases()) == look.layers
