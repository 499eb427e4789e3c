# mypy: disable-error-code="arg-type"
"""Names that a file gives: never raw on a terminal, never slow, never an internal error; exact in JSON and CSV."""

import csv
import io
import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from helpers import model, normal
from lsuv_cli.scaling import translation
from lsuv_cli.text import printable
from shell import LSUV, lsuv, on_a_terminal

EVIL = "a\x1b]0;title\x07\x1b[2J\x00b\r\nc\u202ed\u2066\x9b31m\u2028e$x_{$[red]"
X = normal(32, 8)


def net(first: str = "first", second: str = "second") -> onnx.ModelProto:
    proto = model("g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) b = Tanh(a) y = MatMul(b, v) }",
                  w=normal(8, 8), v=np.zeros((8, 8), np.float32))  # fmt: skip
    proto.graph.node[0].name, proto.graph.node[2].name = first, second
    return proto


@pytest.fixture
def folder(tmp_path, monkeypatch):
    onnx.save(net(f"{EVIL}1", f"{EVIL}2"), tmp_path / "m.onnx")
    np.save(tmp_path / "c.npy", X)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_printable_stays_and_the_rest_is_escaped():
    assert printable("/encoder/层.0/é MatMul") == "/encoder/层.0/é MatMul"
    assert printable("a\x1b[2J\n\0\u202e\udc80") == r"a\x1b[2J\n\x00\u202e\udc80"
    assert printable(EVIL).isprintable()


@pytest.mark.parametrize(
    "words",
    [
        "init -o o.onnx --force --pre-init keep -v --plot p.svg",
        "init --dry-run",
        "inspect",
        "check -v",
        "check",
        "compare --inits keep,msra",
    ],
)
def test_names_in_tables_notes_and_warnings(folder, words):
    command, *more = words.split()
    done = lsuv(command, "m.onnx", "--data", "c.npy", *more)
    assert "internal error" not in done.err
    for text in (done.out, done.err):
        assert all(line.isprintable() for line in text.split("\n")), text
    assert r"\x1b" in done.out + done.err


def test_names_on_a_terminal(folder):
    for words in (("inspect", "m.onnx"), ("inspect", "m.onnx", "--csv"), ("check", "m.onnx", "--data", "c.npy", "-v")):
        _, text = on_a_terminal(*words)
        assert not any(raw in text for raw in ("\x1b]0", "\x1b[2J", "\x00", "\u202e", "\u2066", "\x9b", "\u2028"))


@pytest.mark.parametrize("words", [("init", "m.onnx", "--data", f"x\x1b[2J={EVIL[:-1]}"), ("inspect", "\x1b[2Jm.onnx"),
                                   ("init", "m.onnx", "--data", "c.npy", "--include", "\x1b[2J"),
                                   ("init", "m.onnx", "--data", "c.npy", "-o", "no\x1b[2J/o.onnx"),
                                   ("init", "m.onnx", "--\x1b[2J")])  # fmt: skip
def test_names_in_complaints(folder, words):
    done = lsuv(*(word.replace("\0", "") for word in words))
    assert done.code == 2
    assert done.err.endswith("\n")
    assert done.err[:-1].isprintable()


def test_json_and_csv_have_the_names_as_they_are(folder):
    found = json.loads(lsuv("inspect", "m.onnx", "--json").out)
    assert [layer["name"] for layer in found["layers"]] == [f"{EVIL}1", f"{EVIL}2"]
    rows = list(csv.DictReader(io.StringIO(lsuv("inspect", "m.onnx", "--csv").out, newline="")))
    assert [row["name"] for row in rows] == [f"{EVIL}1", f"{EVIL}2"]


@pytest.mark.parametrize(
    "name",
    [
        "/" * 200_000,
        "a::" * 70_000,
        "onnxruntime::f(" * 15_000,
        "\x1b" * 100_000,
        "漢" * 100_000,
        "a." * 100_000,
        "/a" * 100_000,
    ],
)
def test_long_names_take_no_long_time(tmp_path, name):
    proto = net(name, f"{name}2")
    proto.graph.initializer[0].name = proto.graph.node[0].input[1] = f"{name}weight"
    onnx.save(proto, tmp_path / "m.onnx")
    np.save(tmp_path / "c.npy", X)
    begun = time.process_time()
    translation.one_line(RuntimeError(f"[ONNXRuntimeError] : 1 : FAIL : Node ({name}) Op (MatMul) {name}"))
    for words in (("inspect",), ("check", "-v"), ("init", "--dry-run"), ("init", "-o", tmp_path / "o.onnx")):
        done = lsuv(words[0], tmp_path / "m.onnx", "--data", tmp_path / "c.npy", *words[1:])
        assert done.code in {0, 1}, done.err[-500:]
        assert max(map(len, (done.out + done.err).splitlines())) < 5000
    assert time.process_time() - begun < 10


# Text that is not UTF-8

PLACES = {
    "a node": "nodename",
    "an input": "inputname",
    "a weight": "weightname",
    "an operator": "Tanh",
    "a dimension": "Dimension",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", ["init", "inspect", "check", "compare"])
def test_a_name_that_is_not_utf8(tmp_path, place, command):
    text = "g (float[Dimension,8] inputname) => (float[N,8] y) { a = MatMul(inputname, weightname) y = Tanh(a) }"
    proto = model(text, weightname=normal(8, 8))
    proto.graph.node[0].name = "nodename"
    wrong = PLACES[place].encode()
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString().replace(wrong, b"\xff\xfe" + wrong[2:]))
    np.save(tmp_path / "c.npy", X)
    done = lsuv(command, tmp_path / "m.onnx", "--data", tmp_path / "c.npy")
    assert (done.code, "not UTF-8" in done.err, done.err.count("\n")) == (2, True, 1)


def test_a_description_may_be_anything(tmp_path):
    proto = net()
    proto.doc_string = "description"
    proto.graph.node[0].doc_string = "description"
    proto.metadata_props.add(key="description", value="description")
    proto.graph.node[0].metadata_props.add(key="description", value="description")
    data = proto.SerializeToString().replace(b"description", b"\xff\xfescription")
    (tmp_path / "m.onnx").write_bytes(data)
    np.save(tmp_path / "c.npy", X)
    done = lsuv(
        "init",
        tmp_path / "m.onnx",
        "--data",
        tmp_path / "c.npy",
        "-o",
        tmp_path / "o.onnx",
        "--weights",
        tmp_path / "w.npz",
    )
    assert done.code in {0, 1}, done.err
    assert (tmp_path / "o.onnx").read_bytes().count(b"\xff\xfescription") == data.count(b"\xff\xfescription")


def test_file_names_that_are_not_utf8(folder):
    name = os.fsdecode(b"\xff\xfe.npy")
    Path("c.npy").rename(name)
    done = lsuv("init", "m.onnx", "--data", name, "-o", os.fsdecode(b"\xff.onnx"), "--json", "--pre-init", "keep")
    assert done.code in {0, 1}
    assert json.loads(done.out)["data"] == name
    assert Path(os.fsdecode(b"\xff.onnx")).exists()
    missing = lsuv("init", "m.onnx", "--data", os.fsdecode(b"\xff\xfd.npy"))
    assert missing.code == 2
    assert r"\udcff\udcfd.npy" in missing.err


@pytest.mark.parametrize("words", ["inspect", "check -v --data c.npy"])
def test_an_encoding_that_lacks_characters(folder, words):
    onnx.save(net("层一", "é"), "m.onnx")
    command, *more = words.split()
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"}
    done = subprocess.run([*LSUV, command, "m.onnx", *more], env=env, capture_output=True, check=False)
    assert done.returncode in {0, 1}
    assert b"\\u5c42" in done.stdout
    assert b"internal" not in done.stderr


# Standard output on a full disk

COMMANDS = [
    "--help",
    "--version",
    "init --help",
    "inspect m.onnx",
    "inspect m.onnx --json",
    "inspect m.onnx --csv",
    "check m.onnx --data c.npy",
    "check m.onnx --data c.npy -v",
    "check m.onnx --data c.npy --json",
    "compare m.onnx --data c.npy --inits keep",
    "compare m.onnx --data c.npy --inits keep --json",
    "init m.onnx --data c.npy -o o.onnx --json",
    "init m.onnx --data c.npy -o -",
    "init m.onnx --data c.npy -o /dev/stdout",
    "init m.onnx n.onnx --data c.npy --output-dir out --json",
    "expose m.onnx -o -",
    "strip m.onnx -o -",
    "doctor --device cpu",
    "doctor --device cpu --json",
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", COMMANDS)
def test_a_full_disk_under_standard_output(folder, words):
    onnx.save(net(), "m.onnx")
    onnx.save(net(), "n.onnx")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*LSUV, *words.split(), *(["-q"] if words.startswith("init m") else [])], stdout=full,
                              stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    told = [line for line in done.stderr.splitlines() if line.startswith("lsuv: ")]
    assert (done.returncode, len(told)) == (2, 1), done.stderr
    assert "No space left on device" in told[0]
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("words", "written"),
    [
        ("init m.onnx --data c.npy -o o.onnx --json -q", "o.onnx"),
        ("init m.onnx --data c.npy -o o.onnx --weights w.npz --html r.html --json -q", "o.onnx, w.npz, r.html"),
        ("inspect m.onnx --data c.npy --dump d --html r.html --json", "r.html, d"),
        ("inspect m.onnx --html r.html", "r.html"),
        ("check m.onnx --data c.npy --html r.html", "r.html"),
        ("compare m.onnx --data c.npy --inits keep --html r.html", "r.html"),
    ],
)
def test_a_report_that_cannot_be_printed_after_files_were_written(folder, words, written):
    """The files are complete; the line on standard error says both."""
    onnx.save(net(), "m.onnx")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*LSUV, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("lsuv: ")]
    assert done.returncode == 2
    were = "were" if "," in written else "was"
    reason = "standard output cannot be written: No space left on device"
    assert told == f"lsuv: {reason}; the report is lost, {written} {were} written"
    assert all(Path(name).exists() for name in written.split(", "))
    if "o.onnx" in written:
        onnx.checker.check_model(onnx.load("o.onnx"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_standard_error_does_not_stop_the_work(folder):
    with Path("/dev/full").open("wb") as full:
        command = [*LSUV, "init", "m.onnx", "--data", "c.npy", "-o", "o.onnx", "--pre-init", "keep"]
        assert subprocess.run(command, stderr=full, check=False).returncode in {0, 1}
        assert subprocess.run([*LSUV, "init", "none.onnx", "--data", "c.npy"], stderr=full, check=False).returncode == 2
    assert Path("o.onnx").exists()


# Bounds


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT64])
@pytest.mark.parametrize("command", ["init", "inspect"])
def test_a_weight_whose_values_are_not_there(tmp_path, kind, command):
    """A file of 141 bytes or so that wants gigabytes."""
    proto = model("g (float[N,6] x) => (y) { y = MatMul(x, w) }")
    proto.graph.initializer.add(name="w", data_type=kind, dims=[6, 60_000_000])
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    done = lsuv(command, tmp_path / "m.onnx", "--data", "random")
    assert (done.code, "has 0 values" in done.err) == (2, True)
    assert "'w'" in done.err


@pytest.mark.parametrize(
    "kind",
    [
        "FLOAT",
        "FLOAT16",
        "BFLOAT16",
        "INT4",
        "UINT4",
        "FLOAT4E2M1",
        "INT8",
        "BOOL",
        "UINT64",
        "COMPLEX64",
        "STRING",
        "DOUBLE",
        "INT2",
        "FLOAT8E4M3FN",
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_values_in_every_field_they_may_be_in(kind, raw):
    from onnx import numpy_helper

    from lsuv_cli.model.file import load

    if not hasattr(TensorProto, kind):
        pytest.skip("this onnx does not have it")
    words = [b"a"] * 5 if kind == "STRING" else [1, 0, 1, 0, 1]
    held = helper.make_tensor("t", getattr(TensorProto, kind), [5], words)
    if raw and kind != "STRING":
        held = numpy_helper.from_array(numpy_helper.to_array(held), "t")
    proto = net()
    proto.graph.initializer.append(held)
    assert load(proto)
    proto.graph.initializer[-1].dims[0] = 1000
    with pytest.raises(Exception, match="its shape"):
        load(proto)


@pytest.mark.parametrize(
    "option",
    [
        "--threads 4096",
        "--threads 100000",
        "--max-trials 100000",
        "--size 50000",
        f"--batch-size {'9' * 5000}",
        f"--limit {'9' * 5000}",
        f"--memory {'9' * 5000}G",
    ],
)
def test_numbers_beyond_all_bounds(folder, option):
    done = lsuv("init", "m.onnx", "--data", "c.npy", *option.split())
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert option.split()[0] in done.err
    assert "internal error" not in done.err


def test_a_limit_beyond_the_data_is_no_limit(folder):
    done = lsuv("init", "m.onnx", "--data", "c.npy", "--limit", 10**30, "--json", "--pre-init", "keep", "-o", "o.onnx")
    assert json.loads(done.out)["samples"] == 32
