"""Every command with workers, as a user types it: the figures of one process, and who did the work; Ray's part here."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from helpers import normal
from in_process import Engine, installed
from lsuv_cli.cli import terminal
from shell import lsuv
from stories import BATCH, SAMPLES, images, tanhs

ROOT = Path(__file__).parent.parent.parent
COMMANDS = {
    "init": ["init", "m.onnx", "-o", "out.onnx", "-f"],
    "check": ["check", "m.onnx"],
    "compare": ["compare", "m.onnx", "--inits", "lsuv,xavier,keep"],
    "inspect": ["inspect", "m.onnx"],
}
TIMES = {"seconds", "workers", "settings"}  # what may differ from the report of one process


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(images(), "m.onnx")
    np.save("c.npy", normal(SAMPLES, 3, 8, 8))
    return tmp_path


def told(words: list[str], *more: object) -> list[dict[str, Any]]:
    """The reports in a command's JSON."""
    done = lsuv(*words, "--data", "c.npy", "--device", "cpu", "--threads", 1, "--batch-size", BATCH, "--json", *more)
    assert done.code in (0, 1), done.err
    found = json.loads(done.out)
    return list(found["inits"].values()) if "inits" in found else [found]


@pytest.mark.parametrize("command", COMMANDS)
def test_json_has_the_figures_of_one_process_and_the_workers(folder, monkeypatch, command):
    one = told(COMMANDS[command])
    with installed(monkeypatch, Engine()):
        several = told(COMMANDS[command], "--workers", 2)
    assert [{k: v for k, v in each.items() if k not in TIMES} for each in several] == [
        {k: v for k, v in each.items() if k not in TIMES} for each in one
    ]
    for each, alone in zip(several, one, strict=True):
        assert [(w["batches"], w["data"], w["device"]) for w in each["workers"]] == [(5, "read", "CPU, 1 thread")] * 2
        assert all(w["host"] and w["pid"] for w in each["workers"])
        assert not alone.get("workers")


def test_a_list_of_models_has_one_bar_that_counts_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k in range(3):
        onnx.save(tanhs(2 + k), f"m{k}.onnx")
    np.save("c.npy", normal(SAMPLES, 16))
    bars: list[list[tuple[str, int, int]]] = []

    @contextlib.contextmanager
    def progress(console, wanted):
        bars.append([])
        yield lambda *step: bars[-1].append(step)

    monkeypatch.setattr(terminal, "progress", progress)
    with installed(monkeypatch, Engine()):
        done = lsuv("init", "m0.onnx", "m1.onnx", "m2.onnx", "--data", "c.npy", "--output-dir", "out", "--workers", 2)
    assert done.code == 0, done.err
    assert bars == [[("models", k, 3) for k in range(4)]]


def test_the_computed_table_is_from_the_results_and_marked(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    scale = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "scale", scale)
    spec.loader.exec_module(scale)
    terms = scale.Terms(**json.loads(scale.RESULTS.read_text())["terms"])
    text = (ROOT / "benchmarks" / "README.md").read_text()
    marked = text.partition("**Computed, not measured**")[2]
    assert "\n".join(scale.computed(terms)) in marked
