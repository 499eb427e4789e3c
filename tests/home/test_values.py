# mypy: disable-error-code="var-annotated"
"""A checkpoint whose tensors are found by value: what exporters do to weights, by hand, and the way back.

Every test computes the network from the checkpoint that came back, in numpy, and compares with the written model.
"""

import ml_dtypes
import numpy as np
import pytest
from checkpoint_helpers import X, close, output, relu, run, scoped, wide

from helpers import model, normal
from lsuv_cli.errors import LsuvError

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


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("start", [np.eye(6), np.full((6, 6), 0.1), normal(6, 6) + normal(6, 6).T])
def test_where_values_repeat_the_name_tells_the_axes(start, transposed):
    """Identity, constant and symmetric weights: the values alone do not tell a matrix from its transpose."""
    text = "y = Gemm<transB=1>(x, W)" if not transposed else "T = Transpose(W) y = MatMul(x, T)"
    proto = model(f"g (float[N,6] x) => (float[N,6] y) {{ {text} }}", W=start.astype(np.float32))
    done = run(proto, {"W": start.astype(np.float32)})
    assert not done.report.carried.left
    close(X @ wide(done.weights["W"]).T, output(done))


def test_where_values_repeat_and_no_name_tells_the_axes_it_is_said():
    proto = model("g (float[N,6] x) => (float[N,6] y) { y = MatMul(x, val_1) }", val_1=np.eye(6, dtype=np.float32))
    done = run(proto, {"fc.weight": np.eye(6, dtype=np.float32)})
    assert "axes cannot be told apart" in done.report.carried.left[0].reason
    assert [layer.status for layer in done.report.layers] == ["not-home"]
