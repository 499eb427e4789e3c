"""Initialize a model of several gigabytes and tell the peak memory: `python benchmarks/large.py --gigabytes 3`.

The model, a chain of square inner products with ReLU, is built with external data in a temporary directory, taken
through `lsuv init` as a process of its own, checked, and removed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper


def build(path: Path, layers: int, width: int) -> None:
    """Write the model; all weights are zeros in a sparse file, which costs no disk."""
    nodes, size = [], width * width * 4
    graph = onnx.GraphProto(name="large")
    value = "x"
    for k in range(layers):
        nodes += [
            helper.make_node("MatMul", [value, f"w{k}"], [f"y{k}"], f"layer{k}"),
            helper.make_node("Relu", [f"y{k}"], [f"a{k}"]),
        ]
        weight = graph.initializer.add(name=f"w{k}", dims=[width, width], data_type=TensorProto.FLOAT)
        weight.data_location = TensorProto.EXTERNAL
        for key, text in (("location", "large.bin"), ("offset", str(k * size)), ("length", str(size))):
            weight.external_data.add(key=key, value=text)
        value = f"a{k}"
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", width]))
    graph.output.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, ["N", width]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    with (path.parent / "large.bin").open("wb") as file:
        file.truncate(layers * size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=256)
    options = parser.parse_args()
    layers = int(-(-options.gigabytes * 2**30 // (options.width**2 * 4)))
    with tempfile.TemporaryDirectory() as folder:
        model, data, out = (Path(folder) / name for name in ("large.onnx", "x.npy", "out.onnx"))
        build(model, layers, options.width)
        np.save(data, np.random.default_rng(0).standard_normal((options.samples, options.width)).astype(np.float32))
        lsuv = [sys.executable, "-c", "from lsuv_cli.cli import main; main()"]
        command = [*lsuv, "init", str(model), "--data", str(data), "-o", str(out), "--json", "-q"]
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        report = json.loads(process.stdout.read())
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - begun
        size = (Path(folder) / "out.onnx.data").stat().st_size
        variances = [layer["variance"] for layer in report["layers"]]
    print(f"{layers} layers of {options.width} x {options.width}, {size / 2**30:.2f} GiB of weights written")
    print(f"exit code {os.waitstatus_to_exitcode(status)}, {report['stages']} stages, {took:.0f} s")
    print(f"variances from {min(variances):.6f} to {max(variances):.6f}")
    print(f"peak resident set {usage.ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
