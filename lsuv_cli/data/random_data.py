"""Random calibration data: standard normal numbers, for a quick look at a model without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lsuv_cli.data.batches import BatchSize, Calibration, from_arrays
from lsuv_cli.data.files import Array
from lsuv_cli.data.inputs import InputSpec
from lsuv_cli.errors import DataError

RANDOM = "random"  # the value of `--data` that asks for random data
SAMPLES = 64


def random(
    inputs: Sequence[InputSpec], *, batch_size: BatchSize = None, limit: int | None = None, seed: int = 0
) -> Calibration:
    """Standard normal numbers, or 0 and 1 for an input of integers, in the shapes that the model declares."""
    rng = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for spec in inputs:
        shape = _shape(spec, limit or SAMPLES)
        numbers = rng.standard_normal(shape) if spec.fed_dtype.kind == "f" else rng.integers(0, 2, shape)
        made[spec.name] = np.asarray(numbers, spec.fed_dtype)
    return replace(from_arrays(made, inputs, batch_size=batch_size, limit=limit), source=RANDOM)


def _shape(spec: InputSpec, samples: int) -> list[int]:
    """An input's shape for so many samples, or as many as fill whole batches of a fixed size."""
    if spec.shape is None or spec.fed_dtype.kind not in "fiub":
        raise DataError(f"random data does not fit input {spec.name!r} {spec.wanted}; give data")
    shape: list[int] = []
    for axis, dim in enumerate(spec.shape):
        fixed = isinstance(dim, int) and dim > 0
        if axis and not fixed:
            raise DataError(f"random data does not fit input {spec.name!r} {spec.wanted}: its shape is open; give data")
        size = dim if isinstance(dim, int) and fixed else 1
        shape.append(size if axis else max(samples // size, 1) * size)
    return shape
