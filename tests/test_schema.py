"""The JSON Schema of the report: in step with the types, and true of what every command prints."""

import json
import runpy
from pathlib import Path

import pytest

from shell import MAXOUT, lsuv

ROOT = Path(__file__).parent.parent
FILE = ROOT / "lsuv_cli" / "report.schema.json"
DATA = MAXOUT.with_suffix(".npy")


def test_the_file_is_in_step_with_the_types():
    made = runpy.run_path(str(ROOT / "docs" / "schema.py"))["schema"]()
    assert FILE.read_text() == made, "run python docs/generate.py"


@pytest.fixture
def validator():
    jsonschema = pytest.importorskip("jsonschema", reason="there is no jsonschema here")
    return jsonschema.Draft202012Validator(json.loads(FILE.read_text()))


COMMANDS = {
    "init": ("init", MAXOUT, "-o", "m.onnx", "--weights", "w.npz"),
    "init with a page": ("init", MAXOUT, "-o", "m.onnx", "--html", "p.html", "--no-rescale"),
    "init of several": ("init", MAXOUT, "broken.onnx", "--output-dir", "out"),
    "dry run": ("init", MAXOUT, "--dry-run"),
    "inspect": ("inspect", MAXOUT, "--html", "p.html"),
    "inspect with values": ("inspect", MAXOUT, "--dump", "values"),
    "check": ("check", MAXOUT),
    "compare": ("compare", MAXOUT, "--inits", "lsuv,keep", "--html", "p.html"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_what_each_command_prints_fits_the_schema(validator, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.onnx").write_bytes(b"nothing")
    printed = json.loads(lsuv(*words, "--data", DATA, "--limit", 4, "--json").out)
    validator.validate(printed)


def test_the_schema_refuses_what_is_no_report(validator):
    printed = json.loads(lsuv("check", MAXOUT, "--data", DATA, "--limit", 4, "--json").out)
    for spoil in ({"layers": None}, {"samples": "4"}, {"schema": "lsuv-report/0"}):
        assert not validator.is_valid(printed | spoil)
    printed["layers"][0]["status"] = "fine"
    assert not validator.is_valid(printed)
