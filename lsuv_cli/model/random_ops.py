"""Operators that draw random numbers: which they are, and how a run of them is made repeatable.

onnxruntime seeds each random operator when a session is made, and continues its random stream from run to run. So an
operator with a `seed` attribute gives batch k the same numbers in every session that runs the batches in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

RANDOM_OPS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)


def is_random(node: NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    """Whether a node's output is drawn anew in every run."""
    return node.op_type in RANDOM_OPS or drops(node, tensors)


def drops(node: NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    """Whether a node is a Dropout in training mode; a training_mode input that a node computes counts as true."""
    if node.op_type != "Dropout" or len(node.input) < 3 or not node.input[2]:
        return False
    flag = tensors.get(node.input[2])
    return flag is None or bool(np.any(numpy_helper.to_array(flag)))


def seeded(node: NodeProto) -> NodeProto:
    """A random operator with a `seed` attribute: the model's, or else one derived from the name of its output."""
    if any(held.name == "seed" for held in node.attribute):
        return node
    copied = NodeProto()
    copied.CopyFrom(node)
    number = int.from_bytes(hashlib.sha256(node.output[0].encode()).digest()[:3])  # exact as a float32 too
    copied.attribute.append(helper.make_attribute("seed", number if node.op_type == "Dropout" else float(number)))
    return copied
