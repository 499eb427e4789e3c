"""The table of what options.py measured, as it stands in docs/options.md."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pipeline

RESULTS = pipeline.RESULTS / "options.json"
PAGE = pipeline.ROOT / "docs" / "options.md"
CHANCE = math.log(10)  # the loss of a guess among ten classes
INITS = ("lsuv", "lsuv+center", "lsuv+channel", "lsuv+center+channel", "lsuv+bounded", "lsuv+bounded+center")
RESIDUAL = ("residual", "pre-norm")  # networks that `bounded` is for
LAST = 50  # steps at the end of a run, over which its loss is averaged


def capped(loss: float | None) -> float:
    """A loss that is not finite, or above that of chance, counts as that of chance."""
    return CHANCE if loss is None else min(loss, CHANCE)


def at_rates(seeds: Sequence[Sequence[float | None]]) -> list[float]:
    """The mean over the seeds at each rate."""
    return [statistics.fmean(capped(loss) for loss in losses) for losses in zip(*seeds, strict=True)]


def best(runs: dict[str, list[float | None]]) -> dict[str, float]:
    """Seed -> loss, at the rate that is best over all seeds."""
    means = at_rates(list(runs.values()))
    rate = means.index(min(means))
    return {seed: capped(losses[rate]) for seed, losses in runs.items()}


def complete(network: str, inits: dict[str, Any]) -> list[str]:
    """The seeds that a network was trained with from every initialization."""
    wanted = [init for init in INITS if network in RESIDUAL or "bounded" not in init]
    found = [set(inits.get(init, {})) for init in wanted]
    return sorted(set.intersection(*found), key=int)


def table(saved: dict[str, Any]) -> str:
    """A row for each network and initialization: the loss at each rate, and at its best rate with the seeds' range."""
    rates = [f"{rate:g}" for rate in saved["rates"]]
    header = ["network", "initialization", "seeds", *rates, "at its best", "lower than `lsuv`"]
    rows = []
    for network, inits in saved["runs"].items():
        seeds = complete(network, inits)
        if not seeds:
            continue
        plain = best({seed: inits["lsuv"][seed] for seed in seeds})
        for init, every in inits.items():
            runs = {seed: every[seed] for seed in seeds}
            own = best(runs)
            low, high = min(own.values()), max(own.values())
            lower = "" if init == "lsuv" else f"{sum(own[s] < plain[s] for s in own)} of {len(own)}"
            means = [f"{loss:.3f}" for loss in at_rates(list(runs.values()))]
            reached = f"{statistics.fmean(own.values()):.3f} ({low:.3f} to {high:.3f})"
            rows.append([network, f"`{init}`", str(len(seeds)), *means, reached, lower])
    return pipeline.markdown(header, rows)


def on_page(page: str, saved: dict[str, Any]) -> str:
    """docs/options.md with the table of these numbers between its marks."""
    return pipeline.between(page, "options", table(saved))


def write() -> None:
    saved = json.loads(RESULTS.read_text())
    pipeline.write_text(PAGE, on_page(PAGE.read_text(), saved))
    print(table(saved), end="")
