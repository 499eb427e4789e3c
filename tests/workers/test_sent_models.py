"""A list of models for workers that do not see the files: sent, and what comes back is published by the driver."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from helpers import normal
from in_process import Engine, installed
from lsuv_cli import calibration_data, model_lists
from lsuv_cli.data.inputs import InputSpec
from lsuv_cli.settings import Settings
from lsuv_cli.workers import models
from shell import Result, lsuv
from stories import tanhs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(tanhs(2), "a.onnx")
    Path("weights").mkdir()
    external = tanhs(3)
    onnx.save(external, "b.onnx", save_as_external_data=True, location="weights/b.bin", size_threshold=0)
    Path("c.onnx").write_bytes(b"no model")
    onnx.save(tanhs(4), "d.onnx")
    np.save("x.npy", normal(64, 16))
    return tmp_path


def initialized(*words: object) -> Result:
    names = ["a.onnx", "b.onnx", "c.onnx", "d.onnx"]
    return lsuv("init", *names, "--data", "x.npy", "--device", "cpu", "--threads", 1, "--json", *words)


def files(directory: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


@pytest.mark.parametrize("blind", [True, False], ids=["sent", "seen"])
def test_the_files_are_those_of_one_after_another(folder, monkeypatch, blind):
    one = initialized("--output-dir", "one")
    with installed(monkeypatch, Engine(blind=blind)) as engine:
        several = initialized("--output-dir", "several", "--workers", 2)
    assert several.code == one.code == 2, several.err
    assert files("several") == files("one"), several.err
    assert sorted(files("one")) == ["a.onnx", "b.onnx", "b.onnx.data", "d.onnx"]
    reports, others = json.loads(several.out), json.loads(one.out)
    assert [report["model"] for report in reports] == [report["model"] for report in others]
    assert [report.get("output") for report in reports[:2]] == ["several/a.onnx", "several/b.onnx"]
    assert reports[2]["error"] == others[2]["error"]
    assert {report["workers"][0]["data"] for report in reports if "workers" in report} == {"sent" if blind else "read"}
    assert engine.put_kinds.count("Calibration") == (1 if blind else 0)  # once for all models


def test_a_worker_that_sees_other_files_is_sent_the_drivers(folder, monkeypatch):
    monkeypatch.setattr(models, "sees", lambda sights: False)
    one = initialized("--output-dir", "one")
    with installed(monkeypatch, Engine()):
        several = initialized("--output-dir", "several", "--workers", 2)
    assert several.code == one.code
    assert files("several") == files("one"), several.err
    assert json.loads(several.out)[0]["workers"][0]["data"] == "sent"


def test_a_file_that_has_come_meanwhile_is_left_alone(folder, monkeypatch):
    publish = model_lists.publish

    def late(request, made):
        Path(request.output).write_text("mine")
        publish(request, made)

    monkeypatch.setattr(model_lists, "publish", late)
    with installed(monkeypatch, Engine(blind=True)):
        done = initialized("--output-dir", "out", "--workers", 2)
    assert done.code == 2
    assert files("out") == dict.fromkeys(["a.onnx", "b.onnx", "d.onnx"], b"mine")  # and no file of weights
    assert "out/a.onnx exists" in json.loads(done.out)[0]["error"]


def test_without_data_and_without_output_nothing_is_needed(folder, monkeypatch):
    with installed(monkeypatch, Engine(blind=True)):
        done = lsuv("init", "a.onnx", "d.onnx", "--dry-run", "--workers", 2, "--json", "--device", "cpu")
    assert done.code == 0
    assert [report["stages"] for report in json.loads(done.out)] == [2, 4]


def test_only_the_samples_that_are_used_are_sent(tmp_path):
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", normal(32, 16, seed=k))
    inputs = [InputSpec("x", "float32", (None, 16))]
    data = calibration_data.read([str(tmp_path)], inputs, Settings(limit=40, batch_size=8))
    held = data.in_memory()
    parts = [part for table in held.batches.tables for column in table.columns for part in column.parts]
    assert sum(part.shape[0] for part in parts) == 40
    assert held.files is None
    for batch, other in zip(data.batches, held.batches, strict=True):
        np.testing.assert_array_equal(batch["x"], other["x"])
