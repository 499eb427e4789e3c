"""Numbers in lists of a node's attributes, which are no tensors: linear models, support vectors and trees (ai.onnx.ml).

1. A list of floats is learned if it is in a node of ai.onnx.ml, or longer than any parameter of an operator (LONG).
   A Constant's list is a tensor (stripping.py). Parameters of a kernel function are structure and stay.
2. A stripped list is empty, and the attribute's doc_string `lsuv.stripped NAME COUNT` has its length.
3. It is filled by the attribute's name: intercepts and offsets 0, scales 1, all else from N(0, 1/n), n the numbers for
   each intercept, or N(0, 1) where there are none (thresholds and leaves of trees).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.random import Generator
from onnx import AttributeProto, NodeProto, TensorProto

from lsuv_cli.errors import ModelError
from lsuv_cli.model.file import MOST_BYTES, STRIPPED
from lsuv_cli.model.flatten import label, nodes_inside

LEARNED_DOMAIN = "ai.onnx.ml"
LONG = 16  # numbers; no operator of other domains has so many that are no weights
STRUCTURE = frozenset({"kernel_params"})  # gamma, coef0 and degree
CONSTANTS = {
    "intercepts": 0.0, "offset": 0.0, "rho": 0.0, "base_values": 0.0, "imputed_value_floats": 0.0, "scale": 1.0,
    "nodes_hitrates": 1.0, "prob_a": -1.0, "prob_b": 0.0,
}  # fmt: skip
PRODUCTS = frozenset({"coefficients", "support_vectors"})


@dataclass(frozen=True)
class NumberList:
    """A list of floats of a node's attribute, and its length, which is known if it was stripped too."""

    node: NodeProto
    attribute: AttributeProto

    @property
    def name(self) -> str:
        return f"{label(self.node)}.{self.attribute.name}"

    @property
    def count(self) -> int:
        if not self.is_stripped:
            return len(self.attribute.floats)
        try:
            count = int(str(self.attribute.doc_string).split()[2])
        except (IndexError, ValueError):
            count = -1
        if not 0 <= count <= MOST_BYTES:
            raise ModelError(f"{self.name} has no numbers, and does not say how many it had; strip the model again")
        return count

    @property
    def is_stripped(self) -> bool:
        return not self.attribute.floats and str(self.attribute.doc_string).startswith(f"{STRIPPED} ")

    def strip(self) -> None:
        """Take the numbers out."""
        count = len(self.attribute.floats)
        self.attribute.ClearField("floats")
        self.attribute.doc_string = f"{STRIPPED} numbers {count}"

    def fill(self, rng: Generator) -> None:
        """Make the numbers up, by the attribute's name."""
        name, count = self.attribute.name, self.count
        self.attribute.ClearField("doc_string")
        if name in CONSTANTS:
            self.attribute.floats.extend([CONSTANTS[name]] * count)
            return
        numbers = rng.standard_normal(count, np.float32)
        if name in PRODUCTS:
            intercepts = [
                NumberList(self.node, held).count for held in self.node.attribute if held.name == "intercepts"
            ]
            numbers /= np.float32(math.sqrt(max(count / max([1, *intercepts]), 1)))
        self.attribute.floats.extend(numbers.tolist())


def every(model: onnx.ModelProto) -> Iterator[NumberList]:
    """The lists of learned numbers in a model: in its nodes, those of its inner graphs, and those of its functions."""
    for node in nodes_of(model):
        for held in node.attribute:
            found = NumberList(node, held)
            if held.type == AttributeProto.FLOATS and (found.is_stripped or _is_learned(found)):
                yield found


def stripped(model: onnx.ModelProto) -> list[NumberList]:
    """The lists whose numbers were taken out."""
    return [found for found in every(model) if found.is_stripped]


def codes(model: onnx.ModelProto) -> list[TensorProto]:
    """The tensors of narrow integers in attributes of ai.onnx.ml: codes (the modes of a tree's nodes), no weights."""
    nodes = [node for node in nodes_of(model) if node.domain == LEARNED_DOMAIN]
    held = [a.t for node in nodes for a in node.attribute if a.type == AttributeProto.TENSOR]
    return [tensor for tensor in held if tensor.data_type in (TensorProto.UINT8, TensorProto.INT8)]


def nodes_of(model: onnx.ModelProto) -> Iterator[NodeProto]:
    """All nodes of a model, at any depth."""
    for node in (*model.graph.node, *(node for function in model.functions for node in function.node)):
        yield node
        yield from nodes_inside(node)


def _is_learned(found: NumberList) -> bool:
    node, held = found.node, found.attribute
    if node.op_type == "Constant" or held.name in STRUCTURE or held.ref_attr_name:
        return False
    return len(held.floats) > (0 if node.domain == LEARNED_DOMAIN else LONG)
