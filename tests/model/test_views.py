"""Where weights live: stored in every way, and behind nodes that only rename elements."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from helpers import entry, is_orthonormal, model, near_one, normal, tensor, unchanged_but, values, variances
from lsuv_cli import initialize, inspect
from lsuv_cli.model import views

X = normal(64, 8, seed=1)


def dense(weight_nodes, opset=18, ir=9, **tensors):
    """A MatMul whose weight `w` is made by the nodes given, from x of 8 to y of 4 features."""
    return model(f"g (float[N,8] x) => (float[N,4] y) {{ {weight_nodes} y = MatMul(x, w) }}", opset, ir, **tensors)


# Stored


def test_an_initializer():
    before = dense("", w=normal(8, 4))
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert is_orthonormal(tensor(after, "w"))
    assert unchanged_but(before, after, "w")


@pytest.mark.parametrize("field", ["float_data", "raw_data"])
def test_however_an_initializer_keeps_its_numbers(field):
    before = dense("", w=normal(8, 4))
    if field == "float_data":
        before.graph.initializer[0].CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, [8, 4], normal(8, 4).ravel()))
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert unchanged_but(before, after, "w")


def test_an_initializer_that_is_a_graph_input_too_as_ir_3_wants_it():
    before = dense("", opset=7, ir=3, w=normal(8, 4))
    assert [i.name for i in before.graph.input] == ["x", "w"]
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert unchanged_but(before, after, "w")


def test_an_initializer_that_a_caller_may_override():
    before = dense("", w=normal(8, 4))
    before.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [8, 4]))
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert unchanged_but(before, after, "w")


def test_a_constant_node():
    before = dense("")
    before.graph.node.insert(
        0, helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(normal(8, 4), "any name"))
    )
    result = initialize(before, X)
    assert entry(result, "y").place == "constant"
    assert near_one(variances(result.model, {"x": X}))
    assert is_orthonormal(tensor(result.model, "w"))
    assert unchanged_but(before, result.model, "w")


def test_a_constant_node_of_floats_behind_a_reshape():
    numbers = ", ".join(str(float(k)) for k in range(32))
    before = dense(f"c = Constant<value_floats=[{numbers}]>() s = Constant<value_ints=[8,4]>() w = Reshape(c, s)")
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert is_orthonormal(tensor(after, "c").reshape(8, 4))
    assert unchanged_but(before, after, "c")


def test_a_constant_node_of_one_float():
    before = model(
        """g (float[N,1] x) => (float[N,1] y) {
            c = Constant<value_float=7.0>() s = Constant<value_ints=[1,1]>() w = Reshape(c, s) y = MatMul(x, w) }"""
    )
    x = 0.1 * normal(64, 1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}))
    assert abs(abs(float(tensor(after, "c"))) - 1 / x.astype(np.float64).std()) < 1e-3


def test_a_weight_that_lies_where_one_expects_it_needs_no_note():
    text = "g (float[N,8] x) => (float[N,8] y) { a = MatMul(x, v) t = Relu(a) y = MatMul(t, w) }"
    report = initialize(model(text, v=normal(8, 8), w=normal(8, 8, seed=1)), X).report
    assert [layer.notes for layer in report.layers] == [(), ()]


@pytest.mark.parametrize("ir", [3, 9])
def test_a_constant_of_shape_is_folded(ir):
    before = dense("w = ConstantOfShape<value=float[1] {0.5}>(s)", opset=9, ir=ir, s=np.array([8, 4]))
    result = initialize(before, X)
    assert "weight folded into one tensor" in entry(result, "y").notes
    assert near_one(variances(result.model, {"x": X}))
    assert is_orthonormal(tensor(result.model, "w"))
    assert [n.op_type for n in result.model.graph.node] == ["MatMul"]
    onnx.checker.check_model(result.model)


# Behind views


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ("w = Identity(v)", (8, 4)),
        ("w = Transpose<perm=[1,0]>(v)", (4, 8)),
        ("w = Transpose(v)", (4, 8)),
        ("s = Constant<value_ints=[0,-1]>() w = Reshape(v, s)", (8, 2, 2)),
        ("w = Flatten<axis=2>(v)", (2, 4, 2, 2)),
        ("w = Flatten<axis=-1>(v)", (2, 4, 4)),
        ("a = Constant<value_ints=[0,-1]>() w = Squeeze(v, a)", (1, 8, 4, 1)),
        ("w = Squeeze(v)", (1, 8, 1, 4)),
        ("a = Constant<value_ints=[1]>() u = Unsqueeze(v, a) w = Squeeze(u, a)", (8, 4)),
        (
            """i = Identity(v) t = Transpose<perm=[2,0,1]>(i) c = Cast<to=1>(t) s = Constant<value_ints=[4,8]>()
               r = Reshape(c, s) j = Identity(r) w = Transpose(j)""",
            (2, 8, 2),
        ),
    ],
    ids=["identity", "transpose", "default perm", "reshape", "flatten", "flatten from the end", "squeeze",
         "squeeze all", "unsqueeze", "a long chain"],
)  # fmt: skip
def test_a_weight_behind_views_is_written_through_them(nodes, shape):
    before = dense(nodes, v=normal(*shape))
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert is_orthonormal(values(after, {"x": X}, ["w"])["w"])
    assert unchanged_but(before, after, "v")


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ("w = Squeeze<axes=[0]>(v)", (1, 8, 4)),
        ("u = Unsqueeze<axes=[0]>(v) w = Squeeze<axes=[0]>(u)", (8, 4)),
        ("w = Transpose(v)", (4, 8)),
    ],
)
def test_views_of_old_operator_sets(nodes, shape):
    before = dense(nodes, opset=9, ir=4, v=normal(*shape))
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert is_orthonormal(values(after, {"x": X}, ["w"])["w"])


def test_a_shape_that_is_computed_from_constants():
    before = dense("s = Concat<axis=0>(a, b) w = Reshape(v, s)", v=normal(32), a=np.array([8]), b=np.array([4]))
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}))
    assert unchanged_but(before, after, "v")


def test_a_depthwise_kernel_that_tensorflow_keeps_transposed():
    before = model(
        """g (float[N,6,9,9] x) => (float y) {
            s = Constant<value_ints=[3,3,1,12]>() r = Reshape(v, s) w = Transpose<perm=[3,2,0,1]>(r)
            y = Conv<group=6>(x, w) }""",
        v=normal(3, 3, 6, 2),
    )
    x = normal(8, 6, 9, 9, seed=1)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["y"]))
    weight = values(after, {"x": x}, ["w"])["w"]
    assert all(is_orthonormal(part) for part in weight.reshape(6, 2, 9))
    assert unchanged_but(before, after, "v")


@pytest.mark.parametrize(
    ("stored", "to"), [(np.float16, 1), (np.float64, 1), (np.float32, 11)], ids=["half", "double", "to double"]
)
def test_a_cast_weight_is_written_in_its_stored_type(stored, to):
    kind = "double" if to == 11 else "float"
    before = model(
        f"g ({kind}[N,8] x) => ({kind}[N,4] y) {{ w = Cast<to={to}>(v) y = MatMul(x, w) }}",
        v=normal(8, 4, dtype=stored),
    )
    x = X.astype(np.float64 if to == 11 else np.float32)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["y"]))
    assert unchanged_but(before, after, "v")


def test_a_weight_that_is_cast_down_is_measured_as_it_is_rounded():
    before = model("g (float16[N,8] x) => (float16[N,4] y) { w = Cast<to=10>(v) y = MatMul(x, w) }", v=normal(8, 4))
    x = X.astype(np.float16)
    after = initialize(before, x).model
    assert near_one(variances(after, {"x": x}, ["y"]), 5e-3)
    assert unchanged_but(before, after, "v")


# Expressions


WEIGHT_NORM = """a = Constant<value_ints=[1]>() n = ReduceL2(v, a) d = Div(v, n) w0 = Mul(d, g) w = Transpose(w0)"""


def test_weight_norm_is_folded_into_one_tensor():
    before = dense(WEIGHT_NORM, v=normal(4, 8), g=normal(4, 1))
    result = initialize(before, X)
    assert near_one(variances(result.model, {"x": X}))
    assert "folded" in " ".join(entry(result, "y").notes)
    assert [n.op_type for n in result.model.graph.node] == ["Transpose", "MatMul"]
    assert [t.name for t in result.model.graph.initializer] == ["w0"]  # v and g are read by nothing any more
    onnx.checker.check_model(result.model)


def test_a_folded_weight_that_is_kept_has_the_direction_of_the_expression():
    before = dense(WEIGHT_NORM, v=normal(4, 8), g=normal(4, 1))
    after = initialize(before, X, pre_init="keep").model
    v, g = tensor(before, "v").astype(np.float64), tensor(before, "g").astype(np.float64)
    weight = (v / np.linalg.norm(v, axis=1, keepdims=True) * g).T
    expected = weight / (X.astype(np.float64) @ weight).std()
    assert np.allclose(values(after, {"x": X}, ["w"])["w"], expected, rtol=1e-4)


def test_a_part_of_an_expression_that_something_else_reads_stays():
    before = model(
        f"""g (float[N,8] x) => (float[N,4] y, float[4,1] norms) {{
            {WEIGHT_NORM} y = MatMul(x, w) norms = Identity(n) }}""",
        v=normal(4, 8),
        g=normal(4, 1),
    )
    after = initialize(before, X).model
    assert near_one(variances(after, {"x": X}, ["y"]))
    old, new = (values(proto, {"x": X}, ["norms"])["norms"] for proto in (before, after))
    assert (old == new).all()


def test_an_expression_of_which_onnx_knows_nothing_is_left_alone():
    before = model(
        """g (float[N,8] x) => (float[N,4] y, float[N,4] z) {
            w = com.microsoft.Gelu(v) y = MatMul(x, w) z = MatMul(x, u) }""",
        microsoft=True,
        v=normal(8, 4),
        u=normal(8, 4),
    )
    result = initialize(before, X)
    assert entry(result, "y").status == "skipped"
    assert "cannot be folded" in entry(result, "y").notes[0]
    assert unchanged_but(before, result.model, "u")


# What cannot be written


def beside(weight_nodes, opset=21, ir=10, **tensors):
    """The layer `y` whose weight cannot be written, and another that can."""
    return model(
        f"g (float[N,8] x) => (float[N,4] y, float[N,4] z) {{ {weight_nodes} y = MatMul(x, w) z = MatMul(x, u) }}",
        opset,
        ir,
        u=normal(8, 4),
        **tensors,
    )


def left_alone(before):
    result = initialize(before, X)
    line = entry(result, "y")
    assert line.status == "skipped"
    assert len(line.notes) == 1
    assert near_one(variances(result.model, {"x": X}, ["z"], reference=False))
    assert unchanged_but(before, result.model, "u")
    return line.notes[0]


def test_a_quantized_weight_is_left_alone():
    weight = (10 * normal(8, 4)).astype(np.int8)
    assert "DequantizeLinear" in left_alone(beside("w = DequantizeLinear(q, s)", q=weight, s=np.float32(0.1)))


def test_a_quantized_weight_behind_a_transpose_is_left_alone():
    weight = (10 * normal(4, 8)).astype(np.int8)
    nodes = "d = DequantizeLinear(q, s) w = Transpose(d)"
    assert "DequantizeLinear" in left_alone(beside(nodes, q=weight, s=np.float32(0.1)))


@pytest.mark.parametrize("kind", ["INT4", "FLOAT8E4M3FN"])
def test_four_bit_and_eight_bit_floats_are_left_alone(kind):
    before = beside("w = DequantizeLinear(q, s)", s=np.float32(0.1))
    code = TensorProto.DataType.Value(kind)
    before.graph.initializer.append(helper.make_tensor("q", code, [8, 4], np.arange(32) % 5))
    assert "quantized" in left_alone(before)


def test_a_cast_eight_bit_float_is_left_alone():
    before = beside("w = Cast<to=1>(q)")
    before.graph.initializer.append(helper.make_tensor("q", TensorProto.FLOAT8E4M3FN, [8, 4], np.arange(32) % 5))
    assert "float8e4m3fn" in left_alone(before)


def test_a_sparse_weight_is_left_alone():
    before = beside("")
    sparse = before.graph.sparse_initializer.add(dims=[8, 4])
    sparse.values.CopyFrom(numpy_helper.from_array(np.array([1, 2], np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([3, 9]), "indices"))
    assert "sparse" in left_alone(before)


def test_an_integer_product_is_left_alone():
    before = model(
        "g (int32[N,8] x, float[N,8] f) => (int32[N,4] y, float[N,4] z) { y = MatMul(x, w) z = MatMul(f, u) }",
        w=np.ones((8, 4), np.int32),
        u=normal(8, 4),
    )
    result = initialize(before, {"x": np.ones((64, 8), np.int32), "f": X})
    assert "int32" in entry(result, "y").notes[0]
    assert unchanged_but(before, result.model, "u")


# The views themselves


@settings(max_examples=50, deadline=None)
@given(st.permutations([0, 1, 2, 3]), st.sampled_from([(6, 20), (2, 3, 20), (120,), (1, 120), (4, 30)]))
def test_a_view_and_its_inverse_are_one_another(order, shape):
    array = np.arange(120).reshape(2, 3, 4, 5)
    for view in (views.transposed(array.shape, order), views.reshaped(array.shape, shape)):
        assert view.forward(array).shape == view.after
        assert (view.backward(view.forward(array)) == array).all()
    assert (views.transposed(array.shape, order).forward(array) == array.transpose(order)).all()


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (views.reshaped((2, 3, 4), [0, -1]), (2, 12)),
        (views.reshaped((0, 3), [0, 7], allow_zero=True), (0, 7)),
        (views.flattened((2, 3, 4), 0), (1, 24)),
        (views.flattened((2, 3, 4), -1), (6, 4)),
        (views.squeezed((1, 3, 1), None), (3,)),
        (views.squeezed((1, 3, 1), [-1]), (1, 3)),
        (views.unsqueezed((3, 4), [0, -1]), (1, 3, 4, 1)),
        (views.transposed((2, 3, 4), None), (4, 3, 2)),
    ],
)
def test_shapes_are_those_of_onnx(view, shape):
    assert view.after == shape


# Repeated


@pytest.mark.parametrize(
    "repeat",
    [
        "w = Tile(v, n)",
        "w = Expand(v, n)",
        "t = Transpose<perm=[0,2,1]>(u) w = Expand(t, n)",
        "e = Expand(v, n) i = Identity(e) w = Tile(i, one)",
    ],
)
@pytest.mark.parametrize("options", [{}, {"scale": "channel"}, {"pre_init": "keep"}, {"bias": "center"}], ids=str)
def test_a_repeated_weight_stays_one_tensor(repeat, options):
    given = {"u": normal(1, 4, 8)} if "u)" in repeat else {"v": normal(1, 8, 4)}
    before = model(
        f"g (float[3,N,8] x) => (float[3,N,4] y) {{ {repeat} m = MatMul(x, w) y = Add(m, b) }}",
        **given,
        n=np.array([3, 1, 1]),
        one=np.array([1, 1, 1]),
        b=np.ones(4, np.float32),
    )
    x = normal(3, 64, 8, seed=1)
    result = initialize(before, [{"x": x}], **options)
    assert entry(result, "m").status == "ok"
    assert near_one(variances(result.model, {"x": x}))
    (name,) = given
    assert unchanged_but(before, result.model, name, "b")
    assert tensor(result.model, name).shape == given[name].shape
    # The same row in each of the three copies' places gives the same result, as before.
    y = values(result.model, {"x": np.broadcast_to(x[:1], x.shape)}, ["y"])["y"]
    assert np.array_equal(y[0], y[2])


def test_a_repetition_too_large_or_of_another_rank_is_left_alone():
    text = "g (float[3,N,8] x) => (y) { w = %s(v, n) z = MatMul(x, w) y = MatMul(z, u) }"
    for op, n, why in [
        ("Tile", [1 << 30, 1, 1], "repeats a tensor to 34,359,738,368 elements"),
        ("Expand", [1 << 31, 1, 1], "repeats a tensor to 68,719,476,736 elements"),
        ("Tile", [3, 1], "does not fit"),
        ("Expand", [3, 5, 4], "does not fit"),
    ]:
        found = inspect(model(text % op, v=normal(1, 8, 4), u=normal(4, 4), n=np.array(n)))
        assert why in next(x for x in found.layers if x.name == "z").notes[0]


@pytest.mark.parametrize("options", [{}, {"scale": "channel"}, {"pre_init": "keep"}], ids=str)
def test_equal_matrices_of_a_stack_stay_equal(options):
    """What an exporter makes of a weight that it repeats for every sample: here for two samples, with three heads."""
    heads = normal(1, 3, 8, 4)
    before = model("g (float[2,3,N,8] x) => (y) { y = MatMul(x, w) }", w=np.repeat(heads, 2, axis=0))
    x = normal(2, 3, 64, 8, seed=1)
    result = initialize(before, [{"x": x}], **options)
    assert entry(result, "y").status == "ok"
    assert "its weight has equal matrices, which stay equal" in entry(result, "y").notes
    y = values(result.model, {"x": x}, ["y"])["y"]
    found = y.var(axis=(0, 1, 2)) if "scale" in options else y.var()
    assert np.abs(found - 1).max() < 1e-4
    w = tensor(result.model, "w")
    assert np.array_equal(w[0], w[1])
    assert not np.allclose(w[0, 0], w[0, 1])
    assert options.get("pre_init") == "keep" or all(is_orthonormal(w[0, k]) or options for k in range(3))


def test_matrices_of_one_number_are_a_fresh_weight_and_become_different():
    before = model("g (float[2,N,8] x) => (y) { y = MatMul(x, w) }", w=np.zeros((2, 8, 4), np.float32))
    result = initialize(before, [{"x": normal(2, 64, 8, seed=1)}])
    w = tensor(result.model, "w")
    assert not np.allclose(w[0], w[1])
    assert entry(result, "y").notes == ()


def test_stacks_that_are_nearly_equal_are_not():
    w = np.repeat(normal(1, 8, 4), 3, axis=0)
    w[2, 7, 3] += 1
    before = model("g (float[3,N,8] x) => (y) { y = MatMul(x, w) }", w=w)
    after = tensor(initialize(before, [{"x": normal(3, 64, 8, seed=1)}]).model, "w")
    assert not np.allclose(after[0], after[1])


@pytest.mark.parametrize(
    "view",
    [
        "w = Transpose<perm=[2,0]>(v)",
        "w = Transpose<perm=[0,0]>(v)",
        "w = Transpose<perm=[0]>(v)",
        "w = Reshape(v, five)",
        "w = Reshape(v, zeros)",
        "w = Squeeze(v, five)",
        "w = Squeeze(v, one)",
        "w = Unsqueeze(v, five)",
        "w = Unsqueeze(v, twice)",
        "w = Flatten<axis=3>(v)",
        "w = Flatten<axis=-3>(v)",
    ],
)
def test_a_view_that_does_not_fit_its_tensor_is_told(view):
    text = f"g (float[N,8] x) => (y) {{ {view} z = MatMul(x, w) y = MatMul(x, v) }}"
    numbers = {"five": [5], "zeros": [0, 0, 0], "one": [1], "twice": [1, 1]}
    tensors = {name: np.array(listed) for name, listed in numbers.items()}
    found = inspect(model(text, v=normal(8, 4), **tensors))
    assert "which does not fit it" in next(x for x in found.layers if x.name == "z").notes[0]


# Made of constants by a layer


CONSTANT_KEYS = """g (float[2,N,8] x) => (y) {
    p = MatMul(table, w) k = Add(p, b) t = Transpose<perm=[1,0]>(k) u = Unsqueeze(t, zero) e = Tile(u, n)
    q = MatMul(x, a) s = MatMul(q, e) y = Softmax(s) }"""


def test_what_a_layer_makes_of_constants_is_no_weight():
    """Learned positions that go through a projection, as DeBERTa's keys: their product with the queries is no layer."""
    arrays = {"table": normal(16, 6), "w": normal(6, 8), "b": normal(8), "a": normal(8, 8)}
    before = model(CONSTANT_KEYS, **arrays, zero=np.array([0]), n=np.array([2, 1, 1]))
    x = normal(2, 32, 8, seed=1)
    result = initialize(before, [{"x": x}])
    assert {e.name: e.status for e in result.report.layers} == {"p": "skipped", "q": "ok", "s": "skipped"}
    assert entry(result, "s").notes == ("its constant is no weight, but what MatMul p makes of others",)
    assert unchanged_but(before, result.model, "a")


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("c = ConstantOfShape<value=float[1] {1.0}>(n) w = Mul(c, step)", "computed from fewer numbers"),
        ("w = Expand(one, n)", "one number, repeated"),
        ("e = Expand(one, n) w = Mul(e, one)", "computed from fewer numbers"),
        (
            "r = Range(zero, eight, one) c = Unsqueeze(r, axis) d = Mul(c, step) w = Cos(d)",
            "computed from fewer numbers",
        ),
    ],
)
def test_a_mask_or_a_grid_is_no_weight(expression, why):
    """Longformer multiplies its mask with ones; overwritten, "masked" (-3e38) would become its opposite."""
    numbers = {"one": 1, "zero": 0, "eight": 8, "step": [0.1, 0.2, 0.3, 0.4]}
    tensors = {name: np.array(number, np.float32) for name, number in numbers.items()}
    text = f"g (float[N,8] x) => (y) {{ {expression} z = MatMul(x, w) y = MatMul(z, u) }}"
    before = model(text, **tensors, n=np.array([8, 4]), axis=np.array([1]), u=normal(4, 4))
    result = initialize(before, X)
    assert [(e.name, e.status) for e in result.report.layers] == [("z", "skipped"), ("y", "ok")]
    assert why in entry(result, "z").notes[0]
    assert unchanged_but(before, result.model, "u")


@pytest.mark.parametrize(
    "expression",
    [
        "w = Concat<axis=1>(h, i)",  # packed
        "l = MatMul(p, q) w = Add(v, l)",  # a low-rank adapter
        "l = MatMul(v, c) s = Mul(l, l) n = ReduceSum(s) r = Sqrt(n) w = Div(v, r)",  # spectral normalization
    ],
)
def test_a_stored_weight_in_another_form_is_one_though_a_product_is_part_of_it(expression):
    arrays = {"v": normal(8, 4), "p": normal(8, 2), "q": normal(2, 4), "c": normal(4, 1)}
    arrays |= {"h": normal(8, 1), "i": normal(8, 3)}
    result = initialize(dense(expression, **arrays), X)
    assert entry(result, "y").status == "ok"
    assert near_one(variances(result.model, {"x": X}))
