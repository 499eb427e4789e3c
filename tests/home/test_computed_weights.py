# mypy: disable-error-code="var-annotated"
"""Weights that a checkpoint does not have as they are: folded norms, multiples, weight normalization."""

import numpy as np
import pytest
from checkpoint_helpers import X, close, output, relu, run, scoped, wide

from helpers import model, normal, values
from lsuv_cli.errors import LsuvError


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
        "left": [{"name": left.name, "reason": left.reason, "layers": ["y"]}],
    }
    assert [layer.status for layer in done.report.layers] == ["ok", "not-home"]
    np.testing.assert_array_equal(done.weights["fc.weight"], weight)


# Products with fixed numbers


def gained(**settings):
    """Two layers under a gain, one for each output of the first; the second weight is stored transposed."""
    first, second, gain = normal(6, 6), normal(5, 6, seed=1), 1 + np.abs(normal(6, 1, seed=2))
    proto = model(
        """g (float[N,6] x) => (float[N,5] y) { A = Mul(V, gain) At = Transpose(A) a = MatMul(x, At) r = Relu(a)
            B = Div(U, two) Bt = Transpose(B) y = MatMul(r, Bt) }""",
        V=first,
        U=second,
        gain=gain,
        two=np.float32(2),
    )
    like = {"first.weight": first, "first.gain": gain, "second.weight": second}
    return run(proto, like, **settings), like


def test_a_weight_under_a_gain_comes_home_divided_by_it():
    """Equalized learning rate: the module multiplies its weight by a number at each call."""
    done, like = gained()
    assert not done.report.carried.left
    np.testing.assert_array_equal(done.weights["first.gain"], like["first.gain"])
    hidden = relu(X @ wide(done.weights["first.weight"] * done.weights["first.gain"]).T)
    close(hidden @ wide(done.weights["second.weight"] / 2).T, output(done))
    assert np.var(X @ wide(done.weights["first.weight"] * done.weights["first.gain"]).T) == pytest.approx(1, abs=1e-4)


def test_a_gain_that_is_itself_initialized_is_no_fixed_number():
    """The same tensor is the gain of one weight and the weight of another layer."""
    weight, gain = normal(6, 6), 1 + np.abs(normal(6, seed=2))
    proto = model(
        """g (float[N,6] x) => (float[N,1] y) { A = Mul(V, gain) a = MatMul(x, A) r = Relu(a)
            column = Unsqueeze(gain, axes) y = MatMul(r, column) }""",
        V=weight,
        gain=gain,
        axes=np.array([1]),
    )
    done = run(proto, {"a.weight": weight, "gain": gain}, tied="untie")
    assert done.report.carried.left
    assert done.report.exit_code == 1
    assert "ok" not in [layer.status for layer in done.report.layers]


@pytest.mark.parametrize("zeros", [True, False])
def test_a_mask_is_not_taken_for_the_weight(zeros):
    weight, mask = normal(5, 6), np.full((5, 6), 2, np.float32)
    if zeros:
        mask[:, ::2] = 0
    proto = model(
        "g (float[N,6] x) => (float[N,5] y) { A = MatMul(x, F) M = Mul(W, mask) T = Transpose(M) y = MatMul(A, T) }",
        W=weight,
        mask=mask,
        F=normal(6, 6, seed=3),
    )
    like = {"fc.weight": weight, "fc.mask": mask, "first.weight": normal(6, 6, seed=3)}
    done = run(proto, like)
    assert len(done.report.carried.left) == 1
    np.testing.assert_array_equal(done.weights["fc.mask"], mask)
    np.testing.assert_array_equal(done.weights["fc.weight"], weight)


def test_layers_behind_one_that_is_not_carried_are_not_ok():
    """At home they see other values; a layer beside it is right."""
    weight, other, third = normal(6, 6), normal(6, 6, seed=1), normal(5, 6, seed=2)
    proto = model(
        """g (float[N,6] x) => (float[N,5] y, float[N,6] beside) { mean = ReduceMean<keepdims=1>(V, axes)
            W = Sub(V, mean) a = MatMul(x, W) r = Relu(a) y = MatMul(r, C) beside = MatMul(x, B) }""",
        V=weight,
        B=other.T,
        C=third.T,
        axes=np.array([1]),
    )
    done = run(proto, {"fc.weight": weight, "b.weight": other, "c.weight": third})
    assert {layer.name: str(layer.status) for layer in done.report.layers} == {
        "a": "not-home",
        "y": "not-home",
        "beside": "ok",
    }
    assert "behind" in next(layer.notes[-1] for layer in done.report.layers if layer.name == "y")


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
