"""Does LSUV help networks that people train today? Small networks of many kinds, each with its own best learning rate.

    python benchmarks/modern.py --cifar10 PATH                   # all runs; goes on where it was interrupted
    python benchmarks/modern.py --cifar10 PATH --only GPT ViT    # settings whose names have one of these words
    python benchmarks/modern.py --tables                         # table and plot again, from the saved numbers

For each architecture (modern_networks.py), each initialization and each of SGD with momentum and AdamW, every learning
rate of one grid is tried with the first seed, and the best one, by the loss on held-out data, with two more. A run has
the same number of steps and the same batches whatever its initialization is. A run *trains* if its loss on held-out
data ends below LEARNED times that of the best constant answer.

default     as PyTorch makes the network
kaiming     Kaiming-normal weights for ReLU, biases zero
orthogonal  orthogonal weights times √2, biases zero
lsuv        `lsuv_` of lsuv_cli.torch; lsuv+center, lsuv+channel, lsuv+bounded: its options
norm        PyTorch's own, with batch or layer normalization
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import modern_tables
import pipeline

STEPS, BATCH, CALIBRATION = 150, 64, 256
RATES = {"sgd": (0.001, 0.003, 0.01, 0.03, 0.1), "adamw": (0.0001, 0.0003, 0.001, 0.003, 0.01)}
SEEDS = 3
LSUV: dict[str, dict[str, Any]] = {
    "lsuv": {},
    "lsuv+center": {"bias": "center"},
    "lsuv+channel": {"scale": "channel"},
    "lsuv+bounded": {"residual": "bounded"},
}
INITS = ("default", "kaiming", "orthogonal", *LSUV, "norm")


def network(setting: Any, init: str, seed: int, batch: Any) -> tuple[Any, str]:
    """The initialized network, and what there is to say about it: layers that LSUV could not bring to variance 1."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    net = setting.build(init == "norm")
    for module in net.modules() if init in {"kaiming", "orthogonal"} else ():
        if isinstance(module, nn.Linear | nn.Conv2d):
            if init == "kaiming":
                nn.init.kaiming_normal_(module.weight)
            else:
                nn.init.orthogonal_(module.weight, math.sqrt(2))
            nn.init.zeros_(module.bias)
    if init not in LSUV:
        return net, ""
    from lsuv_cli.torch import lsuv_

    report = lsuv_(net, batch, seed=seed, threads=1, device="cpu", **LSUV[init])
    return net, ", ".join(f"{x.name} {x.status}" for x in report.layers if x.status != "ok")


def train(net: Any, task: Any, optimizer: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """One run: the loss on held-out data at the end, and the training loss every ten steps."""
    import torch

    kinds = {"sgd": lambda p: torch.optim.SGD(p, rate, 0.9), "adamw": lambda p: torch.optim.AdamW(p, rate)}
    steering = kinds[optimizer](net.parameters())
    losses = []
    net.train()
    for step, (x, y) in zip(range(steps), task.batches(seed), strict=False):
        loss = task.loss(net(x), y)
        if step % 10 == 0:
            losses.append(round(float(loss.detach()), 4))
        if not math.isfinite(float(loss.detach())):
            return {"loss": None, "losses": losses}
        steering.zero_grad()
        loss.backward()
        steering.step()
    net.eval()
    with torch.no_grad():
        x, y = task.held_out
        found = float(task.loss(net(x), y))
    return {"loss": round(found, 4) if math.isfinite(found) else None, "losses": losses}


def best(runs: dict[str, Any], optimizer: str) -> float | None:
    """The rate with the least loss on held-out data, of those that the first seed ran with."""
    found = {rate: runs[f"{optimizer} {rate:g} s0"]["loss"] for rate in RATES[optimizer]}
    finite = {rate: loss for rate, loss in found.items() if loss is not None}
    return min(finite, key=finite.__getitem__) if finite else None


class Runs:
    """All runs of one setting, saved one by one."""

    def __init__(self, name: str, tasks: dict[str, Any], folder: Path, steps: int) -> None:
        from modern_networks import SETTINGS

        self.name, self.setting, self.steps = name, SETTINGS[name], steps
        self.task = tasks[self.setting.task]
        self.file = folder / f"{''.join(c if c.isalnum() else '_' for c in name.lower())}.json"
        self.saved: dict[str, Any] = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.saved |= {"name": name, "constant": self.task.constant, "steps": steps}
        self.runs: dict[str, dict[str, Any]] = self.saved.setdefault("runs", {})

    def inits(self) -> Iterator[str]:
        for init in INITS:
            if (init != "norm" or self.setting.normalized) and (init != "lsuv+bounded" or self.setting.residual):
                yield init

    def all(self) -> None:
        for init in self.inits():
            for optimizer, rates in RATES.items():
                for rate in rates:
                    self.one(init, optimizer, rate, 0)
                rate = best(self.runs[init], optimizer)
                for seed in range(1, SEEDS) if rate is not None else ():
                    self.one(init, optimizer, rate, seed)

    def one(self, init: str, optimizer: str, rate: float, seed: int) -> None:
        import torch

        runs = self.runs.setdefault(init, {})
        key = f"{optimizer} {rate:g} s{seed}"
        if key in runs:
            return
        begun = time.process_time()
        net, note = self.initialized(init, seed)
        torch.manual_seed(seed)
        runs[key] = train(net, self.task, optimizer, rate, seed, self.steps)
        runs[key]["cpu_seconds"] = round(time.process_time() - begun, 2)
        if note:
            self.saved.setdefault("notes", {})[f"{init} s{seed}"] = note
        self.saved["versions"] = pipeline.versions("lsuv-cli", "numpy", "onnx", "onnxruntime-gpu", "torch")
        pipeline.write_json(self.file, self.saved)
        print(f"{self.name}: {init} {key}: {runs[key]['loss']}", file=sys.stderr, flush=True)

    def initialized(self, init: str, seed: int) -> tuple[Any, str]:
        """A network with the initial weights, which are made once."""
        import torch

        kept = pipeline.WORK / "modern" / f"{self.file.stem}-{init}-{seed}.pt"
        if not kept.is_file():
            x = torch.cat([next(self.task.batches(1000 + seed + k))[0] for k in range(CALIBRATION // BATCH)])
            net, note = network(self.setting, init, seed, x)
            kept.parent.mkdir(parents=True, exist_ok=True)
            torch.save((net.state_dict(), note), kept)
        state, note = torch.load(kept)
        net = self.setting.build(init == "norm")
        net.load_state_dict(state)
        return net, note


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, metavar="PATH", help="directory with cifar10_train.npz, or the file")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="settings whose names have one of these words")
    parser.add_argument("--tables", action="store_true", help="run nothing; table and plot from saved numbers")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run; default: {STEPS}")
    parser.add_argument("-o", "--output", type=Path, default=pipeline.RESULTS / "modern")
    given = parser.parse_args(arguments)
    if given.tables:
        modern_tables.write(given.output)
        return
    if given.cifar10 is None:
        parser.error("--cifar10 PATH is needed to train; --tables draws what was trained before")
    import torch
    from modern_networks import SETTINGS, tasks

    torch.set_num_threads(1)
    known = tasks(pipeline.load(given.cifar10, "cifar10", "train"), BATCH)
    given.output.mkdir(parents=True, exist_ok=True)
    for name in SETTINGS:
        if not given.only or any(word.lower() in name.lower() for word in given.only):
            Runs(name, known, given.output, given.steps).all()
    modern_tables.write(given.output)


if __name__ == "__main__":
    main()
