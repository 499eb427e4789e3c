# mypy: disable-error-code="arg-type"
"""What a request writes: never onto an input or another output, never in the place of a device, pipe or link."""

import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest

import lsuv_cli
from helpers import model, normal
from independent import layer_variances
from lsuv_cli import outputs
from lsuv_cli.errors import OutputError
from shell import LSUV, lsuv

posix = pytest.mark.skipif(os.name == "nt", reason="devices, pipes and links of POSIX")
X = normal(32, 8)


def net() -> onnx.ModelProto:
    return model(
        "g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) b = Tanh(a) y = MatMul(b, v) }",
        w=normal(8, 8), v=normal(8, 8, seed=1),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model with external data, another without, data in a file and in a directory."""
    onnx.save_model(net(), tmp_path / "m.onnx", save_as_external_data=True, location="m.npz", size_threshold=0)
    onnx.save_model(net(), tmp_path / "plot.onnx", save_as_external_data=True, location="m.png", size_threshold=0)
    onnx.save(net(), tmp_path / "plain.onnx")
    np.savez(tmp_path / "c.npz", x=X)
    (tmp_path / "d").mkdir()
    np.savez(tmp_path / "d" / "c.npz", x=X)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def right(found: onnx.ModelProto) -> bool:
    return all(abs(variance - 1) < 1e-3 for variance in layer_variances(found, {"x": X}).values())


CLASHES = {
    "weights on the model's data": "init m.onnx --data c.npz --weights m.npz",
    "weights on the data": "init m.onnx --data c.npz --weights c.npz",
    "weights on named data": "init m.onnx --data x=c.npz --weights ./d/../c.npz",
    "weights among the data of a directory": "init m.onnx --data d --weights d/c.npz",
    "output on the data": "init m.onnx --data c.npz -o c.npz",
    "output on a hard link to the data": "init m.onnx --data c.npz -o hard.npz",
    "output on a link to the data": "init m.onnx --data c.npz -o soft.npz",
    "output on the model's data": "init m.onnx --data c.npz -o m.npz",
    "output and weights": "init m.onnx --data c.npz -o w.npz --weights w.npz",
    "output and weights by another way": "init m.onnx --data c.npz -o d/../w.npz --weights w.npz",
    "output and plot": "init m.onnx --data c.npz -o p.png --plot p.png",
    "plot on the model's data": "init plot.onnx --data c.npz -o o.onnx --plot m.png",
    "check's plot on the model's data": "check plot.onnx --data c.npz --plot m.png",
    "compare's plot on the model's data": "compare plot.onnx --data c.npz --plot m.png",
    "output on the checkpoint": "init m.onnx --data c.npz --like before.npz --weights w.npz -o before.npz",
    "weights on the checkpoint": "init m.onnx --data c.npz --like before.npz --weights hard_before.npz -o o.onnx",
    "page on the data": "init m.onnx --data c.npz -o o.onnx --html c.html",
    "page on the model": "check m.onnx --data c.npz --html m.html",
    "page on the model's data": "compare m.onnx --data c.npz --html bin.html",
    "page and output": "init m.onnx --data c.npz -o o.html --html o.html",
    "page and plot": "check m.onnx --data c.npz --html p.html --plot p.png",
    "node data on the model": "inspect m.onnx --data c.npz --model-explorer m.json",
    "node data on the data": "check m.onnx --data c.npz --model-explorer c.json",
    "page and node data": "inspect m.onnx --data c.npz --html p.html --model-explorer p.json",
    "values over the data": "inspect m.onnx --data d --dump d",
    "page among the values": "inspect m.onnx --data c.npz --dump v.html --html v.html",
    "exposed on the model": "expose m.onnx -o m.onnx --force",
    "exposed on the model's data": "expose m.onnx -o m.npz --force",
    "stripped on the model": "strip m.onnx -o m.onnx --force",
    "stripped on the model's data": "strip m.onnx -o m.npz --force",
}

# (file, another name of the same file); pages and plots go by their endings.
LINKS = [("c.npz", "hard.npz"), ("before.npz", "hard_before.npz"), ("c.npz", "c.html"), ("m.onnx", "m.html"),
         ("m.onnx", "m.json"), ("c.npz", "c.json"), ("p.html", "p.png"), ("p.html", "p.json")]  # fmt: skip


@pytest.mark.parametrize("name", CLASHES)
def test_no_output_is_an_input_or_another_output(folder, name):
    words = CLASHES[name].split()
    np.savez("before.npz", w=normal(8, 8), v=normal(8, 8, seed=1))
    Path("p.html").write_bytes(b"old")
    for file, link in LINKS:
        if link in words:
            os.link(file, link)
    Path("soft.npz").symlink_to("c.npz")
    Path("bin.html").symlink_to("m.npz")
    before = contents(folder)
    done = lsuv(*words, *(["--force"] if words[0] == "init" else []))
    assert done.code == 2, done.err
    assert done.err.count("\n") == 1
    assert any(
        text in done.err for text in ("input itself", "among the data", "the same file", "the same path", "exists")
    ), done.err
    assert contents(folder) == before


def test_from_python_too(folder):
    before = contents(folder)
    mapped = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, X.shape)
    mapped[:] = X
    mapped.flush()
    requests = [
        (["c.npz"], {"output": "c.npz"}),
        (["c.npz"], {"weights": "c.npz"}),
        (mapped, {"output": "x.npy"}),
        ({"x": mapped}, {"output": "x.npy"}),
        (X, {"output": "o.npz", "weights": "o.npz"}),
        (X, {"output": "o.png", "drawn": {"the plot": "o.png"}}),
    ]
    for data, wanted in requests:
        with pytest.raises(OutputError, match=r"input itself|the same file"):
            lsuv_cli.initialize("m.onnx", data, force=True, **wanted)
    (folder / "x.npy").unlink()
    assert contents(folder) == before


def test_one_models_output_is_not_another_model(folder):
    Path("out").mkdir()
    os.link("plain.onnx", "out/m.onnx")
    before = contents(folder)
    done = lsuv("init", "m.onnx", "plain.onnx", "--data", "c.npz", "--output-dir", "out", "--force")
    assert (done.code, "input itself" in done.err) == (2, True)
    assert contents(folder) == before


@posix
@pytest.mark.parametrize("source", ["plain.onnx", "m.onnx"])
def test_a_link_stays_and_what_it_leads_to_is_replaced(folder, source):
    Path("old.onnx").write_bytes(b"old")
    Path("link.onnx").symlink_to("old.onnx")
    assert lsuv("init", source, "--data", "c.npz", "-o", "link.onnx").code == 2
    assert Path("old.onnx").read_bytes() == b"old"
    done = lsuv("init", source, "--data", "c.npz", "-o", "link.onnx", "--force")
    assert done.code == 0, done.err
    assert Path("link.onnx").readlink() == Path("old.onnx")
    assert right(onnx.load("link.onnx"))


@posix
def test_a_link_that_leads_nowhere_gets_its_file(folder):
    Path("link.onnx").symlink_to("d/new.onnx")
    assert lsuv("init", "plain.onnx", "--data", "c.npz", "-o", "link.onnx").code == 0
    assert Path("link.onnx").is_symlink()
    assert right(onnx.load("d/new.onnx"))


@posix
def test_weights_beside_a_model_behind_a_link_would_not_be_found(folder):
    Path("link.onnx").symlink_to("d/new.onnx")
    done = lsuv("init", "m.onnx", "--data", "c.npz", "-o", "link.onnx")
    assert (done.code, "would not be found" in done.err) == (2, True)
    assert not Path("d/new.onnx").exists()


@posix
@pytest.mark.parametrize("option", ["-o", "--weights", "--plot"])
def test_a_device_stays_a_device(folder, option):
    """A device of our own: what is tried here must not harm the machine's /dev/null if it fails."""
    device = folder / {"-o": "null", "--weights": "null.npz", "--plot": "null.png"}[option]
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.open("wb").close()
    except OSError:
        pytest.skip("devices cannot be made here")
    done = lsuv("init", "m.onnx", "--data", "c.npz", option, device, "--force")
    assert done.code == 0, done.err
    assert stat.S_ISCHR(device.stat().st_mode)


@posix
@pytest.mark.parametrize("source", ["plain.onnx", "m.onnx"])
def test_a_pipe_gets_the_whole_model(folder, source):
    os.mkfifo("pipe")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(Path("pipe").read_bytes()))
    reader.start()
    done = lsuv("init", source, "--data", "c.npz", "-o", "pipe")
    reader.join(60)
    assert done.code == 0, done.err
    assert stat.S_ISFIFO(Path("pipe").stat().st_mode)
    assert right(onnx.ModelProto.FromString(got[0]))


@posix
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "-"])
def test_standard_output_under_its_other_names(folder, name):
    command = [*LSUV, "init", "m.onnx", "--data", "c.npz", "-q", "-o", name]
    with Path("o.onnx").open("wb") as file:
        assert subprocess.run(command, stdout=file, check=False).returncode == 0
    assert right(onnx.load("o.onnx"))
    piped = subprocess.run(command, capture_output=True, check=False)
    assert right(onnx.ModelProto.FromString(piped.stdout))


@posix
def test_what_no_model_is_for(folder):
    import socket

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        screen, inside = os.openpty()
        for name in ("socket", os.ttyname(inside), "/dev/stderr", "/dev/full"):
            done = lsuv("init", "plain.onnx", "--data", "c.npz", "--force", "-o", name)
            assert (done.code, done.err.count("\n")) == (2, 1), (name, done.err)
        os.close(screen)
        os.close(inside)
    assert stat.S_ISSOCK(Path("socket").stat().st_mode)


NAMES = {"too long": "n" * 300, "too long with .data": "n" * 252, "too long in UTF-8": "é" * 130, "a loop": "loop"}


@posix
@pytest.mark.parametrize("option", ["-o", "--weights", "--plot"])
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_cannot_be_is_refused_in_one_line(folder, option, name):
    Path("loop").symlink_to("loop")
    Path("loop.npz").symlink_to("loop.npz")
    Path("loop.png").symlink_to("loop.png")
    if option != "-o" and name == "too long with .data":
        pytest.skip("only a model has data beside it")
    ending = {"-o": "", "--weights": ".npz", "--plot": ".png"}[option]
    begun = contents(folder)
    done = lsuv("init", "m.onnx", "--data", "c.npz", "--force", option, NAMES[name] + ending)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "internal error" not in done.err
    assert {"-o": "--output"}.get(option, option) in done.err
    assert contents(folder) == begun


def test_a_long_name_of_a_model_or_of_data_is_no_surprise(folder):
    for words in (["init", "n" * 300], ["init", "m.onnx", "--data", "n" * 300], ["inspect", "n" * 300],
                  ["init", "m.onnx", "--data", f"x={'n' * 300}"]):  # fmt: skip
        done = lsuv(*words, *([] if "--data" in words or words[0] == "inspect" else ["--data", "c.npz"]))
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert "internal error" not in done.err
    name = "n" * 248 + ".onnx"
    shutil.copy("plain.onnx", name)  # fits, but MODEL.lsuv.onnx does not
    done = lsuv("init", name, "--data", "c.npz")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "too long" in done.err


# While the run is under way


@pytest.mark.parametrize("source", ["plain.onnx", "m.onnx"])
@pytest.mark.parametrize("late", ["o.onnx", "o.onnx.data", "w.npz"])
def test_a_file_that_appears_during_the_run_is_left_alone(folder, monkeypatch, source, late):
    from lsuv_cli.pipeline import Job

    measured = Job._measured

    def appearing(self, *args):
        Path(late).write_bytes(b"precious")
        return measured(self, *args)

    monkeypatch.setattr(Job, "_measured", appearing)
    done = lsuv("init", source, "--data", "c.npz", "-o", "o.onnx", "--weights", "w.npz")
    assert Path(late).read_bytes() == b"precious"
    if (source, late) == ("plain.onnx", "o.onnx.data"):  # not of this run
        assert done.code == 0
        return
    assert (done.code, "come into being" in done.err) == (2, True)
    left = {path.name for path in folder.iterdir()} & {"o.onnx", "o.onnx.data", "w.npz"}
    assert left == (
        {"w.npz", "o.onnx"} | ({"o.onnx.data"} if source == "m.onnx" else set()) if late == "w.npz" else {late}
    )
    assert not list(folder.glob(".lsuv-*"))


@pytest.mark.parametrize("without", ["renameat2", "renameat2 and link"])
def test_without_the_systems_help_nothing_is_overwritten_either(tmp_path, monkeypatch, without):
    monkeypatch.setattr(outputs, "_renamed_by_linux", lambda made, place: False)
    if "link" in without:

        def refused(*paths):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refused)  # fmt: skip
    made, place = tmp_path / "made", tmp_path / "place"
    made.write_bytes(b"new")
    target = outputs.check({"-o": place}, ())["-o"]
    target.publish(made)
    assert place.read_bytes() == b"new"
    assert not made.exists()
    made.write_bytes(b"newer")
    with pytest.raises(OutputError, match="come into being"):
        target.publish(made)
    assert place.read_bytes() == b"new"


@posix
def test_a_directory_that_someone_holds_the_lock_of_delays_but_does_not_stop(folder, monkeypatch):
    import fcntl

    monkeypatch.setattr(outputs, "PATIENCE", 0.1)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as `flock . lsuv init ...` does
    try:
        assert lsuv("init", "m.onnx", "--data", "c.npz", "-o", "o.onnx").code == 0
    finally:
        os.close(handle)


@posix
def test_a_working_directory_that_is_gone(folder, tmp_path_factory):
    gone = tmp_path_factory.mktemp("gone")

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
        gone.mkdir(exist_ok=True)
        return subprocess.run(
            # -P, as for an installed command: without it Python looks for modules in the directory that is gone.
            ["sh", "-c", script, "sh", str(gone), LSUV[0], "-P", *LSUV[1:], *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
        )

    for words in (("init", "m.onnx", "--data", "c.npz"), ("inspect", "m.onnx"),
                  ("init", folder / "m.onnx", "--data", folder / "c.npz", "-o", "o.onnx"),
                  ("init", folder / "m.onnx", "--data", folder / "c.npz", "--output-dir", "out"),
                  ("check", folder / "m.onnx", "--data", folder / "c.npz", "--plot", "p.png")):  # fmt: skip
        done = run(*words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), (words, done.stderr)
        assert "Traceback" not in done.stderr
        assert "internal error" not in done.stderr
    done = run("init", folder / "m.onnx", "--data", folder / "c.npz", "-o", folder / "o.onnx")
    assert done.returncode == 0, done.stderr


def test_metadata_of_an_earlier_run_goes(folder):
    first = lsuv_cli.initialize("plain.onnx", ["random"]).model
    first.metadata_props.add(key="lsuv.of_another_version", value="1")
    first.metadata_props.add(key="author", value="someone")
    second = lsuv_cli.initialize(first, X).model
    found = {entry.key: entry.value for entry in second.metadata_props}
    assert found["author"] == "someone"
    assert "lsuv.seed" in found
    assert not {"lsuv.data", "lsuv.of_another_version"} & found.keys()


def test_a_tensor_called_file_goes_into_an_archive_too(folder):
    proto = net()
    proto.graph.initializer[0].name = proto.graph.node[0].input[1] = "file"
    lsuv_cli.initialize(proto, X, weights="w.npz")
    with np.load("w.npz") as archive:
        assert sorted(archive) == ["file", "v"]
