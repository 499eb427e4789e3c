"""The values of layers for other tools: `expose` and `inspect --dump`."""

import json

import numpy as np
import onnx
import pytest

from helpers import model, normal, square, values
from lsuv_cli import LsuvError, expose, inspect
from shell import RELU, lsuv

TWO = """g (float[N,8] x) => (float[N,8] y) {
    a = MatMul(x, w) c = Add(a, b) r = Relu(c) y = MatMul(r, v) }"""


def two(**more):
    return model(TWO, b=normal(8), **square("w", "v"), **more)


def test_layers_outputs_become_typed_outputs_in_order():
    exposed = expose(two())
    assert exposed.outputs == {"a": "c", "y": "y"}
    assert [o.name for o in exposed.model.graph.output] == ["y", "c"]
    kind = exposed.model.graph.output[1].type.tensor_type
    assert kind.elem_type == onnx.TensorProto.FLOAT
    assert [d.dim_param or d.dim_value for d in kind.shape.dim] == ["N", 8]
    onnx.checker.check_model(exposed.model, full_check=True)


def dims(info):
    return [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim]


def test_shapes_of_exposed_outputs_follow_small_constants_and_what_the_model_declares():
    text = "g (float[N,8] x) => (y) { r = Reshape(x, s) a = MatMul(r, w) t = Tanh(a) y = MatMul(t, v) }"
    made = expose(model(text, s=np.array([3, 2, 4]), w=normal(4, 5), v=normal(5, 6)), include=["a"]).model
    assert [dims(o) for o in made.graph.output if o.name == "a"] == [[3, 2, 5]]
    unknown = model("g (float[N,8] x) => (y) { r = other.Mine(x) a = MatMul(r, w) y = Relu(a) }", w=normal(4, 5))
    unknown.opset_import.append(onnx.helper.make_opsetid("other", 1))
    unknown.graph.value_info.append(onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["M", 4]))
    made = expose(unknown).model
    assert [dims(o) for o in made.graph.output if o.name == "a"] == [["M", 5]]


def test_an_exposed_model_computes_what_the_model_does():
    x = normal(5, 8)
    before = values(two(), {"x": x}, ["y", "c"], reference=True)
    exposed = expose(two()).model
    found = values(exposed, {"x": x}, ["y", "c"], reference=True)
    np.testing.assert_array_equal(found["y"], before["y"])
    np.testing.assert_array_equal(found["c"], before["c"])


def test_expose_as_a_command_leaves_all_else_as_it_was(tmp_path):
    done = lsuv("expose", RELU, "-o", tmp_path / "e.onnx", "--include", "conv1*")
    assert done.code == 0
    given, made = onnx.load(RELU), onnx.load(tmp_path / "e.onnx")
    names = [o.name for o in made.graph.output]
    assert len(names) == len(given.graph.output) + 3
    for proto in (given, made):
        del proto.graph.output[:]
        del proto.graph.value_info[:]
    assert made == given
    again = lsuv("expose", RELU, "-o", tmp_path / "e.onnx")
    assert again.code == 2
    assert "exists" in again.err


def test_layers_inside_functions_are_said_to_be_hidden():
    text = """g (float[N,8] x) => (float[N,8] y) { a = local.f(x, w) y = MatMul(a, v) }
        <domain: "local", opset_import: ["" : 18]> f (p, q) => (r) { m = MatMul(p, q) r = Relu(m) }"""
    exposed = expose(model(text, **square("w", "v")))
    assert list(exposed.outputs.values()) == ["y"]
    assert "inside functions" in exposed.warnings[0]


BRANCHES = """g (float[N,8] x, bool c) => (float[N,8] y) { a = MatMul(x, w) z = If (CONDITION) <
    then_branch = t () => (p) { p = MatMul(a, v) }, else_branch = e () => (q) { q = MatMul(a, u) }> y = Relu(z) }"""


def test_layers_of_branches_are_told():
    made = model(BRANCHES.replace("CONDITION", "c"), **square("w", "v", "u"))
    exposed = expose(made)
    assert exposed.outputs == {"a": "a"}
    assert exposed.warnings == ("not put out: p, q: it is inside the body of If z",)
    assert not expose(made, include="a").warnings
    with pytest.raises(LsuvError, match=r"no layer whose output can be put out \(not put out: q: it is inside"):
        expose(made, include="q")


def test_the_layer_of_the_branch_that_is_always_taken_is_put_out_and_the_other_told():
    made = model(BRANCHES.replace("CONDITION", "yes"), yes=np.array(True), **square("w", "v", "u"))
    exposed = expose(made)
    assert exposed.outputs == {"a": "a", "z": "z"}
    (warning,) = exposed.warnings
    assert "not put out: q: it is in the branch of If z that the data does not take" in warning
    x = normal(4, 8)
    found = values(exposed.model, {"x": x, "c": np.array(False)}, ["z"])["z"]
    np.testing.assert_allclose(found, x @ normal(8, 8) @ normal(8, 8, seed=1), rtol=1e-4, atol=1e-5)


def test_recurrent_layers_and_quantized_weights_are_told():
    text = """g (float[T,N,8] x) => (float[T,N,8] y) { d, h = GRU<hidden_size=8>(x, i, r)
        k = MatMul(x, w) q = DequantizeLinear(b, scale) m = MatMul(k, q) y = Relu(m) }"""
    whole = np.arange(-32, 32, dtype=np.int8).reshape(8, 8)
    made = model(text, i=normal(1, 24, 8), r=normal(1, 24, 8), w=normal(8, 8), b=whole, scale=np.float32(0.1))
    exposed = expose(made)
    assert list(exposed.outputs) == ["k"]
    assert exposed.warnings[0] == "not put out: d: it is recurrent (GRU)"
    assert exposed.warnings[1].startswith("not put out: m: its weight is quantized")


def test_no_layer_to_expose():
    with pytest.raises(LsuvError, match="matches no layer"):
        expose(two(), include="nothing")


def test_external_weights_go_with_the_exposed_model(tmp_path):
    onnx.save_model(two(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.bin")
    assert expose(tmp_path / "m.onnx", tmp_path / "e.onnx").model is None
    x = normal(3, 8)
    found = values(onnx.load(tmp_path / "e.onnx"), {"x": x}, ["c"])
    np.testing.assert_array_equal(found["c"], values(two(), {"x": x}, ["c"])["c"])


# --dump


def test_dumped_values_are_those_of_the_reference_evaluator(tmp_path):
    x = normal(70, 8)
    inspect(two(), x, dump=tmp_path / "values", batch_size=32, limit=50)
    listed = json.loads((tmp_path / "values" / "layers.json").read_text())
    assert [(entry["layer"], entry["value"], entry["shape"]) for entry in listed] == [
        ("a", "c", [50, 8]),
        ("y", "y", [50, 8]),
    ]
    expected = values(two(), {"x": x[:50]}, ["c", "y"], reference=True)
    for entry in listed:
        found = np.load(tmp_path / "values" / entry["file"])
        np.testing.assert_allclose(found, expected[entry["value"]], rtol=1e-5, atol=1e-6)


def test_batches_of_several_shapes_go_to_several_files(tmp_path):
    proto = model("g (float[N,T,8] x) => (float[N,T,8] y) { y = MatMul(x, w) }", w=normal(8, 8))
    inspect(proto, [normal(2, 3, 8), normal(2, 5, 8)], dump=tmp_path / "d")
    shapes = {path.name: np.load(path).shape for path in (tmp_path / "d").glob("*.npy")}
    assert shapes == {"000-y.npy": (2, 3, 8), "000-y-2.npy": (2, 5, 8)}


def test_half_precision_is_dumped(tmp_path):
    proto = model("g (float16[N,8] x) => (float16[N,8] y) { y = MatMul(x, w) }", w=normal(8, 8, dtype=np.float16))
    inspect(proto, normal(4, 8, dtype=np.float16), dump=tmp_path / "d")
    assert np.load(tmp_path / "d" / "000-y.npy").shape == (4, 8)


def test_dump_as_a_command(tmp_path):
    data = RELU.with_suffix(".npy")
    done = lsuv("inspect", RELU, "--data", data, "--limit", 2, "--dump", tmp_path / "d", "--include", "ip*")
    assert done.code == 0, done.err
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["000-ip1.npy", "001-ip2.npy", "layers.json"]
    again = lsuv("inspect", RELU, "--data", data, "--limit", 2, "--dump", tmp_path / "d")
    assert again.code == 2
    assert "no empty directory" in again.err
    without = lsuv("inspect", RELU, "--dump", tmp_path / "e")
    assert without.code == 2
    assert "give --data" in without.err
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_large_weights_go_with_the_exposed_model(tmp_path):
    made = model("g (float[N,80] x) => (float[N,80] y) { c = MatMul(x, w) y = Relu(c) }", w=normal(80, 80))
    onnx.save(made, tmp_path / "m.onnx")
    exposed = expose(tmp_path / "m.onnx", tmp_path / "e.onnx")
    assert exposed.model == onnx.load(tmp_path / "e.onnx")
    assert exposed.to_bytes() == (tmp_path / "e.onnx").read_bytes()
    assert expose(tmp_path / "m.onnx").model == exposed.model
    assert expose(made).to_bytes() == exposed.to_bytes()
    assert values(exposed.model, {"x": np.eye(80, dtype=np.float32)}, ["c"])["c"] == pytest.approx(normal(80, 80))


def test_outputs_of_large_weights_are_dumped(tmp_path):
    made = model("g (float[N,80] x) => (float[N,80] y) { c = MatMul(x, w) y = Relu(c) }", w=normal(80, 80))
    onnx.save(made, tmp_path / "m.onnx")
    inspect(tmp_path / "m.onnx", np.eye(80, dtype=np.float32), dump=tmp_path / "d")
    (path,) = (tmp_path / "d").glob("*.npy")
    assert np.load(path) == pytest.approx(normal(80, 80), abs=1e-6)
