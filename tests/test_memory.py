"""Memory: a model in one file is never whole in memory, let alone several times over.

Bytes are counted, not seconds: the peak resident set of the command's own process, beyond that of the same command on
a small model.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from growth import assert_memory_does_not_grow

pytest.importorskip("resource", reason="the peak is read by wait4, which Windows does not have")

LAYERS = 14
# A process's peak begins with that of the process that started it, and pytest's is high.
SMALL_PARENT = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss // (1024 if sys.platform == "darwin" else 1))
"""
# Large models are calibrated in stages and verified in pieces of bounded size. That is the way to be measured, and with
# smaller bounds 60 MB are enough for it.
BOUNDS = (
    "from lsuv_cli.model import draft; from lsuv_cli.scaling import stages, verification; "
    "stages.STAGE_BYTES = verification.VERIFY_BYTES = draft.IN_MEMORY = 8 << 20"
)
# One process: the command forks before anything heavy is imported, and here onnxruntime is imported already.
COMMAND = [sys.executable, "-c", f"{BOUNDS}; from lsuv_cli.cli import main; main()"]


def chain(path: Path, width: int) -> Path:
    """A model of 14 square layers in one file, a weight among them in a Constant node."""
    rng = np.random.default_rng(3)
    graph = onnx.GraphProto(name="chain")
    for k in range(LAYERS):
        weight = numpy_helper.from_array(rng.standard_normal((width, width), np.float32), f"w{k}")
        if k == 5:
            graph.node.append(helper.make_node("Constant", [], [f"w{k}"], value=weight))
        else:
            graph.initializer.append(weight)
        graph.node.append(helper.make_node("MatMul", [f"a{k}", f"w{k}"], [f"y{k}"]))
        graph.node.append(helper.make_node("Relu", [f"y{k}"], [f"a{k + 1}"]))
    graph.input.append(helper.make_tensor_value_info("a0", TensorProto.FLOAT, ["N", width]))
    graph.output.append(helper.make_tensor_value_info(f"a{LAYERS}", TensorProto.FLOAT, ["N", width]))
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    np.save(path.with_suffix(".npy"), rng.standard_normal((64, width)).astype(np.float32))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return chain(folder / "small.onnx", 16), chain(folder / "large.onnx", 1024)


def peak(model: Path, command: str) -> int:
    """The peak resident set of a command's largest process, in bytes."""
    words = [word.format(model=model, data=model.with_suffix(".npy")) for word in command.split()]
    with model.open("rb") as stdin:
        told = subprocess.run(
            [sys.executable, "-c", SMALL_PARENT, *COMMAND, *words],
            stdin=stdin,
            capture_output=True,
            cwd=model.parent,
            env={**os.environ, "LSUV_DEBUG": "1"},
            timeout=300,
        )
    code, kilobytes = map(int, told.stdout.split())
    assert code in (0, 1)
    return kilobytes * 1024


@pytest.mark.parametrize(
    ("command", "most"),
    [
        ("init {model} --data {data} --pre-init msra -o {model}.out --force", 1.5),
        ("init {model} --data {data} --pre-init msra -o -", 1.75),
        ("init - --data {data} --pre-init msra -o -", 1.75),
        ("check {model} --data {data}", 1.5),
        ("inspect {model}", 0.5),
        ("compare {model} --data {data} --inits lsuv,msra,keep", 2.75),
    ],
)
def test_the_peak_is_bounded_by_the_size_of_the_file(models, command, most):
    small, large = models
    beyond = peak(large, command) - peak(small, command)
    assert beyond <= most * large.stat().st_size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process's own memory is read in /proc")
def test_the_peak_does_not_grow_with_the_number_of_stages(tmp_path):
    assert_memory_does_not_grow(tmp_path, "alone")


@pytest.mark.parametrize("room", [True, False], ids=["room for temporary files", "no room"])
def test_a_pipe_gives_the_bytes_that_a_file_gives(tmp_path, room):
    """An unchanged tensor too, which lies in the temporary file of standard input until the very end."""
    model = chain(tmp_path / "m.onnx", 128)
    proto = onnx.load(model)
    proto.graph.initializer.append(numpy_helper.from_array(np.arange(40_000, dtype=np.float32), "unchanged"))
    proto.graph.node.append(helper.make_node("Identity", ["unchanged"], ["same"]))
    proto.graph.output.append(helper.make_tensor_value_info("same", TensorProto.FLOAT, [40_000]))
    onnx.save(proto, model)
    words = ["--data", str(model.with_suffix(".npy")), "--pre-init", "msra", "-q"]
    begin = "from lsuv_cli.model import draft; draft.IN_MEMORY = 1 << 18; "
    full = (
        "import types; from lsuv_cli import spool; spool.shutil.disk_usage = lambda p: types.SimpleNamespace(free=0); "
    )
    code = f"{'' if room else full}{begin}from lsuv_cli.cli import main; main()"
    command = [sys.executable, "-c", code, "init"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    piped = subprocess.run(
        [*command, "-", "-o", "-", *words], input=model.read_bytes(), capture_output=True, env=environment, timeout=120
    )
    assert piped.stderr == b""
    subprocess.run([*command, str(model), "-o", str(tmp_path / "o.onnx"), *words], check=True, timeout=120)
    assert piped.stdout == (tmp_path / "o.onnx").read_bytes()
    assert not list(scratch.glob("*lsuv*"))  # onnxruntime leaves a file of its own
