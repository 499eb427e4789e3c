"""Data from elsewhere than .npy files: onnx's test data, safetensors, pipes, literals, and what cannot be mixed."""

import contextlib
import json
import os
import struct
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import helpers
from data_helpers import IDS, ROWS, counting, fed, message, normal, saved
from helpers import model
from lsuv_cli import initialize, inspect
from lsuv_cli.data.batches import InputSpec
from lsuv_cli.data.reading import read
from shell import LSUV

RATE = InputSpec("sr", "int64", ())
STATE = InputSpec("state", "float32", (2, None, 4))


def pb(path: Path, array: Any, name: str = "") -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(numpy_helper.from_array(np.asarray(array), name).SerializeToString())
    return path


def safetensors(path: Path, **arrays: Any) -> Path:
    """A file in the format of the safetensors library, without that library."""
    names = {"float32": "F32", "int64": "I64"}
    header, body = {}, b""
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": names[array.dtype.name], "shape": array.shape, "data_offsets": [len(body), len(body) + len(data)]
        }  # fmt: skip
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


# onnx's test data


def test_a_directory_of_test_data_feeds_the_inputs_in_their_order(tmp_path: Path) -> None:
    pb(tmp_path / "input_0.pb", counting(3, 2).astype(np.float32), "whatever")
    pb(tmp_path / "input_1.pb", np.ones((3, 5), np.int64))
    pb(tmp_path / "output_0.pb", np.zeros(7))
    (batch,) = read([str(tmp_path)], [ROWS, IDS]).batches
    np.testing.assert_array_equal(batch["x"], counting(3, 2).astype(np.float32))
    assert batch["ids"].shape == (3, 5)


def test_a_directory_of_test_data_sets_is_joined_with_2_before_10(tmp_path: Path) -> None:
    for number in (10, 2):
        pb(tmp_path / f"test_data_set_{number}" / "input_0.pb", np.full((2, 2), number, np.float32))
    (tmp_path / "model.onnx").write_bytes(b"")
    assert fed(read([str(tmp_path)], [ROWS]))[:, 0].tolist() == [2, 2, 10, 10]


def test_more_test_data_than_inputs(tmp_path: Path) -> None:
    pb(tmp_path / "input_1.pb", normal(3, 2))
    assert "the model has 1 inputs" in message([str(tmp_path)], ROWS)


@pytest.mark.parametrize("damage", ["shape", "external", "bytes"])
def test_a_damaged_tensor_is_told_in_one_line(tmp_path: Path, damage: str) -> None:
    tensor = numpy_helper.from_array(normal(3, 2).astype(np.float32))
    if damage == "shape":
        tensor.dims[0] = 2**40
    elif damage == "external":
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="/etc/hostname")
    path = tmp_path / "input_0.pb"
    path.write_bytes(b"\xff\x00nothing" if damage == "bytes" else tensor.SerializeToString())
    assert message([str(path)], ROWS).startswith(str(path))


# safetensors


def test_a_safetensors_file_feeds_inputs_by_name(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "c.safetensors", ids=np.ones((3, 5), np.int64), x=normal(3, 2).astype(np.float32))
    (batch,) = read([str(path)], [ROWS, IDS]).batches
    np.testing.assert_array_equal(batch["x"], normal(3, 2).astype(np.float32))


def test_a_safetensors_file_that_promises_too_much(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "c.safetensors", x=normal(3, 2).astype(np.float32))
    path.write_bytes(path.read_bytes()[:-1])
    assert "tensor 'x' does not fit the file" in message([str(path)], ROWS)


# Pipes


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("save", [np.save, np.savez])
def test_a_fifo_is_read_once_and_used_many_times(tmp_path: Path, save: Any) -> None:
    save(tmp_path / f"c.{'npy' if save is np.save else 'npz'}", normal(10, 2))
    (content,) = (path.read_bytes() for path in tmp_path.iterdir())
    os.mkfifo(tmp_path / "pipe")
    thread = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(content))
    thread.start()
    calibration = read([f"x={tmp_path / 'pipe'}"], [ROWS])
    thread.join()
    for _ in range(2):
        np.testing.assert_array_equal(fed(calibration), normal(10, 2).astype(np.float32))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_copied_beyond_half_of_the_free_space(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("lsuv_cli.spool.shutil.disk_usage", lambda _: SimpleNamespace(free=400))
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), (tmp_path / "pipe").open("wb") as pipe:
            pipe.write(bytes(1000))

    thread = threading.Thread(target=write)
    thread.start()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert "more than 200 bytes" in message([f"x={tmp_path / 'pipe'}"], ROWS)
    thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_data_from_standard_input(tmp_path: Path) -> None:
    onnx.save(
        model("g (float[N,2] x) => (float[N,2] y) { y = MatMul(x, W) }", W=helpers.normal(2, 2)),
        tmp_path / "m.onnx",
    )
    content = Path(saved(tmp_path / "c.npy", normal(50, 2))).read_bytes()
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def run(*words: str, given: bytes = content) -> tuple[int, str]:
        command = [*LSUV, "inspect", *words]
        env = os.environ | {"TMPDIR": str(scratch)}
        done = subprocess.run(command, input=given, capture_output=True, cwd=tmp_path, env=env, check=False)
        assert not list(scratch.glob("lsuv-*"))
        return done.returncode, done.stdout.decode() + done.stderr.decode()

    code, text = run("m.onnx", "--data", "-")
    assert code == 0, text
    assert "50 samples" in text
    assert run("-", "--data", "-")[1].startswith("lsuv: the model and the data both")
    assert (
        run("m.onnx", "--data", "-", given=b"")[1]
        == "lsuv: standard input: is empty; send an .npy, .npz or .safetensors file\n"
    )
    assert "by its first bytes" in run("m.onnx", "--data", "-", given=b"1,2,3")[1]


# Literals and states


def test_a_number_and_a_state_beside_samples(tmp_path: Path) -> None:
    x, state = saved(tmp_path / "x.npy", counting(6, 2)), saved(tmp_path / "state.npy", np.zeros((2, 1, 4)))
    batches = read([f"x={x}", f"state={state}", "sr=16000"], [ROWS, STATE, RATE]).batches
    assert len(batches) == 6
    assert {batch["sr"].item() for batch in batches} == {16000}
    assert {batch["state"].shape for batch in batches} == {(2, 1, 4)}
    assert batches[0]["sr"].dtype == np.int64


@pytest.mark.parametrize(
    ("text", "shape", "values"),
    [
        ("0.5", (1,), [0.5]),
        ("[1, 2]", (2,), [1, 2]),
        ("[[1],[2]]", ("a", 1), [[1], [2]]),
        ("3", (2, 2), [[3, 3], [3, 3]]),
    ],
)
def test_literals_of_every_rank(text: str, shape: Any, values: Any) -> None:
    spec = InputSpec("s", "float32", shape)
    beside = read([f"s={text}"], [spec])
    np.testing.assert_array_equal(beside.batches[0]["s"], np.array(values, np.float32))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("sr=[1, 2]", "wants () int64, got 2"),
        ("sr=0.5", "convert it"),
        ("state=0", "whose shape is open"),
        ("state=[[1], [2, 3]]", "no array"),
        ("sr=sixteen", "sixteen: no such file"),
        ("rate=16000", "the model has no input 'rate'"),
    ],
)
def test_literals_that_do_not_fit(tmp_path: Path, source: str, reason: str) -> None:
    x = saved(tmp_path / "x.npy", normal(3, 2))
    rest = [s for s in ("sr=1", f"state={saved(tmp_path / 's.npy', np.zeros((2, 1, 4)))}") if s[:2] != source[:2]]
    assert reason in message([f"x={x}", source, *rest], ROWS, STATE, RATE)


def test_literals_among_paths_in_python(tmp_path: Path) -> None:
    proto = model(
        "g (float[N,2] x, int64 sr) => (float[N,2] y) { y = MatMul(x, W) c = Cast<to=1>(sr) }", W=helpers.normal(2, 2)
    )
    path = saved(tmp_path / "x.npy", normal(9, 2))
    files: dict[str, str | float] = {"x": path, "sr": 16000}
    assert inspect(proto, files).samples == 9
    arrays: dict[str, Any] = {"x": normal(9, 2), "sr": 16000}
    assert inspect(proto, arrays).samples == 9


# Mixtures


def test_images_and_arrays_in_one_directory_are_both_named(tmp_path: Path) -> None:
    saved(tmp_path / "a.npy", normal(3, 2))
    (tmp_path / "b.png").write_bytes(b"")
    assert "holds images (b.png) and arrays (a.npy)" in message([str(tmp_path)], ROWS)


@pytest.mark.parametrize("option", [{"mean": 0.5}, {"std": (0.2, 0.2)}, {"size": 8}])
@pytest.mark.parametrize("data", ["c.npy", "random", "memory"])
def test_options_for_images_are_refused_elsewhere(tmp_path: Path, option: Any, data: str) -> None:
    proto = model("g (float[N,2] x) => (float[N,2] y) { y = MatMul(x, W) }", W=helpers.normal(2, 2))
    source = {"c.npy": saved(tmp_path / "c.npy", normal(3, 2)), "random": "random", "memory": normal(3, 2)}[data]
    with pytest.raises(Exception, match=f"`{next(iter(option))}` is for images"):
        initialize(proto, source, **option)


def test_indices_beyond_the_embedding_in_a_model() -> None:
    text = """g (int64[N,T] ids) => (float[N,T,3] y) {
        u = Identity(ids) e = Gather(table, u) y = MatMul(e, W) }"""
    proto = model(text, table=helpers.normal(7, 4), W=helpers.normal(4, 3))
    with pytest.raises(Exception, match=r"input 'ids' has indices from 0 to 7, .* 7 rows"):
        inspect(proto, np.array([[0, 7]]))


# Names


ONE = "g (float[N,4] x) => (float[N,4] y) { y = MatMul(x, w) }"


@pytest.mark.parametrize("kind", ["npz", "safetensors", "dict", "batches"])
def test_an_array_under_another_name_is_fed_to_the_only_input_and_both_are_named(tmp_path, kind):
    x = helpers.normal(16, 4)
    given: Any = {"dict": {"images": x}, "batches": [{"images": x[:8]}, {"images": x[8:]}]}.get(kind)
    if kind == "npz":
        np.savez(tmp_path / "d.npz", images=x)
        given = str(tmp_path / "d.npz")
    elif kind == "safetensors":
        given = str(safetensors(tmp_path / "d.safetensors", images=x))
    told = inspect(model(ONE, w=helpers.normal(4, 4)), given).warnings
    (warning,) = [text for text in told if "images" in text]
    assert "'images' is not an input of the model; as the only array it is fed to 'x'" in warning


@pytest.mark.parametrize("given", ["x=named.npz", "positional.npz", "test_data_set_0", "same.npz"])
def test_names_that_say_nothing_or_were_overruled_are_not_warned_about(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    np.savez("named.npz", images=normal(16, 4))
    np.savez("positional.npz", normal(16, 4))
    np.savez("same.npz", x=normal(16, 4))
    pb(tmp_path / "test_data_set_0" / "input_0.pb", normal(16, 4), "another")
    assert not any("input of the model" in text for text in inspect(model(ONE, w=helpers.normal(4, 4)), given).warnings)


def test_a_mask_of_zeros_and_ones_is_not_said_to_be_badly_scaled():
    masked = (
        "g (float[N,4] x, float[N,4] attention_mask) => (float[N,4] y) { a = Mul(x, attention_mask) y = MatMul(a, w) }"
    )
    rows = {"x": normal(64, 4), "attention_mask": (normal(64, 4, seed=1) > 0).astype(np.float32)}
    assert not inspect(model(masked, w=helpers.normal(4, 4)), rows).warnings
    assert not inspect(model(masked, w=helpers.normal(4, 4)), "random").warnings
    rows["attention_mask"] *= 255
    assert "'attention_mask' has mean" in inspect(model(masked, w=helpers.normal(4, 4)), rows).warnings[0]
