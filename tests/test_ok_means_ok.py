"""What is called ok is so, and what is healthy is not given up: each case here was once reported wrongly.

The truth is unoptimized onnxruntime on the written file, its values taken as float64 (helpers.py).
"""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, inliner

from helpers import entry, model, near_one, normal, tensor, values, variances
from lsuv_cli import initialize, measure
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.model import graph as graphs

X = normal(64, 8, seed=1)


def truth(proto, batches, *names):
    """The variance of each value over all batches."""
    found = [values(proto, feeds, names) for feeds in batches]
    return {name: float(np.concatenate([f[name].ravel() for f in found]).var()) for name in names}


def statuses(result):
    return {layer.name: str(layer.status) for layer in result.report.layers}


# Sizes


def test_images_of_two_sizes_for_an_input_declared_with_minus_one():
    proto = model(
        "g (float[N,3,H,W] x) => (y) { a = Conv<pads=[1,1,1,1]>(x, w) r = Relu(a) y = Conv<pads=[1,1,1,1]>(r, v) }",
        w=normal(8, 3, 3, 3),
        v=normal(4, 8, 3, 3),
    )
    for dim in proto.graph.input[0].type.tensor_type.shape.dim[2:]:
        dim.Clear()
        dim.dim_value = -1
    batches = [{"x": normal(4, 3, 16, 16)}, {"x": 5 * normal(4, 3, 40, 40, seed=3)}]
    result = initialize(proto, batches, batch_size="all")
    assert statuses(result) == {"a": "ok", "y": "ok"}
    assert near_one(truth(result.model, batches, "a", "y"))
    assert near_one({layer.name: layer.variance for layer in result.report.layers})


def test_planes_whose_size_follows_the_batch():
    """Transposed, the samples become positions: groups have another size in a smaller last batch."""
    proto = model(
        "g (float[N,3,5] x) => (y) { t = Transpose<perm=[2,1,0]>(x) y = Conv<pads=[1,1]>(t, w) }", w=normal(4, 3, 3)
    )
    batches = [{"x": normal(16, 3, 5)}, {"x": 4 * normal(3, 3, 5, seed=2)}]
    result = initialize(proto, batches, batch_size="all")
    assert near_one(truth(result.model, batches, "y"))
    assert abs(entry(result, "y").variance - truth(result.model, batches, "y")["y"]) < 1e-4


def test_a_slice_of_a_dimension_declared_minus_one_does_not_end_the_process():
    proto = model("g (float[-1,8] x) => (y) { s = Slice(x, one, last, zero) y = MatMul(s, w) }", w=normal(8, 4),
                  one=np.array([1]), last=np.array([2**40]), zero=np.array([0]))  # fmt: skip
    assert near_one(variances(initialize(proto, X).model, {"x": X}, ["y"], reference=False))


@pytest.mark.parametrize("side", [64, 256])
def test_a_mean_that_dwarfs_the_spread_of_large_planes(side):
    proto = model(f"g (float[N,3,{side},{side}] x) => (y) {{ y = Conv(x, w, b) }}", w=normal(4, 3, 1, 1),
                  b=np.full(4, 30, np.float32))  # fmt: skip
    x = normal(2, 3, side, side)
    result = initialize(proto, x, bias="keep", tol=1e-3)
    assert statuses(result) == {"y": "ok"}
    assert near_one(variances(result.model, {"x": x}, ["y"], reference=False), 1e-4)


def test_constant_planes_of_a_million_positions():
    proto = model("g (float[N,2,1024,1024] x) => (y) { y = Conv(x, w) }", w=normal(2, 2, 1, 1))
    x = np.broadcast_to(normal(3, 2, 1, 1), (3, 2, 1024, 1024)).copy()
    result = initialize(proto, x)
    assert near_one(variances(result.model, {"x": x}, ["y"], reference=False), 1e-4)
    assert abs(entry(result, "y").variance - 1) < 1e-4


def test_rows_that_are_none_in_one_batch():
    proto = model("g (float[N,8] x, bool[N] keep) => (y) { c = Compress<axis=0>(x, keep) y = MatMul(c, w) }",
                  w=normal(8, 8))  # fmt: skip
    none, some = np.zeros(16, bool), np.arange(16) % 3 > 0
    batches = [{"x": X[:16], "keep": none}, {"x": X[16:32], "keep": some}, {"x": X[32:48], "keep": ~some}]
    result = initialize(proto, batches, batch_size="all")
    assert near_one(truth(result.model, batches[1:], "y"))


# Training mode, and optimizers that change what a graph computes


def dropout(ratio=0.5, outputs="d"):
    nodes = f"{outputs} = Dropout(x, r, t) y = MatMul(d, w) u = Relu(y) z = MatMul(u, v)"
    return model(f"g (float[N,8] x) => (z) {{ {nodes} }}",
                 w=normal(8, 8), v=normal(8, 4), r=np.float32(ratio), t=np.array(True))  # fmt: skip


@pytest.mark.parametrize("outputs", ["d", "d, mask"])
def test_a_dropout_in_training_mode_drops(outputs):
    x = normal(20_000, 8, seed=4)
    result = initialize(dropout(outputs=outputs), x)
    assert result.report.exit_code == 0
    # With other masks than ours, the variance is 1 up to the error of so many samples.
    found = variances(result.model, {"x": x}, ["y", "z"], reference=False)
    assert near_one(found, 0.04)
    scale = np.linalg.norm(tensor(result.model, "w"), axis=0) ** 2
    np.testing.assert_allclose(scale.mean(), 0.5, rtol=0.1)  # dropping half of the inputs doubles their power
    assert any("in training mode" in warning for warning in result.report.warnings)


def test_what_is_dropped_repeats_from_run_to_run():
    x = normal(64, 8)
    one, other = (initialize(dropout(), x, batch_size=16) for _ in range(2))
    assert one.model.SerializeToString(deterministic=True) == other.model.SerializeToString(deterministic=True)
    assert statuses(one) == {"y": "ok", "z": "ok"}


def test_batch_normalization_in_training_mode_is_not_spoilt_by_equal_tensors():
    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    proto = model("""g (float[N,8,4] x) => (y, m, n) {
        a, m, n = BatchNormalization<training_mode=1>(x, s, b, mean, var) y = Conv(a, w) }""",
                  w=normal(4, 8, 1), s=ones, b=zeros, mean=zeros, var=ones)  # fmt: skip
    x = 7 * normal(48, 8, 4)
    result = initialize(proto, x, batch_size=48)
    assert near_one(variances(result.model, {"x": x}, ["y"], reference=False))


def test_running_statistics_that_a_layer_reads():
    """onnxruntime keeps them in the session from run to run."""
    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    proto = model("""g (float[N,8,4] x) => (y, a, m) {
        a, m, n = BatchNormalization<training_mode=1>(x, s, b, mean, var) y = MatMul(n, w) }""",
                  w=normal(8, 8), s=ones, b=zeros, mean=zeros, var=2 * ones)  # fmt: skip
    batches = [{"x": (3 + k) * normal(6, 8, 4, seed=k)} for k in range(3)]
    result = initialize(proto, batches)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(result.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    runs = [session.run(["y"], feeds)[0] for feeds in batches]
    assert near_one({"y": np.concatenate(runs).astype(np.float64).var()})
    assert statuses(result) == {"y": "ok"}


@pytest.mark.parametrize("weight", ["w", "v"])
@pytest.mark.parametrize("matrix", ["t", "u"])
def test_a_transposed_matrix_times_a_vector(matrix, weight):
    """onnxruntime's fusion of the two computes something else, also where it folds a constant into the vector."""
    proto = model(f"""g (float[N,15] x) => (y) {{
        t = Transpose<perm=[1,0]>(x) u = Identity(t) v = Transpose(w) y = MatMul({matrix}, {weight}) }}""",
        w=normal(2))  # fmt: skip
    x = normal(2, 15)
    result = initialize(proto, x, batch_size="all")
    assert statuses(result) == {"y": "ok"}
    assert near_one(variances(result.model, {"x": x}, ["y"], reference=False))


def test_a_transposed_matrix_times_a_vector_that_is_computed():
    proto = model("""g (float[N,15] x) => (y) {
        v = ReduceMax<keepdims=0>(x, last) t = Transpose<perm=[1,0]>(x) p = MatMul(t, v)
        y = MatMul(p, w) z = MatMul(x, u) }""",
        w=normal(15, 6), u=normal(15, 5), last=np.array([1]))  # fmt: skip
    proto.graph.output.extend([onnx.ValueInfoProto(name="z")])
    x = normal(15, 15)
    result = initialize(proto, x, batch_size="all")
    assert statuses(result) == {"y": "ok", "z": "ok"}
    assert near_one(variances(result.model, {"x": x}, ["y", "z"], reference=False))


@pytest.mark.parametrize("sizes", [(4, 4, 3), (7, 7, 3), (5, 4, 2), (2, 7, 7)])
def test_a_convolution_over_the_samples(sizes):
    """With (channels, positions, samples, rows) a plane has another size in every batch."""
    proto = model("""g (float[N,4,5,6] x) => (y) {
        t = Transpose<perm=[1,3,0,2]>(x) y = ConvTranspose<strides=[2,2]>(t, w) }""", w=normal(6, 3, 2, 2))  # fmt: skip
    rows = normal(sum(sizes), 4, 5, 6, seed=1) * np.linspace(0.3, 3, sum(sizes), dtype=np.float32)[:, None, None, None]
    batches = [{"x": part} for part in np.split(rows, np.cumsum(sizes)[:-1])]
    result = initialize(proto, batches)
    outputs = np.concatenate([values(result.model, batch, ["y"])["y"].ravel() for batch in batches])
    assert outputs.var() == pytest.approx(1, abs=1e-3)
    assert entry(result, "y").variance == pytest.approx(outputs.var(), rel=1e-4)
    assert statuses(result) == {"y": "ok"}


# Names


@pytest.mark.parametrize("kind", ["factor", "mean", "square", "size", "owed", "paid0", "linear", "bias", "no_bias"])
@pytest.mark.parametrize("prefix", ["", "lsuv:"])
def test_names_like_ours_do_not_collide(kind, prefix):
    proto = model(
        "g (float[N,8] x) => (z) { y = Gemm(x, w, b) t = Tanh(y) k = Mul(t, c) z = MatMul(k, v) }",
        w=normal(8, 8), b=normal(8), v=normal(8, 8), c=np.float32(3),
    )  # fmt: skip
    name = f"{prefix}y/{kind}" if not prefix else f"{prefix}{kind}/y"
    proto.graph.node[2].input[1] = name
    next(t for t in proto.graph.initializer if t.name == "c").name = name
    proto.graph.node[1].name = f"{name}/node"
    for bias in ("zero", "keep"):
        result = initialize(proto, X, bias=bias)
        assert near_one(variances(result.model, {"x": X}, ["y", "z"], reference=False))


# Folding


def test_a_split_constant_whose_other_half_is_a_graph_output():
    proto = model(
        "g (float[N,8] x) => (float[N,8] y, float[8,8] k) { q, k = Split<axis=0, num_outputs=2>(c) y = MatMul(x, q) }",
        c=normal(16, 8),
    )
    result = initialize(proto, X)
    found = values(result.model, {"x": X}, ["y", "k"])
    assert near_one({"y": found["y"].var()})
    assert (found["k"].astype(np.float32) == tensor(proto, "c")[8:]).all()


def test_a_split_constant_that_is_the_weight_of_two_layers():
    proto = model(
        """g (float[N,8] x) => (y) {
        q, k = Split<axis=0, num_outputs=2>(c) a = MatMul(x, q) t = Tanh(a) y = MatMul(t, k) }""",
        c=normal(16, 8),
    )
    result = initialize(proto, X)
    assert near_one(variances(result.model, {"x": X}, ["a", "y"], reference=False))
    assert not any(node.op_type == "Split" for node in result.model.graph.node)


def test_a_weight_whose_shape_is_read_too():
    proto = model("g (float[N,8] x) => (y, s) { s = Shape(w) y = MatMul(x, w) }", w=normal(8, 8))
    assert near_one(variances(initialize(proto, X).model, {"x": X}, ["y"], reference=False))


def test_nothing_initialized_is_not_exit_code_0():
    proto = model("g (float[N,8] x) => (y, w2) { y = MatMul(x, w) w2 = Identity(w) }", w=normal(8, 4))
    assert initialize(proto, X).report.exit_code == 1
    assert initialize(proto, X, tied="untie").report.exit_code == 0


# Noise, ranges


NOISE = {
    "there and back": "a = Mul(x, three) b = Div(a, three) s = Sub(b, x)",
    "symmetric": "g1 = MatMul(x, sq) t = Softmax<axis=-1>(g1) r = ReduceSum<keepdims=1>(t, last) "
    "s0 = Sub(r, one) s = Mul(s0, x)",
}


@pytest.mark.parametrize("kind", NOISE)
def test_rounding_noise_is_no_signal(kind):
    proto = model(
        f"g (float[N,8] x) => (y) {{ {NOISE[kind]} h = MatMul(s, w) t2 = Tanh(h) y = MatMul(t2, v) }}",
        w=normal(8, 4), v=normal(4, 4), three=np.float32(3), one=np.float32(1), sq=normal(8, 8), last=np.array([-1]),
    )  # fmt: skip
    result = initialize(proto, X)
    assert entry(result, "h").status == "dead"
    assert entry(result, "y").status == "dead"
    assert "rounding" in " ".join(entry(result, "h").notes)
    assert np.abs(tensor(result.model, "w")).max() <= 1  # orthonormal, not blown up
    assert result.report.exit_code == 1


def test_a_layer_that_is_alive_once_noise_in_front_of_it_is_left_alone_is_scaled():
    """Sigmoid(noise) is 0.5 and hardly varies, but the columns of v have different sums."""
    proto = model(
        f"g (float[N,8] x) => (y) {{ {NOISE['there and back']} h = MatMul(s, w) q = Sigmoid(h) y = MatMul(q, v) }}",
        w=normal(8, 4), v=normal(4, 4), three=np.float32(3),
    )  # fmt: skip
    result = initialize(proto, X)
    assert statuses(result) == {"h": "dead", "y": "ok"}
    assert near_one(variances(result.model, {"x": X}, ["y"], reference=False))


@pytest.mark.parametrize("pre_init", ["orthonormal", "keep"])
def test_the_weight_of_a_dead_layer_stays_as_it_was_however_many_trials_follow(pre_init):
    """The scale of a layer with an activation inside takes several trials."""
    proto = model(
        f"""g (float[N,8] x) => (y, h) {{ {NOISE["there and back"]} h = MatMul(s, w)
        y = com.microsoft.FusedGemm<activation="Tanh">(x, v) }}""",
        microsoft=True, w=np.linalg.qr(normal(8, 4))[0], v=normal(8, 4), three=np.float32(3),
    )  # fmt: skip
    result = initialize(proto, X, target_variance=0.3, tol=0.001, pre_init=pre_init, max_trials=30)
    assert statuses(result) == {"h": "dead", "y": "ok"}
    assert result.report.trials > 2
    w = tensor(result.model, "w")
    np.testing.assert_allclose(w.T @ w, np.eye(4), atol=1e-5)


def test_a_tiny_signal_is_no_noise():
    proto = model("g (float[N,8] x) => (y) { s = Mul(x, tiny) h = MatMul(s, w) t = Tanh(h) y = MatMul(t, v) }",
                  w=normal(8, 4), v=normal(4, 4), tiny=np.float32(1e-10))  # fmt: skip
    result = initialize(proto, X)
    assert statuses(result) == {"h": "ok", "y": "ok"}
    assert near_one(variances(result.model, {"x": X}, ["h", "y"], reference=False))


@pytest.mark.parametrize(("size", "seed"), [(3, 4), (9, 2), (9, 8), (16, 1), (16, 5), (16, 11)])
def test_layers_behind_one_whose_type_holds_no_better_weight_come_to_the_target(size, seed):
    """bfloat16 has eight bits, the tolerance is 0.001 and the input's mean 30: rounded weights give h another mean."""
    proto = model(
        f"""g (float[N,2,{size},6] x) => (y) {{ f = Cast<to=1>(u) h = MatMul(f, x) r = LeakyRelu(h)
        a = MatMul(r, v) t = Relu(a) y = MatMul(t, w) }}""",
        u=normal(2, size).astype(ml_dtypes.bfloat16), v=normal(6, 4), w=normal(4, 4),
    )  # fmt: skip
    x = normal(10, 2, size, 6, seed=1) + 30
    result = initialize(proto, x, seed=seed, tol=1e-3)
    assert statuses(result) == {"h": "outside", "a": "ok", "y": "ok"}
    found = variances(result.model, {"x": x}, ["h", "a", "y"], reference=False)
    assert near_one({"a": found["a"], "y": found["y"]}, 1.1e-3)
    assert found["h"] == pytest.approx(entry(result, "h").variance, rel=1e-4)


def test_a_clip_of_double_behind_a_relu():
    """Which onnxruntime's optimizers do not load."""
    proto = model(
        "g (double[N,8] x) => (y) { a = MatMul(x, w) r = Relu(a) c = Clip(r, lo, hi) y = MatMul(c, v) }",
        w=normal(8, 8, dtype=float), v=normal(8, 4, dtype=float), lo=np.float64(0.1), hi=np.float64(1),
    )  # fmt: skip
    x = X.astype(float)
    result = initialize(proto, x)
    assert statuses(result) == {"a": "ok", "y": "ok"}
    assert near_one(variances(result.model, {"x": x}, ["a", "y"]))


@pytest.mark.parametrize("factor", [255.0, 1e4, 1e-10, -1e6])
def test_constants_that_move_pending_scales_out_of_range(factor):
    depth = 16
    nodes = " ".join(f"m{k} = MatMul({f'v{k}' if k else 'x'}, w{k}) v{k + 1} = Mul(m{k}, c)" for k in range(depth))
    proto = model(f"g (float[N,8] x) => (v{depth}) {{ {nodes} }}", c=np.float32(factor),
                  **{f"w{k}": normal(8, 8, seed=k) for k in range(depth)})  # fmt: skip
    result = initialize(proto, X)
    assert set(statuses(result).values()) == {"ok"}
    assert near_one(variances(result.model, {"x": X}, [f"m{k}" for k in range(depth)], reference=False))


def test_sums_that_move_pending_scales_out_of_range():
    """No single constant tells it: the stage is run again with shorter chains."""
    depth = 12
    nodes = " ".join(
        f"m{k} = MatMul({f'v{k}' if k else 'x'}, w{k}) e{k} = MatMul(m{k}, big) v{k + 1} = Relu(e{k})"
        for k in range(depth)
    )
    proto = model(f"g (float[N,8] x) => (v{depth}) {{ {nodes} }}", big=1e6 * normal(8, 8, seed=99),
                  **{f"w{k}": normal(8, 8, seed=k) for k in range(depth)})  # fmt: skip
    result = initialize(proto, X, exclude="e*")
    scaled = [f"m{k}" for k in range(depth)]
    assert {entry(result, name).status for name in scaled} == {"ok"}
    assert near_one(variances(result.model, {"x": X}, scaled, reference=False))


def test_float16_beyond_its_range_is_not_ok():
    half = lambda *shape, seed=0: normal(*shape, seed=seed).astype(np.float16)  # noqa: E731
    proto = model("g (float16[N,8] x) => (float16[N,8] z) { y = MatMul(x, w) k = Mul(y, c) z = MatMul(k, v) }",
                  w=half(8, 8), v=half(8, 8, seed=2), c=np.float16(60000))  # fmt: skip
    result = initialize(proto, X.astype(np.float16))
    assert statuses(result) == {"y": "ok", "z": "non-finite"}
    assert any("'z' has Inf or NaN" in warning for warning in result.report.warnings)


def test_what_is_behind_a_weight_of_low_precision_is_scaled_for_the_weight_as_it_is_stored():
    import ml_dtypes

    proto = model("g (float[N,6] x) => (y) { c = Cast<to=1>(w) a = MatMul(x, c) r = Relu(a) y = MatMul(r, v) }",
                  w=normal(6, 2).astype(ml_dtypes.bfloat16), v=normal(2, 4))  # fmt: skip
    x = normal(64, 6, seed=5)
    for seed in range(6):
        result = initialize(proto, x, tol=1e-3, seed=seed)
        assert near_one(variances(result.model, {"x": x}, ["y"], reference=False), 1e-3)


# Shared weights


def test_a_weight_whose_first_use_is_dead_is_scaled_for_its_live_uses():
    """An unrolled recurrence from a zero state."""
    proto = model(
        """g (float[N,8] x) => (y) { z = Mul(x, zero)
            h0 = MatMul(z, u) t0 = Tanh(h0) p0 = Add(t0, x)
            h1 = MatMul(p0, u) t1 = Tanh(h1) p1 = Add(t1, x)
            h2 = MatMul(p1, u) y = Tanh(h2) }""",
        u=0.01 * normal(8, 8), zero=np.float32(0),
    )  # fmt: skip
    result = initialize(proto, X)
    found = variances(result.model, {"x": X}, ["h1", "h2"], reference=False)
    assert abs(np.mean(list(found.values())) - 1) < 0.01
    assert set(statuses(result).values()) == {"tied"}
    assert result.report.exit_code == 0


# Files


def test_an_operator_set_that_onnxruntime_no_longer_runs_is_refused():
    proto = model("g (float[4,8] x) => (y) { a = MatMul(x, w) y = Add(a, b) }", opset=6, ir=3,
                  w=normal(8, 4), b=normal(4, 4))  # fmt: skip
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.NotImplemented):
        ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(ModelError, match="onnxruntime"):
        initialize(proto, normal(4, 8))


def test_the_graph_is_built_three_times(monkeypatch, tmp_path):
    built = []
    real = graphs.build
    monkeypatch.setattr(graphs, "build", lambda *given, **more: built.append(1) or real(*given, **more))
    proto = model("g (float[N,8] x) => (y) { a = Gemm(x, w, b) t = Tanh(a) y = MatMul(t, v) }",
                  w=normal(8, 8), b=normal(8), v=normal(8, 4))  # fmt: skip
    initialize(proto, X, output=tmp_path / "o.onnx", weights=tmp_path / "o.npz", before=True)
    assert len(built) == 3


def test_functions_that_list_another_operator_set_are_run():
    """As jax2onnx writes them: onnx's own inliner leaves these alone."""
    proto = model(
        """<ir_version: 9, opset_import: ["" : 21, "local" : 1]>
        g (float[N,8] x) => (y) { a = local.Block(x, w) y = local.Block(a, v) }
        <domain: "local", opset_import: ["" : 19]>
        Block (i, k) => (o) { m = MatMul(i, k) o = Tanh(m) }""",
        w=normal(8, 8), v=normal(8, 8),
    )  # fmt: skip
    result = initialize(proto, X)
    assert list(statuses(result).values()) == ["ok", "ok"]
    first = variances(inliner.inline_local_functions(_same_opset(result.model)), {"x": X}, reference=False)
    assert near_one(first)


def _same_opset(proto):
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    copy.functions[0].opset_import[0].version = 21
    return copy


def test_a_loop_in_a_constant_ends_nothing():
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Identity", ["s"], ["t"])],
        "step",
        [helper.make_tensor_value_info(n, k, s) for n, k, s in (("i", 7, []), ("c", 9, []), ("s", 1, [8, 4]))],
        [helper.make_tensor_value_info(n, k, s) for n, k, s in (("d", 9, []), ("t", 1, [8, 4]))],
    )
    proto = model("g (float[N,8] x) => (z) { y = MatMul(x, l) h = Relu(y) z = MatMul(h, v) }", w=normal(8, 4),
                  v=normal(4, 4), many=np.array(2**62), go=np.array(True))  # fmt: skip
    proto.graph.node.insert(0, helper.make_node("Loop", ["many", "go", "w"], ["l"], body=body))
    from lsuv_cli import inspect

    left = inspect(proto).layers[0]
    assert left.status == "skipped"
    assert "Loop" in left.notes[0]


def test_functions_that_multiply_without_bound_are_refused():
    depth = 24
    text = "".join(
        f"""<domain: "local", opset_import: ["" : 18, "local" : 1]>
        F{k} (a) => (b) {{ c = {call} (a) b = {call} (c) }}\n"""
        for k, call in ((k, f"local.F{k - 1}" if k else "Relu") for k in range(depth))
    )
    proto = model(
        f"""<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[N,8] x) => (y) {{ a = local.F{depth - 1} (x) y = MatMul(a, w) }}\n{text}""",
        w=normal(8, 4),
    )
    with pytest.raises(LsuvError, match="more than 1,000,000 nodes"):
        initialize(proto, X)


def test_check_does_not_call_ok_what_verification_disputes(monkeypatch):
    """Were onnxruntime's optimizers to change what a graph computes once more, it would be seen."""
    from lsuv_cli.scaling import runtime

    monkeypatch.setattr(runtime, "_broken", lambda proto: [])
    proto = model("g (float[N,15] x) => (y) { t = Transpose<perm=[1,0]>(x) y = MatMul(t, w) }", w=normal(2))
    x = normal(2, 15)
    right = initialize(proto, x, batch_size="all", max_trials=1)
    report = measure(right.model, x, batch_size="all", tol=0.5)
    assert [layer.status for layer in report.layers] == ["outside"]
    assert "without onnxruntime's optimizers" in report.layers[0].notes[0]


@pytest.mark.parametrize("size", [1e155, 1e160, 1e300])
def test_values_whose_squares_leave_the_range_of_double_are_told(size):
    """A power of Python's floats raises where a product is inf."""
    x = normal(16, 8).astype(np.float64) * size
    net = model("g (double[N,8] x) => (y) { y = MatMul(x, w) }", w=normal(8, 8).astype(np.float64))
    assert {layer.status for layer in measure(net, x).layers} == {"non-finite"}
