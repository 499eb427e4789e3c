"""Workers on Ray itself: the same bits, work counted by onnxruntime, real signals, and nothing left behind.

`pytest -m ray`; each test that starts a Ray of its own takes some ten seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from growth import assert_memory_does_not_grow
from helpers import normal
from lsuv_cli import compare, initialize, inspect, measure
from lsuv_cli.version import __version__
from lsuv_cli.workers import cluster
from shell import LSUV
from stories import BATCH, SAMPLES, STORIES, bits, figures, tanhs

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
ONE: Any = {"device": "cpu", "threads": 1, "batch_size": BATCH}
PRODUCTS = {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"}
FEW = 3  # verification runs a few samples through the file, unoptimized and optimized


@pytest.fixture(scope="module")
def ray():
    """One Ray for the tests of results; the calls find it running and use it."""
    module = pytest.importorskip("ray", reason="Ray is not installed (pip install .[ray])")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    module.init(num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "START_SECONDS", 600.0)  # there is room for three, however long they take to start
        yield module
    module.shutdown()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", STORIES)
def test_the_bits_are_those_of_one_process(name, workers, ray):
    graph, data, settings = STORIES[name]
    one = initialize(graph, data, **ONE, **settings)
    several = initialize(graph, data, workers=workers, **ONE, **settings)
    assert bits(several) == bits(one)
    assert figures(several.report) == figures(one.report)
    assert len({worker.pid for worker in several.report.workers} - {os.getpid()}) == workers


def test_more_threads_in_a_worker_change_no_scale_by_a_millionth(ray):
    graph, data, settings = STORIES["images"]
    one = initialize(graph, data, **ONE | {"threads": 2}, **settings).report
    several = initialize(graph, data, workers=2, **ONE, **settings).report
    for layer, other in zip(one.layers, several.layers, strict=True):
        assert other.scale == pytest.approx(layer.scale, rel=1e-6)


def test_looking_and_comparing_give_the_same_figures(ray):
    graph, data, _ = STORIES["images"]
    assert figures(inspect(graph, data, workers=2, **ONE)) == figures(inspect(graph, data, **ONE))
    assert figures(measure(graph, data, workers=2, **ONE)) == figures(measure(graph, data, **ONE))
    inits = "lsuv,xavier,keep"
    several, one = compare(graph, data, inits, workers=2, **ONE), compare(graph, data, inits, **ONE)
    assert [figures(report) for report in several.values()] == [figures(report) for report in one.values()]


def test_files_are_read_by_the_workers(ray, tmp_path):
    path = tmp_path / "c.npz"
    np.savez(path, x=normal(SAMPLES, 16))
    one = initialize(tanhs(), str(path), **ONE)
    assert bits(initialize(tanhs(), str(path), workers=2, **ONE)) == bits(one)


class Run:
    """The command as a process of its own, with two workers."""

    def __init__(self, directory: Path, *words: object, depth: int = 4, size: int = 16, samples: int = SAMPLES) -> None:
        pytest.importorskip("ray", reason="Ray is not installed (pip install .[ray])")
        onnx.save(tanhs(depth, size), directory / "m.onnx")
        np.save(directory / "c.npy", normal(samples, size))
        self.directory, self.output = directory, directory / "out" / "m.lsuv.onnx"
        self.output.parent.mkdir(exist_ok=True)
        settings = ["--device", "cpu", "--threads", 1, "--batch-size", BATCH, "-f"]
        self.words = ["init", directory / "m.onnx", "--data", directory / "c.npy", *settings, *words]
        self.environment = {**os.environ, "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}

    def one(self) -> bytes:
        """What one process writes."""
        path = self.directory / "one.onnx"
        subprocess.run([*LSUV, *map(str, self.words), "-o", str(path)], check=True, capture_output=True)
        return path.read_bytes()

    def start(self, workers: object = 2) -> subprocess.Popen[str]:
        words = [*LSUV, *map(str, [*self.words, "-o", self.output, "--workers", workers])]
        return subprocess.Popen(words, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def at_work(self, process: subprocess.Popen[str], count: int = 2) -> list[int]:
        """The processes of the workers, once they run stages."""
        end = time.monotonic() + 300
        while time.monotonic() < end and process.poll() is None:
            found = [pid for pid in below(process.pid) if title(pid).startswith("ray::Worker.run")]
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError(f"no worker was seen at work: {process.communicate(timeout=5)}")


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def below(pid: int) -> list[int]:
    """All processes below a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def alive(pids: list[int]) -> list[str]:
    return [title(pid) for pid in pids if title(pid)]


def assert_nothing_is_left(run: Run, pids: list[int], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert alive(pids) == []
    assert [path.name for path in run.directory.iterdir() if path.name.startswith(".lsuv-")] == []
    assert [path.name for path in Path("/tmp").iterdir() if path.name.startswith(".lsuv-") and owned(path, pids)] == []
    assert [path.name for path in run.output.parent.iterdir() if path != run.output] == []


def owned(path: Path, pids: list[int]) -> bool:
    """Whether a directory of a local Ray was that of one of these processes."""
    return any(entry.name.endswith(f"_{pid}") for entry in path.glob("session_*") for pid in pids)


@pytest.mark.parametrize("name", ["tanhs", "images"])
def test_each_layer_runs_once_to_be_scaled_and_once_to_be_verified(name, tmp_path):
    """Counted by onnxruntime's own profiles, in the driver and in the workers."""
    pytest.importorskip("ray")
    graph, data, _ = STORIES[name]
    onnx.save(graph, tmp_path / "m.onnx")
    np.save(tmp_path / "c.npy", data)
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    script = Path(__file__).parent / "counted.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "LSUV_TEST_PROFILES": str(profiles)}
    words = [sys.executable, str(script), str(BATCH)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    batches = int(done.stdout)
    events = [event for path in profiles.glob("*.json") for event in json.loads(path.read_text())]
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    count = sum(e["args"]["op_name"] in PRODUCTS for e in kernels)
    layers = sum(node.op_type in PRODUCTS for node in graph.graph.node)
    assert len({path.name.partition("-")[0] for path in profiles.glob("*.json")}) == 3  # the driver, two workers
    assert count == (2 * batches + FEW) * layers


def test_the_drivers_memory_stays_at_a_stages_weights(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed (pip install .[ray])")
    assert_memory_does_not_grow(tmp_path, "workers")


def test_a_cluster_that_is_not_there_is_told_at_once_and_in_one_line(tmp_path):
    run = Run(tmp_path)
    _, err = run.start("ray://127.0.0.1:1").communicate(timeout=300)
    assert err.startswith("lsuv: --workers ray://127.0.0.1:1: no Ray cluster could be joined (")
    assert "Connection refused" in err
    assert err.count("\n") == 1


def test_a_worker_killed_in_the_middle_of_a_stage_changes_nothing(tmp_path):
    run = Run(tmp_path, depth=6, size=256, samples=4000)
    process = run.start()
    victims = run.at_work(process)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in victims} == {os.getpriority(os.PRIO_PROCESS, 0)}
    started = below(process.pid)
    os.kill(victims[0], signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out == ""
    assert "was lost and was replaced" in err
    assert run.output.read_bytes() == run.one()
    assert_nothing_is_left(run, started)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_after_the_driver_is_ended_nothing_is_left(number, tmp_path):
    run = Run(tmp_path, depth=6, size=256, samples=4000)
    process = run.start()
    run.at_work(process)
    started = below(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == (130 if number is not signal.SIGKILL else -signal.SIGKILL)
    assert not run.output.exists()
    if number is not signal.SIGKILL:
        assert err == "lsuv: interrupted; nothing was written\n"
        assert_nothing_is_left(run, started)
    else:
        end = time.monotonic() + 60
        while alive(started) and time.monotonic() < end:
            time.sleep(0.1)
        assert alive(started) == []


def test_after_a_run_nothing_is_left(tmp_path):
    run = Run(tmp_path)
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place = place.rename(str(place).ljust(cluster.LONGEST_PLACE, "_"))  # the longest in which Ray's sockets find room
    run.environment["TMPDIR"] = str(place)
    process = run.start()
    run.at_work(process, 1)
    assert any(path.name.startswith(".lsuv-") for path in place.iterdir())
    started = below(process.pid)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert run.output.read_bytes() == run.one()
    assert_nothing_is_left(run, started, seconds=1.0)
    assert {path.name for path in place.iterdir()} <= {".ses"}  # onnxruntime's own, from its import
    shutil.rmtree(place)


def test_when_rays_server_is_killed_one_line_says_so(tmp_path):
    run = Run(tmp_path, depth=6, size=256, samples=4000)
    process = run.start()
    run.at_work(process, 1)
    started = below(process.pid)
    (raylet,) = [pid for pid in started if title(pid).partition("\0")[0].endswith("/raylet")]
    os.kill(raylet, signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.startswith("lsuv: ")
    assert "Ray, whose own processes ended or were killed" in err
    assert err.endswith("; nothing was written\n")
    assert err.count("\n") == 1
    assert not run.output.exists()
    assert_nothing_is_left(run, started)


WITHOUT_THE_PACKAGE = """
import sys

import ray

from lsuv_cli import initialize
from lsuv_cli.errors import LsuvError

ray.init(num_cpus=1, num_gpus=0, include_dashboard=False, log_to_driver=False,
         runtime_env={"worker_process_setup_hook": "hidden.hide"})
try:
    initialize("m.onnx", "c.npy", device="cpu", threads=1, workers=1)
except LsuvError as problem:
    print(problem)
"""


def test_a_node_without_the_package_is_told_to_have_it(tmp_path):
    run = Run(tmp_path)
    (tmp_path / "hidden.py").write_text("import sys\n\n\ndef hide():\n    sys.modules['lsuv_cli'] = None\n")
    environment = {**run.environment, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "TMPDIR": "/tmp"}
    words = [sys.executable, "-c", WITHOUT_THE_PACKAGE]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("a worker does not start ("), done.stderr
    assert done.stdout.endswith(f"every node needs lsuv-cli {__version__}\n")
