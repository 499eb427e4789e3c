"""Data from files: what .npy and .npz files and directories of them feed to which input."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_helpers import IDS, ROWS, fed, lengths, message, normal, saved
from lsuv_cli.data.batches import InputSpec
from lsuv_cli.data.reading import read


def test_an_npy_file_is_fed_to_the_only_input(tmp_path: Path) -> None:
    values = normal(10, 2)
    calibration = read([saved(tmp_path / "c.npy", values)], [ROWS])
    np.testing.assert_array_equal(fed(calibration), values.astype(np.float32))


def test_an_npz_file_feeds_inputs_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", ids=np.ones((3, 5), int), x=normal(3, 2))
    (batch,) = read([str(tmp_path / "c.npz")], [ROWS, IDS]).batches
    assert {name: value.shape for name, value in batch.items()} == {"x": (3, 2), "ids": (3, 5)}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_one_array_in_an_npz_is_for_the_only_input_whatever_its_name(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "c.npz", arr_0=normal(3, 2))
    assert read([str(tmp_path / "c.npz")], [ROWS]).samples == 3


def test_name_and_path_for_several_inputs(tmp_path: Path) -> None:
    x, ids = saved(tmp_path / "a.npy", normal(3, 2)), saved(tmp_path / "b.npy", np.ones((3, 5), int))
    assert set(read([f"x={x}", f"ids={ids}"], [ROWS, IDS]).batches[0]) == {"x", "ids"}


def test_a_name_without_a_path_is_not_the_current_directory() -> None:
    assert "nothing stands behind the =" in message(["x="], ROWS)


def test_name_and_path_of_an_npz_takes_the_array_of_that_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", y=normal(9, 9), x=normal(3, 2))
    assert read([f"x={tmp_path / 'c.npz'}"], [ROWS]).samples == 3


def test_name_and_path_of_an_npz_without_that_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", y=normal(9, 9), z=normal(3, 2))
    assert "holds 'y', 'z', none of them called 'x'" in message([f"x={tmp_path / 'c.npz'}"], ROWS)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    assert read([saved(tmp_path / "lr=3.npy", normal(3, 2))], [ROWS]).samples == 3


def test_an_input_name_with_an_equals_sign(tmp_path: Path) -> None:
    odd = InputSpec("a=b", "float32", ("N", 2))
    path = saved(tmp_path / "c.npy", normal(3, 2))
    assert read([f"a=b={path}"], [InputSpec("a", "float32", None, required=False), odd]).samples == 3


def test_a_directory_is_joined_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 1):
        np.save(tmp_path / f"part{number}.npy", np.full((2, 2), number / 10))
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / "._part1.npy").write_text("what macOS leaves behind")
    calibration = read([str(tmp_path)], [ROWS], batch_size=4)
    np.testing.assert_allclose(fed(calibration)[:, 0], [0.1, 0.1, 0.9, 0.9, 1.0, 1.0])


def test_batches_cross_the_files_of_a_directory(tmp_path: Path) -> None:
    for number in range(5):
        np.save(tmp_path / f"{number}.npy", normal(3, 2))
    assert lengths(read([str(tmp_path)], [ROWS], batch_size=4)) == [4, 4, 4, 3]


def test_files_of_single_samples_are_joined(tmp_path: Path) -> None:
    for number in range(5):
        np.save(tmp_path / f"{number}.npy", normal(2))
    assert fed(read([str(tmp_path)], [ROWS])).shape == (5, 2)


def test_files_of_several_types_are_joined(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[0, 1]]))
    np.save(tmp_path / "b.npy", np.array([[0.5, -1]]))
    np.testing.assert_array_equal(fed(read([str(tmp_path)], [ROWS])), [[0, 1], [0.5, -1]])


def test_files_of_different_shape_are_batches_of_their_own(tmp_path: Path) -> None:
    for number, time in enumerate((5, 7, 7)):
        np.save(tmp_path / f"{number}.npy", np.ones((number + 1, time), int))
    batches = read([str(tmp_path)], [IDS]).batches
    assert [batch["ids"].shape for batch in batches] == [(1, 5), (2, 7), (3, 7)]


def test_files_of_different_shape_are_cut_to_the_batch_size_asked_for(tmp_path: Path) -> None:
    for number, time in enumerate((5, 7)):
        np.save(tmp_path / f"{number}.npy", np.ones((3, time), int))
    batches = read([str(tmp_path)], [IDS], batch_size=2).batches
    assert [batch["ids"].shape for batch in batches] == [(2, 5), (1, 5), (2, 7), (1, 7)]


def test_a_directory_of_npz_files(tmp_path: Path) -> None:
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", x=normal(2, 2), ids=np.full((2, 5), number))
    assert fed(read([str(tmp_path)], [ROWS, IDS]), "ids")[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_npz_files_with_a_scalar_each_are_fed_one_by_one(tmp_path: Path) -> None:
    rate = InputSpec("rate", "float32", ())
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", x=normal(2, 2), rate=np.float32(number))
    batches = read([str(tmp_path)], [ROWS, rate]).batches
    assert [float(batch["rate"]) for batch in batches] == [0, 1, 2]


def test_npz_files_of_a_directory_need_the_same_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=normal(2, 2), ids=np.ones((2, 5), int))
    np.savez(tmp_path / "b.npz", x=normal(2, 2))
    text = message([str(tmp_path)], ROWS, IDS)
    assert "b.npz" in text
    assert "only one of them has 'ids'" in text


def test_inputs_fed_file_by_file_need_as_many_files(tmp_path: Path) -> None:
    for folder, shapes in (("a", [(1, 5), (1, 6)]), ("b", [(1, 5), (1, 6), (1, 7)])):
        (tmp_path / folder).mkdir()
        for shape in shapes:
            np.save(tmp_path / folder / f"{shape[1]}.npy", np.ones(shape, int))
    other = InputSpec("mask", "int64", ("N", "T"))
    text = message([f"ids={tmp_path / 'a'}", f"mask={tmp_path / 'b'}"], IDS, other)
    assert "input 'ids' has 2 files, input 'mask' 3" in text


def test_thousands_of_files_do_not_run_out_of_file_handles(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    for number in range(300):
        np.save(tmp_path / f"{number}.npy", normal(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, hard), hard))
    try:
        assert len(fed(read([str(tmp_path)], [ROWS], batch_size=300))) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_npy_batch_is_a_view_of_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.npy", normal(10, 2).astype(np.float32))
    assert not read([path], [ROWS]).batches[0]["x"].flags.owndata


def test_the_source_is_as_it_was_typed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.npy", normal(3, 2))
    assert read([f"x={path}"], [ROWS]).source == f"x={path}"
