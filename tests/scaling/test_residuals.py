"""Residual streams: which sums there are, and `residual="bounded"`, checked by unoptimized onnxruntime in float64."""

import json
import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from helpers import entry, model, normal, values
from lsuv_cli import LsuvError, compare, initialize, inspect
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.scaling import residuals, stages
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.residuals import Streams, Sum
from lsuv_cli.target_variances import TargetVariances
from shell import lsuv
from working_copies import graph_of

X = normal(96, 16)
IMAGES = normal(12, 3, 8, 8)


def blocks(count: int, between: str = "", start: str = "", **tensors: Any) -> ModelProto:
    """A stem and pre-norm residual blocks; `between`: a node from the layer's output d_ to what is added."""
    body = [f"[stem] s0 = {start or 'MatMul(x, W)'}"]
    given: dict[str, Any] = {"W": normal(16, 16), "one": np.ones(16, np.float32), "twice": np.float32(2)}
    for k in range(count):
        added = f"d{k}"
        body.append(f"n{k} = LayerNormalization(s{k}, one) [up{k}] u{k} = MatMul(n{k}, U{k}) a{k} = Relu(u{k})")
        body.append(f"[down{k}] d{k} = Gemm(a{k}, D{k}, b{k})")
        if between:
            added = f"e{k}"
            body.append(f"e{k} = {between.replace('d_', f'd{k}')}")
        body.append(f"[sum{k}] s{k + 1} = Add(s{k}, {added})")
        given |= {f"U{k}": normal(16, 24, seed=2 * k), f"D{k}": normal(24, 16, seed=2 * k + 1)}
        given[f"b{k}"] = 0.05 * normal(16, seed=k)
    text = f"g (float[N,16] x) => (float[N,4] y) {{ {' '.join(body)} [head] y = MatMul(s{count}, H) }}"
    return model(text, **{**given, "H": normal(16, 4), **tensors})


def stream(proto: ModelProto | None, count: int, data: np.ndarray = X) -> np.ndarray:
    """The true variance of the stream before the first sum and behind each sum."""
    assert proto is not None
    found = values(proto, {"x": data}, [f"s{k}" for k in range(count + 1)])
    return np.array([value.var() for value in found.values()])


def test_kept_a_stream_grows_with_depth_and_bounded_it_goes_from_1_to_2():
    kept, held = (initialize(blocks(8), X, residual=how) for how in ("keep", "bounded"))
    assert stream(kept.model, 8)[-1] > 6
    assert np.allclose(stream(held.model, 8), 1 + np.arange(9) / 8, rtol=2e-3)
    assert {str(layer.status) for layer in held.report.layers} == {"ok"}
    told = [entry.variance for entry in held.report.sums]
    assert np.allclose(told, stream(held.model, 8)[1:], rtol=1e-4)
    assert held.report.stages == kept.report.stages  # what is measured besides costs no pass of its own
    others = [layer for layer in held.report.layers if not layer.name.startswith("down")]
    assert {layer.target for layer in others} == {1.0}


@pytest.mark.parametrize("batch", [96, 40, 7])
def test_batches_of_any_size(batch: int):
    done = initialize(blocks(4), X, residual="bounded", batch_size=batch)
    assert np.allclose(stream(done.model, 4), 1 + np.arange(5) / 4, rtol=2e-3)


@pytest.mark.parametrize(
    ("between", "tensors"),
    [
        ("Mul(d_, twice)", {}),
        ("Identity(d_)", {}),
        ("BatchNormalization(d_, three, zero, zero, one)", {"three": 3, "zero": 0}),
        ("Mul(d_, gamma)", {"gamma": normal(16, seed=77)}),
    ],
)
def test_what_stands_between_the_layer_and_the_sum_counts(between: str, tensors: dict[str, Any]):
    """The branch is measured where it is added, so a factor of 2, of 3 or of each channel is made up for."""
    wide: dict[str, Any] = {
        k: v if isinstance(v, np.ndarray) else np.full(16, v, np.float32) for k, v in tensors.items()
    }
    done = initialize(blocks(4, between, **wide), X, residual="bounded")
    assert np.allclose(stream(done.model, 4), 1 + np.arange(5) / 4, rtol=3e-3)


@pytest.mark.parametrize("options", [{"bias": "center"}, {"bias": "keep"}, {"scale": "channel"}, {"tol": 1e-4}])
def test_with_other_options_the_covariance_is_left_out_and_the_stream_is_bounded_all_the_same(options: Any):
    done = initialize(blocks(8), X, residual="bounded", **options)
    found = stream(done.model, 8)
    assert found.max() < 2.6
    assert found.min() > 0.9
    assert {str(layer.status) for layer in done.report.layers} == {"ok"}


def test_a_layer_scale_of_nearly_nothing_is_not_blown_up():
    """A branch's layer has at most the target it would have without bounds."""
    done = initialize(blocks(4, "Mul(d_, tiny)", tiny=np.float32(1e-4)), X, residual="bounded")
    assert {entry(done, f"down{k}").target for k in range(4)} == {1.0}


def test_the_plain_target_is_the_unit_and_a_target_by_name_stays():
    done = initialize(blocks(4), X, residual="bounded", target_variance=4)
    assert np.allclose(stream(done.model, 4), 4 * (1 + np.arange(5) / 4), rtol=2e-3)
    done = initialize(blocks(4), X, residual="bounded", target_variance={"down1": 1})
    targets = [entry(done, f"down{k}").target for k in range(4)]
    assert targets[1] == 1.0
    assert max(targets[0], targets[2], targets[3]) < 0.5


def test_a_stream_that_begins_above_1_is_bounded_from_there():
    data = 10 * X
    done = initialize(blocks(4, start="Identity(x)"), data, residual="bounded")
    begin = data.astype(np.float64).var()
    assert np.allclose(stream(done.model, 4, data), begin + np.arange(5) / 4, rtol=2e-3)


@pytest.mark.parametrize("size", [1e-4, 0.02, 0.4])
def test_a_stream_that_begins_below_1_is_lifted_to_1_by_its_first_branch(size: float):
    """Embeddings of a GPT-2 have the standard deviation 0.02. No branch has a target above 1, so the first sum has at
    most 1 more than the stream began with, if stream and branch do not vary together."""
    data = size * X
    done = initialize(blocks(8, start="Identity(x)"), data, residual="bounded")
    found = stream(done.model, 8, data)
    assert np.isclose(found[1], min(found[0] + 1, 1 + 1 / 8), rtol=0.02)
    assert np.allclose(found[2:], 1 + np.arange(2, 9) / 8, rtol=2e-3)
    targets = [entry(done, f"down{k}").target for k in range(8)]
    assert max(targets) <= 1.0
    assert {str(layer.status) for layer in done.report.layers} == {"ok"}


def test_a_shared_weight_lifts_a_stream_by_all_its_branches_together():
    """One weight ends all branches: lifted to 1 by the first of them, the stream would go on to 4 and more."""
    proto = blocks(4, start="Identity(x)")
    for node in proto.graph.node:
        node.input[:] = [f"{n[0]}0" if n[0] in "UDb" and n[1:].isdigit() else n for n in node.input]
    data = 0.02 * X
    done = initialize(proto, data, residual="bounded")
    assert entry(done, "down0").target == pytest.approx(1 / 16 + 1 / 16, rel=0.05)  # T/m² and T/(N·m)
    assert 0.4 < stream(done.model, 4, data)[-1] < 2.01


RESNET = """g (float[N,3,8,8] x) => (float[N,8,4,4] y) {
    [stem] a = Conv<pads=[1,1,1,1]>(x, A) r = Relu(a)
    [one] b = Conv<pads=[1,1,1,1]>(r, B) c = Relu(b) [two] d = Conv<pads=[1,1,1,1]>(c, C) [s1] e = Add(d, r) f = Relu(e)
    [three] g1 = Conv<pads=[1,1,1,1]>(f, D) [s2] h = Add(f, g1) i = Relu(h)
    [four] j = Conv<strides=[2,2], pads=[1,1,1,1]>(i, E) k = Relu(j) [five] l = Conv<pads=[1,1,1,1]>(k, F)
    [short] m = Conv<strides=[2,2]>(i, G) [s3] n = Add(l, m) o = Relu(n)
    [six] p = Conv<pads=[1,1,1,1]>(o, H) [s4] q = Sum(o, p) y = Relu(q) }"""


def resnet() -> ModelProto:
    tensors = {name: normal(8, 8, 3, 3, seed=k) for k, name in enumerate("BCDEFH")}
    return model(RESNET, A=normal(8, 3, 3, 3), G=normal(8, 8, 1, 1), **tensors)


def test_the_sums_of_a_resnet():
    """A projected shortcut begins a new stream; a ReLU goes on the old one; the branch is the side with more layers."""
    report = inspect(resnet(), IMAGES)
    found = [(s.name, s.stream, s.branch, s.branches, s.layer) for s in report.sums]
    assert found == [("s1", 1, 1, 2, "two"), ("s2", 1, 2, 2, "three"), ("s3", 2, 1, 2, "five"), ("s4", 2, 2, 2, "six")]
    truth = values(resnet(), {"x": IMAGES}, ["e", "h", "n", "q"])
    assert np.allclose([s.variance for s in report.sums], [v.var() for v in truth.values()], rtol=1e-4)
    assert np.allclose([s.mean for s in report.sums], [v.mean() for v in truth.values()], rtol=1e-3)


def test_a_resnet_is_bounded():
    done = initialize(resnet(), IMAGES, residual="bounded")
    found = values(done.model, {"x": IMAGES}, ["r", "e", "h", "m", "n", "q"])
    assert entry(done, "two").target == 1.0  # the stream begins with 0.34, behind a ReLU
    assert 1.0 < found["e"].var() < 1.5
    assert 1.0 < found["h"].var() < 2.01
    assert np.isclose(found["n"].var(), 1.5, rtol=5e-3)
    assert found["q"].var() <= 2.01
    assert {str(layer.status) for layer in done.report.layers} == {"ok"}


def test_sums_that_are_no_residual_ones():
    text = """g (float[N,16] x, float[N,16] p) => (float[N,16] y) {
        e = Add(x, p) [a] b = MatMul(e, A) [c] d = MatMul(e, C)
        f = Add(b, d) n = LayerNormalization(f, one) [g1] h = MatMul(n, G) i = Add(n, h) j = LayerNormalization(i, one)
        [k] l = MatMul(j, K) y = Add(j, l) }"""
    tensors = {name: normal(16, 16, seed=k) for k, name in enumerate("ACGK")}
    proto = model(text, one=np.ones(16, np.float32), **tensors)
    report = inspect(proto, {"x": X, "p": X[::-1]})
    assert [(s.stream, s.branch, s.branches) for s in report.sums] == [(1, 1, 1), (2, 1, 1)]
    plain, bounded = (initialize(proto, {"x": X, "p": X[::-1]}, residual=how) for how in ("keep", "bounded"))
    assert plain.model is not None
    assert bounded.model is not None
    assert [t.raw_data for t in plain.model.graph.initializer] == [t.raw_data for t in bounded.model.graph.initializer]


def test_a_shape_that_is_computed_from_a_value_is_no_way_to_it():
    """As exporters write attention: the layer's output goes through a Reshape whose shape is taken from that output."""
    text = """g (float[N,16] x) => (float[N,16] y) { [stem] s = MatMul(x, S)
        [a] b = MatMul(s, A) c = Shape(b) d = Reshape(b, c) [sum1] t = Add(s, d)
        u = Shape(x) v = Reshape(t, u) [k] l = MatMul(v, K) [sum2] y = Add(v, l) }"""
    proto = model(text, **{name: normal(16, 16, seed=k) for k, name in enumerate("SAK")})
    done = initialize(proto, X, residual="bounded")
    assert [(s.name, s.stream, s.branch, s.layer) for s in done.report.sums] == [
        ("sum1", 1, 1, "a"),
        ("sum2", 1, 2, "k"),
    ]
    truth = values(done.model, {"x": X}, ["s", "t", "y"])
    assert np.allclose([value.var() for value in truth.values()], [1, 1.5, 2], rtol=0.2)


def test_scores_and_a_mask_are_no_stream():
    text = """g (float[N,16] x, float[N,16] mask) => (float[N,16] y) { [q] a = MatMul(x, Q) b = Add(a, mask)
        c = Softmax(b) [k] y = MatMul(c, K) }"""
    proto = model(text, Q=normal(16, 16), K=normal(16, 16, seed=1))
    assert not inspect(proto, {"x": X, "mask": np.ones_like(X)}).sums


def test_a_sum_behind_the_last_layer_may_read_an_input_of_its_own():
    """The input is read by no layer; it belongs to no stage."""
    text = """g (float[N,16] x, float[N,16] late) => (float[N,16] y) { [a] b = MatMul(x, A) c = Tanh(late)
        [sum] y = Add(b, c) }"""
    proto = model(text, A=normal(16, 16))
    feeds = {"x": X, "late": X[::-1].copy()}
    report = inspect(proto, feeds)
    truth = values(proto, feeds, ["y"])["y"].var()
    assert np.isclose(report.sums[0].variance, truth, rtol=1e-4)


def test_a_branch_that_ends_in_two_layers_is_left_and_shown():
    text = """g (float[N,16] x) => (float[N,16] y) { [stem] s = MatMul(x, S) [a] b = MatMul(s, A) [g1] h = MatMul(s, G)
        i = Sigmoid(h) j = Mul(b, i) [sum1] t = Add(s, j) [k] l = MatMul(t, K) [sum2] y = Add(t, l) }"""
    proto = model(text, **{name: normal(16, 16, seed=k) for k, name in enumerate("SAGK")})
    done = initialize(proto, X, residual="bounded")
    assert [(s.name, s.layer) for s in done.report.sums] == [("sum1", ""), ("sum2", "k")]
    assert entry(done, "a").target == 1.0
    assert entry(done, "k").target < 1.0


def test_shared_blocks_have_the_target_of_their_first_use():
    proto = blocks(4)
    for node in proto.graph.node:
        node.input[:] = [f"{n[0]}0" if n[0] in "UDb" and n[1:].isdigit() else n for n in node.input]
    done = initialize(proto, X, residual="bounded")
    assert 1.1 < stream(done.model, 4)[-1] < 2.01


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_other_types(kind: Any):
    proto = blocks(4)
    code = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    for held in proto.graph.initializer:
        held.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(held).astype(kind), held.name))
    for info in (*proto.graph.input, *proto.graph.output):
        info.type.tensor_type.elem_type = code
    done = initialize(proto, X.astype(kind), residual="bounded")
    assert np.allclose(stream(done.model, 4, X.astype(kind)), 1 + np.arange(5) / 4, rtol=1e-2)


def test_the_command_shows_the_stream(tmp_path):
    onnx.save(blocks(3), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", X)
    shown = lsuv("inspect", tmp_path / "m.onnx", "--data", tmp_path / "x.npy")
    assert "variance of the residual stream at each sum" in shown.out
    assert "variance of the residual" not in lsuv("inspect", tmp_path / "m.onnx").out
    told = json.loads(lsuv("inspect", tmp_path / "m.onnx", "--data", tmp_path / "x.npy", "--json").out)
    assert [s["name"] for s in told["sums"]] == ["sum0", "sum1", "sum2"]
    out = tmp_path / "o.onnx"
    made = lsuv("init", tmp_path / "m.onnx", "--data", tmp_path / "x.npy", "--residual", "bounded", "-o", out)
    assert made.code == 0
    assert "3/3" in made.err
    assert np.allclose(stream(onnx.load(out), 3), 1 + np.arange(4) / 3, rtol=2e-3)
    assert {p.key: p.value for p in onnx.load(out).metadata_props}["lsuv.residual"] == "bounded"


def test_compare_takes_options_behind_plus_signs(tmp_path):
    inits = ["lsuv", "lsuv+center", "lsuv+channel", "lsuv+center+channel", "lsuv+bounded", "keep"]
    reports = compare(blocks(4), X, inits)
    assert list(reports) == inits
    assert reports["lsuv+center"].settings["bias"] == "center"
    assert reports["lsuv+center+channel"].settings["scale"] == "channel"
    assert reports["lsuv"].sums[-1].variance > 3.5
    assert abs(reports["lsuv+bounded"].sums[-1].variance - 2) < 0.02
    alone = initialize(blocks(4), X, bias="center", scale="channel")
    both = reports["lsuv+center+channel"].layers
    assert [layer.scale for layer in both] == [layer.scale for layer in alone.report.layers]
    for wrong in ("lsuv+centre", "msra+center", "keep+bounded", "lsuv+"):
        with pytest.raises(LsuvError, match="choose among lsuv, lsuv\\+center, lsuv\\+channel, lsuv\\+bounded, ortho"):
            compare(blocks(1), X, wrong)
    onnx.save(blocks(3), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", X)
    told = lsuv("compare", tmp_path / "m.onnx", "--data", tmp_path / "x.npy", "--inits", "lsuv,lsuv+bounded,msra")
    assert told.code == 0
    assert "variance of the residual stream at each sum" in told.out


def test_unscaled_initializations_beside_a_centred_one():
    reports = compare(blocks(2), X, "lsuv,xavier,keep", bias="center", scale="channel", residual="bounded")
    assert reports["lsuv"].settings["residual"] == "bounded"
    assert reports["xavier"].settings["bias"] == "zero"


def test_bounds_need_scaling():
    with pytest.raises(LsuvError) as caught:
        initialize(blocks(2), X, residual="bounded", rescale=False)
    assert str(caught.value) == "`residual='bounded'` needs measured outputs; `rescale=False` stops before them"


# The target of a branch, by hand: N = 4 sums from 1 to 2, so that each may add 1/4


@pytest.mark.parametrize(
    ("k", "stream", "expected"),
    [
        (1, 1.0, 0.25),  # the stream began with 1, and is to be 1.25
        (2, 1.2, 0.3),
        (2, 1.45, 0.0625),  # not less than a quarter of a step, or the branch would be silent
        (2, 1.6, 0.0625),
        (4, 0.1, 1.0),  # not more than a layer without a stream gets
    ],
)
def test_the_target_of_a_branch_beside_a_stream(k, stream, expected):
    streams = Streams({}, ())
    streams.begins[1] = (1.0, 1)
    place = Sum("s", "s", "x", "z", "y", 1, k, 4)
    assert streams._bounded(place, 1.0, Moments(0, 3.0), Moments(0, stream), joint=False) == pytest.approx(expected)


def test_the_target_of_a_branch_that_is_measured_with_its_stream():
    place = Sum("s", "s", "x", "z", "y", 1, 1, 4)
    y = Moments(0, 3.0)
    # z has variance 2, x has 1, and they do not vary together: s²·2 = 0.25, of which y has 3/2.
    together = Moments(0, 2.0, bias_variance=1.0, covariance=0.0)
    assert Streams({}, ())._bounded(place, 1.0, y, together, joint=True) == pytest.approx(0.25 / 2 * 3)
    # With Cov(x, z) = 0.5: 2s² + s + 1 = 1.25.
    s = (-1 + math.sqrt(1 + 2)) / 4
    aligned = Moments(0, 2.0, bias_variance=1.0, covariance=0.5)
    assert Streams({}, ())._bounded(place, 1.0, y, aligned, joint=True) == pytest.approx(max(2 * s * s, 0.0625) / 2 * 3)
    assert Streams({}, ())._bounded(place, 1.0, Moments(0, 0.0), together, joint=True) == 1.0
    assert Streams({}, ())._bounded(place, 1.0, y, Moments(0, 2.0, bias_variance=math.inf), joint=True) == 1.0


def test_a_weight_that_ends_several_branches_shares_their_steps():
    place = Sum("s", "s", "x", "z", "y", 1, 1, 4, uses=2)
    assert Streams({}, ())._bounded(place, 1.0, Moments(0, 3.0), Moments(0, 1.0), joint=False) == pytest.approx(0.125)


# The search


def looked_at(body: str, inputs: str = "float[N,16] x") -> tuple[Any, Any]:
    tensors = {name: normal(16, 16, seed=k) for k, name in enumerate("uvwk")}
    text = f"g ({inputs}) => (y) {{ {body} }}"
    look = layers_of(graph_of(text, **tensors, one=np.ones(16, np.float32)))
    return look, stages.depths(look.graph, look.layers.layers)


def sums_of(body: str) -> list[tuple[str, str, str, int, int, int]]:
    look, depth = looked_at(body)
    found = residuals.find(look.graph, look.layers.layers, depth)
    return [(s.stream, s.branch, s.layer, s.number, s.k, s.n) for s in found]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = MatMul(x, u) y = Add(x, a)", [("x", "a", "a", 1, 1, 1)]),
        ("a = MatMul(x, u) y = Add(a, x)", [("x", "a", "a", 1, 1, 1)]),
        ("a = MatMul(x, u) y = Sum(x, a)", [("x", "a", "a", 1, 1, 1)]),
        ("a = MatMul(x, u) y = Sum(x, a, x)", []),
        ("a = MatMul(x, u) s = Add(x, a) b = Tanh(x) y = Sum(b, s, s)", [("x", "a", "a", 1, 1, 1)]),
        ("a = MatMul(x, u) y = Sub(x, a)", []),
        ("a = MatMul(x, u) y = local.Add(x, a)", []),
        ("a = MatMul(x, u) y = Add(a, a)", []),
        ("a = MatMul(x, u) y = Add(a, one)", []),
        ("a = MatMul(x, u) b = MatMul(x, v) y = Add(a, b)", []),
        ("a = MatMul(x, u) s = Add(x, a) y = Softmax(s)", []),
        ("a = MatMul(x, u) s = Add(x, a) y = Relu(s)", [("x", "a", "a", 1, 1, 1)]),
        ("a = MatMul(x, u) r = RandomNormalLike(x) y = Add(a, r)", [("r", "a", "a", 1, 1, 1)]),
        ("a = MatMul(x, u) s = Add(x, a) b = MatMul(s, v) y = Add(s, b)",
         [("x", "a", "a", 1, 1, 2), ("s", "b", "b", 1, 2, 2)]),
        ("a = MatMul(x, u) s = Add(x, a) g = Elu(s) b = MatMul(g, v) y = Add(g, b)",
         [("x", "a", "a", 1, 1, 2), ("g", "b", "b", 1, 2, 2)]),
        ("a = MatMul(x, u) s = Add(x, a) n = LayerNormalization(s, one) b = MatMul(n, v) y = Add(n, b)",
         [("x", "a", "a", 1, 1, 1), ("n", "b", "b", 2, 1, 1)]),
        # A stream goes on through a branch that is less deep than it is.
        ("a = MatMul(x, u) s = Add(x, a) b = MatMul(x, v) y = Add(b, s)",
         [("x", "a", "a", 1, 1, 2), ("s", "b", "b", 1, 2, 2)]),
        # Where two streams meet, the one with fewer layers on its way goes on.
        ("a = MatMul(x, u) s = Add(x, a) b = MatMul(s, v) c = MatMul(b, w) t = Add(b, c) y = Add(t, s)",
         [("x", "a", "a", 1, 1, 2), ("b", "c", "c", 2, 1, 1), ("s", "t", "", 1, 2, 2)]),
        # A branch that ends in two layers, in none, or in a sum, has no last layer.
        ("a = MatMul(x, u) b = MatMul(a, v) m = Mul(a, b) y = Add(x, m)", [("x", "m", "", 1, 1, 1)]),
        ("a = MatMul(x, u) t = Tanh(a) i = Mul(t, t) y = Add(x, i)", [("x", "i", "a", 1, 1, 1)]),
        ("a = MatMul(x, u) m = Mul(a, x) y = Add(x, m)", [("x", "m", "", 1, 1, 1)]),
    ],
)  # fmt: skip
def test_streams_and_branches_by_hand(body: str, expected: list[Any]):
    assert sums_of(body) == expected


def test_a_sum_is_bounded_if_its_stream_is_known_before_its_layer_runs():
    body = "a = MatMul(x, u) s = Add(x, a) b = MatMul(x, v) t = Add(b, s) c = MatMul(t, w) y = Add(t, c)"
    look, depth = looked_at(body)
    found = residuals.find(look.graph, look.layers.layers, depth)
    held = residuals.bounded(found, look.layers.layers, depth, TargetVariances())
    assert list(held) == ["a", "c"]  # s is as deep as b
    named = residuals.bounded(found, look.layers.layers, depth, TargetVariances(by_glob=(("a", 2.0),)))
    assert list(named) == ["c"]


def test_branches_that_end_in_one_weight_are_counted():
    body = "a = MatMul(x, u) s = Add(x, a) b = MatMul(s, u) t = Add(s, b) c = MatMul(t, w) y = Add(t, c)"
    look, depth = looked_at(body)
    found = residuals.find(look.graph, look.layers.layers, depth)
    held = residuals.bounded(found, look.layers.layers, depth, TargetVariances())
    assert {name: each.uses for name, each in held.items()} == {"a": 2, "b": 2, "c": 1}


LETS_GROWTH_THROUGH = [
    "Cast<to=1>(s)", "Celu(s)", "Elu(s)", "Gelu(s)", "HardSwish(s)", "Mish(s)", "Selu(s)", "Softplus(s)", "Swish(s)",
    "Relu(s)", "Reshape(s, h)", "Expand(s, h)", "Slice(s, h, h)", "Squeeze(s, h)", "Unsqueeze(s, h)", "Tile(s, h)",
]  # fmt: skip
ENDS_A_STREAM = ["Tanh(s)", "Sigmoid(s)", "LayerNormalization(s, one)", "local.Elu(s)", "MatMul(s, k)", "Exp(s)",
                 "Mul(s, s)", "Mul(s, x)", "Expand(h, h)"]  # fmt: skip


@pytest.mark.parametrize("through", [*LETS_GROWTH_THROUGH, *ENDS_A_STREAM])
def test_operators_that_a_stream_goes_on_through(through: str):
    """`h` is a shape that is computed from the data."""
    body = f"h = Shape(x) a = MatMul(x, u) s = Add(x, a) g = {through} b = MatMul(g, v) y = Add(g, b)"
    found = {output: (number, k) for output, _, _, number, k, _ in sums_of(body)}
    assert found.get("g") in ([(1, 2)] if through in LETS_GROWTH_THROUGH else [(2, 1), None])
