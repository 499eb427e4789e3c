"""Several models at once: it goes on after a failure, and ends with the worst exit code and a summary."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest

from helpers import model, normal
from independent import layer_variances
from lsuv_cli import outputs
from shell import LSUV, lsuv


def small(seed):
    return model(
        "g (float[N,6] x) => (float[N,3] z) { y = MatMul(x, V) r = Relu(y) z = MatMul(r, W) }",
        V=normal(6, 5, seed=seed),
        W=normal(5, 3, seed=seed + 1),
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(["a", "b", "c"]):
        onnx.save(small(k), f"{name}.onnx")
    np.save("d.npy", normal(64, 6))
    return tmp_path


def test_all_go_to_the_directory_under_their_own_names(folder):
    done = lsuv("init", "a.onnx", "b.onnx", "c.onnx", "--data", "d.npy", "--output-dir", "out/put")
    assert done.code == 0
    assert done.out == ""
    assert sorted(path.name for path in (folder / "out/put").iterdir()) == ["a.onnx", "b.onnx", "c.onnx"]
    for name in "abc":
        found = layer_variances(onnx.load(f"out/put/{name}.onnx"), {"x": np.load("d.npy")})
        assert all(abs(variance - 1) < 1e-3 for variance in found.values())
    last = done.err.splitlines()[-1]
    assert last == "3 of 3 models done, 0 of them with layers outside the tolerance, 0 failed"


def test_one_model_may_go_to_a_directory_too(folder):
    assert lsuv("init", "a.onnx", "--data", "d.npy", "--output-dir", "out").code == 0
    assert [path.name for path in (folder / "out").iterdir()] == ["a.onnx"]


def test_it_goes_on_after_a_failure_and_ends_with_the_worst_code(folder):
    (folder / "b.onnx").write_bytes(b"not a model")
    text = "g (float[N,6] x) => (float[N,3] y) { o = Sub(x, x) y = MatMul(o, W) }"
    onnx.save(model(text, W=normal(6, 3)), "dead.onnx")
    words = ("--data", "d.npy", "--output-dir", "out")
    done = lsuv("init", "a.onnx", "b.onnx", "dead.onnx", "c.onnx", *words)
    assert done.code == 2
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["a.onnx", "c.onnx", "dead.onnx"]
    assert "lsuv: b.onnx" in done.err
    last = done.err.splitlines()[-1]
    assert last == "3 of 4 models done, 1 of them with layers outside the tolerance, 1 failed"
    assert lsuv("init", "dead.onnx", "c.onnx", *words, "--force").code == 1


def test_a_failure_names_its_model(folder):
    np.save("wrong.npy", normal(64, 7))
    done = lsuv("init", "a.onnx", "b.onnx", "--data", "wrong.npy", "--output-dir", "out", "-q")
    assert done.code == 2
    assert [line.split(":")[1].strip() for line in done.err.splitlines()] == ["a.onnx", "b.onnx"]


def test_json_has_an_entry_for_each_model_the_failed_ones_too(folder):
    (folder / "b.onnx").write_bytes(b"not a model")
    done = lsuv("init", "a.onnx", "b.onnx", "c.onnx", "--data", "d.npy", "--output-dir", "out", "--json")
    reports = json.loads(done.out)
    assert [report["schema"] for report in reports] == ["lsuv-report/1", "lsuv-error/1", "lsuv-report/1"]
    assert [report["exit_code"] for report in reports] == [0, 2, 0]
    assert [report["model"] for report in reports] == ["a.onnx", "b.onnx", "c.onnx"]
    assert "not an ONNX file" in reports[1]["error"]


def test_a_plan_for_several_needs_no_directory(folder):
    done = lsuv("init", "a.onnx", "b.onnx", "--dry-run")
    assert done.code == 0
    assert done.err.count("2 layers to initialize") == 2
    assert sorted(path.name for path in folder.iterdir()) == ["a.onnx", "b.onnx", "c.onnx", "d.npy"]


REFUSED = {
    "no Ray": "a.onnx b.onnx --data d.npy --workers 2",
    "no Ray for one model": "a.onnx --data d.npy --workers 2",
    "no cluster": "a.onnx b.onnx --data d.npy --workers ray://127.0.0.1:1",
    "no model": "none.onnx d.npy --data d.npy",
    "no data": "a.onnx b.onnx --data none.npy",
    "one model, no data": "a.onnx --data none.npy",
    "a page of a kind that is not known": "a.onnx --data d.npy --plot p.docx",
    "a device that is not here": "a.onnx --data d.npy --device npu",
}


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_request_that_is_refused_leaves_no_directory(folder, monkeypatch, words):
    monkeypatch.setitem(sys.modules, "ray", None)
    before = sorted(folder.iterdir())
    assert lsuv("init", *words.split(), "--output-dir", "out/put", "-q").code == 2
    assert sorted(folder.iterdir()) == before


def test_a_directory_that_was_there_stays(folder):
    (folder / "out").mkdir()
    assert lsuv("init", "a.onnx", "--data", "none.npy", "--output-dir", "out/put", "-q").code == 2
    assert list((folder / "out").iterdir()) == []


def test_a_page_may_go_into_the_new_directory(folder):
    assert lsuv("init", "a.onnx", "--data", "d.npy", "--output-dir", "out", "--html", "out/p.html", "-q").code == 0
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["a.onnx", "p.html"]


def test_another_run_that_failed_does_not_take_the_directory_away(folder):
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    with second:
        with first:
            first.enter_context(outputs.directory(folder / "out"))
            second.enter_context(outputs.directory(folder / "out"))
        assert (folder / "out").is_dir()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the work has no process of its own here")
def test_an_interrupted_run_leaves_no_directory(folder):
    (folder / "loader.py").write_text("import os, signal\ndef load_data():\n    os.kill(os.getppid(), signal.SIGTERM)\n"
                                      "    while True:\n        signal.pause()\n")  # fmt: skip
    words = ["init", "a.onnx", "--data", "loader.py", "--output-dir", "out/put"]
    done = subprocess.run([*LSUV, *words], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "lsuv: interrupted; nothing was written\n")
    assert not (folder / "out").exists()


def test_existing_outputs_need_force_each_for_itself(folder):
    (folder / "out").mkdir()
    (folder / "out/a.onnx").write_bytes(b"precious")
    done = lsuv("init", "a.onnx", "b.onnx", "--data", "d.npy", "--output-dir", "out")
    assert done.code == 2
    assert "use --force to overwrite it or choose another --output-dir\n" in done.err
    assert (folder / "out/a.onnx").read_bytes() == b"precious"
    assert onnx.load("out/b.onnx").graph.node


WRONG = {
    "no directory": ("a.onnx b.onnx --data d.npy", "--output-dir"),
    "-o": ("a.onnx b.onnx --data d.npy -o x.onnx", "-o is for one model, 2 were given"),
    "--weights": ("a.onnx b.onnx --data d.npy --output-dir out --weights w.npz", "--weights is for one model"),
    "--plot": ("a.onnx b.onnx --data d.npy --output-dir out --plot p.png", "--plot is for one model"),
    "both": ("a.onnx --data d.npy --output-dir out -o x.onnx", "-o and --output-dir"),
    "own directory": ("a.onnx b.onnx --data d.npy --output-dir . --force", "a.onnx is the input itself"),
    "same name": ("a.onnx deep/a.onnx --data d.npy --output-dir out", "the same file name"),
    "a file": ("a.onnx b.onnx --data d.npy --output-dir d.npy", "--output-dir d.npy cannot be made"),
    "stdin": ("a.onnx - --data d.npy --output-dir out", "standard input"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_refused_before_anything_is_done(folder, name):
    (folder / "deep").mkdir()
    shutil.copy("a.onnx", "deep/a.onnx")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    words, expected = WRONG[name]
    done = lsuv("init", *words.split())
    assert done.code == 2
    assert expected in done.err
    assert done.err.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not (folder / "out").exists()


def test_a_directory_reached_by_another_way_is_still_the_inputs_own(folder):
    (folder / "alias").symlink_to(folder, target_is_directory=True)
    done = lsuv("init", "a.onnx", "b.onnx", "--data", "d.npy", "--output-dir", "alias", "--force")
    assert (done.code, "is the input itself" in done.err) == (2, True)


def test_random_data_is_marked_in_report_and_metadata(folder):
    done = lsuv("init", "a.onnx", "--data", "random", "--json")
    assert json.loads(done.out)["data"] == "random"
    assert "random data" in done.err
    metadata = {entry.key: entry.value for entry in onnx.load("a.lsuv.onnx").metadata_props}
    assert metadata["lsuv.data"] == "random"
    lsuv("init", "b.onnx", "--data", "d.npy", "-q")
    assert "lsuv.data" not in {entry.key for entry in onnx.load("b.lsuv.onnx").metadata_props}


def test_random_data_follows_the_seed(folder):
    first, again, other = (
        json.loads(lsuv("inspect", "a.onnx", "--data", "random", "--seed", seed, "--json").out)["layers"][0]["variance"]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_random_data_fits_the_inputs(folder):
    text = """g (float[4,3] x, int64[4,2] i, bool[4,3] m) => (float[4,2] y)
        { z = Where(m, x, x) s = Cast<to=1>(i) c = Concat<axis=1>(z, s) y = MatMul(c, W) }"""
    onnx.save(model(text, W=normal(5, 2)), "many.onnx")
    report = json.loads(lsuv("inspect", "many.onnx", "--data", "random", "--limit", "8", "--json").out)
    assert (report["samples"], report["batches"]) == (8, 2)
    onnx.save(model("g (float[N,T,3] x) => (float[N,T,2] y) { y = MatMul(x, W) }", W=normal(3, 2)), "open.onnx")
    done = lsuv("inspect", "open.onnx", "--data", "random")
    assert done.code == 0
    assert "input 'x' leaves axis 'T' open: 16 in random data" in done.err


# A loader that ends the first process that runs it, the way native code does when it crashes.
CRASHING = """
import os, signal
import numpy as np

def load_data():
    try:
        os.close(os.open("crashed", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        yield {"x": np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)}
    else:
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the work has no process of its own here")
def test_a_model_that_crashes_onnxruntime_ends_alone(folder):
    (folder / "loader.py").write_text(CRASHING)
    words = ["init", "a.onnx", "b.onnx", "c.onnx", "--data", "loader.py", "--output-dir", "out", "--json"]
    done = subprocess.run([*LSUV, *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    complaint, *_, last = done.stderr.splitlines()
    assert complaint.startswith("lsuv: a.onnx: the run crashed inside a native library")
    assert last == "2 of 3 models done, 0 of them with layers outside the tolerance, 1 failed"
    assert [report["exit_code"] for report in json.loads(done.stdout)] == [2, 0, 0]
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["b.onnx", "c.onnx"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the work has no process of its own here")
def test_in_a_process_of_its_own_a_model_gets_the_same_bits(folder):
    words = ["--data", "d.npy", "--threads", "1", "--output-dir"]
    assert lsuv("init", "a.onnx", "b.onnx", *words, "here").code == 0
    subprocess.run([*LSUV, "init", "a.onnx", "b.onnx", *words, "apart"], check=True, capture_output=True)
    for name in ("a.onnx", "b.onnx"):
        assert (folder / "apart" / name).read_bytes() == (folder / "here" / name).read_bytes()
