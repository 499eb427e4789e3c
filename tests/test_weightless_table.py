"""The table of models without weights in benchmarks/README.md is what the results give."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import onnx

from helpers import model, normal
from lsuv_cli import strip

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
_spec = importlib.util.spec_from_file_location("benchmarks_weightless", BENCHMARKS / "weightless.py")
weightless = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = weightless
_spec.loader.exec_module(weightless)


def entry(finite, spread, half=False):
    return {"float32": {"finite": finite, "spread": spread, "layers": 2}, "float16": {"finite": half, "spread": None}}


def test_the_readme_has_between_the_marks_what_the_json_gives():
    readme = (BENCHMARKS / "README.md").read_text()
    results = json.loads(weightless.RESULTS.read_text()) if weightless.RESULTS.exists() else None
    assert weightless.with_table(readme, results) == readme


def test_the_results_are_of_all_graphs():
    if weightless.RESULTS.exists():
        results = json.loads(weightless.RESULTS.read_text())
        assert len(results["graphs"]) == weightless.GRAPHS
        assert all(set(weightless.TOOLS) <= set(graph) for graph in results["graphs"].values())


def test_rows_count_what_is_finite_and_take_medians():
    graphs = {
        "a": {"lsuv": entry(True, 0.0, True), "polygraphy": entry(True, 9.0), "uniform": entry(True, 2.0, True)},
        "b": {"lsuv": entry(True, 1.0, True), "polygraphy": entry(False, None), "uniform": {"error": "x"}},
        "c": {
            "lsuv": entry(True, 0.2, False),
            "polygraphy": entry(True, 5.0, False),
            "uniform": entry(True, 3.0, False),
        },
    }
    assert list(weightless.rows({"graphs": graphs})) == [
        ("lsuv", "3 of 3", "2 of 2", "0.2", "1.0"),
        ("polygraphy", "2 of 3", "0 of 2", "7.0", "9.0"),
        ("uniform", "2 of 3", "1 of 2", "2.5", "3.0"),
    ]


def test_weights_of_light_models_become_initializers():
    proto = model("g (float[N,3] x) => (float[N,5] y) { w = ConstantOfShape(s) y = MatMul(x, w) }", s=np.array([3, 5]))
    changed = weightless.with_initializers(proto)
    assert [node.op_type for node in changed.graph.node] == ["MatMul"]
    onnx.checker.check_model(changed)
    assert strip(changed).roles == {"w": "weight"}


def test_uniform_numbers_stay_between_the_least_and_the_greatest(tmp_path):
    given = model("g (float[N,8] x) => (float[N,8] y) { y = MatMul(x, w) }", w=normal(8, 8))
    onnx.save(given, tmp_path / "m.onnx")
    weightless.by_uniform(tmp_path / "s.onnx", tmp_path / "m.onnx", {}, tmp_path / "f.onnx")
    found = onnx.numpy_helper.to_array(onnx.load(tmp_path / "f.onnx").graph.initializer[0])
    assert found.min() >= normal(8, 8).min()
    assert found.max() <= normal(8, 8).max()
    measured = weightless.measured(tmp_path / "f.onnx", {"x": normal(4, 8)}, half=False)
    assert measured == {"finite": True, "spread": 0.0, "layers": 1}
