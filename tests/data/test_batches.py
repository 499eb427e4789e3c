"""Data cut into batches: sizes, limits, several inputs, iterables, and the warning about its scale."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_helpers import IDS, ROWS, counting, fed, lengths, message, normal, saved
from lsuv_cli.data.batches import InputSpec, automatic_batch_size, from_arrays
from lsuv_cli.data.reading import read

# Batches


def test_a_batch_of_fixed_size_leaves_out_the_tail_with_a_warning() -> None:
    calibration = from_arrays(normal(10, 2), [InputSpec("x", "float32", (4, 2))])
    assert (lengths(calibration), calibration.samples, calibration.dropped) == ([4, 4], 8, 2)
    assert "2 of 10 samples do not fill a batch of 4 and are left out" in calibration.warnings


def test_fewer_samples_than_the_fixed_batch() -> None:
    text = message(normal(3, 2), InputSpec("x", "float32", (4, 2)))
    assert "3 samples do not fill the model's fixed batch of 4; give at least 4" in text


def test_a_limit_below_the_fixed_batch() -> None:
    text = message(normal(9, 2), InputSpec("x", "float32", (4, 2)), limit=3)
    assert "3 samples do not fill the model's fixed batch of 4; raise the limit to at least 4" in text


def test_a_batch_size_other_than_the_fixed_one() -> None:
    text = message(normal(8, 2), InputSpec("x", "float32", (4, 2)), batch_size=2)
    assert text == "input 'x' has a batch fixed at 4; leave out `batch_size=2`"


def test_the_fixed_batch_size_may_be_said_again() -> None:
    assert lengths(from_arrays(normal(8, 2), [InputSpec("x", "float32", (4, 2))], batch_size=4)) == [4, 4]


def test_a_dynamic_batch_keeps_its_tail() -> None:
    calibration = from_arrays(normal(10, 2), [ROWS], batch_size=4)
    assert (lengths(calibration), calibration.dropped) == ([4, 4, 2], 0)


def test_the_whole_set_in_one_batch() -> None:
    assert lengths(from_arrays(normal(5000, 2), [ROWS], batch_size="all")) == [5000]


def test_whole_with_a_limit() -> None:
    assert lengths(from_arrays(normal(10, 2), [ROWS], batch_size="all", limit=7)) == [7]


def test_whole_is_not_possible_for_a_smaller_fixed_batch() -> None:
    text = message(normal(8, 2), InputSpec("x", "float32", (4, 2)), batch_size="all")
    assert 'wants (4, 2) float32, got (8, 2) float64; leave out `batch_size="all"`' in text


def test_whole_feeds_each_file_in_one_run(tmp_path: Path) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", normal(4, 2))
    assert lengths(read([str(tmp_path)], [ROWS], batch_size="all")) == [4, 4, 4]


@pytest.mark.parametrize(
    ("bytes_per_sample", "size"),
    [
        (0, 1024),
        (4, 1024),
        (512, 1024),
        (513, 512),
        (3 * 32 * 32 * 4, 32),
        (3 * 224 * 224 * 4, 4),
        (2**20, 4),
        (2**20 + 1, 2),
        (2**22, 1),
        (2**40, 1),
    ],
)
def test_the_automatic_batch_is_about_half_a_mebibyte(bytes_per_sample: int, size: int) -> None:
    assert automatic_batch_size(bytes_per_sample) == size


def test_the_largest_input_decides_the_automatic_batch() -> None:
    data = {"x": normal(100, 2), "data": normal(100, 2**12)}
    wide = InputSpec("data", "float32", ("N", 2**12))
    assert lengths(from_arrays(data, [ROWS, wide])) == [32, 32, 32, 4]


def test_an_index_counts_as_what_the_model_puts_in_its_place() -> None:
    ids = InputSpec("ids", "int64", ("N", 128))
    batches = from_arrays({"ids": np.zeros((10, 128), np.int64)}, [ids]).batches
    assert [len(batch["ids"]) for batch in batches] == [4, 4, 2]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 11, None, "all"])
def test_the_batch_size_does_not_change_what_is_fed(batch_size: Any) -> None:
    values = counting(10, 2).astype(np.float32)
    np.testing.assert_array_equal(fed(from_arrays(values, [ROWS], batch_size=batch_size)), values)


def test_the_limit_takes_the_first_samples(tmp_path: Path) -> None:
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.full((3, 2), number))
    calibration = read([str(tmp_path)], [ROWS], limit=5, batch_size=2)
    assert (fed(calibration)[:, 0].tolist(), calibration.samples) == ([0, 0, 0, 1, 1], 5)


def test_the_limit_counts_over_files_that_are_batches_of_their_own(tmp_path: Path) -> None:
    for number, time in enumerate((5, 6, 7)):
        np.save(tmp_path / f"{number}.npy", np.ones((3, time), int))
    batches = read([str(tmp_path)], [IDS], limit=5).batches
    assert [batch["ids"].shape for batch in batches] == [(3, 5), (2, 6)]


@pytest.mark.parametrize("argument", ["limit", "batch_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one(argument: str, value: int) -> None:
    assert message(normal(3, 2), ROWS, **{argument: value}) == f"`{argument}` must be at least 1, got {value}"


def test_batches_are_a_sequence_that_can_be_gone_through_again() -> None:
    batches = from_arrays(counting(6, 2), [ROWS], batch_size=2).batches
    assert len(list(batches)) == len(list(batches)) == len(batches) == 3
    assert batches[-1]["x"].tolist() == batches[1:][1]["x"].tolist()
    with pytest.raises(IndexError):
        batches[3]


# Several inputs


def test_inputs_must_agree_in_their_samples() -> None:
    text = message({"x": normal(8, 2), "ids": np.ones((7, 5), int)}, ROWS, IDS)
    assert "input 'x' has 8 samples, input 'ids' 7" in text
    assert '`batch_size="all"`' in text


def test_names_of_axes_mean_nothing() -> None:
    other = InputSpec("y", "float32", ("M", 2))
    assert from_arrays({"x": normal(8, 2), "y": normal(8, 2)}, [ROWS, other]).samples == 8


STATE = InputSpec("state", "float32", (2, None, 128))
RATE = InputSpec("rate", "int64", ())


def test_a_state_of_the_whole_inputs_shape_is_the_same_in_every_run() -> None:
    state = normal(2, 4, 128).astype(np.float32)
    batches = from_arrays({"x": counting(8, 2), "state": state}, [ROWS, STATE]).batches
    assert [batch["x"].shape for batch in batches] == [(4, 2), (4, 2)], "a state for four samples: four in a run"
    for batch in batches:
        np.testing.assert_array_equal(batch["state"], state)


def test_a_state_beside_an_input_of_another_fixed_batch() -> None:
    one = InputSpec("x", "float32", (1, 2))
    calibration = from_arrays({"x": normal(3, 2), "state": normal(2, 1, 128)}, [one, STATE])
    assert [batch["state"].shape for batch in calibration.batches] == [(2, 1, 128)] * 3
    assert calibration.few["x"].shape == (1, 2)


def test_a_state_for_another_batch_than_the_fixed_one() -> None:
    one = InputSpec("x", "float32", (1, 2))
    text = message({"x": normal(2, 2), "state": normal(2, 8, 128)}, one, STATE)
    assert "input 'x' has 1 samples in each of its fixed batches, input 'state' 8" in text


def test_too_few_rows_for_an_input_of_the_same_fixed_batch_are_an_error() -> None:
    x, y = (InputSpec(name, "float32", (4, 2)) for name in "xy")
    assert "input 'x' has 8 samples, input 'y' 4" in message({"x": normal(8, 2), "y": normal(4, 2)}, x, y)


def test_indices_beyond_the_embedding_are_told_with_the_inputs_name() -> None:
    ids = InputSpec("ids", "int64", ("N", "T"), table=10)
    assert from_arrays(np.array([[0, 9, -10]]), [ids]).samples == 1
    text = message(np.array([[0, 1], [2, 10]]), ids)
    assert "input 'ids' has indices from 0 to 10" in text
    assert "has 10 rows" in text
    assert "index (1, 1)" in text


def test_inputs_whose_first_axes_differ_are_fed_whole() -> None:
    data = {"x": normal(8, 2), "state": normal(2, 8, 128), "rate": np.array(16000)}
    calibration = from_arrays(data, [ROWS, STATE, RATE], batch_size="all")
    (batch,) = calibration.batches
    assert {name: value.shape for name, value in batch.items()} == {
        "x": (8, 2),
        "state": (2, 8, 128),
        "rate": (),
    }


def test_files_whose_first_axes_differ_are_fed_whole_one_by_one(tmp_path: Path) -> None:
    for number, time in enumerate((8, 9)):
        np.savez(tmp_path / f"{number}.npz", x=normal(time, 2), state=normal(2, time, 128), rate=16000)
    batches = read([str(tmp_path)], [ROWS, STATE, RATE], batch_size="all").batches
    assert [(batch["x"].shape, batch["state"].shape) for batch in batches] == [
        ((8, 2), (2, 8, 128)),
        ((9, 2), (2, 9, 128)),
    ]


def test_a_limit_makes_no_sense_for_inputs_whose_first_axes_differ() -> None:
    data = {"x": normal(8, 2), "state": normal(2, 8, 128)}
    assert "leave out `limit=1`" in message(data, ROWS, STATE, batch_size="all", limit=1)


def test_states_with_a_row_per_run_go_beside_batches_of_one() -> None:
    data = {"x": normal(5, 2), "state": counting(5, 2, 1, 128)}
    batches = from_arrays(data, [ROWS, STATE]).batches
    assert [(batch["x"].shape, batch["state"].shape) for batch in batches] == [((1, 2), (2, 1, 128))] * 5


def test_a_scalar_is_the_same_in_every_run() -> None:
    batches = from_arrays({"x": normal(6, 2), "rate": np.array(3)}, [ROWS, RATE], batch_size=2).batches
    assert [batch["rate"].tolist() for batch in batches] == [3, 3, 3]


def test_a_scalar_for_each_run() -> None:
    data = {"x": normal(6, 2), "rate": np.array([1, 2, 3])}
    batches = from_arrays(data, [ROWS, RATE], batch_size=2).batches
    assert [(batch["rate"].shape, int(batch["rate"])) for batch in batches] == [((), 1), ((), 2), ((), 3)]


def test_scalars_for_another_number_of_runs() -> None:
    text = message({"x": normal(6, 2), "rate": np.array([1, 2])}, ROWS, RATE, batch_size=2)
    assert "input 'rate' has rows for 2 runs, input 'x' for 3" in text


def test_a_scalar_file_goes_with_every_file_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "ids").mkdir()
    for time in (5, 6):
        np.save(tmp_path / "ids" / f"{time}.npy", np.ones((1, time), int))
    rate = saved(tmp_path / "rate.npy", np.array(7))
    batches = read([f"ids={tmp_path / 'ids'}", f"rate={rate}"], [IDS, RATE]).batches
    assert [(batch["ids"].shape, int(batch["rate"])) for batch in batches] == [((1, 5), 7), ((1, 6), 7)]


# Data in memory


def test_an_iterable_of_batches_is_used_as_it_comes() -> None:
    assert lengths(from_arrays((normal(n, 2) for n in (3, 1, 5)), [ROWS])) == [3, 1, 5]


def test_an_iterable_of_dicts() -> None:
    assert lengths(from_arrays([{"x": normal(3, 2)}, {"x": normal(4, 2)}], [ROWS])) == [3, 4]


def test_batches_from_an_iterable_are_cut_to_a_fixed_size() -> None:
    calibration = from_arrays([normal(5, 2), normal(1, 2)], [InputSpec("x", "float32", (2, 2))])
    assert (lengths(calibration), calibration.dropped) == ([2, 2], 2)


def test_a_generator_that_fills_one_buffer_again_and_again() -> None:
    def batches() -> Iterator[Any]:
        buffer = np.zeros((2, 2), np.float32)
        for number in range(3):
            buffer[:] = number
            yield buffer

    assert fed(from_arrays(batches(), [ROWS]))[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_an_endless_generator_stops_at_the_limit() -> None:
    assert lengths(from_arrays(itertools.repeat(normal(4, 2)), [ROWS], limit=10)) == [4, 4, 2]


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_batch_with_labels_feeds_the_input_alone(kind: type) -> None:
    values, labels = counting(5, 2).astype(np.float32), np.arange(5)
    calibration = from_arrays((kind((values[k : k + 2], labels[k : k + 2])) for k in (0, 2, 4)), [ROWS])
    np.testing.assert_array_equal(fed(calibration), values)
    assert [list(batch) for batch in calibration.batches] == [["x"]] * 3
    assert calibration.warnings == from_arrays(values, [ROWS]).warnings  # labels are no news


def test_a_batch_of_arrays_feeds_the_inputs_in_their_order() -> None:
    values, ids, labels = counting(4, 2).astype(np.float32), np.arange(12).reshape(4, 3), np.ones(4)
    for inputs, arrays in (([ROWS, IDS], (values, ids)), ([IDS, ROWS], (ids, values, labels))):
        calibration = from_arrays([arrays], inputs)
        np.testing.assert_array_equal(fed(calibration, "x"), values)
        np.testing.assert_array_equal(fed(calibration, "ids"), ids)


def test_a_batch_with_fewer_arrays_than_inputs() -> None:
    assert message(iter([(normal(3, 2),)]), ROWS, IDS).startswith("no data for input 'ids'; the model's inputs are 'x'")


@pytest.mark.parametrize(("batch", "kind"), [((), "tuple"), ([1.0, 2.0], "list"), ("abc", "str"), ([[1.0]], "list")])
def test_a_batch_that_is_not_an_array(batch: Any, kind: str) -> None:
    wanted = "give an array, a dict of arrays by input name, or a tuple or list of arrays"
    assert message(iter([batch]), ROWS) == f"batch 0 is a {kind}; {wanted}"


class Attached:
    """What numpy meets in a PyTorch tensor that takes part in training."""

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")


@pytest.mark.parametrize("batch", [Attached(), (Attached(), np.ones(3)), {"x": Attached()}])
def test_a_tensor_that_has_to_be_detached_says_how(batch: Any) -> None:
    text = message(iter([batch]), ROWS)
    assert text.startswith("batch 0")
    assert "Use tensor.detach().numpy() instead" in text


def test_a_wrong_batch_is_named_by_its_number() -> None:
    assert message(iter([normal(3, 2), normal(3, 5)]), ROWS).startswith("batch 1: input 'x' wants (N, 2)")


def test_no_batches() -> None:
    assert "there is no batch in the data" in message(iter([]), ROWS)


def test_data_that_is_nothing_of_the_kind() -> None:
    assert "data is a int; give an array" in message(3, ROWS)


def test_a_ragged_list() -> None:
    assert "'x' cannot be made a numpy array" in message({"x": [[1, 2], [3]]}, ROWS)


# The scale of the data


def test_data_of_mean_0_and_variance_1_gives_no_warning() -> None:
    assert from_arrays(normal(5000, 2), [ROWS]).warnings == ()


@pytest.mark.parametrize(
    ("scale", "shift", "expected"),
    [
        (64.0, 120.0, "has mean 120 and variance 4096, not about 0 and 1; scale it as you will in training"),
        (1.0, 0.75, "has mean 0.75 and variance 1,"),
        (0.25, 0.0, "has mean 0 and variance 0.0625,"),
        (0.0, 0.0, "has mean 0 and variance 0,"),
        (1e-9, 1e3, "has mean 1000 and variance 0,"),
    ],
)
def test_data_far_from_mean_0_and_variance_1_gives_a_warning(scale: float, shift: float, expected: str) -> None:
    signs = np.tile([[1.0, -1.0]], (200_000, 1))
    (warning,) = from_arrays(signs * scale + shift, [ROWS], batch_size=7).warnings
    assert warning.startswith("input 'x'")
    assert expected in warning


def test_the_mean_of_far_away_pieces_is_exact() -> None:
    values = np.concatenate([np.full((150_000, 2), 1000.0), np.full((50_000, 2), 1004.0)])
    assert "has mean 1001 and variance 3," in from_arrays(values, [ROWS]).warnings[0]


def test_only_the_samples_that_are_used_count_for_the_warning() -> None:
    values = np.concatenate([normal(3000, 2), np.full((3000, 2), 255.0)])
    assert from_arrays(values, [ROWS], limit=3000).warnings == ()


def test_integers_and_single_scalars_give_no_warning() -> None:
    gain = InputSpec("gain", "float32", ())
    data = {"ids": np.full((4, 5), 30000), "gain": np.array(50.0)}
    assert from_arrays(data, [IDS, gain], batch_size=2).warnings == ()


def test_indices_that_come_as_floats_give_no_warning() -> None:
    """Keras feeds an Embedding with floats, which a Cast makes indices."""
    ids = InputSpec("ids", "float32", ("N", 5), table=50000)
    assert from_arrays(np.full((4, 5), 30000.0, np.float32), [ids]).warnings == ()


def test_enormous_values_give_a_warning_and_no_noise() -> None:
    spec = InputSpec("x", "float64", ("N", 2))
    assert "variance inf" in from_arrays(np.array([[1e300, -1e300]]), [spec]).warnings[0]
