"""Every form of layer: its output has variance 1, its weight is orthonormal as the operator multiplies with it."""

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
from lsuv_cli import initialize
from lsuv_cli.errors import LsuvError, ModelError


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


def test_gemm_with_a_c_that_still_owes_its_scale():
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
    assert entry(result, "y").status == "skipped" and "alpha" in entry(result, "y").notes[0]
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
    assert unchanged_but(before, zeroed, "w", "b") and unchanged_but(before, kept, "w")


@pytest.mark.parametrize("order", ["h, b", "b, h"])
def test_a_bias_that_an_add_puts_behind_a_conv(order):
    before = model(
        f"g (float[N,3,8,8] x) => (float[N,6,6,6] y) {{ h = Conv(x, w) y = Add({order}) }}",
        w=normal(6, 3, 3, 3),
        b=normal(1, 6, 1, 1) + 3,
    )
    x = normal(8, 3, 8, 8, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["y"])) and not tensor(after, "b").any()


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


# com.microsoft


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu", "Tanh", "HardSigmoid"])
def test_fused_conv_is_measured_behind_its_activation(activation):
    extra = {"LeakyRelu": ", activation_params=[0.1]", "HardSigmoid": ", activation_params=[0.2, 0.5]"}.get(activation)
    before = model(
        f"""g (float[N,3,8,8] x) => (float[N,4,4,4] y) {{
            a = com.microsoft.FusedConv<activation="{activation}"{extra or ""}>(x, w, b)
            y = com.microsoft.FusedConv<activation="{activation}"{extra or ""}>(a, v) }}""",
        microsoft=True,
        w=normal(4, 3, 3, 3),
        b=normal(4),
        v=normal(4, 4, 3, 3),
    )
    x = normal(8, 3, 8, 8, seed=1)
    result = initialize(before, x)
    found = variances(result.model, {"x": x}, ["a", "y"], reference=False)
    assert f"measured after the {activation} that is inside the FusedConv" in entry(result, "a").notes
    if "Relu" in activation:
        assert near_one(found) and result.report.stages == 1
    else:  # what is between -1 and 1 can come near variance 1, no more; the report tells what it got
        assert found["a"] == pytest.approx(entry(result, "a").variance, rel=1e-3)
        assert found["y"] == pytest.approx(entry(result, "y").variance, rel=1e-3)
        assert np.isfinite(tensor(result.model, "w")).all()


def test_fused_conv_that_adds_another_value_is_left_alone():
    before = model(
        """g (float[N,3,8,8] x) => (float[N,3,8,8] y) {
            a = Conv<pads=[1,1,1,1]>(x, w)
            y = com.microsoft.FusedConv<activation="Relu", pads=[1,1,1,1]>(x, v, b, a) }""",
        microsoft=True,
        w=normal(3, 3, 3, 3),
        v=normal(3, 3, 3, 3),
        b=normal(3),
    )
    result = initialize(before, normal(8, 3, 8, 8))
    assert entry(result, "y").status == "skipped"
    assert unchanged_but(before, result.model, "w")


@pytest.mark.parametrize("bias", ["zero", "keep"])
def test_fused_gemm(bias):
    before = model(
        """g (float[N,8] x) => (float[N,4] y) {
            y = com.microsoft.FusedGemm
                <activation="LeakyRelu", activation_alpha=0.2, transB=1, alpha=0.5>(x, w, b) }""",
        microsoft=True,
        w=normal(4, 8),
        b=0.1 * normal(4),
    )
    x = normal(256, 8, seed=1)
    after = initialize(before, x, bias=bias, tol=1e-3).model
    assert near_one(variances(after, {"x": x}, ["y"], reference=False))


@pytest.mark.parametrize("trans_b", [0, 1])
def test_fused_matmul(trans_b):
    before = model(
        f"g (float[N,8] x) => (float[N,12] y) {{ y = com.microsoft.FusedMatMul<alpha=0.125, transB={trans_b}>(x, w) }}",
        microsoft=True,
        w=normal(*((12, 8) if trans_b else (8, 12))),
    )
    x = normal(64, 8, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, reference=False)) and is_orthonormal(tensor(after, "w"))


def test_operators_of_a_domain_that_onnxruntime_knows_run_as_they_are():
    before = model(
        """g (float[N,8] x) => (float[N,4] y) {
            h = MatMul(x, w) a = com.microsoft.BiasGelu(h, b) i = MatMul(a, v) c = com.microsoft.QuickGelu(i)
            j = MatMul(c, u) d = com.microsoft.Gelu(j) y = MatMul(d, t) }""",
        microsoft=True,
        w=normal(8, 16),
        b=normal(16),
        v=normal(16, 16),
        u=normal(16, 16),
        t=normal(16, 4),
    )
    x = normal(64, 8, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["h", "i", "j", "y"], reference=False))
    assert unchanged_but(before, after, "w", "v", "u", "t")


def test_a_layer_of_an_unknown_domain_makes_onnxruntime_refuse_the_model_in_one_line():
    before = model('<ir_version: 9, opset_import: ["" : 18, "acme" : 1]> g (float[N,8] x) => (float[N,4] y) '
                   "{ h = MatMul(x, w) y = acme.Swirl(h) }", w=normal(8, 4))  # fmt: skip
    result = initialize(before, normal(64, 8))  # nothing behind the last layer has to run
    assert entry(result, "h").status == "ok"


# Einsum


@pytest.mark.parametrize(
    ("equation", "x", "w", "flat"),
    [
        ("bi,io->bo", (64, 8), (8, 12), lambda w: [w]),
        ("...i,oi->...o", (16, 5, 8), (12, 8), lambda w: [w]),
        ("bti,hio->bhto", (16, 5, 8), (3, 8, 4), lambda w: [w.transpose(0, 2, 1).reshape(12, 8)]),
        ("bhti,hio->bhto", (16, 3, 5, 8), (3, 8, 4), list),
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


@pytest.mark.parametrize("equation", ["bi,i->bi", "bi,ii->bi", "bi,io"])
def test_einsum_that_is_none_is_left_alone(equation):
    before = model(
        f'g (float[N,8] x) => (float y, float z) {{ y = Einsum<equation="{equation}">(x, w) z = MatMul(x, v) }}',
        w=normal(8) if equation == "bi,i->bi" else normal(8, 8),
        v=normal(8, 4),
    )
    result = initialize(before, normal(64, 8))
    assert entry(result, "y").status == "skipped" and "not a plain matrix product" in entry(result, "y").notes[0]
    assert unchanged_but(before, result.model, "v")


# Recurrent layers


RECURRENT = {
    "LSTM": (4, "y, h, c = LSTM<hidden_size=6>(x, w, r, b)"),
    "GRU": (3, "y, h = GRU<hidden_size=6>(x, w, r, b)"),
    "RNN": (1, "y, h = RNN<hidden_size=6>(x, w, r, b)"),
}


def recurrent(op):
    gates, call = RECURRENT[op]
    return gates, model(
        f"""g (float[T,N,5] x) => (float z) {{ {call}
            a = Constant<value_ints=[1]>() s = Squeeze(y, a) z = MatMul(s, v) }}""",
        w=normal(1, gates * 6, 5),
        r=normal(1, gates * 6, 6),
        b=normal(1, 2 * gates * 6),
        v=normal(6, 4),
    )


@pytest.mark.parametrize("op", RECURRENT)
def test_a_recurrent_layer_is_orthonormal_gate_by_gate_if_asked(op):
    gates, before = recurrent(op)
    x = normal(7, 16, 5, seed=1)
    result = initialize(before, x, batch_size="all", recurrent=True)
    assert entry(result, "y").status == "pre-init"
    for name in ("w", "r"):
        weight = tensor(result.model, name)[0]
        assert all(is_orthonormal(gate) for gate in np.split(weight, gates))
        assert np.allclose(np.linalg.norm(weight[:5], axis=0 if name == "w" else 1)[0], 1, atol=1) and weight.any()
    assert near_one(variances(result.model, {"x": x}, ["z"]))
    assert unchanged_but(before, result.model, "w", "r", "v")


@pytest.mark.parametrize("op", RECURRENT)
def test_a_recurrent_layer_is_left_alone_otherwise(op):
    _, before = recurrent(op)
    result = initialize(before, normal(7, 16, 5), batch_size="all")
    assert entry(result, "y").status == "skipped" and "`recurrent=True`" in entry(result, "y").notes[0]
    assert unchanged_but(before, result.model, "v")


def test_a_recurrent_weight_that_something_else_reads_is_not_written():
    before = model(
        """g (float[T,N,6] x) => (float[T,D,N,6] y, float[T,D,N,6] z) {
            y, h = RNN<hidden_size=6>(x, w, r) z, i = RNN<hidden_size=6>(x, w, s) }""",
        w=normal(1, 6, 6),
        r=normal(1, 6, 6),
        s=normal(1, 6, 6),
    )
    x = normal(7, 16, 6)
    result = initialize(before, x, batch_size="all", recurrent=True)
    assert {layer.status for layer in result.report.layers} == {"skipped"}
    assert unchanged_but(before, result.model)
    untied = initialize(before, x, batch_size="all", recurrent=True, tied="untie").model
    names = [node.input[1] for node in untied.graph.node]
    assert len(set(names)) == 2 and all(is_orthonormal(tensor(untied, name)[0]) for name in names)


# What is no layer


def test_what_is_no_layer_is_not_listed():
    before = model(
        """g (float[N,8] x, int64[N] i) => (float[N,4] y) {
            e = Gather(table, i) a = Add(x, e) p = PRelu(a, slope) n = LayerNormalization(p, scale)
            y = MatMul(n, w) }""",
        table=normal(10, 8),
        slope=normal(8),
        scale=normal(8),
        w=normal(8, 4),
    )
    feeds = {"x": normal(64, 8), "i": np.arange(64) % 10}
    result = initialize(before, feeds)
    assert [layer.name for layer in result.report.layers] == ["y"]
    assert near_one(variances(result.model, feeds, ["y"]))
    assert unchanged_but(before, result.model, "w")


def test_quantized_operators_are_left_alone_with_the_reason():
    before = model(
        """g (float[N,8] x) => (float[N,4] y, float[N,4] z) {
            q, s, p = DynamicQuantizeLinear(x) m = MatMulInteger(q, w, p) f = Cast<to=1>(m) y = Mul(f, s)
            z = MatMul(x, v) }""",
        w=normal(8, 4).astype(np.int8),
        v=normal(8, 4),
    )
    result = initialize(before, normal(64, 8))
    assert entry(result, "m").status == "skipped" and "quantized" in entry(result, "m").notes[0]
    assert unchanged_but(before, result.model, "v")


def test_more_quantized_operators_are_left_alone():
    before = model(
        """g (uint8[N,3,6,6] x, float[N,8] f) => (int32 a, uint8 b, float[N,4] y) {
            a = ConvInteger(x, w) b = QLinearConv(x, one, zero, w, one, zero, one, zero)
            n = com.microsoft.MatMulNBits<K=8, N=4, bits=4, block_size=16>(f, packed, scales) y = MatMul(n, v) }""",
        microsoft=True,
        w=(normal(2, 3, 3, 3) * 10).astype(np.uint8),
        one=np.float32(1),
        zero=np.uint8(0),
        packed=np.full((4, 1, 8), 0x3A, np.uint8),
        scales=np.ones(4, np.float32),
        v=normal(4, 4),
    )
    feeds = {"x": np.ones((64, 3, 6, 6), np.uint8), "f": normal(64, 8)}
    result = initialize(before, feeds)
    for name in ("a", "b", "n"):
        assert entry(result, name).status == "skipped" and "quantized" in entry(result, name).notes[0]
    assert near_one(variances(result.model, feeds, ["y"], reference=False))
    assert unchanged_but(before, result.model, "v")


def test_a_weight_that_an_input_makes_is_no_weight():
    before = model(
        "g (float[N,3,6,6] x, float[2,3,3,3] k) => (float y) { h = Conv(x, k) y = Conv(h, w) }", w=normal(4, 2, 3, 3)
    )
    feeds = {"x": normal(8, 3, 6, 6), "k": normal(2, 3, 3, 3)}
    result = initialize(before, feeds, batch_size="all")
    assert "computed from the input" in entry(result, "h").notes[0]
    assert near_one(variances(result.model, feeds, ["y"]))


def test_a_layer_that_no_input_reaches_is_left_alone():
    before = model(
        "g (float[N,8] x) => (float[N,4] y) { c = MatMul(a, b) h = MatMul(x, w) y = Add(h, c) }",
        a=normal(1, 8),
        b=normal(8, 4),
        w=normal(8, 4),
    )
    result = initialize(before, normal(64, 8))
    assert "no input of the model reaches it" in entry(result, "c").notes
    # c is what is added right behind the layer: its bias, in a tensor of its own.
    assert entry(result, "h").status == "ok"
    assert (tensor(result.model, "a") == tensor(before, "a")).all()


def test_a_model_without_layers_is_refused_in_one_line():
    with pytest.raises(ModelError, match="has no layer that can be initialized"):
        initialize(model("g (float[N,8] x) => (float[N,8] y) { y = Relu(x) }"), normal(4, 8))


def test_an_empty_weight_and_one_of_a_single_number():
    before = model(
        "g (float[N,8] x) => (float[N,0] y, float[N,1] z) { y = MatMul(x, e) h = MatMul(x, w) z = MatMul(h, s) }",
        e=np.zeros((8, 0), np.float32),
        w=normal(8, 1),
        s=np.full((1, 1), 3, np.float32),
    )
    x = normal(64, 8)
    result = initialize(before, x)
    assert "empty" in entry(result, "y").notes[0]
    assert near_one(variances(result.model, {"x": x}, ["h", "z"]))


@pytest.mark.parametrize(
    ("call", "shape", "weight", "fan_in"),
    [
        ("MatMul(x, w)", (2, 20), (20, 300), 20),
        ("MatMul(w, x)", (2, 20, 3), (300, 20), 20),
        ("Gemm<transB=1>(x, w)", (2, 20), (300, 20), 20),
        ("Gemm(x, w)", (2, 20), (20, 300), 20),
        ("Conv(x, w)", (2, 5, 6, 6), (100, 5, 3, 3), 45),
        ("Conv<group=5>(x, w)", (2, 5, 6, 6), (500, 1, 3, 3), 9),
        ("ConvTranspose(x, w)", (2, 10, 6, 6), (10, 50, 3, 3), 90),
        ("ConvTranspose<group=2>(x, w)", (2, 10, 6, 6), (10, 50, 3, 3), 45),
        ('Einsum<equation="bi,oi->bo">(x, w)', (2, 20), (300, 20), 20),
    ],
)
def test_the_number_of_inputs_is_counted_along_the_right_axes(call, shape, weight, fan_in):
    dims = ", ".join(["N", *map(str, shape[1:])])
    before = model(f"g (float[{dims}] x) => (float y) {{ y = {call} }}", w=normal(*weight))
    for kind, gain in (("xavier", 1), ("msra", 2)):
        after = initialize(before, pre_init=kind, rescale=False).model
        assert tensor(after, "w").astype(float).var() == pytest.approx(gain / fan_in, rel=0.1)
        assert unchanged_but(before, after, "w")


def test_operators_with_several_products_inside_are_left_alone():
    before = model(
        """g (float[N,5,8] x) => (float[N,5,8] y, float[N,5,4] z) {
            y = com.microsoft.Attention<num_heads=2>(x, w, b) z = MatMul(y, v) }""",
        microsoft=True,
        w=normal(8, 24),
        b=normal(24),
        v=normal(8, 4),
    )
    x = normal(16, 5, 8)
    result = initialize(before, x)
    assert "no single matrix product" in entry(result, "y").notes[0]
    assert near_one(variances(result.model, {"x": x}, ["z"], reference=False))
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
    result = initialize(before, normal(64, 8))
    assert [layer.name for layer in result.report.layers] == ["one", "b", "c", "d"]


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
