"""Every place in which a model can hold a tensor: stripped, no byte of it is left, and all are filled again."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from helpers import model, normal
from shell import lsuv

TEXT = """g (float[N,8] x, bool c) => (float[N,8] y) {
    k = Constant<value = float[1] {0.0}>() n = Constant<value_floats=[1.1, 2.2, 3.3, 4.4, 5.5, 6.6, 7.7, 8.8]>()
    a = MatMul(x, w) b = Add(a, n) h = Cast<to=10>(b) i = MatMul(h, half) j = Cast<to=1>(i) l = MatMul(j, k)
    d = local.f(l)
    o = Scan<num_scan_inputs=1, body = s (float[8] si) => (float[8] so) { so = MatMul(si, within) }>(d)
    z = If (c) <then_branch = t () => (p) { p = MatMul(o, v) }, else_branch = e () => (q) { q = Relu(o) }>
    y = MatMul(z, v) }
    <domain: "local", opset_import: ["" : 18]>
    f <t> (p) => (r) { u = Constant<value = float[1] {0.0}>() m = MatMul(p, u) i = Constant<value: tensor = @t>()
        j = MatMul(m, i) r = Relu(j) }"""
LIST = np.array([1.1, 2.2, 3.3, 4.4, 5.5, 6.6, 7.7, 8.8], np.float32)


def places():
    """A model, and all of its tensors: the branch's v hides the graph's, t is the default of a function's attribute."""
    held = {name: normal(8, 8, seed=20 + k) for k, name in enumerate(["w", "v", "k", "u", "inner", "t", "within"])}
    held["half"] = normal(8, 8, seed=30, dtype=np.float16)
    made = model(TEXT, **{name: held[name] for name in ("w", "v", "half")})
    made.graph.node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(held["k"], "k"))
    made.functions[0].node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(held["u"], "u"))
    del made.functions[0].attribute[:]
    made.functions[0].attribute_proto.append(helper.make_attribute("t", numpy_helper.from_array(held["t"], "t")))
    (scanning,) = [node for node in made.graph.node if node.op_type == "Scan"]
    (body,) = [held_graph.g for held_graph in scanning.attribute if held_graph.name == "body"]
    body.initializer.append(numpy_helper.from_array(held["within"], "within"))
    (branching,) = [node for node in made.graph.node if node.op_type == "If"]
    branching.attribute[0].g.initializer.append(numpy_helper.from_array(held["inner"], "v"))
    sparse = made.graph.sparse_initializer.add(dims=[8, 8])
    held["sparse"] = normal(5, seed=31)
    sparse.values.CopyFrom(numpy_helper.from_array(held["sparse"], "sparse"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(5)))
    return made, {**held, "list": LIST}


@pytest.mark.parametrize("external", [False, True])
def test_no_byte_is_left_of_a_tensor_wherever_it_is(tmp_path, external):
    made, held = places()
    stored: Any = {"save_as_external_data": True, "size_threshold": 0, "convert_attribute": True, "location": "m.bin"}
    onnx.save_model(made, tmp_path / "m.onnx", **(stored if external else {}))
    done = lsuv("strip", tmp_path / "m.onnx", "-o", tmp_path / "s.onnx")
    assert done.code == 0, done.err
    assert f"{len(held)} tensors of {sum(a.nbytes for a in held.values()):,} bytes stripped" in done.err
    content = (tmp_path / "s.onnx").read_bytes()
    for name, array in held.items():
        raw = array.tobytes()
        assert not any(raw[at : at + 4] in content for at in range(0, len(raw), 4)), name
    for k in (1, 2):
        words = ["--data", "random", "--data", "c=1", "--seed", 5, "-o", tmp_path / f"f{k}.onnx"]
        done = lsuv("init", tmp_path / "s.onnx", *words)
        assert done.code == 0, done.err
        assert f"{len(held)} tensors had no values" in done.err
    assert (tmp_path / "f1.onnx").read_bytes() == (tmp_path / "f2.onnx").read_bytes()
