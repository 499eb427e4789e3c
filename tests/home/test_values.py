# mypy: disable-error-code="var-annotated"
"""A checkpoint whose tensors are found by value: what exporters do to weights, by hand, and the way back.

Every test computes the network from the checkpoint that came back, in numpy, and compares with the written model.
"""

import ml_dtypes
import numpy as np
import pytest

from helpers import Array, model, normal, values
from lsuv_cli import initialize
from lsuv_cli.errors import LsuvError

X = normal(64, 6, seed=9)


def run(proto, like, data=X, **settings):
    return initialize(proto, data, like=like, **settings)


def output(done, name="y", data=X):
    return values(done.model, {"x": data}, [name])[name]


def scoped(proto, **scopes):
    """Nodes, by their outputs, get the module scopes that PyTorch's exporter writes."""
    for node in proto.graph.node:
        if node.output[0] in scopes:
            path = scopes[node.output[0]]
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", path, "linear"]))
    return proto


def relu(x):
    return np.maximum(x, 0)


def wide(array) -> Array:
    return np.asarray(array, np.float64)


def close(one, other, tolerance=1e-5):
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


# Layouts


@pytest.mark.parametrize("square", [False, True])
def test_a_transposed_weight(square):
    weight = normal(6, 6) if square else normal(4, 6)
    proto = model(f"g (float[N,6] x) => (float[N,{len(weight)}] y) {{ y = MatMul(x, val_1) }}", val_1=weight.T)
    done = run(proto, {"fc.weight": weight})
    assert done.report.carried.tensors == done.report.carried.total == 1
    assert done.report.exit_code == 0
    close(X @ done.weights["fc.weight"].T, output(done))
    assert not np.array_equal(done.weights["fc.weight"], weight)


def test_kernels_of_another_framework():
    """Keras: (h, w, in, out), depthwise (h, w, in, multiplier), transposed (h, w, out, in)."""
    data = normal(8, 4, 9, 9)
    kernel, depthwise, transposed = normal(3, 3, 4, 4), normal(3, 3, 4, 2, seed=1), normal(3, 3, 5, 8, seed=2)
    proto = model(
        "g (float[N,4,9,9] x) => (float[N,5,h,w] y) { a = Conv(x, A) b = Conv<group=4>(a, B) y = ConvTranspose(b, C) }",
        A=kernel.transpose(3, 2, 0, 1),
        B=depthwise.transpose(2, 3, 0, 1).reshape(8, 1, 3, 3),
        C=transposed.transpose(3, 2, 0, 1),
    )
    done = run(proto, {"arr_0": kernel, "arr_1": depthwise, "arr_2": transposed}, data)
    assert done.report.carried.tensors == 3
    found = {t.name: t for t in done.model.graph.initializer}
    back = [done.weights[f"arr_{k}"] for k in range(3)]
    expected = [back[0].transpose(3, 2, 0, 1), back[1].transpose(2, 3, 0, 1).reshape(8, 1, 3, 3)]
    expected.append(back[2].transpose(3, 2, 0, 1))
    for name, array in zip("ABC", expected, strict=True):
        np.testing.assert_array_equal(np.frombuffer(found[name].raw_data, np.float32), array.ravel())


def test_a_kernel_turned_around():
    data, kernel = normal(8, 4, 9, 9), normal(3, 3, 4, 5)
    proto = model(
        "g (float[N,4,9,9] x) => (float[N,5,h,w] y) { y = ConvTranspose(x, C) }",
        C=kernel[::-1, ::-1].transpose(2, 3, 0, 1).copy(),
    )
    done = run(proto, {"k": kernel}, data)
    stored = np.frombuffer(done.model.graph.initializer[0].raw_data, np.float32)
    np.testing.assert_array_equal(stored, done.weights["k"][::-1, ::-1].transpose(2, 3, 0, 1).ravel())


def test_heads_that_are_merged():
    """Flax: an attention's projection is (in, heads, size)."""
    kernel = normal(6, 2, 3)
    proto = model("g (float[N,6] x) => (float[N,6] y) { y = MatMul(x, W) }", W=kernel.reshape(6, 6))
    done = run(proto, {"kernel": kernel})
    close(X @ done.weights["kernel"].reshape(6, 6), output(done))


def test_slices_of_a_packed_tensor():
    packed, bias = normal(12, 6), normal(12)
    names = "qkv"
    text = " ".join(f"m{c} = MatMul(x, W{c}) a{c} = Add(m{c}, b{c})" for c in names)
    proto = model(
        f"g (float[N,6] x) => (float[N,4] y) {{ {text} s = Add(aq, ak) y = Add(s, av) }}",
        **{f"W{c}": packed[4 * k : 4 * k + 4].T for k, c in enumerate(names)},
        **{f"b{c}": bias[4 * k : 4 * k + 4] for k, c in enumerate(names)},
    )
    done = run(proto, {"in_proj_weight": packed, "in_proj_bias": bias})
    assert (done.report.carried.tensors, done.report.carried.total) == (6, 6)
    assert done.weights["in_proj_weight"].shape == (12, 6)
    assert not done.weights["in_proj_bias"].any()
    for k, c in enumerate(names):
        close(X @ done.weights["in_proj_weight"][4 * k : 4 * k + 4].T, output(done, f"a{c}"))


def test_a_slice_that_is_excluded_stays():
    packed = normal(8, 6)
    proto = model(
        "g (float[N,6] x) => (float[N,4] y) { a = MatMul(x, A) b = MatMul(x, B) y = Add(a, b) }",
        A=packed[:4].T,
        B=packed[4:].T,
    )
    done = run(proto, {"w": packed}, exclude="b")
    np.testing.assert_array_equal(done.weights["w"][4:], packed[4:])
    close(X @ done.weights["w"][:4].T, output(done, "a"))


def test_a_join_of_two_tensors():
    one, two = normal(4, 6), normal(3, 6, seed=1)
    proto = model("g (float[N,6] x) => (float[N,7] y) { y = MatMul(x, W) }", W=np.concatenate([one, two]).T)
    done = run(proto, {"one": one, "two": two})
    close(X @ np.concatenate([done.weights["one"], done.weights["two"]]).T, output(done))


def lstm(forward, backward):
    """PyTorch's gates are in the order i f g o, ONNX's i o f c."""
    order = np.r_[0:3, 9:12, 3:9]
    joined = {
        "W": np.stack([forward["weight_ih"][order], backward["weight_ih"][order]]),
        "R": np.stack([forward["weight_hh"][order], backward["weight_hh"][order]]),
    }
    text = """g (float[S,N,6] x) => (float[S,D,N,3] y) {
        y = LSTM<direction="bidirectional", hidden_size=3>(x, W, R) }"""
    return model(text, **joined), order


def test_gates_joined_and_reordered():
    names = {"weight_ih": (12, 6), "weight_hh": (12, 3)}
    like = {
        f"lstm.{name}_l0{suffix}": normal(*shape, seed=k + 2 * bool(suffix))
        for suffix in ("", "_reverse")
        for k, (name, shape) in enumerate(names.items())
    }
    of = [{name: like[f"lstm.{name}_l0{suffix}"] for name in names} for suffix in ("", "_reverse")]
    proto, order = lstm(*of)
    data = normal(5, 4, 6)
    done = run(proto, like, data, recurrent=True)
    assert (done.report.carried.tensors, done.report.carried.total) == (2, 2)
    stored = {t.name: np.frombuffer(t.raw_data, np.float32).reshape(t.dims) for t in done.model.graph.initializer}
    for k, suffix in enumerate(("", "_reverse")):
        np.testing.assert_array_equal(stored["W"][k], done.weights[f"lstm.weight_ih_l0{suffix}"][order])
        np.testing.assert_array_equal(stored["R"][k], done.weights[f"lstm.weight_hh_l0{suffix}"][order])
    kept = run(proto, like, data, pre_init="keep", rescale=False)
    assert all(np.array_equal(kept.weights[key], like[key]) for key in like)
    assert kept.report.carried.total == 0


def test_half_precision_in_the_model_alone():
    """Rounded to float16, thousands of numbers repeat; the layout is found all the same."""
    weight = normal(64, 64)
    text = "g (float16[N,64] x) => (float16[N,64] y) { y = MatMul(x, W) }"
    data = normal(64, 64, seed=3)
    done = run(model(text, W=weight.astype(np.float16).T), {"w": weight}, data)
    assert done.weights["w"].dtype == np.float32
    close(data.astype(np.float16) @ wide(done.weights["w"]).T, output(done, data=data.astype(np.float16)), 2e-3)


def test_a_checkpoint_in_bfloat16():
    weight = normal(8, 6).astype(ml_dtypes.bfloat16)
    proto = model("g (float[N,6] x) => (float[N,8] y) { y = MatMul(x, W) }", W=weight.astype(np.float32).T)
    done = run(proto, {"w": weight})
    assert done.weights["w"].dtype == weight.dtype
    assert done.report.exit_code == 0
    close(X @ wide(done.weights["w"]).T, output(done), 1e-2)


def test_a_value_that_does_not_fit_its_type_is_not_carried():
    weight = np.float16(6e4) * (1 - normal(8, 6).astype(np.float16) * np.float16(0.01))
    tiny = (X * 1e-9).astype(np.float32)
    proto = model("g (float[N,6] x) => (float[N,8] y) { y = MatMul(x, W) }", W=weight.astype(np.float32).T)
    done = run(proto, {"w": weight}, tiny)
    assert done.report.exit_code == 1
    assert done.report.carried.left[0].reason == "w of type float16 cannot hold the new values"
    np.testing.assert_array_equal(done.weights["w"], weight)


# Equal tensors


def two_copies(merged):
    second = "A" if merged else "B"
    tensors = {"A": normal(6, 6)} if merged else {"A": normal(6, 6), "B": normal(6, 6)}
    return model(
        f"g (float[N,6] x) => (float[N,6] y) {{ a = MatMul(x, A) r = Relu(a) y = MatMul(r, {second}) }}", **tensors
    )


@pytest.mark.parametrize("merged", [False, True])
def test_copies_are_told_apart_by_module_scope(merged):
    like = {"layers.1.fc.weight": normal(6, 6).T.copy(), "layers.0.fc.weight": normal(6, 6).T.copy()}
    proto = scoped(two_copies(merged), a="layers.0.fc", y="layers.1.fc")
    done = run(proto, like, tied="untie")
    first, second = (done.weights[f"layers.{k}.fc.weight"] for k in range(2))
    assert not np.array_equal(first, second)
    close(relu(X @ first.T) @ second.T, output(done))


def test_copies_are_told_apart_by_node_names():
    proto = two_copies(False)
    for node, name in zip(proto.graph.node, ("/d1/d1.0/MatMul", "/Relu", "/d1/d1.2/MatMul"), strict=True):
        node.name = name
    done = run(proto, {"d1.2.weight": normal(6, 6).T.copy(), "d1.0.weight": normal(6, 6).T.copy()})
    close(relu(X @ done.weights["d1.0.weight"].T) @ done.weights["d1.2.weight"].T, output(done))


def test_copies_that_nothing_tells_apart_are_an_error_that_lists_them():
    like = {"one": normal(6, 6), "two": normal(6, 6)}
    with pytest.raises(LsuvError, match=r"A may be one or two; B may be one or two") as caught:
        run(two_copies(False), like)
    assert "\n" not in str(caught.value)


def test_copies_that_get_the_same_values_need_not_be_told_apart():
    done = run(two_copies(True), {"one": normal(6, 6), "two": normal(6, 6)})
    np.testing.assert_array_equal(done.weights["one"], done.weights["two"])
    close(relu(X @ done.weights["one"]) @ done.weights["two"], output(done))


def test_a_copy_that_was_merged_away_gets_the_values_too():
    """Of two equal layers on one input an exporter leaves one node; its scope is that of one module."""
    proto = model("g (float[N,6] x) => (float[N,6] y) { a = MatMul(x, A) y = Add(a, a) }", A=normal(6, 6))
    done = run(scoped(proto, a="one"), {"one.weight": normal(6, 6).T.copy(), "two.weight": normal(6, 6).T.copy()})
    np.testing.assert_array_equal(done.weights["one.weight"], done.weights["two.weight"])
    close(2 * X @ done.weights["one.weight"].T, output(done))


def test_zero_biases_need_not_be_told_apart():
    zeros = np.zeros(6, np.float32)
    proto = model(
        "g (float[N,6] x) => (float[N,6] y) { a = Gemm<transB=1>(x, A, z) r = Relu(a) y = Gemm<transB=1>(r, B, z) }",
        A=normal(6, 6),
        B=normal(6, 6, seed=1),
        z=zeros,
    )
    like = {
        "second.weight": normal(6, 6, seed=1),
        "second.bias": zeros,
        "norm.bias": zeros,
        "first.weight": normal(6, 6),
    }
    done = run(proto, like)
    assert (done.report.carried.tensors, done.report.carried.total) == (2, 2)
    assert not done.weights["second.bias"].any()
    close(relu(X @ done.weights["first.weight"].T) @ done.weights["second.weight"].T, output(done))


def zero_weights(*names):
    proto = model(
        "g (float[N,6] x) => (float[N,6] y) { a = MatMul(x, A) r = Relu(a) y = MatMul(r, Z) }",
        A=normal(6, 6),
        Z=np.zeros((6, 6), np.float32),
    )
    zeros = {f"{name}.weight": np.zeros((6, 6), np.float32) for name in names}
    return scoped(proto, a="fc", y=names[0]), {"fc.weight": normal(6, 6).T.copy(), **zeros}


def test_a_weight_of_zeros_has_the_layout_of_its_kind():
    proto, like = zero_weights("zero")
    done = run(proto, like)
    close(relu(X @ done.weights["fc.weight"].T) @ done.weights["zero.weight"].T, output(done))


def test_a_square_of_zeros_alone_does_not_tell_its_axes():
    proto = model(
        "g (float[N,6] x) => (float[N,6] y) { a = Gemm(x, A) r = Relu(a) y = MatMul(r, Z) }",
        A=normal(6, 6),
        Z=np.zeros((6, 6), np.float32),
    )
    done = run(proto, {"a": normal(6, 6), "z": np.zeros((6, 6), np.float32)})
    assert [item.name for item in done.report.carried.left] == ["Z"]
    assert done.report.exit_code == 1
    assert not done.weights["z"].any()


def test_zeros_that_may_be_merged_are_not_carried():
    proto, like = zero_weights("zero", "other")
    done = run(proto, like)
    (left,) = done.report.carried.left
    assert left.name == "Z"
    assert "other.weight" in left.reason
    assert not done.weights["zero.weight"].any()


# One tensor at home, two in the model


@pytest.mark.parametrize("keys", [("embed.weight",), ("embed.weight", "head.weight")])
def test_a_tied_embedding_is_not_overwritten(keys):
    table = normal(9, 6)
    proto = model(
        """g (int64[N] x) => (float[N,9] y) {
            e = Gather(table, x) h = Gemm<transB=1>(e, F) r = Relu(h) y = MatMul(r, head) }""",
        table=table,
        F=normal(6, 6, seed=1),
        head=table.T.copy(),
    )
    proto = scoped(proto, e="embed", h="fc", y="head")
    ids = np.arange(64) % 9
    done = run(proto, {"fc.weight": normal(6, 6, seed=1), **{key: table.copy() for key in keys}}, ids)
    (left,) = done.report.carried.left
    assert left.name == "head"
    assert "embed.weight is one tensor in the checkpoint" in left.reason
    assert "Gather" in left.reason
    assert done.report.exit_code == 1
    for key in keys:
        np.testing.assert_array_equal(done.weights[key], table)
    close(table[ids] @ done.weights["fc.weight"].T, output(done, "h", ids))


def test_one_memory_under_two_names_is_one_tensor():
    weight = normal(6, 6)
    proto = scoped(two_copies(False), a="one", y="two")
    done = run(proto, {"one.weight": weight, "two.weight": weight}, tied="untie")
    assert len(done.report.carried.left) == 2
    np.testing.assert_array_equal(done.weights["two.weight"], weight)


def test_a_module_called_twice_and_untied_is_not_carried():
    proto = scoped(two_copies(True), a="fc", y="fc")
    like = {"fc.weight": normal(6, 6).T.copy()}
    assert not run(proto, like).report.carried.left
    done = run(proto, like, tied="untie")
    assert done.report.exit_code == 1
    assert len(done.report.carried.left) == 2
    np.testing.assert_array_equal(done.weights["fc.weight"], like["fc.weight"])


# Weights that are computed


def norm_of(size, trained, seed=5):
    if not trained:
        return {
            "weight": np.ones(size),
            "bias": np.zeros(size),
            "running_mean": np.zeros(size),
            "running_var": np.ones(size),
        }
    found = {name: normal(size, seed=seed + k) for k, name in enumerate(("weight", "bias", "running_mean"))}
    return {**found, "weight": 1 + 0.1 * found["weight"], "running_var": 0.5 + normal(size, seed=seed + 3) ** 2}


def folded(trained, own_bias, epsilon=1e-3):
    """Two convolutions (1x1) with BatchNorm behind, as an exporter folds them."""
    like, tensors = {}, {}
    for k in range(2):
        weight, bias = normal(6, 6, 1, 1, seed=k), normal(6, seed=20 + k) if own_bias else None
        norm = {key: np.asarray(array, np.float32) for key, array in norm_of(6, trained, 30 + 5 * k).items()}
        f = wide(norm["weight"]) / np.sqrt(wide(norm["running_var"]) + epsilon)
        shift = wide(norm["bias"]) + f * ((0 if bias is None else wide(bias)) - wide(norm["running_mean"]))
        tensors |= {f"W{k}": (weight * f[:, None, None, None]).astype(np.float32), f"b{k}": shift.astype(np.float32)}
        like |= {f"c{k}.weight": weight, **({} if bias is None else {f"c{k}.bias": bias})}
        like |= {f"n{k}.{key}": array for key, array in norm.items()}
    text = "g (float[N,6,2,2] x) => (float[N,6,2,2] y) { a = Conv(x, W0, b0) r = Relu(a) y = Conv(r, W1, b1) }"
    return model(text, **tensors), like


def at_home(weights, x, epsilon=1e-3):
    for k in range(2):
        w = {key: wide(array) for key, array in weights.items()}
        if k:
            x = relu(x)
        x = np.einsum("oi,nihw->nohw", w[f"c{k}.weight"][:, :, 0, 0], wide(x))
        shift = w.get(f"c{k}.bias", np.zeros(6)) - w[f"n{k}.running_mean"]
        x = (x + shift[:, None, None]) * (w[f"n{k}.weight"] / np.sqrt(w[f"n{k}.running_var"] + epsilon))[:, None, None]
        x = x + w[f"n{k}.bias"][:, None, None]
    return x


@pytest.mark.parametrize("bias", ["zero", "keep"])
@pytest.mark.parametrize("own_bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_a_folded_batch_norm_is_undone(trained, own_bias, bias):
    data = normal(16, 6, 2, 2)
    proto, like = folded(trained, own_bias)
    close(at_home(like, data), values(proto, {"x": data}, ["y"])["y"])
    done = run(proto, like, data, bias=bias)
    assert not done.report.carried.left
    assert done.report.carried.total
    close(at_home(done.weights, data), output(done, data=data))
    assert any("BatchNorm folded in" in text for text in done.report.warnings) == trained
    for key in ("running_mean", "running_var", "weight"):
        np.testing.assert_array_equal(done.weights[f"n0.{key}"], like[f"n0.{key}"])


def test_a_batch_norm_that_multiplies_by_zero_cannot_be_undone():
    proto, like = folded(False, False)
    tensors = {t.name: t for t in proto.graph.initializer}
    tensors["W1"].raw_data = np.zeros(36, np.float32).tobytes()
    like["n1.weight"] = np.zeros(6, np.float32)
    done = run(scoped(proto, a="c0", y="c1"), like, normal(16, 6, 2, 2))
    (left,) = done.report.carried.left
    assert left.name == "W1"
    assert "optimize=False" in left.reason
    assert "TrainingMode.PRESERVE" in left.reason
    np.testing.assert_array_equal(done.weights["c1.weight"], like["c1.weight"])


def test_a_folded_weight_goes_home_with_its_bias_or_not_at_all():
    """With the old shift and the new weight the network would compute something else than before and than the file."""
    proto, like = folded(False, False)
    shift = next(t for t in proto.graph.initializer if t.name == "b0")
    shift.raw_data = normal(6, seed=77).tobytes()
    data = normal(16, 6, 2, 2)
    done = run(proto, like, data)
    assert [item.name for item in done.report.carried.left] == ["W0", "b0"]
    assert done.report.exit_code == 1
    assert all("optimize=False" in item.reason for item in done.report.carried.left)
    np.testing.assert_array_equal(done.weights["c0.weight"], like["c0.weight"])
    assert not np.array_equal(done.weights["c1.weight"], like["c1.weight"])
    assert [item.name for item in run(proto, like, data, bias="keep").report.carried.left] == []


def test_a_multiple_without_a_reason_is_not_carried():
    """Spectral normalization divides by a norm that its module computes anew."""
    weight, other = normal(8, 6), normal(5, 8, seed=1)
    proto = model(
        "g (float[N,6] x) => (float[N,5] y) { a = MatMul(x, A) r = Relu(a) y = MatMul(r, B) }",
        A=(weight / np.float32(2.5)).T,
        B=other.T,
    )
    done = run(proto, {"fc.weight": weight, "out.weight": other, "ones": np.ones(8, np.float32)})
    assert [item.name for item in done.report.carried.left] == ["A"]
    np.testing.assert_array_equal(done.weights["fc.weight"], weight)


@pytest.mark.parametrize("names", ["fc.weight_g fc.weight_v", "fc.parametrizations.weight.original{0,1}"])
@pytest.mark.parametrize("fresh", [True, False])
def test_weight_normalization(names, fresh):
    names = names.split() if " " in names else [names.replace("{0,1}", digit) for digit in "01"]
    v = normal(5, 6)
    norm = np.sqrt(np.sum(v * v, axis=1, keepdims=True))
    g = norm if fresh else normal(5, 1, seed=1)
    weight = g * v / norm
    proto = model("g (float[N,6] x) => (float[N,5] y) { y = MatMul(x, W) }", W=weight.T)
    done = run(proto, dict(zip(names, (g, v), strict=True)))
    assert not done.report.carried.left
    assert done.report.carried.total == 1
    g, v = (wide(done.weights[name]) for name in names)
    close(X @ (g * v / np.sqrt(np.sum(v * v, axis=1, keepdims=True))).T, output(done))


def test_weight_standardization_is_said_and_counted():
    weight, other = normal(5, 6), normal(6, 6, seed=1)
    proto = model(
        """g (float[N,6] x) => (float[N,5] y) { a = MatMul(x, B)
            mean = ReduceMean<keepdims=1>(V, axes) centred = Sub(V, mean) W = Transpose(centred) y = MatMul(a, W) }""",
        V=weight,
        B=other.T,
        axes=np.array([1]),
    )
    done = run(proto, {"fc.weight": weight, "first.weight": other})
    (left,) = done.report.carried.left
    assert "ReduceMean" in left.reason
    assert "Sub" in left.reason
    assert done.report.exit_code == 1
    assert done.report.to_json()["carried"] == {
        "tensors": 1,
        "total": 2,
        "left": [{"name": left.name, "reason": left.reason}],
    }
    np.testing.assert_array_equal(done.weights["fc.weight"], weight)


# The rest


def test_statistics_that_were_reset_come_home():
    data, weight = normal(16, 6, 2, 2), normal(6, 6, 1, 1)
    norm = {key: np.asarray(array, np.float32) for key, array in norm_of(6, True).items()}
    proto = model(
        "g (float[N,6,2,2] x) => (float[N,6,2,2] y) { a = Conv(x, W) y = BatchNormalization(a, s, b, m, v) }",
        W=weight,
        s=norm["weight"],
        b=norm["bias"],
        m=norm["running_mean"],
        v=norm["running_var"],
    )
    like = {"c.weight": weight, **{f"n.{key}": array for key, array in norm.items()}}
    done = run(proto, like, data, reset_norm=True)
    assert done.report.carried.tensors == done.report.carried.total == 3
    assert not done.weights["n.running_mean"].any()
    assert (done.weights["n.running_var"] == 1).all()
    np.testing.assert_array_equal(done.weights["n.bias"], like["n.bias"])


def test_the_wrong_checkpoint_is_refused_before_any_work(tmp_path):
    proto = model("g (float[N,6] x) => (float[N,5] y) { y = MatMul(x, W) }", W=normal(6, 5))
    with pytest.raises(LsuvError, match="none of the model's 1 weights"):
        run(proto, {"fc.weight": normal(5, 6, seed=4)}, output=tmp_path / "out.onnx", weights=tmp_path / "w.npz")
    assert not list(tmp_path.iterdir())


def test_a_layer_the_checkpoint_does_not_have_is_not_carried():
    proto = model(
        "g (float[N,6] x) => (float[N,5] y) { a = MatMul(x, A) y = MatMul(a, B) }",
        A=normal(6, 6),
        B=normal(6, 5, seed=1),
    )
    done = run(proto, {"b": normal(6, 5, seed=1)})
    (left,) = done.report.carried.left
    assert (left.name, left.reason) == ("A", "no tensor of the checkpoint has its values")


def test_a_dry_run_carries_nothing(tmp_path):
    proto = model("g (float[N,6] x) => (float[N,5] y) { y = MatMul(x, W) }", W=normal(6, 5))
    done = run(proto, {"w": normal(6, 5)}, dry_run=True, weights=tmp_path / "w.npz")
    assert done.weights is None
    assert done.report.carried is None
    assert not list(tmp_path.iterdir())
