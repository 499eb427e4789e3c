"""`lsuv doctor`: what a device has, and whether it computes what the CPU computes, in every type.

1. Versions, provider, driver, libraries, card and memory are asked for; nothing of that decides.
2. The device is opened as for any request. If it cannot be, its reason is the diagnosis.
3. A network with a convolution, a grouped and a transposed one, a Gemm and a MatMul is initialized in each type, a
   stage for each layer, with every value between stages in a file; once more with data far from 0, for the exact form.
   It runs on the CPU with one thread and all values in memory, and twice on the device. Statuses must be ok, and each
   weight within the accuracy of a measurement and one rounding of its type.
4. A larger network is timed on both, the second run of each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from lsuv_cli.errors import DeviceError, ExitCode, LsuvError
from lsuv_cli.memory import available_memory
from lsuv_cli.model.file import load
from lsuv_cli.pipeline import Job
from lsuv_cli.progress import Listener, silent
from lsuv_cli.report import Status
from lsuv_cli.scaling import devices, drivers
from lsuv_cli.scaling.providers import ROWS, Device, Provider
from lsuv_cli.scaling.runtime import ON_THE_HOST
from lsuv_cli.settings import Settings
from lsuv_cli.version import __version__

Array = NDArray[Any]

SCHEMA = "lsuv-doctor/1"
TYPES = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16", "float64": "double"}
ROUNDING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # of types in which one rounding is more than the accuracy
TOL, TOL_IN_HALF = 1e-4, 1e-2  # a variance is measured ten times as accurately
SAMPLES, BATCH = 24, 8
FAR = 1000.0  # the mean of data whose variance takes the exact form
UNTAKEN: dict[str, int | None] = {"host_peak": None, "device_peak": None}
WATCH = 0.005  # seconds between two looks at a device's memory
NETWORK = """
    <ir_version: 10, opset_import: ["" : 22]>
    doctor ({type}[N,4,8,8] x) => (y) {{
        a = Conv <pads=[1,1,1,1]> (x, conv)                         ta = Tanh(a)
        b = Conv <group=2, pads=[1,1,1,1]> (ta, grouped)            tb = Tanh(b)
        c = ConvTranspose <pads=[1,1,1,1]> (tb, transposed)         tc = Tanh(c)
        f = Flatten(tc)
        d = Gemm <transB=1> (f, gemm)                               td = Tanh(d)
        y = MatMul(td, matmul) }}
"""
SHAPES = {
    "conv": (8, 4, 3, 3),
    "grouped": (8, 4, 3, 3),
    "transposed": (8, 4, 3, 3),
    "gemm": (16, 256),
    "matmul": (16, 8),
}
EXACT = """
    <ir_version: 10, opset_import: ["" : 22]>
    exact ({type}[N,16] x) => (y) {{ a = MatMul(x, first) t = Tanh(a) y = MatMul(t, second) }}
"""
TIMED = """
    <ir_version: 10, opset_import: ["" : 22]>
    timed ({type}[N,3,32,32] x) => (y) {{
        a = Conv <pads=[1,1,1,1]> (x, first)   ta = Relu(a)
        b = Conv <pads=[1,1,1,1]> (ta, second) tb = Tanh(b)
        y = Conv <pads=[1,1,1,1]> (tb, third) }}
"""
WIDTH = 32


@dataclass(frozen=True)
class Case:
    """A network in one type: how far the device's weights are from the CPU's."""

    name: str
    dtype: str
    worst: float | None  # relative to the largest element of the tensor
    tensor: str  # where that is
    limit: float
    equal: bool | None  # whether two runs gave the same bytes
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found."""

    version: str
    versions: dict[str, str]
    device: str  # empty if it cannot be used
    device_reason: str
    facts: dict[str, str]
    memory: dict[str, int | None]  # bytes: free on the host and the device, and the most that was taken, if it is known
    cases: tuple[Case, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)  # of the timed network, on device and CPU
    problems: tuple[str, ...] = ()

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.OUTSIDE_TOLERANCE if self.problems else ExitCode.DONE

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        return {"schema": SCHEMA, "exit_code": int(self.exit_code), **dataclasses.asdict(self)}


def examine(settings: Settings, listen: Listener = silent) -> Diagnosis:
    """Ask the device for what it has, and try it."""
    provider, index = devices.requested(settings.device)
    try:
        device = devices.open_device(settings.device, settings.threads)
    except DeviceError as problem:
        facts = {} if provider is None else _facts(provider, index)
        memory = {**_free(provider, index), **UNTAKEN}
        return Diagnosis(__version__, _versions(), "", str(problem), facts, memory, problems=(str(problem),))
    with _watched(device) as taken:
        cases = tuple(_cases(device, listen))
        seconds = _timed(device)
    memory = {**_free(device.provider, device.index), **taken}
    problems = tuple(f"{case.name} in {case.dtype}: {case.problem}" for case in cases if not case.ok)
    facts = _facts(device.provider, device.index)
    return Diagnosis(__version__, _versions(), str(device), device.reason, facts, memory, cases, seconds, problems)


def _facts(provider: Provider, index: int) -> dict[str, str]:
    return {name: value for name, value in provider.facts(index).items() if value}


def _versions() -> dict[str, str]:
    packages = [*(name for row in ROWS for name in row.packages), "onnx", "numpy"]
    found = {name: version for name in packages if (version := drivers.package_version(name))}
    return {**found, "Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}


def _free(provider: Provider | None, index: int) -> dict[str, int | None]:
    told = provider.free_memory(index) if provider is not None else None
    free, total = told if told is not None else (None, None)
    return {"host_free": available_memory(), "device_free": free, "device_total": total}


@contextlib.contextmanager
def _watched(device: Device) -> Iterator[dict[str, int | None]]:
    """The most memory that the process has taken so far, and the most that was taken of the device meanwhile."""
    taken = dict(UNTAKEN)
    before = None if device.is_host else device.provider.free_memory(device.index)
    least = [before[0]] if before else []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(WATCH):
            now = device.provider.free_memory(device.index)
            least.extend([now[0]] if now else [])
            least[:] = [min(least)]

    watcher = threading.Thread(target=watch, daemon=True)
    if before:
        watcher.start()
    try:
        yield taken
    finally:
        done.set()
        if before:
            watcher.join()
            taken["device_peak"] = before[0] - min(least)
        taken["host_peak"] = _host_peak()


def _host_peak() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _cases(device: Device, listen: Listener) -> Iterator[Case]:
    todo = [("network", NETWORK, SHAPES, dtype, 0.0) for dtype in TYPES]
    todo.append(("far from 0", EXACT, {"first": (16, 16), "second": (16, 16)}, "float32", FAR))
    for number, (name, text, shapes, dtype, mean) in enumerate(todo):
        listen("examining", number, len(todo))
        model = _model(text, shapes, dtype)
        rank = len(model.graph.input[0].type.tensor_type.shape.dim)
        data = _numbers((SAMPLES, 4, 8, 8) if rank > 2 else (SAMPLES, 16), 9) + np.float32(mean)
        yield _case(name, model, dtype, data, device)
    listen("examining", len(todo), len(todo))


def _case(name: str, model: onnx.ModelProto, dtype: str, data: Array, device: Device) -> Case:
    tol = TOL_IN_HALF if dtype in ROUNDING else TOL
    limit = tol / 10 + ROUNDING.get(dtype, 0.0)
    try:
        expected, *_ = _initialized(model, data, "cpu", tol=tol, threads=1)
        runs = [_initialized(model, data, _request(device), tol=tol, threads=device.threads, memory=1) for _ in "12"]
    except LsuvError as problem:
        return Case(name, dtype, None, "", limit, None, str(problem))
    found, statuses, refused = runs[0]
    off = {key: _distance(array, expected[key]) for key, array in found.items()}
    where = max(off, key=lambda key: off[key])
    equal = all(np.array_equal(array, runs[1][0][key]) for key, array in found.items())
    fault = ""
    if refused:
        fault = refused[0]
    elif statuses != {Status.OK}:
        fault = f"layers are {', '.join(sorted(statuses))}"
    elif not off[where] <= limit:
        fault = f"{where} is off by {off[where]:.1e} of the CPU's, more than {limit:.1e}"
    return Case(name, dtype, off[where], where, limit, equal, fault)


def _request(device: Device) -> str:
    return "cpu" if device.is_host else f"{device.kind}:{device.index}"


def _initialized(
    model: onnx.ModelProto, data: Array, device: str, *, tol: float, threads: int, memory: int | None = None
) -> tuple[dict[str, Array], set[Status], list[str]]:
    """Tensor -> its initialized values, the statuses of the layers, and why stages did not run on the device."""
    settings = Settings(device=device, tol=tol, threads=threads, memory=memory, batch_size=BATCH)
    done = Job(load(model), settings, data, silent).initialize(None, None, dry_run=False)
    assert done.model is not None
    tensors = {t.name: np.asarray(numpy_helper.to_array(t), np.float64) for t in done.model.graph.initializer}
    refused = [warning for warning in done.report.warnings if warning.startswith(ON_THE_HOST)]
    return tensors, {layer.status for layer in done.report.layers}, refused


def _distance(one: Array, other: Array) -> float:
    distance = float(np.abs(one - other).max() / np.abs(other).max())
    return distance if math.isfinite(distance) else math.inf


def _timed(device: Device) -> dict[str, float]:
    """Seconds for the second of two runs of a larger network, there and on the CPU."""
    shapes = {"first": (WIDTH, 3, 3, 3), "second": (WIDTH, WIDTH, 3, 3), "third": (WIDTH, WIDTH, 3, 3)}
    model, data = _model(TIMED, shapes, "float32"), _numbers((4 * BATCH, 3, 32, 32), 9)
    seconds = {}
    places = {"cpu": "cpu"} if device.is_host else {"device": _request(device), "cpu": "cpu"}
    for name, request in places.items():
        for _ in "12":
            begun = time.perf_counter()
            try:
                _initialized(model, data, request, tol=TOL_IN_HALF, threads=device.threads)
            except LsuvError:  # a device that cannot run this has failed a case above
                return {}
            seconds[name] = round(time.perf_counter() - begun, 4)
    return seconds


def _model(text: str, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text.format(type=TYPES[dtype]))
    kind = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(TYPES[dtype].upper()))
    for seed, (name, shape) in enumerate(shapes.items()):
        model.graph.initializer.append(numpy_helper.from_array(_numbers(shape, seed).astype(kind), name))
    return model


def _numbers(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)
