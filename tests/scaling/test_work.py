"""How much work is done, counted and not timed: passes over the data, sessions, values kept, modules imported."""

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from helpers import model, normal, variances
from lsuv_cli import compare, initialize, inspect, measure
from lsuv_cli.cli import commands
from lsuv_cli.data import inputs
from lsuv_cli.errors import LsuvError
from lsuv_cli.scaling import algorithm, runner, running_weights, shares
from lsuv_cli.scaling.frontier import Frontier

# What a layer runs as, after onnxruntime's own fusions; a convolution in its blocked layout is still a Conv.
PRODUCTS = {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"}
# Verification opens the file as it is, once more unoptimized with every layer's output, and optimized; a few samples go
# through each of the three, all data through the last.
VERIFYING = 3
FEW = 3
IMAGES = normal(12, 3, 8, 8)
ROWS = normal(12, 5, 16)


def filters(*shapes):
    return {f"w{k}": 0.05 * normal(*shape, seed=k) for k, shape in enumerate(shapes)}


def chain(activation):
    """Three convolutions in a row, and an inner product."""
    return model(
        f"""x (float[N,3,8,8] x) => (y) {{
            a = Conv <pads=[1,1,1,1]> (x, w0)  ra = {activation}(a)
            b = Conv <pads=[1,1,1,1]> (ra, w1) rb = {activation}(b)
            c = Conv <pads=[1,1,1,1]> (rb, w2) rc = {activation}(c)
            f = Flatten(rc)
            y = Gemm <transB=1> (f, w3) }}""",
        **filters((16, 3, 3, 3), (16, 16, 3, 3), (16, 16, 3, 3), (10, 16 * 64)),
    )


def residual(factor=1.0, shift=0.0):
    """A sum around two convolutions, with batch normalization that was never trained and only multiplies."""
    norm = {"scale": np.full(16, factor), "shift": np.full(16, shift), "mean": np.zeros(16), "variance": np.ones(16)}
    return model(
        """x (float[N,3,8,8] x) => (y) {
            a = Conv <pads=[1,1,1,1]> (x, w0)  na = BatchNormalization(a, scale, shift, mean, variance) ra = Relu(na)
            b = Conv <pads=[1,1,1,1]> (ra, w1) nb = BatchNormalization(b, scale, shift, mean, variance) rb = Relu(nb)
            c = Conv <pads=[1,1,1,1]> (rb, w2) nc = BatchNormalization(c, scale, shift, mean, variance)
            s = Add(nc, ra) rs = Relu(s)
            y = Conv(rs, w3) }""",
        **filters((16, 3, 3, 3), (16, 16, 3, 3), (16, 16, 3, 3), (8, 16, 1, 1)),
        **{name: value.astype(np.float32) for name, value in norm.items()},
    )


def inception():
    """Three branches, one of them two layers deep, joined."""
    return model(
        """x (float[N,3,8,8] x) => (y) {
            a = Conv(x, w0) ra = Relu(a)
            b = Conv(x, w1) rb = Relu(b) c = Conv <pads=[1,1,1,1]> (rb, w2) rc = Relu(c)
            p = MaxPool <kernel_shape=[3,3], pads=[1,1,1,1]> (x) d = Conv(p, w3) rd = Relu(d)
            j = Concat <axis=1> (ra, rc, rd)
            y = Conv(j, w4) }""",
        **filters((8, 3, 1, 1), (8, 3, 1, 1), (16, 8, 3, 3), (8, 3, 1, 1), (8, 32, 1, 1)),
    )


def attention():
    """Query, key and value; their products with one another are no layers, but run no more often."""
    return model(
        """x (float[N,5,16] x) => (y) {
            q = MatMul(x, w0) k = MatMul(x, w1) v = MatMul(x, w2)
            t = Transpose <perm=[0,2,1]> (k) s = MatMul(q, t) m = Softmax(s) c = MatMul(m, v)
            o = MatMul(c, w3) r = Add(o, x)
            h = MatMul(r, w4) g = Tanh(h)
            y = MatMul(g, w5) }""",
        **filters(*[(16, 16)] * 6),
    )


GRAPHS = {
    "relu": (chain("Relu"), IMAGES),
    "tanh": (chain("Tanh"), IMAGES),
    "residual": (residual(), IMAGES),
    "inception": (inception(), IMAGES),
    "attention": (attention(), ROWS),
}


class Watched:
    """Sessions that write down what they run."""

    def __init__(self, monkeypatch, directory):
        self.sessions: list[Any] = []
        real = ort.InferenceSession

        def opened(proto, options, **more):
            options.enable_profiling = True
            # Some versions name two profiles of one second alike.
            options.profile_file_prefix = str(directory / f"profile{len(self.sessions)}")
            self.sessions.append(real(proto, options, **more))
            return self.sessions[-1]

        monkeypatch.setattr(ort, "InferenceSession", opened)

    def products(self):
        """How many products were computed in all."""
        events = [e for session in self.sessions for e in json.loads(Path(session.end_profiling()).read_text())]
        kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
        return sum(e["args"]["op_name"] in PRODUCTS for e in kernels)


@pytest.fixture
def watched(monkeypatch, tmp_path):
    return Watched(monkeypatch, tmp_path)


@pytest.mark.parametrize("name", GRAPHS)
def test_each_layer_runs_once_to_be_scaled_and_once_to_be_verified(name, watched):
    graph, data = GRAPHS[name]
    report = initialize(graph, data, device="cpu", batch_size=4).report
    assert report.exit_code == 0
    assert report.batches == 3
    in_the_graph = sum(node.op_type in PRODUCTS for node in graph.graph.node)
    assert watched.products() == (2 * 3 + FEW) * in_the_graph


@pytest.mark.parametrize("batch_size", [1, 4, 12])
@pytest.mark.parametrize("name", GRAPHS)
def test_there_is_a_session_for_each_stage_and_one_to_verify(name, batch_size, watched):
    graph, data = GRAPHS[name]
    report = initialize(graph, data, device="cpu", batch_size=batch_size).report
    assert len(watched.sessions) == report.stages + VERIFYING


def test_before_takes_the_sessions_of_another_verification(watched):
    graph, data = GRAPHS["tanh"]
    report = initialize(graph, data, device="cpu", before=True).report
    assert len(watched.sessions) == report.stages + 2 * VERIFYING


def test_a_chain_of_relus_is_one_stage_and_one_of_tanhs_a_stage_per_layer():
    stages = {name: initialize(*GRAPHS[name], device="cpu").report.stages for name in ("relu", "tanh", "residual")}
    assert stages == {"relu": 1, "tanh": 4, "residual": 2}


@pytest.mark.parametrize(("factor", "shift", "stages"), [(1.0, 0.0, 2), (0.5, 0.0, 2), (3.0, 0.0, 2), (0.5, 0.2, 4)])
def test_batch_normalization_that_only_multiplies_needs_no_stage_and_is_accounted_for(factor, shift, stages):
    done = initialize(residual(factor, shift), IMAGES, device="cpu", batch_size=4)
    assert done.report.stages == stages
    found = variances(done.model, {"x": IMAGES}, ["a", "b", "c", "y"])
    np.testing.assert_allclose([found[name] for name in "abcy"], 1.0, atol=1e-3)
    np.testing.assert_allclose([layer.variance for layer in done.report.layers], 1.0, atol=1e-3)


def test_doubling_the_depth_doubles_the_work(watched):
    counts = []
    for depth in (8, 16):
        nodes = "".join(f"v{k + 1} = MatMul(v{k}, w{k}) " for k in range(depth)).replace("v0", "x")
        graph = model(f"x (float[N,16] x) => (v{depth}) {{ {nodes} }}", **filters(*[(16, 16)] * depth))
        watched.sessions.clear()
        initialize(graph, normal(32, 16), device="cpu")
        counts.append(watched.products())
    assert counts == [(2 + FEW) * 8, (2 + FEW) * 16]


# What waits between stages


@pytest.fixture
def frontiers(monkeypatch):
    made = []

    class Kept(Frontier):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

        def close(self):
            self.left = self.bytes
            super().close()

    monkeypatch.setattr(shares, "Frontier", Kept)
    return made


def test_what_no_later_stage_reads_is_freed(frontiers):
    depth, samples = 8, 64
    nodes = "".join(f"v{k + 1} = MatMul(t{k}, w{k}) t{k + 1} = Tanh(v{k + 1}) " for k in range(depth))
    text = f"x (float[N,16] x) => (t{depth}) {{ {nodes} }}".replace("t0", "x")
    report = initialize(model(text, **filters(*[(16, 16)] * depth)), normal(samples, 16), device="cpu").report
    assert report.stages == depth
    scaling = frontiers[0]
    # The values that a stage reads and those that it makes, not those of eight stages.
    assert scaling.peak <= 2 * samples * 16 * 4
    assert scaling.left == 0
    assert scaling.spilled == 0


@pytest.mark.parametrize("name", ["tanh", "residual", "attention"])
def test_values_that_wait_in_a_file_change_nothing(name, frontiers):
    graph, data = GRAPHS[name]
    plain = initialize(graph, data, device="cpu", batch_size=4, threads=1).model
    spilled = initialize(graph, data, device="cpu", batch_size=4, threads=1, memory=1).model
    assert plain.SerializeToString(deterministic=True) == spilled.SerializeToString(deterministic=True)
    scaling, scaling_in_a_file = frontiers[0], frontiers[3]  # verification has two of its own
    assert scaling.spilled == 0
    assert scaling.peak > 1
    assert scaling_in_a_file.spilled > 0
    assert scaling_in_a_file.peak <= 1


# What `lsuv --help` waits for

HEAVY = ("onnx", "onnxruntime", "numpy")


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--help"], {}, "Usage"),
        (["init", "--help"], {}, "--target-variance"),
        ([], {"_LSUV_COMPLETE": "complete_bash", "COMP_WORDS": "lsuv in", "COMP_CWORD": "1"}, "init"),
    ],
)
def test_help_and_completion_import_nothing_heavy(words, environment, expected):
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('loaded:', [m for m in {HEAVY} if m in sys.modules]))\n"
        "from lsuv_cli.cli import main\n"
        f"main({words})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert expected in done.stdout
    assert "loaded: []" in done.stdout, done.stdout


def test_init_imports_what_it_needs(tmp_path):
    """The room `home`, pages and plots take time to import; so does looking for garbage among what is imported."""
    onnx.save(GRAPHS["relu"][0], tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", IMAGES)
    code = f"""
import atexit, gc, sys
from lsuv_cli.cli import main

def tell():
    names = ["lsuv_cli.home", "lsuv_cli.page", "lsuv_cli.workers", "ray", "matplotlib", "torch", "onnx.reference"]
    print("loaded:", [name for name in names if name in sys.modules])
    print("collects:", gc.isenabled(), gc.get_freeze_count() > 0)

atexit.register(tell)
sys.argv[1:] = ["init", "{tmp_path}/m.onnx", "--data", "{tmp_path}/x.npy", "-o", "{tmp_path}/o.onnx"]
main()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # What was registered to run at exit runs, although Python does not free its memory.
    assert done.stdout.splitlines()[:2] == ["loaded: []", "collects: True True"]  # the parent's lines follow


@pytest.mark.parametrize(
    ("words", "known"),
    [(["init", "m.onnx"], 1), (["check"], 1), ([], 7), (["--help"], 7), (["int", "m.onnx"], 7), (["--version"], 7)],
)
def test_typer_takes_time_for_one_command(words, known):
    """All are known where one may be misspelt, or where they are listed."""
    assert len(commands._app_for(words).registered_commands) == known
    assert len(commands.app.registered_commands) == 7


@pytest.mark.parametrize("command", ["init", "check", "inspect", "compare"])
def test_data_is_read_once_to_examine_it_and_once_for_each_pass(command, tmp_path, monkeypatch):
    """Its shapes are known without reading, and reading may mean unpacking, decoding or converting."""
    graph, data = GRAPHS["relu"][0], normal(120, 3, 8, 8)
    np.save(tmp_path / "x.npy", data.astype(np.float64))
    read = []
    real = inputs._cast
    monkeypatch.setattr(inputs, "_cast", lambda values, *more: read.append(len(values)) or real(values, *more))
    run: Any = {"init": initialize, "check": measure, "inspect": inspect, "compare": compare}[command]
    run(graph, str(tmp_path / "x.npy"), device="cpu", batch_size=3)
    # Calibration and verification; of five initializations, one is calibrated. Some code looks at the first batch too.
    passes = {"init": 2, "check": 1, "inspect": 1, "compare": 1 + 5}[command]
    assert len(data) * (1 + passes) <= sum(read) < len(data) * (1 + passes) + len(data)


# What is refused before it runs


def test_a_batch_that_cannot_fit_is_refused_with_a_size_that_may(monkeypatch):
    net = model("x (float[N,16] x) => (y) { a = MatMul(x, w) t = Tanh(a) y = MatMul(t, v) }",
                w=normal(16, 4096), v=normal(4096, 16))  # fmt: skip
    data = normal(1000, 16)
    monkeypatch.setattr(runner, "available_memory", lambda: 10_000_000)
    # The second layer's input alone takes 1000 x 4096 x 4 bytes = 16 MB.
    # A session takes about six times a layer's input and output: 6 x (16 + 4096) x 4 bytes = 98.7 kB for a sample.
    with pytest.raises(LsuvError, match=r"a batch of 1000 needs at least 16 MB .* layer a, .*`batch_size=101`"):
        initialize(net, data, device="cpu", batch_size=1000)
    report = initialize(net, data, device="cpu", batch_size=101).report
    assert all(abs(layer.variance - 1) < 1e-3 for layer in report.layers)


def test_a_batch_size_that_nobody_asked_for_is_made_to_fit(monkeypatch):
    net = model("x (float[N,16] x) => (y) { a = MatMul(x, w) t = Tanh(a) y = MatMul(t, v) }",
                w=normal(16, 4096), v=normal(4096, 16))  # fmt: skip
    data = normal(1000, 16)
    monkeypatch.setattr(runner, "available_memory", lambda: 10_000_000)
    report = initialize(net, data, device="cpu").report
    # (10 MB - 16 x 4096 x 4 bytes of weights) / 98.7 kB for a sample = 98
    assert report.batches == 11
    assert report.samples == 1000
    assert all(abs(layer.variance - 1) < 1e-3 for layer in report.layers)
    with pytest.raises(LsuvError, match=r"a batch of 1000 needs"):
        initialize(net, [data], device="cpu")  # a batch of the user's own is not cut


def test_values_that_find_no_room_between_stages_are_refused_before_they_are_made(monkeypatch):
    graph, data = GRAPHS["tanh"]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(LsuvError, match=r"have to wait in a file .*`limit` .*`memory`.*TMPDIR"):
        initialize(graph, data, device="cpu", memory=1)
    assert initialize(graph, data, device="cpu").report.exit_code == 0


def test_a_stages_weights_are_gone_when_the_next_stages_are_made(monkeypatch):
    """Else two stages' weights are in memory at a time."""
    made: list[weakref.ref[Any]] = []
    alive_before = []
    real = running_weights.running_weight

    def counted(*given: Any) -> Any:
        alive_before.append(sum(reference() is not None for reference in made))
        running = real(*given)
        made.append(weakref.ref(running.array))
        return running

    monkeypatch.setattr(algorithm, "running_weight", counted)
    graph = model(
        "x (float[N,8] x) => (c, d) { a = MatMul(x, w0) t = Tanh(a) b = MatMul(t, w1) u = Tanh(b) "
        "c = MatMul(u, w2) d = MatMul(u, w3) }",
        **{f"w{k}": normal(8, 8, seed=k) for k in range(4)},
    )
    assert initialize(graph, normal(32, 8), device="cpu").report.stages == 3
    assert alive_before == [0, 0, 0, 1]  # the third stage has two weights
