"""The table and the plot of what modern.py measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pipeline
from pipeline import markdown

LEARNED = 0.9  # of the loss of the best constant answer: a run that ends below it has learned something
INITS = ("default", "kaiming", "orthogonal", "lsuv", "lsuv+center", "lsuv+channel", "lsuv+bounded", "norm")
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
NEAR = 0.02  # relative: losses that differ by less are called equal


def load(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def learned(saved: dict[str, Any], run: dict[str, Any]) -> bool:
    return run["loss"] is not None and run["loss"] < LEARNED * saved["constant"]


def share(saved: dict[str, Any], init: str, optimizer: str) -> float | None:
    """Of the learning rates of the grid, how many train (the first seed)."""
    runs = {k: v for k, v in saved["runs"].get(init, {}).items() if k.startswith(optimizer) and k.endswith(" s0")}
    return statistics.fmean(learned(saved, run) for run in runs.values()) if runs else None


def at_best(saved: dict[str, Any], init: str, optimizer: str) -> list[float]:
    """The losses of all seeds at the initialization's own best rate; empty if no rate gave a finite one."""
    runs = {k: v for k, v in saved["runs"].get(init, {}).items() if k.startswith(optimizer)}
    first = {k: v["loss"] for k, v in runs.items() if k.endswith(" s0") and v["loss"] is not None}
    if not first:
        return []
    rate = min(first, key=first.__getitem__).removesuffix(" s0")
    return [v["loss"] for k, v in runs.items() if k.startswith(f"{rate} s") and v["loss"] is not None]


def table_of(settings: list[dict[str, Any]], optimizer: str) -> str:
    """Loss on held-out data at each initialization's best rate, and in brackets the share of rates that train."""
    rows = []
    for saved in settings:
        means = {init: losses for init in INITS if (losses := at_best(saved, init, optimizer))}
        least = min((statistics.fmean(v) for k, v in means.items() if k != "norm"), default=0.0)
        row = [saved["name"], f"{saved['constant']:.3f}"]
        for init in INITS:
            if init not in saved["runs"]:
                row.append("")
                continue
            trains = share(saved, init, optimizer)
            if init not in means or trains is None:
                row.append("diverges")
                continue
            mean = statistics.fmean(means[init])
            mark = "**" if mean <= least * (1 + NEAR) and init != "norm" else ""
            row.append(f"{mark}{mean:.3f}{mark} ({trains:.0%})")
        rows.append(row)
    return markdown(["network", "constant answer", *INITS], rows)


def summary(settings: list[dict[str, Any]]) -> str:
    """Over all settings: the share of rates that train, and against PyTorch's default, where the loss is lower."""
    rows = []
    for optimizer, title in OPTIMIZERS.items():
        for init in INITS:
            shares = [found for saved in settings if (found := share(saved, init, optimizer)) is not None]
            pairs = [
                (statistics.fmean(ours), statistics.fmean(theirs))
                for saved in settings
                if (ours := at_best(saved, init, optimizer)) and (theirs := at_best(saved, "default", optimizer))
            ]
            lower = sum(ours < theirs * (1 - NEAR) for ours, theirs in pairs)
            higher = sum(ours > theirs * (1 + NEAR) for ours, theirs in pairs)
            if shares:
                counts = f"{lower} / {len(pairs) - lower - higher} / {higher}"
                rows.append([title, init, f"{statistics.fmean(shares):.0%}", str(len(shares)), counts])
    header = ["optimizer", "initialization", "rates that train", "settings", "lower / equal / higher than default"]
    return markdown(header, rows)


def text_of(folder: Path) -> str:
    settings = load(folder)
    parts = [f"### All settings\n\n{summary(settings)}"]
    for optimizer, title in OPTIMIZERS.items():
        parts.append(f"### {title}\n\n{table_of(settings, optimizer)}")
    runs = [run for saved in settings for init in saved["runs"].values() for run in init.values()]
    hours = sum(run["cpu_seconds"] for run in runs) / 3600
    parts.append(f"{len(runs)} runs, {hours:.1f} hours of one core.\n")
    return "\n".join(parts)


def plot(folder: Path, file: Path) -> None:
    """A line for each initialization: its loss over the best of all, in each setting, at its own best rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = load(folder)
    figure, axes = pyplot.subplots(2, 1, figsize=(10, 10), sharex=True)
    for axis, (optimizer, title) in zip(axes, OPTIMIZERS.items(), strict=True):
        for init in INITS:
            points = [
                (k, statistics.fmean(losses) / saved["constant"])
                for k, saved in enumerate(settings)
                if (losses := at_best(saved, init, optimizer))
            ]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", linestyle=":", label=init)
        axis.axhline(1.0, color="grey")
        axis.set_yscale("log")
        axis.set_title(title)
        axis.set_ylabel("loss / loss of the best constant answer")
    axes[0].legend(ncol=4, fontsize="small")
    axes[1].set_xticks(range(len(settings)), [saved["name"] for saved in settings], rotation=60, ha="right")
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    pyplot.close(figure)


def write(folder: Path) -> None:
    text = text_of(folder)
    pipeline.write_text(folder / "tables.md", text)
    plot(folder, folder / "modern.png")
    print(text)
