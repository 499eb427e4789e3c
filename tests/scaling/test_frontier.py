"""Values that wait between stages, in memory and in a file."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from helpers import normal
from lsuv_cli.scaling.frontier import Frontier, Spilled, _type_of
from lsuv_cli.scaling.runtime import host_value, to_numpy


@pytest.fixture
def filled():
    """Makes frontiers with a budget and the values of some batches, and closes them."""
    made = []

    def fill(budget, *batches):
        made.append(Frontier(budget))
        for number, values in enumerate(batches):
            made[-1].put(number, {name: host_value(array) for name, array in values.items()})
        return made[-1]

    yield fill
    for frontier in made:
        frontier.close()


def test_bfloat16_waits_in_a_file_too(filled):
    given = normal(3, 4).astype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
    frontier = filled(0, {"a": given})
    assert isinstance(frontier.kept[0]["a"], Spilled)
    assert frontier.types(["a"])["a"].tensor_type.elem_type == TensorProto.BFLOAT16
    np.testing.assert_array_equal(to_numpy(frontier.get(0, "a")), given.astype(np.float32))


def test_values_come_back_as_they_were(filled):
    one, two = {"a": normal(3, 4), "b": np.arange(5)}, {"a": normal(2, 4, seed=1), "b": np.arange(7)}
    for budget in (1000, 48, 0):
        frontier = filled(budget, one, two)
        for number, given in enumerate((one, two)):
            for name, array in given.items():
                value = frontier.get(number, name)  # which holds the memory of its array
                found = to_numpy(value)
                np.testing.assert_array_equal(found, array)
                assert found.dtype == array.dtype


@pytest.mark.parametrize(("budget", "held", "spilled"), [(200, 144, 0), (144, 144, 0), (143, 96, 48), (47, 0, 144)])
def test_what_is_above_the_budget_waits_in_a_file(filled, budget, held, spilled):
    frontier = filled(budget, *[{"a": normal(3, 4, seed=k)} for k in range(3)])
    assert (frontier.bytes, frontier.spilled, frontier.peak) == (held, spilled, held)
    assert sum(isinstance(batch["a"], Spilled) for batch in frontier.kept) == spilled // 48


def test_what_is_no_longer_needed_is_freed(filled):
    frontier = filled(1000, *[{"a": normal(3, 4), "b": normal(2)} for _ in range(2)])
    frontier.keep_only(0, {"b"})
    assert set(frontier.kept[0]) == {"b"}
    assert set(frontier.kept[1]) == {"a", "b"}
    assert frontier.bytes == 48 + 8 + 8
    assert frontier.peak == 112
    frontier.keep_only(7, set())  # a batch that has nothing waiting
    frontier.put(1, {"a": host_value(normal(1, 4))})
    assert frontier.bytes == 16 + 8 + 8
    frontier.keep_only(1, set())
    assert frontier.bytes == 8


def test_a_spilled_value_that_is_replaced_frees_no_memory(filled):
    frontier = filled(60, {"a": normal(3, 4), "b": normal(3, 4, seed=1)})
    assert frontier.bytes == 48
    frontier.put(0, {"b": host_value(normal(1, 3))})
    assert frontier.bytes == 60
    value = frontier.get(0, "b")
    np.testing.assert_array_equal(to_numpy(value), normal(1, 3))


def test_a_number_without_axes_and_texts_stay_in_memory(filled):
    frontier = filled(0, {"n": np.array(3.0, np.float32), "s": np.array(["a", "b"])})
    assert frontier.spilled == 0
    assert frontier.bytes == 0


@pytest.mark.parametrize("budget", [0, 1000])
def test_types_have_the_dimensions_that_all_batches_have(filled, budget):
    frontier = filled(budget, {"a": normal(3, 4), "b": normal(2, 2)}, {"a": normal(5, 4), "b": normal(2)})
    found = frontier.types(["a", "b"])
    assert found["a"] == helper.make_tensor_type_proto(TensorProto.FLOAT, [None, 4])
    assert found["b"] == helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    same = filled(budget, {"i": np.arange(6)}, {"i": np.arange(6)}).types(["i"])
    assert same == {"i": helper.make_tensor_type_proto(TensorProto.INT64, [6])}


class Described:
    def __init__(self, text):
        self.text = text

    def data_type(self):
        return self.text


def test_types_by_onnxruntime_s_description():
    plain = helper.make_tensor_type_proto(TensorProto.DOUBLE, None)
    assert _type_of(Described("tensor(double)"), None) == plain
    assert _type_of(Described("seq(tensor(double))"), None) == helper.make_sequence_type_proto(plain)
    assert _type_of(Described("optional(tensor(double))"), None) == helper.make_optional_type_proto(plain)
    nested = helper.make_optional_type_proto(helper.make_sequence_type_proto(plain))
    assert _type_of(Described("optional(seq(tensor(double)))"), None) == nested
    small = helper.make_tensor_type_proto(TensorProto.FLOAT16, [2])
    assert _type_of(Described("tensor(float16)"), [2]) == small
    assert _type_of(Described("tensor(float)"), [2]) == helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    with pytest.raises(Exception, match="a value of type map"):
        _type_of(Described("map(int64,float)"), None)
