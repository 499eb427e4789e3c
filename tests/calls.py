# mypy: disable-error-code="arg-type"
"""lsuv as the differential tester calls it: from Python, or as a command. Either gives the report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from disguises import Case
from lsuv_cli import initialize
from lsuv_cli.errors import LsuvError


def by_call(case: Case, folder: Path) -> Any:
    """The report of `initialize`, which reads m.onnx in the folder and writes o.onnx."""
    where = {"output": folder / "o.onnx", "device": "cpu", "threads": 1}
    return initialize(folder / "m.onnx", case.data(), **where, **case.settings).report


def by_command(case: Case, folder: Path) -> Any:
    """The report of `lsuv init`, from its JSON; an error of the request becomes the exception it was."""
    words = ["init", "m.onnx", "-o", "o.onnx", "--json", "--device", "cpu", "--threads", "1"]
    for name, value in case.settings.items():
        option = f"--{name.replace('_', '-')}"
        for item in value if isinstance(value, list) else [value]:
            words += [option] if item is True else [option, str(item)]
    with tempfile.TemporaryDirectory() as other:
        np.savez(Path(other) / "d.npz", **case.data())
        command = [sys.executable, "-c", "from lsuv_cli.cli import main; main()", *words]
        command += ["--data", str(Path(other) / "d.npz")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 2 and "internal error" not in done.stderr:
        raise LsuvError(done.stderr)
    if done.returncode not in {0, 1}:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr}")
    told = json.loads(done.stdout)
    entries = [SimpleNamespace(**entry) for entry in told["layers"]]
    return SimpleNamespace(layers=entries, exit_code=done.returncode)
