"""Every form of layer: its output has variance 1, its weight is orthonormal as the operator multiplies with it."""

import re
from dataclasses import replace

import numpy as np
import onnx
import pytest

from helpers import (
    entry,
    is_orthonormal,
    layer_outputs,
    model,
    near_one,
    normal,
    tensor,
    unchanged_but,
    values,
    variances,
)
from lsuv_cli import initialize, inspect
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.model import layers
from working_copies import graph_of


def matrices(weight, groups=1):
    """Conv's weight as (out, fan-in) matrices, one per group."""
    return weight.reshape(groups, weight.shape[0] // groups, -1)


# Convolutions


@pytest.mark.parametrize(
    ("shape", "weight", "attributes", "groups"),
    [
        ((4, 3, 20), (6, 3, 5), "", 1),
        ((4, 3, 9, 9), (6, 3, 3, 3), "", 1),
        ((4, 2, 6, 6, 6), (5, 2, 3, 3, 3), "", 1),
        ((4, 8, 9, 9), (12, 2, 3, 3), "group=4", 4),
        ((4, 8, 9, 9), (8, 1, 3, 3), "group=8", 8),
        ((4, 4, 9, 9), (8, 1, 3, 3), "group=4", 4),
        ((4, 3, 15, 15), (40, 3, 3, 3), "dilations=[2,2], strides=[2,3], pads=[1,1,1,1]", 1),
        ((4, 3, 9, 9), (6, 3, 3, 3), 'auto_pad="SAME_UPPER"', 1),
    ],
    ids=["1d", "2d", "3d", "grouped", "depthwise", "multiplier", "dilated and strided", "auto_pad"],
)
def test_conv(shape, weight, attributes, groups):
    head = ", ".join(["N", *map(str, shape[1:])])
    text = f"g (float[{head}] x) => (float[] y) {{ y = Conv<{attributes}>(x, w, b) }}"
    before = model(text.replace("<>", "").replace("float[] y", "float y"), w=normal(*weight), b=normal(weight[0]))
    x = normal(*shape, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}))
    assert all(is_orthonormal(part) for part in matrices(tensor(after, "w"), groups))
    assert not tensor(after, "b").any()
    assert unchanged_but(before, after, "w", "b")


@pytest.mark.parametrize("groups", [1, 2])
def test_conv_transpose_is_orthonormal_over_its_own_axes(groups):
    attributes = f"group={groups}, strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]"
    before = model(
        f"g (float[N,6,5,5] x) => (float[N,C,H,W] y) {{ y = ConvTranspose<{attributes}>(x, w, b) }}",
        w=normal(6, 4, 3, 3),
        b=normal(4 * groups),
    )
    x = normal(8, 6, 5, 5, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, reference=False))
    # (in, out/groups, kernel): each group's outputs are its second axis.
    weight = tensor(after, "w").reshape(groups, 6 // groups, 4, 9)
    assert all(is_orthonormal(part.transpose(1, 0, 2).reshape(4, -1)) for part in weight)
    assert unchanged_but(before, after, "w", "b")


def test_conv_transpose_without_bias_then_add_of_one():
    before = model(
        "g (float[N,3,5] x) => (float[N,4,M] y) { h = ConvTranspose(x, w) y = Add(b, h) }",
        w=normal(3, 4, 3),
        b=normal(4, 1),
    )
    x = normal(16, 3, 5, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["y"]))
    assert not tensor(after, "b").any()


# Gemm


@pytest.mark.parametrize("opset", [7, 9, 11, 18])
@pytest.mark.parametrize("trans_b", [0, 1])
def test_gemm_with_alpha_and_transposed_weight(opset, trans_b):
    shape = (12, 8) if trans_b else (8, 12)
    before = model(
        f"g (float[N,8] x) => (float[N,12] y) {{ y = Gemm<alpha=0.3, beta=2.0, transB={trans_b}>(x, w, c) }}",
        opset=opset,
        w=normal(*shape),
        c=normal(12),
    )
    x = normal(64, 8, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}))
    assert is_orthonormal(tensor(after, "w"))
    assert unchanged_but(before, after, "w", "c")


@pytest.mark.parametrize("trans_a", [0, 1])
def test_gemm_with_the_weight_on_the_left(trans_a):
    shape = (8, 12) if trans_a else (12, 8)
    before = model(
        f"g (float[8,M] x) => (float[12,M] y) {{ y = Gemm<transA={trans_a}>(w, x, c) }}",
        w=normal(*shape),
        c=normal(12, 1),
    )
    x = normal(8, 64, seed=1)
    after = initialize(before, x, batch_size="all").model
    assert near_one(variances(after, {"x": x}))
    weight = tensor(after, "w")
    assert is_orthonormal(weight if trans_a == 0 else weight.T)


def test_gemm_with_a_transposed_input():
    before = model("g (float[8,M] x) => (float[M,4] y) { y = Gemm<transA=1>(x, w) }", w=normal(8, 4))
    x = normal(8, 64, seed=1)
    assert near_one(variances(initialize(before, x, batch_size="all").model, {"x": x}))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4), (16, 1), (16, 4), (1, 1)], ids=str)
@pytest.mark.parametrize("bias", ["zero", "keep"])
def test_gemm_with_any_constant_c(shape, bias):
    before = model(
        "g (float[16,8] x) => (float[16,4] y) { y = Gemm<beta=0.5>(x, w, c) }",
        w=normal(8, 4),
        c=np.asarray(normal(*shape, seed=2)),
    )
    x = normal(32, 8, seed=1)
    after = initialize(before, x, bias=bias).model
    y = np.concatenate([values(after, {"x": part}, ["y"], reference=True)["y"] for part in (x[:16], x[16:])])
    assert abs(y.var() - 1) < 1e-3
    if bias == "zero":
        assert not tensor(after, "c").any()
    assert unchanged_but(before, after, "w", *(["c"] if bias == "zero" else []))


def test_gemm_with_a_computed_c():
    before = model(
        "g (float[N,8] x) => (float[N,4] y) { h = MatMul(x, v) t = Tanh(h) y = Gemm<beta=0.5>(x, w, t) }",
        w=normal(8, 4),
        v=normal(8, 4, seed=3),
    )
    x = normal(64, 8, seed=1)
    result = initialize(before, x)
    assert near_one(variances(result.model, {"x": x}, ["h", "y"]))
    assert "bias kept" in entry(result, "y").notes


def test_gemm_with_a_c_whose_scale_is_pending():
    before = model(
        "g (float[N,8] x) => (float[N,4] z) { h = MatMul(x, v) r = Relu(h) y = Gemm(r, w, h) z = MatMul(y, u) }",
        w=normal(4, 4),
        v=normal(8, 4, seed=3),
        u=normal(4, 4, seed=4),
    )
    x = normal(64, 8, seed=1)
    found = variances(initialize(before, x).model, {"x": x}, ["h", "y", "z"])
    # Var(h) is 1 already, so y can only reach 1 if its product leans against h.
    assert near_one({k: v for k, v in found.items() if k != "y"})


def test_gemm_with_alpha_0_is_left_alone():
    before = model(
        "g (float[N,8] x) => (float[N,4] z) { y = Gemm<alpha=0.0>(x, w, c) z = MatMul(x, v) }",
        w=normal(8, 4),
        c=normal(4),
        v=normal(8, 4),
    )
    result = initialize(before, normal(64, 8))
    assert entry(result, "y").status == "skipped"
    assert "alpha" in entry(result, "y").notes[0]
    assert unchanged_but(before, result.model, "v")


# MatMul


@pytest.mark.parametrize(
    ("text", "x", "w", "split"),
    [
        ("MatMul(x, w)", (64, 8), (8, 12), lambda w: [w]),
        ("MatMul(x, w)", (16, 5, 8), (8, 12), lambda w: [w]),
        ("MatMul(w, x)", (16, 8, 5), (12, 8), lambda w: [w]),
        ("MatMul(x, w)", (16, 3, 5, 8), (3, 8, 12), list),
        ("MatMul(w, x)", (16, 3, 8, 5), (3, 12, 8), list),
        ("MatMul(x, w)", (64, 8), (8,), lambda w: [w[:, None]]),
        ("MatMul(w, x)", (16, 8, 5), (8,), lambda w: [w[None]]),
    ],
    ids=["right", "right of 3-D", "left", "batched right", "batched left", "vector right", "vector left"],
)
def test_matmul(text, x, w, split):
    shape = ", ".join(["N", *map(str, x[1:])])
    before = model(f"g (float[{shape}] x) => (float y) {{ y = {text} }}", w=normal(*w))
    data = normal(*x, seed=1)
    after = initialize(before, data).model
    assert near_one(variances(after, {"x": data}))
    assert all(is_orthonormal(part) for part in split(tensor(after, "w")))
    assert unchanged_but(before, after, "w")


@pytest.mark.parametrize(("shape", "is_bias"), [((1, 1, 1, 12), True), ((1, 1, 1, 1), True), ((1, 1, 5, 12), False)])
def test_a_bias_has_at_most_as_many_axes_as_the_output(shape, is_bias):
    before = model(
        "g (float[N,2,5,8] x) => (y) { h = MatMul(x, w) y = Add(h, b) }", w=normal(8, 12), b=normal(*shape, seed=2)
    )
    x = normal(16, 2, 5, 8, seed=1)
    after = initialize(before, x).model
    assert tensor(after, "b").any() != is_bias
    assert near_one(variances(after, {"x": x}, ["y" if is_bias else "h"]))


@pytest.mark.parametrize("order", ["h, b", "b, h"])
@pytest.mark.parametrize("shape", [(12,), (1, 12), (1,), (), (1, 1, 12)], ids=str)
def test_a_bias_that_an_add_puts_behind_a_matmul(order, shape):
    before = model(
        f"g (float[N,5,8] x) => (float[N,5,12] y) {{ h = MatMul(x, w) y = Add({order}) }}",
        w=normal(8, 12),
        b=np.float32(0.5) * normal(*shape, seed=2),
    )
    x = normal(16, 5, 8, seed=1)
    zeroed = initialize(before, x).model
    assert not tensor(zeroed, "b").any()
    kept = initialize(before, x, bias="keep").model
    assert (tensor(kept, "b") == tensor(before, "b")).all()
    assert near_one(variances(zeroed, {"x": x}, ["y"]) | variances(kept, {"x": x}, ["y"]))
    assert unchanged_but(before, zeroed, "w", "b")
    assert unchanged_but(before, kept, "w")


@pytest.mark.parametrize("order", ["h, b", "b, h"])
def test_a_bias_that_an_add_puts_behind_a_conv(order):
    before = model(
        f"g (float[N,3,8,8] x) => (float[N,6,6,6] y) {{ h = Conv(x, w) y = Add({order}) }}",
        w=normal(6, 3, 3, 3),
        b=normal(1, 6, 1, 1) + 3,
    )
    x = normal(8, 3, 8, 8, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["y"]))
    assert not tensor(after, "b").any()


def test_an_added_constant_that_is_no_bias_is_not_touched():
    before = model(
        "g (float[N,5,8] x) => (float[N,5,12] y) { h = MatMul(x, w) y = Add(h, p) }", w=normal(8, 12), p=normal(5, 12)
    )
    x = normal(16, 5, 8, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["h"]))
    assert unchanged_but(before, after, "w")


def test_an_output_that_is_read_twice_is_measured_before_the_add():
    before = model(
        "g (float[N,8] x) => (float[N,4] y, float[N,4] z) { h = MatMul(x, w) y = Add(h, b) z = Relu(h) }",
        w=normal(8, 4),
        b=normal(4),
    )
    x = normal(64, 8, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["h"]))
    assert unchanged_but(before, after, "w")


def test_packed_query_key_value_is_a_layer_and_the_product_of_activations_is_none():
    before = model(
        """g (float[N,5,8] x) => (float[N,5,8] y) {
            packed = MatMul(x, w) s = Constant<value_ints=[8,8,8]>() q, k, v = Split<axis=-1>(packed, s)
            t = Transpose<perm=[0,2,1]>(k) a = MatMul(q, t) p = Softmax(a) o = MatMul(p, v) y = MatMul(o, u) }""",
        w=normal(8, 24),
        u=normal(8, 8),
    )
    x = normal(16, 5, 8, seed=1)
    result = initialize(before, x)
    assert [layer.name for layer in result.report.layers] == ["packed", "y"]
    assert near_one(variances(result.model, {"x": x}, ["packed", "y"]))


# Einsum


@pytest.mark.parametrize(
    ("equation", "x", "w", "flat"),
    [
        ("bi,io->bo", (64, 8), (8, 12), lambda w: [w]),
        ("...i,oi->...o", (16, 5, 8), (12, 8), lambda w: [w]),
        ("bti,hio->bhto", (16, 5, 8), (3, 8, 4), lambda w: [w.transpose(0, 2, 1).reshape(12, 8)]),
        ("bhti,hio->bhto", (16, 3, 5, 8), (3, 8, 4), list),
        ("bi,io", (64, 8), (8, 12), lambda w: [w]),
        ("zi,io", (64, 8), (8, 12), lambda w: [w]),  # the result is (o, z)
        ("bijc,ijco->bo", (64, 2, 2, 3), (2, 2, 3, 5), lambda w: [w.reshape(12, 5)]),
    ],
)
def test_einsum_that_is_a_matrix_product(equation, x, w, flat):
    shape = ", ".join(["N", *map(str, x[1:])])
    before = model(f'g (float[{shape}] x) => (float y) {{ y = Einsum<equation="{equation}">(x, w) }}', w=normal(*w))
    data = normal(*x, seed=1)
    after = initialize(before, data).model
    assert near_one(variances(after, {"x": data}))
    assert all(is_orthonormal(part) for part in flat(tensor(after, "w")))


@pytest.mark.parametrize("equation", ["bi,i->bi", "bi,ii->bi", "bi,ii"])
def test_einsum_that_is_none_is_left_alone(equation):
    before = model(
        f'g (float[N,8] x) => (float y, float z) {{ y = Einsum<equation="{equation}">(x, w) z = MatMul(x, v) }}',
        w=normal(8) if equation == "bi,i->bi" else normal(8, 8),
        v=normal(8, 4),
    )
    result = initialize(before, normal(64, 8))
    assert entry(result, "y").status == "skipped"
    assert "not a plain matrix product" in entry(result, "y").notes[0]
    assert unchanged_but(before, result.model, "v")


# Names and patterns


def test_names_come_from_the_node_or_else_from_its_output():
    before = model(
        """g (float[N,8] x) => (float[N,8] d) {
            [one] a = MatMul(x, w) [two] b = MatMul(a, v) [two] c = MatMul(b, u) d = MatMul(c, t) }""",
        w=normal(8, 8),
        v=normal(8, 8),
        u=normal(8, 8),
        t=normal(8, 8),
    )
    assert [layer.name for layer in inspect(before).layers] == ["one", "b", "c", "d"]


def test_what_onnxruntime_refuses_is_not_called_ok():
    twice = model(
        "g (float[N,8] x) => (float[N,8] b) { [one] a = MatMul(x, w) [one] b = MatMul(a, v) }",
        w=normal(8, 8),
        v=normal(8, 8),
    )
    with pytest.raises(ModelError, match=r"onnxruntime does not take the model: .*same node name"):
        initialize(twice, normal(64, 8))


def test_an_excluded_layer_stays_and_the_others_do_not_depend_on_it():
    text = "g (float[N,8] x) => (float[N,8] c) { a = MatMul(x, w) r = Relu(a) b = MatMul(r, v) c = MatMul(b, u) }"
    before = model(text, w=normal(8, 8), v=10 * normal(8, 8), u=normal(8, 8))
    x = normal(64, 8)
    all_of_them = initialize(before, x).model
    result = initialize(before, x, exclude=["b"])
    assert entry(result, "b").status == "excluded"
    assert unchanged_but(before, result.model, "w", "u")
    assert near_one(variances(result.model, {"x": x}, ["a", "c"]))
    w, v = tensor(all_of_them, "u"), tensor(result.model, "u")
    assert np.allclose(w / np.linalg.norm(w), v / np.linalg.norm(v), atol=1e-6)


def test_a_pattern_that_matches_nothing_is_an_error():
    before = model("g (float[N,8] x) => (float[N,4] y) { y = MatMul(x, w) }", w=normal(8, 4))
    with pytest.raises(LsuvError, match="matches no layer; the layers are y"):
        initialize(before, normal(64, 8), exclude=["conv*"])


def test_the_helper_finds_the_measured_values():
    """The independent check of these tests has to look at the right values itself."""
    proto = model(
        "g (float[N,8] x) => (float[N,4] y) { h = MatMul(x, w) i = Add(b, h) r = Relu(i) y = Gemm(r, v, b) }",
        w=normal(8, 4),
        v=normal(4, 4),
        b=normal(4),
    )
    assert layer_outputs(proto) == ["i", "y"]
    assert isinstance(proto, onnx.ModelProto)


# Parts of the search


def found(body, inputs="float[N,8] x", outputs="y", **tensors):
    tensors = tensors or {"w": normal(8, 8), "v": normal(8, 8)}
    return layers.find(graph_of(f"g ({inputs}) => ({outputs}) {{ {body} }}", microsoft=True, **tensors))


@pytest.mark.parametrize(
    ("activation", "kept", "linear"),
    [("", False, True), ("", True, True), ("Relu", False, True), ("LeakyRelu", False, True), ("Relu", True, False),
     ("Sigmoid", False, False), ("Sigmoid", True, False)],
)  # fmt: skip
def test_a_layer_is_linear_in_its_weight_unless_an_activation_inside_breaks_that(activation, kept, linear):
    (layer,) = found("y = Gemm(x, w, b)", w=normal(8, 8), b=normal(8)).layers
    assert layer.bias is not None
    layer = replace(layer, activation=activation, bias=replace(layer.bias, kept=kept))
    assert layer.is_linear == linear
    assert layer.is_fixed == (kept or not linear)
    assert replace(layer, by_channel=True).is_fixed


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [((), (), "aby"), (("a",), (), "a"), (("a", "y"), (), "ay"), ((), ("a",), "by"), ((), ("a", "b"), "y"),
     (("a", "b"), ("b",), "a")],
)  # fmt: skip
def test_layers_are_chosen_by_any_pattern(include, exclude, left):
    every = found("a = MatMul(x, w) b = MatMul(a, v) y = MatMul(b, u)", w=normal(8, 8), v=normal(8, 8), u=normal(8, 8))
    chosen = layers.choose(every, include, exclude)
    assert [layer.output for layer in chosen.layers] == list(left)
    assert [item.name for item in chosen.skipped] == [name for name in "aby" if name not in left]
    assert all(item.excluded and item.shape == (8, 8) for item in chosen.skipped)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_no_layer_is_told_with_its_option(option):
    every = found("y = MatMul(x, w)")
    with pytest.raises(LsuvError, match=f"`{option}` 'z' matches no layer; the layers are y"):
        layers.choose(every, **{"include": (), "exclude": (), option: ["z"]})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Conv(p, q)", "its weight is computed from the input"),
        ('y = Einsum<equation="ij,jk,kl->il">(x, w, v)', "an Einsum of 3 operands"),
        ('y = com.microsoft.FusedConv<activation="Relu">(p, k, b, p)', "adds another value inside"),
        ("c = MatMul(w, v) y = Add(x, c)", "no input of the model reaches it"),
        ("y = local.MatMul(x, w)", "operators of domain local are not known here"),
        ("y = MatMulInteger(x, w)", "quantized weights"),
        ("y = com.microsoft.Attention(x, w)", "Attention is no single matrix product"),
        ("y = MatMul(x, e)", "its weight is empty"),
        ("y, h = GRU(p, q, k)", "its weights are computed from the input"),
        ("y, h = GRU(p, k, k)", "do not fit 3 gates"),
        ("y, h = GRU(p, w, w)", "do not fit 3 gates"),
        ("y = Gemm<alpha=0.0>(x, w)", "its alpha is 0"),
    ],
)
def test_reasons_to_leave_a_node_alone(body, reason):
    tensors = {"w": normal(8, 8), "v": normal(8, 8), "k": normal(8, 8, 1), "b": normal(8), "e": normal(8, 0)}
    every = found(body, "float[N,8] x, float[N,8,5] p, float[8,8,1] q", **tensors)
    assert not every.layers
    assert not every.recurrent
    assert reason in every.skipped[0].reason
    assert not every.skipped[0].excluded


@pytest.mark.parametrize(
    "body",
    ["y = MatMul(x, x)", 'y = Einsum<equation="ij,ij,ij->i">(x, x, x)', "y = com.microsoft.Attention(x, x)",
     "y = local.Relu(x)", "y, h = com.microsoft.GRU(x, w, w)"],
)  # fmt: skip
def test_what_looks_like_no_layer_is_not_mentioned(body):
    every = found(body)
    assert not every.layers
    assert not every.skipped
    assert not every.recurrent


IF = "If(c) <then_branch = t () => (p) {{ p = Identity({0}) }}, else_branch = e () => (q) {{ q = Neg({0}) }}>"


def test_a_weight_that_an_if_chooses_is_left_alone_and_a_bias_is_not_looked_at():
    inputs = "float[N,8] x, bool c"
    every = found(f"k = {IF.format('w')} y = MatMul(x, k)", inputs)
    assert "its weight is chosen by If k" in every.skipped[0].reason
    every = found(f"k = {IF.format('b')} y = Gemm(x, w, k)", inputs, w=normal(8, 8), b=normal(8))
    (layer,) = every.layers
    assert layer.bias is not None
    assert not layer.bias.constant


@pytest.mark.parametrize(
    ("body", "notes"),
    [
        ("y = MatMul(x, w)", []),
        ("n = Neg(w) y = MatMul(x, n)", ["weight computed from constants"]),
        (
            'y = com.microsoft.FusedGemm<activation="Relu">(x, w)',
            ["measured after the Relu that is inside the FusedGemm"],
        ),
        ("d = Dropout(w, half, yes) y = MatMul(x, d)", ["its weight is dropped at random"]),
    ],
)
def test_notes(body, notes):
    (layer,) = found(body, w=normal(8, 8), half=np.float32(0.5), yes=np.array(True)).layers
    assert list(layer.notes) == notes


@pytest.mark.parametrize(
    ("body", "tensors", "is_bias"),
    [
        ("m = MatMul(x, w) y = Add(m, b)", {"b": normal(8)}, True),
        ("m = MatMul(x, w) y = Add(b, m)", {"b": normal(8)}, True),
        ("m = MatMul(x, w) y = Add(m, b)", {"b": normal(1, 8)}, True),
        ("m = MatMul(x, w) y = Add(m, b)", {"b": normal(1)}, True),
        ("m = MatMul(x, w) y = Add(m, b)", {"b": normal(1, 1, 1, 8)}, True),
        ("m = MatMul(x, w) y = Add(m, b)", {"b": normal(1, 1, 1, 1, 8)}, False),  # more axes than the output may have
        ("m = MatMul(x, w) y = Add(m, b)", {"b": normal(8, 8)}, False),
        ("m = MatMul(x, w) y = Add(m, b)", {"b": normal(8, 1)}, False),
        ("m = MatMul(x, w) y = Sub(m, b)", {"b": normal(8)}, False),
        ("m = MatMul(x, w) y = local.Add(m, b)", {"b": normal(8)}, False),
        ("m = MatMul(x, w) y = Add(m, m)", {"b": normal(8)}, False),
        ("m = MatMul(x, w) y = Add(m, x)", {"b": normal(8)}, False),
        ("m = MatMul(x, w) n = Neg(m) y = Add(m, b)", {"b": normal(8)}, False),
        ("m = MatMul(w, x) y = Add(m, b)", {"b": normal(8, 1)}, True),
        ("m = MatMul(w, x) y = Add(m, b)", {"b": normal(8)}, False),
    ],
)
def test_a_constant_behind_a_layer_that_is_its_bias(body, tensors, is_bias):
    (layer,) = found(body, w=normal(8, 8), **tensors).layers
    assert (layer.bias is not None) == is_bias
    assert layer.output == ("y" if is_bias else "m")


def test_a_value_that_is_an_output_keeps_its_constant_apart():
    (layer,) = found("m = MatMul(x, w) y = Add(m, b)", outputs="m, y", w=normal(8, 8), b=normal(8)).layers
    assert (layer.bias, layer.output) == (None, "m")


@pytest.mark.parametrize(
    ("shape", "is_bias"), [((6, 1, 1), True), ((1, 6, 1, 1), True), ((6,), False), ((1, 1, 6, 1, 1), False)]
)
def test_the_bias_behind_a_convolution(shape, is_bias):
    every = found("c = Conv(p, k) y = Add(c, b)", "float[N,3,9,9] p", k=normal(6, 3, 3, 3), b=normal(*shape))
    assert (every.layers[0].bias is not None) == is_bias


def test_a_layer_is_to_have_variance_1_and_a_bias_of_zeros_unless_another_is_decided():
    (layer,) = layers.find(
        graph_of("g (float[N,4] x) => (y) { y = Gemm(x, w, b) }", w=normal(4, 4), b=normal(4))
    ).layers
    assert layer.target == 1.0
    assert not any([layer.keeps_bias, layer.is_centred, layer.by_channel, layer.is_fixed])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y = Gemm(v, w, x)", "no input of the model reaches it"),
        ("d = DequantizeLinear(q, s) n = Mul(d, s) y = MatMul(x, n)", "quantized"),
    ],
)
def test_products_that_have_no_weight_to_initialize(body, reason):
    tensors = {"v": normal(4, 4), "w": normal(4, 4), "q": np.ones((4, 4), np.int8), "s": np.float32(0.5)}
    found = layers.find(graph_of(f"g (float[4,4] x) => (y) {{ {body} }}", **tensors))
    assert not found.layers
    assert reason in found.skipped[0].reason


@pytest.mark.parametrize(
    "chosen",
    [
        "e = Gather(experts, i)",
        "e = GatherND(experts, j)",
        "g = Gather(experts, i) e = Transpose<perm=[0,2,1]>(g)",
        "t = Transpose<perm=[0,2,1]>(experts) e = Gather(t, i)",
    ],
)
def test_experts_that_the_input_chooses_are_told(chosen):
    """A mixture of experts gathers each token's matrices from a stack, and multiplies with what it gathered."""
    inputs = "float[N,1,8] x, int64[N] i, int64[N,1] j"
    every = found(f"{chosen} y = MatMul(x, e)", inputs, experts=normal(4, 8, 8))
    assert not every.layers
    (skipped,) = every.skipped
    assert re.search("its weight is chosen by Gather(ND)? [eg], as the input has it", skipped.reason)


def test_a_product_of_two_embeddings_is_no_layer():
    every = found("a = Gather(t, i) b = Transpose<perm=[1,0]>(a) y = MatMul(a, b)", "int64[N] i", t=normal(9, 8))
    assert not every.layers
    assert not every.skipped
