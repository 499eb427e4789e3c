"""Measurements that share nothing with the code under test: outputs exposed in onnxruntime, numpy in float64."""

from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import numpy_helper

LAYERS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}


def stored(model: onnx.ModelProto) -> dict[str, NDArray]:
    """The initializers of a model."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def layer_variances(model: onnx.ModelProto, feeds: Mapping[str, NDArray]) -> dict[str, float]:
    """The variance of each layer's output after its bias, by the layer's name."""
    weights = {tensor.name for tensor in model.graph.initializer}
    measured = {}
    for node in model.graph.node:
        if node.op_type in LAYERS and weights.intersection(node.input[:2]):
            output = node.output[0]
            readers = [n for n in model.graph.node if output in n.input]
            if node.op_type == "MatMul" and len(readers) == 1 and readers[0].op_type == "Add":
                output = readers[0].output[0] if weights.intersection(readers[0].input) else output
            measured[node.name or node.output[0]] = output
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=output) for output in measured.values())
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = session.run(list(measured.values()), dict(feeds))
    return {name: float(np.var(value, dtype=np.float64)) for name, value in zip(measured, found, strict=True)}


def restored(after: onnx.ModelProto, before: onnx.ModelProto) -> onnx.ModelProto:
    """A written model with our metadata removed and the old values put back: it should be the old model."""
    model = onnx.ModelProto()
    model.CopyFrom(after)
    kept = [entry for entry in model.metadata_props if not entry.key.startswith("lsuv.")]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    old = {tensor.name: tensor for tensor in before.graph.initializer}
    for tensor in model.graph.initializer:
        assert list(tensor.dims) == list(old[tensor.name].dims)
        assert tensor.data_type == old[tensor.name].data_type
        tensor.CopyFrom(old[tensor.name])
    return model
