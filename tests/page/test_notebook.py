"""Reports in a notebook and in a Python shell."""

import sys

import numpy as np
import pytest
from page_networks import chain
from test_page import EVIL, Reader

from lsuv_cli import compare, measure
from shell import MAXOUT

X = np.load(MAXOUT.with_suffix(".npy"))[:1]


def test_a_report_is_one_line_in_a_shell():
    report = measure(str(MAXOUT), X)
    assert repr(report).startswith(
        f"<Report of lsuv check {MAXOUT}: 0 of 7 layers within tolerance, 7 outside (1 sample; "
    )
    assert "\n" not in repr(report)


def test_a_comparison_is_a_mapping_and_one_line_in_a_shell():
    both = compare(str(MAXOUT), X, "lsuv,keep")
    assert list(both) == ["lsuv", "keep"]
    assert dict(both)["keep"] is both["keep"]
    assert repr(both).startswith(f"<Comparison of lsuv, keep of {MAXOUT}, 7 layers (1 sample; ")


def test_a_notebook_shows_a_table_with_bars_and_a_plot():
    both = compare(str(MAXOUT), X, "lsuv,keep")
    for shown, bars in ((both["keep"], 7), (both, 14)):
        read = Reader(shown._repr_html_())
        assert not read.open
        tags = [tag for tag, _ in read.elements]
        assert tags.count("svg") == bars
        assert tags.count("img") == 1
        assert "conv11" in read.shown


def test_without_matplotlib_there_is_the_table_alone(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    shown = measure(str(MAXOUT), X)._repr_html_()
    assert "<table>" in shown
    assert "<img" not in shown


@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_are_text_in_a_notebook_too():
    proto = chain(2)
    proto.graph.node[0].name = EVIL
    read = Reader(measure(proto, np.ones((4, 8), np.float32))._repr_html_())
    assert "script" not in [tag for tag, _ in read.elements]
