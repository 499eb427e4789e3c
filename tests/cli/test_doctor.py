"""`lsuv doctor`: what a device has, and whether it computes what the CPU computes."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lsuv_cli import doctor as examined
from lsuv_cli import examination
from lsuv_cli.examination import TYPES
from lsuv_cli.scaling import devices, runtime, shares
from lsuv_cli.scaling.frontier import Frontier
from lsuv_cli.scaling.providers import PROVIDERS, ROWS
from shell import lsuv

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def healthy():
    return examined(device="cpu", threads=1)


def test_a_healthy_device(healthy):
    assert healthy.exit_code == 0
    assert [case.dtype for case in healthy.cases] == [*TYPES, "float32"]
    assert all(case.worst <= case.limit for case in healthy.cases)
    assert all(case.equal for case in healthy.cases)
    assert healthy.memory["host_peak"] > 2**20
    assert healthy.seconds["cpu"] > 0


def test_every_value_between_stages_waits_in_a_file(monkeypatch):
    made = []

    class Kept(Frontier):
        def __init__(self, budget):
            super().__init__(budget)
            made.append(self)

    monkeypatch.setattr(shares, "Frontier", Kept)
    monkeypatch.setattr(examination, "TYPES", {"float32": "float"})
    examined(device="cpu", threads=1)
    stages = [frontier for frontier in made if frontier.budget == 1 and frontier.spilled]
    assert stages
    assert all(frontier.peak <= 1 for frontier in stages)


def test_numbers_that_are_off_are_noticed(monkeypatch):
    """A device whose outputs of all but the reference's sessions are 1 % too large."""
    real = runtime.Session.run

    def run(self, values):
        kept, fetched = real(self, values)
        if self.device.threads == 2:
            fetched = [[array * array.dtype.type(1.01) for array in arrays] for arrays in fetched]
        return kept, fetched

    monkeypatch.setattr(runtime.Session, "run", run)
    found = examined(device="cpu", threads=2)
    assert found.exit_code == 1
    assert any("network in float32" in problem for problem in found.problems)


def test_a_device_that_cannot_be_used_is_the_diagnosis(monkeypatch):
    monkeypatch.setattr(devices, "unfit", lambda name, index: "the fan is loose; use `device=cpu`")
    done = lsuv("doctor", "--device", "webgpu:1")
    assert done.code == 1
    assert re.search(r"^off +--device webgpu:1 cannot be used: the fan is loose; use --device cpu$", done.out, re.M)
    told = json.loads(lsuv("doctor", "--device", "webgpu:1", "--json").out)
    assert told["device"] == ""
    assert told["exit_code"] == 1
    assert list(told["memory"]) == ["host_free", "device_free", "device_total", "host_peak", "device_peak"]


def test_versions_of_the_packages_of_all_providers_are_told(monkeypatch):
    row = replace(PROVIDERS["cpu"], name="new", packages=("typer", "not-installed"))
    monkeypatch.setattr(examination, "ROWS", (*ROWS, row))
    told = examination._versions()
    assert {"onnx", "numpy", "typer", "Python", "system"} <= set(told)
    assert "not-installed" not in told


def test_a_device_that_does_not_exist_is_a_bad_request():
    done = lsuv("doctor", "--device", "tpu")
    assert done.code == 2
    assert "--device 'tpu' is not one of" in done.err


def test_the_block_and_the_json(healthy, monkeypatch):
    monkeypatch.setattr(examination, "examine", lambda settings, listen: healthy)
    done = lsuv("doctor")
    assert done.code == 0
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("float", "bfloat"))] == [*TYPES, "float32"]
    assert lines[-1] == "verdict     all is well: every type gives what the CPU gives"
    told = json.loads(lsuv("doctor", "--json").out)
    text = (DOCS / "json.md").read_text()
    (section,) = [part for part in re.split(r"^## ", text, flags=re.M) if part.startswith("Doctor")]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.M) == list(told)
    assert all(f"`{name}`" in section for name in (*told["cases"][0], *told["memory"], *told["seconds"]))


@pytest.mark.parametrize("device", ["cuda:x", "cuda:", "cuda:-1", "cuda:\u0663", "cpu:1", "webgpu:", "auto:0", "gpu"])
def test_a_device_that_cannot_be_meant_is_a_wrong_request(device):
    done = lsuv("doctor", "--device", device)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith(f"lsuv: --device '{device}' is not one of")
    assert done.err.count("\n") == 1
