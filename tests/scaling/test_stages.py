"""The cut into stages gives what Algorithm 1 gives, layer by layer in float64, in as few stages as the graph allows."""

import re

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from helpers import entry, model, near_one, normal, tensor, unchanged_but, variances
from lsuv_cli import initialize
from lsuv_cli.model import graph as graphs
from lsuv_cli.model import layers
from lsuv_cli.model.file import load
from lsuv_cli.scaling.residuals import Sum
from lsuv_cli.scaling.stages import cut, in_pieces
from working_copies import graph_of

X = normal(64, 8, seed=1)


def squares(names, size=8):
    return {name: normal(size, size, seed=k) * 10.0 ** (k % 3 - 1) for k, name in enumerate(names)}


def layer_by_layer(proto, feeds, order):
    """Algorithm 1: for each (weight, value) run the whole model, then divide the weight. In float64."""
    stored = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    weights = {name: w.astype(np.float64) if w.dtype.kind == "f" else w for name, w in stored.items()}
    double = type(proto)()
    double.CopyFrom(proto)
    feeds = {name: value.astype(np.float64) for name, value in feeds.items()}
    for name, value in order:
        del double.graph.initializer[:]
        double.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
        if value not in [o.name for o in double.graph.output]:
            double.graph.output.add(name=value)
        (found,) = ReferenceEvaluator(double).run([value], feeds)
        weights[name] = weights[name] / np.asarray(found, np.float64).std()
    return weights


def agrees(text, order, feeds=None, **tensors):
    """Initialize with the weights' directions kept, compare with Algorithm 1, give the number of stages."""
    before = model(text, **tensors)
    feeds = {"x": X} if feeds is None else feeds
    result = initialize(before, feeds, pre_init="keep")
    expected = layer_by_layer(before, feeds, order)
    for name, _ in order:
        assert np.allclose(tensor(result.model, name), expected[name], rtol=2e-4, atol=0), name
    assert unchanged_but(before, result.model, *(name for name, _ in order))
    return result.report.stages


def chain(activation, depth):
    nodes, last = [], "x"
    for k in range(depth):
        nodes.append(f"h{k} = MatMul({last}, w{k}) a{k} = {activation}(h{k})")
        last = f"a{k}"
    names = [f"w{k}" for k in range(depth)]
    text = f"g (float[N,8] x) => (float[N,8] {last}) {{ {' '.join(nodes)} }}"
    return text, [(f"w{k}", f"h{k}") for k in range(depth)], squares(names)


@pytest.mark.parametrize(
    ("activation", "stages"),
    [("Relu", 1), ("LeakyRelu<alpha=0.2>", 1), ("Identity", 1), ("Tanh", 6), ("Sigmoid", 6), ("Gelu", 6), ("Elu", 6)],
)
def test_a_chain_takes_one_stage_where_activations_carry_the_scale(activation, stages):
    text, _, weights = chain(activation, 6)
    before = model(text, opset=20, **weights)
    result = initialize(before, X)
    assert near_one(variances(result.model, {"x": X}))
    assert result.report.stages == stages


@pytest.mark.parametrize("activation", ["Relu", "Tanh"])
def test_a_chain_is_scaled_as_by_algorithm_1(activation):
    text, order, weights = chain(activation, 5)
    assert agrees(text, order, **weights) == (1 if activation == "Relu" else 5)


def test_a_long_chain_is_cut_before_numbers_run_out():
    text, _, weights = chain("Relu", 40)
    before = model(text, **weights)
    result = initialize(before, X)
    assert near_one(variances(result.model, {"x": X}))
    assert 1 < result.report.stages < 40


RESIDUAL = """g (float[N,8] x) => (float[N,8] y) {
    a = MatMul(x, wa) r = Relu(a) b = MatMul(r, wb) s = Add(b, a) t = Relu(s) y = MatMul(t, wy) }"""


def test_residual():
    order = [("wa", "a"), ("wb", "b"), ("wy", "y")]
    # a and b have different pending scales, so their sum has to wait for both.
    assert agrees(RESIDUAL, order, **squares(["wa", "wb", "wy"])) == 2


def test_inception_measures_its_branches_together():
    text = """g (float[N,8] x) => (float[N,8] y) {
        a = MatMul(x, wa) b = MatMul(x, wb) r = Relu(b) c = MatMul(r, wc) d = MatMul(x, wd)
        j = Concat<axis=1>(a, c, d) k = Relu(j) y = MatMul(k, wy) }"""
    order = [("wa", "a"), ("wb", "b"), ("wc", "c"), ("wd", "d"), ("wy", "y")]
    assert agrees(text, order, **squares(["wa", "wb", "wc", "wd"]), wy=normal(24, 8)) == 2


def test_dense():
    text = """g (float[N,8] x) => (float[N,8] y) {
        a = MatMul(x, wa) r = Relu(a) i = Concat<axis=1>(x, r) b = MatMul(i, wb) s = Relu(b)
        j = Concat<axis=1>(x, r, s) y = MatMul(j, wy) }"""
    tensors = {"wa": normal(8, 8), "wb": normal(16, 8), "wy": normal(24, 8)}
    assert agrees(text, [("wa", "a"), ("wb", "b"), ("wy", "y")], **tensors) == 3


def test_attention_measures_query_key_and_value_together():
    text = """g (float[N,5,8] x) => (float[N,5,8] y) {
        q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) t = Transpose<perm=[0,2,1]>(k)
        a = MatMul(q, t) p = Softmax(a) o = MatMul(p, v) y = MatMul(o, wy) }"""
    order = [("wq", "q"), ("wk", "k"), ("wv", "v"), ("wy", "y")]
    feeds = {"x": normal(16, 5, 8, seed=1)}
    assert agrees(text, order, feeds, **squares(["wq", "wk", "wv", "wy"])) == 2


CARRYING = [
    "Relu(h)", "Neg(h)", "Abs(h)", "PRelu(h, slope)", "Dropout(h)", "Identity(h)", "Mul(h, three)", "Div(h, three)",
    "Mul(three, h)", "Add(h, h)", "Max(h, h)", "Transpose<perm=[0,1,3,2]>(h)",
    "MaxPool<kernel_shape=[2,2]>(h)", "AveragePool<kernel_shape=[2,2], pads=[0,0,1,1]>(h)",
    "LpPool<kernel_shape=[2,2], pads=[0,0,1,1]>(h)", "Gather<axis=1>(h, order)", "Expand(h, one)",
    'Pad<mode="reflect">(h, pads)', "Pad(h, pads)", "ReduceMean<keepdims=1>(h, last)", "ReduceL2<keepdims=1>(h, last)",
    "ReduceMax<keepdims=1>(h, last)", "DepthToSpace<blocksize=2>(h)", "Conv(h, kernel)",
]  # fmt: skip
WAITING = [
    "Tanh(h)", "Exp(h)", "Add(h, table)", "Max(h, three)", "Div(three, h)", "Mul(h, h)", "Clip(h, , three)", "Elu(h)",
    "Pad(h, pads, three)", "Conv(h, kernel, four)", "Softmax(h)", "ReduceSumSquare<keepdims=1>(h, last)",
    "Pow(h, three)",
]  # fmt: skip


@pytest.mark.parametrize("call", CARRYING + WAITING)
def test_a_pending_scale_goes_through_what_commutes_with_it_and_waits_for_the_rest(call):
    channels = 1 if "DepthToSpace" in call else 4
    text = f"""g (float[N,3,6,6] x) => (float[N,C,H,W] y) {{ h = Conv(x, wh) a = {call} y = Conv(a, wy) }}"""
    tensors = {
        "wh": 5 * normal(4, 3, 1, 1),
        "wy": normal(3, channels, 1, 1),
        "slope": np.full((4, 1, 1), 0.3, np.float32),
        "three": np.float32(3),
        "order": np.array([2, 0, 1, 3]),
        "one": np.array([1, 1, 1, 1]),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "last": np.array([-1]),
        "kernel": normal(4, 4, 1, 1),
        "four": normal(4),
        "table": normal(4, 6, 6),
    }
    used = {name: value for name, value in tensors.items() if name in re.findall(r"\w+", text)}
    stages = agrees_but_for_excluded(text, used)
    assert stages == (1 if call in CARRYING else 2)


def agrees_but_for_excluded(text, tensors):
    before = model(text, **tensors)
    feeds = {"x": normal(8, 3, 6, 6, seed=1)}
    exclude = ["a"] if "a = Conv" in text else []
    result = initialize(before, feeds, pre_init="keep", exclude=exclude)
    expected = layer_by_layer(before, feeds, [("wh", "h"), ("wy", "y")])
    for name in ("wh", "wy"):
        assert np.allclose(tensor(result.model, name), expected[name], rtol=2e-4, atol=0)
    assert unchanged_but(before, result.model, "wh", "wy")
    return result.report.stages


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_the_size_of_a_batch_changes_nothing(batch):
    before = model(RESIDUAL, **squares(["wa", "wb", "wy"]))
    whole, parts = (initialize(before, X, batch_size=size).model for size in (64, batch))
    for name in ("wa", "wb", "wy"):
        assert np.allclose(tensor(whole, name), tensor(parts, name), rtol=1e-4, atol=0)


def test_a_frontier_that_has_to_wait_in_a_file_changes_nothing():
    before = model(RESIDUAL, **squares(["wa", "wb", "wy"]))
    inside, outside = (initialize(before, X, memory=m, batch_size=16).model for m in (1 << 30, 0))
    assert inside.SerializeToString() == outside.SerializeToString()


def test_a_value_with_a_pending_scale_and_a_reader_far_behind():
    text = """g (float[N,8] x) => (float[N,8] y) {
        a = MatMul(x, wa) r = Relu(a) t = Tanh(r) b = MatMul(t, wb) u = Tanh(b) c = MatMul(u, wc)
        s = Add(c, r) y = MatMul(s, wy) }"""
    order = [("wa", "a"), ("wb", "b"), ("wc", "c"), ("wy", "y")]
    assert agrees(text, order, **squares(["wa", "wb", "wc", "wy"])) == 4


def test_the_shape_of_a_value_with_a_pending_scale():
    text = """g (float[N,8] x) => (float[N,8] y) {
        a = MatMul(x, wa) s = Shape(a) r = Reshape(a, s) b = MatMul(r, wb) t = Tanh(b) q = Reshape(t, s)
        y = MatMul(q, wy) }"""
    agrees(text, [("wa", "a"), ("wb", "b"), ("wy", "y")], **squares(["wa", "wb", "wy"]))


def test_a_split_of_a_value_with_a_pending_scale():
    text = """g (float[N,8] x) => (float[N,8] y) {
        a = MatMul(x, wa) n = Constant<value_ints=[4,4]>() l, r = Split<axis=1>(a, n) m = Max(l, r)
        y = MatMul(m, wy) }"""
    assert agrees(text, [("wa", "a"), ("wy", "y")], wa=5 * normal(8, 8), wy=normal(4, 8)) == 1


def test_an_excluded_layer_with_a_bias_waits():
    text = """g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, wa) m = Gemm(a, fixed, b) y = MatMul(m, wy) }"""
    before = model(text, **squares(["wa", "fixed", "wy"]), b=normal(8))
    result = initialize(before, X, pre_init="keep", exclude=["m"])
    expected = layer_by_layer(before, {"x": X}, [("wa", "a"), ("wy", "y")])
    assert np.allclose(tensor(result.model, "wy"), expected["wy"], rtol=2e-4)
    assert unchanged_but(before, result.model, "wa", "wy")
    assert result.report.stages == 2


def test_a_dead_layer_in_the_middle_of_a_chain():
    """What follows a layer that cannot be scaled is still scaled to what that layer really puts out."""
    text = """g (float[N,8] x) => (float[N,8] y) {
        a = MatMul(x, wa) b = MatMul(a, wb) c = Add(b, a) y = MatMul(c, wy) }"""
    before = model(text, wa=normal(8, 8), wb=np.zeros((8, 8), np.float32), wy=normal(8, 8))
    result = initialize(before, X, pre_init="keep")
    assert entry(result, "b").status == "dead"
    assert result.report.exit_code == 1
    found = variances(result.model, {"x": X}, ["a", "b", "y"])
    assert found["b"] == 0
    assert near_one({"a": found["a"], "y": found["y"]})
    assert unchanged_but(before, result.model, "wa", "wy")


def test_what_happens_to_the_input_takes_no_stage_of_its_own():
    text = "g (float[N,8] x) => (y) { r = Tanh(x) a = MatMul(x, A) b = MatMul(r, B) y = Add(a, b) }"
    assert agrees(text, [("A", "a"), ("B", "b")], **squares("AB")) == 1


@pytest.mark.parametrize(("limit", "pieces"), [(1, [1, 1, 1, 1, 1]), (256, [1] * 5), (512, [2, 2, 1]), (10**6, [5])])
def test_a_large_model_is_verified_in_pieces_that_keep_to_the_limit(limit, pieces):
    text, _, weights = chain("Relu", 5)
    file = load(model(text, **weights))
    graph = graphs.build(file.proto, file)
    plan = in_pieces(graph, layers.find(graph).layers, limit)
    assert [len(stage.layers) for stage in plan.stages] == pieces
    assert [layer.weight.base for stage in plan.stages for layer in stage.layers] == list(weights)


def test_a_layer_that_bounds_a_sum_waits_for_the_true_values_of_the_stream():
    """The stream is known in stage 2, because a Tanh and a scale stand before it; the branch would be in stage 0."""
    text = """g (float[N,8] x) => (y) {
        a = MatMul(x, A) t = Tanh(a) s = MatMul(t, S)
        b = MatMul(x, B) p = Relu(b) c = MatMul(p, C) q = Relu(c) d = MatMul(q, D) y = Add(s, d) }"""
    graph = graph_of(text, **squares("ABCDS"))
    found = layers.find(graph).layers
    bounded = Sum("y", "y", "s", "d", "d", 1, 1, 2)
    plain, held = (cut(graph, found, sums=sums) for sums in ({}, {"d": bounded}))
    assert (plain.stage_of["d"], held.stage_of["d"]) == (0, 2)
    assert "s" in held.stages[2].inputs
    assert held.sums == {"d": bounded}


def test_random_numbers_wait_for_nothing():
    text = """g (float[4,8] x) => (y) {
        r = RandomNormal<shape=[4,8]>() s = Add(x, r) a = MatMul(s, A) b = MatMul(x, B) y = Concat<axis=0>(a, b) }"""
    graph = graph_of(text, **squares("AB"))
    assert len(cut(graph, layers.find(graph).layers).stages) == 1
