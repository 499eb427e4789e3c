"""Targets by name: `--target-variance GLOB=X`, and the numbers, lists and mappings that Python takes."""

import json
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

import lsuv_cli
from helpers import model, normal, square, values, variances
from lsuv_cli import LsuvError, Settings, initialize, measure
from shell import lsuv

X = normal(64, 8)


def three() -> ModelProto:
    text = """g (float[N,8] x) => (float[N,8] y) {
        [stem] a = MatMul(x, A) b = Relu(a) [block] c = MatMul(b, B) d = Tanh(c) [head] y = MatMul(d, C) }"""
    return model(text, **square("A", "B", "C"))


def found(proto: ModelProto) -> list[float]:
    return [round(v, 5) for v in variances(proto, {"x": X}, ["a", "c", "y"]).values()]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (0.5, [0.5, 0.5, 0.5]),
        ("0.5", [0.5, 0.5, 0.5]),
        ({"head": 0.01}, [1, 1, 0.01]),
        ({"*": 4, "head": 0.01}, [4, 4, 0.01]),
        (["head=0.01", "4"], [4, 4, 0.01]),
        ("block=2", [1, 2, 1]),
        (["*=3", "b*=2", "block=0.5"], [3, 0.5, 3]),
        (["block=0.5", "*=3"], [3, 3, 3]),
        (["block=0.5", "b*=2", "block=0.5"], [1, 0.5, 1]),
    ],
)
def test_the_last_match_wins_and_a_plain_number_is_for_the_others(given: Any, wanted: list[float]):
    done = initialize(three(), X, target_variance=given)
    assert found(done.model) == wanted
    assert [layer.target for layer in done.report.layers] == wanted
    assert {str(layer.status) for layer in done.report.layers} == {"ok"}


def test_a_module_path_matches_too():
    proto = three()
    proto.graph.node[-1].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'classifier.1', 'linear']")
    names = [layer.module for layer in lsuv_cli.inspect(proto).layers]
    assert "classifier.1" in names
    assert found(initialize(proto, X, target_variance="classifier.*=0.25").model) == [1, 1, 0.25]


def test_what_settings_hold_can_be_given_again():
    held = Settings(target_variance=["2", "head=0.01"])  # type: ignore[arg-type]
    assert held.to_json()["target_variance"] == {"*": 2.0, "head": 0.01}
    assert Settings.of({"target_variance": held.to_json()["target_variance"]}) == held
    assert Settings.of(held.keywords()) == held
    assert Settings().to_json()["target_variance"] == 1.0


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("many", "`target_variance` 'many' is not a number, GLOB=NUMBER, or a list or mapping of these"),
        ("=1", "`target_variance` '=1' is not a number, GLOB=NUMBER, or a list or mapping of these"),
        ({"head": "x"}, "`target_variance` {'head': 'x'} is not a number, GLOB=NUMBER, or a list or mapping of these"),
        (True, "`target_variance` True is not a number, GLOB=NUMBER, or a list or mapping of these"),
        ("head=0", "`target_variance` is 0.0; it must be above 0"),
        ("head=nan", "`target_variance` is nan; it must be above 0 and finite"),
        ("tail=2", "`target_variance` 'tail' matches no layer; the layers are stem, block, head"),
    ],
)
def test_a_wrong_target_is_named(given: Any, complaint: str):
    for function in (initialize, measure):
        with pytest.raises(LsuvError) as caught:
            function(three(), X, target_variance=given)
        assert str(caught.value) == complaint


def test_check_judges_each_layer_by_its_own_target(tmp_path):
    onnx.save(three(), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", X)
    common = ("--data", tmp_path / "x.npy", "--target-variance", "head=0.01")
    out = tmp_path / "o.onnx"
    made = lsuv("init", tmp_path / "m.onnx", *common, "--target-variance", "2", "-o", out)
    assert made.code == 0
    assert "target" in made.err
    assert lsuv("check", out, "--data", tmp_path / "x.npy", "-q").code == 1
    assert lsuv("check", out, *common, "--target-variance", "2", "-q").code == 0
    told = json.loads(lsuv("check", out, *common, "--json").out)
    assert [layer["status"] for layer in told["layers"]] == ["outside", "outside", "ok"]
    assert [layer["target"] for layer in told["layers"]] == [1.0, 1.0, 0.01]
    metadata = {p.key: p.value for p in onnx.load(out).metadata_props}
    assert metadata["lsuv.target_variance"] == "2.0, head=0.01"
    wrong = lsuv("init", tmp_path / "m.onnx", *common, "--target-variance", "tail=1", "-o", tmp_path / "n.onnx")
    assert wrong.code == 2
    assert "--target-variance 'tail' matches no layer" in wrong.err


def test_a_shared_weight_has_the_target_of_its_first_use():
    text = """g (float[N,8] x) => (float[N,8] y) {
        [first] a = MatMul(x, A) b = Tanh(a) [second] y = MatMul(b, A) }"""
    done = initialize(model(text, **square("A")), X, target_variance={"first": 0.25})
    assert done.model is not None
    assert abs(values(done.model, {"x": X}, ["a"])["a"].var() / 0.25 - 1) < 1e-3


def test_a_kept_bias_is_solved_for_the_layers_own_target():
    proto = three()
    proto.graph.node.append(helper.make_node("Gemm", ["y", "D", "e"], ["z"], name="last"))
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(a, n) for n, a in (("D", normal(8, 8, seed=5)), ("e", normal(8, seed=6)))
    )
    done = initialize(proto, X, bias="keep", target_variance={"last": 3})
    assert done.model is not None
    assert abs(values(done.model, {"x": X}, ["z"])["z"].var() / 3 - 1) < 1e-3
