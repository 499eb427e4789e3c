"""Operators that draw random numbers, and their seeds."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from lsuv_cli.model.random_ops import is_random, seeded

# ONNX gives every operator that draws numbers an attribute for the seed.
DRAWING = sorted({schema.name for schema in onnx.defs.get_all_schemas() if "seed" in schema.attributes} - {"Dropout"})


@pytest.mark.parametrize("op", DRAWING)
def test_every_operator_that_onnx_gives_a_seed_draws_numbers(op):
    assert is_random(helper.make_node(op, [], ["y"]), {})


@pytest.mark.parametrize(
    ("inputs", "flag", "drawn"),
    [
        (["x"], None, False),
        (["x", "r"], None, False),
        (["x", "r", ""], None, False),
        (["x", "r", "t"], None, True),  # a node computes it
        (["x", "r", "t"], True, True),
        (["x", "r", "t"], False, False),
    ],
)
def test_a_dropout_draws_numbers_in_training_mode_alone(inputs, flag, drawn):
    tensors = {} if flag is None else {"t": numpy_helper.from_array(np.array(flag), "t")}
    assert is_random(helper.make_node("Dropout", inputs, ["y"]), tensors) == drawn
    assert not is_random(helper.make_node("Relu", inputs, ["y"]), tensors)


def test_a_seed_is_the_models_or_one_of_its_own_that_float32_holds():
    given = helper.make_node("RandomNormal", [], ["y"], seed=3.0)
    assert seeded(given) is given
    first, second = (seeded(helper.make_node("RandomNormal", [], [name])).attribute[0] for name in "yz")
    assert first.name == "seed"
    assert first.f != second.f
    assert np.float32(first.f) == first.f
    assert first == seeded(helper.make_node("RandomNormal", [], ["y"])).attribute[0]
    drop = seeded(helper.make_node("Dropout", ["x", "r", "t"], ["y"])).attribute[0]
    assert drop.type == onnx.AttributeProto.INT
    assert drop.i == first.f
