"""Several models at once on Ray: each ends alone, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from helpers import normal
from shell import LSUV
from stories import tanhs

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
# A loader that ends the first process that runs it, the way native code does when it crashes.
CRASHING = """
import os, signal
import numpy as np

def load_data():
    try:
        os.close(os.open("crashed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        yield {"x": np.load("c.npy")}
    else:
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed (pip install .[ray])")
    monkeypatch.chdir(tmp_path)
    for k in range(5):
        onnx.save(tanhs(2 + k), f"m{k}.onnx")
    np.save("c.npy", normal(64, 16))
    (tmp_path / "loader.py").write_text(CRASHING)
    return tmp_path


def initialized(*words: object) -> subprocess.CompletedProcess[str]:
    models = [f"m{k}.onnx" for k in range(5)]
    command = [*LSUV, "init", *models, "--device", "cpu", "--threads", "1", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def names(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def test_all_models_have_the_bits_of_one_after_another(folder):
    (folder / "m3.onnx").write_bytes(b"not a model")
    one = initialized("--data", "c.npy", "--output-dir", "one", "--json")
    several = initialized("--data", "c.npy", "--output-dir", "several", "--workers", 2, "--json", "-v")
    assert several.returncode == one.returncode == 2
    assert names("several") == names("one") == ["m0.onnx", "m1.onnx", "m2.onnx", "m4.onnx"]
    for name in names("one"):
        assert (folder / "several" / name).read_bytes() == (folder / "one" / name).read_bytes()
    reports, others = json.loads(several.stdout), json.loads(one.stdout)
    assert [report["model"] for report in reports] == [report["model"] for report in others]
    assert [report["exit_code"] for report in reports] == [0, 0, 0, 2, 0]
    assert reports[3]["error"] == others[3]["error"]
    assert len({report["workers"][0]["pid"] for report in reports if "workers" in report}) == 2
    assert several.stderr.splitlines()[-1] == one.stderr.splitlines()[-1]
    assert several.stderr.count("lsuv: ") == 1


def test_a_model_that_crashes_onnxruntime_ends_alone(folder):
    done = initialized("--data", "loader.py", "--output-dir", "out", "--workers", 2)
    assert done.returncode == 2
    complaints = [line for line in done.stderr.splitlines() if line.startswith("lsuv: ")]
    assert len(complaints) == 1
    assert "the run crashed, most likely inside onnxruntime on this model" in complaints[0]
    assert done.stderr.splitlines()[-1].startswith("4 of 5 models done")
    assert len(names("out")) == 4
    assert all(name.endswith(".onnx") for name in names("out"))


def test_after_an_interruption_nothing_half_done_is_left(folder):
    command = [*LSUV, "init", "m0.onnx", "m1.onnx", "--data", "random", "--limit", "200000", "--device", "cpu"]
    command += ["--threads", "1", "--output-dir", "out", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # The driver's own scratch directory, and one of each of the two tasks, which are in the middle of a model.
    while process.poll() is None and len(list((folder / "out").glob(".lsuv-*"))) < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "lsuv: interrupted; 0 of 2 models were done\n")
    assert not (folder / "out").exists()
