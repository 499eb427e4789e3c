"""Faults while a run is under way: the input stays intact, the output is absent or complete and verified.

LSUV_KILLS sets the number of killed runs, 12 unless told.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from independent import layer_variances

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs signals and mounts")
LSUV = [sys.executable, "-c", "from lsuv_cli.cli import main; main()"]
KILLS = int(os.environ.get("LSUV_KILLS", "12"))


@pytest.fixture
def folder(tmp_path):
    """A model with external data and enough work for half a second or so."""
    rng = np.random.default_rng(3)
    text = " ".join(f"a{k} = MatMul(t{k}, w{k}) t{k + 1} = Tanh(a{k})" for k in range(6))
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[N,256] t0) => (float[N,256] t6) {' + text + "}"
    )
    for k in range(6):
        model.graph.initializer.append(
            numpy_helper.from_array(rng.standard_normal((256, 256)).astype(np.float32), f"w{k}")
        )
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    np.save(tmp_path / "c.npy", rng.standard_normal((2048, 256)).astype(np.float32))
    return tmp_path


def hashes(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("m.onnx", "m.bin", "c.npy")}


def start(folder: Path, *options: str, output: str = "o.onnx") -> subprocess.Popen[bytes]:
    command = [*LSUV, "init", "m.onnx", "--data", "c.npy", "-o", output, *options]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)


def ended(process: subprocess.Popen[bytes]) -> int:
    process.communicate(timeout=120)
    return process.returncode


def whole(folder: Path) -> bool:
    """Whether the output is there, complete and right; half of it would be an error."""
    if not (folder / "o.onnx").exists():
        return False
    found = layer_variances(onnx.load(folder / "o.onnx"), {"t0": np.load(folder / "c.npy")})
    assert len(found) == 6
    assert all(abs(variance - 1) < 1e-3 for variance in found.values())
    return True


def test_killed_at_random_moments(folder):
    before = hashes(folder)
    begun = time.perf_counter()
    assert ended(start(folder)) == 0
    usual = time.perf_counter() - begun
    (folder / "o.onnx").unlink()
    (folder / "o.onnx.data").unlink()
    chance = random.Random(1)
    finished = 0
    for number in range(KILLS):
        process = start(folder, "--force", "-q")
        time.sleep(chance.uniform(0.2, 1.1) * usual)
        process.kill()
        process.communicate(timeout=60)
        assert hashes(folder) == before
        finished += whole(folder)
        if number % 2:  # half of the runs find an output to overwrite, if one was finished
            for name in ("o.onnx", "o.onnx.data"):
                (folder / name).unlink(missing_ok=True)
        strange = [p.name for p in folder.iterdir() if not p.name.startswith((".lsuv-", "o.onnx", "m.", "c."))]
        assert not strange
    assert ended(start(folder, "--force", "-q")) == 0
    assert whole(folder)
    assert not list(folder.glob(".lsuv-*")), "the next run removes what killed runs left"
    print(f"{KILLS} runs killed, the output was there after {finished} of them")  # noqa: T201  shown with -s


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_cleans_up(folder, number):
    before = hashes(folder)
    process = start(folder)
    while not list(folder.glob(".lsuv-*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in {0, 130}
    assert b"Traceback" not in errors
    assert hashes(folder) == before
    assert whole(folder) == (process.returncode == 0)
    assert not list(folder.glob(".lsuv-*"))


def test_two_runs_at_once_give_one_whole_result(folder):
    runs = [start(folder, "--force", "--seed", str(seed)) for seed in range(4)]
    assert [ended(run) for run in runs] == [0] * 4
    assert whole(folder)
    seed = next(p.value for p in onnx.load(folder / "o.onnx").metadata_props if p.key == "lsuv.seed")
    assert ended(start(folder, "--seed", seed, output="again.onnx")) == 0
    again, first = onnx.load(folder / "again.onnx"), onnx.load(folder / "o.onnx")
    assert [t.raw_data for t in again.graph.initializer] == [t.raw_data for t in first.graph.initializer]


def test_a_full_disk(folder, tmp_path_factory):
    small = tmp_path_factory.mktemp("small")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        before = hashes(folder)
        process = start(folder, output=str(small / "o.onnx"))
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert b"No space left" in errors
        assert b"Traceback" not in errors
        assert not list(small.iterdir())
        assert hashes(folder) == before
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_model_that_is_replaced_while_it_is_read(folder):
    process = start(folder)
    while not list(folder.glob(".lsuv-*")) and process.poll() is None:
        time.sleep(0.01)
    (folder / "m.bin").write_bytes(b"gone")
    _, errors = process.communicate(timeout=60)
    assert b"Traceback" not in errors
    assert process.returncode in {0, 2}
    if process.returncode == 0:
        assert whole(folder)
    else:
        assert not (folder / "o.onnx").exists()
