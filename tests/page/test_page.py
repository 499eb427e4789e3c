"""The page: well-formed, whole, harmless, small; and what it shows is what numpy says."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import onnx
import pytest
from page_networks import chain, residual

from helpers import layer_outputs, model, normal, values
from lsuv_cli import compare, initialize, inspect, measure
from lsuv_cli.details import Histogram
from lsuv_cli.page.chart import Axis, bars, chart
from lsuv_cli.page.document import render
from lsuv_cli.page.layout import Node, lay_out
from lsuv_cli.page.packing import embedded
from lsuv_cli.page.table import FINE as SHOWN_AS_FINE
from lsuv_cli.report import FINE
from lsuv_cli.text import short_names
from shell import MAXOUT, lsuv

DATA = MAXOUT.with_suffix(".npy")
EVIL = "a</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[2J\u202e&amp;\u2028<!--"
VOID = {"meta", "link", "input", "br", "img"}
LEFT_OPEN = {"td", "th", "tr", "li"}  # whose end tags HTML lets one leave out


class Reader(HTMLParser):
    """Every element with its attributes; complains about end tags that fit no start."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.shown = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self.open[-1] != tag:
            assert self.open.pop() in LEFT_OPEN, f"</{tag}>"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"script", "style"}:
            self.shown += data


def pages(tmp_path):
    """Command -> its page and its JSON, of a small model."""
    more = {"init": ("-o", tmp_path / "m.onnx"), "compare": ("--inits", "lsuv,keep"), "inspect": (), "check": ()}
    for command, words in more.items():
        path = tmp_path / f"{command}.html"
        done = lsuv(command, MAXOUT, "--data", DATA, "--limit", 8, "--html", path, "--json", *words)
        yield command, path.read_text(encoding="utf-8"), json.loads(done.out)


def test_each_command_writes_a_page_that_is_well_formed_and_holds_its_json(tmp_path):
    for command, page, report in pages(tmp_path):
        read = Reader(page)
        assert not read.open, command
        assert embedded(page) == report
        ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        assert f"lsuv {command} " in read.shown
        assert f"--limit 8 --html {tmp_path / command}.html" in read.shown
        layers = report["inits"]["lsuv"]["layers"] if command == "compare" else report["layers"]
        for layer in layers:
            assert layer["name"] in read.shown
            assert f"{layer['variance']:.5g}".replace("e-0", "e-") in read.shown
        assert "conv11.weight" in read.shown


def test_nothing_is_asked_of_any_other_place(tmp_path):
    for _, page, _ in pages(tmp_path):
        for tag, attributes in Reader(page).elements:
            assert tag not in {"img", "iframe", "object", "embed", "base", "form"}
            assert "style" not in attributes  # the policy would not apply it
            assert not any(name.startswith("on") for name in attributes)
            for name in ("src", "href", "xlink:href", "action"):
                assert attributes.get(name, "#").startswith(("#", "data:,")), attributes
        assert re.search(r"default-src &#x27;none&#x27;", page)
        assert "unsafe" not in page.split("</head>")[0].split("<style>")[0]
        assert not re.search(r"url\(|@import|fetch\(|XMLHttp|WebSocket|https?://(?!www\.w3\.org/2000/svg)", page)


def test_names_from_a_model_stay_text(tmp_path):
    proto = chain(3)
    for k, node in enumerate(proto.graph.node):
        node.name = f"{EVIL}{k}"
    onnx.save(proto, tmp_path / "m.onnx")
    np.save(tmp_path / "c.npy", normal(16, 8))
    lsuv("init", tmp_path / "m.onnx", "--data", tmp_path / "c.npy", "-o", tmp_path / "o.onnx", "--exclude", "*4",
         "--html", tmp_path / "p.html")  # fmt: skip
    page = (tmp_path / "p.html").read_text(encoding="utf-8")
    read = Reader(page)
    assert [tag for tag, _ in read.elements if tag in {"script", "img"}] == ["script"] * 3
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "<script>alert(1)</script>" in read.shown  # as text
    assert embedded(page)["layers"][0]["name"] == f"{EVIL}0"


def test_a_page_of_a_notebook_needs_no_file_and_no_details():
    report = measure(str(MAXOUT), np.load(DATA)[:8])
    assert report.details is None
    read = Reader(report.to_html())
    assert "conv11" in read.shown
    assert "graph" not in [attributes.get("id") for _, attributes in read.elements]
    assert not Reader(inspect(str(MAXOUT)).to_html()).open  # without data there is nothing to plot


@pytest.mark.parametrize("proto", [chain(4), residual(3)], ids=["products", "convolutions"])
def test_channels_are_as_numpy_computes_them(proto):
    shape = (24, 8) if len(proto.graph.node) == 8 else (24, 3, 12, 12)
    x = normal(*shape, seed=3)
    report = measure(proto, x, batch_size=7, details=True)
    outputs = layer_outputs(proto)
    arrays = values(proto, {"x": x}, outputs)
    for name, layer, detail in zip(outputs, report.layers, report.details.layers, strict=True):
        channels = np.moveaxis(arrays[name], 1, -1).reshape(-1, arrays[name].shape[1])
        assert detail.channel_variance == pytest.approx(channels.var(axis=0).mean(), rel=1e-4), layer.name
        assert detail.channel_mean_square == pytest.approx((channels.mean(axis=0) ** 2).mean(), rel=1e-4)
        assert layer.variance == pytest.approx(arrays[name].var(), rel=1e-5)


def test_features_of_a_weight_on_the_left_are_rows():
    proto = model("g (float[N,8,5] x) => (float[N,6,5] y) { y = MatMul(w, x) }", w=normal(6, 8))
    x = normal(10, 8, 5)
    (detail,) = measure(proto, x, details=True).details.layers
    features = np.moveaxis(values(proto, {"x": x}, ["y"])["y"], 1, 0).reshape(6, -1)
    assert detail.channel_variance == pytest.approx(features.var(axis=1).mean(), rel=1e-5)


def test_details_change_no_variance(tmp_path):
    for function in (
        measure,
        inspect,
        lambda *a, **k: initialize(*a, **k).report,
        lambda *a, **k: compare(*a, **k)["lsuv"],
    ):
        for proto, x in ((chain(5), normal(40, 8)), (residual(3), normal(8, 3, 12, 12))):
            plain, close = function(proto, x), function(proto, x, details=True)
            assert [layer.variance for layer in plain.layers] == [layer.variance for layer in close.layers]
            assert [layer.mean for layer in plain.layers] == [layer.mean for layer in close.layers]


def test_a_histogram_counts_every_entry():
    even = Histogram.of(np.arange(2400.0))
    assert even == Histogram(0.0, 2399.0, (42,) * 24)  # 1000 / 24, rounded up
    assert Histogram.of(np.full(5, 3.0)) == Histogram(3.0, 3.0, (1000,))
    assert Histogram.of(np.array([math.nan, math.inf])) is None
    assert Histogram.of(np.zeros(0)) is None
    far = Histogram.of(np.array([*normal(1000).tolist(), 1e6]))
    assert far.high < 1e6  # five standard deviations
    assert far.per_mille[-1] == 1  # and it is counted


def test_the_outline_has_layers_and_joints_only():
    outline = measure(residual(1), normal(4, 3, 12, 12), details=True).details.outline
    assert [(node.op, node.layer, node.after) for node in outline] == [
        ("Conv", 0, (-1,)),
        ("Conv", 1, (0,)),
        ("Conv", 2, (1,)),
        ("Conv", 3, (0,)),
        ("Add", None, (2, 3)),
        ("MatMul", 4, (4,)),
    ]


def test_branches_lie_on_lanes_of_their_own_and_stages_follow_one_another():
    #  0 -> 1 -> 2 -> 4, and 0 -> 3 -> 4 beside it; 4 is a joint, 5 of the next stage
    nodes = [Node((), 0), Node((0,), 0), Node((1,), 0), Node((0,), 0), Node((2, 3), None), Node((4,), 1)]
    layout = lay_out(nodes)
    assert layout.columns == (0, 1, 2, 1, 3, 4)
    assert layout.lanes == (0, 0, 0, 1, 0, 0)
    assert layout.starts == (0, 3)
    places = list(zip(layout.columns, layout.lanes, strict=True))
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("values", "labels"),
    [([1.0, 1.0], ["1"]), ([1e-20, 1.0], ["10⁻²⁰", "10⁻¹⁶", "10⁻⁴", "1"]), ([], ["0.1", "1", "10"])],
)
def test_the_axis_is_marked_by_round_numbers(values, labels):
    shown = [label for _, label in Axis.around(values).ticks()]
    assert set(labels) <= set(shown)
    assert len(shown) <= 8


def test_a_chart_has_a_point_for_each_value_and_crosses_for_zero():
    drawn = chart("k", "t", ["a", "b", "c", "d"], {"one": [1.0, None, 0.0, 2.0]})
    assert drawn.count("h0") == 2
    assert 'class="crosses"' in drawn
    assert re.search(r'class="line" d="M[\d.]+ [\d.]+M', drawn)  # the line has a gap


def test_names_lose_the_path_that_they_share():
    assert short_names(["/model/a/x", "/model/ab/y"]) == (["a/x", "ab/y"], "/model/")
    assert short_names(["conv1", "conv2"]) == (["conv1", "conv2"], "")
    assert short_names(["one"]) == (["one"], "")


def test_render_takes_any_report_that_was_saved(tmp_path):
    report = measure(str(MAXOUT), np.load(DATA)[:8], details=True).to_json()
    (tmp_path / "r.json").write_text(json.dumps(report))
    assert embedded(render(json.loads((tmp_path / "r.json").read_text()))) == report


def test_a_page_says_which_file_it_is_about(tmp_path):
    import hashlib

    report = measure(str(MAXOUT), np.load(DATA)[:8], details=True)
    assert report.details.files == {MAXOUT.name: hashlib.sha256(MAXOUT.read_bytes()).hexdigest()}
    given = measure(MAXOUT.read_bytes(), np.load(DATA)[:8], details=True)
    assert list(given.details.files.values()) == list(report.details.files.values())


def test_a_page_is_called_html_and_overwrites_no_input(tmp_path):
    done = lsuv("check", MAXOUT, "--data", DATA, "--html", tmp_path / "p.txt")
    assert done.code == 2
    assert "must end in .html" in done.err
    (tmp_path / "m.html").write_bytes(MAXOUT.read_bytes())
    for command in ("check", "inspect", "compare"):
        done = lsuv(command, tmp_path / "m.html", "--data", DATA, "--html", tmp_path / "m.html")
        assert done.code == 2
        assert "is the input itself" in done.err
    assert (tmp_path / "m.html").read_bytes() == MAXOUT.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.html"]


def test_the_page_knows_which_statuses_are_fine():
    assert SHOWN_AS_FINE == FINE


@pytest.mark.parametrize("function", [inspect, measure, lambda *a, **k: initialize(*a, **k).report])
def test_the_residual_stream_is_drawn_at_every_sum(function):
    report = function(residual(3), normal(4, 3, 12, 12), details=True)
    assert len(report.sums) == 3
    page = report.to_html()
    drawn = re.search(r'<svg id="residual".*?</svg>', page, re.S).group()
    assert drawn.count("h0") == 3
    assert ", 3 sums. " in drawn
    assert not Reader(page).open


def not_finite():
    """Five layers; the third has a NaN in its weight, and the two behind it put out nothing else."""
    proto = chain(5)
    (weight,) = (tensor for tensor in proto.graph.initializer if tensor.name == "fc2.weight")
    array = np.array(onnx.numpy_helper.to_array(weight))
    array[0, 0] = math.nan
    weight.CopyFrom(onnx.numpy_helper.from_array(array, "fc2.weight"))
    return proto


@pytest.mark.parametrize("function", [inspect, measure])
def test_what_is_not_finite_is_not_taken_for_unmeasured(function):
    page = function(not_finite(), normal(16, 8), details=True).to_html()
    read = Reader(page)
    assert [a["class"] for tag, a in read.elements if tag == "a"][2:] == ["vn"] * 3
    assert '"worst":2' in page  # the page opens with the first of them
    drawn = re.search(r'<svg id="variance".*?</svg>', page, re.S).group()
    assert drawn.count("l6 6") == 3  # crosses
    assert "not finite in 3 layers" in drawn
    assert read.shown.count("not finite") > 3


def test_the_model_as_given_may_be_the_one_that_is_not_finite():
    report = initialize(not_finite(), normal(16, 8), before=True, details=True).report
    drawn = re.search(r'<svg id="variance".*?</svg>', report.to_html(), re.S).group()
    assert "as given: not finite in 3 layers" in drawn
    assert drawn.count("l6 6") == 3
    planned = initialize(chain(3), normal(16, 8), dry_run=True, details=True).report
    assert "not finite" not in Reader(planned.to_html()).shown.replace("not finitenot measured", "")


def test_a_field_that_is_the_same_in_all_layers_is_said_once():
    read = Reader(measure(chain(4), normal(16, 8), details=True).to_html())
    once = "target 1; shape 8x8; stage 1; groups 1; type float32; place initializer; shared no"
    assert f"The same in every layer: {once}." in read.shown
    assert sum(tag == "th" and "title" in a for tag, a in read.elements) < 16
    assert "The same" not in Reader(measure(chain(1), normal(16, 8)).to_html()).shown


def test_labels_of_names_that_differ_in_the_middle_differ():
    proto = chain(6)
    for k, node in enumerate(proto.graph.node):
        node.name = f"{'a' * 40}_{k}_{'b' * 400}"
    page = measure(proto, normal(16, 8), details=True).to_html()
    labels = re.findall(r'class="name"[^>]*>([^<]*)<', re.search(r'<svg id="variance".*?</svg>', page, re.S).group())
    assert len(set(labels)) == 6
    rows = re.findall(r"<th scope=row>([^<]*)<", page)
    assert len(set(rows)) == 6


def test_bars_of_many_layers_under_many_initializations_lie_in_strips():
    series = {f"init {k}": [0.5] * 100 for k in range(3)}
    drawn = bars("dead", "t", [f"l{k}" for k in range(100)], series)
    # Each initialization starts from a floor of its own.
    floors = re.findall(r'class="bars"[^>]*d="M0 (\d+)v', drawn)
    assert len(set(floors)) == 3
    few = bars("dead", "t", ["a", "b"], {name: values[:2] for name, values in series.items()})
    assert len(set(re.findall(r'class="bars"[^>]*d="M0 (\d+)v', few))) == 1
