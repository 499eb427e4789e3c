"""Dropout in training mode: what the model drops is dropped, in calibration and in verification alike.

A Dropout with a `seed` attribute drops the same values in every session, so that unoptimized onnxruntime on the written
file (helpers.py) tells the variances of the very run that was calibrated.
"""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from helpers import entry, model, near_one, normal, variances
from lsuv_cli import initialize
from test_sample_models import FITNET4_LAYERS, build

X = normal(64, 8, seed=1)


def with_dropout(proto, behind, ratio=0.2):
    """The model with a seeded Dropout in training mode behind each node of one operator."""
    proto.graph.initializer.append(numpy_helper.from_array(np.array(ratio, np.float32), "ratio"))
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


# DropConnect: a Dropout on a weight


DROP_CONNECT = {
    "MatMul": ("d = Dropout<seed=5>(w, r, t) y = MatMul(x, d)", (8, 8)),
    "behind views": ("v = Transpose(w) d = Dropout<seed=5>(v, r, t) e = Reshape(d, s) y = Gemm(x, e)", (8, 8)),
    "from the left": ("d = Dropout<seed=5>(w, r, t) a = Transpose<perm=[1,0]>(x) y = MatMul(d, a)", (3, 8)),
    "Conv": ("i = Unsqueeze(x, o) d, m = Dropout<seed=5>(w, r, t) y = Conv<pads=[1,1]>(i, d)", (4, 1, 3)),
    "computed": ("c = Mul(w, r) d = Dropout<seed=5>(c, r, t) y = MatMul(x, d)", (8, 4)),
}  # fmt: skip


@pytest.mark.parametrize("kind", DROP_CONNECT)
@pytest.mark.parametrize("size", [64, 20])
def test_a_weight_that_is_dropped_is_scaled_in_front_of_its_dropout(kind, size):
    """One mask per run: with several batches, each batch has its own."""
    nodes, shape = DROP_CONNECT[kind]
    proto = model(
        f"g (float[N,8] x) => (z) {{ {nodes} u = Relu(y) q = Flatten(u) z = ReduceMax(q) }}",
        w=normal(*shape), r=np.float32(0.5), t=np.array(True), s=np.array([8, 8]), o=np.array([1]),
    )  # fmt: skip
    result = initialize(proto, X, batch_size=size)
    assert entry(result, "y").status == "ok"
    assert "its weight is dropped at random" in entry(result, "y").notes
    session = unoptimized(result.model, "y")
    runs = [session.run(None, {"x": X[k : k + size]})[0] for k in range(0, 64, size)]
    assert abs(np.concatenate([run.ravel() for run in runs]).astype(np.float64).var() - 1) < 1e-3
    assert any(node.op_type == "Dropout" for node in result.model.graph.node)


def unoptimized(proto, name):
    """One session over all batches, so that random streams go on from batch to batch."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    only = onnx.ModelProto()
    only.CopyFrom(proto)
    del only.graph.output[:]
    only.graph.output.append(onnx.ValueInfoProto(name=name))
    return ort.InferenceSession(only.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_layers_behind_a_dropped_weight_are_scaled_for_what_it_gives():
    proto = model(
        """g (float[N,8] x) => (z) { a = MatMul(x, k) b = Relu(a) d = Dropout<seed=3>(w, r, t) y = MatMul(b, d)
        c = Tanh(y) z = MatMul(c, v) }""",
        k=normal(8, 8), w=normal(8, 8), v=normal(8, 4), r=np.float32(0.3), t=np.array(True),
    )  # fmt: skip
    result = initialize(proto, X, batch_size="all")
    assert near_one(variances(result.model, {"x": X}, ["a", "y", "z"], reference=False))
    assert result.report.exit_code == 0


@pytest.mark.parametrize("tied", ["share", "untie"])
def test_a_dropped_weight_of_two_layers_is_left_alone(tied):
    proto = model(
        """g (float[N,8] x) => (z) { d = Dropout(w, r, t) y = MatMul(x, d) u = Tanh(y) q = MatMul(u, d) s = Relu(q)
        z = MatMul(s, v) }""",
        w=normal(8, 8), v=normal(8, 4), r=np.float32(0.5), t=np.array(True),
    )  # fmt: skip
    result = initialize(proto, X, tied=tied)
    left = [entry(result, name) for name in "yq"]
    assert "dropped at random" in left[-1].notes[0]
    assert left[-1].status == "skipped"
    assert entry(result, "z").status == "ok"
    assert any(node.op_type == "Dropout" for node in result.model.graph.node)


def test_a_weight_that_is_drawn_is_left_alone():
    proto = model(
        "g (float[N,8] x) => (z) { w = RandomNormal<shape=[8,8], seed=3.0>() y = MatMul(x, w) z = MatMul(y, v) }",
        v=normal(8, 4),
    )
    result = initialize(proto, X)
    assert "drawn at random" in entry(result, "y").notes[0]
    assert entry(result, "z").status == "ok"


# Running statistics of a BatchNormalization in training mode


@pytest.mark.parametrize("kind", ["FLOAT16", "FLOAT", "DOUBLE"])
@pytest.mark.parametrize("old", ["m", "i", "h"])
def test_a_layer_that_reads_running_statistics_has_what_unoptimized_onnxruntime_gives(kind, old):
    """A session keeps statistics from one batch for the next if a tensor holds them, and not in half precision."""
    of = {"FLOAT16": np.float16, "FLOAT": np.float32, "DOUBLE": np.float64}[kind]
    tensors = {
        name: np.array(of_two, of) for name, of_two in {"s": [1, 1], "b": [0, 0], "m": [1, 2], "v": [1, 1]}.items()
    }
    x = np.concatenate([normal(4, 2, 3) * 3, normal(1, 2, 3) + 5]).astype(of)
    text = (
        "i = Identity(m) h = Add(m, m) a, t, u = BatchNormalization<training_mode=1>(x, s, b, OLD, v) y = MatMul(t, w)"
    )
    text = "g (float[N,2,3] x) => (a, y) { " + text.replace("OLD", old) + " }"
    proto = model(text, opset=17, w=normal(2, 2).astype(of), **tensors)
    proto.graph.input[0].type.tensor_type.elem_type = getattr(onnx.TensorProto, kind)
    result = initialize(proto, x, batch_size=4, device="cpu")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(result.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = np.stack([session.run(["y"], {"x": batch})[0] for batch in (x[:4], x[4:])]).astype(np.float64)
    assert entry(result, "y").status == "ok"
    assert abs(found.var() - 1) < 0.011
