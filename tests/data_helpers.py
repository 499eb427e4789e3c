"""Inputs of a model and data for them, for the tests of lsuv_cli/data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lsuv_cli.data.batches import InputSpec, from_arrays
from lsuv_cli.data.reading import read
from lsuv_cli.errors import DataError

IMAGES = InputSpec("data", "float32", ("N", 3, 4, 4))
ROWS = InputSpec("x", "float32", ("N", 2))
IDS = InputSpec("ids", "int64", ("batch", "time"))


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def counting(*shape: int) -> Any:
    """Small distinct numbers, so that order shows."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape) / 100


def saved(path: Path, array: Any) -> str:
    np.save(path, array)
    return str(path)


def fed(calibration: Any, name: str = "x") -> Any:
    return np.concatenate([batch[name] for batch in calibration.batches])


def lengths(calibration: Any, name: str = "x") -> list[int]:
    return [len(batch[name]) for batch in calibration.batches]


def message(sources: Any, *inputs: InputSpec, **options: Any) -> str:
    """The one line that a person gets for this request."""
    with pytest.raises(DataError) as caught:
        if isinstance(sources, list) and all(isinstance(source, str) for source in sources):
            read(sources, inputs, **options)
        else:
            from_arrays(sources, inputs, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text
