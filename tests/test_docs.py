"""The documentation says what the code does."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from helpers import model, normal
from lsuv_cli.report import Status
from shell import MAXOUT, lsuv

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator():
    return runpy.run_path(str(DOCS / "generate.py"))


@pytest.mark.parametrize(
    ("page", "maker"), [("commands.md", "commands"), ("python.md", "python"), ("stages.svg", "figure")]
)
def test_generated_pages_are_in_step(generator, page, maker):
    assert (DOCS / page).read_text() == generator[maker](), "run python docs/generate.py"


def documented(heading):
    """The fields in the first table under a heading of json.md."""
    text = (DOCS / "json.md").read_text()
    section = re.split(r"^## ", text, flags=re.M)
    (body,) = [part for part in section if part.startswith(heading)]
    table = body.split("\n\n| status")[0]
    return re.findall(r"^\| `(\w+)` \|", table, flags=re.M)


def test_every_field_of_a_report_is_documented():
    report = json.loads(lsuv("inspect", MAXOUT, "--json").out)
    assert documented("Report") == list(report)
    assert documented("Layer") == list(report["layers"][0])
    assert documented("Settings") == list(report["settings"])
    statuses = re.findall(r"^\| `([\w-]+)` \| .* \| ([01]) \|$", (DOCS / "json.md").read_text(), flags=re.M)
    assert [name for name, _ in statuses] == list(Status)


def test_every_field_of_a_comparison_and_of_an_error_is_documented(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(lsuv("compare", MAXOUT, "--data", "random", "--limit", 2, "--inits", "keep", "--json").out)
    assert documented("Comparison") == list(found)
    onnx.save(model("g (float[N,2] x) => (float[N,2] y) { y = MatMul(x, W) }", W=normal(2, 2)), "a.onnx")
    Path("b.onnx").write_bytes(b"nothing")
    done = lsuv("init", "a.onnx", "b.onnx", "--data", "random", "--output-dir", "out", "--json")
    assert documented("Error") == list(json.loads(done.out)[1])


def test_every_metadata_entry_is_documented(tmp_path):
    lsuv("init", MAXOUT, "--data", "random", "--limit", 2, "-q", "-o", tmp_path / "m.onnx")
    page = (DOCS / "how-it-works.md").read_text()
    for entry in onnx.load(tmp_path / "m.onnx").metadata_props:
        assert f"`{entry.key}`" in page


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*DOCS.glob("*.md"), *ROOT.glob("*.md")])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_options_exist(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        if not target.startswith("https://"):
            assert (ROOT / page).parent.joinpath(target).exists(), target
    known = set(re.findall(r"`(--[\w-]+)`", (DOCS / "commands.md").read_text())) | {
        "--help", "--version", "--install-completion", "--show-completion", "--recurrent",
    }  # fmt: skip
    for line in re.findall(r"^ *(?:\$ )?lsuv .*$", text, flags=re.M):
        for option in re.findall(r"(?<=\s)--[a-z][\w-]*", line.split("#")[0].split("|")[0]):
            assert option in known, f"{page}: {option}"


def test_the_page_on_the_architecture_names_every_module():
    page = (DOCS / "architecture.md").read_text()
    modules = [path for path in (ROOT / "lsuv_cli").rglob("*.py") if not path.stem.startswith("__")]
    assert not [path.stem for path in modules if f"`{path.stem}`" not in page]


def test_the_examples_of_the_python_page_run(tmp_path):
    """Each block of code in python.md, one after another, in a directory that has a model and data."""
    text = (DOCS / "python.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S))
    (tmp_path / "model.onnx").write_bytes(MAXOUT.read_bytes())
    (tmp_path / "calib.npy").write_bytes(MAXOUT.with_suffix(".npy").read_bytes())
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^```text\n(.*?)^```", text, flags=re.M | re.S)
    assert done.stdout == "".join(shown)
