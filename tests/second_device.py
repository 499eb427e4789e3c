"""The tests' calls on a second device, compared with the CPU: LSUV_TEST_DEVICE=webgpu (tests/webgpu.sh).

Every call that leaves the device open runs there. `initialize` then runs on the CPU as well; the statuses must be
equal, and every float tensor of the result within ACCURACY of the CPU's, relative to its largest element, or within one
rounding of its type.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from lsuv_cli import api

DEVICE = os.environ.get("LSUV_TEST_DEVICE", "")
ACCURACY = 1e-5
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def install() -> None:
    """Replace the functions of the Python API; tests import them later."""
    for name in ("measure", "inspect", "compare"):
        setattr(api, name, _there(getattr(api, name)))
    api.initialize = _compared(api.initialize)


def _there(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **_on(DEVICE, named))

    return call


def _compared(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialize)
    def call(*given: Any, **named: Any) -> Any:
        there = initialize(*given, **_on(DEVICE, named))
        used_up = any(isinstance(argument, Iterator) for argument in (*given, *named.values()))
        if there.model is not None and not used_up and named.get("device", "auto") == "auto":
            unwritten = {name: value for name, value in named.items() if name not in {"output", "weights", "listen"}}
            if "like" not in unwritten:
                _agree(there, initialize(*given, **_on("cpu", unwritten)))
        return there

    return call


def _on(device: str, named: dict[str, Any]) -> dict[str, Any]:
    return {**named, "device": device} if named.get("device", "auto") == "auto" else named


def _agree(there: Any, here: Any) -> None:
    """Assert that two results agree."""
    assert [x.status for x in there.report.layers] == [x.status for x in here.report.layers]
    expected = _tensors(here.model)
    for name, found in _tensors(there.model).items():
        most = ACCURACY + ROUNDING.get(str(found.dtype), 0.0)
        wide, right = np.asarray(found, np.float64), np.asarray(expected[name], np.float64)
        # A bias is added to an output of variance 1; one that centres it may be nothing but rounding.
        largest = float(np.abs(right).max(initial=1.0 if right.ndim < 2 else 0.0))
        if np.isfinite(largest):
            off = float(np.abs(wide - right).max(initial=0.0))
            assert off <= most * largest, f"{name} on {DEVICE} is off by {off / largest:.1e} of the CPU's"


def _tensors(proto: onnx.ModelProto) -> dict[str, Any]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer if t.data_type in {1, 10, 11, 16}}
