"""Models without weights: stripped, filled, and what other tools make of them."""

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lsuv_cli.scaling.filling as filling
from helpers import model, normal, square, tensor, values, variances
from lsuv_cli import LsuvError, expose, initialize, inspect, strip
from lsuv_cli.model.file import load
from shell import RELU, lsuv

MARK = "TRT_WEIGHTLESS"
NET = """g (int64[N,T] ids, float[N,3,8,8] x) => (float[N,6] y) {
    c = Conv<pads=[1,1,1,1]>(x, k, kb) n = BatchNormalization(c, s, h, m, d) p = PRelu(n, a)
    g = GlobalAveragePool(p) f = Flatten(g)
    e = Gather(table, ids) q = Add(e, pos) l = LayerNormalization(q, ls, lb) z = ReduceMean<keepdims=0>(l, one)
    u = Concat<axis=1>(f, z) v = MatMul(u, w) t = Add(v, wb) r = Mul(t, half) y = Clip(r, low, high) }"""


def tensors():
    return {
        "k": normal(4, 3, 3, 3), "kb": normal(4, seed=1), "s": normal(4, seed=2), "h": normal(4, seed=3),
        "m": normal(4, seed=4), "d": np.abs(normal(4, seed=5)) + 1, "a": normal(4, 1, 1, seed=6),
        "table": normal(20, 5, seed=7), "pos": normal(1, 7, 5, seed=8), "ls": normal(5, seed=9),
        "lb": normal(5, seed=10),
        "one": np.array([1]), "w": normal(9, 6, seed=11), "wb": normal(6, seed=12), "half": np.float32(0.5),
        "low": np.float32(-9), "high": np.float32(9),
    }  # fmt: skip


def net():
    return model(NET, **tensors())


DATA = {"ids": np.arange(16 * 7).reshape(16, 7) % 20, "x": normal(16, 3, 8, 8)}


def test_no_bytes_of_a_stripped_tensor_are_in_the_file(tmp_path):
    onnx.save(net(), tmp_path / "m.onnx")
    done = lsuv("strip", tmp_path / "m.onnx", "-o", tmp_path / "s.onnx")
    assert done.code == 0, done.err
    content = (tmp_path / "s.onnx").read_bytes()
    stripped = set(strip(net()).roles)
    assert stripped == {"k", "kb", "s", "h", "m", "d", "a", "table", "pos", "ls", "lb", "w", "wb"}
    for name in stripped:
        raw = tensors()[name].tobytes()
        assert not any(raw[at : at + 4] in content for at in range(0, len(raw), 4)), name
    assert len(content) < 2500


def test_names_types_shapes_and_graph_stay():
    given, small = net(), strip(net()).model
    assert [(t.name, t.data_type, t.dims) for t in small.graph.initializer] == [
        (t.name, t.data_type, t.dims) for t in given.graph.initializer
    ]
    assert small.graph.node == given.graph.node
    shapes = {i.name: i for i in onnx.shape_inference.infer_shapes(small).graph.value_info}
    assert [d.dim_value for d in shapes["c"].type.tensor_type.shape.dim[1:]] == [4, 8, 8]


def test_roles_are_told_by_the_readers():
    roles = strip(net()).roles
    assert roles == {
        "k": "weight", "kb": "bias", "s": "norm scale", "h": "bias", "m": "bias", "d": "running variance", "a": "slope",
        "table": "embedding", "pos": "table", "ls": "norm scale", "lb": "bias", "w": "weight", "wb": "bias",
    }  # fmt: skip


def test_a_stripped_model_is_filled_and_healthy():
    done = initialize(strip(net()).model, DATA)
    assert {layer.status for layer in done.report.layers} == {"ok"}
    found = variances(done.model, DATA)
    assert all(abs(variance - 1) < 0.01 for variance in found.values()), found
    for name, number in {"s": 1, "h": 0, "m": 0, "d": 1, "ls": 1, "lb": 0, "kb": 0, "wb": 0, "a": 0.25}.items():
        assert np.all(tensor(done.model, name) == number), name
    assert tensor(done.model, "table").var() == pytest.approx(1, abs=0.4)
    assert not any(MARK in t.doc_string for t in done.model.graph.initializer)
    assert "13 tensors had no values and were made by their role: 2 weights, 1 embedding" in done.report.warnings[0]


def test_equal_seeds_give_equal_bytes():
    small = strip(net()).model
    one, same, other = (
        initialize(small, "random", seed=seed, input_shapes="ids:[1,7]").to_bytes() for seed in (3, 3, 4)
    )
    assert one == same
    assert one != other


def test_the_whole_way_as_commands(tmp_path):
    assert lsuv("strip", RELU, "-o", tmp_path / "s.onnx").code == 0
    looked = lsuv("inspect", tmp_path / "s.onnx", "--data", "random")
    assert looked.code == 2
    assert "22 tensors have no values" in looked.err
    done = lsuv("init", tmp_path / "s.onnx", "--data", "random", "-o", tmp_path / "f.onnx")
    assert done.code == 0, done.err
    assert "22 tensors had no values and were made by their role: 11 weights, 11 biases" in done.err
    assert lsuv("check", tmp_path / "f.onnx", "--data", "random").code == 0
    again = lsuv("strip", tmp_path / "s.onnx", "-o", tmp_path / "t.onnx")
    assert again.code == 0
    assert (tmp_path / "t.onnx").read_bytes() == (tmp_path / "s.onnx").read_bytes()


def test_the_layers_of_a_stripped_model_are_seen_without_data(tmp_path):
    small = strip(net())
    whole, seen = inspect(net()), inspect(small.model)
    assert [(x.name, x.shape, x.status) for x in seen.layers] == [(x.name, x.shape, x.status) for x in whole.layers]
    assert {layer.weight_std for layer in seen.layers} == {None}
    assert any("tensors have no values" in warning for warning in seen.warnings)
    onnx.save(small.model, tmp_path / "s.onnx")
    assert "nan" not in lsuv("inspect", tmp_path / "s.onnx").out
    refused = lsuv("inspect", tmp_path / "s.onnx", "--data", "random")
    assert refused.code == 2
    assert "have no values" in refused.err


def test_a_stripped_model_can_be_exposed_and_filled():
    exposed = expose(strip(net()).model)
    done = initialize(exposed.model, DATA)
    assert [output.name for output in done.model.graph.output] == ["y", *exposed.outputs.values()]
    assert done.report.exit_code == 0


def test_keep_and_larger_than():
    kept = strip(net(), keep=["k*", "table"]).model
    np.testing.assert_array_equal(tensor(kept, "table"), tensors()["table"])
    np.testing.assert_array_equal(tensor(kept, "kb"), tensors()["kb"])
    assert set(strip(net(), larger_than=50).roles) == {"k", "table", "w"}
    with pytest.raises(LsuvError, match="matches no tensor"):
        strip(net(), keep="nothing")
    with pytest.raises(LsuvError, match="whole number"):
        strip(net(), larger_than=-1)


def test_structure_is_kept():
    mask = np.where(np.tri(4), 0, -np.inf).astype(np.float32)
    text = """g (float[N,4,4] x) => (float[N,A,B] y) {
        a = MatMul(x, w) b = Add(a, mask) c = Softmax(b) u = Unsqueeze(c, one)
        r = Resize<mode="nearest">(u, none, scales) y = Squeeze(r, one) }"""
    scales = np.array([1, 1, 2, 2], np.float32)
    given = model(text, w=normal(4, 4), mask=mask, one=np.array([1]), none=np.array([], np.float32), scales=scales)
    done = strip(given)
    assert set(done.roles) == {"w"}
    assert done.kept == ("mask", "scales")
    assert initialize(done.model, normal(8, 4, 4)).report.exit_code == 0


def test_weights_in_constants_bodies_functions_and_lists_are_stripped():
    text = """g (float[N,8] x) => (float[N,8] y) { k = Constant<value_floats=[1.5,2.5,3.5,4.5,5.5,6.5,7.5,8.5]>()
        a = local.f(x, w) b = Add(a, k) z = If (c) <
        then_branch = t () => (p) { p = MatMul(b, v) }, else_branch = e () => (q) { q = Relu(b) }> y = Relu(z) }
        <domain: "local", opset_import: ["" : 18]> f (p, q) => (r) { m = MatMul(p, q) r = Relu(m) }"""
    given = model(text, c=np.array(True), **square("w", "v"))
    inner = given.graph.node[3].attribute[0].g
    inner.initializer.append(numpy_helper.from_array(normal(8, seed=5), "inner"))
    small = strip(given).model
    content = small.SerializeToString()
    assert np.float32(7.5).tobytes() not in content
    assert normal(8, seed=5)[:1].tobytes() not in content
    assert initialize(small, normal(32, 8)).report.exit_code == 0


FUNCTION = """g (float[N,8] x) => (float[N,8] y) { y = local.f(x) } <domain: "local", opset_import: ["" : 18]>
    f (p) => (r) { v = Constant<value = float[1] {0.0}>() m = MatMul(p, v) a = Relu(m) r = MatMul(a, v) }"""


def test_a_model_all_of_whose_weights_are_in_functions_is_filled():
    given = model(FUNCTION)
    given.functions[0].node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(normal(8, 8, seed=5)))
    small = strip(given)
    assert normal(8, 8, seed=5)[0, :1].tobytes() not in small.to_bytes()
    done = initialize(small.model, normal(64, 8))
    v = numpy_helper.to_array(done.model.functions[0].node[0].attribute[0].t).astype(np.float64)
    assert (normal(64, 8) @ v).var() == pytest.approx(1, rel=1e-3)
    assert [layer.status for layer in done.report.layers] == ["ok", "tied"]


def test_a_stripped_model_without_a_layer_that_can_be_initialized_is_filled_and_says_so(tmp_path):
    """Layers of quantized weights are none of LSUV's, yet all values can be made."""
    onnx.save(strip(quantized("int8", scalar=False)).model, tmp_path / "s.onnx")
    done = lsuv("init", tmp_path / "s.onnx", "--data", "random", "-o", tmp_path / "f.onnx")
    assert done.code == 1
    assert "2 tensors had no values" in done.err
    assert "its weight is quantized" in done.err
    found = values(onnx.load(tmp_path / "f.onnx"), {"x": normal(256, 64)}, ["y"])["y"]
    assert 0.4 < found.var() < 2.5


def test_sparse_and_quantized_weights_are_stripped():
    sparse = onnx.SparseTensorProto(dims=[8, 8])
    sparse.values.CopyFrom(numpy_helper.from_array(normal(3), "s"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([1, 9, 20])))
    text = """g (float[N,8] x) => (float[N,8] y) {
        q = DequantizeLinear<axis=1>(i, scale, zero) a = MatMul(x, q) b = MatMul(a, w) y = Relu(b) }"""
    whole = np.arange(-32, 32, dtype=np.int8).reshape(8, 8)
    given = model(text, i=whole, scale=np.abs(normal(8)), zero=np.zeros(8, np.int8), w=normal(8, 8))
    given.graph.sparse_initializer.append(sparse)
    done = strip(given)
    assert done.roles["i"] == "quantized weight"
    assert done.roles["scale"] == "quantization scale"
    assert whole.tobytes()[:8] not in done.to_bytes()
    assert normal(3)[:1].tobytes() not in done.to_bytes()
    filled = initialize(done.model, normal(64, 8)).model
    assert np.all(np.isfinite(values(filled, {"x": normal(4, 8)}, ["y"])["y"]))


QUANTIZED = {
    "int8": "q = DequantizeLinear<axis=1>(i, scale) y = MatMul(x, q)",
    "int4": "q = DequantizeLinear<axis=1>(i, scale) y = MatMul(x, q)",
    "uint4": "q = DequantizeLinear<axis=1>(i, scale, zero) y = MatMul(x, q)",
    "float8": "q = DequantizeLinear<axis=1>(i, scale) y = MatMul(x, q)",
    "packed": "y = com.microsoft.MatMulNBits<K=64, N=64, bits=4, block_size=32>(x, i, scale, zero)",
}


def quantized(kind: str, scalar: bool):
    """A product with a quantized weight of 64 by 64, as it is behind each of the operators that read one."""
    text = f"g (float[N,64] x) => (float[N,64] y) {{ {QUANTIZED[kind]} }}"
    scale = np.float32(0.05) if scalar else np.full(64, 0.01, np.float32)
    given = model(text.replace("<axis=1>", "") if scalar else text, scale=scale)
    given.opset_import[0].version = 21
    given.ir_version = 10
    if kind == "packed":
        given.opset_import.add(domain="com.microsoft", version=1)
        made = [("i", TensorProto.UINT8, [64, 2, 16], 77), ("zero", TensorProto.UINT8, [64], 77)]
        given.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full(128, 0.01, np.float32), "scale"))
    else:
        type_of = {"int8": "INT8", "int4": "INT4", "uint4": "UINT4", "float8": "FLOAT8E4M3FN"}[kind]
        made = [("i", getattr(TensorProto, type_of), [64, 64], 3)]
        if kind == "uint4":
            made.append(("zero", TensorProto.UINT4, [] if scalar else [64], 3))
    for name, data_type, dims, value in made:
        given.graph.initializer.append(helper.make_tensor(name, data_type, dims, [value] * math.prod(dims)))
    return given


# MatMulNBits has a scale for each block, never a single one.
@pytest.mark.parametrize(
    ("kind", "scalar"), [(k, s) for k in QUANTIZED for s in (False, True) if k != "packed" or not s]
)
def test_quantized_weights_are_filled_so_that_the_signal_goes_through(kind, scalar):
    done = strip(quantized(kind, scalar))
    filled = load(done.model, without_weights=True)
    told = filling.fill(filled, seed=0)
    assert "quantized weight" in told
    found = values(filled.proto, {"x": normal(256, 64)}, ["y"])["y"]
    assert 0.4 < found.var() < 2.5
    assert abs(found.mean()) < 0.2


def test_a_model_whose_data_file_is_missing_can_be_stripped(tmp_path):
    made = model(
        "g (float[N,80] x) => (float[N,80] y) { a = MatMul(x, w) y = Add(a, b) }", w=normal(80, 80), b=normal(80)
    )
    onnx.save_model(made, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.bin")
    (tmp_path / "m.bin").unlink()
    refused = lsuv("init", tmp_path / "m.onnx", "--data", "random")
    assert "keep it beside the model, or let `lsuv init` make the values up with --without-weights" in refused.err
    done = lsuv("strip", tmp_path / "m.onnx", "-o", tmp_path / "s.onnx")
    assert done.code == 0, done.err
    assert "warning: the data file of 2 tensors is missing" in done.err
    assert initialize(tmp_path / "s.onnx", "random").report.exit_code == 0


def test_a_tied_embedding_gives_logits_of_variance_about_one():
    text = """g (int64[N,T] ids) => (float[N,T,V] y) {
        e = Gather(table, ids) l = LayerNormalization(e, s, b) h = MatMul(l, w) t = Transpose<perm=[1,0]>(table)
        n = LayerNormalization(h, s, b) y = MatMul(n, t) }"""
    small = strip(model(text, table=normal(500, 64), s=np.ones(64, "f"), b=np.ones(64, "f"), w=normal(64, 64)))
    assert small.roles["table"] == "tied embedding"
    done = initialize(small.model, "random")
    found = values(done.model, {"ids": np.arange(500)[None]}, ["y"])["y"]
    assert 0.2 < found.var() < 5


# Polygraphy


def test_polygraphys_mark_is_read():
    given = net()
    for name in ("k", "w", "table"):
        (held,) = [t for t in given.graph.initializer if t.name == name]
        held.raw_data = b""
        held.doc_string = f"{MARK}/" + ("SPARSE_2_4" if name == "w" else "")
    done = initialize(given, DATA)
    assert "3 tensors had no values" in done.report.warnings[0]
    np.testing.assert_array_equal(tensor(done.model, "s"), tensors()["s"])
    assert {layer.status for layer in done.report.layers} == {"ok"}


def test_our_mark_is_one_that_polygraphy_reads():
    """Its weight-reconstruct asks for the word in the doc_string, splits it at the one slash, and wants no raw_data."""
    for held in strip(net()).model.graph.initializer:
        if held.name in strip(net()).roles:
            assert MARK in held.doc_string
            _, sparse = held.doc_string.split("/")
            assert sparse == ""
            assert held.raw_data == b""


def test_a_tensor_without_values_and_without_a_mark_is_damaged():
    given = net()
    given.graph.initializer[0].raw_data = b""
    with pytest.raises(LsuvError, match="it is damaged"):
        initialize(given, DATA)


@pytest.mark.parametrize("dims", [[2**40, 2**40], [-1, 3, 3, 3], [2**62]])
def test_a_shape_that_cannot_be(dims):
    given = strip(net()).model
    (held,) = [t for t in given.graph.initializer if t.name == "k"]
    del held.dims[:]
    held.dims.extend(dims)
    with pytest.raises(LsuvError):
        initialize(given, DATA)


# Missing data files


def test_a_missing_data_file_is_made_up_only_if_asked(tmp_path):
    onnx.save_model(net(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.bin")
    (tmp_path / "m.bin").unlink()
    refused = lsuv("init", tmp_path / "m.onnx", "--data", "random", "--input-shapes", "ids:[1,7]")
    assert refused.code == 2
    assert "cannot be read" in refused.err
    refused = lsuv("init", tmp_path / "m.onnx", "--data", "random", "--without-weights")
    assert "of integers has no values" in refused.err
    one = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    for held in one.graph.initializer:
        if held.name in {"one", "half", "low", "high"}:
            held.CopyFrom(numpy_helper.from_array(tensors()[held.name], held.name))
    onnx.save(one, tmp_path / "m.onnx")
    done = lsuv("init", tmp_path / "m.onnx", "--data", "random", "--input-shapes", "ids:[1,7]", "--without-weights")
    assert done.code == 0, done.err
    assert "13 tensors had no values" in done.err


def test_a_large_model_is_filled_through_a_data_file(tmp_path, monkeypatch):
    monkeypatch.setattr(filling, "EMBEDDED", 100)
    small = strip(net()).model
    done = initialize(small, DATA, output=tmp_path / "f.onnx")
    assert done.model is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.onnx", "f.onnx.data"]
    monkeypatch.undo()
    embedded = initialize(small, DATA).model
    written = onnx.load(tmp_path / "f.onnx")
    for name in tensors():
        np.testing.assert_array_equal(tensor(written, name), tensor(embedded, name))


def test_external_weights_are_stripped(tmp_path):
    onnx.save_model(net(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.bin")
    strip(tmp_path / "m.onnx", tmp_path / "s.onnx", keep="table")
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "m.bin", "s.onnx"}
    small = onnx.load(tmp_path / "s.onnx")
    np.testing.assert_array_equal(tensor(small, "table"), tensors()["table"])
    assert initialize(small, DATA).report.exit_code == 0


def test_graphs_for_training_are_removed():
    given = model("g (float[N,8] x) => (float[N,8] y) { y = MatMul(x, w) }", w=normal(8, 8))
    given.training_info.add().algorithm.initializer.append(numpy_helper.from_array(normal(9), "momentum"))
    done = strip(given)
    assert not done.model.training_info
    assert "graphs for training" in done.warnings[0]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE])
def test_other_float_types_are_filled_in_their_own_type(kind):
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    name = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16", TensorProto.DOUBLE: "double"}[kind]
    text = f"g ({name}[N,8] x) => ({name}[N,8] y) {{ a = MatMul(x, w) y = Add(a, b) }}"
    given = model(text, w=normal(8, 8).astype(dtype), b=normal(8).astype(dtype))
    done = initialize(strip(given).model, "random")
    assert [t.data_type for t in done.model.graph.initializer] == [kind, kind]
    assert done.report.layers[0].status == "ok"
    assert math.isclose(done.report.layers[0].variance, 1, abs_tol=0.02)


LARGE = (
    "g (float[N,80] x) => (float[N,80] y) { v = Constant<value = float[1] {0.0}>() a = MatMul(x, w) y = MatMul(a, v) }"
)


def large():
    """A model with two weights of 25,600 bytes, which stay in the file: an initializer and a Constant's value."""
    made = model(LARGE, w=normal(80, 80))
    made.graph.node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(normal(80, 80, seed=1), "v"))
    return made


@pytest.mark.parametrize("given", ["file", "bytes", "message"])
def test_large_tensors_are_stripped_or_kept_whole(tmp_path, given):
    onnx.save(large(), tmp_path / "m.onnx")
    source = {"file": tmp_path / "m.onnx", "bytes": large().SerializeToString(), "message": large()}[given]
    done = strip(source, tmp_path / "s.onnx", keep="w")
    written = onnx.load(tmp_path / "s.onnx")
    assert set(done.roles) == {"v"}
    assert done.kept == ("w",)
    assert done.bytes == 80 * 80 * 4
    np.testing.assert_array_equal(tensor(written, "w"), normal(80, 80))
    assert done.model == written
    assert strip(source, keep="w").to_bytes() == (tmp_path / "s.onnx").read_bytes()
    assert len(strip(source).to_bytes()) < 1000


def test_a_large_tensor_with_values_and_a_mark_has_values():
    marked = large()
    marked.graph.initializer[0].doc_string = f"{MARK}/"
    assert not load(marked).absent
    assert strip(marked, keep="w").kept == ("w",)


def test_a_large_stripped_model_is_filled(tmp_path):
    strip(large(), tmp_path / "s.onnx", keep="v")
    done = initialize(tmp_path / "s.onnx", {"x": normal(64, 80)}, output=tmp_path / "f.onnx")
    assert "1 tensors had no values" in done.report.warnings[0]
    found = variances(onnx.load(tmp_path / "f.onnx"), {"x": normal(64, 80)})
    assert all(abs(variance - 1) < 0.01 for variance in found.values()), found


def test_a_page_names_the_files_that_were_given_only(tmp_path, monkeypatch):
    monkeypatch.setattr(filling, "EMBEDDED", 100)
    strip(large(), tmp_path / "s.onnx")
    done = initialize(tmp_path / "s.onnx", {"x": normal(64, 80)}, output=tmp_path / "f.onnx", details=True)
    assert (tmp_path / "f.onnx.data").exists()
    assert list(done.report.details.files) == ["s.onnx"]
