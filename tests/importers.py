"""Models before and after `lsuv init` in other software that imports ONNX: does it take them, and compute the same?

    python tests/importers.py [NAME ...] [--json FILE]

Runs five networks through every importer that is installed, or through those named, and prints a table. An importer
gets the files exactly as they were written, a fresh copy of each, in a process of its own: some change their input,
some cannot live together in one process, and one that crashes must not take the others with it. Not all of them can be
installed together either: with `--json` the results are added to those in FILE, and the table shows them all.
`pytest -m interop` asserts what the table shows; docs/importers.md has the table and says how to install the importers.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import lsuv_cli
from helpers import Array, rng, values

HERE = Path(__file__).resolve().parent
SAMPLES = HERE.parent / "sample_models"
WEB = HERE / "importer_web.mjs"
TOLERANCE = 1e-4
SECONDS = 600
BATCH = 2

Feeds = dict[str, Array]
Outcome = dict[str, float | str]


# --- The networks ---


def sample_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sample_models_build", SAMPLES / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def kept(name: str) -> tuple[onnx.ModelProto, Array]:
    return onnx.load(SAMPLES / f"{name}.onnx"), np.load(SAMPLES / f"{name}.npy")


def plain() -> tuple[onnx.ModelProto, Array]:
    """FitNet-1 with ReLU."""
    return kept("fitnet1_relu")


def residual() -> tuple[onnx.ModelProto, Array]:
    """A stem and two residual blocks with batch normalization, the second with a projection."""
    script = sample_script()
    net = script.Net(0)
    x, data = script.images(3, 16, 16)

    def conv(x: Any, name: str, width: int, kernel: int, stride: int = 1) -> Any:
        y = net.conv(x, name, width, kernel, pad=kernel // 2, stride=stride, bias=False)
        return net.batch_norm(y, f"{name}.bn")

    x = net.relu(conv(x, "stem", 16, 3))
    for name, width, stride in (("block1", 16, 1), ("block2", 32, 2)):
        y = net.relu(conv(x, f"{name}.conv1", width, 3, stride))
        y = conv(y, f"{name}.conv2", width, 3)
        shortcut = x if stride == 1 else conv(x, f"{name}.project", width, 1, stride)
        x = net.relu(net.add(y, shortcut, f"{name}.sum"))
    x = net.node("GlobalAveragePool", [x.name], "pool", (x.shape[0], 1, 1))
    # Not opset 13: onnx's reference evaluator takes its BatchNormalization for one in training.
    model = net.model("residual", data, [net.inner_product(x, "fc", 10, "logits")], opset=15)
    return model, rng(1).standard_normal((64, 3, 16, 16), np.float32)


def depthwise() -> tuple[onnx.ModelProto, Array]:
    """MobileNet's blocks: 1x1, depthwise, 1x1, with ReLU6."""
    script = sample_script()
    net = script.Net(0)
    x, data = script.images(3, 16, 16)
    bounds = [net.constant(f"relu6.{name}", np.array(value, np.float32)) for name, value in (("min", 0), ("max", 6))]

    def relu6(x: Any) -> Any:
        return net.node("Clip", [x.name, *bounds], f"{x.name}.relu6", x.shape)

    x = relu6(net.conv(x, "stem", 16, 3, pad=1, stride=2))
    for name, width, stride in (("block1", 16, 1), ("block2", 32, 2)):
        wide = 4 * x.shape[0]
        y = relu6(net.conv(x, f"{name}.expand", wide, 1))
        y = relu6(net.conv(y, f"{name}.depthwise", wide, 3, pad=1, stride=stride, group=wide))
        y = net.conv(y, f"{name}.project", width, 1)
        x = net.add(y, x, f"{name}.sum") if stride == 1 else y
    x = net.node("GlobalAveragePool", [x.name], "pool", (x.shape[0], 1, 1))
    model = net.model("depthwise", data, [net.inner_product(x, "fc", 10, "logits")])
    return model, rng(2).standard_normal((64, 3, 16, 16), np.float32)


def maxout() -> tuple[onnx.ModelProto, Array]:
    """FitNet-MNIST with maxout."""
    return kept("fitnet_mnist_maxout")


def transformer() -> tuple[onnx.ModelProto, Array]:
    """A BERT-like encoder of two layers with two heads, from token ids."""
    model = sample_script().build("bert", hidden=128, layers=2, length=16, vocabulary=100)
    return model, rng(3).integers(0, 100, (64, 16))


NETWORKS: dict[str, Callable[[], tuple[onnx.ModelProto, Array]]] = {
    "plain CNN": plain,
    "residual": residual,
    "depthwise": depthwise,
    "maxout": maxout,
    "transformer": transformer,
}


@dataclass(frozen=True)
class Case:
    """A network's file as it was and as `lsuv init` wrote it, an input, and onnxruntime's outputs of both."""

    files: dict[str, bytes]
    feeds: Feeds
    expected: dict[str, Array]


@functools.cache
def case(network: str) -> Case:
    model, data = NETWORKS[network]()
    with tempfile.TemporaryDirectory() as name:
        before, after = Path(name, "before.onnx"), Path(name, "after.onnx")
        onnx.save(model, before)
        report = lsuv_cli.initialize(before, data, output=after).report
        assert report.exit_code == 0, report
        files = {"original": before.read_bytes(), "initialized": after.read_bytes()}
    feeds = {model.graph.input[0].name: np.ascontiguousarray(data[:BATCH])}
    output = model.graph.output[0].name
    expected = {
        which: values(onnx.load_model_from_string(content), feeds, [output])[output] for which, content in files.items()
    }
    return Case(files, feeds, expected)


# --- The importers: each takes a file and an input, and gives the model's only output ---


def onnxruntime(path: Path, feeds: Feeds) -> Array:
    """With its default optimizations: what the others are compared with is computed without any."""
    return ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def reference(path: Path, feeds: Feeds) -> Array:
    from onnx.reference import ReferenceEvaluator

    (output,) = ReferenceEvaluator(str(path)).run(None, feeds)
    return np.asarray(output)


def openvino(path: Path, feeds: Feeds) -> Array:
    import openvino as ov

    # Else a processor that has bfloat16 computes in it.
    compiled = ov.compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled(feeds)[0]


def opencv(path: Path, feeds: Feeds) -> Array:
    import cv2

    net = cv2.dnn.readNetFromONNX(str(path))
    for name, value in feeds.items():
        net.setInput(value, name)
    return net.forward()


def tinygrad(path: Path, feeds: Feeds) -> Array:
    from tinygrad import Tensor
    from tinygrad.nn.onnx import OnnxRunner

    outputs = OnnxRunner(str(path))({name: Tensor(value) for name, value in feeds.items()})
    return next(iter(outputs.values())).numpy()


def tract(path: Path, feeds: Feeds) -> Array:
    import tract

    model = tract.onnx().load(str(path))
    for k, value in enumerate(feeds.values()):
        kind = {"float32": "f32", "int64": "i64"}[value.dtype.name]
        model.set_input_fact(k, ",".join([*map(str, value.shape), kind]))
    return model.into_model().into_runnable().run(list(feeds.values()))[0].to_numpy()


def iree(path: Path, feeds: Feeds) -> Array:
    from iree import compiler, runtime

    graph = path.with_suffix(".mlir")
    command = [sys.executable, "-m", "iree.compiler.tools.import_onnx", str(path), "-o", str(graph)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    compiled = compiler.compile_file(
        str(graph), input_type="onnx", target_backends=["llvm-cpu"], extra_args=["--iree-llvmcpu-target-cpu=host"]
    )
    config = runtime.Config("local-task")
    module = runtime.load_vm_modules(runtime.VmModule.copy_buffer(config.vm_instance, compiled), config=config)[0]
    function = module[onnx.load(path).graph.name]
    return function(*feeds.values()).to_host()


def tvm(path: Path, feeds: Feeds) -> Array:
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    shapes = {name: list(value.shape) for name, value in feeds.items()}
    kinds = {name: value.dtype.name for name, value in feeds.items()}
    module = from_onnx(onnx.load(path), shape_dict=shapes, dtype_dict=kinds)
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    return machine["main"](*[tvm.runtime.tensor(value) for value in feeds.values()]).numpy()


def without_torchvision() -> None:
    """Stand in for it where it cannot be imported, as one that was built for CUDA beside a torch for the CPU only.

    onnx2torch wants it for NonMaxSuppression and RoiAlign, which no network here has.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        package, ops = ModuleType("torchvision"), ModuleType("torchvision.ops")
        vars(ops)["roi_align"], vars(package)["ops"] = None, ops
        sys.modules |= {"torchvision": package, "torchvision.ops": ops}


def onnx2torch(path: Path, feeds: Feeds) -> Array:
    import torch

    without_torchvision()
    from onnx2torch import convert

    with torch.no_grad():
        return convert(str(path)).eval()(*map(torch.from_numpy, feeds.values())).numpy()


def ncnn(path: Path, feeds: Feeds) -> Array:
    """By pnnx, which needs fixed shapes. ncnn has no batch dimension: one sample after the other."""
    import ncnn
    import pnnx

    (value,) = feeds.values()
    kind = {"float32": "f32", "int64": "i64"}[value.dtype.name]
    shape = f"inputshape=[1,{','.join(map(str, value.shape[1:]))}]{kind}"
    command = [str(pnnx.EXEC_PATH), str(path), shape, "fp16=0"]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=path.parent)
    net = ncnn.Net()
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.load_param(str(path.with_suffix(".ncnn.param")))
    net.load_model(str(path.with_suffix(".ncnn.bin")))
    outputs = []
    for sample in value if kind == "f32" else value.astype(np.int32):  # the integers of ncnn have 32 bits
        extractor = net.create_extractor()
        extractor.input("in0", ncnn.Mat(np.ascontiguousarray(sample)).clone())
        status, output = extractor.extract("out0")
        if status:
            raise RuntimeError(f"ncnn: status {status}")
        outputs.append(np.array(output))
    return np.stack(outputs)


def jaxonnxruntime(path: Path, feeds: Feeds) -> Array:
    from jaxonnxruntime import backend

    return np.asarray(backend.prepare(onnx.load(path)).run(list(feeds.values()))[0])


def web(path: Path, feeds: Feeds) -> Array:
    ((name, value),) = feeds.items()
    tensor = {"name": name, "type": value.dtype.name, "dims": value.shape, "values": value.ravel().tolist()}
    ended = subprocess.run(["node", WEB, path], input=json.dumps(tensor), check=True, capture_output=True, text=True)
    output = json.loads(ended.stdout)
    return np.array(output["values"], np.float32).reshape(output["dims"])


@dataclass(frozen=True)
class Importer:
    """How to run a file, and the distributions whose versions matter."""

    run: Callable[[Path, Feeds], Array]
    distributions: tuple[str, ...]

    def versions(self) -> str:
        """Such as `1.5.15, torch 2.13.0`; empty if the importer is not installed."""
        if self.run is onnxruntime:  # which of its distributions it is does not matter
            return ort.__version__
        if self.run is web:
            found = subprocess.run(["node", WEB], capture_output=True, text=True) if shutil.which("node") else None
            return found.stdout.strip() if found and found.returncode == 0 else ""
        try:
            first, *others = [(name, metadata.version(name).split("+")[0]) for name in self.distributions]
        except metadata.PackageNotFoundError:
            return ""
        return ", ".join([first[1], *(" ".join(other) for other in others if other[1] != first[1])])


IMPORTERS: dict[str, Importer] = {
    "onnxruntime": Importer(onnxruntime, ()),
    "onnx reference evaluator": Importer(reference, ("onnx",)),
    "OpenVINO": Importer(openvino, ("openvino",)),
    "OpenCV dnn": Importer(opencv, ("opencv-python-headless",)),
    "tinygrad": Importer(tinygrad, ("tinygrad",)),
    "tract": Importer(tract, ("tract",)),
    "IREE": Importer(iree, ("iree-base-compiler", "iree-base-runtime")),
    "TVM": Importer(tvm, ("apache-tvm",)),
    "onnx2torch": Importer(onnx2torch, ("onnx2torch", "torch")),
    "ncnn": Importer(ncnn, ("ncnn", "pnnx")),
    "jaxonnxruntime": Importer(jaxonnxruntime, ("jaxonnxruntime", "jax")),
    "onnxruntime-web": Importer(web, ()),
}


# --- Running them ---


def reason(error: BaseException) -> str:
    """The first telling line of an error."""
    said = str(error)
    if isinstance(error, subprocess.CalledProcessError):
        said = f"{error.stderr}\n{error.stdout}\nexit status {error.returncode}"
    lines = [line.strip() for line in said.splitlines() if line.strip() and len(line) < 300] or ["no message"]
    telling = [line for line in lines if re.search(r"error|fail|not |unsupported|status", line, re.IGNORECASE)]
    return f"{type(error).__name__}: {(telling or lines)[0]}"


def child(title: str, folder: Path) -> None:
    """Run one importer over the files in a folder, and leave an output or a reason beside each."""
    feeds = dict(np.load(folder / "feeds.npz"))
    for path in sorted(folder.glob("*/model.onnx"), reverse=True):
        try:
            np.save(path.parent / "output.npy", np.asarray(IMPORTERS[title].run(path, feeds), np.float64))
        except Exception as error:
            path.with_name("reason.txt").write_text(reason(error).replace(str(path.parent) + os.sep, ""))


def difference(found: Array, expected: Array) -> float | str:
    """The largest difference, relative to the largest output, or what is wrong with the shape."""
    if found.shape != expected.shape:
        return f"output of shape {found.shape} and not {expected.shape}"
    if not np.isfinite(found).all():
        return "output that is not finite"
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def outcome(title: str, network: str) -> Outcome:
    """For the original and the initialized file: the difference from onnxruntime, or why there is none."""
    given = case(network)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arrays: dict[str, Any] = dict(given.feeds)
        np.savez(folder / "feeds.npz", **arrays)
        for which, content in given.files.items():
            (folder / which).mkdir()
            (folder / which / "model.onnx").write_bytes(content)
        command = [sys.executable, __file__, "--child", str(folder), title]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
            last = (ended.stderr.strip().splitlines() or [""])[-1]
            status = ended.returncode
            died = f"crash ({signal.Signals(-status).name if status < 0 else last or status})"
        except subprocess.TimeoutExpired:
            died = f"still at it after {SECONDS} s"
        found: Outcome = {}
        for which, expected in given.expected.items():
            output, refusal = folder / which / "output.npy", folder / which / "reason.txt"
            if output.exists():
                found[which] = difference(np.load(output), expected)
            else:
                found[which] = refusal.read_text() if refusal.exists() else died
        return found


def agrees(result: float | str) -> bool:
    return not isinstance(result, str) and result <= TOLERANCE


# --- The table ---


def table(results: dict[str, dict[str, Any]]) -> str:
    """Importers by networks, as Markdown, and below it what was refused."""
    lines = ["| importer | version | " + " | ".join(NETWORKS) + " |", "|---" * (2 + len(NETWORKS)) + "|"]
    notes: list[str] = []
    for title in [title for title in IMPORTERS if title in results]:
        cells = []
        for network in NETWORKS:
            found: Outcome = results[title]["networks"][network]
            before, after = found["original"], found["initialized"]
            if agrees(after):
                cells.append(f"{after:.0e}")
                continue
            word = "refused" if isinstance(after, str) else "differs"
            if agrees(before):
                word = f"**{word}, but not the original**"
            note = f"{title}, {network}: {after if before == after else f'{after} (the original: {before})'}"
            notes.append(note)
            cells.append(f"{word} ({len(notes)})")
        lines.append(f"| {title} | {results[title]['versions']} | {' | '.join(cells)} |")
    return "\n".join(lines + [""] + [f"{k}. {note}" for k, note in enumerate(notes, start=1)])


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"importers: {', '.join(IMPORTERS)}")
    parser.add_argument("--json", type=Path, help="add the results to those in this file, and show them all")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(None if arguments is None else list(arguments))
    for name in asked.names:
        if name not in IMPORTERS:
            parser.error(f"no importer {name!r}; there are {', '.join(IMPORTERS)}")
    if asked.child:
        child(asked.names[0], asked.child)
        return 0
    results: dict[str, dict[str, Any]] = {}
    if asked.json and asked.json.exists():
        results = json.loads(asked.json.read_text())
    for title in asked.names or IMPORTERS:
        versions = IMPORTERS[title].versions()
        if not versions:
            sys.stderr.write(f"{title}: not installed\n")
            continue
        results[title] = {"versions": versions, "networks": {}}
        for network in NETWORKS:
            results[title]["networks"][network] = outcome(title, network)
            sys.stderr.write(f"{title}, {network}: {results[title]['networks'][network]}\n")
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.stdout.write(table(results) + "\n")
    found = [one for result in results.values() for one in result["networks"].values()]
    return int(any(agrees(one["original"]) and not agrees(one["initialized"]) for one in found))


if __name__ == "__main__":
    sys.exit(main())
