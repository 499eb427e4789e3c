"""Models in a few lines of text, and what they compute, worked out without the code under test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

ort.set_default_logger_severity(4)

Array = np.ndarray
LAYER_OPS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "FusedConv", "FusedGemm", "FusedMatMul"}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return rng(seed).standard_normal(shape).astype(dtype)


def square(*names: str, size: int = 8) -> dict[str, Array]:
    """A square weight for each name."""
    return {name: normal(size, size, seed=k) for k, name in enumerate(names)}


def model(text: str, opset: Any = 18, ir: Any = 9, microsoft: Any = False, **tensors: Any) -> onnx.ModelProto:
    """A model from the text of its graph; `tensors` become initializers in the order given.

    `text` is a graph as onnx.parser reads it, `g (float[N,3] x) => (float[N,4] y) { ... }`, with whatever local
    functions behind it, or a whole model if it starts with `<`. `opset` and `ir` are versions, `microsoft` is a bool;
    they are Any because to mypy each key of `**weights` may be one of them.
    """
    if not text.strip().startswith("<"):
        imports = f'"" : {opset}' + (', "com.microsoft" : 1' if microsoft else "") + ', "local" : 1'
        text = f"<ir_version: {ir}, opset_import: [{imports}]>\n{text}"
    parsed = onnx.parser.parse_model(text)
    if not parsed.functions:
        for k in reversed([k for k, o in enumerate(parsed.opset_import) if o.domain == "local"]):
            del parsed.opset_import[k]
    for name, array in tensors.items():
        parsed.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
        if ir < 4:
            kind = helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)
            parsed.graph.input.append(helper.make_tensor_value_info(name, kind, np.asarray(array).shape))
    return parsed


def tensor(proto: onnx.ModelProto, name: str) -> Array:
    """A stored tensor's values: of an initializer, or of a Constant node."""
    for held in proto.graph.initializer:
        if held.name == name:
            return numpy_helper.to_array(held)
    for node in proto.graph.node:
        if node.op_type == "Constant" and node.output[0] == name:
            value = helper.get_attribute_value(node.attribute[0])
            return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value, np.float32)
    raise KeyError(name)


def exposed(proto: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of the model that puts out these values too."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    known = {o.name for o in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in known)
    return copy


def values(
    proto: onnx.ModelProto, feeds: Mapping[str, Any], names: Iterable[str], reference: bool = False
) -> dict[str, Array]:
    """Some values of a model, as float64, by onnxruntime or by onnx's reference evaluator."""
    wanted = list(names)
    whole = exposed(proto, wanted)
    if reference:
        found = ReferenceEvaluator(whole).run(wanted, dict(feeds))
    else:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 2
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = ort.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found = session.run(wanted, dict(feeds))
    return {name: np.asarray(value, np.float64) for name, value in zip(wanted, found, strict=True)}


def layer_outputs(proto: onnx.ModelProto) -> list[str]:
    """What is measured in a flat graph: each layer's output, behind the constant that an Add puts right after it."""
    stored = {t.name for t in proto.graph.initializer}
    stored |= {n.output[0] for n in proto.graph.node if n.op_type in {"Constant", "ConstantOfShape"}}
    for node in proto.graph.node:
        if node.op_type in {"Identity", "Transpose", "Reshape", "Cast", "Squeeze", "Unsqueeze", "Flatten"} and all(
            name in stored for name in node.input
        ):
            stored.update(node.output)
    outputs = {o.name for o in proto.graph.output}
    found = []
    for node in proto.graph.node:
        if node.op_type not in LAYER_OPS or not stored.intersection(node.input[:2]):
            continue
        name = node.output[0]
        readers = [n for n in proto.graph.node if name in n.input]
        if len(node.input) < 3 and len(readers) == 1 and readers[0].op_type == "Add" and name not in outputs:
            (other,) = [i for i in readers[0].input if i != name] or [name]
            name = readers[0].output[0] if other in stored else name
        found.append(name)
    return found


def variances(
    proto: onnx.ModelProto, feeds: Mapping[str, Any], names: Iterable[str] | None = None, reference: bool = True
) -> dict[str, float]:
    """The variance over all elements of some values; of every layer's output where no names are given."""
    wanted = layer_outputs(proto) if names is None else list(names)
    return {name: float(value.var()) for name, value in values(proto, feeds, wanted, reference).items()}


def is_orthonormal(matrix: Array, tolerance: float = 1e-5) -> bool:
    """Whether the rows (the columns, if there are fewer) are orthogonal and of one length."""
    wide = np.asarray(matrix, np.float64)
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.T
    product = wide @ wide.T
    length = np.trace(product) / len(product)
    return bool(length > 0 and np.abs(product / length - np.eye(len(product))).max() < tolerance)


def unchanged_but(before: onnx.ModelProto, after: onnx.ModelProto, *names: str) -> bool:
    """Whether two models are the same bytes but for the contents of these tensors and our metadata."""
    copy = onnx.ModelProto()
    copy.CopyFrom(after)
    kept = [p for p in copy.metadata_props if not p.key.startswith("lsuv.")]
    del copy.metadata_props[:]
    copy.metadata_props.extend(kept)
    old = {t.name: t for t in before.graph.initializer}
    for held in copy.graph.initializer:
        if held.name in names:
            assert list(held.dims) == list(old[held.name].dims)
            assert held.data_type == old[held.name].data_type
            held.CopyFrom(old[held.name])
    old_nodes = {n.output[0]: n for n in before.graph.node if n.op_type == "Constant"}
    for node in copy.graph.node:
        if node.op_type == "Constant" and node.output[0] in names:
            node.CopyFrom(old_nodes[node.output[0]])
    return bool(copy.SerializeToString() == before.SerializeToString())


def entry(result: Any, name: str) -> Any:
    """A layer's line in the report."""
    return next(layer for layer in result.report.layers if layer.name == name)


def near_one(found: Mapping[str, float], tolerance: float = 1e-3) -> bool:
    return all(abs(variance - 1) < tolerance for variance in found.values())
