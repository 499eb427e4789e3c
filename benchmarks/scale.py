"""What workers cost and what they bring: python benchmarks/scale.py [--size 4096] [--matrices 10] [--samples 512]

Measured, side by side in one run, each pair alternating and the median of its repeats:

1. Calibration and verification by one process with 2 threads, and by 2 workers with 1 thread each.
2. Orthonormalization of ten square matrices by 1 worker and by 2, with 1 thread each.
3. The start of a local Ray with 2 workers; what a stage takes beyond one process's time for it, by 1 worker; the bytes
   that go out and come back for each stage.

Then, computed from these terms and from assumptions that are printed with it, what 8 GPUs and 4 nodes would bring.
Results go to benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from lsuv_cli import Settings, initialize
from lsuv_cli.scaling.drawing import Draw
from lsuv_cli.settings import PreInit
from lsuv_cli.workers import passes
from lsuv_cli.workers.crew import Crew, crew

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "scale.json"
STAGES = 30
TARGETS = {"calibration": 1.1, "stage_milliseconds": 20.0, "orthonormalization": 0.65}


@dataclass
class Terms:
    """What was measured, in seconds unless a name says otherwise."""

    start: float = 0.0
    one_process: float = 0.0
    two_workers: float = 0.0
    drawn_by_one: float = 0.0
    drawn_by_two: float = 0.0
    size: int = 0
    matrices: int = 0
    stage_milliseconds: float = 0.0
    bytes_out: int = 0
    bytes_back: int = 0
    put_gigabytes: float = 0.0  # into the object store, in a second

    @property
    def ratios(self) -> dict[str, float]:
        return {
            "calibration": self.two_workers / self.one_process,
            "stage_milliseconds": self.stage_milliseconds,
            "orthonormalization": self.drawn_by_two / self.drawn_by_one,
        }


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def alternating(repeats: int, *works: Callable[[], float]) -> list[float]:
    """The median of what each work returns, one after another in every repeat."""
    found: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for kept, work in zip(found, works, strict=True):
            kept.append(work())
    return [statistics.median(each) for each in found]


def calibration(terms: Terms, samples: int, repeats: int) -> None:
    """FitNet-1 on random images."""
    model = onnx.load(ROOT / "sample_models" / "fitnet1_relu.onnx")
    data = np.random.default_rng(0).standard_normal((samples, 3, 32, 32), np.float32)

    def work(**how: Any) -> float:
        took = initialize(model, data, device="cpu", batch_size=16, **how).report.seconds
        return took["calibration"] + took["verification"]

    work(threads=2)  # imports and first allocations
    terms.one_process, terms.two_workers = alternating(
        repeats, lambda: work(threads=2), lambda: work(threads=1, workers=2)
    )


def orthonormalization(terms: Terms, size: int, matrices: int) -> None:
    """The matrices by one worker and by two, two matrices at a time in turn, so that both meet the same other work."""
    terms.size, terms.matrices = size, matrices
    draws = [Draw(PreInit.ORTHONORMAL, (1, size, size), 0, f"w{k}") for k in range(matrices)]

    def work(team: Crew | None, some: list[Draw]) -> None:
        assert team is not None
        drawn = team.draw(some)
        for each in some:
            assert drawn.take(each).shape == (1, size, size)

    how: Any = {"threads": 1, "device": "cpu"}
    with crew(Settings(workers=1, **how)) as one, crew(Settings(workers=2, **how)) as two:
        for k in range(0, matrices, 2):
            terms.drawn_by_one += seconds(functools.partial(work, one, draws[k : k + 2]))
            terms.drawn_by_two += seconds(functools.partial(work, two, draws[k : k + 2]))


def stages(terms: Terms, repeats: int) -> None:
    """A chain of tiny stages, where nothing but the overhead takes time."""
    nodes = " ".join(f"a{k} = MatMul(t{k}, w{k}) t{k + 1} = Tanh(a{k})" for k in range(STAGES))
    ends = f"(float[N,32] t0) => (float[N,32] t{STAGES})"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> g {ends} {{ {nodes} }}')
    random = np.random.default_rng(0)
    for k in range(STAGES):
        weight = random.standard_normal((32, 32), np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, f"w{k}"))
    data = random.standard_normal((64, 32), np.float32)

    def work(**how: Any) -> float:
        return initialize(model, data, device="cpu", threads=1, batch_size=8, **how).report.seconds["calibration"]

    one, worker = alternating(repeats, work, lambda: work(workers=1))
    terms.stage_milliseconds = 1000 * (worker - one) / STAGES
    out, back = [], []
    put, taken = Crew.put, passes.SharedPass._take

    def counting_put(self: Crew, value: Any) -> Any:
        out.append(len(pickle.dumps(value)) if hasattr(value, "proto") else 0)
        return put(self, value)

    def counting_take(self: Any, share: int, ran: Any) -> None:
        back.append(len(pickle.dumps(ran)))
        taken(self, share, ran)

    Crew.put, passes.SharedPass._take = counting_put, counting_take  # type: ignore[method-assign]
    work(workers=1)
    Crew.put, passes.SharedPass._take = put, taken  # type: ignore[method-assign]
    sent = [size for size in out if size]
    terms.bytes_out, terms.bytes_back = int(statistics.median(sent)), int(statistics.median(back))


def object_store(terms: Terms, ray: Any) -> None:
    array = np.ones(1 << 25, np.float32)
    took = min(seconds(lambda: ray.put(array)) for _ in range(5))
    terms.put_gigabytes = array.nbytes / took / 1e9


# What is computed and not measured


@dataclass(frozen=True)
class Network:
    name: str
    multiplications: float  # of one sample's forward pass
    samples: int
    matrices: tuple[tuple[int, int, int], ...]  # how many, rows, columns
    stages: int


NETWORKS = (
    Network("ResNet-50", 4.1e9, 512, ((16, 512, 2304), (16, 256, 1024), (16, 1024, 2048), (5, 64, 576)), 18),
    Network("BERT base, 128 tokens", 11e9, 512, ((48, 768, 768), (24, 768, 3072)), 49),
    Network(
        "decoder of 70e9 parameters, 2048 tokens",
        1.4e14,
        64,
        ((160, 8192, 8192), (160, 1024, 8192), (240, 8192, 28672)),
        321,
    ),
)
MACHINES = {"1 GPU": (1, 1), "8 GPUs": (8, 1), "4 nodes with 8 GPUs": (32, 4)}
GPU_MULTIPLICATIONS = 10e12  # a second, in float32
CORES = 8  # for each GPU
NETWORK_BYTES = 1.25e9  # a second and node: 10 Gbit/s
DISK_BYTES = 1e9  # a second, for the driver's output
PASSES = 2.3  # forward passes that calibration and verification take together (benchmarks/README.md)


def computed(terms: Terms) -> list[str]:
    """A table: draw + run + send + write + overhead, in seconds, for each network and machine."""
    # An orthonormal matrix of m rows and n >= m columns takes about m²·n multiplications; measured on one core.
    per_multiplication = terms.drawn_by_one / terms.matrices / terms.size**3
    lines = [
        "| network | machine | draw | run | send | write | stages | in all | faster |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for network in NETWORKS:
        first = 0.0
        drawing = sum(count * min(m, n) ** 2 * max(m, n) for count, m, n in network.matrices) * per_multiplication
        weights = 4.0 * sum(count * m * n for count, m, n in network.matrices)
        for machine, (gpus, nodes) in MACHINES.items():
            draw = drawing / (gpus * CORES)
            run = PASSES * network.multiplications * network.samples / (GPU_MULTIPLICATIONS * gpus)
            send = 2 * weights / (terms.put_gigabytes * 1e9) + 2 * weights * (nodes - 1) / NETWORK_BYTES
            write = weights / DISK_BYTES
            overhead = network.stages * terms.stage_milliseconds / 1000
            parts = [draw, run, send, write, overhead]
            whole = sum(parts)
            first = first or whole
            shown = " | ".join(f"{part:.3g}" for part in (*parts, whole))
            lines.append(f"| {network.name} | {machine} | {shown} | {first / whole:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="What workers cost and what they bring.")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--matrices", type=int, default=10)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--from-results", action="store_true", help="only the computed table, from the last results")
    asked = parser.parse_args()
    if asked.from_results:
        terms = Terms(**json.loads(RESULTS.read_text())["terms"])
    else:
        terms = measured(asked.size, asked.matrices, asked.samples, asked.repeats)
        RESULTS.parent.mkdir(exist_ok=True)
        load = os.getloadavg()[1]
        whole = {
            "terms": asdict(terms),
            "ratios": terms.ratios,
            "targets": TARGETS,
            "samples": asked.samples,
            "load": load,
            "cores": os.cpu_count(),
        }
        RESULTS.write_text(json.dumps(whole, indent=2) + "\n")
    for name, value in asdict(terms).items():
        print(f"{name:20} {value:.4g}")
    for name, value in terms.ratios.items():
        print(f"{name}: {value:.3g}, target at most {TARGETS[name]}: {'holds' if value <= TARGETS[name] else 'MISSED'}")
    print("\ncomputed, not measured: seconds")
    print("\n".join(computed(terms)))


def measured(size: int, matrices: int, samples: int, repeats: int) -> Terms:
    import ray

    terms = Terms()

    def start() -> None:
        with crew(Settings(workers=2, threads=1, device="cpu")):
            pass

    terms.start = seconds(start)
    ray.init(num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False)
    calibration(terms, samples, repeats)
    stages(terms, repeats)
    object_store(terms, ray)
    orthonormalization(terms, size, matrices)
    ray.shutdown()
    return terms


if __name__ == "__main__":
    main()
