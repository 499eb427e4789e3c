"""The table of residual streams in docs/options.md is what the saved measurements give."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from helpers import model, normal, values

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import streams


def test_the_page_has_between_the_marks_what_the_json_gives():
    page = streams.PAGE.read_text()
    assert streams.on_page(page, json.loads(streams.RESULTS.read_text())) == page


def test_bounded_streams_stay_between_1_and_2():
    saved = json.loads(streams.RESULTS.read_text())["networks"]
    assert {name: len(entry["bounded"]) for name, entry in saved.items()} == streams.SUMS
    for entry in saved.values():
        assert min(entry["bounded"]) > 0.99
        assert max(entry["bounded"]) < 2.01
        assert max(entry["keep"]) > max(entry["bounded"])


def test_a_row_has_the_ends_of_every_stream():
    entry = {"streams": [1, 1, 2, 2], "begins": [0.0008, 1], "keep": [2, 3, 2, 3], "bounded": [1, 2, 1.5, 1.8]}
    *_, row = streams.table({"networks": {"net": entry}}).strip().split("\n")
    assert row == "| net | 4 | 0.0008 to 1.00 | 2.00 to 3.00 | 1.00 to 2.00 | 1.00 to 1.50 | 1.80 to 2.00 |"


def test_variances_and_beginnings_are_found_by_the_names_of_nodes(tmp_path):
    text = "g (float[N,8] x) => (float[N,8] y) { [f] a = Tanh(x) [m] b = MatMul(a, W) [s] c = Add(b, a) y = Relu(c) }"
    proto, x = model(text, W=normal(8, 8)), normal(32, 8, seed=1)
    onnx.save(proto, tmp_path / "m.onnx")
    assert streams.begins(tmp_path / "m.onnx", [{"branch": 1, "name": "s", "layer": "m"}]) == ["a"]
    truth = values(proto, {"x": x}, ["a", "c"], reference=True)
    expected = [float(np.var(value)) for value in truth.values()]
    assert streams.variances(tmp_path / "m.onnx", {"x": x}, ["a", "s"]) == pytest.approx(expected, rel=1e-5)
