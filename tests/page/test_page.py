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
from lsuv_cli import Comparison, Report, compare, initialize, inspect, measure
from lsuv_cli.details import BINS, Details, Histogram, LayerDetails, OutlineNode
from lsuv_cli.page.chart import Axis, chart
from lsuv_cli.page.document import embedded, render
from lsuv_cli.page.layout import Node, lay_out
from lsuv_cli.page.table import FINE as SHOWN_AS_FINE
from lsuv_cli.report import FINE, LayerReport, Status
from lsuv_cli.text import short_names
from shell import MAXOUT, lsuv

DATA = MAXOUT.with_suffix(".npy")
EVIL = "a</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[2J\u202e&amp;\u2028<!--"
VOID = {"meta", "link", "input", "br", "img"}
LEFT_OPEN = {"td", "tr", "li"}  # whose end tags HTML lets one leave out


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


def synthetic(layers: int, variance: float = 1.0) -> Report:
    """A report of many layers with long names, as it is after the run."""
    rng = np.random.default_rng(0)
    entries, details, outline = [], [], []
    for k in range(layers):
        module = f"model.layers.{k // 6}.self_attn.{'qkvoud'[k % 6]}_proj"
        name = f"/{module.replace('.', '/')}/MatMul"
        draws = [math.exp(x) for x in rng.standard_normal(6)]
        entries.append(
            LayerReport(
                name, "MatMul", Status.OK, module, k // 2 + 1, f"{module}.weight", (768, 768), 1, "float32",
                "initializer", variance_given=draws[0], variance_at_turn=draws[1], scale=draws[2],
                variance=variance * draws[3], mean=draws[4], dead=0.25, weight_std=draws[5],
            )
        )  # fmt: skip
        bins = tuple(int(x) for x in rng.integers(0, 200, BINS))
        histogram = Histogram(-draws[0], draws[1], bins)
        details.append(LayerDetails(float(f"{draws[4]:.6g}"), float(f"{draws[5]:.6g}"), histogram, histogram))
        outline += [OutlineNode("MatMul", k, (2 * k - 1,)), OutlineNode("Add", None, (2 * k - 1, 2 * k))]
    settings = {"target_variance": 1.0, "tol": 0.01, "rescale": True}
    whole = Details({"m.onnx": "0" * 64}, {"onnx": "1.0"}, tuple(details), tuple(outline))
    return Report(
        "init", "0", "m.onnx", tuple(entries), settings=settings, samples=8, stages=layers // 2, details=whole
    )


def test_500_layers_take_less_than_a_megabyte_even_in_a_comparison_of_five():
    report = synthetic(500)
    page = report.to_html("lsuv init m.onnx")
    assert len(page.encode()) < 1_000_000
    five = Comparison({name: synthetic(500, k + 1.0) for k, name in enumerate(("lsuv", "orthonormal", "msra"))})
    assert embedded(five.to_html()) == five.to_json()  # compressed
    assert embedded(page) == report.to_json()


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


def test_the_residual_stream_is_drawn_at_every_sum():
    report = inspect(residual(3), normal(4, 3, 12, 12), details=True)
    assert len(report.sums) == 3
    page = report.to_html()
    drawn = re.search(r'<svg id="residual".*?</svg>', page, re.S).group()
    assert drawn.count("h0") == 3
    assert not Reader(page).open
