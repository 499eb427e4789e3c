"""Peak memory where many values wait between stages: python benchmarks/waiting.py [--samples N] [--device D]

Six MatMuls with a Tanh between them are six stages, and all values of a layer wait for the next one.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import onnx
from onnx import numpy_helper

from lsuv_cli import initialize

LAYERS, WIDTH = 6, 64


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory where many values wait between stages.")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    random = np.random.default_rng(0)
    nodes = " ".join(f"a{k} = MatMul(t{k}, w{k}) t{k + 1} = Tanh(a{k})" for k in range(LAYERS))
    ends = f"(float[N,{WIDTH}] t0) => (float[N,{WIDTH}] t{LAYERS})"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> g {ends} {{ {nodes} }}')
    for k in range(LAYERS):
        weight = random.standard_normal((WIDTH, WIDTH), np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, f"w{k}"))
    data = random.standard_normal((asked.samples, WIDTH), np.float32)
    begun = time.perf_counter()
    report = initialize(model, data, device=asked.device, threads=1).report
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    print(f"{report.device}; {report.stages} stages; {data.nbytes / 2**20:.0f} MiB; exit code {int(report.exit_code)}")
    print(f"peak resident set {peak:.0f} MiB; {seconds:.1f} s")


if __name__ == "__main__":
    main()
