"""Checkpoints: what is read is written again, and a file that is no checkpoint is refused in one line."""

import io
import json
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from helpers import model, normal
from lsuv_cli import initialize
from lsuv_cli.errors import LsuvError
from lsuv_cli.home import checkpoints

KINDS = {
    "z.weight": normal(3, 4),
    "a/bias": normal(4, dtype=np.float16),
    "half": normal(2, 5).astype(ml_dtypes.bfloat16),
    "double": normal(2, dtype=np.float64),
    "steps": np.array(7, np.int64),
    "scalar": np.array(0.5, np.float32),
    "nothing": np.zeros((0, 3), np.float32),
    "mask": np.array([True, False]),
    "file": np.arange(3, dtype=np.uint8),
}


def same(one, other):
    return list(one) == list(other) and all(
        one[key].dtype == other[key].dtype
        and one[key].shape == other[key].shape
        and one[key].tobytes() == other[key].tobytes()
        for key in one
    )


@pytest.mark.parametrize("name", ["c.safetensors", "c.npz"])
def test_what_is_written_is_read_again(tmp_path, name):
    checkpoints.write(tmp_path / name, KINDS, {"format": "pt"})
    found = checkpoints.read(tmp_path / name)
    assert same(found.tensors, KINDS)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_other_software_reads_what_is_written(tmp_path):
    checkpoints.write(tmp_path / "c.safetensors", KINDS, {"format": "pt"})
    found = safetensors.numpy.load_file(tmp_path / "c.safetensors")
    assert same({key: found[key] for key in KINDS}, KINDS)
    with safetensors.safe_open(tmp_path / "c.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    plain = {key: array for key, array in KINDS.items() if key != "half"}
    checkpoints.write(tmp_path / "c.npz", plain, {})
    with np.load(tmp_path / "c.npz", allow_pickle=False) as archive:
        assert same({key: archive[key] for key in archive.files}, plain)


def test_what_other_software_wrote_is_read(tmp_path):
    plain = {key: array for key, array in KINDS.items() if key != "half"}
    safetensors.numpy.save_file(plain, tmp_path / "c.safetensors", {"epoch": "3"})
    found = checkpoints.read(tmp_path / "c.safetensors")
    assert same({key: found.tensors[key] for key in plain}, plain)
    assert found.metadata == {"epoch": "3"}
    np.savez_compressed(tmp_path / "c.npz", normal(2), np.asfortranarray(normal(3, 4)), normal(2, dtype=">f4"))
    arrays = checkpoints.read(tmp_path / "c.npz").tensors
    assert list(arrays) == ["arr_0", "arr_1", "arr_2"]
    np.testing.assert_array_equal(arrays["arr_1"], normal(3, 4))
    np.testing.assert_array_equal(arrays["arr_2"], normal(2))


def test_arrays_without_names_keep_their_order(tmp_path):
    np.savez(tmp_path / "c.npz", *[normal(2, seed=k) for k in range(12)])
    assert list(checkpoints.read(tmp_path / "c.npz").tensors) == [f"arr_{k}" for k in range(12)]


def test_two_names_for_one_memory_are_known():
    array = normal(3, 4)
    found = checkpoints.read({"a": array, "b": array, "c": array.copy(), "d": array[:2]})
    assert found.same == {"b": "a"}


def header(text, body=b""):
    return struct.pack("<Q", len(text)) + text + body


def described(**entry):
    return json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry}).encode()


BAD = {
    "empty": b"",
    "short": b"\0\0\0",
    "a huge header": struct.pack("<Q", 1 << 62) + b"{}",
    "no JSON": header(b"{not json"),
    "a list": header(b"[1, 2]"),
    "deep": header(b"[" * 100_000),
    "cut off": header(described(), b"\0" * 7),
    "a wrong size": header(described(shape=[3]), b"\0" * 8),
    "a negative shape": header(described(shape=[-2]), b"\0" * 8),
    "a shape beyond memory": header(described(shape=[1 << 40, 1 << 40]), b"\0" * 8),
    "offsets in reverse": header(described(data_offsets=[8, 0]), b"\0" * 8),
    "an unknown type": header(described(dtype="F99"), b"\0" * 8),
    "no shape": header(b'{"w": {"dtype": "F32"}}', b"\0" * 8),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_damaged_safetensors_file_is_refused(tmp_path, data):
    (tmp_path / "c.safetensors").write_bytes(data)
    with pytest.raises(LsuvError, match=r"`like` .*c\.safetensors is no safetensors file, or is damaged") as caught:
        checkpoints.read(tmp_path / "c.safetensors")
    assert "\n" not in str(caught.value)


def npz(**members):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return stream.getvalue()


def npy(shape="(2,)", descr="'<f4'", body=b"\0" * 8):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def test_the_hand_made_array_is_right(tmp_path):
    (tmp_path / "c.npz").write_bytes(npz(w=npy()))
    np.testing.assert_array_equal(checkpoints.read(tmp_path / "c.npz").tensors["w"], np.zeros(2, np.float32))


@pytest.mark.parametrize(
    "data",
    [b"", b"PK nothing", npz(w=b"hello"), npz(w=npy(shape="(1 << 40,)")), npz(w=npy(shape="(99999999999999,)")),
     npz(w=npy(body=b"\0")), npz(w=npy(descr="'|O'")), npz(w=npy()[:-70])],
)  # fmt: skip
def test_a_damaged_npz_file_is_refused(tmp_path, data):
    (tmp_path / "c.npz").write_bytes(data)
    with pytest.raises(LsuvError, match=r"`like` .*c\.npz is no \.npz file of plain arrays, or is damaged") as caught:
        checkpoints.read(tmp_path / "c.npz")
    assert "\n" not in str(caught.value)


def test_pickled_objects_are_never_loaded(tmp_path):
    np.savez(tmp_path / "c.npz", w=np.array([{"a": 1}], object))
    with pytest.raises(LsuvError, match="Python objects"):
        checkpoints.read(tmp_path / "c.npz")
    with pytest.raises(LsuvError, match="no array of numbers"):
        checkpoints.read({"w": {"a": 1}})


@pytest.mark.parametrize("name", ["c.pt", "nowhere.npz", "nowhere.safetensors"])
def test_a_file_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(LsuvError, match=f"`like` .*{name}"):
        checkpoints.read(tmp_path / name)


@pytest.mark.parametrize("name", ["after.safetensors", "after.npz"])
def test_the_whole_checkpoint_comes_back(tmp_path, name):
    weight, bias = normal(5, 6), normal(5)
    proto = model("g (float[N,6] x) => (float[N,5] y) { y = Gemm<transB=1>(x, W, b) }", W=weight, b=bias)
    before = {**KINDS, "fc.weight": weight, "fc.bias": bias}
    checkpoints.write(tmp_path / "before.safetensors", before, {"format": "pt"})
    done = initialize(proto, normal(64, 6), like=tmp_path / "before.safetensors", weights=tmp_path / name)
    after = checkpoints.read(tmp_path / name)
    assert same(after.tensors, done.weights)
    assert same({key: after.tensors[key] for key in KINDS}, KINDS)
    assert not after.tensors["fc.bias"].any()
    product = normal(64, 6).astype(np.float64) @ after.tensors["fc.weight"].T
    assert abs(product.var() - 1) < 1e-5
    if name.endswith("safetensors"):
        assert after.metadata == {"format": "pt"}
