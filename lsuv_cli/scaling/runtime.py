"""Sessions of onnxruntime, and the values that go in and out of them. With providers.py, its only importer.

Values go in and out as OrtValues on the host. A device with memory of its own copies what it reads and what it made; it
keeps nothing between two sessions. So all devices run the same code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper

from lsuv_cli.errors import ModelError
from lsuv_cli.model.file import is_elsewhere
from lsuv_cli.model.flatten import constant_value, nodes_inside
from lsuv_cli.model.graph import SHAPE_BYTES
from lsuv_cli.model.random_ops import drops
from lsuv_cli.scaling import fused
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.providers import CPU, Device
from lsuv_cli.scaling.translation import OutOfMemory, UnknownOperator, Unsupported, one_line, translated

Array = NDArray[Any]

VERSION = str(ort.__version__)
BFLOAT16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)

# MatMulScaleFusion: of two Muls by constants in a row, onnxruntime 1.31 removes the first even if another node reads
# it, and then cannot load the model. GemmTransposeFusion: onnxruntime 1.23 fuses a Transpose into a Gemm whose shapes
# then do not fit.
BROKEN = ["MatMulScaleFusion", "GemmTransposeFusion"]
# onnxruntime 1.31 computes wrong values for MatMul(Transpose(x), w) where w has one axis, whatever computes w.
BROKEN_FOR_VECTORS = ["MatmulTransposeFusion"]
# ConstantSharing merges equal tensors; a BatchNormalization in training mode may then overwrite its own scale.
BROKEN_IN_TRAINING = ["ConstantSharing"]
# EliminateDropout removes a Dropout whatever its training_mode, if a node stands in front of it.
BROKEN_FOR_DROPOUT = ["EliminateDropout"]
# FuseReluClip of onnxruntime 1.31 fails at a Clip of double behind a Relu.
BROKEN_FOR_CLIP = ["FuseReluClip"]


ON_THE_HOST = "a stage ran on the CPU"  # how the warning begins

# Errors come as exceptions; onnxruntime's log lines besides them would only clutter stderr.
ort.set_default_logger_severity(4)


def refusal(model: str | bytes) -> str:
    """Why onnxruntime does not take a model as it is; empty if it does."""
    try:
        ort.InferenceSession(model, _options(optimized=False), providers=[CPU])
    except MemoryError:
        raise
    except Exception as problem:  # onnxruntime's exceptions have no common class of their own
        return one_line(problem)
    return ""


def run_whole(
    model: str | bytes, batch: Mapping[str, Array], threads: int, *, optimized: bool = False
) -> dict[str, Array]:
    """Open a model as it is and run it, as a rule without optimizers. Returns those of its outputs that are tensors.

    `Unsupported` if the CPU has no kernel for one of its operators; a model that onnxruntime refuses is an error.
    """
    options = _options(optimized=optimized)
    options.intra_op_num_threads = threads
    with translated("onnxruntime does not take the model"):
        session = ort.InferenceSession(model, options, providers=[CPU])
    kinds = {i.name: i.type for i in session.get_inputs()}
    values = {
        name: host_value(array.astype(BFLOAT16) if kinds[name] == "tensor(bfloat16)" else array)
        for name, array in batch.items()
        if name in kinds
    }
    names = [o.name for o in session.get_outputs()]
    with translated():
        fetched = session.run_with_ort_values(names, values)
    # Copies, because an array of a session's output keeps the session's memory.
    return {name: np.array(to_numpy(value)) for name, value in zip(names, fetched, strict=True) if value.is_tensor()}


def open_without_weights(model: onnx.ModelProto) -> None:
    """Check that onnxruntime opens a model, with its large initializers as inputs, which takes next to no memory."""
    bare = onnx.ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    bare.functions.extend(model.functions)
    body = bare.graph
    body.name = model.graph.name or "graph"
    for node in model.graph.node:
        value = constant_value(node, node.output[0]) if node.output else None
        if isinstance(value, TensorProto) and is_elsewhere(value):
            body.input.append(helper.make_tensor_value_info(node.output[0], value.data_type, list(value.dims)))
        else:
            body.node.append(node)
    body.output.extend(model.graph.output)
    listed = {t.name for t in model.graph.initializer}
    body.input.extend(i for i in model.graph.input if i.name not in listed)
    for tensor in model.graph.initializer:
        if is_elsewhere(tensor) or tensor.ByteSize() > SHAPE_BYTES:
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
    outer = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    nodes = [inner for node in outer for inner in (node, *nodes_inside(node))]
    tensors = {t.name: t for t in model.graph.initializer}
    trains = any(
        n.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in n.attribute) for n in nodes
    )
    return [
        *BROKEN,
        *(BROKEN_FOR_VECTORS if _may_transpose_for_a_vector(nodes, tensors) else []),
        *(BROKEN_IN_TRAINING if trains else []),
        *(BROKEN_FOR_DROPOUT if any(drops(n, tensors) for n in nodes) else []),
        *(BROKEN_FOR_CLIP if any(n.op_type == "Clip" for n in nodes) else []),
    ]


def _may_transpose_for_a_vector(nodes: Sequence[onnx.NodeProto], tensors: Mapping[str, TensorProto]) -> bool:
    """Whether there may be a MatMul(Transpose(x), w) where w has one axis: where w is not known to have more."""
    matrices = {name for name, tensor in tensors.items() if len(tensor.dims) > 1}
    transposed: set[str] = set()
    for node in nodes:
        if node.op_type == "Transpose" or (node.op_type in {"Cast", "Identity"} and node.input[0] in transposed):
            transposed.update(node.output)
        if node.op_type == "MatMul" and node.input[0] in transposed and node.input[1] not in matrices:
            return True
    return False


class Session:
    """A stage's model, ready to run.

    A model that the device does not take for reasons of its own (CUDA has no BatchNormalization in training mode) runs
    on the host, where its values are anyway, and the device's `refused` says so; with `strict` it is an error.
    """

    def __init__(self, model: StageModel, device: Device, *, optimized: bool = True, strict: bool = False) -> None:
        self.model = model
        self.device = device
        self._held = {name: host_value(array) for name, array in model.tensors.items()}
        self._measured = [name for each in model.measurements for name in each.fetches]
        try:
            self._session = self._open(optimized)
        except (OutOfMemory, UnknownOperator, Unsupported):
            raise
        except ModelError as problem:
            if strict or device.is_host:
                raise
            self.device = device.host
            self._session = self._open(optimized)
            device.refused.append(f"{ON_THE_HOST}, because {device} does not take it: {problem}")

    def _open(self, optimized: bool) -> Any:
        options = _options(optimized=optimized)
        options.intra_op_num_threads = self.device.threads
        options.use_deterministic_compute = True
        # Memory patterns pay off over many runs of one shape; a session here runs few, and they take a third more.
        options.enable_mem_pattern = False
        if self._held:
            options.add_external_initializers(list(self._held), list(self._held.values()))
        proto = fused.split(self.model.proto, self.device.provider.splits)
        with translated(device=self.device):
            return open_on(self.device, proto.SerializeToString(), options, disabled_optimizers=_broken(proto))

    @property
    def providers(self) -> list[str]:
        """The providers that the session really has, by onnxruntime's names."""
        return list(self._session.get_providers())

    def run(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[list[Array]]]:
        """Run one batch: the values for later stages, on the host, and the fetched outputs of each measurement."""
        feeds = {name: values[value] for value, name in self.model.feeds.items()}
        with translated(device=self.device):
            # Not by IOBinding: an output that it gives keeps the binding alive, with every input, and with the session
            # and all the memory that the session took on the device.
            fetched = self._session.run_with_ort_values([*self.model.fetches, *self._measured], feeds)
            kept = dict(zip(self.model.fetches, fetched, strict=False))
            numbers = iter(fetched[len(self.model.fetches) :])
            return kept, [[next(numbers).numpy() for _ in each.fetches] for each in self.model.measurements]


def open_on(device: Device, model: bytes, options: Any, **more: Any) -> Any:
    """A session of onnxruntime on a device. What the device refuses is an exception, with its reason.

    Left alone, onnxruntime would print the reason on standard output and take the CPU.
    """
    given = device.provider.attach(options, device.index)
    return ort.InferenceSession(model, options, enable_fallback=0, **given, **more)


def host_value(array: Array) -> Any:
    """An array as an OrtValue on the host."""
    if array.dtype.kind in "OUS":
        return _strings(array)
    with translated():
        if array.dtype.kind in "biuf" and str(array.dtype) != "bfloat16":
            return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array).reshape(array.shape))
        code = helper.np_dtype_to_tensor_dtype(array.dtype)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), code)


def value_on(device: Device, array: Array) -> Any:
    """An array of floats as an OrtValue in a device's own memory."""
    with translated(device=device):
        return ort.OrtValue.ortvalue_from_numpy(array, device.provider.memory, device.index)


def own_array(value: Any) -> Array:
    """A tensor on the host as an array of its own type."""
    with translated():
        if value.data_type() != "tensor(bfloat16)":
            return np.asarray(value.numpy())
        data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())  # numpy() does not know bfloat16
        return np.frombuffer(data, BFLOAT16).reshape(value.shape())


def to_numpy(value: Any) -> Array:
    """A tensor on the host as an array; bfloat16, which numpy does not compute with, as float32."""
    array = own_array(value)
    return array.astype(np.float32) if array.dtype == BFLOAT16 else array


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
