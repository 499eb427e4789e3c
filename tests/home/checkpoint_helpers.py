"""A model initialized with a checkpoint, and what it then computes: for the tests of `--like`."""

from typing import Any

import numpy as np
import onnx

from helpers import Array, normal, values
from lsuv_cli import Initialized, initialize

X = normal(64, 6, seed=9)


def run(proto: onnx.ModelProto, like: Any, data: Array = X, **settings: Any) -> Initialized:
    return initialize(proto, data, like=like, **settings)


def output(done: Any, name: str = "y", data: Array = X) -> Array:
    return values(done.model, {"x": data}, [name])[name]


def scoped(proto: onnx.ModelProto, **scopes: str) -> onnx.ModelProto:
    """Nodes, by their outputs, get the module scopes that PyTorch's exporter writes."""
    for node in proto.graph.node:
        if node.output[0] in scopes:
            path = scopes[node.output[0]]
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", path, "linear"]))
    return proto


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def wide(array: Any) -> Array:
    return np.asarray(array, np.float64)


def close(one: Array, other: Array, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())
