"""The tables and the plot of what modern.py measured, in its results and between the marks of three pages."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pipeline
from pipeline import markdown

LEARNED = 0.9  # of the loss of the best constant answer: a run that ends below it *trains*
INITS = (
    "default",
    "own",
    "kaiming",
    "orthogonal",
    "lsuv",
    "lsuv+center",
    "lsuv+channel",
    "lsuv+bounded",
    "lsuv+target",
    "norm",
    "norm+lsuv",
)
OPTIONS = ("lsuv", "lsuv+center", "lsuv+channel", "lsuv+bounded")
AGAINST = ("default", "kaiming", "orthogonal", "lsuv", "norm")
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}
SEEDS = 3
PAGE = pipeline.ROOT / "docs" / "when-it-helps.md"
PAGES = {
    PAGE: "modern",
    pipeline.ROOT / "docs" / "options.md": "modern_options",
    pipeline.ROOT / "benchmarks" / "README.md": "modern_all",
}


def load(folder: Path) -> list[dict[str, Any]]:
    """The settings, in the order of modern_networks.py."""
    return sorted((json.loads(file.read_text()) for file in folder.glob("*.json")), key=lambda saved: saved["order"])


def by_rate(saved: dict[str, Any], init: str, optimizer: str) -> dict[str, list[float | None]]:
    """Rate -> the losses of all seeds, the first seed's first."""
    found: dict[str, list[float | None]] = {}
    for key, run in sorted(saved["runs"].get(init, {}).items(), key=lambda item: item[0].rsplit(" s", 1)[1]):
        kind, rate, _ = key.split(" ")
        if kind == optimizer:
            found.setdefault(rate, []).append(run["loss"])
    return found


def learned(saved: dict[str, Any], loss: float | None) -> bool:
    return loss is not None and loss < LEARNED * saved["constant"]


def best_rate(saved: dict[str, Any], init: str, optimizer: str) -> str | None:
    """The rate with the least loss of the first seed, or None if all diverge."""
    first = {rate: losses[0] for rate, losses in by_rate(saved, init, optimizer).items() if losses[0] is not None}
    return min(first, key=first.__getitem__) if first else None


def at_best(saved: dict[str, Any], init: str, optimizer: str) -> list[float] | None:
    """The losses of all seeds at the initialization's own best rate, or None where it was not tried.

    A loss above that of the constant answer, or not finite, counts as the constant answer's.
    """
    rates = by_rate(saved, init, optimizer)
    if not rates:
        return None
    rate = best_rate(saved, init, optimizer)
    return [min(math.inf if x is None else x, saved["constant"]) for x in (rates[rate] if rate else [None] * SEEDS)]


def share(saved: dict[str, Any], init: str, optimizer: str) -> float | None:
    """Of the learning rates of the grid, how many train (the first seed)."""
    rates = by_rate(saved, init, optimizer)
    return statistics.fmean(learned(saved, losses[0]) for losses in rates.values()) if rates else None


def trains(saved: dict[str, Any], init: str, optimizer: str) -> bool:
    """Whether every seed trains at the best rate."""
    return all(learned(saved, loss) for loss in at_best(saved, init, optimizer) or [math.inf])


def compared(saved: dict[str, Any], init: str, other: str, optimizer: str) -> int | None:
    """-1 if every seed ends below every seed of the other, 1 if above, else 0. What does not train is all the same.

    None if one of them has not run with every seed.
    """
    ours, theirs = at_best(saved, init, optimizer), at_best(saved, other, optimizer)
    if ours is None or theirs is None or min(len(ours), len(theirs)) < SEEDS:
        return None
    most = LEARNED * saved["constant"]
    ours, theirs = ([min(loss, most) for loss in losses] for losses in (ours, theirs))
    return (min(ours) > max(theirs)) - (max(ours) < min(theirs))


def counts(settings: Iterable[dict[str, Any]], init: str, other: str, optimizer: str) -> str:
    """In how many settings lower / neither / higher."""
    found = [order for saved in settings if (order := compared(saved, init, other, optimizer)) is not None]
    return "" if init == other or not found else " / ".join(str(found.count(order)) for order in (-1, 0, 1))


def summary(settings: Sequence[dict[str, Any]]) -> str:
    """A row for each optimizer and initialization, over all settings."""
    rows = []
    for optimizer, title in OPTIMIZERS.items():
        for init in INITS:
            mine = [saved for saved in settings if compared(saved, init, init, optimizer) is not None]
            if not mine:
                continue
            shares = statistics.fmean(share(saved, init, optimizer) or 0.0 for saved in mine)
            trained = sum(trains(saved, init, optimizer) for saved in mine)
            against = (counts(mine, init, other, optimizer) for other in AGAINST)
            rows.append([title, f"`{init}`", f"{trained} of {len(mine)}", f"{shares:.0%}", *against])
    return markdown(["optimizer", "initialization", "trains", "rates that train", *(f"`{x}`" for x in AGAINST)], rows)


def cell(saved: dict[str, Any], init: str, optimizer: str) -> str:
    """Mean loss at the best rate, and the share of rates that train."""
    losses, rates = at_best(saved, init, optimizer), share(saved, init, optimizer)
    if losses is None or rates is None:
        return ""
    missing = "" if len(losses) >= SEEDS else f", {len(losses)} of {SEEDS} seeds"
    return f"{statistics.fmean(losses):.3f} ({rates:.0%}{missing})"


def table_of(settings: Sequence[dict[str, Any]], optimizer: str) -> str:
    """A row for each network; the least mean of those without normalization is bold."""
    rows = []
    for saved in settings:
        means = {i: statistics.fmean(losses) for i in INITS if (losses := at_best(saved, i, optimizer))}
        plain = {init: mean for init, mean in means.items() if "norm" not in init}
        least = min(plain, key=plain.__getitem__) if plain else ""
        row = (cell(saved, init, optimizer) for init in INITS)
        marked = (f"**{text}**" if init == least else text for init, text in zip(INITS, row, strict=True))
        rows.append([saved["name"], f"{saved['constant']:.3f}", *marked])
    return markdown(["network", "constant answer", *(f"`{init}`" for init in INITS)], rows)


def options_of(settings: Sequence[dict[str, Any]]) -> str:
    """LSUV and its options, for both optimizers: lower (↓) or higher (↑) than `lsuv` for every seed."""
    signs = {-1: " ↓", 1: " ↑"}
    rows = []
    for saved in settings:
        row = [saved["name"]]
        for optimizer in OPTIMIZERS:
            for init in OPTIONS:
                losses = at_best(saved, init, optimizer)
                order = compared(saved, init, "lsuv", optimizer) if losses and init != "lsuv" else None
                row.append(f"{statistics.fmean(losses):.3f}{signs.get(order or 0, '')}" if losses else "")
        rows.append(row)
    header = [f"{title} `{init.removeprefix('lsuv') or 'lsuv'}`" for title in OPTIMIZERS.values() for init in OPTIONS]
    return markdown(["network", *header], rows)


def extent(settings: Sequence[dict[str, Any]]) -> str:
    """How much was run, and how often the best rate is the least or the greatest of the grid."""
    runs = [run for saved in settings for init in saved["runs"].values() for run in init.values()]
    edges, cells = [0, 0], 0
    for saved in settings:
        for init in saved["runs"]:
            for optimizer in OPTIMIZERS:
                grid = sorted(by_rate(saved, init, optimizer), key=float)
                rate = best_rate(saved, init, optimizer)
                if rate is None or not trains(saved, init, optimizer):
                    continue
                cells += 1
                edges[0] += rate == grid[0]
                edges[1] += rate == grid[-1]
    minutes = sum(run["cpu_seconds"] for run in runs) / 60
    return (
        f"{len(settings)} networks, {len(runs)} runs, {minutes:.0f} minutes of one core. Of the {cells} combinations "
        f"that train, {edges[0]} have the least rate of the grid as their best, {edges[1]} the greatest.\n"
    )


def parts(settings: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Mark -> what stands there."""
    tables = (f"**{title}**\n\n{table_of(settings, optimizer)}" for optimizer, title in OPTIMIZERS.items())
    return {
        "modern": summary(settings) + "\n" + extent(settings),
        "modern_options": options_of(settings),
        "modern_all": "\n".join(tables),
    }


def relative(saved: dict[str, Any], init: str, optimizer: str) -> float:
    """Mean loss at the best rate over that of the constant answer; NaN where it was not tried."""
    losses = at_best(saved, init, optimizer)
    return statistics.fmean(losses) / saved["constant"] if losses else math.nan


def plot(settings: Sequence[dict[str, Any]], file: Path) -> None:
    """A row for each network, a column for each initialization: its loss over that of the constant answer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(14, 6.5), sharey=True, layout="constrained")
    for axis, (optimizer, title) in zip(axes, OPTIMIZERS.items(), strict=True):
        grid = [[relative(saved, init, optimizer) for init in INITS] for saved in settings]
        image = axis.imshow(grid, cmap="RdYlGn_r", vmin=0, vmax=1, aspect="auto")
        for row, values in enumerate(grid):
            for column, value in enumerate(values):
                if not math.isnan(value):
                    axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axis.set_title(title)
        axis.set_xticks(range(len(INITS)), INITS, rotation=45, ha="right")
        axis.set_yticks(range(len(settings)), [saved["name"] for saved in settings])
    figure.colorbar(image, ax=axes, label="loss on held-out data / loss of the best constant answer")
    figure.savefig(file, dpi=80)
    pyplot.close(figure)


def write(folder: Path) -> None:
    """The plot beside the numbers; the pages only from the numbers that belong to the repository."""
    settings = load(folder)
    found = parts(settings)
    plot(settings, folder / "modern.png")
    if folder.resolve() == (pipeline.RESULTS / "modern").resolve():
        for page, mark in PAGES.items():
            pipeline.write_text(page, pipeline.between(page.read_text(), mark, found[mark]))
    print("\n".join(found.values()))
