"""Train the paper's networks from files that `lsuv init` wrote, and see which initializations learn.

    python benchmarks/train.py mnist  --mnist PATH      # FitNet-MNIST to the end: softmax and hinge, two seeds
    python benchmarks/train.py authors --mnist PATH     # the same with the authors' own solver, three seeds
    python benchmarks/train.py grid   --cifar10 PATH    # FitNet-4 and FitResNet-4, initializations x non-linearities
    python benchmarks/train.py case   --cifar10 PATH    # FitNet-4 ReLU with LSUV and as build.py left it
    python benchmarks/train.py long   --cifar10 PATH    # FitNet-1 and FitNet-4 for several epochs
    python benchmarks/train.py bn     --cifar10 PATH    # LSUV against batch normalization, by wall-clock time
    python benchmarks/train.py time                     # seconds an iteration takes
    python benchmarks/train.py tables                   # tables and plots from the saved runs

Each run goes the whole road (build.py, `lsuv init` as a command, onnx2torch) and writes one JSON file. Ctrl-C saves a
checkpoint and stops; the same command goes on from there, bit for bit, and skips what is finished. Given more
--iterations, a finished run with a constant learning rate goes on too; with --undecided only those that have neither
converged nor diverged. `--only GLOB` picks runs by name, `--shard 1/2` every second one: two processes of one thread
make better use of two cores than one process of two.

The recipe is the authors' (github.com/ducha-aiki/LSUVinit, examples/lsuv): SGD with momentum 0.9 and learning rate
0.01, weight decay 0.0005 (CIFAR-10: not on biases), CIFAR-10 mirrored and shifted by up to 4 pixels, no gradient
clipping; MNIST in batches of 64 with dropout 0.3 before the classifier. Different here: images normalized per channel,
where the authors have global contrast normalization (MNIST: a division by 250); SGD for MNIST too, where their files
have RMSProp (`authors` has RMSProp and the division); and, because these runs are about the first epoch, CIFAR-10 in
batches of 64, not 128, and without the dropout of 0.2 (on the images, behind the poolings and before the classifier)
that their files have and the paper's text does not mention: `--batch-size 128 --dropout 0.2` has both.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pipeline
from numpy.typing import NDArray
from pipeline import Images
from runs import (
    ACTIVATIONS,
    AUTHORS,
    EPOCH,
    NETWORKS,
    Run,
    State,
    authors_runs,
    bn_runs,
    case_runs,
    grid_runs,
    long_runs,
    mnist_runs,
)
from train_tables import SHOWN, tables

CHECKPOINT_SECONDS = 120


# --- Training ---


class Interrupted(Exception):
    """Somebody pressed Ctrl-C; what was done is saved."""


class Interruption:
    """Remembers the first SIGINT or SIGTERM, so that a run ends between two iterations. The second one kills."""

    def __init__(self) -> None:
        self.wanted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _frame: Any) -> None:
        self.wanted = True
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Data:
    train: Images
    test: Images


@lru_cache(maxsize=1)
def shuffled(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(size)


def batch(run: Run, data: Images, iteration: int) -> tuple[Any, Any]:
    """The iteration's mini-batch. It depends on the seed and the iteration only, so a run can go on anywhere."""
    import torch

    per_epoch = len(data) // run.batch_size
    epoch, k = divmod(iteration, per_epoch)
    order = shuffled(run.seed, epoch, len(data))
    which = order[k * run.batch_size : (k + 1) * run.batch_size]
    images = data.normalized(which)
    if run.augment:
        random = np.random.default_rng((run.seed, iteration, 1))
        padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
        for n, (down, right, mirror) in enumerate(random.integers(0, (9, 9, 2), (len(images), 3))):
            cut = padded[n, :, down : down + images.shape[2], right : right + images.shape[3]]
            images[n] = cut[:, :, ::-1] if mirror else cut
    return torch.from_numpy(images), torch.from_numpy(data.labels[which])


def loss_of(run: Run) -> Callable[[Any, Any], Any]:
    import torch
    from torch.nn import functional

    if run.loss == "softmax":
        return functional.cross_entropy

    def hinge(logits: Any, labels: Any) -> Any:
        """Caffe's HingeLoss, which the authors use: one against all, summed over the classes."""
        signs = 2 * functional.one_hot(labels, logits.shape[1]).to(logits.dtype) - 1
        return torch.relu(1 - signs * logits).sum(1).mean()

    return hinge


def optimizer_of(run: Run, module: Any) -> Any:
    import torch

    with_decay = [p for p in module.parameters() if run.decay_biases or p.ndim > 1]
    without = [p for p in module.parameters() if not run.decay_biases and p.ndim <= 1]
    groups = [{"params": with_decay, "weight_decay": run.decay}, {"params": without, "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    if run.optimizer == "rmsprop":
        return torch.optim.RMSprop(groups, lr=run.rate, alpha=run.rms_decay, eps=1e-8)
    return torch.optim.SGD(groups, lr=run.rate, momentum=0.9)


def load_module(run: Run, work: Path, data: Images, threads: int) -> tuple[Any, dict[str, Any]]:
    """The whole road: build.py, `lsuv init`, onnx2torch; then dropout, which the inference graphs leave out."""
    import torch
    from torch.nn import functional

    folder = work / run.name
    folder.mkdir(parents=True, exist_ok=True)
    built = pipeline.build(folder / "built.onnx", run.network, run.activation, run.batch_norm)
    calibration = folder / "calibration.npy"
    np.save(calibration, data.normalized(pipeline.chosen(data, run.calibration_images, run.seed)))
    report = pipeline.initialize(built, folder / "start.onnx", run.init, calibration, run.seed, threads)
    module = pipeline.to_torch(folder / "start.onnx")
    calibration.unlink()
    built.unlink()

    def drop(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (functional.dropout(inputs[0], run.dropout, layer.training),)

    for name in run.dropout_before:
        module.get_submodule(name).register_forward_pre_hook(drop)
    # 10 to 15 % faster for FitNet-4 with ReLU.
    return module.to(memory_format=torch.channels_last), report


def test(module: Any, run: Run, data: Images) -> dict[str, float]:
    import torch

    module.eval()
    right, loss, count = 0, 0.0, min(run.test_images, len(data))
    with torch.no_grad():
        for start in range(0, count, 250):
            which = slice(start, min(start + 250, count))
            labels = torch.from_numpy(data.labels[which])
            logits = module(torch.from_numpy(data.normalized(which)))
            right += int((logits.argmax(1) == labels).sum())
            loss += float(loss_of(run)(logits, labels)) * len(labels)
    module.train()
    return {"accuracy": right / count, "loss": loss / count if math.isfinite(loss) else -1.0}


class Trainer:
    """One run: from its checkpoint, if it has one, to its last iteration."""

    def __init__(self, run: Run, data: Data, output: Path, work: Path, threads: int) -> None:
        self.run, self.data, self.threads = run, data, threads
        self.file, self.checkpoint = output / f"{run.name}.json", work / run.name / "checkpoint.pt"
        self.work = work
        self.state = State()
        self.report: dict[str, Any] = {}

    def finished(self, undecided: bool) -> bool:
        """Whether there is nothing (more) to do."""
        if not self.file.is_file():
            return False
        saved = json.loads(self.file.read_text())
        if not self.run.same_start(saved["run"]):
            what = ", ".join(sorted(self.run.changed(saved["run"])))
            raise SystemExit(f"{self.file.name} holds a run with other settings ({what}): delete it to start anew")
        known = saved["outcome"] == "diverged" or (undecided and saved["outcome"] == "converged")
        return known or saved["iteration"] >= self.run.iterations

    def train(self, interruption: Interruption, tell: Callable[[State], None]) -> None:
        import torch

        torch.set_num_threads(self.threads)
        run, state = self.run, self.state
        module, self.report = load_module(run, self.work, self.data.train, self.threads)
        module.train()
        optimizer = optimizer_of(run, module)
        if self.checkpoint.is_file():
            saved = torch.load(self.checkpoint, weights_only=False)
            if run.same_start(saved["run"]):
                module.load_state_dict(saved["module"])
                optimizer.load_state_dict(saved["optimizer"])
                state = self.state = State(**saved["state"])
        loss_function = loss_of(run)
        kept = time.monotonic()
        while state.iteration < run.iterations and state.diverged_at is None:
            begun, cpu = time.perf_counter(), time.process_time()
            torch.manual_seed(run.seed * 1_000_003 + state.iteration)  # dropout
            for group in optimizer.param_groups:
                group["lr"] = run.rate_at(state.iteration)
            x, y = batch(run, self.data.train, state.iteration)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=run.bfloat16):
                logits = module(x.to(memory_format=torch.channels_last))
            loss = loss_function(logits.float(), y)
            loss.backward()
            optimizer.step()
            value = float(loss.detach())
            state.iteration += 1
            state.seconds += time.perf_counter() - begun
            state.cpu_seconds += time.process_time() - cpu
            state.pending.append(value)
            if not math.isfinite(value):
                state.diverged_at = state.iteration
            if len(state.pending) == run.log_every or state.diverged_at:
                mean = statistics.fmean(state.pending)
                state.losses.append(float(f"{mean:.5g}") if math.isfinite(mean) else None)
                state.pending.clear()
            if state.diverged_at is None and (
                state.iteration % run.test_every == 0 or state.iteration == run.iterations
            ):
                state.tests.append(
                    {
                        "iteration": state.iteration,
                        "seconds": round(state.seconds, 2),
                        **{k: round(v, 5) for k, v in test(module, run, self.data.test).items()},
                    }
                )
            tell(state)
            if interruption.wanted or time.monotonic() - kept > CHECKPOINT_SECONDS:
                self.save(module, optimizer)
                kept = time.monotonic()
            if interruption.wanted:
                raise Interrupted
        self.save(module, optimizer)

    def save(self, module: Any, optimizer: Any) -> None:
        import torch

        scratch = self.checkpoint.with_suffix(".new")
        state = {
            "run": self.run.settings(),
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "state": dataclasses.asdict(self.state),
        }
        torch.save(state, scratch)
        scratch.replace(self.checkpoint)
        self.write()

    def write(self) -> None:
        run, state = self.run, self.state
        saved = {
            "run": run.settings(),
            "outcome": state.outcome(run),
            "iteration": state.iteration,
            "converged_at": state.converged_at(run),
            "diverged_at": state.diverged_at,
            "recent_loss": state.recent(run),
            "seconds": round(state.seconds, 1),
            "cpu_seconds": round(state.cpu_seconds, 1),
            "seconds_per_iteration": round(state.seconds / max(1, state.iteration), 4),
            "threads": self.threads,
            "lsuv_seconds": self.report.get("seconds", {}).get("total"),
            "versions": pipeline.versions("lsuv-cli", "numpy", "onnx", "onnx2torch", "torch"),
            "tests": state.tests,
            "losses": state.losses,
        }
        pipeline.write_json(self.file, saved)


def train_all(runs: Sequence[Run], given: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    dataset = runs[0].dataset if runs else "cifar10"
    path: Path = given.mnist if dataset == "mnist" else given.cifar10
    statistics = pipeline.DIVIDED if runs and runs[0].images == "divided" else None
    data = Data(*(pipeline.load(path, dataset, split, statistics) for split in ("train", "test")))
    interruption = Interruption()
    console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 110)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        overall = bar.add_task("runs", total=len(runs))
        current = bar.add_task("", total=1)
        for run in runs:
            trainer = Trainer(run, data, given.output, given.work, given.threads)
            if trainer.finished(given.undecided):
                bar.advance(overall)
                continue
            bar.reset(current, total=run.iterations, description=run.name)

            def tell(state: State, run: Run = run) -> None:
                loss = state.losses[-1] if state.losses else math.nan
                bar.update(current, completed=state.iteration, description=f"{run.name} loss {loss or math.nan:.3f}")
                if state.tests and state.tests[-1]["iteration"] == state.iteration:
                    now, accuracy = f"{state.seconds:.0f} s", f"{100 * state.tests[-1]['accuracy']:.2f} %"
                    console.print(f"{run.name} {state.iteration}/{run.iterations}: loss {loss}, test {accuracy}, {now}")

            try:
                trainer.train(interruption, tell)
            except Interrupted:
                console.print(f"interrupted; {run.name} is saved at iteration {trainer.state.iteration}")
                raise SystemExit(130) from None
            console.print(f"{run.name}: {trainer.state.outcome(run)}, {trainer.state.seconds:.0f} s of training")
            bar.advance(overall)


# --- Time ---


def measure_time(given: argparse.Namespace) -> None:
    """The fastest of a few iterations of each network, and what the grid would take."""
    import torch

    random = np.random.default_rng(0)
    found: dict[str, Any] = {"load_average": [round(v, 2) for v in os.getloadavg()], "batch_size": 128, "seconds": {}}
    cases = [("fitnet_mnist", "maxout", None), ("fitnet4", "relu", "before")]
    cases += [(network, activation, None) for network in NETWORKS for activation in ("relu", "tanh", "maxout")]
    for network, activation, norm in cases:
        built = pipeline.build(given.work / "time.onnx", network, activation, norm)
        module = pipeline.to_torch(built).train().to(memory_format=torch.channels_last)
        shape = (128, 1, 28, 28) if network == "fitnet_mnist" else (128, 3, 32, 32)
        x = torch.from_numpy(random.standard_normal(shape, np.float32)).to(memory_format=torch.channels_last)
        y = torch.from_numpy(random.integers(0, 10, 128))
        name = f"{network}-{activation}" + (f"-bn-{norm}" if norm else "")
        found["seconds"][name] = {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            times = []
            for _ in range(given.repeats + 1):
                begun = time.perf_counter()
                torch.nn.functional.cross_entropy(module(x), y).backward()
                times.append(time.perf_counter() - begun)
            found["seconds"][name][str(threads)] = round(min(times[1:]), 4)
        print(name, found["seconds"][name], flush=True)
    pipeline.write_json(given.output / "time.json", found)


# --- The command line ---


def shard(text: str) -> tuple[int, int]:
    k, _, n = text.partition("/")
    if not (k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N, such as 1/2")
    return int(k), int(n)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("mnist", "FitNet-MNIST maxout to the end"),
        ("authors", "FitNet-MNIST maxout with the authors' own solver"),
        ("grid", "FitNet-4 and FitResNet-4 on CIFAR-10, 32 runs"),
        ("case", "FitNet-4 ReLU with and without LSUV"),
        ("bn", "LSUV against batch normalization"),
        ("long", "FitNet-1 and FitNet-4 on CIFAR-10 for several epochs, 15 runs"),
        ("time", "seconds an iteration takes, on 1 and 2 threads"),
        ("tables", "tables and plots from the saved runs"),
    ):
        command = commands.add_parser(name, help=text)
        mnist = name in ("mnist", "authors")
        folder = {"authors": "train_authors", "long": "train_long"}.get(name, "train")
        if name == "tables":
            folders = [pipeline.RESULTS / folder for folder in ("train", *SHOWN)]
            command.add_argument("-o", "--output", type=Path, nargs="+", default=folders, help="folders with results")
            continue
        command.add_argument("-o", "--output", type=Path, default=pipeline.RESULTS / folder, help="results as JSON")
        command.add_argument("--work", type=Path, default=pipeline.WORK, help="models and checkpoints")
        if name == "time":
            command.add_argument("--repeats", type=int, default=3)
            continue
        data = "mnist" if mnist else "cifar10"
        command.add_argument(f"--{data}", type=Path, required=True, metavar="PATH", help=f"directory with {data}_*.npz")
        command.add_argument("--threads", type=int, default=1)
        # 937 iterations of 64 are an epoch of MNIST; 200 are 0.64 epochs of 20,000 images. The authors have 50,000.
        default = {"mnist": 15 * 937, "authors": 8 * 937, "long": 20 * EPOCH}.get(name, 200)
        command.add_argument("--iterations", type=int, default=default, help=f"of each run; default {default}")
        command.add_argument("--batch-size", type=int, default=64)
        command.add_argument("--only", nargs="+", metavar="GLOB", default=["*"], help="runs by name: 'fitnet4-relu-*'")
        command.add_argument("--shard", type=shard, default=(1, 1), metavar="K/N", help="the K-th of N parts")
        command.add_argument("--bfloat16", action="store_true", help="faster steps; with another -o than without")
        command.add_argument("--undecided", action="store_true", help="let converged runs be")
        command.add_argument("--list", action="store_true", help="the names of the runs, and do nothing")
        if mnist:
            command.add_argument("--seeds", type=int, default=3 if name == "authors" else 2)
        else:
            command.add_argument("--seed", type=int, default=0, help="of the weights and of all else that is random")
            command.add_argument("--rate", type=float, default=0.01, help="learning rate; if not 0.01, in the names")
            command.add_argument("--dropout", type=float, default=0.0, help="with another -o than 0's")
        if name == "authors":
            command.add_argument("--optimizer", choices=("rmsprop", "sgd"), default=AUTHORS["optimizer"])
            command.add_argument("--rms-decay", type=float, default=AUTHORS["rms_decay"])
            command.add_argument("--rate", type=float, default=AUTHORS["rate"], help="learning rate")
            command.add_argument("--images", choices=("divided", "normalized"), default=AUTHORS["images"])
        if name == "bn":
            command.add_argument("--activation", choices=ACTIVATIONS, default="relu")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    given = command_line().parse_args(arguments)
    if given.command == "tables":
        for folder in given.output:
            tables(folder)
        return
    if given.command == "time":
        measure_time(given)
        return
    chosen: dict[str, Any] = {option: getattr(given, option) for option in ("iterations", "batch_size", "bfloat16")}
    if given.command not in ("mnist", "authors"):
        chosen |= {"seed": given.seed, "rate": given.rate, "dropout": given.dropout}
    match given.command:
        case "mnist":
            runs = mnist_runs(given.seeds, **chosen)
        case "authors":
            runs = authors_runs(given.seeds, **chosen, **{option: getattr(given, option) for option in AUTHORS})
        case "grid":
            runs = grid_runs(**chosen)
        case "case":
            runs = case_runs(**chosen)
        case "long":
            runs = long_runs(**chosen)
        case _:
            runs = bn_runs(given.activation, **chosen)
    runs = [run for run in runs if any(fnmatch.fnmatch(run.name, glob) for glob in given.only)]
    k, n = given.shard
    runs = runs[k - 1 :: n]
    if given.list:
        print("\n".join(run.name for run in runs))
        return
    train_all(runs, given)


if __name__ == "__main__":
    main()
