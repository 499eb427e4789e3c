"""Random data: shapes of open axes, ranges, indices, masks and states."""

from typing import Any

import numpy as np
import pytest

from helpers import model, normal
from lsuv_cli import LsuvError, inspect
from lsuv_cli.data import random_data
from lsuv_cli.data.batches import InputSpec
from lsuv_cli.data.random_data import Wishes
from shell import lsuv

IMAGE = InputSpec("x", "float32", ("N", 3, "height", "width"))
IDS = InputSpec("ids", "int64", ("N", "time"), table=11)
MASK = InputSpec("attention_mask", "int64", ("N", "time"))
STATE = InputSpec("state", "float32", (2, "N", 4))


def drawn(*inputs: InputSpec, shapes: Any = (), ranges: Any = (), **options: Any) -> Any:
    return random_data.random(inputs, wishes=Wishes.of(shapes, ranges, inputs), **options)


def whole(calibration: Any, name: str) -> Any:
    return np.concatenate([batch[name] for batch in calibration.batches])


def test_open_axes_get_a_length_that_a_warning_states() -> None:
    data = drawn(IMAGE, limit=2)
    assert whole(data, "x").shape == (2, 3, 224, 224)
    assert any("leaves axis 'height' open: 224 in random data, see `input_shapes`" in w for w in data.warnings)


def test_axes_of_one_name_have_one_length_and_sums_are_summed() -> None:
    longer = InputSpec("past_mask", "int64", ("N", "past + time"))
    cache = InputSpec("past", "float32", ("N", 2, "past", 4))
    data = drawn(IDS, cache, longer, shapes=["ids:[1,5]", "past:[1,2,3,4]"], limit=4)
    assert whole(data, "past_mask").shape == (4, 8)
    assert whole(data, "ids").shape == (4, 5)


def test_indices_are_drawn_among_all_rows_of_their_embedding_and_masks_are_ones() -> None:
    data = drawn(IDS, MASK)
    assert np.unique(whole(data, "ids")).tolist() == list(range(11))
    assert whole(data, "attention_mask").min() == 1


def test_the_range_of_an_input() -> None:
    x, y = (InputSpec(name, "float32", ("N", 50)) for name in "xy")
    count = InputSpec("k", "int32", ("N",))
    data = drawn(x, y, count, ranges=["[2,3]", "y:[-1,0]", "k:[5,6]"])
    assert 2 <= whole(data, "x").min() < 2.1
    assert -0.1 < whole(data, "y").max() <= 0
    assert set(whole(data, "k").tolist()) == {5, 6}


def test_shapes_are_those_of_one_run() -> None:
    data = drawn(InputSpec("x", "float32", ("N", "C")), shapes=["[4,7]"], limit=8)
    assert [batch["x"].shape for batch in data.batches] == [(4, 7), (4, 7)]


def test_a_state_is_the_same_in_every_run_and_fits_the_batch() -> None:
    data = drawn(InputSpec("x", "float32", ("N", 3)), STATE, InputSpec("sr", "int64", ()), beside=["sr=16000"])
    assert {batch["state"].shape for batch in data.batches} == {(2, 8, 4)}
    assert {batch["x"].shape for batch in data.batches} == {(8, 3)}
    assert {batch["sr"].item() for batch in data.batches} == {16000}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"input_shapes": "z:[1,2]"}, "'z' is no input of the model"),
        ({"input_shapes": "x:[1,3]"}, "input 'x' wants (N, 2) float32, got (1, 3)"),
        ({"input_shapes": "x:[1,0]"}, "is not a name and its lengths, each 1 or more, such as x:[1,3,224,224]"),
        ({"input_shapes": "x=1,2"}, "is not a name and its lengths, each 1 or more, such as x:[1,3,224,224]"),
        ({"input_shapes": {"x": [1.5, 2]}}, "is not a name and its lengths, each 1 or more, such as x:[1,3,224,224]"),
        ({"val_range": "x:[1,0]"}, "is not a name and two numbers, the smaller one first, such as x:[0,1]"),
        ({"val_range": "x:[1]"}, "is not a name and two numbers, the smaller one first, such as x:[0,1]"),
        (
            {"val_range": {"x": [0, float("inf")]}},
            "is not a name and two numbers, the smaller one first, such as x:[0,1]",
        ),
    ],
)
def test_wishes_that_do_not_fit(given: Any, reason: str) -> None:
    proto = model("g (float[N,2] x) => (float[N,2] y) { y = MatMul(x, W) }", W=normal(2, 2))
    with pytest.raises(LsuvError) as caught:
        inspect(proto, "random", **given)
    assert reason in str(caught.value)
    with pytest.raises(LsuvError, match="is for random data"):
        inspect(proto, normal(3, 2), input_shapes="x:[1,2]")


def test_lengths_of_one_batch_axis_agree() -> None:
    with pytest.raises(LsuvError, match="axis 'N' has the lengths 2 and 3; give it one"):
        drawn(IDS, MASK, shapes=["ids:[2,5]", "attention_mask:[3,5]"])


def test_a_range_beyond_the_embedding_is_refused_by_its_option() -> None:
    with pytest.raises(LsuvError, match=r"is 0 to 500, but the embedding .* has 11 rows"):
        drawn(IDS, ranges=["ids:[0,500]"])


@pytest.mark.parametrize("seed", range(4))
def test_a_single_integer_is_1(seed: int) -> None:
    """A rate of 0 would silence everything behind it."""
    data = drawn(IMAGE, InputSpec("sr", "int64", ()), limit=2, seed=seed)
    assert {int(batch["sr"]) for batch in data.batches} == {1}


def test_an_option_that_was_given_once_is_shown_as_it_was_typed(tmp_path: Any) -> None:
    for option, value in (("--val-range", "x:[5,1]"), ("--input-shapes", "x:7"), ("--target-variance", "x=")):
        done = lsuv("init", "none.onnx", "--data", "random", option, value, "-o", tmp_path / "o.onnx")
        assert done.err.startswith(f"lsuv: {option} '{value}' is not a")


def test_a_shape_that_no_memory_holds_is_refused_at_once() -> None:
    huge = InputSpec("x", "float32", ("N", 2**20, 2**20))
    with pytest.raises(LsuvError, match="more than half of the memory"):
        drawn(huge)


def test_a_model_of_tokens_is_fed_within_its_embedding(tmp_path: Any) -> None:
    text = """g (int64[N,T] ids, int64[N,T] attention_mask) => (float[N,T,3] y) {
        e = Gather(table, ids) m = Cast<to=1>(attention_mask) u = Unsqueeze(m, two)
        d = Mul(e, u) y = MatMul(d, W) }"""
    proto = model(text, table=normal(50, 4), two=np.array([2]), W=normal(4, 3))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    options = ("--data", "random", "--input-shapes", "ids:[2,9]", "--limit", 4)
    done = lsuv("init", tmp_path / "m.onnx", *options, "-o", tmp_path / "o.onnx")
    assert done.code == 0, done.err
    assert "4 samples" in done.err


@pytest.mark.parametrize(
    ("dtype", "range_"), [("float64", "x:[-1e308,1e308]"), ("float16", "x:[-1e6,1e6]"), ("float32", "x:[0,1e39]")]
)
def test_a_range_that_the_type_does_not_hold(dtype: str, range_: str) -> None:
    with pytest.raises(LsuvError, match=f"`val_range` of input 'x' is wider than {dtype} holds"):
        drawn(InputSpec("x", dtype, ("N", 4)), ranges=[range_])
