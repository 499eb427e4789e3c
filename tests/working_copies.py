"""Working copies of models for tests of single modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from helpers import model
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.graph import Graph


class Source:
    """Tensors as they are in a message."""

    def array(self, tensor: onnx.TensorProto) -> np.ndarray:
        return numpy_helper.to_array(tensor)


def graph_of(text: str, source: Any = None, **more: Any) -> Graph:
    """The working copy of a graph as helpers.model reads it."""
    return graphs.build(model(text, **more), source or Source())
