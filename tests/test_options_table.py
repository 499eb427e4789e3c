"""The table of options in docs/options.md is what the saved runs give."""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import options_tables

RUNS = {
    "plain": {
        "lsuv": {"0": [None, 1.0], "1": [2.5, 1.2], "2": [1.0, 1.0]},
        "lsuv+center": {"0": [0.5, 2.0], "1": [0.7, 2.0]},
        "lsuv+channel": {"0": [3.0, 0.9], "1": [3.0, 1.5]},
        "lsuv+center+channel": {"0": [2.0, 1.0], "1": [2.0, 1.2]},
    },
    "residual": {"lsuv": {"0": [1.0, 1.0]}},
}


def test_the_page_has_between_the_marks_what_the_json_gives():
    saved = json.loads(options_tables.RESULTS.read_text())
    page = options_tables.PAGE.read_text()
    assert options_tables.on_page(page, saved) == page


def test_rows_are_means_over_the_seeds_that_all_initializations_have():
    _, _, first, center, channel, both = options_tables.table({"rates": [0.1, 0.01], "runs": RUNS}).strip().split("\n")
    chance = math.log(10)
    assert first == f"| plain | `lsuv` | 2 | {chance:.3f} | 1.100 | 1.100 (1.000 to 1.200) |  |"
    assert center == "| plain | `lsuv+center` | 2 | 0.600 | 2.000 | 0.600 (0.500 to 0.700) | 2 of 2 |"
    assert channel == f"| plain | `lsuv+channel` | 2 | {chance:.3f} | 1.200 | 1.200 (0.900 to 1.500) | 1 of 2 |"
    assert both.endswith("| 0 of 2 |")


def test_a_network_is_shown_once_every_initialization_has_run():
    assert "residual" not in options_tables.table({"rates": [0.1, 0.01], "runs": RUNS})
