"""Tables and plots of the runs that train.py saved, ours beside the paper's."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pipeline
import published
from pipeline import markdown
from published import TITLES
from runs import ACTIVATIONS, AUTHORS, EPOCH, INITS, LONG_STARTS, NETWORKS

README = pipeline.ROOT / "benchmarks" / "README.md"
LONG_NETWORKS = [(n, a) for n in ("fitnet1", "fitnet4") for a in ("relu", "maxout")]
COLOURS = {init: f"C{k}" for k, init in enumerate(INITS)}


def saved_runs(folder: Path) -> dict[str, dict[str, Any]]:
    return {p.stem: found for p in sorted(folder.glob("*.json")) if "run" in (found := json.loads(p.read_text()))}


def ended(found: dict[str, Any]) -> bool:
    """Whether a run has diverged or come to its last iteration."""
    return bool(found["diverged_at"]) or found["iteration"] >= found["run"]["iterations"]


def last_accuracy(found: dict[str, Any]) -> str:
    return f"{100 * found['tests'][-1]['accuracy']:.1f} %" if found["tests"] else "untested"


def ours(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not run"
    if found["outcome"] == "diverged":
        return f"n/c: diverged at iteration {found['diverged_at']}"
    loss = f"loss {found['recent_loss']:.2f}" if found["recent_loss"] is not None else "no loss yet"
    if found["outcome"] == "converged":
        return f"converges: {loss}, {last_accuracy(found)}, at {found['converged_at']}"
    return f"n/c after {found['iteration']}: {loss}"


def table_grid(network: str, runs: dict[str, dict[str, Any]]) -> str:
    rows, differs = [], []
    for init in INITS:
        row = [TITLES[init]]
        for activation in ACTIVATIONS:
            paper, found = published.GRID[network][init][activation], runs.get(f"{network}-{activation}-{init}")
            row += ["n/c" if paper is None else f"{paper:.2f}", ours(found)]
            if found is not None and (found["outcome"] == "converged") != (paper is not None):
                theirs = "does not converge" if paper is None else "converges"
                differs.append(f"{TITLES[init]}, {TITLES[activation]}: in the paper it {theirs}; here: {ours(found)}")
        rows.append(row)
    header = ["init", *(part for a in ACTIVATIONS for part in (f"{TITLES[a]}: paper", "ours"))]
    text = f"### {TITLES[network]}\n\n{markdown(header, rows)}"
    return text + ("\nDifferent from the paper:\n\n- " + "\n- ".join(differs) + "\n" if differs else "")


def last_error(found: dict[str, Any]) -> float:
    return float(100 * (1 - found["tests"][-1]["accuracy"]))


def table_mnist(runs: dict[str, dict[str, Any]], recipe: str = "mnist") -> str:
    """`recipe` is what the names of its runs begin with: mnist or authors."""
    rows = []
    for (init, loss), paper in published.MNIST.items():
        found = [r for name, r in runs.items() if re.fullmatch(rf"{recipe}-{init}-{loss}-s\d+", name)]
        ends = {r["run"]["seed"]: r for r in found if r["iteration"] >= r["run"]["iterations"]}
        errors = [last_error(ends[seed]) for seed in sorted(ends)]
        each = [f"{e:.2f}" for e in errors] + [f"diverged at {n}" for r in found if (n := r["diverged_at"])]
        mean = f"{statistics.fmean(errors):.3f}" if errors else ""
        minutes = f"{statistics.fmean(r['cpu_seconds'] for r in ends.values()) / 60:.0f}" if errors else ""
        rows.append([f"{TITLES[init]}, {loss}", f"{paper:.2f}", ", ".join(each) or "not finished", mean, minutes])
    header = ["", "paper, error %", "ours, error % by seed", "mean", "core minutes each"]
    title = {"mnist": "MNIST, FitNet-MNIST maxout", "authors": "MNIST, FitNet-MNIST maxout, the authors' solver"}
    return f"### {title[recipe]}\n\n" + markdown(header, rows)


def table_tried(runs: dict[str, dict[str, Any]]) -> str:
    """Runs with a setting in place of the authors', beside theirs: a row for each setting, start and loss."""
    cells: dict[tuple[bool, str, str], list[dict[str, Any]]] = {}
    for found in sorted(filter(ended, runs.values()), key=lambda found: found["run"]["seed"]):
        run = found["run"]
        other = ", ".join(f"{k.replace('_', ' ')} {run[k]}" for k, v in AUTHORS.items() if run[k] != v)
        cells.setdefault((bool(other), other or "theirs", f"{TITLES[run['init']]}, {run['loss']}"), []).append(found)
    rows = []
    for (_, settings, cell), each in sorted(cells.items()):
        errors = [last_error(found) for found in each if not found["diverged_at"]]
        told = [f"{e:.2f}" for e in errors] + [f"diverged at {n}" for found in each if (n := found["diverged_at"])]
        mean = f"{statistics.fmean(errors):.3f}" if len(errors) > 1 else ""
        rows.append([settings, cell, str(each[0]["iteration"]), ", ".join(told), mean])
    return "### MNIST, what was tried\n\n" + markdown(["settings", "", "iterations", "error % by seed", "mean"], rows)


def table_long(runs: dict[str, dict[str, Any]]) -> str:
    """A row for each finished or diverged run: the accuracy after each quarter of it."""
    rows = []
    for network, activation in LONG_NETWORKS:
        for start in LONG_STARTS:
            found = runs.get(f"long-{network}-{activation}-{start}")
            if found is None or not ended(found):
                continue
            row = [f"{TITLES[network]}, {TITLES[activation]}", TITLES[start]]
            if found["diverged_at"]:
                rows.append([*row, *[""] * 4, f"diverged at iteration {found['diverged_at']}"])
                continue
            accuracy = {t["iteration"]: f"{100 * t['accuracy']:.1f}" for t in found["tests"]}
            tested = [max(i for i in accuracy if i <= k * found["iteration"] / 4) for k in (1, 2, 3, 4)]
            rows.append([*row, *(accuracy[i] for i in tested), f"{found['cpu_seconds'] / 60:.0f}"])
    header = ["", "start", "a quarter", "half", "three quarters", "the end", "core minutes"]
    return "### CIFAR-10, several epochs\n\n" + markdown(header, rows)


def table_rates(runs: dict[str, dict[str, Any]]) -> str:
    """A row for each network and start that has run at several rates with seed 0: the accuracy at the end for each."""
    cells: dict[tuple[str, str, str], dict[float, str]] = {}
    for name, found in runs.items():
        if found["run"]["seed"] or not ended(found):
            continue
        network, activation, start = name.split("-")[1:4]
        end = f"diverged at {n}" if (n := found["diverged_at"]) else f"{100 * found['tests'][-1]['accuracy']:.1f}"
        cells.setdefault((network, activation, start), {})[found["run"]["rate"]] = end
    several = {key: ends for key, ends in cells.items() if len(ends) > 1}
    rates = sorted({rate for ends in several.values() for rate in ends})
    rows = [
        [f"{TITLES[network]}, {TITLES[activation]}", TITLES[start], *(ends.get(rate, "") for rate in rates)]
        for network, activation in LONG_NETWORKS
        for start in LONG_STARTS
        if (ends := several.get((network, activation, start)))
    ]
    return "### CIFAR-10, other rates\n\n" + markdown(["", "start", *map(str, rates)], rows)


def table_bn(runs: dict[str, dict[str, Any]]) -> str:
    rows = []
    for name, found in runs.items():
        if name.startswith("bn-"):
            per = f"{found['seconds_per_iteration']:.3f}"
            rows.append([name[3:], str(found["iteration"]), per, f"{found['seconds']:.0f}", last_accuracy(found)])
    header = ["FitNet-4", "iterations", "s/iteration", "seconds", "test accuracy"]
    return "### LSUV and batch normalization\n\n" + markdown(header, rows)


def points(found: dict[str, Any]) -> Iterator[tuple[float, float]]:
    every = found["run"]["log_every"]
    for k, loss in enumerate(found["losses"], start=1):
        if loss is not None:
            yield k * every, min(loss, 5.0)


def _curve(axes: Any, pairs: Sequence[tuple[float, float]], label: str, **style: Any) -> None:
    """A line, and its name in the legend even where there is nothing to draw."""
    axes.plot([x for x, _ in pairs], [y for _, y in pairs], label=label, **style)


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def plot_curves(network: str, runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Figure 2: a panel for each non-linearity, a line for each initialization."""

    def losses(axes: Any) -> None:
        for a, activation in zip([a for row in axes for a in row], ACTIVATIONS, strict=True):
            for init in INITS:
                if found := runs.get(f"{network}-{activation}-{init}"):
                    mark = f" (diverged at {found['diverged_at']})" if found["outcome"] == "diverged" else ""
                    _curve(a, list(points(found)), TITLES[init] + mark, color=COLOURS[init])
            a.axhline(math.log(10), color="0.6", linestyle=":")
            _finish(a, f"{TITLES[network]}, {TITLES[activation]}", "iteration", "training loss")

    def accuracies(axes: Any) -> None:
        for a, activation in zip([a for row in axes for a in row], ACTIVATIONS, strict=True):
            for init in INITS:
                if found := runs.get(f"{network}-{activation}-{init}"):
                    tests = [(t["iteration"], 100 * t["accuracy"]) for t in found["tests"]]
                    _curve(a, tests, TITLES[init], color=COLOURS[init], marker=".")
            _finish(a, f"{TITLES[network]}, {TITLES[activation]}", "iteration", "test accuracy, %")

    pipeline.figure(folder / f"{network}_loss.png", 2, 2, losses, (4.2, 3.0))
    pipeline.figure(folder / f"{network}_accuracy.png", 2, 2, accuracies, (4.2, 3.0))


def plot_case(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    def draw(axes: Any) -> None:
        for init in ("given", "lsuv"):
            if found := runs.get(f"fitnet4-relu-{init}"):
                _curve(axes[0][0], list(points(found)), {"given": "as given", "lsuv": "after lsuv init"}[init])
        axes[0][0].axhline(math.log(10), color="0.6", linestyle=":", label="guessing")
        _finish(axes[0][0], "FitNet-4, ReLU, CIFAR-10, 19 layers", "iteration", "training loss")

    pipeline.figure(folder / "case.png", 1, 1, draw, (6.0, 3.6))


def plot_bn(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    def draw(axes: Any) -> None:
        for name, found in runs.items():
            if name.startswith("bn-"):
                tests = found["tests"]
                _curve(axes[0][0], [(t["seconds"] / 60, 100 * t["accuracy"]) for t in tests], name[3:])
                _curve(axes[0][1], [(t["iteration"], 100 * t["accuracy"]) for t in tests], name[3:])
        _finish(axes[0][0], "FitNet-4", "minutes", "test accuracy, %")
        _finish(axes[0][1], "FitNet-4", "iteration", "test accuracy, %")

    pipeline.figure(folder / "bn.png", 1, 2, draw)


def plot_long(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """The paper's Figure 3: a row for each network, by epochs and by minutes of a core, a line for each start."""
    trained = [pair for pair in LONG_NETWORKS if any(name.startswith(f"long-{'-'.join(pair)}-") for name in runs)]

    def draw(axes: Any) -> None:
        for row, (network, activation) in zip(axes, trained, strict=True):
            for k, start in enumerate(LONG_STARTS):
                found = runs.get(f"long-{network}-{activation}-{start}")
                if found is None:
                    continue
                tests = [(t["iteration"], 100 * t["accuracy"]) for t in found["tests"]]
                minutes = found["cpu_seconds"] / 60 / max(1, found["iteration"])
                mark = f" (diverged at {found['diverged_at']})" if found["diverged_at"] else ""
                for axis, unit in zip(row, (1 / EPOCH, minutes), strict=True):
                    _curve(axis, [(i * unit, a) for i, a in tests], TITLES[start] + mark, color=f"C{k}")
            for axis, x in zip(row, ("epochs", "minutes of a core"), strict=True):
                _finish(axis, f"{TITLES[network]}, {TITLES[activation]}", x, "test accuracy, %")

    pipeline.figure(folder / "long.png", len(trained), 2, draw, (4.6, 2.9))


def plot_mnist(runs: dict[str, dict[str, Any]], folder: Path, recipe: str = "mnist") -> None:
    def draw(axes: Any) -> None:
        for name, found in runs.items():
            if name.startswith(f"{recipe}-"):
                pairs = [(t["iteration"], 100 * (1 - t["accuracy"])) for t in found["tests"]]
                init, loss, seed = name.removeprefix(f"{recipe}-").split("-")
                style = {"color": COLOURS[init], "linestyle": "-" if loss == "softmax" else ":"}
                _curve(axes[0][0], pairs, f"{TITLES[init]}, {loss}, seed {seed[1:]}", **style)
        _finish(axes[0][0], "FitNet-MNIST, maxout", "iteration", "test error, %")

    pipeline.figure(folder / "mnist.png", 1, 1, draw, (6.0, 3.8))


@dataclass(frozen=True)
class Shown:
    """What `tables` writes into the README of a folder, beside the tables themselves."""

    sentence: str  # before the table
    plot: str | None = None  # behind it
    table: Callable[[dict[str, dict[str, Any]]], str] | None = None  # in place of those that the names of its runs give
    beside: str | None = None  # a folder whose runs stand in the table too


SHOWN = {
    "train_authors": Shown("Test errors at the end of these runs, and on the way:", "mnist.png"),
    "train_authors_53_epochs": Shown("Test errors at the end of these longer runs, and on the way:", "mnist.png"),
    "train_authors_tried": Shown(
        "Runs of 8 epochs in bfloat16, with their settings and with one that is not theirs:", table=table_tried
    ),
    "train_long": Shown("Test accuracies on the way and at the end, in percent:", "long.png"),
    "train_long_rates": Shown(
        "Test accuracies at the end of 20 epochs, in percent, by the rate at the start:",
        table=table_rates,
        beside="train_long",
    ),
}


def text_of(folder: Path) -> str:
    """All tables that the runs of a folder give."""
    runs, shown = saved_runs(folder), SHOWN.get(folder.name)
    if shown and shown.table:
        more = saved_runs(folder.with_name(shown.beside)) if shown.beside else {}
        return "\n".join([shown.table(runs | more), hours_of(runs)])
    parts = []
    for recipe in ("mnist", "authors"):
        if any(name.startswith(f"{recipe}-") for name in runs):
            parts.append(table_mnist(runs, recipe))
    parts += [table_grid(n, runs) for n in NETWORKS if any(name.startswith(f"{n}-") for name in runs)]
    if any(name.startswith("bn-") for name in runs):
        parts.append(table_bn(runs))
    if any(name.startswith("long-") for name in runs):
        parts.append(table_long(runs))
    return "\n".join([*parts, hours_of(runs)])


def hours_of(runs: dict[str, dict[str, Any]]) -> str:
    hours = sum(r["seconds"] for r in runs.values()) / 3600
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return f"{count}, {hours:.1f} hours of training (two at a time, where they were sharded).\n"


def plots(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    for recipe in ("mnist", "authors"):
        if any(name.startswith(f"{recipe}-") for name in runs):
            plot_mnist(runs, folder, recipe)
    for network in NETWORKS:
        if any(name.startswith(f"{network}-") for name in runs):
            plot_curves(network, runs, folder)
    if "fitnet4-relu-given" in runs:
        plot_case(runs, folder)
    if any(name.startswith("bn-") for name in runs):
        plot_bn(runs, folder)
    if any(name.startswith("long-") for name in runs):
        plot_long(runs, folder)


def part_of_readme(folder: str, text: str) -> str:
    """A folder's sentence, table and plot."""
    rows = "".join(line + "\n" for line in text.splitlines() if line.startswith("|"))
    shown = SHOWN[folder]
    plot = f"\n![](results/{folder}/{shown.plot})\n" if shown.plot else ""
    return f"\n{shown.sentence}\n\n{rows}{plot}\n"


def with_part(readme: str, folder: str, part: str) -> str:
    """The README with what stands between the folder's two marks replaced."""
    begin, end = f"<!-- {folder} -->\n", f"<!-- end of {folder} -->\n"
    before, found, rest = readme.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"benchmarks/README.md has no lines {begin.strip()} and {end.strip()} for the table")
    return before + begin + part + end + after


def tables(folder: Path) -> None:
    runs = saved_runs(folder)
    if not runs:
        return
    text = text_of(folder)
    pipeline.write_text(folder / "tables.md", text)
    print(text)
    shown = SHOWN.get(folder.name)
    if not (shown and shown.table):
        plots(runs, folder)
    if shown and folder.resolve().parent == pipeline.RESULTS:
        part = part_of_readme(folder.name, text)
        pipeline.write_text(README, with_part(README.read_text(), folder.name, part))
