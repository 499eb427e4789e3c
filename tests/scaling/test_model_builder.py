"""Models put together node by node: what computes a value, constants inline and beside the model, names."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers import model, normal
from lsuv_cli.model.graph import SHAPE_BYTES
from lsuv_cli.scaling.model_builder import ModelBuilder, own_prefix
from lsuv_cli.scaling.precision import HALF
from lsuv_cli.scaling.providers import PROVIDERS, Device
from lsuv_cli.scaling.runtime import Session
from working_copies import Source, graph_of

CPU = Device(PROVIDERS["cpu"], 0, 1)
FLOAT = helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", 4])


def builder_of(text, retype=None, rounded=None, **tensors):
    return ModelBuilder(graph_of(text, **tensors), "own:", {}, retype or {}, rounded)


def pulled(builder, *names):
    for name in names:
        builder.pull(name, lambda _: FLOAT)
    return builder.finish(names, ())


def run(made, **feeds):
    session = Session(made, CPU)
    kept, _ = session.run({name: ort.OrtValue.ortvalue_from_numpy(feeds[name]) for name in made.feeds})
    return [kept[name].numpy() for name in made.fetches]


DIAMOND = """g (float[N,4] x, float[N,4] z) => (y) {
    a = Neg(x) b = Abs(x) k = Neg(w) m = Mul(a, k) n = Mul(b, w) s = Add(m, n) t = Add(s, x) y = Relu(z) }"""


def test_everything_that_computes_a_value_is_added_once():
    made = pulled(builder_of(DIAMOND, w=normal(4)), "t")
    x, w = normal(6, 4, seed=1), normal(4)
    np.testing.assert_allclose(run(made, x=x)[0], x * w + np.abs(x) * w + x, rtol=1e-6, atol=1e-6)
    assert [i.name for i in made.proto.graph.input] == ["x"]
    assert [t.name for t in made.proto.graph.initializer] == ["w"]
    assert sorted(n.op_type for n in made.proto.graph.node) == ["Abs", "Add", "Add", "Mul", "Mul", "Neg", "Neg"]
    assert made.feeds == {"x": "x"}


def test_what_is_there_already_is_not_added_again():
    builder = builder_of(DIAMOND, w=normal(4))
    x, w = normal(6, 4, seed=1), normal(4)
    s, t = run(pulled(builder, "s", "t"), x=x)
    np.testing.assert_allclose(t, s + x, rtol=1e-6)
    assert len(builder.nodes) == 7
    builder = builder_of(DIAMOND, w=w)
    builder.types = {"s": FLOAT}
    builder.take("s", "given")
    made = pulled(builder, "t")
    assert made.feeds == {"s": "given", "x": "x"}
    assert [n.op_type for n in made.proto.graph.node] == ["Add"]


@pytest.mark.parametrize(("columns", "beside"), [(SHAPE_BYTES // 8, False), (SHAPE_BYTES // 8 + 1, True)])
def test_large_constants_are_handed_over_beside_the_model(columns, beside):
    """The numbers are in the order of their indices, whatever the order in memory."""
    stored = np.asfortranarray(normal(2, columns))
    builder = builder_of("g (float[N,4] x) => (y) { y = Relu(x) }")
    builder.constant("c", stored)
    builder.pull("x", lambda _: FLOAT)
    builder.nodes.append(helper.make_node("ReduceSum", ["x"], ["r"], keepdims=0))
    builder.nodes.append(helper.make_node("Mul", ["r", "c"], ["y"]))
    made = builder.finish(["y"], ())
    assert set(made.tensors) == ({"c"} if beside else set())
    np.testing.assert_allclose(run(made, x=np.full((1, 4), 0.5, "f"))[0], 2 * stored, rtol=1e-6)
    (held,) = made.proto.graph.initializer
    assert bool(held.raw_data) is not beside


class Elsewhere(Source):
    """Integers that are in another file."""

    def __init__(self, numbers):
        self.numbers = numbers

    def array(self, tensor):
        return self.numbers if tensor.name == "i" else super().array(tensor)


@pytest.mark.parametrize(("extra", "beside"), [(0, False), (1, True)])
@pytest.mark.parametrize("external", [False, True])
def test_other_constants_keep_their_type(extra, beside, external):
    numbers = np.arange(SHAPE_BYTES // 8 + extra)
    graph = graph_of(
        "g (float[N,4] x) => (y) { c = Cast<to=1>(i) y = Add(x, c) }", source=Elsewhere(numbers), i=numbers
    )
    if external:
        graph.tensors["i"].ClearField("raw_data")
        graph.tensors["i"].data_location = TensorProto.EXTERNAL
    builder = ModelBuilder(graph, "own:", {}, HALF)
    builder.need("c")
    builder.need("c")
    made = builder.finish(["c"], ())
    assert bool(made.tensors) == (external and beside)
    assert [t.data_type for t in made.proto.graph.initializer] == [TensorProto.INT64]
    np.testing.assert_array_equal(run(made)[0], numbers)


def test_half_precision_is_replaced_and_its_values_are_rounded():
    """1/3 in float16 and back in float32, on the way; the constant becomes float32."""
    text = "g (float16[N,4] x) => (y) { a = Add(x, c) y = Mul(a, a) }"
    builder = builder_of(text, HALF, {"a": TensorProto.FLOAT16}, c=np.array([1 / 3], np.float16))
    builder.pull("y", lambda _: FLOAT)
    made = builder.finish(["a", "y"], ())
    x = np.full((1, 4), 1 / 7, np.float32)
    a = (x + np.float32(np.float16(1 / 3))).astype(np.float16).astype(np.float32)
    found = run(made, x=x)
    np.testing.assert_array_equal(found[0], a)
    np.testing.assert_array_equal(found[1], a * a)


def test_names_of_nodes_are_unique_or_empty():
    builder = builder_of("g (float[N,4] x) => (y) { [n] a = Neg(x) [n] b = Neg(a) [m] c = Neg(b) y = Neg(c) }")
    assert [node.name for node in pulled(builder, "y").proto.graph.node] == ["n", "", "m", ""]


@pytest.mark.parametrize(("given", "expected"), [(3, 4), (4, 4), (8, 8)])
def test_the_version_of_the_format(given, expected):
    """From 4 on an initializer need not be an input."""
    graph = replace(graph_of("g (float[N,4] x) => (y) { y = Add(x, w) }", w=normal(4)), ir_version=given)
    builder = ModelBuilder(graph, "own:", {}, {})
    assert pulled(builder, "y").proto.ir_version == expected


def test_a_sparse_constant_has_the_name_that_its_readers_use():
    values = helper.make_tensor("", TensorProto.FLOAT, [2], [3.0, 5.0])
    indices = helper.make_tensor("at", TensorProto.INT64, [2], [0, 3])
    node = helper.make_node("Constant", [], ["w"], sparse_value=helper.make_sparse_tensor(values, indices, [2, 2]))
    graph = graph_of("g (float[N,2] x) => (y) { y = Relu(x) }")
    graph = replace(graph, sparse={"w": node.attribute[0].sparse_tensor}, constant=frozenset({"w"}))
    builder = ModelBuilder(graph, "own:", {}, {})
    builder.need("w")
    (held,) = builder.finish([], ()).proto.graph.sparse_initializer
    assert held.values.name == "w"
    np.testing.assert_array_equal(numpy_helper.to_array(held.values), [3, 5])
    np.testing.assert_array_equal(numpy_helper.to_array(held.indices), [0, 3])


@pytest.mark.parametrize(
    ("name", "expected"), [("x", "lsuv:"), ("lsuv:x", "_lsuv:"), ("_lsuv:x", "lsuv:"), ("a_lsuv:", "lsuv:")]
)
def test_names_of_values_that_are_added(name, expected):
    """No name in the graph starts with their prefix: of a node's values, an initializer, an input or a body's input."""
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["k"], ["k2"]), helper.make_node("Neg", ["v"], ["v2"])],
        "body",
        [info("i", TensorProto.INT64, []), info("k", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, [4])],
        [info("k2", TensorProto.BOOL, []), info("v2", TensorProto.FLOAT, [4])],
    )
    for place in ("input", "output", "tensor", "inside", "of a body"):
        names = {each: name if each == place else each for each in ("input", "output", "tensor", "inside", "of a body")}
        inner = onnx.GraphProto()
        inner.CopyFrom(body)
        inner.input[0].name = names["of a body"]
        inner.node[1].output[0] = inner.output[1].name = names["inside"]
        graph = replace(
            graph_of("g (float[4] x) => (y) { y = Relu(x) }"),
            inputs={names["input"]: info(names["input"], TensorProto.FLOAT, [4])},
            tensors={names["tensor"]: numpy_helper.from_array(normal(4))},
            nodes=(helper.make_node("Loop", ["n", "c", "x"], [names["output"]], body=inner),),
        )
        assert own_prefix(graph) == expected


def test_a_node_that_makes_two_constants_is_added_once():
    text = "g (float[N,2] x) => (y) { a, b = Split<num_outputs=2>(w) c = MatMul(x, a) y = Add(c, b) }"
    builder = builder_of(text, w=normal(4, 2))
    for name in ("a", "b"):
        builder.need(name)
    assert [node.op_type for node in builder.nodes] == ["Split"]


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("mean = Identity(m)", True),
        ("mean = Reshape(m, four)", True),
        ("u = Unsqueeze(m, zero) mean = Squeeze(u)", True),
        ("f = Flatten<axis=0>(m) mean = Reshape(f, four)", True),
        ("mean = Neg(m)", False),
        ("mean = Add(m, m)", False),
    ],
)
def test_running_statistics_are_kept_where_unoptimized_onnxruntime_keeps_them(body, kept):
    """It writes the new mean over the old one; then the next run begins with another mean."""
    text = f"""g (float[N,4] x) => (y, z) {{ {body}
        y, a, b = BatchNormalization<training_mode=1>(x, one, none, mean, one) z = Neg(a) }}"""
    stored = {"m": np.zeros(4, "f"), "none": np.zeros(4, "f"), "one": np.ones(4, "f"), "four": [4], "zero": [0]}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model(text, **stored).SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    first, second = (session.run(["z"], {"x": 5 + normal(10, 4)})[0] for _ in range(2))
    assert np.allclose(first, second) == (not kept)
    builder = builder_of(text, **stored)
    (node,) = (each for each in builder.graph.nodes if each.op_type == "BatchNormalization")
    assert builder.keeps(node) == kept
