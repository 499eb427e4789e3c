"""A weight as matrices, against products worked out by numpy; and norms that only multiply."""

from typing import Any

import numpy as np
import pytest
from onnx import helper

from helpers import model, normal, square, values
from lsuv_cli.model.batch_norm import behind, resets
from lsuv_cli.model.constants import LeftAlone
from lsuv_cli.model.matrices import gates, of_node
from lsuv_cli.model.prepare import layers_of
from working_copies import graph_of


def form(op, shape, position=1, **attributes):
    return of_node(helper.make_node(op, ["a", "b"], ["y"], **attributes), shape, position)


@pytest.mark.parametrize("op", ["Conv", "FusedConv"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_has_a_row_for_each_output_channel(op, groups):
    weight = normal(6, 4, 3, 2)
    found = form(op, weight.shape, group=groups)
    assert found.shape == (groups, 6 // groups, 4 * 3 * 2)
    assert found.fan_in == 24
    np.testing.assert_array_equal(found.matrices(weight).reshape(6, 24), weight.reshape(6, 24))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_has_a_row_for_each_output_channel(groups):
    weight = normal(6, 4, 3, 2)
    found = form("ConvTranspose", weight.shape, group=groups)
    assert found.shape == (groups, 4, 6 // groups * 3 * 2)
    for group in range(groups):
        for out in range(4):
            own = weight[group * 6 // groups : (group + 1) * 6 // groups, out]
            np.testing.assert_array_equal(found.matrices(weight)[group, out], own.ravel())


@pytest.mark.parametrize(
    ("op", "position", "attributes", "rows_first"),
    [
        ("MatMul", 1, {}, False),
        ("MatMul", 0, {}, True),
        ("Gemm", 1, {"transB": 1}, True),
        ("Gemm", 1, {"transA": 1}, False),
        ("Gemm", 0, {"transA": 1}, False),
        ("Gemm", 0, {"transB": 1}, True),
        ("FusedMatMul", 1, {"transB": 1}, True),
    ],
)
def test_a_product_has_a_row_for_each_output(op, position, attributes, rows_first):
    weight = normal(5, 7)
    found = form(op, weight.shape, position, **attributes)
    np.testing.assert_array_equal(found.matrices(weight)[0], weight if rows_first else weight.T)
    batch = normal(3, 5, 7)
    if op == "MatMul":
        stacked = form(op, batch.shape, position).matrices(batch)
        np.testing.assert_array_equal(stacked, batch if rows_first else batch.transpose(0, 2, 1))


def test_a_vector_is_one_row():
    assert form("MatMul", (7,)).shape == (1, 1, 7)


@pytest.mark.parametrize(
    ("equation", "position", "shape", "expected"),
    [
        ("nd,dk->nk", 1, (5, 7), (1, 7, 5)),
        ("kd,nd->nk", 0, (7, 5), (1, 7, 5)),
        ("bnd,bdk->bnk", 1, (3, 5, 7), (3, 7, 5)),
        ("ndh,dhk->nk", 1, (5, 2, 7), (1, 7, 10)),
        ("nd,dhk->nhk", 1, (5, 2, 7), (1, 14, 5)),
        ("...d,dk->...k", 1, (5, 7), (1, 7, 5)),
        ("n d , d k -> n k", 1, (5, 7), (1, 7, 5)),
        ("nd,dk", 1, (5, 7), (1, 7, 5)),
        ("...d, dk", 1, (5, 7), (1, 7, 5)),
    ],
)
def test_einsum(equation, position, shape, expected):
    assert form("Einsum", shape, position, equation=equation).shape == expected


@pytest.mark.parametrize(
    ("op", "shape", "attributes", "reason"),
    [
        ("Conv", (6, 4), {}, "does not fit 1 groups"),
        ("Conv", (6, 4, 3), {"group": 4}, "does not fit 4 groups"),
        ("Conv", (6, 4, 3), {"group": 0}, "does not fit 0 groups"),
        ("FusedMatMul", (6, 4), {"transBatchA": 1}, "transposed batches"),
        ("FusedMatMul", (6, 4), {"transBatchB": 1}, "transposed batches"),
        ("Gemm", (6, 4), {"alpha": 0.0}, "alpha is 0"),
        ("MatMul", (), {}, "single number"),
        ("Einsum", (5, 7), {"equation": "nd,dd"}, "not a plain"),
        ("Einsum", (5, 7), {"equation": "nd,dk,k->n"}, "not a plain"),
        ("Einsum", (5, 7), {"equation": "nd,d...->n"}, "not a plain"),
        ("Einsum", (5, 5), {"equation": "nd,dd->n"}, "not a plain"),
        ("Einsum", (5, 7), {"equation": "nd,dk->nkd"}, "not a plain"),
        ("Einsum", (5, 7, 2), {"equation": "nd,dk->nk"}, "not a plain"),
        ("Einsum", (5, 7), {"equation": "nd,kj->nk"}, "not a plain"),
    ],
)
def test_what_is_no_plain_product(op, shape, attributes, reason):
    with pytest.raises(LeftAlone, match=reason):
        form(op, shape, **attributes)


def test_back_to_the_weight():
    cases: list[Any] = [
        ("Conv", (6, 4, 3, 2), {"group": 2}), ("ConvTranspose", (6, 4, 3, 2), {"group": 2}), ("MatMul", (3, 5, 7), {}),
        ("Einsum", (5, 2, 7), {"equation": "nd,dhk->nhk"}),
    ]  # fmt: skip
    for op, shape, attributes in cases:
        weight = normal(*shape)
        found = form(op, shape, **attributes)
        np.testing.assert_array_equal(found.weight(found.matrices(weight), shape), weight)


def test_the_gates_of_a_recurrent_layer():
    weight = normal(2, 12, 5)
    found = gates(weight.shape, 4)
    assert found.shape == (8, 3, 5)
    np.testing.assert_array_equal(found.matrices(weight)[5], weight[1, 3:6])


# BatchNormalization behind a layer


def factor(scale=2.0, shift=0.0, mean=0.0, variance=3.99, body="y = BatchNormalization<epsilon=0.01>(a, s, b, m, v)"):
    numbers = {"s": scale, "b": shift, "m": mean, "v": variance}
    vectors = {name: np.broadcast_to(np.float32(number), 8) for name, number in numbers.items()}
    graph = graph_of(f"g (float[N,8] x) => (y) {{ a = MatMul(x, w) {body} }}", **square("w"), **vectors)
    (layer,) = layers_of(graph).layers.layers
    return layer.norm_factor


def test_a_norm_that_multiplies_by_one_number():
    assert factor() == pytest.approx(1.0)
    assert factor(scale=6.0) == pytest.approx(3.0)
    assert factor(body="y = BatchNormalization(a, s, b, m, v)") == pytest.approx(2 / np.sqrt(3.99 + 1e-5), rel=1e-7)


@pytest.mark.parametrize(
    "changed",
    [
        {"shift": 1.0},
        {"mean": 1.0},
        {"scale": [1, 2, 1, 1, 1, 1, 1, 1]},
        {"variance": [1, 2, 1, 1, 1, 1, 1, 1]},
        {"scale": 0.0},
        {"scale": -2.0},
        {"scale": 1.9e6 * 2},
        {"scale": 1.9e-6},
        {"body": "y = BatchNormalization<epsilon=0.01>(a, s, b, m, v) z = Relu(a)"},
        {"body": "y = Relu(a)"},
        {"body": "y, p, q = BatchNormalization<training_mode=1>(a, s, b, m, v)"},
        {"body": "k = Add(s, s) y = BatchNormalization<epsilon=0.01>(a, k, b, m, v)"},
        {"body": "k = Add(v, v) y = BatchNormalization<epsilon=0.01>(a, s, b, m, k)"},
    ],
)
def test_a_norm_that_does_more_than_that(changed):
    assert factor(**changed) is None


def test_bounds_of_a_norm_s_factor():
    assert factor(scale=1.9e6, variance=3.99) == pytest.approx(0.95e6)
    assert factor(scale=2.1e-6, variance=3.99) == pytest.approx(1.05e-6)


def test_statistics_that_belong_to_the_old_weight():
    text = """g (float[N,8] x) => (y) {
        a = MatMul(x, w) n = BatchNormalization(a, s, b, m, v) r = Relu(n) y = BatchNormalization(r, s, b, m, v) }"""
    vectors = {name: normal(8) for name in "sbmv"}
    graph = graph_of(text, **square("w"), **vectors)
    found = list(behind(graph, layers_of(graph).layers.layers))
    assert found == [1]
    assert resets(graph, found) == {(1, 3): 0.0, (1, 4): 1.0}


def test_the_factor_is_what_the_norm_computes():
    vectors = {"s": 6.0, "b": 0.0, "m": 0.0, "v": 3.99}
    proto = model("g (float[N,8] a) => (y) { y = BatchNormalization<epsilon=0.01>(a, s, b, m, v) }",
                  **{name: np.full(8, number, np.float32) for name, number in vectors.items()})  # fmt: skip
    x = normal(5, 8)
    np.testing.assert_allclose(values(proto, {"a": x}, ["y"])["y"], 3.0 * x, rtol=1e-5)
