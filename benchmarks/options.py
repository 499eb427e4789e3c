"""Small networks trained from each option of LSUV: what `--bias center`, `--scale channel` and `--residual bounded` do.

    python benchmarks/options.py [--seeds 3] [--steps 300]
    python benchmarks/options.py --export pre-norm          # writes pre-norm.onnx and pre-norm.npy

Three networks of 24 layers or blocks on a task made of random numbers: 32 Gaussian inputs, 10 classes that a random
network of two layers decides. `plain` is a chain of Linear and ReLU; `residual` adds x + Linear(ReLU(Linear(x)))
without any normalization; `pre-norm` is the same with LayerNorm in front of each branch. Each is initialized by
`lsuv_`, with the target 0.01 for the head, and trained by SGD with momentum 0.9. The table has the mean of the training
loss over the last 50 steps, over all seeds; a loss that is not finite, or above that of chance, counts as ln 10.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lsuv_cli.torch import lsuv_

WIDTH, DEPTH, CLASSES, INPUTS = 64, 24, 10, 32
BATCH, LAST = 128, 50
RATES = (0.03, 0.003)
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


def network(kind: str) -> nn.Sequential:
    """A network whose last layer is called `head`."""
    net = nn.Sequential()
    net.add_module("stem", nn.Linear(INPUTS, WIDTH))
    for k in range(DEPTH):
        body = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH)) if kind == "plain" else Block(kind == "pre-norm")
        net.add_module(f"block{k}", body)
    net.add_module("head", nn.Linear(WIDTH, CLASSES))
    return net


def trained(kind: str, options: dict[str, Any], rate: float, seed: int, steps: int) -> float:
    """The mean training loss over the last steps."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    net = network(kind)
    report = lsuv_(net, torch.randn(512, INPUTS), target_variance={"head": 0.01}, seed=seed, **options)
    assert int(report.exit_code) == 0, report
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(steps):
        x = torch.randn(BATCH, INPUTS)
        with torch.no_grad():
            wanted = teacher(x).argmax(dim=1)
        loss = nn.functional.cross_entropy(net(x), wanted)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            return math.log(CLASSES)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return min(sum(losses[-LAST:]) / LAST, math.log(CLASSES))


def main() -> None:
    parser = argparse.ArgumentParser(description="Options of LSUV on small networks.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--export", choices=("plain", "residual", "pre-norm"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.export:
        torch.manual_seed(0)
        x = torch.randn(256, INPUTS)
        names: dict[str, Any] = {"input_names": ["x"], "dynamic_axes": {"x": {0: "N"}}}
        torch.onnx.export(network(asked.export), (x,), f"{asked.export}.onnx", dynamo=False, **names)
        np.save(f"{asked.export}.npy", x.numpy())
        return
    print("| network | initialization |", " | ".join(f"rate {rate}" for rate in RATES), "|", flush=True)
    print("|---|---|" + "---:|" * len(RATES))
    for kind in ("plain", "residual", "pre-norm"):
        for name, options in OPTIONS.items():
            if kind == "plain" and "bounded" in name:
                continue
            found = [
                sum(trained(kind, options, rate, seed, asked.steps) for seed in range(asked.seeds)) / asked.seeds
                for rate in RATES
            ]
            print(f"| {kind} | `{name}` |", " | ".join(f"{loss:.3f}" for loss in found), "|", flush=True)


if __name__ == "__main__":
    main()
