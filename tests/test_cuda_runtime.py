"""CUDA provider, no arithmetic: the real provider of onnxruntime-gpu on a runtime whose kernels do nothing.

It shows where values live, what memory a run takes on the device, and what is said when something is missing. It shows
nothing about numbers: no kernel runs, and no convolution either, because cuDNN has no engine. So the probe, which wants
a right convolution, is left out of the tests that need a session.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

HERE = Path(__file__).parent / "cuda_without_arithmetic"
sys.path.insert(0, str(HERE))

import cuda_libraries  # noqa: E402

from lsuv_cli.scaling import drivers  # noqa: E402

pytestmark = pytest.mark.cuda_runtime

MAIN = "from lsuv_cli.cli import main; main()"
# What a device computes is not asked: neither by the probe nor by the comparison of outputs with the CPU's.
WITHOUT_PROBE = """
def without_probe():
    from lsuv_cli.scaling import devices, verification
    devices.probe = lambda provider, index: ""
    verification.SAME_OUTPUT = float("inf")
"""
# In the command's child process: onnxruntime has a thread from the moment it is imported, which no fork survives, and a
# child that was forked later waits for it at its end.
MAIN_WITHOUT_PROBE = f"""{WITHOUT_PROBE}
from lsuv_cli import cli
begin = cli._command
cli._command = lambda: (without_probe(), begin())
cli.main()
"""
WIDTH, LAYERS = 1024, 6
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    log: list[tuple[str, int, int, int]]  # event, device, bytes, bytes in use

    def peak(self, device: int = 0) -> int:
        return max((used for _, at, _, used in self.log if at == device), default=0)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> Path:
    try:
        return cuda_libraries.build(tmp_path_factory.mktemp("cuda"))
    except cuda_libraries.NotBuildable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def mlp(tmp_path_factory) -> Path:
    """Six layers of 4 MB with a Tanh behind each, so that each is a stage of its own."""
    rng = np.random.default_rng(0)
    text = " ".join(f"y{k} = MatMul(a{k}, w{k}) a{k + 1} = Tanh(y{k})" for k in range(LAYERS))
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[N,{WIDTH}] a0) => (a{LAYERS}) {{ {text} }}'
    )
    for k in range(LAYERS):
        weight = rng.standard_normal((WIDTH, WIDTH), np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, f"w{k}"))
    path = tmp_path_factory.mktemp("mlp") / "mlp.onnx"
    path.write_bytes(model.SerializeToString())
    np.save(path.with_suffix(".npy"), rng.standard_normal((256, WIDTH), np.float32))
    return path


def run(libraries: Path, folder: Path, *words: object, code: str = MAIN_WITHOUT_PROBE, **settings: object) -> Done:
    """Run the command, or other code, on the libraries."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    given = {f"NO_ARITHMETIC_{name}": str(value) for name, value in settings.items()}
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "NO_ARITHMETIC_LOG": str(log), **given}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], env=environment, capture_output=True, text=True, timeout=240
    )
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return Done(done.returncode, done.stdout, done.stderr, [(e, int(d), int(n), int(u)) for e, d, n, u in lines])


def check(model: Path, *more: object) -> list[object]:
    return ["check", model, "--data", model.with_suffix(".npy"), *more]


@pytest.mark.parametrize(
    ("error", "says"), [(35, "the NVIDIA driver is too old for CUDA 13"), (100, "the NVIDIA driver finds no card")]
)
def test_an_old_driver_and_no_card_are_told_apart_in_one_line(libraries, mlp, tmp_path, error, says):
    done = run(libraries, tmp_path, *check(mlp, "--device", "cuda", "--json"), code=MAIN, ERROR=error)
    assert done.code == 2
    assert done.out == ""
    assert says in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("card", "says", "way_out"),
    [
        (61, "the card (compute capability 6.1) is too old", "use --device cpu or --device webgpu, or pip install"),
        (120, "the card (compute capability 12.0) is too new", "pip install -U 'onnxruntime-gpu[cuda,cudnn]>=1.27'"),
    ],
)
def test_a_card_without_kernels_is_told_from_its_capability(libraries, mlp, tmp_path, card, says, way_out):
    """CUDA error 209, from the launch of the first kernel."""
    done = run(libraries, tmp_path, *check(mlp, "--device", "cuda", "--json"), code=MAIN, LAUNCH=209, CARD=card)
    assert done.code == 2
    assert done.out == ""
    assert says in done.err
    assert way_out in done.err
    assert done.err.count("\n") == 1
    assert any(event == "launched" for event, *_ in done.log)


def test_a_card_too_old_for_cudnn_is_told_even_if_cudnn_does_not_say_so(libraries, mlp, tmp_path):
    done = run(libraries, tmp_path, *check(mlp, "--device", "cuda"), code=MAIN, CARD=70)
    assert done.code == 2
    assert "the card (compute capability 7.0) is too old" in done.err


def without(libraries: Path, word: str, folder: Path) -> Path:
    """A folder with all libraries but those with a word in their names."""
    for library in libraries.glob("lib*"):
        if word not in library.name:
            (folder / library.name).symlink_to(library)
    return folder


def test_without_cublas_the_missing_libraries_are_named(libraries, mlp, tmp_path):
    if drivers.load("libcublas.so.13"):
        pytest.skip("there is a real cuBLAS here")
    done = run(without(libraries, "cublas", tmp_path), tmp_path, *check(mlp, "--device", "cuda"), code=MAIN)
    assert done.code == 2
    assert done.err == (
        "lsuv: --device cuda cannot be used: CUDA's libraries cannot be loaded (libcublas.so.13, libcublasLt.so.13); "
        "pip install 'lsuv-cli[cuda]' brings them\n"
    )


def test_without_cudnn_the_probe_says_so(libraries, mlp, tmp_path):
    without(libraries, "cudnn", tmp_path)
    done = run(tmp_path, tmp_path, *check(mlp, "--device", "cuda"), code=MAIN)
    assert done.code == 2
    assert "cuDNN 9 cannot be loaded; pip install 'lsuv-cli[cuda]' brings it" in done.err
    assert done.err.count("\n") == 1


def test_a_device_that_does_not_compute_is_not_taken(libraries, mlp, tmp_path):
    done = run(libraries, tmp_path, *check(mlp, "--device", "cuda"), code=MAIN)
    assert done.code == 2
    assert done.err.startswith("lsuv: --device cuda cannot be used: ")
    # No C++, no host's name, but a way out.
    way_out = "update the driver of CUDA device 0, or use --device cpu"
    assert done.err.endswith(f"CUDNN_FE failure 6: GRAPH_EXECUTION_PLAN_CREATION_FAILED; {way_out}\n")
    assert done.err.count("\n") == 1


def test_the_doctor_tells_what_is_there_and_what_is_off(libraries, tmp_path):
    memory = 100 * MEGABYTE
    done = run(libraries, tmp_path, "doctor", "--device", "cuda", "--json", code=MAIN, ERROR=35, MEMORY=memory)
    assert done.code == 1
    told = json.loads(done.out)
    assert told["facts"]["libraries"].count("found") == 4
    assert told["facts"]["wheel"].endswith("for CUDA 13")
    assert told["facts"]["needs"] == "driver 580 or newer"
    assert told["memory"]["device_total"] is None  # an old driver does not tell
    assert ["the NVIDIA driver is too old for CUDA 13" in problem for problem in told["problems"]] == [True]
    done = run(libraries, tmp_path, "doctor", "--device", "cuda", "--json", code=MAIN, CARD=61, MEMORY=memory)
    assert done.code == 1
    told = json.loads(done.out)
    assert told["facts"]["capability"] == "6.1"
    assert told["memory"]["device_total"] == memory
    assert ["the card (compute capability 6.1) is too old" in problem for problem in told["problems"]] == [True]


def test_the_doctor_notices_a_device_that_computes_nothing(libraries, tmp_path):
    """Without the probe, which would have noticed it before."""
    done = run(libraries, tmp_path, "doctor", "--device", "cuda", "--json")
    assert done.code == 1
    told = json.loads(done.out)
    assert told["device"] == "CUDA device 0"
    assert len(told["problems"]) == len(told["cases"]) == 5
    assert told["memory"]["device_peak"] > 0


def test_auto_takes_the_cpu_and_stdout_is_json_alone(libraries, mlp, tmp_path):
    done = run(libraries, tmp_path, *check(mlp, "--device", "auto", "--json"), code=MAIN, ERROR=35)
    assert done.code in (0, 1)
    assert json.loads(done.out)["device"].startswith("CPU")


def test_stdout_is_json_alone_on_cuda(libraries, mlp, tmp_path):
    done = run(libraries, tmp_path, *check(mlp, "--device", "cuda", "--json"))
    assert done.code == 1  # nothing is computed, so every layer is dead
    assert json.loads(done.out)["device"] == "CUDA device 0"
    events = {event for event, *_ in done.log}
    assert {"allocated", "in", "launched"} <= events


def test_the_second_device_is_the_one_that_is_used(libraries, mlp, tmp_path):
    done = run(libraries, tmp_path, *check(mlp, "--device", "cuda:1", "--json"), DEVICES=2)
    assert json.loads(done.out)["device"] == "CUDA device 1"
    assert done.peak(1) > WIDTH * WIDTH * 4
    assert done.peak(0) < MEGABYTE
    missing = run(libraries, tmp_path, *check(mlp, "--device", "cuda:2"), code=MAIN, DEVICES=2)
    assert missing.code == 2
    assert "there is no CUDA device 2; the last one is --device cuda:1" in missing.err


def test_the_device_holds_one_stage_at_a_time(libraries, mlp, tmp_path):
    words = ["init", mlp, "--data", mlp.with_suffix(".npy"), "--pre-init", "msra", "-o", tmp_path / "o.onnx"]
    done = run(libraries, tmp_path, *words, "--device", "cuda", "--batch-size", "64")
    assert done.code == 1
    stages = sum(event == "allocated" and size >= WIDTH * WIDTH * 4 for event, _, size, _ in done.log)
    assert stages >= LAYERS
    # All weights for verification, in one piece; values and what the libraries take for themselves.
    assert done.peak() < LAYERS * WIDTH * WIDTH * 4 + 24 * MEGABYTE
    assert done.log[-1][3] == 0  # all of it is given back


def test_out_of_memory_names_the_option_that_helps(libraries, mlp, tmp_path):
    done = run(libraries, tmp_path, *check(mlp, "--device", "cuda"), MEMORY=6 * MEGABYTE)
    assert done.code == 2
    assert "CUDA device 0 ran out of memory; use a smaller --batch-size, or --device cpu" in done.err
    assert done.err.count("\n") == 1
    assert any(event == "refused" for event, *_ in done.log)


def test_a_batch_size_that_nobody_asked_for_fits_the_device(libraries, tmp_path):
    """Layers that make 16 times as many numbers as the data has: 8 samples at a time would take 32 MiB."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,64,256] x) => (y) {
            a = MatMul(x, u) t = Tanh(a) b = MatMul(t, v) s = Tanh(b) c = MatMul(s, u) y = Tanh(c) }"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("u", (256, 4096)), ("v", (4096, 256))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape, np.float32), name))
    path = tmp_path / "wide.onnx"
    path.write_bytes(model.SerializeToString())
    np.save(path.with_suffix(".npy"), rng.standard_normal((32, 64, 256), np.float32))
    memory = 24 * MEGABYTE
    done = run(libraries, tmp_path, *check(path, "--device", "cuda", "--json"), MEMORY=memory)
    assert done.code == 1  # nothing is computed
    assert json.loads(done.out)["batches"] > 4
    assert done.peak() <= memory
    asked = run(libraries, tmp_path, *check(path, "--device", "cuda", "--batch-size", "16"), MEMORY=memory)
    assert asked.code == 2
    assert re.search(r"--batch-size", asked.err)


def test_batch_normalization_in_training_mode_runs_on_the_cpu(libraries, tmp_path):
    """The CUDA provider refuses to load it, from operator set 14 on."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,8] x) => (y) {
            a = MatMul(x, w) b, m, v = BatchNormalization<training_mode=1>(a, one, one, one, one) y = Tanh(b) }"""
    )
    for name, array in (("w", np.eye(8, dtype=np.float32)), ("one", np.ones(8, np.float32))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    path = tmp_path / "norm.onnx"
    path.write_bytes(model.SerializeToString())
    np.save(path.with_suffix(".npy"), np.random.default_rng(0).standard_normal((64, 8), np.float32))
    done = run(libraries, tmp_path, *check(path, "--device", "cuda", "--json"))
    told = json.loads(done.out)
    assert any("ran on the CPU, because CUDA device 0 does not take it" in warning for warning in told["warnings"])
    assert all("onnxruntime::" not in warning for warning in told["warnings"])


def test_strings_come_out_of_a_stage_and_go_into_the_next(libraries, tmp_path):
    code = """
import numpy as np, onnx
from lsuv_cli.scaling import runtime
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.providers import PROVIDERS, Device
def stage(text, fetches):
    model = onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 20]> ' + text)
    feeds = {i.name: i.name for i in model.graph.input}
    return runtime.Session(StageModel(model, {}, feeds, fetches, ()), Device(PROVIDERS["cuda"], 0, 1))
words = np.array(["one", "two", "three"], object)
first = stage("g (float[N,8] x, string[N] s) => (b, i) { b = Tanh(x) i = Identity(s) }", ("b", "i"))
kept, _ = first.run({"x": runtime.host_value(np.ones((3, 8), np.float32)), "s": runtime.host_value(words)})
second = stage("g (float[N,8] b, string[N] i) => (y, t) { y = Tanh(b) t = StringConcat(i, i) }", ("y", "t"))
kept, _ = second.run(kept)
print(*runtime.to_numpy(kept["t"]))
"""
    done = run(libraries, tmp_path, code=code)
    assert done.err == ""
    assert done.out == "oneone twotwo threethree\n"


def test_strings_stay_on_the_host(libraries, tmp_path):
    code = f"""
import numpy as np, onnx
{WITHOUT_PROBE}
without_probe()
from lsuv_cli import measure
model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 17]>
    g (float[N,8] x, string[N] s) => (y, t) {{ t = Identity(s) a = MatMul(x, w) b = Tanh(a) y = MatMul(b, w) }}''')
model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
data = {{"x": np.ones((4, 8), np.float32), "s": np.array(["a", "b", "c", "d"])}}
print(measure(model, data, device="cuda").device)
"""
    done = run(libraries, tmp_path, code=code)
    assert done.err == ""
    assert done.out == "CUDA device 0\n"


def test_every_stage_model_of_some_tests_loads():
    """Of all default tests: python tests/cuda_without_arithmetic/load_stage_models.py"""
    files = [f"tests/{name}.py" for name in ("scaling/test_stages", "model/test_layers", "scaling/test_precision")]
    command = [sys.executable, str(HERE / "load_stage_models.py"), "--seconds", "240", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (load,) = re.findall(r"without arithmetic: (\d+) load\b", done.stdout)
    assert int(load) > 50
