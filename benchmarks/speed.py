"""How long LSUV takes, next to its limits and to other ways of doing it.

    pip install -e '.[bench]'
    python benchmarks/speed.py            # all of it: about an hour on two cores
    python benchmarks/speed.py --quick    # FitNet-4 and a short sweep, no peers: some minutes
    python benchmarks/speed.py --only resnet50 --repeats 7 --resume
    python benchmarks/speed.py --quick --device cuda --output cuda.json    # the same ratios on another device

The limits, measured in the same process and in turns with ours:
    forward   one pass over the same data by a session of its own, all graph optimizations, the best of several
              batch sizes, the session made beforehand and warm
    gemm      one float32 product A'A for each layer's weight A
Ours:
    calibration        all stages with the weights kept: sessions made and run, scales found, weights scaled and stored
    verification       the result looked at anew, its session made and run
    orthonormalization the new weights of all layers
    process            `lsuv init` from start to exit: interpreter, imports, reading and writing included
The others, as one would use them:
    PyPI lsuv  LSUVinit of lsuv 0.3.0 on the same network in PyTorch (onnx2torch); only the call is timed
    naive      per layer and trial: expose the layer's output, make a session, run, scale; numpy's QR before that

After each measurement the results go to speed.json; a table, the targets and speed.png come at the end.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "sample_models"))

from build import build  # noqa: E402  it lies beside the models it builds
from lsuv_cli import initialize  # noqa: E402
from lsuv_cli.model import graph as graphs  # noqa: E402
from lsuv_cli.model import layers  # noqa: E402
from lsuv_cli.model.file import ModelFile, load  # noqa: E402
from lsuv_cli.scaling import weights  # noqa: E402
from lsuv_cli.scaling.devices import available_threads, open_device  # noqa: E402
from lsuv_cli.scaling.runtime import open_on  # noqa: E402

Array = NDArray[Any]
Results = dict[str, Any]
PAPER = {
    "fitnet4-maxout-128": ("FitNet4", 1, 4),
    "caffenet": ("CaffeNet", 188, 210),
    "googlenet": ("GoogLeNet", 24, 60),
}


@dataclass(frozen=True)
class Case:
    """A network and how much data goes through it."""

    key: str
    network: str
    samples: int
    options: dict[str, object] = field(default_factory=dict)
    peers: tuple[str, ...] = ("pypi", "naive")
    note: str = ""


CASES = (
    Case("fitnet4-relu-128", "fitnet4", 128, {"activation": "relu"}),
    Case("fitnet4-relu-1024", "fitnet4", 1024, {"activation": "relu"}),
    Case("fitnet4-maxout-128", "fitnet4", 128, {"activation": "maxout"}),
    Case("fitnet4-maxout-1024", "fitnet4", 1024, {"activation": "maxout"}, ("pypi",)),
    Case("resnet50", "resnet50", 32),
    Case("googlenet", "googlenet", 32),
    Case("caffenet", "caffenet", 32),
    Case("bert", "bert", 32, {}, ("naive",), "PyPI lsuv sees 2 of 74 layers: onnx2torch has no Linear for MatMul"),
)
QUICK = ("fitnet4-relu-128", "fitnet4-relu-1024")
DEPTHS = (10, 20, 40, 80, 160)
SWEEP_SAMPLES = 64
MATRICES = ((9216, 4096), (4096, 4096))


# --- What is measured ---


@dataclass
class Bench:
    """One run of this script: where it works, and what it found so far."""

    threads: int
    device: str
    repeats: int
    cap: float
    output: Path
    work: Path
    results: Results

    def save(self) -> None:
        scratch = self.output.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.results, indent=1) + "\n")
        scratch.replace(self.output)

    def files(self, case: Case) -> tuple[Path, Path]:
        """The model and its data, as files."""
        model, data = self.work / f"{case.key}.onnx", self.work / f"{case.key}.npy"
        if not model.exists():
            proto = build(case.network, **case.options)
            model.write_bytes(proto.SerializeToString())
            kind = proto.graph.input[0].type.tensor_type
            shape = (case.samples, *(d.dim_value for d in kind.shape.dim[1:]))
            random = np.random.default_rng(0)
            is_float = kind.elem_type == onnx.TensorProto.FLOAT
            np.save(data, random.standard_normal(shape, np.float32) if is_float else random.integers(0, 30000, shape))
        return model, data


def run_case(bench: Bench, case: Case) -> None:
    model, data = bench.files(case)
    array = np.load(data)
    say(f"{case.key}: {case.samples} samples")
    before = bench.results["cases"].get(case.key, {})
    found: Results = {"samples": case.samples, "note": case.note}
    found |= {peer: before[peer] for peer in case.peers if peer in before}
    bench.results["cases"][case.key] = found
    # A forward pass takes longer through a model whose values have shrunk to denormal numbers: run the result.
    started = initialize(str(model), array, threads=bench.threads, device=bench.device).model
    assert started is not None
    forward = Forward(started.SerializeToString(), array, bench.threads, bench.device)
    found["forward_batch"] = forward.batch
    shapes = weight_shapes(load(str(model)))

    def ours() -> dict[str, float]:
        report = initialize(str(model), array, threads=bench.threads, device=bench.device, pre_init="keep").report
        found.update(stages=report.stages, batches=report.batches, layers=len(report.layers))
        return {key: report.seconds[key] for key in ("calibration", "verification")}

    times: dict[str, list[float]] = {}
    for _ in range(bench.repeats):
        measured = {
            "forward": forward.seconds(),
            **ours(),
            "orthonormalization": timed(lambda: orthonormalize(shapes)),
            "gemm": gemm(shapes),
            "process": child(command(model, data, bench)),
        }
        for key, seconds in measured.items():
            times.setdefault(key, []).append(seconds)
    found["seconds"] = {key: statistics.median(values) for key, values in times.items()}
    found["spread"] = {key: [min(values), max(values)] for key, values in times.items()}
    with busy(bench.threads):
        found["seconds"]["orthonormalization_busy"] = timed(lambda: orthonormalize(shapes))
    found["load"] = os.getloadavg()[0]
    bench.save()
    say("  " + ", ".join(f"{key} {value:.3f} s" for key, value in found["seconds"].items()))
    del forward
    found["memory"] = {
        "lsuv": peak(command(model, data, bench)),
        "forward_whole": peak(worker("forward", model, data, bench, case.samples)),
        "forward_batches": peak(worker("forward", model, data, bench, math.ceil(case.samples / found["batches"]))),
    }
    bench.save()


def run_peers(bench: Bench, case: Case) -> None:
    """What the peers take, one run each; what is known already is not measured again."""
    found = bench.results["cases"][case.key]
    for peer in case.peers:
        if "seconds" in found.get(peer, {}):
            continue
        found[peer] = peer_seconds(peer, *bench.files(case), bench)
        say(f"  {peer}: {seconds_text(found[peer])}")
        bench.save()


class Forward:
    """The plain pass, with the batch size that suits it best."""

    def __init__(self, model: bytes, data: Array, threads: int, device: str) -> None:
        self.session, self.data = plain_session(model, threads, device), data
        self.name = self.session.get_inputs()[0].name
        sizes = [2**k for k in range(11) if 2**k <= len(data)][-6:]
        tried: dict[int, float] = {}
        for size in sizes:
            self.seconds(size)  # the arena grows
            tried[size] = min(self.seconds(size) for _ in range(2))
        self.batch = min(tried, key=lambda size: tried[size])

    def seconds(self, size: int | None = None) -> float:
        return timed(lambda: run_all(self.session, self.data, size or self.batch))


def plain_session(model: bytes, threads: int, device: str = "cpu") -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    return open_on(open_device(device, threads), model, options)


def run_all(session: ort.InferenceSession, data: Array, size: int) -> None:
    name = session.get_inputs()[0].name
    for start in range(0, len(data), size):
        session.run(None, {name: data[start : start + size]})


def weight_shapes(file: ModelFile) -> dict[str, tuple[int, int, int]]:
    """(groups, out, fan_in) of every layer's weight."""
    graph = graphs.build(file.proto, file)
    found = layers.find(graph)
    return {layer.weight.base: layer.form.shape for layer in found.layers}


def orthonormalize(shapes: dict[str, tuple[int, int, int]]) -> None:
    for name, shape in shapes.items():
        weights.orthonormal(shape, weights.stream(0, name))


def gemm(shapes: dict[str, tuple[int, int, int]]) -> float:
    """Seconds for A'A of all weights; drawing the matrices is not counted."""
    total = 0.0
    for groups, out, fan_in in shapes.values():
        a = np.random.default_rng(0).standard_normal((max(out, fan_in), min(out, fan_in)), np.float32)
        total += groups * timed(lambda a=a: a.T @ a)  # type: ignore[misc]
    return total


def run_matrices(bench: Bench) -> None:
    """Orthonormalization of two large matrices in units of A'A."""
    for rows, columns in MATRICES:
        shape = {"weight": (1, columns, rows)}
        gemm(shape)
        pairs = [(timed(lambda s=shape: orthonormalize(s)), gemm(shape)) for _ in range(bench.repeats)]  # type: ignore[misc]
        ours, unit = (statistics.median(side) for side in zip(*pairs, strict=True))
        bench.results["matrices"][f"{rows}x{columns}"] = {"orthonormalization": ours, "gemm": unit}
        say(f"{rows} x {columns}: orthonormalization {ours:.2f} s, gemm {unit:.2f} s")
        bench.save()


def run_sweep(bench: Bench, depths: Sequence[int], quick: bool) -> None:
    """How cost grows with depth: a chain of 3x3 convolutions, 16 wide, 32x32."""
    cases = [Case(f"chain-{depth}", "chain", SWEEP_SAMPLES, {"depth": depth}) for depth in depths]
    arrays: dict[str, Array] = {}
    times: dict[str, dict[str, list[float]]] = {case.key: {"forward": [], "ours": []} for case in cases}
    passes = {}
    for case in cases:
        model, data = bench.files(case)
        arrays[case.key] = np.load(data)
        result = initialize(str(model), arrays[case.key], threads=bench.threads, device=bench.device).model
        assert result is not None
        passes[case.key] = Forward(result.SerializeToString(), arrays[case.key], bench.threads, bench.device)
    for _ in range(bench.repeats):
        for case in cases:
            model = bench.files(case)[0]
            times[case.key]["forward"].append(passes[case.key].seconds())
            report = initialize(str(model), arrays[case.key], threads=bench.threads, device=bench.device).report
            times[case.key]["ours"].append(report.seconds["total"])
    del passes
    for case in cases:
        found: dict[str, Any] = {key: statistics.median(values) for key, values in times[case.key].items()}
        bench.results["sweep"][case.key] = found
        say(f"{case.key}: forward {found['forward']:.3f} s, all of ours {found['ours']:.3f} s")
        bench.save()
        for peer in () if quick or case.options["depth"] not in DEPTHS[:3] else ("pypi", "naive"):
            found[peer] = peer_seconds(peer, *bench.files(case), bench)
            say(f"  {peer}: {seconds_text(found[peer])}")
            bench.save()


def profile(bench: Bench, case: Case) -> str:
    """Seconds by operator, as onnxruntime's own profiler has them, in passes that find their memory already touched."""
    model, data = bench.files(case)
    array = np.load(data)
    started = initialize(str(model), array, threads=bench.threads, device=bench.device, pre_init="keep").model
    assert started is not None
    plain = started.SerializeToString()
    batch = Forward(plain, array, bench.threads, bench.device).batch
    with recorded(bench.work) as sessions:
        run_all(plain_session(plain, bench.threads, bench.device), array, batch)
        report = initialize(str(model), array, threads=bench.threads, device=bench.device, pre_init="keep").report
        spent = [kernel_seconds(session) for session in sessions]
    forward, *ours = spent
    calibration, verification = (sum(part, Counter()) for part in (ours[: report.stages], ours[report.stages :]))
    columns = {"forward": forward, "calibration": calibration, "verification": verification}
    operators = sorted({op for column in columns.values() for op in column}, key=lambda op: -columns["calibration"][op])
    rows = [[op, *(f"{column[op]:.3f}" for column in columns.values())] for op in operators]
    rows = [row for row in rows if any(float(cell) >= 0.005 for cell in row[1:])]
    rows.append(["all operators", *(f"{sum(column.values()):.3f}" for column in columns.values())])
    rows.append(["in all", "", *(f"{report.seconds[key]:.3f}" for key in ("calibration", "verification"))])
    return table([["operator", *columns], *rows])


@contextmanager
def recorded(work: Path) -> Iterator[list[ort.InferenceSession]]:
    """Let every session that is made meanwhile keep a profile."""
    made: list[ort.InferenceSession] = []
    plain = ort.InferenceSession

    class Recorded(plain):  # type: ignore[misc, valid-type]
        def __init__(self, model: bytes, options: ort.SessionOptions, **more: Any) -> None:
            options.enable_profiling, options.profile_file_prefix = True, str(work / f"profile{len(made)}")
            super().__init__(model, options, **more)
            made.append(self)

    ort.InferenceSession = Recorded
    try:
        yield made
    finally:
        ort.InferenceSession = plain


def kernel_seconds(session: ort.InferenceSession) -> Counter[str]:
    events = json.loads(Path(session.end_profiling()).read_text())
    spent: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"] / 1e6
    return spent


def run_help(bench: Bench) -> None:
    script = shutil.which("lsuv", path=str(Path(sys.executable).parent)) or "lsuv"
    for _ in range(2):
        times = [child([script, "--help"]) for _ in range(max(bench.repeats, 5))]
    bench.results["help"] = statistics.median(times)
    bench.save()
    say(f"lsuv --help: {bench.results['help']:.3f} s")


# --- Processes ---


def command(model: Path, data: Path, bench: Bench) -> list[str]:
    output = bench.work / "out.onnx"
    asked = ["init", str(model), "--data", str(data), "-o", str(output), "--force", "-q", "--device", bench.device]
    return [sys.executable, "-c", "from lsuv_cli.cli import main; main()", *asked, "--threads", str(bench.threads)]


def worker(job: str, model: Path, data: Path, bench: Bench, *more: int) -> list[str]:
    places = [str(model), str(data), str(bench.threads)]
    return [sys.executable, str(Path(__file__).resolve()), "--worker", job, bench.device, *places, *map(str, more)]


def child(arguments: Sequence[str]) -> float:
    """Seconds of a process from start to exit."""
    begun = time.perf_counter()
    subprocess.run(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


# A process counts its parent's memory at its birth as its own, so it gets a small parent.
SMALL_PARENT = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def peak(arguments: Sequence[str]) -> int:
    """Bytes of memory that a process had at most."""
    done = subprocess.run([sys.executable, "-c", SMALL_PARENT, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout) * (1 if sys.platform == "darwin" else 1024)


def peer_seconds(peer: str, model: Path, data: Path, bench: Bench) -> Results:
    """What a peer's worker measured; it is ended when it takes longer than the cap."""
    try:
        done = subprocess.run(
            worker(peer, model, data, bench), capture_output=True, text=True, timeout=bench.cap, check=True
        )
    except subprocess.TimeoutExpired:
        return {"seconds": bench.cap, "ended": True}
    except subprocess.CalledProcessError as problem:
        return {"failed": problem.stderr.strip().splitlines()[-1][:200]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Other processes keep the cores busy meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def work(job: str, device: str, model: Path, data: Path, threads: int, batch: int = 0) -> None:
    """What a worker process does; its last line is the result."""
    array = np.load(data)
    if job == "forward":
        run_all(plain_session(model.read_bytes(), threads, device), array, batch)
        return
    passes, seconds = {"pypi": pypi, "naive": naive}[job](model, array, threads)
    print(json.dumps({"seconds": seconds, "passes": passes}))


def pypi(path: Path, data: Array, threads: int) -> tuple[int, float]:
    import torch
    from lsuv import lsuv_with_singlebatch
    from pipeline import to_torch

    torch.set_num_threads(threads)
    network = to_torch(path).eval()
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    network.register_forward_hook(count)
    batch = torch.from_numpy(data)
    seconds = timed(lambda: lsuv_with_singlebatch(network, batch, verbose=False))
    return passes, seconds


def naive(path: Path, data: Array, threads: int) -> tuple[int, float]:
    """LSUV as one would write it on ONNX in an afternoon, with the tolerance and trials of PyPI lsuv."""
    begun = time.perf_counter()
    model = onnx.load(path)
    file = ModelFile(model, None, "model")
    graph = graphs.build(model, file)
    found = layers.find(graph).layers
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    arrays: dict[str, Array] = {}
    for layer in found:
        shape = layer.weight.shape
        random = np.random.default_rng(0).standard_normal((shape[0], math.prod(shape[1:])))
        wide = random.shape[0] <= random.shape[1]
        q, _ = np.linalg.qr(random.T if wide else random)
        arrays[layer.weight.base] = np.ascontiguousarray(q.T if wide else q, np.float32).reshape(shape)
        stored[layer.weight.base].CopyFrom(onnx.numpy_helper.from_array(arrays[layer.weight.base], layer.weight.base))
    passes = 0
    outputs = list(model.graph.output)
    for layer in found:
        for _ in range(10):
            del model.graph.output[:]
            model.graph.output.extend([*outputs, onnx.ValueInfoProto(name=layer.output)])
            session = plain_session(model.SerializeToString(), threads)
            (value,) = session.run([layer.output], {session.get_inputs()[0].name: data})
            passes += 1
            std = float(value.std())
            if abs(std - 1) < 0.1:
                break
            arrays[layer.weight.base] /= np.float32(std)
            name = layer.weight.base
            stored[name].CopyFrom(onnx.numpy_helper.from_array(arrays[name], name))
    return passes, time.perf_counter() - begun


def timed(job: Callable[[], object]) -> float:
    begun = time.perf_counter()
    job()
    return time.perf_counter() - begun


# --- What is shown ---


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds_text(found: Results | None) -> str:
    if not found:
        return "-"
    if "failed" in found:
        return "failed"
    return f"{'> ' if found.get('ended') else ''}{found['seconds']:.1f}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, the first being its head."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def main_table(results: Results) -> str:
    head = ["network", "samples", "layers / stages", "forward", "calibration", "verification", "orthonorm.", "gemm"]
    rows = [[*head, "process", "PyPI lsuv", "naive ONNX"]]
    for key, found in results["cases"].items():
        if "seconds" not in found:
            continue
        s = found["seconds"]
        ratio = {k: f"{s[k]:.2f} ({s[k] / s['forward']:.2f})" for k in ("calibration", "verification")}
        row = [key, str(found["samples"]), f"{found['layers']} / {found['stages']}", f"{s['forward']:.2f}"]
        row += [*ratio.values(), f"{s['orthonormalization']:.2f}", f"{s['gemm']:.2f}", f"{s['process']:.2f}"]
        rows.append([*row, *(faster(found.get(peer), s["process"]) for peer in ("pypi", "naive"))])
    return table(rows)


def faster(peer: Results | None, ours: float) -> str:
    if not peer or "failed" in peer:
        return seconds_text(peer)
    return f"{seconds_text(peer)} ({peer['seconds'] / ours:.0f}x)"


def sweep_table(results: Results) -> str:
    rows = [["layers", "forward", "all of ours", "ours / forward", "PyPI lsuv", "naive ONNX"]]
    for key, found in results["sweep"].items():
        ours = [f"{found['forward']:.3f}", f"{found['ours']:.3f}", f"{found['ours'] / found['forward']:.1f}"]
        rows.append([key.split("-")[1], *ours, *(seconds_text(found.get(peer)) for peer in ("pypi", "naive"))])
    return table(rows)


def paper_table(results: Results) -> str:
    rows = [["network", "paper: OrthoNorm", "paper: LSUV", "ours: orthonormalization", "ours: process"]]
    for key, (name, orthonormal, lsuv) in PAPER.items():
        seconds = results["cases"].get(key, {}).get("seconds")
        if seconds:
            ours = [f"{seconds['orthonormalization']:.2f} s", f"{seconds['process']:.2f} s"]
            rows.append([name, f"{orthonormal} s", f"{lsuv} s", *ours])
    return table(rows)


def targets(results: Results) -> list[tuple[str, float, float]]:
    """What was measured, and what it should be at most."""
    found: list[tuple[str, float, float]] = []
    cases = {key: case for key, case in results["cases"].items() if "seconds" in case}
    for key in ("fitnet4-relu-1024", "fitnet4-maxout-1024", "resnet50"):
        if key in cases:
            s = cases[key]["seconds"]
            found.append((f"calibration / forward, {key}", s["calibration"] / s["forward"], 1.4))
            found.append((f"verification / forward, {key}", s["verification"] / s["forward"], 1.25))
    if "fitnet4-relu-1024" in cases:
        s = cases["fitnet4-relu-1024"]["seconds"]
        found.append(("process / forward, fitnet4-relu-1024", s["process"] / s["forward"], 3.0))
    for key, most in (("9216x4096", 4.0), ("4096x4096", 6.0)):
        if key in results["matrices"]:
            m = results["matrices"][key]
            found.append((f"orthonormalization / gemm, {key}", m["orthonormalization"] / m["gemm"], most))
    for key in ("fitnet4-relu-1024", "fitnet4-maxout-1024"):
        if key in cases:
            s = cases[key]["seconds"]
            found.append((f"orthonormalization / forward, {key}", s["orthonormalization"] / s["forward"], 0.05))
            busy_share = s["orthonormalization_busy"] / s["forward"]
            found.append((f"orthonormalization / forward, {key}, cores busy", busy_share, 0.05))
    for key, least in (("128", 10), ("1024", 20)):
        for activation in ("relu", "maxout"):
            case = cases.get(f"fitnet4-{activation}-{key}", {})
            if "seconds" in case.get("pypi", {}):
                ratio = case["seconds"]["process"] / case["pypi"]["seconds"]
                bound = " (ended: at most)" if case["pypi"].get("ended") else ""
                found.append((f"process / PyPI lsuv, fitnet4-{activation}-{key}{bound}", ratio, 1 / least))
    sweep = results["sweep"]
    if {"chain-80", "chain-160"} <= set(sweep):
        found.append(("160 layers / 80 layers", sweep["chain-160"]["ours"] / sweep["chain-80"]["ours"], 2.2))
    if "help" in results:
        found.append(("lsuv --help, seconds", results["help"], 0.2))
    for key in ("fitnet4-relu-1024", "fitnet4-maxout-1024"):
        if "memory" in cases.get(key, {}):
            m = cases[key]["memory"]
            found.append((f"peak memory / forward, {key}", m["lsuv"] / m["forward_whole"], 1.5))
            found.append((f"peak memory / forward in our batches, {key}", m["lsuv"] / m["forward_batches"], 1.5))
    return found


def target_table(results: Results) -> str:
    rows = [["target", "measured", "at most", ""]]
    rows += [
        [what, f"{got:.3g}", f"{most:.3g}", "pass" if got <= most else "open" if "at most" in what else "FAIL"]
        for what, got, most in targets(results)
    ]
    return table(rows)


def plot(results: Results, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2))
    series = {
        "forward pass": "#9aa0a6",
        "lsuv init, whole process": "#1a73e8",
        "PyPI lsuv": "#e8710a",
        "naive ONNX": "#d93025",
    }
    cases = {key: case for key, case in results["cases"].items() if "seconds" in case}
    for k, (label, colour) in enumerate(series.items()):
        heights = []
        for case in cases.values():
            ours = (case["seconds"]["forward"], case["seconds"]["process"])
            peers = [case.get(peer, {}).get("seconds", math.nan) for peer in ("pypi", "naive")]
            heights.append([*ours, *peers][k])
        left.bar(np.arange(len(cases)) + 0.2 * (k - 1.5), heights, 0.2, label=label, color=colour)
    left.set_yscale("log")
    left.set_ylabel("seconds")
    left.set_xticks(range(len(cases)), list(cases), rotation=30, ha="right")
    left.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    sweep = results["sweep"]
    depths = [int(key.split("-")[1]) for key in sweep]
    names = {"forward": "forward pass", "ours": "lsuv init, whole process", "pypi": "PyPI lsuv", "naive": "naive ONNX"}
    for key, label in names.items():
        values = [(f.get(key, {}).get("seconds") if key in ("pypi", "naive") else f[key]) for f in sweep.values()]
        points = [(d, v) for d, v in zip(depths, values, strict=True) if v is not None]
        shown = label.replace(", whole process", ", all phases")
        right.plot(*zip(*points, strict=True), "o-", color=series[label], label=shown) if points else None
    right.set(xscale="log", yscale="log", xlabel="layers", title="A chain of 3x3 convolutions, 64 samples")
    right.set_xticks(depths, [str(depth) for depth in depths])
    right.minorticks_off()
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def machine(threads: int, device: str) -> Results:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    packages = ("lsuv-cli", "numpy", "onnx", "onnxruntime-gpu", "onnxruntime", "torch", "onnx2torch", "lsuv")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model, "cores": available_threads(), "threads": threads, "device": device, "system": platform.system(),
        "python": platform.python_version(), "versions": versions,
    }  # fmt: skip


def report(results: Results) -> str:
    about = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    notes = [f"{key}: {case['note']}." for key, case in results["cases"].items() if case.get("note")]
    parts = [
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, on {about.get('device', 'the CPU')}, "
        f"{about['system']}, "
        f"Python {about['python']}, {versions}.",
        "Seconds, medians of interleaved repeats (in brackets: by the forward pass; how much longer than our process).",
        main_table(results),
        *notes,
        "The paper's own times for initialization:",
        paper_table(results),
        "How cost grows with depth (seconds):",
        sweep_table(results),
        "Targets:",
        target_table(results),
    ]
    return "\n\n".join(parts)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        job, device, model, data, *numbers = sys.argv[2:]
        work(job, device, Path(model), Path(data), *map(int, numbers))
        return
    parser = argparse.ArgumentParser(description="How long LSUV takes, next to its limits and to other ways.")
    names = [case.key for case in CASES]
    parser.add_argument("--only", nargs="*", choices=[*names, "matrices", "sweep", "help"], help="what to measure")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats, of which the median counts")
    parser.add_argument("--samples", type=int, help="of each network, in place of its own number: for slow devices")
    parser.add_argument("--quick", action="store_true", help="FitNet-4 with ReLU, a short sweep, no peers")
    parser.add_argument("--resume", action="store_true", help="keep what the JSON has, measure only what it lacks")
    parser.add_argument("--no-peers", action="store_true", help="leave out PyPI lsuv and naive ONNX")
    parser.add_argument("--cap", type=float, default=600, help="seconds after which a peer is ended")
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--device", default="cpu", help="of our calls and of the forward pass; peers stay on the CPU")
    parser.add_argument("--output", type=Path, default=HERE / "speed.json", help="the JSON; the plot lies beside it")
    parser.add_argument("--profile", choices=names, help="show where the time goes in one network, and nothing else")
    parser.add_argument("--show", action="store_true", help="measure nothing, show what the JSON has")
    asked = parser.parse_args()
    device = str(open_device(asked.device, asked.threads))
    empty: Results = {"machine": machine(asked.threads, device), "cases": {}, "matrices": {}, "sweep": {}}
    keep = (asked.resume or asked.only or asked.show) and asked.output.exists()
    results = json.loads(asked.output.read_text()) if keep else empty
    wanted = asked.only or ([*QUICK, "sweep", "help"] if asked.quick else [*names, "matrices", "sweep", "help"])
    no_peers = asked.quick or asked.no_peers
    # pip compiles what it installs. A package that is imported from its repository may not be compiled, and a process
    # then spends half a second on it each time.
    compileall.compile_dir(str(HERE.parent / "lsuv_cli"), quiet=1)
    with tempfile.TemporaryDirectory(prefix="lsuv-speed-") as directory:
        bench = Bench(asked.threads, asked.device, asked.repeats, asked.cap, asked.output, Path(directory), results)
        if asked.profile:
            print(profile(bench, next(case for case in CASES if case.key == asked.profile)))
            return
        for what in () if asked.show else wanted:
            known = asked.resume and (results["cases"].get(what, {}).get("memory") or results.get(what))
            case = next((case for case in CASES if case.key == what), None)
            if case is not None:
                case = replace(case, samples=asked.samples or case.samples)
                if not known:
                    run_case(bench, case)
                if not no_peers:
                    run_peers(bench, case)
            elif what == "matrices" and not known:
                run_matrices(bench)
            elif what == "sweep" and not known:
                run_sweep(bench, DEPTHS[:3] if asked.quick else DEPTHS, no_peers)
            elif what == "help" and not known:
                run_help(bench)
    print(report(results))
    plot(results, asked.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
