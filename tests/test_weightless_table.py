"""The table of models without weights in benchmarks/README.md is what the results give."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from helpers import model, normal, tensor
from lsuv_cli import strip

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import weightless  # noqa: E402


def entry(finite, spread, half=False):
    return {"float32": {"finite": finite, "spread": spread, "layers": 2}, "float16": {"finite": half, "spread": None}}


def test_the_readme_has_between_the_marks_what_the_json_gives():
    readme = (BENCHMARKS / "README.md").read_text()
    results = json.loads(weightless.RESULTS.read_text())
    assert weightless.with_table(readme, results) == readme


def test_the_results_are_of_all_graphs():
    results = json.loads(weightless.RESULTS.read_text())
    assert len(results["graphs"]) == weightless.GRAPHS
    assert all(set(weightless.TOOLS) <= set(graph) for graph in results["graphs"].values())


def test_rows_count_what_is_finite_and_take_medians():
    graphs = {
        "a": {"lsuv": entry(True, 0.0, True), "polygraphy": entry(True, 9.0), "randomizer": entry(True, 2.0, True)},
        "b": {"lsuv": entry(True, 1.0, True), "polygraphy": entry(False, None), "randomizer": {"error": "x"}},
        "c": {
            "lsuv": entry(True, 0.2, False),
            "polygraphy": entry(True, 5.0, False),
            "randomizer": entry(True, None, False),  # a layer puts out a constant
        },
    }
    assert list(weightless.rows({"graphs": graphs})) == [
        ("lsuv", "3 of 3", "3 of 3", "3 of 3", "2 of 2", "0.2", "1.0"),
        ("polygraphy", "3 of 3", "2 of 3", "2 of 3", "0 of 2", "7.0", "9.0"),
        ("randomizer", "2 of 3", "2 of 3", "1 of 3", "1 of 2", "2.0", "2.0"),
    ]


def test_weights_of_light_models_become_initializers():
    proto = model("g (float[N,3] x) => (float[N,5] y) { w = ConstantOfShape(s) y = MatMul(x, w) }", s=np.array([3, 5]))
    changed = weightless.with_initializers(proto)
    assert [node.op_type for node in changed.graph.node] == ["MatMul"]
    onnx.checker.check_model(changed)
    assert strip(changed).roles == {"w": "weight"}
    assert len(np.unique(tensor(changed, "w"))) == 15


def test_onnxruntimes_script_draws_between_the_least_and_the_greatest_of_what_it_finds(tmp_path):
    """The script of the wheel itself; it leaves tensors of ten and fewer values as they are, and changes integers."""
    text = "g (float[N,8] x) => (float[N,8] y) { a = Gather<axis=1>(x, i) b = MatMul(a, w) y = Add(b, c) }"
    order = np.arange(12) % 8
    onnx.save(model(text, i=order, w=normal(12, 8), c=normal(8)), tmp_path / "m.onnx")
    weightless.by_randomizer(tmp_path / "s.onnx", tmp_path / "m.onnx", {}, tmp_path / "f.onnx")
    filled = onnx.load(tmp_path / "f.onnx")
    found = tensor(filled, "w")
    assert not np.array_equal(found, normal(12, 8))
    assert found.min() >= normal(12, 8).min()
    assert found.max() <= normal(12, 8).max()
    np.testing.assert_array_equal(tensor(filled, "c"), normal(8))
    assert not np.array_equal(tensor(filled, "i"), order)
    measured = weightless.measured(tmp_path / "f.onnx", {"x": normal(4, 8)})
    assert measured == {"finite": True, "spread": 0.0, "layers": 1}


@pytest.mark.parametrize(("size", "finite"), [(1.0, True), (1e6, False)])
def test_a_value_beyond_half_precision_is_seen_though_onnxruntime_computes_it_in_float32(tmp_path, size, finite):
    text = "g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) b = MatMul(a, w) c = Relu(b) y = MatMul(c, v) }"
    w, v = ((factor * np.eye(8)).astype(np.float32) for factor in (size**0.5, 1 / size))
    onnx.save(model(text, w=w, v=v), tmp_path / "m.onnx")
    feeds = {"x": np.ones((2, 8), np.float32)}
    assert weightless.measured(tmp_path / "m.onnx", feeds)["finite"]
    assert weightless.measured_in_half(tmp_path / "m.onnx", feeds) == {"finite": finite}
