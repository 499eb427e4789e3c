"""Arguments of a wrong type, from Python: one error that names the argument and what it takes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lsuv_cli
from lsuv_cli import LsuvError

MODEL = str(Path(__file__).parent.parent / "sample_models" / "fitnet1_relu.onnx")
DATA = np.zeros((2, 3, 32, 32), np.float32)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (lsuv_cli.initialize, {"model": 5}, "`model` 5 is not a path, the bytes of an ONNX file or a ModelProto"),
        (lsuv_cli.initialize, {"model": bytearray(b"x")}, "`model` of type bytearray is not a path"),
        (lsuv_cli.measure, {"model": None}, "`model` None is not a path"),
        (lsuv_cli.initialize, {"output": 5}, "`output` 5 is not a path"),
        (lsuv_cli.initialize, {"weights": 5}, "`weights` 5 is not a path"),
        (lsuv_cli.initialize, {"like": 5}, "`like` 5 is not a path, or a mapping of names to arrays"),
        (lsuv_cli.initialize, {"dry_run": "no"}, "`dry_run` 'no' is not True or False"),
        (lsuv_cli.initialize, {"force": "yes"}, "`force` 'yes' is not True or False"),
        (lsuv_cli.initialize, {"without_weights": 1}, "`without_weights` 1 is not True or False"),
        (lsuv_cli.measure, {"drawn": "a.png"}, "`drawn` 'a.png' is not a mapping of names to paths"),
        (lsuv_cli.measure, {"listen": None}, "`listen` None is not a function"),
        (lsuv_cli.inspect, {"dump": 5}, "`dump` 5 is not a path"),
        (lsuv_cli.inspect, {"details": "x"}, "`details` 'x' is not True or False"),
        (lsuv_cli.initialize, {"batch_size": np.array([1, 2])}, "`batch_size` array"),
        (lsuv_cli.initialize, {"std": float("nan")}, "`std` nan is not a list of numbers"),
        (lsuv_cli.initialize, {"input_shapes": {"x": 5}}, "`input_shapes` {'x': 5} is not a name and its lengths"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(
    function: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(LsuvError, match=re.escape(message)):
        function(**{"model": MODEL, "data": DATA, **arguments})


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (lsuv_cli.expose, {"output": 5}, "`output` 5 is not a path"),
        (lsuv_cli.strip, {"keep": 5}, "`keep` 5 is not a pattern or a list of patterns"),
        (lsuv_cli.strip, {"keep": ["a", 5]}, "`keep` of type list is not a pattern or a list of patterns"),
        (lsuv_cli.strip, {"force": 1}, "`force` 1 is not True or False"),
    ],
)
def test_so_is_one_of_a_function_without_data(
    function: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(LsuvError, match=re.escape(message)):
        function(MODEL, **arguments)


def test_an_argument_by_position_is_checked_too() -> None:
    with pytest.raises(LsuvError, match="`output` 5 is not a path"):
        lsuv_cli.expose(MODEL, 5)  # type: ignore[arg-type]


def test_an_unknown_argument_is_a_type_error_as_everywhere_in_python() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        lsuv_cli.expose(MODEL, colour=1)  # type: ignore[call-arg]
