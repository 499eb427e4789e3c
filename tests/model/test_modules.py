"""PyTorch modules by scopes and metadata, and who reads a tensor."""

import numpy as np
import pytest
from onnx import helper

from helpers import model, normal, square, values
from lsuv_cli import initialize
from lsuv_cli.model.constants import readers_of
from lsuv_cli.model.modules import SCOPES, Modules, _scope, parameters, spelled_out
from working_copies import graph_of


def module(name, weight="", stored=(), metadata=None):
    tensors = {each: normal(2) for each in stored}
    text = "g (float[N,2] x) => (y) { y = Relu(x) }"
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name)
    if metadata is not None:
        node.metadata_props.add(key=SCOPES, value=metadata)
    return Modules(graph_of(text, **tensors)).of(node, weight)


@pytest.mark.parametrize(
    ("name", "weight", "stored", "expected"),
    [
        ("/fc/MatMul", "", ["fc.weight"], "fc"),
        ("/fc/MatMul", "", ["net.fc.weight"], "net.fc"),  # a container that is never called has no scope
        ("/fc/MatMul", "b.fc.weight", ["a.fc.weight", "b.fc.weight"], "b.fc"),
        ("/fc/MatMul", "", ["a.fc.weight", "b.fc.weight"], "fc"),
        ("/fc/MatMul", "x.weight", ["a.fc.weight", "b.fc.weight"], "fc"),
        ("/fc_1/MatMul", "", ["fc.weight"], "fc"),  # the second call
        ("/layer1/layer1.0/conv1/Conv", "", ["layer1.0.conv1.weight", "layer2.0.conv1.weight"], "layer1.0.conv1"),
        ("/layer2/layer2.0/conv1/Conv", "", ["layer1.0.conv1.weight", "layer2.0.conv1.weight"], "layer2.0.conv1"),
        ("/d1/d1.0/MatMul", "", [], "d1.0"),
        ("/MatMul", "", ["fc.weight"], ""),
        ("fc/MatMul", "", ["fc.weight"], ""),
        ("", "", ["fc.weight"], ""),
    ],
)
def test_modules_by_the_scopes_in_a_name(name, weight, stored, expected):
    assert module(name, weight, stored) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [("['', 'net', 'net.fc', 'matmul']", "net.fc"), ("['fc', 'matmul']", "fc"), ("['matmul']", ""), ("nonsense[", "")],
)
def test_modules_by_metadata(metadata, expected):
    assert module("/other/MatMul", metadata=metadata) == expected


def test_names_that_exporters_make_up():
    stored = [
        "fc.weight",
        "onnx::MatMul_12",
        "12",
        "val_3",
        "t_7",
        "_v_2",
        "/fc/Transpose_output_0",
        "const_fold_opt__5",
    ]
    text = "g (float[N,2] x) => (y) { m = Identity(a) y = Relu(x) }"
    graph = graph_of(text, **{name: normal(2) for name in ["a", *stored]})
    assert parameters(graph) == {"fc.weight", "a", "m"}
    assert Modules(graph).is_known("fc")
    assert not Modules(graph).is_known("fc.weight")


def test_paths_that_scopes_spell_out():
    assert spelled_out(["d1", "d1.0", "fc"]) == "d1.0.fc"
    assert spelled_out(["d", "d1", "fc"]) == "d.d1.fc"
    assert spelled_out([]) == ""


@pytest.mark.parametrize(
    ("path", "expected"),
    [("fc", "fc"), ("a.fc", "fc"), ("a.0", "a.0"), ("b.a.0.1", "a.0.1"), ("0.fc", "fc"), ("0", "0"), ("0.1", "0.1")],
)
def test_the_scope_of_a_module(path, expected):
    assert _scope(tuple(path.split("."))) == expected


# Who reads a tensor


def test_readers_through_views_and_bodies():
    text = """g (float[N,8] x, bool c) => (y, q) {
        t = Transpose(w) a = MatMul(x, t) b = Mul(w, w) s = Shape(w)
        y = If (c) <then_branch = p () => (float[8,8] u) { u = Add(w, w) },
                    else_branch = e () => (float[8,8] v) { v = Identity(b) }>
        q = Identity(w) }"""
    graph = graph_of(text, **square("w"))
    place = {node.output[0]: k for k, node in enumerate(graph.nodes)}
    found = sorted(readers_of(graph, "w"))
    assert found == sorted([(place["a"], "t"), (place["b"], "w"), (place["b"], "w"), (place["y"], "w"), (-1, "q")])


def test_a_body_and_an_input_of_one_node_are_two_readers():
    text = """g (float[8,8] x, int64 n, bool c) => (y) {
        y = Loop (n, c, w) <body = p (int64 i, bool k, float[8,8] a) => (bool k2, float[8,8] b) {
            k2 = Identity(k) b = Add(a, w) }> }"""
    graph = graph_of(text, **square("w"))
    assert list(readers_of(graph, "w")) == [(0, "w"), (0, "w")]


def test_batches_of_different_ranks():
    proto = model("g (float x) => (y) { a = MatMul(x, u) t = Tanh(a) y = MatMul(t, w) }", **square("u", "w"))
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    batches = [{"x": normal(20, 8)}, {"x": normal(3, 5, 8, seed=1)}]
    result = initialize(proto, batches)
    outputs = np.concatenate([values(result.model, batch, ["y"])["y"].ravel() for batch in batches])
    assert outputs.var() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", ["/fc/MatMul", "/fc_1/MatMul", "/fc_12/MatMul"])
def test_a_module_that_is_called_again_is_the_same_module(name):
    assert module(name, stored=["fc.weight", "fc.bias", "other.weight"]) == "fc"


def test_what_nodes_compute_is_no_parameter_of_a_module():
    text = "g (float[N,4] x) => (y) { i = Identity(x) n = Neg(w) m = Identity(w) a = MatMul(i, n) y = MatMul(a, m) }"
    assert parameters(graph_of(text, w=normal(4, 4))) == {"w", "m"}


def test_of_modules_that_fit_the_one_with_the_shortest_path_is_taken():
    stored = ["fc.weight", "block.fc.weight", "block.deep.fc.weight"]
    assert module("/fc/MatMul", stored=stored) == "fc"
    assert module("/block/fc/MatMul", stored=stored) == "block.fc"
