"""The command as a user types it: streams, exit codes, files, and wrong arguments."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from independent import layer_variances, stored

SAMPLES = Path(__file__).parent.parent.parent / "sample_models"
MODEL = SAMPLES / "fitnet_mnist_maxout.onnx"
DATA = SAMPLES / "fitnet_mnist_maxout.npy"
LSUV = [sys.executable, "-c", "from lsuv_cli.cli import main; main()"]


def lsuv(*args, stdin: bytes | None = None, cwd=None, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*LSUV, *map(str, args)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", **env},
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "m.onnx").write_bytes(MODEL.read_bytes())
    (tmp_path / "c.npy").write_bytes(DATA.read_bytes())
    return tmp_path


def test_the_main_job(folder):
    done = lsuv("init", "m.onnx", "--data", "c.npy", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    text = done.stderr.decode()
    assert "conv11" in text
    assert "7 layers within tolerance" in text
    assert "m.lsuv.onnx" in text
    found = layer_variances(onnx.load(folder / "m.lsuv.onnx"), {"data": np.load(DATA)})
    assert all(abs(variance - 1) < 1e-3 for variance in found.values())
    assert sorted(path.name for path in folder.iterdir()) == ["c.npy", "m.lsuv.onnx", "m.onnx"]


def test_the_table_fits_80_columns_and_has_no_colours_when_it_is_not_a_terminal(folder):
    done = lsuv("init", "m.onnx", "--data", "c.npy", "--before", cwd=folder)
    assert b"\x1b" not in done.stderr
    lines = done.stderr.decode().splitlines()
    assert max(len(line) for line in lines[:-1]) <= 80


def test_a_pipeline(folder):
    done = lsuv("init", "-", "--data", folder / "c.npy", "-o", "-", stdin=MODEL.read_bytes())
    assert done.returncode == 0
    assert "conv11.weight" in stored(onnx.load_from_string(done.stdout))
    again = lsuv("init", "-", "--data", folder / "c.npy", "-o", "-", "-q", stdin=MODEL.read_bytes())
    assert again.stdout == done.stdout
    assert again.stderr == b""


def test_json_is_all_there_is_on_stdout(folder):
    done = lsuv("init", "m.onnx", "--data", "c.npy", "--json", cwd=folder)
    report = json.loads(done.stdout)
    assert report["schema"] == "lsuv-report/1"
    assert report["exit_code"] == 0
    assert report["samples"] == 128
    assert [layer["name"] for layer in report["layers"]] == [
        "conv11",
        "conv12",
        "conv21",
        "conv22",
        "conv31",
        "conv32",
        "ip1",
    ]
    assert abs(report["layers"][0]["variance"] - 1) < 1e-3
    assert report["output"] == "m.lsuv.onnx"


def test_a_dry_run_writes_nothing(folder):
    done = lsuv("init", "m.onnx", "--data", "c.npy", "--dry-run", cwd=folder)
    assert done.returncode == 0
    assert b"7 layers to initialize" in done.stderr
    assert b"memory expected" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["c.npy", "m.onnx"]


def test_no_rescale_needs_no_data(folder):
    done = lsuv("init", "m.onnx", "--no-rescale", cwd=folder)
    assert done.returncode == 0
    assert b"7 layers pre-initialized" in done.stderr
    weight = stored(onnx.load(folder / "m.lsuv.onnx"))["conv12.weight"].reshape(32, -1)
    np.testing.assert_allclose(weight @ weight.T, np.eye(32), atol=1e-5)


def test_exit_code_1_when_a_layer_is_out_of_reach(folder):
    np.save(folder / "zeros.npy", np.zeros((4, 1, 28, 28), np.float32))
    done = lsuv("init", "m.onnx", "--data", "zeros.npy", cwd=folder)
    assert done.returncode == 1
    assert b"7 dead" in done.stderr
    assert (folder / "m.lsuv.onnx").exists()


def test_options_reach_the_job(folder):
    settings = (
        "--bias keep --tol 0.05 --max-trials 3 --target-variance 2 --seed 5 --threads 1 --batch-size 16 --limit 32"
    )
    done = lsuv("init", "m.onnx", "--data", "c.npy", "--json", *settings.split(), "--include", "conv*", cwd=folder)
    report = json.loads(done.stdout)
    assert report["samples"] == 32
    assert report["batches"] == 2
    assert report["device"] == "CPU, 1 thread"
    chosen = report["settings"]
    assert (chosen["bias"], chosen["tol"], chosen["max_trials"], chosen["seed"]) == ("keep", 0.05, 3, 5)
    assert [layer["status"] for layer in report["layers"]] == ["ok"] * 6 + ["excluded"]
    assert abs(report["layers"][3]["variance"] - 2) < 2e-3


def test_layers_left_out_are_listed_with_the_reason(folder):
    done = lsuv("init", "m.onnx", "--data", "c.npy", "--exclude", "conv1*", "--exclude", "ip1", cwd=folder)
    text = done.stderr.decode()
    assert "4 layers within tolerance, 3 excluded" in text
    assert "--exclude conv1*" in text


def test_data_of_several_inputs_by_name(tmp_path):
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 13]> g (float[N,8] a, float[N,8] b) => (float[N,4] y)'
        " { s = Mul(a, b) y = MatMul(s, W) }"
    )
    rng = np.random.default_rng(0)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 4), np.float32), "W"))
    onnx.save(model, tmp_path / "m.onnx")
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((32, 8)))
    done = lsuv("init", "m.onnx", "--data", "a=a.npy", "--data", "b=b.npy", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    missing = lsuv("init", "m.onnx", "--data", "a=a.npy", "-f", cwd=tmp_path)
    assert missing.returncode == 2
    assert b"'b'" in missing.stderr


WRONG = {
    "missing model": ("init nowhere.onnx --data c.npy", "nowhere.onnx"),
    "a directory": ("init . --data c.npy -o x.onnx", "directory"),
    "not onnx": ("init c.npy --data c.npy -o x.onnx", "not an ONNX file"),
    "missing data": ("init m.onnx --data nowhere.npy", "nowhere.npy"),
    "no data": ("init m.onnx", "--data"),
    "unknown pre-init": ("init m.onnx --data c.npy --pre-init he", "orthonormal"),
    "negative tolerance": ("init m.onnx --data c.npy --tol -1", "--tol"),
    "tolerance nan": ("init m.onnx --data c.npy --tol nan", "--tol"),
    "no trials": ("init m.onnx --data c.npy --max-trials 0", "--max-trials"),
    "no variance": ("init m.onnx --data c.npy --target-variance 0", "--target-variance"),
    "negative seed": ("init m.onnx --data c.npy --seed -1", "--seed"),
    "threads": ("init m.onnx --data c.npy --threads 0", "--threads"),
    "batch size": ("init m.onnx --data c.npy --batch-size none", "--batch-size"),
    "limit": ("init m.onnx --data c.npy --limit 0", "limit"),
    "memory": ("init m.onnx --data c.npy --memory lots", "--memory"),
    "device": ("init m.onnx --data c.npy --device gpu", "--device"),
    "no such layer": ("init m.onnx --data c.npy --exclude conv99", "conv99"),
    "output is the input": ("init m.onnx --data c.npy -o m.onnx --force", "input itself"),
    "output is a directory": ("init m.onnx --data c.npy -o .", "directory"),
    "output in no directory": ("init m.onnx --data c.npy -o no/where.onnx", "no"),
    "unknown option": ("init m.onnx --data c.npy --speed 3", "--speed"),
    "unknown command": ("initialise m.onnx", "initialise"),
    "stdin without output": ("init - --data c.npy", "-o"),
    "json and model on stdout": ("init m.onnx --data c.npy -o - --json", "standard output"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_one_clear_complaint_and_changes_nothing(folder, name):
    before = {path.name: hashlib.sha256(path.read_bytes()).digest() for path in folder.iterdir()}
    words, expected = WRONG[name]
    done = lsuv(*words.split(), cwd=folder, stdin=b"" if " - " in words else None)
    text = done.stderr.decode()
    assert done.returncode == 2, text
    assert expected in " ".join(text.split())
    assert "Traceback" not in text
    assert done.stdout == b""
    assert {path.name: hashlib.sha256(path.read_bytes()).digest() for path in folder.iterdir()} == before


def test_an_existing_output_is_only_overwritten_by_force(folder):
    (folder / "m.lsuv.onnx").write_bytes(b"precious")
    done = lsuv("init", "m.onnx", "--data", "c.npy", cwd=folder)
    assert done.returncode == 2
    assert b"--force" in done.stderr
    assert (folder / "m.lsuv.onnx").read_bytes() == b"precious"
    assert lsuv("init", "m.onnx", "--data", "c.npy", "--force", cwd=folder).returncode == 0
    assert onnx.load(folder / "m.lsuv.onnx").graph.node


def test_cuda_where_there_is_none_is_an_error_that_says_what_is_missing(folder):
    import onnxruntime as ort

    from lsuv_cli.scaling import devices

    if devices.open_device("auto").kind == "cuda":
        pytest.skip("there is a CUDA device here")
    done = lsuv("init", "m.onnx", "--data", "c.npy", "--device", "cuda", cwd=folder)
    assert done.returncode == 2
    assert any(word in done.stderr for word in (b"lsuv-cli[cuda]", b"no CUDA support", b"no NVIDIA driver"))
    assert len(done.stderr.splitlines()) == 1, ort.get_available_providers()
    auto = lsuv("init", "m.onnx", "--data", "c.npy", "-v", "--json", cwd=folder)
    told = json.loads(auto.stdout)
    assert told["device_reason"].startswith("CUDA cannot be used: ")
    assert f"device: {told['device']} ({told['device_reason']})".encode() in auto.stderr
    assert b"\x1b" not in auto.stderr


def test_debug_shows_the_traceback(folder):
    done = lsuv("init", "nowhere.onnx", "--data", "c.npy", cwd=folder, LSUV_DEBUG="1")
    assert b"Traceback" in done.stderr


def test_version():
    import lsuv_cli

    assert lsuv("--version").stdout.decode().strip() == f"lsuv {lsuv_cli.__version__}"


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(folder, number):
    np.save(folder / "much.npy", np.random.default_rng(0).standard_normal((60000, 1, 28, 28)).astype(np.float32))
    process = subprocess.Popen(
        [*LSUV, "init", "m.onnx", "--data", "much.npy"], cwd=folder, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    while not list(folder.glob(".lsuv-*")) and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert sorted(path.name for path in folder.iterdir()) == ["c.npy", "m.onnx", "much.npy"]
