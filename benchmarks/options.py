"""Small networks trained from each option of LSUV: what `--bias center`, `--scale channel` and `--residual bounded` do.

    python benchmarks/options.py                            # all runs; goes on where it was interrupted
    python benchmarks/options.py --tables                   # the table in docs/options.md, from the saved numbers
    python benchmarks/options.py --export pre-norm          # writes pre-norm.onnx and pre-norm.npy

Five settings on a task made of random numbers: Gaussian inputs, 10 classes that a random network of two layers decides.

plain      24 of ReLU and Linear
shifted    the same, with 2 added to every input: data that was not centred
residual   24 of x + Linear(ReLU(Linear(x))), without normalization
pre-norm   the same with LayerNorm in front of each branch
separable  4 of a depthwise and a pointwise convolution with ReLU, on 32 channels that are 0.1 to 10 in size

Each is initialized by `lsuv_`, with the target 0.01 for the head, and trained by SGD with momentum 0.9 at each of four
rates. A run has the same batches whatever its initialization is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import options_tables
import pipeline
import torch
from torch import Tensor, nn

from lsuv_cli.torch import lsuv_

WIDTH, DEPTH, CLASSES, INPUTS = 64, 24, 10, 32
POSITIONS, SEPARABLE = 8, 4  # of a sample of the separable network, and its blocks
BATCH, CALIBRATION = 128, 512
SEEDS, STEPS = 3, 200
RATES = (0.1, 0.03, 0.01, 0.003)
OPTIONS: dict[str, dict[str, Any]] = {
    "lsuv": {},
    "lsuv+center": {"bias": "center"},
    "lsuv+channel": {"scale": "channel"},
    "lsuv+center+channel": {"bias": "center", "scale": "channel"},
    "lsuv+bounded": {"residual": "bounded"},
    "lsuv+bounded+center": {"residual": "bounded", "bias": "center"},
}


class Block(nn.Module):
    """x + Linear(ReLU(Linear(x))), with or without LayerNorm in front of the branch."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + added


@dataclass(frozen=True)
class Setting:
    """A kind of network, and what becomes of Gaussian inputs before it sees them."""

    kind: str
    shift: float = 0.0

    @property
    def residual(self) -> bool:
        return self.kind in {"residual", "pre-norm"}

    def build(self) -> nn.Sequential:
        """A network whose last layer is called `head`."""
        net = nn.Sequential()
        if self.kind == "separable":
            for k in range(SEPARABLE):
                deep = nn.Conv1d(INPUTS, INPUTS, 3, padding=1, groups=INPUTS)
                net.add_module(f"block{k}", nn.Sequential(deep, nn.ReLU(), nn.Conv1d(INPUTS, INPUTS, 1), nn.ReLU()))
            net.add_module("flat", nn.Flatten())
            net.add_module("head", nn.Linear(INPUTS * POSITIONS, CLASSES))
            return net
        net.add_module("stem", nn.Linear(INPUTS, WIDTH))
        for k in range(DEPTH):
            chain = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            net.add_module(f"block{k}", Block(self.kind == "pre-norm") if self.residual else chain)
        net.add_module("head", nn.Linear(WIDTH, CLASSES))
        return net

    def draw(self, samples: int) -> Tensor:
        """Standard normal samples, which decide the classes."""
        return torch.randn(samples, INPUTS, POSITIONS) if self.kind == "separable" else torch.randn(samples, INPUTS)

    def seen(self, x: Tensor) -> Tensor:
        """What the network is given of them."""
        if self.kind == "separable":
            return x * torch.logspace(-1, 1, INPUTS)[:, None]
        return x + self.shift


SETTINGS = {
    "plain": Setting("plain"),
    "shifted": Setting("plain", shift=2.0),
    "residual": Setting("residual"),
    "pre-norm": Setting("pre-norm"),
    "separable": Setting("separable"),
}


def initialized(setting: Setting, options: dict[str, Any], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = setting.build()
    data = setting.seen(setting.draw(CALIBRATION))
    report = lsuv_(net, data, target_variance={"head": 0.01}, seed=seed, threads=1, device="cpu", **options)
    assert int(report.exit_code) == 0, report
    return net


def trained(setting: Setting, net: nn.Sequential, rate: float, seed: int, steps: int) -> float | None:
    """The mean training loss over the last steps; None if it is not finite at some step."""
    torch.manual_seed(1000 + seed)
    whole = nn.Flatten()(setting.draw(1)).shape[1]
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(whole, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(steps):
        x = setting.draw(BATCH)
        with torch.no_grad():
            wanted = teacher(x).argmax(dim=1)
        loss = nn.functional.cross_entropy(net(setting.seen(x)), wanted)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return sum(losses[-options_tables.LAST :]) / options_tables.LAST


def run(seeds: int, steps: int) -> None:
    """Train every setting from every option that has no saved numbers yet."""
    file = options_tables.RESULTS
    saved: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"runs": {}, "cpu_seconds": 0.0}
    if saved.setdefault("steps", steps) != steps:
        raise SystemExit(f"{file} has runs of {saved['steps']} steps; remove it first")
    saved["rates"] = list(RATES)
    for seed in range(seeds):
        for name, setting in SETTINGS.items():
            for init, options in OPTIONS.items():
                found = saved["runs"].setdefault(name, {}).setdefault(init, {}) if _fits(setting, init) else None
                if found is None or str(seed) in found:
                    continue
                begun = time.process_time()
                net = initialized(setting, options, seed)
                start = {key: value.clone() for key, value in net.state_dict().items()}
                losses = []
                for rate in RATES:
                    net.load_state_dict(start)
                    loss = trained(setting, net, rate, seed, steps)
                    losses.append(None if loss is None else round(loss, 4))
                found[str(seed)] = losses
                saved["cpu_seconds"] = round(saved["cpu_seconds"] + time.process_time() - begun, 1)
                saved["versions"] = pipeline.versions("lsuv-cli", "numpy", "onnx", "onnxruntime-gpu", "torch")
                pipeline.write_json(file, saved)
                print(f"{name}: {init}, seed {seed}: {losses}", file=sys.stderr, flush=True)


def _fits(setting: Setting, init: str) -> bool:
    return setting.residual or "bounded" not in init


def export(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, INPUTS)
    names: dict[str, Any] = {"input_names": ["x"], "dynamic_axes": {"x": {0: "N"}}}
    torch.onnx.export(SETTINGS[kind].build(), (x,), f"{kind}.onnx", dynamo=False, **names)
    np.save(f"{kind}.npy", x.numpy())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--export", choices=("plain", "residual", "pre-norm"))
    parser.add_argument("--tables", action="store_true", help="run nothing; the table from saved numbers")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if asked.export:
        export(asked.export)
        return
    if not asked.tables:
        run(asked.seeds, asked.steps)
    options_tables.write()


if __name__ == "__main__":
    main()
