"""Bad input of every kind: exit code 2, a line or two that name the culprit, nothing written, nothing changed."""

import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from lsuv_cli.cli import app

HEAD = '<ir_version: 8, opset_import: ["" : 13]>'
TEXT = "g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, v) }"
WITHOUT = "g (float[N] x) => (float[N] y) { y = Relu(x) }"
rng = np.random.default_rng(5)


def good() -> onnx.ModelProto:
    model = onnx.parser.parse_model(f"{HEAD} {TEXT}")
    for name in "wv":
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((8, 8)).astype(np.float32), name))
    return model


def external(folder: Path) -> onnx.ModelProto:
    onnx.save_model(good(), folder / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    return onnx.load(folder / "m.onnx", load_external_data=False)


def entry(model: onnx.ModelProto, key: str) -> onnx.StringStringEntryProto:
    return next(e for e in model.graph.initializer[0].external_data if e.key == key)


def write(folder: Path, content: bytes | onnx.ModelProto) -> None:
    data = content if isinstance(content, bytes) else content.SerializeToString()
    (folder / "m.onnx").write_bytes(data)


def edited(change: Callable[[onnx.ModelProto], object]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        model = good()
        change(model)
        write(folder, model)

    return make


def moved(change: Callable[[onnx.ModelProto, Path], object]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        model = external(folder)
        change(model, folder)
        write(folder, model)

    return make


def setting(key: str, value: str) -> Callable[[Path], None]:
    return moved(lambda model, folder: setattr(entry(model, key), "value", value))


def data(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: (folder / "c.npy").unlink() or make(folder / "c.npy")


def saved(array: Any) -> Callable[[Path], object]:
    return data(lambda path: np.save(path, array, allow_pickle=True))


def node(op: str, *inputs: str, **attributes: Any) -> Callable[[onnx.ModelProto], object]:
    return lambda m: m.graph.node.append(helper.make_node(op, list(inputs), ["extra"], **attributes))


def add_output(model: onnx.ModelProto) -> None:
    node("Tanh", "y")(model)
    model.graph.node[-1].op_type = "NoSuchOperator"
    model.graph.node.append(helper.make_node("MatMul", ["extra", "w"], ["more"]))
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))


def elsewhere(name: str) -> TensorProto:
    """A tensor whose bytes lie in a file that is none of the model's."""
    made = TensorProto(name=name, dims=[1], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    made.external_data.add(key="location", value="/etc/hostname")
    return made


def sparse(model: onnx.ModelProto) -> None:
    indices = numpy_helper.from_array(np.array([0]), "indices")
    value = onnx.SparseTensorProto(values=elsewhere("values"), indices=indices, dims=[8])
    model.graph.node.append(helper.make_node("Constant", [], ["extra"], sparse_value=value))


def default(model: onnx.ModelProto) -> None:
    function = model.functions.add(name="f", domain="local")
    function.attribute_proto.append(helper.make_attribute("k", elsewhere("default")))


def cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def link(how: Callable[..., None]) -> Callable[[onnx.ModelProto, Path], None]:
    def change(model: onnx.ModelProto, folder: Path) -> None:
        outside = folder.parent / f"{folder.name}.bin"
        (folder / "m.bin").rename(outside)
        how(outside, folder / "m.bin")

    return change


def promising(path: Path) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (10**12, 8)})


def bomb(path: Path) -> None:
    target = path.with_suffix(".npz")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 8)})
        member.write(b"\0" * 1_000_000)


def pickled(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


X = rng.standard_normal((16, 8)).astype(np.float32)
NAN, INF = X.copy(), X.copy()
NAN[3, 2], INF[0, 0] = np.nan, np.inf

# name: (what is done to the folder, what the complaint must name)
MODELS = {
    "missing": (lambda f: (f / "m.onnx").unlink(), "m.onnx"),
    "empty": (lambda f: write(f, b""), "empty"),
    "text": (lambda f: write(f, b"this is no model, it is a text of a few words"), "not an ONNX file"),
    "an image": (lambda f: write(f, b"\x89PNG\r\n\x1a\n" + bytes(range(256))), "not an ONNX file"),
    "a directory": (lambda f: (f / "m.onnx").unlink() or (f / "m.onnx").mkdir(), "directory"),
    "half of it": (lambda f: write(f, good().SerializeToString()[:300]), "m.onnx"),
    "all but one byte": (lambda f: write(f, good().SerializeToString()[:-1]), "m.onnx"),
    "one byte": (lambda f: write(f, good().SerializeToString()[:1]), "m.onnx"),
    "no graph": (edited(lambda m: m.ClearField("graph")), "no graph"),
    "no opset": (edited(lambda m: m.ClearField("opset_import")), "operator set"),
    "a cycle": (edited(cycle), "cycle"),
    "a missing initializer": (edited(lambda m: m.graph.initializer.pop()), "'v'"),
    "unknown operator": (edited(add_output), "NoSuchOperator"),
    "opset from the future": (edited(lambda m: setattr(m.opset_import[0], "version", 999)), "999"),
    "ir from the future": (edited(lambda m: setattr(m, "ir_version", 999)), "999"),
    "shapes that do not fit": (edited(lambda m: m.graph.initializer[0].dims.__setitem__(0, 4)), "'w'"),
    "a tensor cut short": (
        edited(lambda m: setattr(m.graph.initializer[0], "raw_data", b"1234")),
        "'w'",
    ),
    "a tensor of unknown type": (edited(lambda m: setattr(m.graph.initializer[0], "data_type", 77)), "w"),
    "no layers": (lambda f: write(f, onnx.parser.parse_model(f"{HEAD} {WITHOUT}")), "no layer"),
    "data file missing": (moved(lambda m, f: (f / "m.bin").unlink()), "m.bin"),
    "data file short": (moved(lambda m, f: (f / "m.bin").write_bytes(b"short")), "m.bin"),
    "data file empty": (moved(lambda m, f: (f / "m.bin").write_bytes(b"")), "m.bin"),
    "data file a directory": (moved(lambda m, f: (f / "m.bin").unlink() or (f / "m.bin").mkdir()), "m.bin"),
    "data in the parent": (setting("location", "../m.bin"), "../m.bin"),
    "data behind dots": (setting("location", "a/../../m.bin"), "outside"),
    "data at an absolute path": (setting("location", "/etc/hostname"), "/etc/hostname"),
    "data with a nul": (setting("location", "m\0.bin"), "'w'"),
    "data named nowhere": (setting("location", ""), "no file"),
    "data in a device": (setting("location", "/dev/zero"), "/dev/zero"),
    "offset beyond the end": (setting("offset", "99999999"), "m.bin"),
    "offset negative": (setting("offset", "-4"), "'w'"),
    "offset a word": (setting("offset", "zero"), "'w'"),
    "length beyond the end": (setting("length", "99999999"), "m.bin"),
    "length negative": (setting("length", "-1"), "'w'"),
    "length too small": (setting("length", "8"), "'w'"),
    "a sparse constant at an absolute path": (edited(lambda m: sparse(m)), "/etc/hostname"),
    "a default of a function at an absolute path": (edited(lambda m: default(m)), "/etc/hostname"),
    "data behind a symbolic link": (moved(link(os.symlink)), "cp -L"),
    "data behind a hard link": (moved(link(os.link)), "cp"),
}  # fmt: skip
DATA = {
    "missing": (lambda f: (f / "c.npy").unlink(), "c.npy"),
    "empty file": (data(lambda p: p.write_bytes(b"")), "c.npy"),
    "text": (data(lambda p: p.write_bytes(b"1 2 3 4")), "c.npy"),
    "cut off": (data(lambda p: (np.save(p, X), p.write_bytes(p.read_bytes()[:-40]))), "c.npy"),
    "header cut off": (data(lambda p: (np.save(p, X), p.write_bytes(p.read_bytes()[:20]))), "c.npy"),
    "promises more than it holds": (data(promising), "c.npy"),
    "pickled": (data(pickled), "c.npy"),
    "words": (saved(np.array(["a", "b"])), "x"),
    "complex": (saved(X.astype(np.complex64)), "complex"),
    "rank too low": (saved(np.float32(3)), "(N, 8)"),
    "rank too high": (saved(X.reshape(2, 2, 4, 8)), "(N, 8)"),
    "shape": (saved(X[:, :5]), "(16, 5)"),
    "nan": (saved(NAN), "NaN"),
    "inf": (saved(INF), "x"),
    "no samples": (saved(X[:0]), "c.npy"),
}
OPTIONS = {
    "tol 0": "--tol 0",
    "tol 2": "--tol 2",
    "tol word": "--tol small",
    "trials": "--max-trials 0",
    "trials word": "--max-trials many",
    "target": "--target-variance -1",
    "target inf": "--target-variance inf",
    "seed": "--seed -1",
    "seed word": "--seed x",
    "threads": "--threads 0",
    "threads many": "--threads 100000",
    "batch": "--batch-size 0",
    "batch word": "--batch-size some",
    "limit": "--limit 0",
    "limit negative": "--limit -3",
    "memory": "--memory 0",
    "memory word": "--memory much",
    "device": "--device tpu",
    "device number": "--device cuda:x",
    "pre-init": "--pre-init best",
    "bias": "--bias maybe",
    "tied": "--tied up",
    "include": "--include nothing*",
    "exclude": "--exclude nothing*",
    "plot": "--plot plot.bmp",
    "weights": "--weights w.pt",
    "mean": "--mean a,b",
    "size": "--size 0",
}
OUTPUTS = {
    "a directory": ("-o .", "directory"),
    "meant as a directory": ("-o new/", "directory"),
    "in a directory that is not there": ("-o none/o.onnx", "none"),
    "the input": ("-o m.onnx --force", "input"),
    "the input by another path": ("-o ./sub/../m.onnx --force", "input"),
    "the input behind a symbolic link": ("-o soft.onnx --force", "input"),
    "the input behind a hard link": ("-o hard.onnx --force", "input"),
    "exists": ("-o there.onnx", "--force"),
    "both ways": ("-o o.onnx --output-dir d", "--output-dir"),
}
ORIGINALS = ("m.onnx", "m.bin", "c.npy", "c.npz", "there.onnx")


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str, options: str = "") -> None:
    """Run the command and check everything that must hold for a refusal."""
    monkeypatch.chdir(folder)
    source = "c.npz" if (folder / "c.npz").exists() else "c.npy"
    before = snapshot(folder)
    done = CliRunner().invoke(app, ["init", "m.onnx", "--data", source, *options.split()])
    assert done.exit_code == 2, done.output
    complaint = done.stderr
    assert all(name in " ".join(complaint.split()) for name in names), complaint
    assert "Traceback" not in complaint
    assert "internal error" not in complaint
    if "Usage" not in complaint:
        assert len(complaint.splitlines()) <= 2, complaint
    assert done.stdout == ""
    assert snapshot(folder) == before


def snapshot(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "directory"
        for p in sorted(folder.rglob("*"))
    }


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "here"
    made.mkdir()
    write(made, good())
    np.save(made / "c.npy", X)
    return made


def test_the_good_case_is_good(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert CliRunner().invoke(app, ["init", "m.onnx", "--data", "c.npy"]).exit_code == 0


@pytest.mark.parametrize("name", MODELS)
def test_model(folder, monkeypatch, name):
    make, culprit = MODELS[name]
    make(folder)
    refused(folder, monkeypatch, culprit)


@pytest.mark.parametrize("name", DATA)
def test_data(folder, monkeypatch, name):
    make, culprit = DATA[name]
    make(folder)
    refused(folder, monkeypatch, culprit)


def test_a_zip_bomb(folder, monkeypatch):
    data(bomb)(folder)
    refused(folder, monkeypatch, "c.npz")


@pytest.mark.parametrize("given", ["", ".", "./", "/"])
def test_a_name_that_is_no_files(folder, monkeypatch, given):
    monkeypatch.chdir(folder)
    for command in ("init", "inspect", "check"):
        done = CliRunner().invoke(app, [command, given, "--data", "c.npy"])
        assert done.exit_code == 2
        assert "give an ONNX file" in done.stderr
    assert set(snapshot(folder)) == {"m.onnx", "c.npy"}


def test_no_name_at_all_for_the_data(folder, monkeypatch):
    """A shell variable that is not set: not the current directory."""
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["check", "m.onnx", "--data", ""])
    assert done.exit_code == 2
    assert done.stderr == "lsuv: --data is empty; give a file, a directory or random\n"


@pytest.mark.parametrize("name", OPTIONS)
def test_option(folder, monkeypatch, name):
    refused(folder, monkeypatch, OPTIONS[name].split()[0], options=OPTIONS[name])


@pytest.mark.parametrize("name", OUTPUTS)
def test_output(folder, monkeypatch, name):
    (folder / "sub").mkdir()
    (folder / "there.onnx").write_bytes(b"precious")
    if name.endswith("symbolic link"):
        (folder / "soft.onnx").symlink_to("m.onnx")
    if name.endswith("hard link"):
        (folder / "hard.onnx").hardlink_to(folder / "m.onnx")
    options, culprit = OUTPUTS[name]
    refused(folder, monkeypatch, culprit, options=options)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("target", ["m.onnx", "c.npy", "."])
def test_without_permission(folder, monkeypatch, target):
    (folder / target).chmod(0o555 if target == "." else 0)
    try:
        refused(folder, monkeypatch, "ermission" if target != "." else "writable")
    finally:
        (folder / target).chmod(0o755)


def test_every_truncation_is_refused_or_still_a_model(folder, monkeypatch):
    whole = good().SerializeToString()
    for length in range(0, len(whole), 13):
        write(folder, whole[:length])
        refused(folder, monkeypatch, "m.onnx")
