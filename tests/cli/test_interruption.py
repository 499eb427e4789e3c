"""Requests to stop: one line and 130 at every moment after the command has begun; then the work's own exit code."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest

from helpers import model, normal

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the work has no process of its own here")

# The moment at which the command has begun, by answering requests to stop, is told on stdout.
COMMAND = """
import os, signal
from lsuv_cli import cli
class Telling:
    def __getattr__(self, name):
        return getattr(signal, name)
    def signal(self, number, handler):
        signal.signal(number, handler)
        if number == signal.SIGHUP:
            os.write(1, b'.')
cli.signal = Telling()
cli.main()
"""
INTERRUPTED = "lsuv: interrupted; nothing was written\n"
MOMENTS = int(os.environ.get("LSUV_KILLS", "12"))


@pytest.fixture(autouse=True)
def _heard():
    """The commands hear SIGHUP, also where the tests are run by `nohup`, which ignores it and hands that on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def folder(tmp_path):
    net = model("g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) b = Tanh(a) y = MatMul(b, v) }",
                w=normal(8, 8), v=normal(8, 8, seed=1))  # fmt: skip
    onnx.save(net, tmp_path / "m.onnx")
    np.save(tmp_path / "c.npy", normal(32, 8))
    return tmp_path


def start(folder, *words, code=COMMAND):
    command = [sys.executable, "-c", code, *(words or ("init", "m.onnx", "--data", "c.npy", "-o", "o.onnx", "--force"))]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_at_every_moment(folder):
    process = start(folder)
    process.stdout.read(1)
    begun = time.perf_counter()
    process.communicate(timeout=60)
    usual = time.perf_counter() - begun
    chance = random.Random(5)
    counts = {0: 0, 130: 0}
    for k in range(MOMENTS):
        (folder / "o.onnx").unlink(missing_ok=True)
        process = start(folder)
        process.stdout.read(1)
        time.sleep(chance.uniform(0, 1.1) * usual if k % 3 else chance.uniform(0, 0.05))
        process.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
        _, err = process.communicate(timeout=60)
        if process.returncode == -signal.SIGTERM and (folder / "o.onnx").exists():
            continue  # after the last line of Python in the parent
        assert "Traceback" not in err
        assert "internal error" not in err
        assert process.returncode in counts, err
        counts[process.returncode] += 1
        if process.returncode == 130:
            assert err == INTERRUPTED
        assert (folder / "o.onnx").exists() == (process.returncode == 0)
        assert not list(folder.glob(".lsuv-*"))
    print(f"{MOMENTS} requests to stop: {counts}")  # noqa: T201  shown with -s


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("slow", ["typer", "numpy", "onnx", "onnxruntime", "lsuv_cli.cli.child_process"])
def test_while_a_module_is_imported(folder, slow, number):
    """A module that takes a minute to import, in a way that turns KeyboardInterrupt into another error."""
    code = f"""
import builtins, os, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {slow!r}:
            os.write(1, b'.')
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                if {slow!r} != "lsuv_cli.cli.child_process":
                    raise ImportError("as native modules do")
                raise
sys.meta_path.insert(0, Slow())
from lsuv_cli.cli import main
main()
"""
    process = start(folder, code=code)
    assert process.stdout.read(1) == "."
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, INTERRUPTED)


# The real command, in which one function waits for a minute after (or before) it has done its work.
WAITING = """
import os, time
from lsuv_cli.cli import child_process, main
begin = child_process._own_stderr
def command():
    begin()
    import {module} as module
    original = {owner}.{name}
    def waiting(*args, **kwargs):
        if {after}: result = original(*args, **kwargs)
        os.write(1, b'.')
        {wait}
        return result if {after} else original(*args, **kwargs)
    setattr({owner}, {name!r}, waiting)
child_process._own_stderr = command
main()
"""


def waiting(module, owner, name, after, wait="time.sleep(60)"):
    return WAITING.format(module=module, owner=owner, name=name, after=after, wait=wait)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_after_publishing_the_exit_code_is_that_of_the_work(folder, number):
    process = start(folder, code=waiting("lsuv_cli.cli.display", "module", "show", False))
    assert process.stdout.read(1) == "."
    worker = int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout)
    os.kill(worker if number == signal.SIGKILL else process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "complete and verified" in err
    assert err.count("\n") == 1
    onnx.load(folder / "o.onnx")


def test_a_report_that_was_asked_for_is_missed(folder):
    words = ("init", "m.onnx", "--data", "c.npy", "-o", "o.onnx", "--json")
    process = start(folder, *words, code=waiting("lsuv_cli.cli.display", "module", "show", False))
    assert process.stdout.read(1) == "."
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "lsuv: interrupted; the model was written\n")


def test_a_request_while_names_are_given_waits_for_that(folder):
    """Data and model are renamed one after the other; between them nothing may stop."""
    onnx.save_model(onnx.load(folder / "m.onnx"), folder / "m.onnx", save_as_external_data=True, size_threshold=0)
    code = waiting("lsuv_cli.outputs", "module.Target", "publish", True, "time.sleep(1)")
    process = start(folder, code=code)
    assert process.stdout.read(1) == "."
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0
    onnx.load(folder / "o.onnx")


def test_a_terminal_gets_its_cursor_back(folder):
    import pty

    screen, inside = pty.openpty()
    code = waiting("lsuv_cli.scaling.runtime", "module.Session", "run", False)
    command = [sys.executable, "-c", code, "init", "m.onnx", "--data", "c.npy", "-o", "o.onnx"]
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=inside, env=env)
    os.close(inside)
    process.stdout.read(1)
    process.terminate()
    process.communicate(timeout=30)
    written = os.read(screen, 65536)
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"\x1b[?25l")
    assert written.endswith(b"lsuv: interrupted; nothing was written\r\n")
