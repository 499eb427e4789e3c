"""The plot: formats, what is drawn, and what happens without matplotlib."""

import os
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from lsuv_cli import initialize
from lsuv_cli.cli import plot
from lsuv_cli.errors import LsuvError
from lsuv_cli.outputs import Target
from shell import MAXOUT, RELU, lsuv


def to(path):
    return Target("--plot", path, path, force=True)


DATA = MAXOUT.with_suffix(".npy")


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
@pytest.mark.parametrize("command", ["init", "check", "compare"])
def test_each_command_draws_each_format(tmp_path, command, kind):
    plot = tmp_path / f"p.{kind}"
    more = (
        ("-o", tmp_path / "m.onnx") if command == "init" else ("--inits", "lsuv,keep") if command == "compare" else ()
    )
    done = lsuv(command, MAXOUT, "--data", DATA, "--limit", 8, "--plot", plot, *more)
    assert done.code == (command == "check")
    if kind == "png":
        with Image.open(plot) as opened:
            assert opened.width > 600
            assert opened.height > 400
    elif kind == "svg":
        assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    else:
        data = plot.read_bytes()
        assert data.startswith(b"%PDF")
        assert b"%%EOF" in data[-16:]


def test_init_draws_as_given_before_scaling_and_after(tmp_path):
    report = initialize(str(MAXOUT), np.load(DATA)[:8], before=True).report
    series = plot.of_report(report)
    assert list(series) == ["as given", "pre-initialized, when its turn came", "after LSUV"]
    assert series["as given"][0] == report.layers[0].variance_given
    assert series["after LSUV"] == [layer.variance for layer in report.layers]
    lsuv("init", MAXOUT, "--data", DATA, "--limit", 8, "-o", tmp_path / "m.onnx", "--plot", tmp_path / "p.svg")
    assert "as given" in (tmp_path / "p.svg").read_text()  # --plot implies --before


def test_the_plot_says_where_it_is(tmp_path):
    done = lsuv("init", MAXOUT, "--no-rescale", "-o", tmp_path / "m.onnx", "--plot", tmp_path / "p.png")
    assert f"wrote {tmp_path / 'p.png'}" in done.err


@pytest.fixture
def drawn(monkeypatch):
    """The axes of each plot that is drawn."""
    from matplotlib import pyplot

    seen = []
    monkeypatch.setattr(pyplot, "close", lambda figure: seen.append(figure.axes[0]))
    yield seen
    monkeypatch.undo()
    pyplot.close("all")


@pytest.mark.parametrize("count", [1, 5, 500])
def test_few_layers_are_named_and_many_numbered(tmp_path, drawn, count):
    names = [f"/encoder/layers.{k}/self_attn/out_proj/MatMul" for k in range(count)]
    falling = [10.0 ** -(k / 20) for k in range(count)]
    series = {"as given": falling, "after LSUV": [1.0] * count}
    plot.draw(names, series, to(tmp_path / "p.png"), targets=[1.0], tol=0.01, title="a model")
    (axes,) = drawn
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["as given", "after LSUV", "target 1 ± 0.01"]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), falling)
    labels = [label.get_text() for label in axes.get_xticklabels()]
    if count <= 5:
        assert len(labels) == count
        assert max(map(len, labels)) <= 24
    else:
        assert axes.get_xlabel() == "layer, in the order of execution"
        assert len(labels) < 20
    with Image.open(tmp_path / "p.png") as opened:
        assert opened.width <= 2100


def test_what_a_log_scale_cannot_show_is_marked_at_its_edge(tmp_path, drawn):
    series = {"as given": [1.0, 0.0, float("inf"), None, float("nan"), 2.0]}
    plot.draw(list("abcdef"), series, to(tmp_path / "p.png"), targets=[1.0], tol=0.1, title="")
    (axes,) = drawn
    line, marks = axes.lines
    np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3, 5, 6])
    np.testing.assert_array_equal(line.get_ydata(), [1, np.nan, np.nan, np.nan, 2])
    assert list(zip(marks.get_xdata(), marks.get_ydata(), strict=True)) == [(2, 0.02), (3, 0.98), (5, 0.98)]


def test_nothing_to_draw_is_drawn(tmp_path):
    plot.draw([], {"as given": []}, to(tmp_path / "p.svg"), targets=[1.0], tol=0.1, title="")
    assert (tmp_path / "p.svg").exists()


@pytest.mark.parametrize("name", ["p.jpg", "p", "nowhere/p.png"])
def test_a_plot_that_cannot_be_drawn_is_refused_first(tmp_path, name):
    done = lsuv("init", RELU, "--data", "random", "-o", tmp_path / "m.onnx", "--plot", tmp_path / name)
    assert done.code == 2
    assert done.err.startswith("lsuv: --plot")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(LsuvError, match="cannot be written"):
        plot.draw(["a"], {"as given": [1.0]}, to(tmp_path / "gone" / "p.png"), targets=[1.0], tol=0.1, title="")


@pytest.mark.parametrize(
    ("package", "words", "advice"),
    [
        ("matplotlib", ["init", str(MAXOUT), "--data", "random", "--plot", "p.png"], "pip install 'lsuv-cli[plot]'"),
        ("PIL", ["inspect", str(RELU), "--data", "images"], "lsuv-cli[images]"),
    ],
)
def test_a_missing_extra_is_named_with_the_way_to_get_it(tmp_path, package, words, advice):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 40)).save(tmp_path / "images" / "a.png")
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"  # an import of it fails now
        "from lsuv_cli.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 2
    assert advice in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["images"]
