"""Arrays for the model's inputs: names, types, values and shapes, and what is said when they do not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_helpers import IDS, IMAGES, ROWS, counting, message, normal, saved
from lsuv_cli.data.batches import InputSpec, from_arrays
from lsuv_cli.data.reading import read

# Names


def test_an_unknown_name_lists_the_inputs(tmp_path: Path) -> None:
    text = message([f"y={saved(tmp_path / 'c.npy', normal(3, 2))}"], ROWS, IDS)
    assert "the model has no input 'y'" in text
    assert "inputs are 'x' (N, 2) float32, 'ids' (batch, time) int64" in text


def test_an_npy_file_for_one_of_two_inputs_needs_a_name(tmp_path: Path) -> None:
    text = message([saved(tmp_path / "c.npy", normal(3, 2))], ROWS, IDS)
    assert "c.npy" in text
    assert "'ids'" in text
    assert "NAME=PATH" in text


def test_an_optional_input_needs_no_data(tmp_path: Path) -> None:
    optional = InputSpec("ids", "int64", (None, None), required=False)
    assert set(read([saved(tmp_path / "c.npy", normal(3, 2))], [optional, ROWS]).batches[0]) == {"x"}


def test_an_input_without_data_is_named_with_what_was_there_instead(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", x=normal(3, 2), idz=np.ones((3, 5), int))
    text = message([f"{tmp_path}/c.npz"], ROWS, IDS)
    assert "no data for input 'ids', but for 'idz', which the model does not have" in text


def test_an_array_for_no_input_is_a_warning_if_all_inputs_have_theirs(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", x=normal(3000, 2), labels=np.ones(3000, int))
    (warning,) = read([f"{tmp_path}/c.npz"], [ROWS]).warnings
    assert "c.npz: 'labels' is not an input of the model" in warning


def test_an_input_given_twice(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.npy", normal(3, 2))
    assert "input 'x' has data already; put its files into one directory" in message([path, f"x={path}"], ROWS)


def test_no_data_at_all() -> None:
    assert "no data for input 'x'" in message([], ROWS)


@pytest.mark.parametrize("batch_size", [None, 4, "all"])
def test_a_model_without_inputs_is_run_once_with_nothing(batch_size: Any) -> None:
    assert list(read([], [], batch_size=batch_size).batches) == [{}]


# Types


@pytest.mark.parametrize("given_as", ["float64", "float32", "float16", ">f4", "int64", "uint8", "bool"])
@pytest.mark.parametrize(
    ("declared", "delivered"),
    [("float16", "float16"), ("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_numbers_are_cast_to_a_float_input(given_as: str, declared: str, delivered: str) -> None:
    spec = InputSpec("x", declared, ("N", 2))
    value = from_arrays(np.array([[0, 1], [1, 0]], given_as), [spec]).batches[0]["x"]
    assert (value.dtype, value.tolist()) == (np.dtype(delivered), [[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("declared", "given_as", "values"),
    [
        ("int64", "int32", [-1, 5]),
        ("int32", "int64", [-(2**31), 2**31 - 1]),
        ("uint8", "int64", [0, 255]),
        ("int64", "bool", [0, 1]),
        ("bool", "bool", [0, 1]),
        ("bool", "int64", [0, 1]),
        ("uint64", "uint64", [0, 2**64 - 1]),
    ],
)
def test_integers_are_cast_where_their_values_fit(declared: str, given_as: str, values: list[int]) -> None:
    value = from_arrays(np.array(values, given_as), [InputSpec("i", declared, ("N",))]).batches[0]["i"]
    assert (value.dtype, value.tolist()) == (np.dtype(declared), values)


@pytest.mark.parametrize(
    ("declared", "given_as", "values", "expected"),
    [
        ("int32", "int64", [0, 2**31], "its values go from 0 to 2147483648"),
        ("int64", "uint64", [0, 2**63], "must be -9223372036854775808 to 9223372036854775807"),
        ("uint8", "int8", [-1, 1], "its values go from -1 to 1 and must be 0 to 255"),
        ("bool", "int64", [0, 2], "must be 0 to 1"),
        (
            "int64",
            "float32",
            [1, 2],
            "wants (N,) int64, got (2,) float32; convert it with a.astype(np.int64)",
        ),
        ("bool", "float32", [0, 1], "convert it with a.astype(bool)"),
        ("int64", "U1", ["1", "2"], "convert it with a.astype(np.int64)"),
        ("float32", "U1", ["1", "2"], "convert it with a.astype(np.float32)"),
        ("float32", "complex64", [1, 2], "complex numbers do not fit, use a.real"),
        ("float32", "M8[s]", [1, 2], "convert it with a.astype(np.float32)"),
        ("float32", "object", [1, 2], "convert it with a.astype(np.float32)"),
        ("string", "int64", [1, 2], "convert it with a.astype(str)"),
        ("string", "S2", [b"\xff", b"a"], "its text is not valid UTF-8"),
        ("string", "U1", ["\ud800", "a"], "its text is not valid UTF-8"),
        ("string", "object", ["a", None], "not all of its values are strings"),
        ("complex64", "complex64", [1, 2], "input 'i' is of type complex64, which lsuv cannot feed"),
    ],
)
def test_types_that_do_not_fit(declared: str, given_as: str, values: list[Any], expected: str) -> None:
    text = message(np.array(values, given_as), InputSpec("i", declared, ("N",)))
    assert "'i'" in text
    assert expected in text


@pytest.mark.parametrize("given_as", ["U3", "S3", "object"])
def test_strings_are_fed_as_objects(given_as: str) -> None:
    texts = np.array(["ab", "cde"], given_as)
    value = from_arrays(texts, [InputSpec("s", "string", ("N",))]).batches[0]["s"]
    assert (value.dtype.kind, value.tolist()) == ("O", ["ab", "cde"])


def test_fortran_order_is_delivered_in_c_order(tmp_path: Path) -> None:
    values = counting(5, 2).astype(np.float32)
    value = read([saved(tmp_path / "c.npy", np.asfortranarray(values))], [ROWS]).batches[0]["x"]
    assert value.flags.c_contiguous
    assert value.tolist() == values.tolist()


# NaN and Inf


def test_nan_and_inf_are_counted_and_the_first_is_shown(tmp_path: Path) -> None:
    values = normal(200_000, 2)
    values[150_000, 1], values[170_000] = np.nan, np.inf
    text = message([saved(tmp_path / "c.npy", values)], ROWS)
    assert f"input 'x' has 3 NaN or Inf, the first at index (150000, 1) of {tmp_path}/c.npy (nan" in text


def test_nan_in_a_directory_names_the_file_and_the_index_in_it(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.array([0.5, np.nan if number == 2 else 1]))
    assert f"index (1,) of {tmp_path}/2.npy" in message([str(tmp_path)], ROWS)


def test_a_number_too_large_for_the_input_is_shown_as_it_was() -> None:
    spec = InputSpec("x", "float16", ("N", 1))
    assert "1 NaN or Inf, the first at index (1, 0) of array (70000.0 as float16)" in message(
        np.array([[1.0], [70000.0]]), spec
    )


def test_nan_in_a_scalar() -> None:
    rate = InputSpec("rate", "float32", ())
    assert "index () of array" in message({"x": normal(3, 2), "rate": np.array(np.nan)}, ROWS, rate)


@pytest.mark.parametrize("options", [{"limit": 4}, {}])
def test_nan_in_samples_that_are_not_used_is_no_error(options: Any) -> None:
    values = normal(5, 2)
    values[4] = np.nan
    spec = ROWS if options else InputSpec("x", "float32", (4, 2))
    assert from_arrays(values, [spec], **options).samples == 4


# Shapes


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (
            (None, 3, 4, 5),
            (9, 4, 5, 3),
            "wants (N, 3, 4, 5) float32, got (9, 4, 5, 3) float64; transpose it with",
        ),
        (("B", 3, 32, 32), (9, 32, 32, 3), "numpy.transpose(a, (0, 3, 1, 2))"),
        (("B", 32, 32, 3), (9, 3, 32, 32), "numpy.transpose(a, (0, 2, 3, 1))"),
        (("B", 3, "H", "W"), (9, 8, 8, 3), "numpy.transpose(a, (0, 3, 1, 2))"),
        (("B", 3, 32, 32), (32, 32, 3), "numpy.transpose(a, (2, 0, 1))"),
        (("B", 1, 28, 28), (9, 784), "reshape it with a.reshape(-1, 1, 28, 28)"),
        (("B", 1, 28, 28), (9, 28, 28), "reshape it with a.reshape(-1, 1, 28, 28)"),
        (("B", 1), (9,), "reshape it with a.reshape(-1, 1)"),
        (("B", 3, 32, 32), (9, 3, 32, 31), "give it the shape wanted, samples along the first axis"),
        (("B", 2), (2, 2, 2, 2), "wants (B, 2) float32, got (2, 2, 2, 2) float64"),
        (("B", None, 2), (9, 5, 3), "wants (B, ?, 2) float32"),
        (("B", 2), (), "got () float64"),
        ((), (3, 2), "wants () float32, got (3, 2)"),
    ],
)
def test_a_shape_that_does_not_fit_says_what_would(spec: Any, shape: Any, expected: str) -> None:
    text = message(normal(*shape), InputSpec("data", "float32", spec))
    assert "array: input 'data'" in text
    assert expected in text


def test_a_shape_error_names_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "calib.npy", normal(10, 4, 4, 3))
    assert message([path], IMAGES) == (
        f"{path}: input 'data' wants (N, 3, 4, 4) float32, got (10, 4, 4, 3) float64; "
        "transpose it with numpy.transpose(a, (0, 3, 1, 2))"
    )


def test_a_sample_without_its_batch_axis_is_a_batch_of_one() -> None:
    (batch,) = from_arrays(normal(3, 4, 4), [IMAGES]).batches
    assert batch["data"].shape == (1, 3, 4, 4)


def test_a_row_is_a_run_where_the_data_has_an_axis_more() -> None:
    values = counting(4, 3, 2)
    batches = from_arrays(values, [InputSpec("x", "float64", (3, 2))]).batches
    np.testing.assert_array_equal([batch["x"] for batch in batches], values)


def test_without_a_batch_axis_the_limit_counts_runs() -> None:
    calibration = from_arrays(normal(4, 3, 2), [InputSpec("x", "float32", (3, 2))], limit=2)
    assert (len(calibration.batches), calibration.samples) == (2, 2)


@pytest.mark.parametrize("fine", [None, 1, 3])
def test_a_batch_size_that_says_the_same_as_the_runs_is_taken(fine: int | None) -> None:
    assert len(from_arrays(normal(4, 3, 2), [ROWS], batch_size=fine).batches) == 4


def test_a_batch_size_makes_no_sense_where_each_row_is_a_run() -> None:
    text = message(normal(4, 3, 2), ROWS, batch_size=2)
    assert text == "each row for input 'x' is one run; leave out `batch_size=2`"


def test_an_unknown_rank_takes_anything_along_its_first_axis() -> None:
    calibration = from_arrays(normal(5, 1, 7), [InputSpec("x", "float32", None)], batch_size=2)
    assert [batch["x"].shape for batch in calibration.batches] == [(2, 1, 7), (2, 1, 7), (1, 1, 7)]


@pytest.mark.parametrize("any_length", [0, -1, None, "T"])
def test_an_axis_of_any_length_may_be_written_in_many_ways(any_length: Any) -> None:
    assert from_arrays(normal(5, 7), [InputSpec("x", "float32", (any_length, any_length))]).samples == 5


def test_an_axis_of_length_zero_is_allowed_beside_the_batch() -> None:
    past = InputSpec("past", "float32", ("B", 2, "past", 4))
    assert from_arrays(np.zeros((3, 2, 0, 4)), [past]).batches[0]["past"].shape == (3, 2, 0, 4)
