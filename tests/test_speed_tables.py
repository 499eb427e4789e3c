"""The tables of speed and of workers on benchmarks' page are those of the JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import scale  # noqa: E402
import speed  # noqa: E402

PAGE = (BENCHMARKS / "README.md").read_text()


def measured(name: str) -> Any:
    return json.loads((BENCHMARKS / name).read_text())


@pytest.mark.parametrize("table", [speed.main_table, speed.paper_table, speed.sweep_table, speed.target_table])
def test_the_page_has_the_tables_of_speed(table: Callable[[Any], str]) -> None:
    assert f"\n\n{table(measured('speed.json')).strip()}\n\n" in PAGE


def test_the_page_has_the_computed_table_of_workers_and_the_ratios_before_it() -> None:
    terms = scale.Terms(**measured("results/scale.json")["terms"])
    assert "\n".join(scale.computed(terms)) + "\n\n" in PAGE
    for cell in (
        f"{terms.one_process:.2f} s = **{terms.ratios['calibration']:.2f}**",
        f"**{terms.stage_milliseconds:.1f} ms**",
        f"{terms.drawn_by_one:.1f} s = **{terms.ratios['orthonormalization']:.2f}**",
    ):
        assert f"{cell} |" in PAGE
