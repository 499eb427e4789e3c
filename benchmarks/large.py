"""Initialize a large model and tell the peak memory: `python benchmarks/large.py --gigabytes 3`.

The model is built in a temporary directory, taken through a command of `lsuv` as a process of its own, and removed. It
is a chain of square inner products with ReLU and external data, or with `--one-file` the same in one file, or with
`--bert` a transformer encoder of BERT's size in one file, or with `--model FILE --data FILE` one that is there already.
`--within GIGABYTES` bounds the address space of each of the command's processes (RLIMIT_AS), which is more than what
they have in memory. Options that are not known here go to the command: `python benchmarks/large.py --bert --pre-init
msra`. With `--workers 2` among them, the driver's peak is told apart.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

COMMANDS = {
    "init": "init {model} --data {data} -o {out} -q",
    "draw": "init {model} --no-rescale -o {out} -q",
    "pipe": "init - --data {data} -o - -q",
    "check": "check {model} --data {data} -q",
    "inspect": "inspect {model}",
    "measure": "inspect {model} --data {data}",
    "compare": "compare {model} --data {data}",
}


def chain(path: Path, layers: int, width: int, one_file: bool) -> None:
    """Write a chain; with external data all weights are zeros in a sparse file, which costs no disk."""
    nodes, size = [], width * width * 4
    graph = onnx.GraphProto(name="large")
    value = "x"
    for k in range(layers):
        nodes += [
            helper.make_node("MatMul", [value, f"w{k}"], [f"y{k}"], f"layer{k}"),
            helper.make_node("Relu", [f"y{k}"], [f"a{k}"]),
        ]
        weight = graph.initializer.add(name=f"w{k}", dims=[width, width], data_type=TensorProto.FLOAT)
        if one_file:
            weight.raw_data = np.random.default_rng(k).standard_normal((width, width), np.float32).tobytes()
        else:
            weight.data_location = TensorProto.EXTERNAL
            for key, text in (("location", "large.bin"), ("offset", str(k * size)), ("length", str(size))):
                weight.external_data.add(key=key, value=text)
        value = f"a{k}"
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", width]))
    graph.output.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, ["N", width]))
    _save(graph, path)
    if not one_file:
        with (path.parent / "large.bin").open("wb") as file:
            file.truncate(layers * size)


def bert(path: Path, layers: int = 12, width: int = 768, words: int = 30522, length: int = 32) -> None:
    """Write an encoder of BERT's size: embedding, attention with one head, two inner products, normalizations."""
    rng = np.random.default_rng(0)
    graph = onnx.GraphProto(name="bert")

    def add(op: str, inputs: str, output: str, **attributes: Any) -> str:
        graph.node.append(helper.make_node(op, inputs.split(), [output], output, **attributes))
        return output

    def weight(name: str, *shape: int) -> str:
        array = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    graph.initializer.append(numpy_helper.from_array(np.ones(width, np.float32), "one"))
    value = add("Gather", f"{weight('words', words, width)} x", "embedded")
    for k in range(layers):
        q, key, v = (add("MatMul", f"{value} {weight(f'{n}{k}.w', width, width)}", f"{n}{k}") for n in ("q", "k", "v"))
        scores = add("MatMul", f"{q} {add('Transpose', key, f'turned{k}', perm=[0, 2, 1])}", f"scores{k}")
        mixed = add("MatMul", f"{add('Softmax', scores, f'share{k}')} {v}", f"mixed{k}")
        out = add("MatMul", f"{mixed} {weight(f'out{k}.w', width, width)}", f"out{k}")
        value = add("LayerNormalization", f"{add('Add', f'{value} {out}', f'sum{k}')} one", f"normed{k}")
        wide = add("MatMul", f"{value} {weight(f'wide{k}.w', width, 4 * width)}", f"wide{k}")
        narrow = f"{add('Relu', wide, f'relu{k}')} {weight(f'narrow{k}.w', 4 * width, width)}"
        total = add("Add", f"{value} {add('MatMul', narrow, f'narrow{k}')}", f"total{k}")
        value = add("LayerNormalization", f"{total} one", f"value{k}")
    graph.input.append(helper.make_tensor_value_info("x", TensorProto.INT64, ["N", length]))
    graph.output.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, ["N", length, width]))
    _save(graph, path)


def _save(graph: onnx.GraphProto, path: Path) -> None:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


@dataclass
class Peaks:
    """The most bytes that were resident at a time: of all processes together, and of the driver by kinds."""

    whole: int = 0
    private: int = 0  # the driver's own memory
    shared: int = 0  # the object store, as far as the driver has it mapped and touched

    def sample(self, top: int) -> None:
        now = below(top)
        # What a process had between two samples, on a busy machine, is in its own peak.
        self.whole = max(
            self.whole, sum(resident(pid, "VmRSS") for pid in now), *(resident(pid, "VmHWM") for pid in now)
        )
        same = Path(f"/proc/{top}/cmdline").read_bytes()
        for pid in children(top):  # the command forks, and its child is the driver
            if Path(f"/proc/{pid}/cmdline").read_bytes() == same:
                self.private = max(self.private, resident(pid, "RssAnon"))
                self.shared = max(self.shared, resident(pid, "RssShmem"))


def resident(pid: int, kind: str) -> int:
    """Bytes of a process in memory, of one kind in /proc/PID/status."""
    try:
        return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition(f"{kind}:")[2].split()[0])
    except (OSError, IndexError):  # it has ended
        return 0


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


def below(pid: int) -> list[int]:
    """A process and all that it started."""
    return [pid, *(each for child in children(pid) for each in below(child))]


def run(words: list[str], model: Path, pause: float, within: float | None) -> tuple[int, Peaks, float]:
    """Exit code, peaks (sampled every `pause` seconds; Linux), seconds."""
    begun, peaks = time.perf_counter(), Peaks()

    def bound() -> None:
        if within is not None:
            resource.setrlimit(resource.RLIMIT_AS, (int(within * 1e9), int(within * 1e9)))

    with model.open("rb") as stdin:
        process = subprocess.Popen([sys.executable, "-c", "from lsuv_cli.cli import main; main()", *words],
                                   stdin=stdin, stdout=subprocess.DEVNULL, preexec_fn=bound)  # fmt: skip
    ended = threading.Event()
    threading.Thread(target=lambda: (process.wait(), ended.set()), daemon=True).start()
    while not ended.wait(pause):
        with contextlib.suppress(OSError):  # it has just ended
            peaks.sample(process.pid)
    return process.returncode, peaks, time.perf_counter() - begun


def stage_weights(model: Path) -> int:
    """The most bytes of weights in one stage, as the command foresees them."""
    words = [sys.executable, "-c", "from lsuv_cli.cli import main; main()", "init", str(model), "--dry-run", "--json"]
    told = subprocess.run(words, capture_output=True, check=True)
    return int(json.loads(told.stdout)["memory"]["weights_of_a_stage"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--one-file", action="store_true")
    parser.add_argument("--bert", action="store_true")
    parser.add_argument("--model", type=Path, help="a model in one file, in place of one that is built")
    parser.add_argument("--data", type=Path, help="its data")
    parser.add_argument("--within", type=float, metavar="GIGABYTES", help="bound the address space of each process")
    parser.add_argument("--command", choices=COMMANDS, default="init")
    options, more = parser.parse_known_args()
    layers = int(-(-options.gigabytes * 2**30 // (options.width**2 * 4)))
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        model, data, out = (Path(folder) / name for name in ("large.onnx", "x.npy", "out.onnx"))
        if options.model:
            model, data = options.model, options.data
        elif options.bert:
            bert(model)
            np.save(data, rng.integers(0, 30522, (options.samples, 32)))
        else:
            chain(model, layers, options.width, options.one_file)
            np.save(data, rng.standard_normal((options.samples, options.width)).astype(np.float32))
        words = COMMANDS[options.command].format(model=model, data=data, out=out).split()
        size = sum(path.stat().st_size for path in (model, Path(folder) / "large.bin") if path.exists())
        workers = any(word.startswith("--workers") for word in more)
        code, peaks, took = run([*words, *more], model, 0.05 if workers else 0.01, options.within)
        stage = stage_weights(model) if workers else 0
    print(f"lsuv {options.command}, {size / 1e6:.0f} MB of model: exit code {code}, {took:.0f} s")
    if workers:
        print(f"driver: {peaks.private / 1e6:.0f} MB of its own; weights of a stage {stage / 1e6:.0f} MB")
        print(f"object store, as the driver has it mapped: {peaks.shared / 1e6:.0f} MB")
    else:
        times = f"{peaks.whole / size:.2f} times the model"
        print(f"peak resident set of all processes {peaks.whole / 1e6:.0f} MB, {times}")


if __name__ == "__main__":
    main()
