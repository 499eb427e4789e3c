"""If: where all data takes the same branch, that branch is the network, and its tensors are written where they live."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from helpers import entry, model, near_one, normal, square, tensor, values, variances
from lsuv_cli import initialize, inspect

X = normal(64, 8, seed=1)


def graph_of(name, node):
    return next(a.g for a in node.attribute if a.name == name)


def with_tensors(proto, branch, **arrays):
    """The model with initializers in one branch of its If."""
    (node,) = [n for n in proto.graph.node if n.op_type == "If"]
    held = graph_of(branch, node).initializer
    held.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return proto


CHOOSES = """g (float[N,8] x, int64 rate) => (float[N,4] y) {
    yes = Equal(rate, wanted)
    w, b = If (yes) <then_branch = t () => (float[8,4] p, float[4] c) { p = Identity(w16) c = Identity(b16) },
                     else_branch = e () => (float[8,4] q, float[4] d) { q = Identity(w8) d = Identity(b8) }>
    y = Gemm(x, w, b) }"""


@pytest.mark.parametrize(("rate", "taken", "left"), [(16000, "w16", "w8"), (8000, "w8", "w16")])
def test_an_if_that_only_chooses_weights(rate, taken, left):
    before = model(
        CHOOSES, wanted=np.array(16000), w16=normal(8, 4), b16=normal(4), w8=normal(8, 4, seed=5), b8=normal(4)
    )
    before.graph.input[1].type.tensor_type.shape.SetInParent()
    feeds = {"x": X, "rate": np.array(rate)}
    result = initialize(before, feeds, batch_size="all")
    assert near_one(variances(result.model, feeds, ["y"], reference=False))
    assert entry(result, "y").status == "ok"
    assert (tensor(result.model, left) == tensor(before, left)).all()
    assert not (tensor(result.model, taken) == tensor(before, taken)).all()


OTHER_RATE = {"x": X, "rate": np.array(8000)}


def chosen(body, **tensors):
    """A model whose weight w and bias b an If chooses by the input `rate`."""
    before = model(
        CHOOSES.replace("y = Gemm(x, w, b)", body),
        wanted=np.array(16000),
        **{"w16": normal(8, 4), "b16": normal(4), "w8": normal(8, 4, seed=5), "b8": normal(4, seed=6), **tensors},
    )
    before.graph.input[1].type.tensor_type.shape.SetInParent()
    return before


@pytest.mark.parametrize(
    ("body", "settings", "done"),
    [
        # A product that was folded would be the same whatever the rate.
        ("v = Mul(w, two) h = MatMul(x, v) r = Relu(h) y = MatMul(r, k)", {}, {"h": "skipped", "y": "ok"}),
        # And so would a layer's own copy of the weight, or a bias of its own.
        ("h = MatMul(x, w) z = MatMul(x, w) y = Add(h, z)", {"tied": "untie"}, {"h": "ok", "z": "skipped"}),
        ("y = Gemm(x, w, b)", {"bias": "zero"}, {"y": "ok"}),
        ("y = Gemm(x, w, b)", {"bias": "center"}, {"y": "ok"}),
        ("h = MatMul(x, w) y = Add(h, b)", {}, {"h": "ok"}),
        ("h = MatMul(x, k8) y = BatchNormalization(h, one, one, b, one)", {"reset_norm": True}, {"h": "ok"}),
    ],
)
def test_what_an_if_chooses_by_the_data_is_chosen_still(body, settings, done):
    before = chosen(body, two=np.float32(2), k=normal(4, 4), k8=normal(8, 4, seed=9), one=np.ones(4, np.float32))
    result = initialize(before, {"x": X, "rate": np.array(16000)}, batch_size="all", **settings)
    assert {layer.name: str(layer.status) for layer in result.report.layers} == done
    # With the other rate, the other weight and bias count: the given ones, since no data came that way.
    other = values(result.model, OTHER_RATE, ["w", "b"])
    np.testing.assert_array_equal(other["w"], tensor(before, "w8"))
    np.testing.assert_array_equal(other["b"], tensor(before, "b8"))
    y, with_other_bias = (values(changed(result.model, b8=b), OTHER_RATE, ["y"])["y"] for b in (0, 1))
    if "b" in [name for node in before.graph.node for name in node.input]:
        assert not np.array_equal(y, with_other_bias)
    y, with_other_weight = (values(changed(result.model, w8=w), OTHER_RATE, ["y"])["y"] for w in (0, 1))
    if "w" in [name for node in before.graph.node for name in node.input]:
        assert not np.array_equal(y, with_other_weight)


def changed(proto, **numbers):
    """The model with some tensors filled with a number."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for held in copy.graph.initializer:
        if held.name in numbers:
            held.CopyFrom(numpy_helper.from_array(np.full(held.dims, numbers[held.name], np.float32), held.name))
    return copy


def test_a_constant_that_an_if_chooses_by_a_constant_is_folded():
    """What the If and its branches read goes with it."""
    before = chosen("v = Mul(w, two) y = MatMul(x, v)", two=np.float32(2), yes=np.array(True), k=normal(4, 4))
    del before.graph.node[0]  # the If reads the initializer `yes`
    result = initialize(before, {"x": X, "rate": np.array(16000)}, batch_size="all")
    assert [node.op_type for node in result.model.graph.node] == ["MatMul"]
    assert {t.name for t in result.model.graph.initializer} == {"v", "k", "wanted"}  # the last two were unread before
    assert near_one(variances(result.model, {"x": X, "rate": np.array(1)}, ["y"], reference=False))


def test_a_condition_that_a_layer_decides_is_not_taken_for_granted():
    """With other weights the data may take the other branch."""
    before = model(
        """g (float[N,8] x) => (float[N,8] y) {
            a = MatMul(x, u) m = ReduceMean<keepdims=0>(a) yes = Greater(m, zero)
            b = If (yes) <then_branch = t () => (float[N,8] p) { p = MatMul(a, v) },
                          else_branch = e () => (float[N,8] q) { q = Tanh(a) }>
            y = MatMul(b, w) }""",
        **square("u", "v", "w"), zero=np.float32(0),
    )  # fmt: skip
    for seed in range(4):
        result = initialize(before, X, batch_size="all", seed=seed)
        assert entry(result, "p").status == "skipped"
        assert near_one(variances(result.model, {"x": X}, ["a", "y"], reference=False))


VOICE = """g (float[N,T] input, float[2,N,16] state, int64 sr) => (float[N,1] output, float[2,N,16] stateN) {{
    is16 = Equal(sr, k16)
    output, stateN = If (is16) <
        then_branch = at16 () => (float[N,1] out16, float[2,N,16] state16) {{ {at16} }},
        else_branch = at8 () => (float[N,1] out8, float[2,N,16] state8) {{ {at8} }}
    > }}"""


def branch(rate, stride):
    """A spectrum by a convolution, an encoder, an LSTM with a state that is handed on, and a decoder."""
    return f"""
        i{rate} = Unsqueeze(input, one) s{rate} = Conv<strides=[{stride}]>(i{rate}, basis{rate})
        a{rate} = Abs(s{rate}) n{rate} = Add(a{rate}, one_f) l{rate} = Log(n{rate})
        e{rate} = Conv<pads=[1,1]>(l{rate}, enc{rate}, encb{rate}) r{rate} = Relu(e{rate})
        t{rate} = Transpose<perm=[2,0,1]>(r{rate})
        h0{rate}, c0{rate} = Split<num_outputs=2>(state)
        Y{rate}, h{rate}, c{rate} = LSTM<hidden_size=16>(t{rate}, W{rate}, R{rate}, B{rate}, , h0{rate}, c0{rate})
        state{rate} = Concat<axis=0>(h{rate}, c{rate})
        q{rate} = Squeeze(h{rate}, zero) f{rate} = Relu(q{rate})
        d{rate} = Gemm<transB=1>(f{rate}, dec{rate}, decb{rate}) out{rate} = Sigmoid(d{rate})"""


def voice_model():
    """As the voice-activity models that many packages ship: every layer is in a branch of one If."""
    proto = model(
        VOICE.format(at16=branch(16, 8), at8=branch(8, 4)),
        k16=np.array(16000), one=np.array([1]), zero=np.array([0]), one_f=np.float32(1),
    )  # fmt: skip
    proto.graph.input[2].type.tensor_type.shape.SetInParent()
    for k, (rate, side) in enumerate([(16, "then_branch"), (8, "else_branch")]):
        shapes = {"basis": (12, 1, 16), "enc": (20, 12, 3), "encb": (20,), "W": (1, 64, 20), "R": (1, 64, 16),
                  "B": (1, 128), "dec": (1, 16), "decb": (1,)}  # fmt: skip
        arrays = {f"{name}{rate}": normal(*shape, seed=k) for name, shape in shapes.items()}
        with_tensors(proto, side, **arrays)
    return proto


def flat(proto, side):
    """One branch as a model of its own, by hand."""
    (node,) = [n for n in proto.graph.node if n.op_type == "If"]
    body = graph_of(side, node)
    inputs = [i for i in proto.graph.input if i.name != "sr"]
    graph = helper.make_graph(body.node, "g", inputs, body.output, [*proto.graph.initializer, *body.initializer])
    return helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)


@pytest.mark.parametrize(("sr", "rate", "side"), [(16000, 16, "then_branch"), (8000, 8, "else_branch")])
def test_a_voice_model_whose_layers_are_all_in_the_branches_of_an_if_on_the_sampling_rate(sr, rate, side):
    before = voice_model()
    feeds = {"input": normal(24, 128), "state": normal(2, 24, 16), "sr": np.array(sr)}
    result = initialize(before, feeds, batch_size="all")
    names = [f"s{rate}", f"e{rate}", f"d{rate}"]
    given = {k: v for k, v in feeds.items() if k != "sr"}
    assert near_one(variances(flat(result.model, side), given, names, reference=False))
    assert sum(layer.status == "ok" for layer in result.report.layers) == 3
    assert result.report.exit_code == 0
    # The other branch is as it was, and the file runs in either.
    other = "else_branch" if side == "then_branch" else "then_branch"
    (old,), (new,) = ([n for n in p.graph.node if n.op_type == "If"] for p in (before, result.model))
    assert graph_of(other, old).SerializeToString() == graph_of(other, new).SerializeToString()
    for anyhow in (8000, 16000):
        assert np.isfinite(values(result.model, {**feeds, "sr": np.array(anyhow)}, ["output"])["output"]).all()


def test_a_voice_model_is_inspected_without_data():
    assert {layer.status for layer in inspect(voice_model()).layers} == {"skipped"}


def test_branches_of_a_branch():
    before = model(
        """g (float[N,8] x, bool a, bool b) => (float[N,8] y) {
            y = If (a) <then_branch = t () => (float[N,8] p) {
                    p = If (b) <then_branch = tt () => (float[N,8] r) { r = MatMul(x, u) },
                                else_branch = te () => (float[N,8] s) { s = MatMul(x, v) }> },
                 else_branch = e () => (float[N,8] q) { q = Identity(x) }> }""",
        **square("u", "v"),
    )
    for item in before.graph.input[1:]:
        item.type.tensor_type.shape.SetInParent()
    feeds = {"x": X, "a": np.array(True), "b": np.array(False)}
    result = initialize(before, feeds, batch_size="all")
    assert near_one(variances(result.model, feeds, ["y"], reference=False))
    assert (tensor(result.model, "u") == tensor(before, "u")).all()
    assert isinstance(result.model, onnx.ModelProto)


def test_a_weight_computed_in_a_branch_of_a_file_of_ir_version_3():
    """Before IR version 4 an initializer is an input too, and a branch has no inputs."""
    before = model(
        """g (float[N,8] x, bool a) => (float[N,8] y) {
            y = If (a) <then_branch = t () => (float[N,8] p) { c = Mul(u, two) p = MatMul(x, c) },
                        else_branch = e () => (float[N,8] q) { q = Identity(x) }> }""",
        opset=9, ir=3, **square("u"), two=np.float32(2),
    )  # fmt: skip
    before.graph.input[1].type.tensor_type.shape.SetInParent()
    feeds = {"x": X, "a": np.array(True)}
    result = initialize(before, feeds, batch_size="all")
    assert near_one(variances(result.model, feeds, ["y"], reference=False))
    assert result.report.exit_code == 0


BY_BATCH = {
    "the data decides": "m = ReduceMean<keepdims=0>(x) yes = Greater(m, zero)",
    "the size of the batch decides": "s = Shape(x) n = Gather(s, first) f = Cast<to=1>(n) yes = Greater(f, forty)",
    "a layer decides": "m = ReduceMean<keepdims=0>(a) yes = Greater(m, zero)",
}


@pytest.mark.parametrize("condition", BY_BATCH.values(), ids=BY_BATCH.keys())
def test_a_condition_that_differs_between_batches_is_a_warning(condition):
    before = model(
        f"""g (float[N,8] x) => (float[N,8] y) {{
            a = MatMul(x, u) {condition}
            b = If (yes) <then_branch = t () => (float[N,8] p) {{ p = Mul(a, a) }},
                          else_branch = e () => (float[N,8] q) {{ q = Tanh(a) }}>
            y = MatMul(b, w) }}""",
        **square("u", "w"), zero=np.float32(0), forty=np.float32(40), first=np.int64(0),
    )  # fmt: skip
    batches = [{"x": X[:48] + 1}, {"x": X[:16] - 1}]
    result = initialize(before, batches)
    wanted = "1 If node chooses its branch for each batch as a whole: the variances depend on how the data is batched"
    assert wanted in result.report.warnings
    assert wanted in inspect(before, batches).warnings
    assert wanted not in inspect(before).warnings  # no data, no variances
    parts = [values(result.model, batch, ["y"])["y"].ravel() for batch in batches]
    assert np.var(np.concatenate(parts)) == pytest.approx(1, abs=0.01)


def test_a_condition_that_is_the_same_for_all_batches_is_no_warning():
    before = model(
        CHOOSES, wanted=np.array(16000), w16=normal(8, 4), b16=normal(4), w8=normal(8, 4, seed=5), b8=normal(4)
    )
    before.graph.input[1].type.tensor_type.shape.SetInParent()
    result = initialize(before, {"x": X, "rate": np.array(8000)}, batch_size="all")
    assert not [warning for warning in result.report.warnings if "batched" in warning]
