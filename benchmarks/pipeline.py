"""What paper.py and train.py share: the data, and the road from a network's name to a PyTorch module.

The road is the one a user takes: `sample_models/build.py` writes an ONNX file, `lsuv init` on the command line
initializes it, onnx2torch imports it. Nothing here touches a weight.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "benchmarks" / "work"  # models and checkpoints; not kept in the repository
Floats = NDArray[np.float32]

# What `lsuv init` is told for each initialization. "given" is the file as build.py wrote it: Gaussian noise with
# standard deviation 0.01.
INITS: dict[str, tuple[str, ...] | None] = {
    "lsuv": (),
    "orthonormal": ("--pre-init", "orthonormal", "--no-rescale"),
    "xavier": ("--pre-init", "xavier", "--no-rescale"),
    "msra": ("--pre-init", "msra", "--no-rescale"),
    "given": None,
}


# --- Data ---


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each channel of the whole training set, as fractions of 255."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10 = Statistics((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
MNIST = Statistics((0.1307,), (0.3081,))
DIVIDED = Statistics((0.0,), (250 / 255,))  # the authors' MNIST: pixels times 0.004


@dataclass(frozen=True)
class Images:
    """A set of images, (N, C, H, W) uint8, with their classes."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    statistics: Statistics

    def __len__(self) -> int:
        return len(self.labels)

    def normalized(self, which: slice | NDArray[np.int64]) -> Floats:
        """(pixels / 255 - mean) / std by channel, the only preprocessing: mean 0 and variance 1 over the training set
        with the set's own statistics."""
        mean, std = (np.array(v, np.float32)[:, None, None] for v in (self.statistics.mean, self.statistics.std))
        return (self.pixels[which].astype(np.float32) / np.float32(255) - mean) / std


def contrast_normalized(pixels: NDArray[np.uint8]) -> Floats:
    """Global contrast normalization: each image has mean 0 and standard deviation 1 over all channels and pixels."""
    x = pixels.astype(np.float32)
    x -= x.mean(axis=(1, 2, 3), keepdims=True)
    x /= x.std(axis=(1, 2, 3), keepdims=True)
    return x


def cropped(images: Floats, border: int, seed: int) -> Floats:
    """Each image shifted by up to `border` pixels either way, zeros where it was not."""
    padded = np.pad(images, ((0, 0), (0, 0), (border, border), (border, border)))
    high, wide = images.shape[2:]
    corners = np.random.default_rng((seed, border)).integers(0, 2 * border + 1, (len(images), 2))
    return np.stack([x[:, i : i + high, j : j + wide] for x, (i, j) in zip(padded, corners, strict=True)])


def load(path: Path, name: str, split: str, statistics: Statistics | None = None) -> Images:
    """`name` is cifar10 or mnist, `split` train or test; `path` a directory, or the train file with test beside it."""
    folder = path if path.is_dir() else path.parent
    file = path if path.is_file() and split == "train" else folder / f"{name}_{split}.npz"
    if not file.is_file():
        raise SystemExit(f"no {file.name} in {folder}: it holds `images` (N, H, W[, C]) uint8 and `labels` (N,)")
    with np.load(file) as arrays:
        pixels, labels = arrays["images"], arrays["labels"].astype(np.int64)
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
    statistics = statistics or (MNIST if name == "mnist" else CIFAR10)
    return Images(np.ascontiguousarray(pixels), labels, statistics)


def chosen(images: Images, count: int, seed: int) -> NDArray[np.int64]:
    """`count` images drawn without replacement."""
    return np.random.default_rng(seed).choice(len(images), count, replace=False)


# --- Models ---


def run(command: Sequence[str | Path], threads: int = 1) -> str:
    """Run a command as a user would; its standard output. What it says on the way is shown only if it fails."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def build(path: Path, network: str, activation: str, batch_norm: str | None = None) -> Path:
    """Write the network's ONNX file with build.py."""
    path.parent.mkdir(parents=True, exist_ok=True)
    extra = ("--batch-norm", batch_norm) if batch_norm else ()
    script = ROOT / "sample_models" / "build.py"
    run([sys.executable, script, network, "--activation", activation, *extra, "-o", path])
    return path


def lsuv_command() -> str:
    beside = shutil.which("lsuv", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("lsuv")
    if found is None:
        raise SystemExit("no `lsuv` command: pip install -e . first")
    return found


def initialize(model: Path, output: Path, init: str, calibration: Path, seed: int, threads: int = 1) -> dict[str, Any]:
    """`lsuv init` on the command line; its report."""
    options = INITS[init]
    if options is None:
        shutil.copyfile(model, output)
        return {}
    command: list[str | Path] = [lsuv_command(), "init", model, "--data", calibration, "-o", output]
    more = ["--seed", str(seed), *options, "--threads", str(threads), "--json", "--quiet", "--force"]
    report: dict[str, Any] = json.loads(run([*command, *more]))
    return report


def to_torch(path: Path) -> nn.Module:
    """The ONNX file as a PyTorch module, by onnx2torch."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        # onnx2torch imports torchvision for NonMaxSuppression and RoiAlign, which no network here has. Where
        # torchvision was built for another torch (pip does that to CPU builds), it cannot even be imported.
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        package, ops = types.ModuleType("torchvision"), types.ModuleType("torchvision.ops")
        vars(ops)["roi_align"], vars(package)["ops"] = None, ops
        sys.modules |= {"torchvision": package, "torchvision.ops": ops}
    from onnx2torch import convert

    module: nn.Module = convert(str(path))
    return _with_fast_max(module)


def _with_fast_max(module: nn.Module) -> nn.Module:
    """The same function, faster: onnx2torch stacks the inputs of a Max and takes the largest along the new axis.

    In FitNet-MNIST with maxout that took more than half of a training step. A tie, which goes to both sides there in
    equal parts, goes to the first here.
    """
    import torch

    class Larger(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, left: Any, right: Any) -> Any:
            # Halves of a convolution's channels: arithmetic on them is slow in bfloat16, a copy is not.
            left, right = left.clone(), right.clone()
            context.save_for_backward(right - left)
            return torch.maximum(left, right)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            (difference,) = context.saved_tensors
            right = torch.ops.aten.threshold_backward(gradient, difference, 0)
            return gradient - right, right

    class Max(torch.nn.Module):
        def forward(self, left: Any, right: Any) -> Any:
            return Larger.apply(left, right)

    for name, part in list(module.named_children()):
        if getattr(part, "_operator", None) is torch.amax:
            setattr(module, name, Max())
    return module


# --- Writing down ---


def versions(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Indented, but a list of numbers on one line."""
    text = json.dumps(value, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    write_text(path, text + "\n")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


def between(page: str, mark: str, text: str) -> str:
    """A page with this text between `<!-- mark -->` and `<!-- end of mark -->`."""
    before, rest = page.split(f"<!-- {mark} -->\n")
    return f"{before}<!-- {mark} -->\n\n{text}\n<!-- end of {mark} -->\n" + rest.split(f"<!-- end of {mark} -->\n")[1]


def figure(path: Path, rows: int, columns: int, draw: Any, size: tuple[float, float] = (4.6, 3.4)) -> None:
    """Draw into a grid of axes and save a small PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    made, axes = plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), squeeze=False)
    draw(axes)
    made.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=90)
    plt.close(made)
