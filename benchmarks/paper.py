"""The tables of "All you need is a good init" (Mishkin and Matas, 2015), measured again with lsuv.

    python benchmarks/paper.py --cifar10 PATH                      # everything
    python benchmarks/paper.py --cifar10 PATH --only std batch     # some sections
    python benchmarks/paper.py --tables                            # tables and plots again, from the saved numbers

PATH is a directory with cifar10_train.npz, or that file: `images` (N, 32, 32, 3) uint8, `labels` (N,). Images are
normalized to mean 0 and variance 1 per channel. Each section writes paper_NAME.json, .md and .png.

std             weight standard deviations on FitNet-4 ReLU: LSUV, OrthoNorm, MSRA, Xavier
nonlinearities  weight standard deviations by LSUV with tanh, ReLU, VLReLU, maxout
contrast        weight standard deviations by LSUV on images with global contrast normalization
dropout         the same in training mode, with the authors' dropout of 0.2 on the images and behind each pooling
batch           what the number of calibration images does to the scales
gradients       variance of the initial gradients per layer (needs torch and onnx2torch)
updates         relative weight updates against the weights' scale, Figure 1 (needs torch and onnx2torch)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paper_tables as show
import pipeline
import published
from numpy.typing import NDArray
from paper_tables import Found
from pipeline import Images
from published import BATCHES, LAYERS

ACTIVATIONS = ("relu", "vlrelu", "tanh", "maxout")
DROPOUT = 0.2


# --- Measuring ---


@dataclass(frozen=True)
class Choices:
    """What the command line chose."""

    seeds: int = 5
    images: int = 256
    draws: int = 5
    threads: int = 1
    batch_size: int = 128
    iterations: int = 30
    activations: tuple[str, ...] = ACTIVATIONS
    scales: tuple[float, ...] = (0.5, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def network(activation: str) -> Any:
    """FitNet-4 as build.py makes it."""
    sys.path.insert(0, str(pipeline.ROOT / "sample_models"))
    try:
        import build
    finally:
        sys.path.pop(0)
    return build.build("fitnet4", activation=activation)


def weight_stds(model: Any, data: NDArray[np.float32] | None, **settings: Any) -> dict[str, float]:
    """The standard deviation of each layer's weight after lsuv."""
    import lsuv_cli

    report = lsuv_cli.initialize(model, data, **settings).report
    if report.exit_code:
        raise SystemExit(f"lsuv did not reach its target: {[(x.name, x.status) for x in report.layers]}")
    return {x.name: x.weight_std for x in report.layers if x.name in LAYERS and x.weight_std is not None}


def over_seeds(found: Sequence[dict[str, float]]) -> Found:
    return {
        "mean": {k: statistics.fmean(f[k] for f in found) for k in LAYERS},
        "std": {k: statistics.pstdev(f[k] for f in found) for k in LAYERS},
    }


def with_dropout(model: Any, ratio: float) -> Any:
    """The model in training mode: Dropout on its input and behind each pooling, where the authors' files have it."""
    import onnx
    from onnx import TensorProto, helper

    changed = onnx.ModelProto.FromString(model.SerializeToString())
    graph = changed.graph
    graph.initializer.extend(
        [
            helper.make_tensor("dropout_ratio", TensorProto.FLOAT, [], [ratio]),
            helper.make_tensor("dropout_training", TensorProto.BOOL, [], [True]),
        ]
    )
    nodes = []

    def drop(value: str) -> None:
        for node in graph.node:
            node.input[:] = [f"{value}_dropped" if name == value else name for name in node.input]
        nodes.append(
            helper.make_node(
                "Dropout", [value, "dropout_ratio", "dropout_training"], [f"{value}_dropped"], f"{value}_dropout"
            )
        )

    drop(graph.input[0].name)
    for node in list(graph.node):
        nodes.append(node)
        if "Pool" in node.op_type:
            drop(node.output[0])
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.checker.check_model(changed)
    return changed


def lsuv_stds(
    activation: str, batch: Callable[[int], NDArray[np.float32]], choices: Choices, dropout: float = 0.0
) -> Found:
    """`batch` has the calibration data for each seed."""
    model, found = network(activation), []
    if dropout:
        model = with_dropout(model, dropout)
    for seed in range(choices.seeds):
        note(f"  {activation}: LSUV, seed {seed}")
        found.append(weight_stds(model, batch(seed), seed=seed, threads=choices.threads))
    return over_seeds(found)


def normalized(images: Images, choices: Choices) -> Callable[[int], NDArray[np.float32]]:
    return lambda seed: images.normalized(pipeline.chosen(images, choices.images, seed))


def measure_std(images: Images, choices: Choices) -> Found:
    model = network("relu")
    found: Found = {"lsuv": lsuv_stds("relu", normalized(images, choices), choices)}
    for init in ("orthonormal", "msra", "xavier"):
        # conv11 has 864 weights: the standard deviation of so few Gaussian numbers is off by 2.4 % by chance alone.
        # These draws cost next to nothing, so there are more of them.
        seeds = range(4 * choices.seeds)
        found[init] = over_seeds([weight_stds(model, None, pre_init=init, rescale=False, seed=s) for s in seeds])
    return found


def measure_nonlinearities(images: Images, choices: Choices) -> Found:
    batch = normalized(images, choices)
    return {activation: lsuv_stds(activation, batch, choices) for activation in published.NONLINEARITIES}


def measure_contrast(images: Images, choices: Choices) -> Found:
    """The authors' images: global contrast normalization, less the mean image, cut from a border of 8 zeros."""
    contrast, padded = contrasts(images, choices)
    found: Found = {}
    for name, batch in (("channel", normalized(images, choices)), ("contrast", contrast), ("padded", padded)):
        squares = [float(np.mean(np.square(batch(seed), dtype=np.float64))) for seed in range(choices.seeds)]
        found[name] = {"rms": math.sqrt(statistics.fmean(squares)), **lsuv_stds("relu", batch, choices)}
    return found


def contrasts(
    images: Images, choices: Choices
) -> tuple[Callable[[int], NDArray[np.float32]], Callable[[int], NDArray[np.float32]]]:
    """Images with global contrast normalization less the mean image, and the same cut from a border of 8 zeros."""
    whole = pipeline.contrast_normalized(images.pixels)
    whole -= whole.mean(axis=0)

    def contrast(seed: int) -> NDArray[np.float32]:
        return whole[pipeline.chosen(images, choices.images, seed)]

    return contrast, lambda seed: pipeline.cropped(contrast(seed), 8, seed)


def measure_dropout(images: Images, choices: Choices) -> Found:
    """Calibration in training mode, as the authors' Caffe networks were calibrated."""
    batch, (_, padded) = normalized(images, choices), contrasts(images, choices)
    return {
        "without": lsuv_stds("relu", batch, choices),
        "dropout": lsuv_stds("relu", batch, choices, DROPOUT),
        "padded": lsuv_stds("relu", padded, choices, DROPOUT),
    }


def measure_batch(images: Images, choices: Choices) -> Found:
    """The same orthonormal weights, scaled on several draws of n images each."""
    import lsuv_cli

    found: Found = {}
    for activation in ("tanh", "relu"):
        model, sizes = network(activation), {}
        for size in BATCHES:
            note(f"  {activation}: {choices.draws} draws of {size} images")
            scales: dict[str, list[float]] = {}
            for draw in range(choices.draws):
                data = images.normalized(pipeline.chosen(images, size, 1000 * size + draw))
                report = lsuv_cli.initialize(model, data, threads=choices.threads).report
                for layer in report.layers:
                    assert layer.scale is not None
                    scales.setdefault(layer.name, []).append(layer.scale)
            sizes[str(size)] = scales
        found[activation] = sizes
    return found


def module_of(work: Path, activation: str, init: str, images: Images, choices: Choices, seed: int = 0) -> Any:
    """FitNet-4 by the whole road: build.py, `lsuv init`, onnx2torch."""
    import torch

    torch.set_num_threads(choices.threads)
    built = pipeline.build(work / f"{activation}.onnx", "fitnet4", activation)
    calibration = work / "calibration.npy"
    np.save(calibration, images.normalized(pipeline.chosen(images, choices.images, seed)))
    made = work / f"{activation}_{init}_{seed}.onnx"
    pipeline.initialize(built, made, init, calibration, seed, choices.threads)
    return pipeline.to_torch(made)


def minibatches(images: Images, count: int, size: int, seed: int) -> Iterable[tuple[Any, Any]]:
    import torch

    order = pipeline.chosen(images, len(images), seed)
    for k in range(count):
        which = order[(np.arange(size) + k * size) % len(order)]
        yield torch.from_numpy(images.normalized(which)), torch.from_numpy(images.labels[which])


def measure_gradients(images: Images, choices: Choices) -> Found:
    """Variances over ten mini-batches, averaged; no weight changes between them.

    The paper does not say which gradient. Its numbers are those of the loss with respect to a layer's *output*: in
    its OrthoInit column they halve from layer to layer towards the input, while the gradient with respect to a
    weight also carries the activations, which halve the other way, so that it hardly depends on the layer. Both are
    measured here.
    """
    import torch

    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for init in published.GRADIENTS:
            note(f"  gradients: {init}")
            module = module_of(Path(folder), "relu", init, images, choices)
            by_output: dict[str, list[float]] = {name: [] for name in LAYERS}
            by_weight: dict[str, list[float]] = {name: [] for name in LAYERS}

            def listen(name: str, into: dict[str, list[float]]) -> Callable[..., None]:
                def forward(_module: Any, _inputs: Any, output: Any) -> None:
                    output.register_hook(lambda g: into[name].append(float(g.double().var())))

                return forward

            for name in LAYERS:
                module.get_submodule(name).register_forward_hook(listen(name, by_output))
            for x, y in minibatches(images, 10, choices.batch_size, seed=1):
                module.zero_grad()
                torch.nn.functional.cross_entropy(module(x), y).backward()
                for name in LAYERS:
                    by_weight[name].append(float(module.get_submodule(name).weight.grad.double().var()))
            found[init] = {
                "output": {name: statistics.fmean(by_output[name]) for name in LAYERS},
                "weight": {name: statistics.fmean(by_weight[name]) for name in LAYERS},
            }
    return found


def measure_updates(images: Images, choices: Choices) -> Found:
    """SGD (learning rate 0.01, momentum 0.9) from orthonormal weights times a scale; |update| / |weight| by layer."""
    import torch

    found: Found = {"iterations": choices.iterations, "batch_size": choices.batch_size, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for activation in choices.activations:
            start = module_of(Path(folder), activation, "orthonormal", images, choices)
            start = start.to(memory_format=torch.channels_last)  # faster
            weights = {k: v.clone() for k, v in start.state_dict().items()}
            runs: Found = {}
            for scale in choices.scales:
                note(f"  updates: {activation}, scale {scale}")
                start.load_state_dict(weights)
                layers = [start.get_submodule(name).weight for name in (*LAYERS, "ip2")]
                with torch.no_grad():
                    for weight in layers:
                        weight *= scale
                optimizer = torch.optim.SGD(start.parameters(), lr=0.01, momentum=0.9)
                losses: list[float | None] = []
                updates: list[float | None] = []
                for x, y in minibatches(images, choices.iterations, choices.batch_size, seed=2):
                    optimizer.zero_grad()
                    loss = torch.nn.functional.cross_entropy(start(x.to(memory_format=torch.channels_last)), y)
                    loss.backward()
                    before = [weight.detach().clone() for weight in layers]
                    optimizer.step()
                    ratios = [float((w.detach() - b).norm() / b.norm()) for w, b in zip(layers, before, strict=True)]
                    mean = statistics.fmean(ratios)
                    if not (math.isfinite(float(loss.detach())) and math.isfinite(mean)):
                        losses.append(None)
                        updates.append(None)
                        break
                    losses.append(round(float(loss.detach()), 4))
                    updates.append(float(f"{mean:.4g}"))
                runs[str(scale)] = {"loss": losses, "update": updates}
            found["runs"][activation] = runs
    return found


# --- Sections ---


@dataclass(frozen=True)
class Section:
    measure: Callable[[Images, Choices], Found]
    table: Callable[[Found], str]
    plot: Callable[[Found, Path], None] | None


SECTIONS = {
    "std": Section(measure_std, show.table_std, show.plot_std),
    "nonlinearities": Section(measure_nonlinearities, show.table_nonlinearities, show.plot_nonlinearities),
    "contrast": Section(measure_contrast, show.table_contrast, None),
    "dropout": Section(measure_dropout, show.table_dropout, None),
    "batch": Section(measure_batch, show.table_batch, show.plot_batch),
    "gradients": Section(measure_gradients, show.table_gradients, show.plot_gradients),
    "updates": Section(measure_updates, show.table_updates, show.plot_updates),
}


# --- The command line ---


def command_line() -> argparse.ArgumentParser:
    default = Choices()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, metavar="PATH", help="directory with cifar10_train.npz, or the file")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--tables", action="store_true", help="measure nothing; tables and plots from saved numbers")
    parser.add_argument("-o", "--output", type=Path, default=pipeline.RESULTS, help="default: benchmarks/results")
    parser.add_argument("--threads", type=int, default=default.threads)
    parser.add_argument("--seeds", type=int, default=default.seeds, help="std, nonlinearities: initializations")
    parser.add_argument("--images", type=int, default=default.images, help="calibration images")
    parser.add_argument("--draws", type=int, default=default.draws, help="batch: draws of each size")
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="gradients, updates: mini-batch")
    parser.add_argument("--iterations", type=int, default=default.iterations, help="updates: SGD steps for each run")
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=list(ACTIVATIONS), help="updates")
    parser.add_argument("--scales", nargs="+", type=float, default=list(default.scales), help="updates")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    given = parser.parse_args(arguments)
    fields = {k: v for k, v in vars(given).items() if k in Choices.__dataclass_fields__}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    choices = Choices(**values)
    if not given.tables and given.cifar10 is None:
        parser.error("--cifar10 PATH is needed to measure; --tables draws what was measured before")
    images = None if given.tables else pipeline.load(given.cifar10, "cifar10", "train")
    for name in given.only:
        section, file = SECTIONS[name], given.output / f"paper_{name}.json"
        if images is not None:
            note(name)
            begun = time.perf_counter()
            found = section.measure(images, choices)
            saved = {
                "section": name,
                "seconds": round(time.perf_counter() - begun, 1),
                "choices": vars(choices),
                "versions": pipeline.versions("lsuv-cli", "numpy", "onnx", "onnxruntime-gpu", "onnxruntime", "torch"),
                "found": found,
            }
            pipeline.write_json(file, saved)
        elif not file.is_file():
            continue
        saved = json.loads(file.read_text())
        text = section.table(saved["found"])
        pipeline.write_text(file.with_suffix(".md"), text)
        if section.plot is not None:
            section.plot(saved["found"], file.with_suffix(".png"))
        print(f"## {name} ({saved['seconds']} s)\n\n{text}", flush=True)


if __name__ == "__main__":
    main()
