"""The page of 500 layers takes less than a megabyte, whatever the command; and its JSON comes out as it went in."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_networks import residual, synthetic

from helpers import normal
from lsuv_cli import Comparison, compare
from lsuv_cli.page.packing import PACKED, embedded, packed, unpacked

MEGABYTE = 1_000_000
FIVE = ("lsuv", "orthonormal", "xavier", "msra", "keep")


def five(kinds):
    """A comparison of 500 layers: what was done, and whether channels were scaled one by one."""
    made = [synthetic(500, k, command, before=False, channels=channels) for k, (command, channels) in enumerate(kinds)]
    return Comparison(dict(zip(FIVE, made, strict=True)))


@pytest.mark.parametrize("command", ["init", "inspect", "measure"])
def test_a_page_of_500_layers(command):
    report = synthetic(500, command=command, channels=command == "init")
    page = report.to_html("lsuv init m.onnx --before --scale channel --bias center")
    assert len(page.encode()) < MEGABYTE / 2
    assert embedded(page) == report.to_json()


@pytest.mark.parametrize(
    "kinds",
    [
        [("init", False), ("measure", False), ("measure", False), ("measure", False), ("measure", False)],
        # lsuv, lsuv+center, lsuv+channel, lsuv+bounded, lsuv+center+channel
        [("init", False), ("init", False), ("init", True), ("init", False), ("init", True)],
    ],
    ids=["initializations", "options"],
)
def test_a_page_that_compares_five_initializations_of_500_layers(kinds):
    shown = five(kinds)
    page = shown.to_html("lsuv compare m.onnx")
    assert len(page.encode()) < MEGABYTE
    assert f'type="{PACKED}"' in page
    assert embedded(page) == shown.to_json()


def test_pages_with_and_without_compression_hold_the_same(monkeypatch):
    shown = compare(residual(3), normal(8, 3, 12, 12), ["lsuv+channel", "msra", "keep"], details=True)
    plain = shown.to_html()
    monkeypatch.setattr("lsuv_cli.page.packing.LARGEST_PLAIN", 0)
    short = shown.to_html()
    assert PACKED not in plain
    assert PACKED in short
    assert embedded(plain) == embedded(short) == shown.to_json()
    # Everything but the report is the same.
    held = re.compile(r'<script id="report".*?</script>', re.S)
    assert held.sub("", plain) == held.sub("", short)


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | FLOATS | st.text(max_size=3)
ROWS = st.lists(st.none() | st.fixed_dictionaries({"a": SCALARS, "b": st.lists(SCALARS, max_size=9)}), max_size=12)
NUMBERS = st.lists(st.none() | FLOATS, max_size=20)
VALUES = st.recursive(
    SCALARS | ROWS | NUMBERS, lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text("xyz"), inner)
)


@given(VALUES)
def test_any_json_comes_out_as_it_went_in(value):
    assert json.dumps(unpacked(packed(value))) == json.dumps(value)


def test_numbers_keep_every_bit_and_every_gap():
    rng = np.random.default_rng(0)
    column = [*rng.standard_normal(50).tolist(), None, 0.1, -0.0, 5e-324, 1.7976931348623157e308]
    value = {"one": column, "two": [{"a": x} for x in column], "three": list(column)}
    assert json.dumps(unpacked(packed(value))) == json.dumps(value)
    assert len(packed(value)) < 10 * len(column) + 100  # they are there once
