"""The page in Chromium: no error, no request; sort, filter, click and keys do what they say.

LSUV_SCREENSHOTS=DIR keeps a picture of each page, light and dark.
"""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from page_networks import chain, residual, synthetic
from test_page import EVIL, not_finite

from helpers import normal
from lsuv_cli import Comparison, compare, initialize, inspect, measure

pytestmark = pytest.mark.browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
SHOTS = os.environ.get("LSUV_SCREENSHOTS")


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    api = pytest.importorskip("playwright.sync_api", reason="there is no playwright here")
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, tmp_path):
    """Opens a page from a file; at the end of the test there must have been no complaint and no request."""
    complaints, opened = [], []

    def open_it(html: str, name: str = "page", **options):
        path = tmp_path / f"{name}.html"
        path.write_text(html, encoding="utf-8")
        page = chromium.new_page(viewport={"width": 1200, "height": 900}, **options)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            page.wait_for_selector("body[data-ready]")
        if SHOTS:
            page.screenshot(path=Path(SHOTS) / f"{name}-{options.get('color_scheme', 'light')}.png", full_page=True)
        opened.append(page)
        return page

    yield open_it
    for page in opened:
        page.close()
    assert complaints == []


@pytest.fixture(scope="module")
def report():
    """Of 54 layers, as after `init`."""
    return initialize(residual(24), normal(8, 3, 12, 12), before=True, details=True).report


def names(page):
    return page.eval_on_selector_all("#layers tbody tr:not([hidden]) th", "all => all.map(th => th.textContent)")


def marked(page):
    return page.eval_on_selector_all("tr.marked", "all => all.map(row => Number(row.id.slice(1)))")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("layers", [5, 54, 500])
def test_pages_of_5_54_and_500_layers(open_page, report, layers, scheme):
    if layers == 5:
        report = initialize(chain(5), normal(64, 8), before=True, details=True).report
    shown = report if layers < 500 else synthetic(500)
    page = open_page(shown.to_html("lsuv init m.onnx"), f"init{layers}", color_scheme=scheme)
    assert len(names(page)) == layers == len(shown.layers)
    assert page.locator("#graph a").count() == layers
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    assert_nothing_is_cut(page)


def assert_nothing_is_cut(page):
    """No label of a chart or box of the graph reaches over the edge, and the page does not scroll sideways."""
    over = """() => [...document.querySelectorAll("svg.chart text, svg.graph text")].filter((text) => {
      const box = text.getBoundingClientRect(), around = text.closest("figure").getBoundingClientRect();
      return box.left < around.left - 1 || box.right > around.right + 1;
    }).map((text) => text.textContent)"""
    assert page.evaluate(over) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("command", ["inspect", "measure", "compare"])
def test_pages_of_500_layers_of_the_other_commands(open_page, command):
    made = {"lsuv": synthetic(500), "lsuv+channel": synthetic(500, 1, before=False, channels=True)}
    five = Comparison(made | {k: synthetic(500, n, "measure") for n, k in enumerate(("xavier", "msra", "keep"))})
    shown = five if command == "compare" else synthetic(500, command=command)
    page = open_page(shown.to_html(f"lsuv {command} m.onnx"), f"{command}500")
    assert len(names(page)) == 500
    assert page.locator("#graph a").count() == 500
    assert_nothing_is_cut(page)
    page.focus("#residual")
    page.keyboard.press("End")
    assert marked(page) == [499]


def test_a_click_on_a_title_sorts_up_then_down(open_page, report):
    page = open_page(report.to_html())
    head = page.locator("#layers thead th", has_text="at turn")
    by_turn = [layer.name for layer in sorted(report.layers, key=lambda layer: float(f"{layer.variance_at_turn:.5g}"))]
    head.locator("button").click()
    assert names(page) == by_turn
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").press("Enter")
    assert names(page) == by_turn[::-1]
    assert head.get_attribute("aria-sort") == "descending"


def test_the_filter_keeps_rows_with_all_words(open_page, report):
    page = open_page(report.to_html())
    page.fill("#filter", "LAYER2 conv1")
    assert names(page) == [x.name for x in report.layers if "layer2" in x.name and "conv1" in x.name]
    assert page.text_content("#found") == f"{len(names(page))} of 54 layers"
    page.fill("#filter", "")
    assert len(names(page)) == 54


def test_a_click_in_a_plot_marks_the_layer_everywhere(open_page, report):
    page = open_page(report.to_html())
    box = page.locator("#variance").bounding_box()
    left, right = (float(page.get_attribute("#variance", f"data-{end}")) for end in ("left", "right"))
    x = (left + (right - left) * (10 + 0.5) / 54) / 960 * box["width"]
    page.mouse.move(box["x"] + x, box["y"] + 50)
    tip = page.text_content("#tip")
    assert report.layers[10].name in tip
    assert "after LSUV: 1" in tip
    page.mouse.click(box["x"] + x, box["y"] + 50)
    assert marked(page) == [10]
    assert page.get_attribute("#graph a.marked", "href") == "#L10"
    assert page.text_content("#which") == f"11 {report.layers[10].name}"
    assert page.locator("#weights rect").count() == 24
    row, around = page.locator("#L10").bounding_box(), page.locator(".scroll").bounding_box()
    assert around["y"] < row["y"] < around["y"] + around["height"]


def test_a_click_in_the_graph_or_the_table_marks_too(open_page, report):
    page = open_page(report.to_html())
    page.click('#graph a[href="#L3"]')
    assert marked(page) == [3]
    page.click("#L5 th")
    assert marked(page) == [5]
    assert page.get_attribute("#graph a.marked", "href") == "#L5"
    assert page.get_attribute("#L5", "aria-selected") == "true"


def test_keys_do_what_the_mouse_does(open_page, report):
    page = open_page(report.to_html())
    page.focus("#variance")
    page.keyboard.press("Home")
    assert marked(page) == [0]
    page.keyboard.press("ArrowRight")
    assert marked(page) == [1]
    assert report.layers[1].name in page.text_content("#tip")
    page.focus("#graph a.marked")
    page.keyboard.press("End")
    assert marked(page) == [53]
    page.focus("#L53")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert marked(page) == [52]
    # By Tab one reaches one row and one box, not all of them.
    assert page.locator("#layers tr[tabindex='0']").count() == 1
    assert page.locator("#graph a[tabindex='0']").count() == 1
    assert "1 /stem/conv/Conv: ok, variance" in page.get_attribute('#graph a[href="#L0"]', "aria-label")


def test_a_comparison_is_coloured_by_the_initialization_that_one_chooses(open_page):
    five = compare(residual(3), normal(8, 3, 12, 12), ["lsuv", "msra", "keep"], details=True)
    page = open_page(five.to_html(), "compare")
    shades = "all => all.map(a => a.classList[0])"
    assert set(page.eval_on_selector_all("#graph a", shades)) == {"v4"}
    page.select_option("#colour", "keep")
    assert "v4" not in page.eval_on_selector_all("#graph a", shades)


def test_the_json_can_be_saved_also_where_it_is_compressed(open_page, tmp_path):
    many = synthetic(700)
    page = open_page(many.to_html())
    assert "gzip" in page.get_attribute("#report", "type")
    with page.expect_download() as saved:
        page.click("#save")
    assert json.loads(saved.value.path().read_text(encoding="utf-8")) == many.to_json()


def test_without_a_script_all_is_there_that_does_not_move(open_page, report):
    page = open_page(report.to_html(), java_script_enabled=False)
    assert page.locator("#layers tbody tr").count() == 54
    assert page.locator("#variance path.line").count() == 3
    assert not page.is_visible("#filter")  # it would do nothing
    page.click('#graph a[href="#L7"]')  # a link to the row
    assert page.url.endswith("#L7")


def test_names_from_a_model_run_nothing(open_page, tmp_path):
    proto = chain(2)
    for k, node in enumerate(proto.graph.node):
        node.name = f"{EVIL}{k}"
    onnx.save(proto, tmp_path / "m.onnx")
    report = initialize(str(tmp_path / "m.onnx"), np.ascontiguousarray(normal(16, 8)), details=True).report
    page = open_page(report.to_html(EVIL))
    assert page.locator("img").count() == 0
    assert "<img src=x onerror=alert(2)>" in page.text_content("#L0")


def test_it_prints_every_row(open_page, report):
    page = open_page(report.to_html())
    page.emulate_media(media="print")
    assert page.locator(".scroll").evaluate("box => box.scrollHeight <= box.clientHeight")
    assert not page.is_visible("#filter")


def test_on_paper_a_wide_table_keeps_what_matters_and_colours_are_light(open_page):
    five = compare(residual(3), normal(8, 3, 12, 12), details=True)
    page = open_page(five.to_html(), "paper", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    page.emulate_media(media="print", color_scheme="dark")
    page.set_viewport_size({"width": 1040, "height": 700})  # A4, across
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert max(page.eval_on_selector_all("#layers tbody tr", "all => all.map(row => row.offsetHeight)")) < 60
    heads = page.locator("#layers thead th:visible").all_text_contents()
    assert [head for head in heads if head.startswith("variance")] == [f"variance {init}" for init in five]
    assert "Left out on paper" in page.locator(".on-paper").inner_text()


def test_the_residual_stream_tells_and_marks_the_layer_before_each_sum(open_page):
    shown = inspect(residual(7), normal(8, 3, 12, 12), details=True)
    page = open_page(shown.to_html())
    page.focus("#residual")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    second = shown.sums[1]
    assert page.text_content("#tip").startswith(f"2 {second.name}\nvariance: ")
    assert shown.layers[marked(page)[0]].name == second.layer
    box = page.locator("#residual").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.97, box["y"] + 60)
    assert shown.layers[marked(page)[0]].name == shown.sums[-1].layer


def test_what_is_not_finite_has_a_colour_of_its_own(open_page):
    page = open_page(measure(not_finite(), normal(16, 8), details=True).to_html())
    assert marked(page) == [2]
    assert page.get_attribute('#graph a[href="#L3"]', "aria-label") == "4 fc3: non-finite, variance not finite"
    page.hover('#graph a[href="#L3"]')
    assert "as given: not finite" in page.text_content("#tip")


def test_a_filter_finds_what_is_said_once(open_page, report):
    page = open_page(report.to_html())
    page.fill("#filter", "float32 layer2 conv1")
    assert names(page) == [x.name for x in report.layers if "layer2" in x.name and "conv1" in x.name]


def contrast(first, second):
    """WCAG's ratio of two colours, given as rgb(r, g, b)."""

    def luminance(colour):
        parts = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_in_the_graph_can_be_read_on_every_colour(open_page, scheme):
    page = open_page(measure(chain(10), normal(16, 8), details=True).to_html(), "contrast", color_scheme=scheme)
    fills = """kind => {
      const box = document.querySelector("#graph a"); box.setAttribute("class", kind);
      return [...box.children].map((part) => getComputedStyle(part).fill);
    }"""
    for kind in [*(f"v{k}" for k in range(9)), "vx", "vn"]:
        assert contrast(*page.evaluate(fills, kind)) >= 4.5, kind
