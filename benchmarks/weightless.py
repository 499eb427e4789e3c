"""Models without weights, filled by three tools: how many compute finite numbers, and how far activations spread.

    python benchmarks/weightless.py export FOLDER       # 50 graphs with data (PyTorch, torchvision, timm, transformers)
    python benchmarks/weightless.py run FOLDER          # strips, fills and measures each; goes on where it stopped
    python benchmarks/weightless.py table               # the table in benchmarks/README.md, from the results

The graphs are onnx's nine light models (the architectures of ResNet-50, VGG-19 and their like, whose weights are
constants of a shape, and get such as PyTorch draws) and networks of tests/home/networks.py, exported with the weights
that PyTorch gives them. Each is stripped by `lsuv strip` and filled by

- `lsuv`: `lsuv init` with random data, LSUV and roles;
- `polygraphy`: `polygraphy surgeon weight-reconstruct`, N(0, 1) for every marked initializer;
- `randomizer`: the script `onnxruntime/tools/onnx_randomizer.py` of onnxruntime's wheel: uniform numbers between the
  least and the greatest value of every initializer of more than 10 values, integers too. It reads these values, so it
  is given the model as it was before it was stripped. It has no seed; numpy's is set before it runs.

Measured in onnxruntime without optimizers, on other samples than those that `lsuv` was given: whether every layer's
output and every output of the graph is finite in float32 and, after onnxruntime's converter, every value of the graph
in float16; and the largest standard deviation of a layer's output over the smallest, as a power of ten.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pipeline
from onnx import TensorProto, numpy_helper

import lsuv_cli

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "weightless.json"
TOOLS = ("lsuv", "polygraphy", "randomizer")
RANDOMIZER = """
import runpy, numpy
numpy.random.seed(0)
runpy.run_module("onnxruntime.tools.onnx_randomizer", run_name="__main__")
"""
GRAPHS = 50
EXPORTERS = ("torch", "torchvision", "timm", "transformers")  # versions of the environment that exports
SAMPLES = 8  # for `lsuv init`
FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}

Array = np.ndarray
Feeds = Mapping[str, Array]


# The graphs


def export(folder: Path) -> None:
    """Write NAME.onnx and NAME.npz for every graph."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "versions.json").write_text(json.dumps({p: v for p, v in versions().items() if p in EXPORTERS}))
    light = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))
    for path in light:
        name = path.stem.removeprefix("light_")
        if not (folder / f"{name}.npz").exists():
            proto = with_initializers(onnx.load(path))
            onnx.save(proto, folder / f"{name}.onnx")
            saved(folder / f"{name}.npz", drawn(proto, 1))
            print(name, flush=True)
    sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "home")]
    import round_trip  # type: ignore[import-not-found,unused-ignore]
    from networks import NETWORKS  # type: ignore[import-not-found,unused-ignore]

    for network, build in NETWORKS.items():
        if len(list(folder.glob("*.npz"))) >= GRAPHS:
            break
        name = network.replace(" ", "_").replace(",", "")
        if (folder / f"{name}.npz").exists():
            continue
        try:
            module, batch = build()
            path = round_trip.export(module, batch, folder / f"{name}.onnx", "dynamo", folded=True)
            saved(folder / f"{name}.npz", round_trip.feeds(path, module, batch))
            print(name, flush=True)
        except Exception as problem:  # a network that this version of PyTorch does not export
            print(f"{name} was not exported: {type(problem).__name__}", flush=True)


def saved(path: Path, feeds: Feeds) -> None:
    arrays: dict[str, Any] = dict(feeds)
    np.savez(path, **arrays)


def with_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A light model with an initializer in the place of every weight that ConstantOfShape makes.

    A matrix or filter is drawn as PyTorch draws it, uniform with the variance 1 / (3·fan-in).
    """
    rng = np.random.default_rng(0)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    kept = []
    for node in proto.graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in stored:
            kept.append(node)
            continue
        value = numpy_helper.to_array(node.attribute[0].t) if node.attribute else np.zeros(1, np.float32)
        array = np.full(stored[node.input[0]], value[0], value.dtype)
        if array.ndim > 1 and array.size > 1 and array.dtype.kind == "f":
            bound = 1 / math.sqrt(array.size / array.shape[0])
            array = np.asarray(rng.uniform(-bound, bound, array.shape), array.dtype)
        proto.graph.initializer.append(numpy_helper.from_array(array, node.output[0]))
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in kept]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.ir_version = max(proto.ir_version, 4)
    return proto


def drawn(proto: onnx.ModelProto, seed: int) -> dict[str, Array]:
    """Standard normal numbers for each input."""
    stored = {tensor.name for tensor in proto.graph.initializer}
    rng = np.random.default_rng(seed)
    shapes = {
        i.name: [d.dim_value or 1 for d in i.type.tensor_type.shape.dim]
        for i in proto.graph.input
        if i.name not in stored
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


# The tools


def by_lsuv(small: Path, given: Path, feeds: Feeds, target: Path) -> None:
    data: Any = "random"
    if any(array.dtype.kind != "f" for array in feeds.values()):
        # Token ids and masks as the exported graph wants them; other numbers than those that are measured on.
        rng = np.random.default_rng(7)
        data = {k: rng.permuted(v, axis=0) if v.dtype.kind != "b" else v for k, v in feeds.items()}
    lsuv_cli.initialize(small, data, output=target, limit=SAMPLES, force=True)


def by_polygraphy(small: Path, given: Path, feeds: Feeds, target: Path) -> None:
    tool = str(Path(sys.executable).with_name("polygraphy"))
    command = [tool, "surgeon", "weight-reconstruct", str(small), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    # It reads marked initializers only; what is marked in Constant nodes is filled the same way.
    proto = onnx.load(target)
    rng = np.random.default_rng(0)
    for node in proto.graph.node:
        for held in node.attribute:
            if held.type == onnx.AttributeProto.TENSOR and "TRT_WEIGHTLESS" in held.t.doc_string:
                dtype = onnx.helper.tensor_dtype_to_np_dtype(held.t.data_type)
                held.t.CopyFrom(numpy_helper.from_array(rng.standard_normal(tuple(held.t.dims)).astype(dtype)))
    onnx.save(proto, target)


def by_randomizer(small: Path, given: Path, feeds: Feeds, target: Path) -> None:
    command = [sys.executable, "-c", RANDOMIZER, "-m", str(given), "-o", str(target)]
    if any(tensor.external_data for tensor in onnx.load(given, load_external_data=False).graph.initializer):
        command.append("--use_external_data_format")
    subprocess.run(command, check=True, capture_output=True)


FILL: dict[str, Callable[[Path, Path, Feeds, Path], None]] = {
    "lsuv": by_lsuv,
    "polygraphy": by_polygraphy,
    "randomizer": by_randomizer,
}


# Measurement


def measured(path: Path, feeds: Feeds) -> dict[str, Any]:
    """Whether all layers' outputs and the graph's outputs are finite, and the spread of the layers' outputs."""
    exposed = lsuv_cli.expose(path)
    assert exposed.model is not None
    values = ran(exposed.model, feeds)
    layers = [np.asarray(values[name], np.float64) for name in exposed.outputs.values()]
    stds = [float(value.std()) for value in layers] if finite(values.values()) else []
    spread = math.log10(max(stds) / min(stds)) if stds and min(stds) > 0 else None
    return {"finite": finite(values.values()), "spread": spread, "layers": len(layers)}


def measured_in_half(path: Path, feeds: Feeds) -> dict[str, Any]:
    """Whether every value of the graph is finite in float16.

    Each is put out, because onnxruntime has few kernels for float16 on the CPU: it runs the others in float32 and takes
    away the casts between them, so that a value beyond 65504 is seen only where it is read as float16.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    proto = convert_float_to_float16(onnx.load(path), disable_shape_infer=True)
    known = {output.name for output in proto.graph.output}
    made = [name for node in proto.graph.node for name in node.output if name and name not in known]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    halves = {name: array.astype(np.float16) if array.dtype == np.float32 else array for name, array in feeds.items()}
    return {"finite": finite(ran(proto, halves).values())}


def ran(proto: onnx.ModelProto, feeds: Feeds) -> dict[str, Array]:
    """Every output of a model, by unoptimized onnxruntime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


def finite(values: Iterable[Array]) -> bool:
    return all(bool(np.isfinite(value).all()) for value in values if np.asarray(value).dtype.kind == "f")


def run(folder: Path) -> None:
    """Strip, fill and measure every graph with the tools that have no result for it yet."""
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"graphs": {}}
    exported = folder / "versions.json"
    results["versions"] = versions() | (json.loads(exported.read_text()) if exported.exists() else {})
    for data in sorted(folder.glob("*.npz"), key=lambda path: path.with_suffix(".onnx").stat().st_size):
        name = data.stem
        entry = results["graphs"].setdefault(name, {})
        missing = [tool for tool in TOOLS if not {"error", "float16"} & set(entry.get(tool, ()))]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            entry |= one(data.with_suffix(".onnx"), dict(np.load(data)), Path(scratch), missing)
        print(name, json.dumps(results["graphs"][name]), flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def one(given: Path, feeds: Feeds, scratch: Path, tools: Sequence[str]) -> dict[str, Any]:
    small, target = scratch / "small.onnx", scratch / "filled.onnx"
    entry: dict[str, Any] = {}
    lsuv_cli.strip(given, small)
    entry["bytes"] = {"given": given.stat().st_size, "stripped": small.stat().st_size}
    # That it can be written about as kilobytes is no merit of compression: compressed weights stay megabytes.
    entry["bytes"]["stripped_zlib"] = len(zlib.compress(small.read_bytes()))
    for tool in tools:
        try:
            FILL[tool](small, given, feeds, target)
            entry[tool] = {"float32": measured(target, feeds)}
        except Exception as problem:
            entry[tool] = {"error": f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"}
            continue
        try:
            entry[tool]["float16"] = measured_in_half(target, feeds)
        except Exception as problem:
            entry[tool]["float16"] = {"error": f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"}
    return entry


def versions() -> dict[str, str]:
    import importlib.metadata as metadata

    import onnxruntime as ort

    known = {"onnxruntime": ort.__version__}  # whichever of its packages is installed
    for package in ("onnx", "polygraphy", "torch", "torchvision", "timm", "transformers", "numpy"):
        try:
            known[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return known


# The table


def rows(results: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each tool: how many graphs run, are finite, have no constant layer; median and largest spread."""
    every = results["graphs"].values()
    runs_half = [g for g in every if any(g.get(tool, {}).get("float16", {}).get("finite") for tool in TOOLS)]
    for tool in TOOLS:
        graphs = [g for g in every if tool in g]
        whole = [g[tool]["float32"] for g in graphs if "float32" in g[tool]]
        half = [g[tool].get("float16", {}) for g in runs_half if {"float16", "error"} & set(g.get(tool, ()))]
        spreads = [w["spread"] for w in whole if w["spread"] is not None]
        yield (
            tool,
            f"{len(whole)} of {len(graphs)}",
            f"{sum(w['finite'] for w in whole)} of {len(graphs)}",
            f"{len(spreads)} of {len(graphs)}",
            f"{sum(bool(h.get('finite')) for h in half)} of {len(half)}",
            f"{statistics.median(spreads):.1f}" if spreads else "",
            f"{max(spreads):.1f}" if spreads else "",
        )


def table(results: Mapping[str, Any]) -> str:
    finite = ("finite in float32", "and no layer constant", "finite in float16")
    head = ("filled by", "runs", *finite, "spread, median", "spread, largest")
    lines = [head, ("---",) * len(head), *rows(results)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def with_table(readme: str, results: Mapping[str, Any]) -> str:
    """benchmarks/README.md with the table of these results between its marks."""
    return pipeline.between(readme, "weightless", table(results))


def main() -> None:
    parser = argparse.ArgumentParser(description="Models without weights, filled by three tools.")
    parser.add_argument("what", choices=["export", "run", "table"])
    parser.add_argument("folder", type=Path, nargs="?")
    asked = parser.parse_args()
    if asked.what == "table":
        page, results = HERE / "README.md", json.loads(RESULTS.read_text())
        page.write_text(with_table(page.read_text(), results))
        print(table(results), end="")
    elif asked.folder is None:
        parser.error("a folder for the graphs is needed")
    else:
        (export if asked.what == "export" else run)(asked.folder)


if __name__ == "__main__":
    main()
