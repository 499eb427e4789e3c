"""Odd but valid layers, and models of old operator sets: initialized right, left alone with a reason, or refused."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from helpers import entry, model, near_one, normal, variances
from lsuv_cli import initialize, inspect
from lsuv_cli.errors import LsuvError, ModelError

X = normal(64, 8, seed=1)


# Biases


KEPT: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "one number for a vector": ("y = MatMul(x, w) z = Add(y, b)", {"w": (8,), "b": (1,)}),
    "a vector's own length": ("y = MatMul(t, w) z = Add(y, b)", {"w": (64,), "b": (8,)}),
    "of a convolution along one axis": ("i = Unsqueeze(x, one) z = Conv(i, w, b)", {"w": (4, 1, 3), "b": (4,)}),
    "added to that": ("i = Unsqueeze(x, one) y = Conv(i, w) z = Add(y, b)", {"w": (4, 1, 3), "b": (4, 1)}),
    "one axis more than the output": ("y = MatMul(x, w) z = Add(y, b)", {"w": (8, 4), "b": (1, 1, 4)}),
    "two axes more": ("y = MatMul(x, w) z = Add(b, y)", {"w": (8, 4), "b": (1, 1, 1, 4)}),
    "three axes more": ("y = MatMul(x, w) z = Add(b, y)", {"w": (8, 4), "b": (1, 1, 1, 1, 4)}),
    "more and not of length one": ("y = MatMul(x, w) z = Add(b, y)", {"w": (8, 4), "b": (2, 1, 4)}),
    "a column": ("y = MatMul(w, t) z = Add(y, b)", {"w": (4, 8), "b": (4, 1)}),
    "no axis": ("y = Gemm(x, w, b) z = Relu(y)", {"w": (8, 4), "b": ()}),
}  # fmt: skip


@pytest.mark.parametrize("bias", ["zero", "keep"])
@pytest.mark.parametrize("kind", KEPT)
def test_biases_of_any_rank(kind, bias):
    nodes, shapes = KEPT[kind]
    tensors = {name: np.float32(0.5) * normal(*shape, seed=3) for name, shape in shapes.items()}
    proto = model(f"g (float[N,8] x) => (z) {{ t = Transpose<perm=[1,0]>(x) {nodes} }}", **tensors, one=np.array([1]))
    result = initialize(proto, X, bias=bias, batch_size="all")
    (layer,) = result.report.layers
    assert layer.status == "ok"
    found = variances(result.model, {"x": X}, [n.output[0] for n in proto.graph.node], reference=False)
    # Behind the Add where that is the layer's bias, and else in front of it.
    assert min(abs(found[name] - 1) for name in ("y", "z") if name in found) < 1e-3
    assert abs(min(found.values(), key=lambda v: abs(v - layer.variance)) - layer.variance) < 1e-3


# Einsum


@pytest.mark.parametrize(
    "equation",
    ["nd,dk->nk", "...d,dk->...k", "nd , dk -> nk", "nd,dk", "nd,dk->", "nd,dk->kn", "nd,dd->nd", "nd,dd->n",
     "nd,dk->d", "nd,kk->nd", "Nd,dK->NK", "...,...->...", "ab,bc->abc", "nd,nk->dk"],
)  # fmt: skip
def test_einsum_of_every_kind_is_scaled_or_left_alone_with_a_reason(equation):
    proto = model(f'g (float[N,8] x) => (z) {{ y = Einsum<equation="{equation}">(x, w) z = Relu(y) q = MatMul(x, v) }}',
                  w=normal(8, 8), v=normal(8, 4))  # fmt: skip
    proto.graph.output.append(onnx.ValueInfoProto(name="q"))
    x = X[:8]
    result = initialize(proto, x, batch_size="all")
    layer = entry(result, "y")
    if layer.status == "skipped":
        assert layer.notes[0]
    else:
        assert near_one(variances(result.model, {"x": x}, ["y"], reference=False))
    assert near_one(variances(result.model, {"x": x}, ["q"], reference=False))


ABSURD = ["", ",", "->", "->->", "nd", "nd,", "n1,1k->nk", "nd,dk->nz", "....d,dk->nk", "n..d,dk->n", "nd,dk-",
          "🙂,🙂->🙂", "a" * 3000 + ",b->a", "nd,dk->nn", "nd;dk", ",".join("ab" for _ in range(500))]  # fmt: skip


@pytest.mark.parametrize("equation", ABSURD)
def test_an_absurd_einsum_is_refused_or_left_alone(equation):
    proto = model("g (float[N,8] x) => (y) { y = Einsum(x, w) }", w=normal(8, 8))
    proto.graph.node[0].attribute.append(helper.make_attribute("equation", equation))
    with pytest.raises(LsuvError) as told:
        initialize(proto, X)
    assert "internal error" not in str(told.value)
    try:
        assert inspect(proto).layers
    except LsuvError as why:
        assert "internal error" not in str(why)


# A recurrence written out


def test_both_directions_of_an_unrolled_lstm():
    """As keras writes a bidirectional LSTM with `unroll`: many uses of recurrent kernels, from a zero state."""
    steps, size = 10, 4
    nodes: list[str] = []
    for way in "fb":
        nodes.append(f"{way}h0 = Mul(x0, zero) {way}c0 = Mul(x0, zero)")
        for t in range(1, steps + 1):
            at = t if way == "f" else steps + 1 - t
            nodes.append(
                f"""{way}k{t} = MatMul(x{at}, {way}w) {way}u{t} = MatMul({way}h{t - 1}, {way}r)
                {way}z{t} = Add({way}k{t}, {way}u{t}) {way}i{t}, {way}g{t} = Split<axis=1, num_outputs=2>({way}z{t})
                {way}s{t} = Sigmoid({way}i{t}) {way}a{t} = Tanh({way}g{t}) {way}p{t} = Mul({way}s{t}, {way}a{t})
                {way}c{t} = Add({way}c{t - 1}, {way}p{t}) {way}h{t} = Tanh({way}c{t})"""
            )
    names = ", ".join(f"x{t}" for t in range(steps + 1))
    proto = model(
        f"""g (float[N,{steps + 1},{size}] x) => (y) {{ {names} = Split<axis=1, num_outputs={steps + 1}>(x)
        {" ".join(nodes)} y = Concat<axis=2>(fh{steps}, bh{steps}) }}""",
        zero=np.float32(0), **{f"{way}{k}": normal(size, 2 * size, seed=7) for way in "fb" for k in "wr"},
    )  # fmt: skip
    for node in proto.graph.node:
        for held in node.attribute:
            if node.op_type == "Split" and held.name == "axis" and node.input[0] != "x":
                held.i = 2
    x = normal(8, steps + 1, size)
    result = initialize(proto, x, batch_size="all")
    assert result.report.exit_code == 0
    for way in "fb":
        live = [f"{way}u{t}" for t in range(2, steps + 1)]  # the first use reads the zero state
        found = variances(result.model, {"x": x}, live, reference=False)
        assert abs(np.mean(list(found.values())) - 1) < 0.01
        assert {entry(result, name).status for name in [f"{way}u1", *live]} <= {"tied", "ok"}


# Operator sets 1 to 6


def old(opset, nodes, ir=3, **shapes):
    """A model of an old operator set from (operator, inputs, attributes), each node making v1, v2 and so on."""
    tensors = {name: normal(*shape, seed=len(name)) for name, shape in shapes.items()}
    made = [helper.make_node(op, inputs, [f"v{k}"], **held) for k, (op, inputs, held) in enumerate(nodes, 1)]
    infos = [helper.make_tensor_value_info("x", 1, [4, 8])]
    infos += [helper.make_tensor_value_info(name, 1, array.shape) for name, array in tensors.items()]
    graph = helper.make_graph(made, "g", infos, [onnx.ValueInfoProto(name=made[-1].output[0])],
                              [numpy_helper.from_array(array, name) for name, array in tensors.items()])  # fmt: skip
    graph.output[0].type.tensor_type.elem_type = 1
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


IMAGE = ("Reshape", ["x"], {"shape": [4, 1, 8]})
W = {"w": (8, 4)}
OLD = {
    "MatMul 1": old(1, [("MatMul", ["x", "w"], {})], **W),
    "MatMul 6": old(6, [("MatMul", ["x", "w"], {}), ("Relu", ["v1"], {})], **W),
    "Add with broadcast 1": old(1, [("MatMul", ["x", "w"], {}), ("Add", ["v1", "b"], {"broadcast": 1})], **W, b=(4,)),
    "Add with broadcast 6": old(6, [("MatMul", ["x", "w"], {}), ("Add", ["v1", "b"], {"broadcast": 1})], **W, b=(4,)),
    "Add with axis 6": old(
        6, [("MatMul", ["x", "w"], {}), ("Add", ["v1", "b"], {"broadcast": 1, "axis": 1})], **W, b=(4,)),
    "Gemm with broadcast 1": old(1, [("Gemm", ["x", "w", "b"], {"broadcast": 1})], **W, b=(4,)),
    "Gemm with broadcast 6": old(6, [("Gemm", ["x", "w", "b"], {"broadcast": 1})], **W, b=(4,)),
    "Reshape attribute 1": old(1, [IMAGE, ("Conv", ["v1", "w"], {})], w=(2, 1, 3)),
    "Relu with consumed inputs 1": old(
        1, [("MatMul", ["x", "w"], {}), ("Relu", ["v1"], {"consumed_inputs": [0]})], **W),
    "Dropout is_test 1": old(1, [("Dropout", ["x"], {"is_test": 1}), ("MatMul", ["v1", "w"], {})], **W),
    "Dropout is_test 6": old(6, [("Dropout", ["x"], {"is_test": 1}), ("MatMul", ["v1", "w"], {})], **W),
    "BatchNormalization is_test 6": old(
        6, [("MatMul", ["x", "w"], {}), ("BatchNormalization", ["v1", "s", "b", "m", "s"], {"is_test": 1})],
        **W, s=(4,), b=(4,), m=(4,)),
    "Concat without axis 1": old(1, [("MatMul", ["x", "w"], {}), ("Concat", ["v1", "v1"], {})], **W),
    "Mul with broadcast 5": old(5, [("MatMul", ["x", "w"], {}), ("Mul", ["v1", "c"], {"broadcast": 1})], **W, c=(1,)),
    "Sum 6": old(6, [("MatMul", ["x", "w"], {}), ("Sum", ["v1", "v1"], {})], **W),
    "Tile 1": old(1, [("MatMul", ["x", "w"], {}), ("Tile", ["v1", "n", "n"], {})], **W, n=(1,)),
    "Softmax 3": old(3, [("MatMul", ["x", "w"], {}), ("Softmax", ["v1"], {})], **W),
    "Conv 4": old(4, [("Unsqueeze", ["x"], {"axes": [1]}), ("Conv", ["v1", "w", "b"], {})], w=(2, 1, 3), b=(2,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", OLD)
def test_models_of_operator_sets_1_to_6_are_initialized_only_if_onnxruntime_runs_them(kind, tmp_path):
    x, proto, output = normal(4, 8), OLD[kind], tmp_path / "o.onnx"
    try:
        ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    except Exception:
        with pytest.raises(ModelError):
            initialize(proto, x, output=output)
        assert not output.exists()
        return
    result = initialize(proto, x, output=output)
    assert {layer.status for layer in result.report.layers} == {"ok"}
    session = ort.InferenceSession(output.read_bytes(), providers=["CPUExecutionProvider"])
    w = numpy_helper.to_array(next(t for t in onnx.load(output).graph.initializer if t.name == "w")).astype(np.float64)
    if w.ndim == 2:
        assert abs((x @ w).var() - 1) < 1e-3
    assert np.isfinite(session.run(None, {"x": x})[0]).all()


def test_both_kinds_are_among_them():
    refused = 0
    for proto in OLD.values():
        try:
            ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception:
            refused += 1
    assert 3 < refused < len(OLD) - 3


def test_a_shared_weight_whose_first_use_is_dead_and_whose_other_use_is_small():
    """The state is zero at first, as in an unrolled recurrence; the scale is that of the use which has a signal."""
    text = """g (float[N,8] x) => (y) {
        z = Mul(x, zero) a = MatMul(z, w) p = MatMul(x, u) t = Tanh(p) k = Mul(t, small) s = Add(a, k)
        y = MatMul(s, w) }"""
    proto = model(text, w=normal(8, 8), u=normal(8, 8, seed=1), zero=np.float32(0), small=np.float32(0.1))
    x = normal(64, 8, seed=2)
    result = initialize(proto, x)
    assert near_one(variances(result.model, {"x": x}, ["y"], reference=False))


def test_values_of_a_model_that_the_cpu_does_not_run_as_it_is(tmp_path):
    """onnxruntime has no bfloat16 products on the CPU; values are those of float32, rounded as they would be stored."""
    narrow = ml_dtypes.bfloat16
    proto = model("""g (bfloat16[N,8] x) => (bfloat16[N,4] y) { a = MatMul(x, u) r = Relu(a) y = MatMul(r, w) }""",
                  u=normal(8, 8).astype(narrow), w=normal(8, 4).astype(narrow))  # fmt: skip
    x = normal(16, 8, seed=2).astype(narrow).astype(np.float32)
    inspect(proto, x, dump=tmp_path / "values")
    found = {path.stem[4:]: np.load(path) for path in (tmp_path / "values").glob("*.npy")}
    a = (x @ normal(8, 8).astype(narrow).astype(np.float32)).astype(narrow).astype(np.float32)
    y = (np.maximum(a, 0) @ normal(8, 4).astype(narrow).astype(np.float32)).astype(narrow).astype(np.float32)
    np.testing.assert_allclose(found["a"], a, rtol=1e-2)
    np.testing.assert_allclose(found["y"], y, rtol=2e-2, atol=1e-2)


def test_indices_in_a_data_file(tmp_path):
    """Tensors of integers, small and large, are read from the file too."""
    text = (
        "g (float[N,8] x) => (y) { g = Gather<axis=1>(x, i) h = Gather<axis=1>(g, j) k = Add(h, d) y = MatMul(k, w) }"
    )
    proto = model(text, w=normal(200, 4), d=normal(200), i=np.arange(40) % 8, j=np.arange(200) % 40)
    onnx.save_model(proto, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    x = normal(32, 8, seed=2)
    initialize(tmp_path / "m.onnx", x, output=tmp_path / "o.onnx")
    assert near_one(variances(onnx.load(tmp_path / "o.onnx"), {"x": x}, ["y"], reference=False))
