"""The user's data, from files and arrays to batches, and what is said when it does not fit."""

import io
import itertools
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsuv_cli.data import files as datafiles
from lsuv_cli.data.batches import InputSpec, automatic_batch_size, from_arrays, read
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


# Files


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
    assert "b.npz" in text and "only one of them has 'ids'" in text


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


# Files that are not what they should be


def test_a_missing_file_says_what_is_expected(tmp_path: Path) -> None:
    assert "c.npy: no such file; give an .npy or .npz file or a directory" in message([f"{tmp_path}/c.npy"], ROWS)


def test_an_unknown_extension(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("1,2")
    assert "c.csv: not an .npy or .npz file; save the data with numpy.save" in message([f"{tmp_path}/c.csv"], ROWS)


def test_an_empty_directory(tmp_path: Path) -> None:
    assert "no .npy or .npz files in this directory" in message([str(tmp_path)], ROWS)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.npy")
    assert "not an .npy or .npz file" in message([f"{tmp_path}/c.npy"], ROWS)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = Path(saved(tmp_path / "c.npy", normal(3, 2)))
    path.chmod(0)
    assert "Permission denied" in message([str(path)], ROWS)


class Boom:
    """Unpickled, this would end the tests."""

    def __reduce__(self) -> Any:
        return sys.exit, ("code from a data file was run",)


def npy_bytes(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def header(shape: str, descr: str = "'<f4'") -> bytes:
    """The start of an .npy file that claims a shape and type."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


BAD_ARRAYS = {
    "empty": (b"", "not a whole"),
    "text": (b"1.0 2.0 3.0\n", "not a whole"),
    "pickle": (pickle.dumps(Boom()), "not a whole"),
    "objects": (npy_bytes(np.array([Boom(), None])), "pickled Python objects, which are never loaded"),
    "structured": (npy_bytes(np.zeros(3, "f4,i4")), "convert it with a.astype(np.float32)"),
    "cut in the header": (npy_bytes(normal(3, 2))[:40], "not a whole"),
    "cut in the values": (
        npy_bytes(normal(3, 2))[:-8],
        "header promises (3, 2) float64, 48 bytes, but it holds 40",
    ),
    "promises too much": (header("(1000000000, 2)") + bytes(64), "promises (1000000000, 2) float32"),
    "promises beyond 64 bits": (header(f"({2**40}, {2**40})"), "the file is truncated"),
    "endless and empty": (header(f"({2**40}, 0)"), "which cannot be"),
    "negative": (header("(-3, 2)") + bytes(64), "which cannot be"),
    "shape of text": (header("'ab'"), "not a whole"),
    "nested header": (header("(" * 2000 + ")" * 2000), "not a whole"),
    "huge header": (header("(3," + " " * 20000 + "2)"), "not a whole"),
    "header with a call": (header("exit(3)"), "not a whole"),
    "unknown type": (header("(3, 2)", "'what'"), "not a whole"),
    "format from the future": (b"\x93NUMPY\x09\x00" + bytes(64), "format 9.0 is not one for plain arrays"),
    "format 3.0": (b"\x93NUMPY\x03\x00" + bytes(64), "save a plain array"),
    "no samples": (npy_bytes(np.zeros((0, 2))), "it holds no samples, give at least one"),
}


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_a_bad_npy_file(tmp_path: Path, kind: str) -> None:
    content, expected = BAD_ARRAYS[kind]
    (tmp_path / "c.npy").write_bytes(content)
    text = message([f"{tmp_path}/c.npy"], ROWS)
    assert "c.npy" in text and expected in text


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_a_bad_array_in_an_npz_file(tmp_path: Path, kind: str) -> None:
    content, expected = BAD_ARRAYS[kind]
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr("x.npy", content)
    text = message([f"{tmp_path}/c.npz"], ROWS)
    assert "c.npz" in text and expected in text


def test_text_beyond_unicode(tmp_path: Path) -> None:
    (tmp_path / "c.npy").write_bytes(header("(3,)", "'<U1'") + b"\xff" * 12)
    text = message([f"{tmp_path}/c.npy"], InputSpec("s", "string", ("N",)))
    assert "c.npy: input 's'" in text and "its text is not valid UTF-8" in text


def test_a_bad_array_that_no_input_needs_does_no_harm(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", x=normal(3, 2), meta=np.array([Boom()], object))
    assert read([f"{tmp_path}/c.npz"], [ROWS]).samples == 3


def test_an_npz_file_cut_short(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", x=normal(3, 2))
    whole = (tmp_path / "c.npz").read_bytes()
    (tmp_path / "c.npz").write_bytes(whole[: len(whole) // 2])
    assert "not a whole .npz file" in message([f"{tmp_path}/c.npz"], ROWS)


def test_an_npz_file_with_a_wrong_checksum(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", x=np.ones((300, 2)))
    content = bytearray((tmp_path / "c.npz").read_bytes())
    content[1000] ^= 1
    (tmp_path / "c.npz").write_bytes(content)
    assert "CRC" in message([f"{tmp_path}/c.npz"], ROWS)


def test_an_npz_file_without_arrays(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr("readme.txt", "nothing here")
    assert "holds no arrays; save them with numpy.savez" in message([f"{tmp_path}/c.npz"], ROWS)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "c.npz", x=np.zeros((2**18, 2)))
    monkeypatch.setattr(datafiles, "available_memory", lambda: 2**22)
    text = message([f"{tmp_path}/c.npz"], ROWS)
    assert "unpacks to 4,194,432 bytes, more than half of the 4,194,304 bytes of memory" in text


def test_the_memory_available_is_known() -> None:
    assert datafiles.available_memory() > 2**20


@pytest.mark.parametrize("suffix", [".npy", ".npz"])
@given(data=st.data())
def test_no_damage_to_a_file_gives_anything_but_one_line(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    stream = io.BytesIO()
    if suffix == ".npy":
        np.save(stream, counting(3, 2))
    else:
        np.savez_compressed(stream, x=counting(3, 2))
    content = bytearray(stream.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        assert fed(read([str(path)], [ROWS])).shape[1] == 2
    except DataError as error:
        assert "\n" not in str(error)


def test_a_file_that_changes_under_our_hands(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.npy", normal(10, 2))
    calibration = read([path], [ROWS])
    saved(tmp_path / "c.npy", normal(5, 2))
    with pytest.raises(DataError, match="changed while it was being read"):
        calibration.batches[0]


# Names


def test_an_unknown_name_lists_the_inputs(tmp_path: Path) -> None:
    text = message([f"y={saved(tmp_path / 'c.npy', normal(3, 2))}"], ROWS, IDS)
    assert "the model has no input 'y'" in text
    assert "inputs are 'x' (N, 2) float32, 'ids' (batch, time) int64" in text


def test_an_npy_file_for_one_of_two_inputs_needs_a_name(tmp_path: Path) -> None:
    text = message([saved(tmp_path / "c.npy", normal(3, 2))], ROWS, IDS)
    assert "c.npy" in text and "'ids'" in text and "NAME=PATH" in text


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
    assert "'i'" in text and expected in text


@pytest.mark.parametrize("given_as", ["U3", "S3", "object"])
def test_strings_are_fed_as_objects(given_as: str) -> None:
    texts = np.array(["ab", "cde"], given_as)
    value = from_arrays(texts, [InputSpec("s", "string", ("N",))]).batches[0]["s"]
    assert (value.dtype.kind, value.tolist()) == ("O", ["ab", "cde"])


def test_fortran_order_is_delivered_in_c_order(tmp_path: Path) -> None:
    values = counting(5, 2).astype(np.float32)
    value = read([saved(tmp_path / "c.npy", np.asfortranarray(values))], [ROWS]).batches[0]["x"]
    assert value.flags.c_contiguous and value.tolist() == values.tolist()


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
    assert "array: input 'data'" in text and expected in text


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


# Batches


def test_a_batch_of_fixed_size_leaves_out_the_tail_with_a_warning() -> None:
    calibration = from_arrays(normal(10, 2), [InputSpec("x", "float32", (4, 2))])
    assert (lengths(calibration), calibration.samples, calibration.dropped) == ([4, 4], 8, 2)
    assert "2 of 10 samples do not fill a batch of 4 and are left out" in calibration.warnings


def test_fewer_samples_than_the_fixed_batch() -> None:
    text = message(normal(3, 2), InputSpec("x", "float32", (4, 2)))
    assert "3 samples do not fill the model's fixed batch of 4; give at least 4" in text


def test_a_limit_below_the_fixed_batch() -> None:
    assert "fixed batch of 4" in message(normal(9, 2), InputSpec("x", "float32", (4, 2)), limit=3)


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
    assert "input 'x' has 8 samples, input 'ids' 7" in text and '`batch_size="all"`' in text


def test_names_of_axes_mean_nothing() -> None:
    other = InputSpec("y", "float32", ("M", 2))
    assert from_arrays({"x": normal(8, 2), "y": normal(8, 2)}, [ROWS, other]).samples == 8


STATE = InputSpec("state", "float32", (2, None, 128))
RATE = InputSpec("rate", "int64", ())


def test_a_recurrent_state_beside_a_batch_is_not_guessed_at() -> None:
    text = message({"x": normal(8, 2), "state": normal(2, 8, 128)}, ROWS, STATE)
    assert "input 'x' has 8 samples, input 'state' 2" in text and '`batch_size="all"`' in text


def test_fixed_batches_of_different_size_are_not_guessed_at() -> None:
    one = InputSpec("x", "float32", (1, 2))
    text = message({"x": normal(2, 2), "state": normal(2, 8, 128)}, one, STATE)
    assert "input 'x' has 1 samples in each of its fixed batches, input 'state' 2" in text


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
    assert text.startswith("batch 0") and "Use tensor.detach().numpy() instead" in text


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
    assert warning.startswith("input 'x'") and expected in warning


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


def test_enormous_values_give_a_warning_and_no_noise() -> None:
    spec = InputSpec("x", "float64", ("N", 2))
    assert "variance inf" in from_arrays(np.array([[1e300, -1e300]]), [spec]).warnings[0]
