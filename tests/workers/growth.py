"""Whether the driver's memory grows with the number of stages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx

from helpers import normal
from stories import tanhs

SIZE = 1024
STAGE = 4 * SIZE * SIZE  # bytes: a weight each


def assert_memory_does_not_grow(directory: Path, who: str) -> None:
    """Ten times as many stages, 151 MB more of weights, take less than four stages' weights more."""
    few, many = (_peak(directory / f"{depth}", depth, who) for depth in (4, 40))
    assert many - few < 4 * STAGE


def _peak(directory: Path, depth: int, who: str) -> int:
    """The most bytes that were the driver's own."""
    directory.mkdir()
    model = directory / "m.onnx"
    onnx.save(tanhs(depth, SIZE), model, save_as_external_data=True, location="m.bin", size_threshold=0)
    np.save(directory / "c.npy", normal(16, SIZE))
    words = [sys.executable, str(Path(__file__).parent / "driver_memory.py"), "m.onnx", "c.npy", who]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stages, peak = map(int, done.stdout.split())
    assert stages == depth
    return peak
