"""BatchNormalization: training mode, statistics that no longer hold, and --reset-norm."""

import numpy as np
import pytest

from helpers import model, near_one, normal, tensor, unchanged_but, variances
from lsuv_cli import initialize
from lsuv_cli.model.prepare import layers_of
from working_copies import graph_of


def test_training_mode_is_warned_about():
    before = model(
        """g (float[N,8,3] x) => (float[N,8,3] y) {
            d, mask = Dropout(x, ratio, on) n, rm, rv = BatchNormalization<training_mode=1>(d, s, b, m, v)
            y = Conv(n, w) }""",
        ratio=np.float32(0.1),
        on=np.array(True),
        s=np.ones(8, np.float32),
        b=np.zeros(8, np.float32),
        m=np.zeros(8, np.float32),
        v=np.ones(8, np.float32),
        w=normal(8, 8, 1),
    )
    result = initialize(before, normal(64, 8, 3))
    text = " ".join(result.report.warnings)
    assert "1 Dropout node is in training mode" in text
    assert "1 BatchNormalization node is in training mode" in text


def test_training_mode_that_standardizes_a_weight_is_not_warned_about():
    """As timm's ScaledStdConv2d is exported: no batch comes near it."""
    before = model(
        """g (float[N,8,3] x) => (float[N,6,3] y) {
            t = Transpose<perm=[2, 0, 1]>(w) n, rm, rv = BatchNormalization<training_mode=1>(t, s, b, m, v)
            k = Transpose<perm=[1, 2, 0]>(n) a = Conv(x, k) y = Conv(a, u) }""",
        s=np.ones(6, np.float32),
        b=np.zeros(6, np.float32),
        m=np.zeros(6, np.float32),
        v=np.ones(6, np.float32),
        w=normal(8, 1, 6).transpose(2, 0, 1),
        u=normal(6, 6, 1),
    )
    report = initialize(before, normal(64, 8, 3), exclude="a").report
    assert [layer.status for layer in report.layers] == ["excluded", "ok"]
    assert not report.warnings


NORM = """g (float[N,3,6,6] x) => (float y) {
    a = Conv(x, u) n = BatchNormalization(a, s, b, m, v) r = Relu(n)
    c = Conv(r, w) o = BatchNormalization(c, s, b, m, v) y = BatchNormalization(o, s, b, m, v) }"""


def normalized():
    return model(
        NORM,
        u=normal(4, 3, 1, 1),
        w=normal(4, 4, 1, 1),
        s=np.full(4, 2, np.float32),
        b=np.full(4, 0.5, np.float32),
        m=np.full(4, 3, np.float32),
        v=np.full(4, 9, np.float32),
    )


def test_stale_statistics_are_counted():
    result = initialize(normalized(), normal(8, 3, 6, 6))
    assert any("2 BatchNormalization nodes behind layers keep statistics" in w for w in result.report.warnings)
    assert unchanged_but(normalized(), result.model, "u", "w")


def test_reset_norm_does_not_reach_a_norm_that_shares_the_vectors():
    x = normal(8, 3, 6, 6, seed=1)
    result = initialize(normalized(), x, reset_norm=True)
    nodes = [n for n in result.model.graph.node if n.op_type == "BatchNormalization"]
    for node in nodes[:2]:
        assert not tensor(result.model, node.input[3]).any()
        assert (tensor(result.model, node.input[4]) == 1).all()
    assert list(nodes[2].input) == ["o", "s", "b", "m", "v"]  # it stands behind another norm, not behind a layer
    assert (tensor(result.model, "m") == 3).all()
    assert (tensor(result.model, "v") == 9).all()
    assert near_one(variances(result.model, {"x": x}))
    assert not any("keep statistics" in w for w in result.report.warnings)


@pytest.mark.parametrize("kept", ["s", "b", "m", "v"])
def test_a_norm_that_does_more_than_multiply_is_run_as_it_is(kept):
    """A norm with mean 0, shift 0 and one factor for all channels is y = c·x; one of these numbers says otherwise."""
    vectors = {"s": np.ones(4), "b": np.zeros(4), "m": np.zeros(4), "v": np.ones(4)}
    vectors[kept] = np.array([2.0, 0.5, 1.5, 0.3])
    before = model(
        """g (float[N,3,6,6] x) => (float y) {
        h = Conv(x, u) n = BatchNormalization(h, s, b, m, v) r = Relu(n) y = Conv(r, w) }""",
        u=normal(4, 3, 1, 1),
        w=normal(8, 4, 1, 1),
        **{name: vector.astype(np.float32) for name, vector in vectors.items()},
    )
    x = normal(32, 3, 6, 6, seed=1)
    result = initialize(before, x)
    assert result.report.trials == 1
    assert near_one(variances(result.model, {"x": x}))


def test_operators_that_draw_random_numbers_are_warned_about():
    before = model("g (float[N,8] x) => (y) { n = RandomNormalLike(x) s = Add(x, n) y = MatMul(s, w) }", w=normal(8, 8))
    warnings = initialize(before, normal(64, 8)).report.warnings
    assert any(text.startswith("RandomNormalLike draws random numbers") for text in warnings)


@pytest.mark.parametrize(
    ("scale", "shift", "mean", "variance", "factor"),
    [
        ([6.0], [0.0], [0.0], [4.0], 3.0),  # of a single channel
        ([6.0, 6.0], [0.0, 0.0], [0.0, 0.0], [4.0, 4.0], 3.0),
        ([6.0, 3.0], [0.0, 0.0], [0.0, 0.0], [4.0, 1.0], 3.0),
        ([6.0, 3.0], [0.0, 0.0], [0.0, 0.0], [4.0, 4.0], None),
        ([6.0, 6.0], [0.0, 1.0], [0.0, 0.0], [4.0, 4.0], None),
        ([6.0, 6.0], [0.0, 0.0], [1.0, 0.0], [4.0, 4.0], None),
        ([6e7], [0.0], [0.0], [4.0], None),
        ([6e-8], [0.0], [0.0], [4.0], None),
        ([-6.0], [0.0], [0.0], [4.0], None),
        ([6.0], [0.0], [0.0], [-4.0], None),
    ],
)
def test_a_norm_that_multiplies_by_one_number(scale, shift, mean, variance, factor):
    tensors = {name: np.array(v, "f") for name, v in zip("shmv", (scale, shift, mean, variance), strict=True)}
    text = "g (float[N,3,5] x) => (y) { c = Conv(x, w) y = BatchNormalization<epsilon=0.0>(c, s, h, m, v) }"
    (layer,) = layers_of(graph_of(text, w=normal(len(scale), 3, 1), **tensors)).layers.layers
    assert layer.norm_factor == factor
