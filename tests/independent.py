"""Variances by the layers' names, on top of helpers.py; nothing of the code under test has a part in them."""

from collections.abc import Mapping

import onnx
from onnx import numpy_helper

from helpers import Array, layer_outputs, variances


def stored(model: onnx.ModelProto) -> dict[str, Array]:
    """The initializers of a model."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def layer_variances(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, float]:
    """The variance of each layer's output after its bias, by the layer's name."""
    found = variances(model, feeds, layer_outputs(model), reference=False)
    return {_layer(model, output): variance for output, variance in found.items()}


def _layer(model: onnx.ModelProto, output: str) -> str:
    """The name of the layer whose measured value this is; an Add stands between them where it adds the bias."""
    makers = {name: node for node in model.graph.node for name in node.output}
    node = makers[output]
    if node.op_type == "Add":
        node = next(makers[name] for name in node.input if name in makers)
    return node.name or node.output[0]
