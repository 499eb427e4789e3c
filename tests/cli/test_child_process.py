"""A crash in native code: one line, exit code 2, the input untouched, nothing left behind."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest

from helpers import model, normal

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the work has no process of its own here")

# The real command, in which one function of ours dies the way native code does.
DYING = """
import os, signal, sys
from lsuv_cli import interruption
from lsuv_cli.cli import child_process as guard
from lsuv_cli.cli import main

def dying(*_):
    os.write(2, b"terminate called after throwing an instance of 'onnxruntime::Chaos'\\n")
    {how}

def command():
    import {module} as module
    setattr({owner}, {name!r}, dying)

begin = guard._own_stderr
guard._own_stderr = lambda: (begin(), command())
main()
"""
SEGFAULT = "os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.fixture
def folder(tmp_path):
    net = model("g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) b = Tanh(a) y = MatMul(b, v) }",
                w=normal(8, 8), v=normal(8, 8, seed=1))  # fmt: skip
    onnx.save_model(net, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    np.save(tmp_path / "c.npy", normal(32, 8))
    return tmp_path


def start(folder, how=SEGFAULT, module="lsuv_cli.scaling.runtime", owner="module.Session", name="run", words=()):
    script = DYING.format(how=how, module=module, owner=owner, name=name)
    command = [sys.executable, "-c", script, "init", "m.onnx", "--data", "c.npy", "-o", "o.onnx", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (SEGFAULT, "Segmentation fault"),
        ("os.abort()", "Aborted"),
        ("os.kill(os.getpid(), signal.SIGFPE)", "Floating point exception"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "memory ran out"),
        ("os._exit(1)", "exit code 1 of a library"),
        ("os._exit(0)", "exit code 0 of a library"),
        ("with interruption.relying_on('Ray'): os._exit(1)", "ended with Ray, whose own processes"),
    ],
)
def test_a_crash_gives_one_line_and_leaves_nothing(folder, how, said):
    before = contents(folder)
    process = start(folder, how)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith(("lsuv: the run ", "lsuv: a library ended the run"))
    assert said in err
    assert err.count("\n") == 1
    assert contents(folder) == before
    assert not list(folder.glob(".lsuv-*"))


def test_a_crash_while_weights_are_written_leaves_none_of_them(folder):
    before = contents(folder)
    process = start(folder, module="numpy.lib.format", owner="module", name="write_array", words=["--weights", "w.npz"])
    process.communicate(timeout=60)
    assert process.returncode == 2
    assert contents(folder) == before
    assert not list(folder.glob(".lsuv-*"))


def test_who_kills_the_command_kills_its_work(folder):
    process = start(folder, "import time; time.sleep(60)")
    while not list(folder.glob(".lsuv-*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    begun = time.monotonic()
    process.communicate(timeout=30)  # returns when the child has closed its end of the pipes
    if sys.platform == "linux":
        assert time.monotonic() - begun < 20


def test_what_the_work_leaves_is_removed_however_it_ends(folder):
    process = start(folder, "import shutil; shutil.rmtree = None; raise SystemExit(3)")
    process.communicate(timeout=60)
    assert process.returncode
    assert not list(folder.glob(".lsuv-*"))


def test_a_second_request_to_stop_does_not_interrupt_the_cleaning_up(folder):
    process = start(folder, "import time; time.sleep(60)")
    while not list(folder.glob(".lsuv-*")):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "lsuv: interrupted; nothing was written\n"
    assert not list(folder.glob(".lsuv-*"))


def test_a_request_to_stop_while_python_shuts_down_changes_nothing(folder):
    how = "import atexit, time; guard.ONE_REQUEST = 0; atexit.register(time.sleep, 1); time.sleep(60)"
    process = start(folder, how)
    while not list(folder.glob(".lsuv-*")):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == "lsuv: interrupted; nothing was written\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize("debug", ["", "1"])
def test_exit_codes_and_streams_pass_through(folder, debug):
    command = [sys.executable, "-c", "from lsuv_cli.cli import main; main()"]
    env = {**os.environ, "LSUV_DEBUG": debug}

    def run(*words):
        return subprocess.run([*command, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)

    assert run("init", "m.onnx", "--data", "c.npy", "--json").stdout.startswith("{")
    assert run("check", "m.onnx", "--data", "c.npy", "-q").returncode == 1
    wrong = run("init", "m.onnx", "--dat", "c.npy")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("lsuv: ")
    assert wrong.stdout == ""
    closed = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *command, "inspect", "m.onnx"], cwd=folder, capture_output=True, check=False
    )
    assert closed.returncode == 0
    assert closed.stdout


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_a_recurrent_layer_without_rows_aborts_onnxruntime_and_is_told_in_one_line(tmp_path, op, gates):
    text = f"""g (float[T,N,8] x) => (y) {{
        s = ReduceSum<keepdims=0>(x, axes) p = Greater(s, big) c = Compress<axis=1>(x, p)
        a = {op}<hidden_size=6>(c, w, r) y = MatMul(a, v) }}"""
    tensors = {"w": normal(1, 6 * gates, 8), "r": normal(1, 6 * gates, 6), "v": normal(6, 4)}
    given = model(text, big=np.float32(1e9), axes=np.array([0, 2]), **tensors)
    onnx.save(given, tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", normal(5, 3, 8))
    words = ["init", "m.onnx", "--data", "x.npy", "-o", "o.onnx", "-q", "--batch-size", "all"]
    command = [sys.executable, "-c", "from lsuv_cli.cli import main; main()", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if done.returncode != 2:
        pytest.skip("this onnxruntime runs it")
    (told,) = [line for line in done.stderr.splitlines() if "warning" not in line]
    assert told.startswith("lsuv: the run crashed inside a native library, most likely onnxruntime on this model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "x.npy"]
    assert onnx.load(tmp_path / "m.onnx") == given
