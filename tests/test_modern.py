"""The table of benchmarks/modern.py, from made-up runs whose outcome is plain."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import modern_tables  # noqa: E402


def run(loss: float | None) -> dict[str, object]:
    return {"loss": loss, "losses": [2.3], "cpu_seconds": 1.0}


SAVED = {
    "name": "net",
    "constant": 2.0,
    "runs": {
        "default": {"sgd 0.1 s0": run(None), "sgd 0.01 s0": run(1.9), "sgd 0.01 s1": run(1.9)},
        "lsuv": {"sgd 0.1 s0": run(1.0), "sgd 0.1 s1": run(1.2), "sgd 0.01 s0": run(1.7)},
        "norm": {"sgd 0.1 s0": run(0.5), "sgd 0.01 s0": run(1.9)},
    },
}


def test_each_initialization_has_the_mean_of_its_own_best_rate_and_the_share_of_rates_that_train() -> None:
    header, _, row = modern_tables.table_of([SAVED], "sgd").strip().splitlines()
    cells = dict(zip(header.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=False))
    assert cells["constant answer"] == "2.000"
    assert cells["default"] == "1.900 (0%)"  # 1.9 is not below 0.9 · 2.0
    assert cells["lsuv"] == "**1.100** (100%)"  # the best of those without normalization
    assert cells["norm"] == "0.500 (50%)"


def test_the_summary_counts_where_the_loss_is_lower_than_with_pytorchs_own() -> None:
    lines = [line for line in modern_tables.summary([SAVED]).splitlines() if line.startswith("| SGD")]
    assert lines[1] == "| SGD | lsuv | 100% | 1 | 1 / 0 / 0 |"


def test_runs_that_all_diverge_say_so() -> None:
    saved = {**SAVED, "runs": {"default": {"sgd 0.1 s0": run(None)}}}
    assert "diverges" in modern_tables.table_of([saved], "sgd")


@pytest.mark.parametrize("folder", sorted(BENCHMARKS.glob("results/modern")))
def test_the_table_is_that_of_the_json(folder: Path) -> None:
    assert json.loads(next(folder.glob("*.json")).read_text())["runs"]
    assert modern_tables.text_of(folder) == (folder / "tables.md").read_text()
