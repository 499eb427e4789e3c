"""Dropout in training mode: what the model drops is dropped, in calibration and in verification alike.

A Dropout with a `seed` attribute drops the same values in every session, so that unoptimized onnxruntime on the written
file (helpers.py) tells the variances of the very run that was calibrated.
"""

import numpy as np
import pytest
from onnx import helper, numpy_helper

from helpers import entry, model, near_one, normal, variances
from lsuv_cli import initialize
from test_sample_models import FITNET4_LAYERS, build

X = normal(64, 8, seed=1)


def with_dropout(proto, behind, ratio=0.2):
    """The model with a seeded Dropout in training mode behind each node of one operator."""
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(ratio), "ratio"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "training"))
    for k in reversed([k for k, node in enumerate(proto.graph.node) if node.op_type == behind]):
        name = proto.graph.node[k].output[0]
        proto.graph.node[k].output[0] = f"{name}.kept"
        drop = helper.make_node("Dropout", [f"{name}.kept", "ratio", "training"], [name], f"{name}.drop", seed=k)
        proto.graph.node.insert(k + 1, drop)
    return proto


@pytest.mark.parametrize("opset", [12, 13, 18, 22])
def test_a_dropout_behind_another_node_drops(opset):
    """onnxruntime's optimizer removes such a Dropout, whatever its training_mode."""
    text = "g (float[N,8] x) => (z) { r = Relu(x) y = MatMul(r, w) u = Relu(y) z = MatMul(u, v) }"
    proto = with_dropout(model(text, opset=opset, w=normal(8, 8), v=normal(8, 4)), "Relu", 0.5)
    result = initialize(proto, X, batch_size="all")
    assert [entry(result, name).status for name in "yz"] == ["ok", "ok"]
    assert near_one(variances(result.model, {"x": X}, ["y", "z"], reference=False))


def test_fitnet4_with_dropout_behind_its_poolings():
    """Without the dropped values, conv21 would be at 1.27, conv31 at 1.85 and ip1 at 2.9."""
    proto = with_dropout(build("fitnet4", activation="relu"), "MaxPool")
    images = normal(12, 3, 32, 32, seed=3)
    result = initialize(proto, images, batch_size="all")
    outputs = [node.output[0] for node in proto.graph.node if node.name in FITNET4_LAYERS]
    found = variances(result.model, {"data": images}, outputs, reference=False)
    assert near_one(found, 0.01)
    reported = [layer.variance for layer in result.report.layers]
    np.testing.assert_allclose(reported, list(found.values()), rtol=1e-3)
    assert result.report.exit_code == 0
