"""Data files that are not what they should be: one line that says so, no code run, no memory taken."""

import io
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_helpers import ROWS, counting, fed, message, normal, saved
from lsuv_cli.data import files as datafiles
from lsuv_cli.data.batches import InputSpec
from lsuv_cli.data.reading import read
from lsuv_cli.errors import DataError
from lsuv_cli.memory import available_memory


def test_a_missing_file_says_what_is_expected(tmp_path: Path) -> None:
    assert "c.npy: no such file; give an .npy, .npz, .safetensors or .pb file or a directory" in message(
        [f"{tmp_path}/c.npy"], ROWS
    )


def test_an_unknown_extension(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("1,2")
    assert "c.csv: not an .npy, .npz, .safetensors or .pb file; save the data with numpy.save" in message(
        [f"{tmp_path}/c.csv"], ROWS
    )


def test_an_empty_directory(tmp_path: Path) -> None:
    assert "no .npy, .npz, .safetensors or .pb files, images or test_data_set_* in this directory" in message(
        [str(tmp_path)], ROWS
    )


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
    assert "c.npy" in text
    assert expected in text


@pytest.mark.parametrize("kind", BAD_ARRAYS)
def test_a_bad_array_in_an_npz_file(tmp_path: Path, kind: str) -> None:
    content, expected = BAD_ARRAYS[kind]
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr("x.npy", content)
    text = message([f"{tmp_path}/c.npz"], ROWS)
    assert "c.npz" in text
    assert expected in text


def test_text_beyond_unicode(tmp_path: Path) -> None:
    (tmp_path / "c.npy").write_bytes(header("(3,)", "'<U1'") + b"\xff" * 12)
    text = message([f"{tmp_path}/c.npy"], InputSpec("s", "string", ("N",)))
    assert "c.npy: input 's'" in text
    assert "its text is not valid UTF-8" in text


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
    assert available_memory() > 2**20


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
