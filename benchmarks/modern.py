"""Does LSUV help networks that people train today? Small networks of many kinds, each with its own best learning rate.

    python benchmarks/modern.py --data PATH                   # all runs; goes on where it was interrupted
    python benchmarks/modern.py --data PATH --only GPT ViT    # networks whose names have one of these words
    python benchmarks/modern.py --tables                      # table and plot again, from the saved numbers

For each architecture (modern_networks.py), each initialization and each of SGD with momentum and AdamW, every learning
rate of one grid is tried with the first seed, and the best one, by the loss on held-out data, with two more. A run has
the same number of steps and the same batches whatever its initialization is. A run *trains* if its loss on held-out
data ends below LEARNED times that of the best constant answer.

default     as PyTorch makes the network
kaiming     Kaiming-normal weights for ReLU, biases zero
orthogonal  orthogonal weights times √2, biases zero
lsuv        `lsuv_` of lsuv_cli.torch; lsuv+center, lsuv+channel, lsuv+bounded: its options
own         SIREN: the initialization of its authors; lsuv+target: LSUV with the target variance 1/900
norm        PyTorch's own, with batch or layer normalization; norm+lsuv: the same network after `lsuv_`
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import modern_tables
import pipeline

STEPS, BATCH, CALIBRATION = 500, 16, 256
RATES = {"sgd": (0.001, 0.003, 0.01, 0.03, 0.1), "adamw": (0.0001, 0.0003, 0.001, 0.003, 0.01)}
SEEDS = modern_tables.SEEDS
LSUV: dict[str, dict[str, Any]] = {
    "lsuv": {},
    "lsuv+center": {"bias": "center"},
    "lsuv+channel": {"scale": "channel"},
    "lsuv+bounded": {"residual": "bounded"},
    "lsuv+target": {"target_variance": 1 / 900},  # SIREN: its sines take 30 times the output of a layer
}
INITS = modern_tables.INITS
NORMALIZED = ("norm", "norm+lsuv")


def network(setting: Any, init: str, seed: int, batch: Any) -> tuple[Any, str]:
    """The initialized network, and what there is to say about it: layers that LSUV could not bring to variance 1."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    net = setting.build(init in NORMALIZED)
    if init == "own":
        setting.own(net)
    for module in net.modules() if init in {"kaiming", "orthogonal"} else ():
        if isinstance(module, nn.Linear | nn.Conv2d):
            if init == "kaiming":
                nn.init.kaiming_normal_(module.weight)
            else:
                nn.init.orthogonal_(module.weight, math.sqrt(2))
            nn.init.zeros_(module.bias)
    if "lsuv" not in init:
        return net, ""
    from lsuv_cli.torch import lsuv_

    report = lsuv_(net, batch, seed=seed, threads=1, device="cpu", **LSUV.get(init, {}))
    return net, ", ".join(f"{x.name} {x.status}" for x in report.layers if x.status != "ok")


def best(runs: dict[str, Any], optimizer: str) -> float | None:
    """The rate with the least loss on held-out data, of those that the first seed ran with."""
    found = {rate: runs[f"{optimizer} {rate:g} s0"]["loss"] for rate in RATES[optimizer]}
    finite = {rate: loss for rate, loss in found.items() if loss is not None}
    return min(finite, key=finite.__getitem__) if finite else None


class Runs:
    """All runs of one setting, saved as they end."""

    def __init__(self, name: str, tasks: dict[str, Any], folder: Path, steps: int) -> None:
        from modern_networks import SETTINGS

        self.name, self.setting, self.steps = name, SETTINGS[name], steps
        self.task = tasks[self.setting.task]
        self.file = folder / f"{''.join(c if c.isalnum() else '_' for c in name.lower())}.json"
        self.saved: dict[str, Any] = json.loads(self.file.read_text()) if self.file.is_file() else {}
        if self.saved.get("steps", steps) != steps:
            raise SystemExit(f"{self.file} has runs of {self.saved['steps']} steps: delete it, or give another -o")
        self.saved |= {"name": name, "order": list(SETTINGS).index(name), "steps": steps}
        self.saved["constant"] = self.task.constant
        self.runs: dict[str, dict[str, Any]] = self.saved.setdefault("runs", {})

    def inits(self) -> Iterator[str]:
        for init in INITS:
            left_out = (
                (init in NORMALIZED and not self.setting.normalized)
                or (init == "lsuv+bounded" and not self.setting.residual)
                or (init in {"own", "lsuv+target"} and self.setting.own is None)
            )
            if not left_out:
                yield init

    def search(self) -> None:
        """Every rate, with the first seed."""
        for init in self.inits():
            self.train(init, [(optimizer, rate, 0) for optimizer, rates in RATES.items() for rate in rates])

    def repeat(self) -> None:
        """The best rate, with the other seeds."""
        for init in self.inits():
            rates = {optimizer: best(self.runs[init], optimizer) for optimizer in RATES}
            found = [(optimizer, rate) for optimizer, rate in rates.items() if rate is not None]
            self.train(init, [(optimizer, rate, seed) for optimizer, rate in found for seed in range(1, SEEDS)])

    def train(self, init: str, wanted: Sequence[tuple[str, float, int]]) -> None:
        """Those of the runs that are not saved yet, all at once."""
        from modern_training import Run, train

        saved = self.runs.setdefault(init, {})
        runs = [run for run in itertools.starmap(Run, wanted) if run.key not in saved]
        if not runs:
            return
        begun = time.process_time()
        nets = []
        for run in runs:
            net, note = self.initialized(init, run.seed)
            nets.append(net)
            if note:
                self.saved.setdefault("notes", {})[f"{init} s{run.seed}"] = note
        for run, found in zip(runs, train(nets, self.task, runs, self.steps), strict=True):
            saved[run.key] = found
        for run in runs:
            saved[run.key]["cpu_seconds"] = round((time.process_time() - begun) / len(runs), 2)
        self.saved["versions"] = pipeline.versions("lsuv-cli", "numpy", "onnx", "onnxruntime-gpu", "torch")
        pipeline.write_json(self.file, self.saved)
        text = ", ".join(f"{run.key}: {saved[run.key]['loss']}" for run in runs)
        print(f"{self.name}: {init}: {text}", file=sys.stderr, flush=True)

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
        net = self.setting.build(init in NORMALIZED)
        net.load_state_dict(state)
        return net, note


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="PATH", help="with mnist_train.npz and cifar10_train.npz")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="networks by a part of their names; in this order")
    parser.add_argument("--tables", action="store_true", help="run nothing; table and plot from saved numbers")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run; default: {STEPS}")
    parser.add_argument("-o", "--output", type=Path, default=pipeline.RESULTS / "modern")
    given = parser.parse_args(arguments)
    if given.tables:
        modern_tables.write(given.output)
        return
    if given.data is None:
        parser.error("--data PATH is needed to train; --tables draws what was trained before")
    import torch
    from modern_networks import SETTINGS, tasks

    torch.set_num_threads(1)
    digits, photographs = (pipeline.load(given.data, name, "train") for name in ("mnist", "cifar10"))
    known = tasks(digits, photographs, BATCH)
    given.output.mkdir(parents=True, exist_ok=True)
    for word in given.only or [""]:
        chosen = [Runs(name, known, given.output, given.steps) for name in SETTINGS if word.lower() in name.lower()]
        for runs in chosen:
            runs.search()
        for runs in chosen:
            runs.repeat()
    modern_tables.write(given.output)


if __name__ == "__main__":
    main()
