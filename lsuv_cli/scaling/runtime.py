"""onnxruntime: the device, sessions, and the values that wait between stages. The only importer of onnxruntime.

Values stay on the device as OrtValues and go in and out by IOBinding, so that the CPU and CUDA run the same code.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, TypeProto, ValueInfoProto, helper

from lsuv_cli.errors import DeviceError, ModelError, OutputError
from lsuv_cli.scaling.model_builder import StageModel

Array = NDArray[Any]

VERSION = str(ort.__version__)
CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"
# TF32 makes variances depend on the card. The exhaustive search would run again for every stage and shape.
CUDA_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"}

# MatMulScaleFusion: of two Muls by constants in a row, onnxruntime 1.31 removes the first even if another node reads
# it, and then cannot load the model. GemmTransposeFusion: onnxruntime 1.23 fuses a Transpose into a Gemm whose shapes
# then do not fit.
BROKEN = ["MatMulScaleFusion", "GemmTransposeFusion"]
# onnxruntime 1.31 computes wrong values for MatMul(Transpose(x), w) where w has one axis.
BROKEN_FOR_VECTORS = ["MatmulTransposeFusion"]
# ConstantSharing merges equal tensors; a BatchNormalization in training mode may then overwrite its own scale.
BROKEN_IN_TRAINING = ["ConstantSharing"]

SMALL_TENSOR = 1024  # bytes up to which a tensor may be a shape

LONGEST_MESSAGE = 2000  # characters of an onnxruntime message that are read
LONGEST_REASON = 300  # characters of it that are shown

# Errors come as exceptions; onnxruntime's log lines besides them would only clutter stderr.
ort.set_default_logger_severity(4)


class Unsupported(ModelError):
    """The device has no kernel for an operator with these types."""


class UnknownOperator(ModelError):
    """The model has an operator that onnxruntime does not know: one of the user's own, or a misspelt one."""


@dataclass(frozen=True)
class Device:
    """Where sessions run."""

    kind: str  # "cpu" or "cuda"
    index: int
    threads: int

    def __str__(self) -> str:
        if self.kind == "cpu":
            return f"CPU, {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"CUDA device {self.index}"

    @property
    def providers(self) -> list[Any]:
        if self.kind == "cpu":
            return [CPU]
        return [(CUDA, {"device_id": str(self.index), **CUDA_OPTIONS}), CPU]


def open_device(request: str = "auto", threads: int | None = None) -> Device:
    """The device asked for; "auto" is CUDA where a session really gets it."""
    count = threads or available_threads()
    kind, _, number = request.lower().partition(":")
    if kind not in {"auto", "cpu", "cuda"} or (
        number and (kind != "cuda" or not (number.isdecimal() and len(number) <= 4))
    ):
        raise DeviceError(f"`device` {request!r} is not one of auto, cpu, cuda, cuda:N")
    if kind == "cpu":
        return Device("cpu", 0, count)
    cuda = Device("cuda", int(number or 0), count)
    reason = _why_no_cuda(cuda)
    if not reason:
        return cuda
    if kind == "auto":
        return Device("cpu", 0, count)
    raise DeviceError(f"`device={request!r}` cannot be used: {reason}")


def available_threads() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _why_no_cuda(device: Device) -> str:
    """Empty if a session on the device really runs there, else what is missing."""
    if CUDA not in ort.get_available_providers():
        installed = {name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)}
        if len(installed) == 2:
            return (
                "onnxruntime and onnxruntime-gpu are both installed and hide each other; run "
                "pip uninstall onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu"
            )
        return "this onnxruntime has no CUDA support; pip install 'lsuv-cli[cuda]'"
    if importlib.util.find_spec("nvidia") and hasattr(ort, "preload_dlls"):
        # CUDA's libraries from PyPI have to be loaded first. preload_dlls prints its findings to stdout.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):  # the session below tells
            ort.preload_dlls()
    identity = helper.make_node("Identity", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([identity], "probe", values[:1], values[1:])
    probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    try:
        session = ort.InferenceSession(probe.SerializeToString(), providers=device.providers)
    except Exception as problem:  # onnxruntime's exceptions have no common class of their own
        return _one_line(problem)
    if CUDA in session.get_providers():
        return ""
    return (
        "no CUDA session could be made; it needs an NVIDIA GPU with its driver, and the CUDA and cuDNN libraries "
        "(pip install 'lsuv-cli[cuda]' brings them)"
    )


def _is_installed(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return False


def refusal(model: str | bytes) -> str:
    """Why onnxruntime does not take a model as it is; empty if it does."""
    try:
        ort.InferenceSession(model, _options(optimized=False), providers=[CPU])
    except Exception as problem:  # onnxruntime's exceptions have no common class of their own
        return _one_line(problem)
    return ""


def run_unoptimized(model: str | bytes, batch: Mapping[str, Array], threads: int) -> dict[str, Array]:
    """Open a model as it is and run it without optimizers. Returns those of its outputs that are tensors.

    `Unsupported` if the CPU has no kernel for one of its operators; a model that onnxruntime refuses is an error.
    """
    options = _options(optimized=False)
    options.intra_op_num_threads = threads
    with translated("onnxruntime does not take the model"):
        session = ort.InferenceSession(model, options, providers=[CPU])
    bfloat16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    kinds = {i.name: i.type for i in session.get_inputs()}
    values = {
        name: _from_numpy(array.astype(bfloat16) if kinds[name] == "tensor(bfloat16)" else array)
        for name, array in batch.items()
        if name in kinds
    }
    names = [o.name for o in session.get_outputs()]
    with translated():
        fetched = session.run_with_ort_values(names, values)
    return {name: to_numpy(value) for name, value in zip(names, fetched, strict=True) if value.is_tensor()}


def open_without_weights(model: onnx.ModelProto) -> None:
    """Check that onnxruntime opens a model, with its large initializers as inputs, which takes next to no memory."""
    bare = onnx.ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    bare.functions.extend(model.functions)
    body = bare.graph
    body.name = model.graph.name or "graph"
    body.node.extend(model.graph.node)
    body.output.extend(model.graph.output)
    listed = {t.name for t in model.graph.initializer}
    body.input.extend(i for i in model.graph.input if i.name not in listed)
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL or tensor.ByteSize() > SMALL_TENSOR:
            body.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            body.initializer.append(tensor)
    with translated("onnxruntime does not take the model"):
        ort.InferenceSession(bare.SerializeToString(), _options(optimized=False), providers=[CPU])


def _options(*, optimized: bool) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.inter_op_num_threads = 1
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def _broken(model: onnx.ModelProto) -> list[str]:
    """The optimizers that would change what a model computes."""
    vectors = {t.name for t in model.graph.initializer if len(t.dims) == 1}
    reads_vector = any(n.op_type == "MatMul" and not vectors.isdisjoint(n.input) for n in model.graph.node)
    trains = any(
        n.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in n.attribute)
        for n in model.graph.node
    )
    return [*BROKEN, *(BROKEN_FOR_VECTORS if reads_vector else []), *(BROKEN_IN_TRAINING if trains else [])]


class Session:
    """A stage's model, ready to run."""

    def __init__(self, model: StageModel, device: Device, *, optimized: bool = True) -> None:
        self.model = model
        self.device = device
        options = _options(optimized=optimized)
        options.intra_op_num_threads = device.threads
        options.use_deterministic_compute = True
        # Memory patterns pay off over many runs of one shape; a session here runs few, and they take a third more.
        options.enable_mem_pattern = False
        self._held = {name: _from_numpy(array) for name, array in model.tensors.items()}
        if self._held:
            options.add_external_initializers(list(self._held), list(self._held.values()))
        with translated():
            self._session = ort.InferenceSession(
                model.proto.SerializeToString(),
                options,
                providers=device.providers,
                disabled_optimizers=_broken(model.proto),
            )
        self._probed = [name for probe in model.probes for name in probe.fetches]

    def run(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[list[Array]]]:
        """Run one batch: the values for later stages, still on the device, and the fetched outputs of each probe."""
        binding = self._session.io_binding()
        for value, name in self.model.feeds.items():
            binding.bind_ortvalue_input(name, values[value])
        for name in self.model.fetches:
            binding.bind_output(name, self.device.kind, self.device.index)
        for name in self._probed:
            binding.bind_output(name, "cpu")
        with translated():
            self._session.run_with_iobinding(binding)
        fetched = binding.get_outputs()
        kept = dict(zip(self.model.fetches, fetched, strict=False))
        numbers = iter(fetched[len(self.model.fetches) :])
        return kept, [[next(numbers).numpy() for _ in probe.fetches] for probe in self.model.probes]

    def to_device(self, array: Array) -> Any:
        return _from_numpy(array, self.device)


def _from_numpy(array: Array, device: Device | None = None) -> Any:
    kind, index = (device.kind, device.index) if device else ("cpu", 0)
    if array.dtype.kind in "OUS":
        return _strings(array)
    if array.dtype.kind in "biuf" and str(array.dtype) != "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array).reshape(array.shape), kind, index)
    code = helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), code)


def to_numpy(value: Any) -> Array:
    """A tensor as an array; bfloat16, which numpy does not know, as float32."""
    if value.data_type() == "tensor(bfloat16)":
        bits = np.asarray(value.numpy()).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    return np.asarray(value.numpy())


def _strings(array: Array) -> Any:
    """A string tensor as an OrtValue: onnxruntime makes none from numpy, but a session with a constant output does."""
    words = [str(word).encode() for word in array.ravel()]
    tensor = TensorProto(name="constant", dims=array.shape, data_type=TensorProto.STRING, string_data=words)
    identity = helper.make_node("Identity", ["constant"], ["value"])
    graph = helper.make_graph([identity], "strings", [], [ValueInfoProto(name="value")], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=[CPU])
    binding = session.io_binding()
    binding.bind_output("value", "cpu")
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0]


@dataclass
class Spilled:
    """A tensor that waits in the temporary file."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass
class Frontier:
    """The values that wait between stages, for each batch; above a budget they wait in a temporary file."""

    device: Device
    budget: int
    kept: list[dict[str, Any]] = field(default_factory=list)
    bytes: int = 0
    spilled: int = 0
    peak: int = 0
    _file: Any = None
    _end: int = 0

    def put(self, batch: int, values: Mapping[str, Any]) -> None:
        while len(self.kept) <= batch:
            self.kept.append({})
        for name, value in values.items():
            self._forget(batch, name)
            size = _size(value)
            if size and self.bytes + size > self.budget:
                self.kept[batch][name] = self._spill(value)
            else:
                self.kept[batch][name] = value
                self.bytes += size
        self.peak = max(self.peak, self.bytes)

    def get(self, batch: int, name: str) -> Any:
        value = self.kept[batch][name]
        if not isinstance(value, Spilled):
            return value
        count = int(np.prod(value.shape, dtype=np.int64))
        self._file.seek(value.offset)
        data = self._file.read(count * value.dtype.itemsize)
        return _from_numpy(np.frombuffer(data, value.dtype).reshape(value.shape), self.device)

    def keep_only(self, batch: int, names: set[str]) -> None:
        """Free a batch's waiting values, except those with these names."""
        for name in [name for name in self.kept[batch] if name not in names] if batch < len(self.kept) else []:
            self._forget(batch, name)

    def _forget(self, batch: int, name: str) -> None:
        value = self.kept[batch].pop(name, None)
        if value is not None and not isinstance(value, Spilled):
            self.bytes -= _size(value)

    def types(self, names: Sequence[str]) -> dict[str, TypeProto]:
        """The types of waiting values, as a graph input declares them."""
        types = {}
        for name in names:
            value = self.kept[0][name]
            shape = self._shape(name)
            if isinstance(value, Spilled):
                types[name] = helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), shape)
            else:
                types[name] = _type_of(value, shape)
        return types

    def _shape(self, name: str) -> list[int | None] | None:
        """The dimensions that are the same in all batches; None if even their number is not."""
        values = [batch[name] for batch in self.kept]
        if not all(isinstance(value, Spilled) or value.is_tensor() for value in values):
            return None
        shapes = [value.shape if isinstance(value, Spilled) else value.shape() for value in values]
        if len({len(shape) for shape in shapes}) > 1:
            return None
        return [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*shapes, strict=True)]

    def close(self) -> None:
        self.kept.clear()
        if self._file is not None:
            self._file.close()

    def _spill(self, value: Any) -> Spilled:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="lsuv-")  # noqa: SIM115  it lives as long as the frontier
        array = np.ascontiguousarray(value.numpy())
        try:
            self._file.seek(self._end)
            self._file.write(array.reshape(-1).view(np.uint8).data)
        except OSError as problem:
            raise OutputError(
                f"values cannot wait in a temporary file: {problem.strerror}; use `limit` for fewer samples, a "
                "larger `memory`, or another directory (TMPDIR)"
            ) from None
        place = Spilled(self._end, array.shape, array.dtype)
        self._end += array.nbytes
        self.spilled += array.nbytes
        return place


def _size(value: Any) -> int:
    """The bytes of a tensor that could be spilled; 0 for strings, sequences and empty optionals."""
    if not value.is_tensor() or value.data_type() == "tensor(string)" or not value.shape():
        return 0
    return int(value.tensor_size_in_bytes())


def _type_of(value: Any, shape: Sequence[int | None] | None) -> TypeProto:
    """onnxruntime's description of a value's type, such as seq(tensor(float)), as ONNX writes it."""
    text = value.data_type()
    wrappers = re.findall(r"(seq|optional)\(", text)
    match = re.search(r"tensor\((\w+)\)", text)
    if match is None:
        raise ModelError(f"a value of type {text} has to pass from one stage to the next, which is not possible")
    names = {"float": "FLOAT", "double": "DOUBLE"}
    code = TensorProto.DataType.Value(names.get(match[1], match[1].upper()))
    kind = helper.make_tensor_type_proto(code, shape)
    for wrapper in reversed(wrappers):
        make = helper.make_sequence_type_proto if wrapper == "seq" else helper.make_optional_type_proto
        kind = make(kind)
    return kind


@contextlib.contextmanager
def translated(what: str = "onnxruntime cannot run the model") -> Iterator[None]:
    """Turn onnxruntime's exceptions into `ModelError` and its subclasses."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as problem:  # onnxruntime's exceptions have no common class of their own
        kind = type(problem).__name__
        if kind in {"NotImplemented", "InvalidGraph", "Fail"} and "Could not find an implementation" in str(problem):
            raise Unsupported(f"onnxruntime cannot run the model here: {_one_line(problem)}") from problem
        if "Failed to allocate memory" in str(problem) or "bad_alloc" in str(problem):
            raise ModelError(
                "onnxruntime ran out of memory; use a smaller `batch_size`, fewer samples (`limit`) or `memory`"
            ) from problem
        kind_of_error = UnknownOperator if "is not a registered function/op" in str(problem) else ModelError
        raise kind_of_error(f"{what}: {_one_line(problem)}") from problem


def _one_line(problem: BaseException) -> str:
    """An onnxruntime message without its preamble, source paths and line breaks."""
    # The regular expressions below take time quadratic in the length of a name, and a hostile model can have a very
    # long one; text beyond the first characters would not be shown anyway.
    text = " ".join(str(problem)[:LONGEST_MESSAGE].split())
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"/\S+\.(?:cc|h)[:\d]*( \S+\([^)]*\))?", "", text)
    text = re.sub(r"(?:[\w:&*]+ )?onnxruntime::[\w:~<>]+\((?:[^()]|\([^()]*\))*\)(?: const)?\s*", "", text)
    return text.strip()[:LONGEST_REASON]


def version() -> str:
    return str(ort.__version__)
