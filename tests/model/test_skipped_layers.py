"""What is no layer, and layers that are left alone with the reason."""

import numpy as np
import pytest

from helpers import (
    entry,
    model,
    near_one,
    normal,
    tensor,
    unchanged_but,
    variances,
)
from lsuv_cli import PreInit, initialize
from lsuv_cli.errors import ModelError


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
    assert entry(result, "m").status == "skipped"
    assert "quantized" in entry(result, "m").notes[0]
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
        assert entry(result, name).status == "skipped"
        assert "quantized" in entry(result, name).notes[0]
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


def test_a_product_of_constants_to_which_an_input_is_added_has_no_weight_either():
    before = model(
        "g (float[8,4] x) => (float[8,4] y) { c = Gemm(a, b, x) y = MatMul(c, w) }",
        a=normal(8, 8), b=normal(8, 4), w=normal(4, 4),
    )  # fmt: skip
    result = initialize(before, normal(8, 4), batch_size="all")
    assert entry(result, "c").notes[0] == "no input of the model reaches it"
    assert unchanged_but(before, result.model, "w")


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
        after = initialize(before, pre_init=PreInit(kind), rescale=False).model
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
