"""The initialized tensors in a file of their own: names and layouts, and the way home to PyTorch."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers import model, normal, tensor
from lsuv_cli import initialize
from lsuv_cli.errors import LsuvError
from lsuv_cli.home.named import _assembled
from lsuv_cli.home.names import Part


def two_layers():
    return model(
        "g (float[N,6] x) => (float[N,3] z) { y = Gemm<transB=1>(x, a_weight, a_bias) r = Relu(y) z = MatMul(r, W) }",
        a_weight=normal(5, 6),
        a_bias=normal(5),
        W=normal(5, 3, seed=1),
    )


@pytest.mark.parametrize("name", ["w.npz", "w.safetensors"])
def test_the_file_holds_what_the_model_holds(tmp_path, name):
    done = initialize(two_layers(), normal(64, 6), weights=tmp_path / name)
    found = load_file(tmp_path / name) if name.endswith("safetensors") else dict(np.load(tmp_path / name))
    assert sorted(found) == ["W", "a_bias", "a_weight"]
    for key, array in found.items():
        np.testing.assert_array_equal(array, tensor(done.model, key))
    assert not found["a_bias"].any()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_half_precision_stays_half_precision(tmp_path):
    text = "g (float16[N,6] x) => (float16[N,5] y) { y = MatMul(x, W) }"
    initialize(model(text, W=normal(6, 5, dtype=np.float16)), normal(64, 6), weights=tmp_path / "w.safetensors")
    assert load_file(tmp_path / "w.safetensors")["W"].dtype == np.float16


def test_bfloat16_is_float32_where_numpy_has_no_name_for_it(tmp_path):
    import ml_dtypes

    text = "g (bfloat16[N,6] x) => (bfloat16[N,5] y) { y = MatMul(x, W) }"
    proto = model(text, W=normal(6, 5).astype(ml_dtypes.bfloat16))
    done = initialize(proto, normal(64, 6), weights=tmp_path / "w.npz")
    found = np.load(tmp_path / "w.npz")["W"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, tensor(done.model, "W").astype(np.float32))
    initialize(proto, normal(64, 6), weights=tmp_path / "w.safetensors")
    assert b'"BF16"' in (tmp_path / "w.safetensors").read_bytes()


def test_only_initialized_layers_are_in_it(tmp_path):
    initialize(two_layers(), normal(64, 6), weights=tmp_path / "w.npz", exclude="z")
    assert sorted(np.load(tmp_path / "w.npz")) == ["a_bias", "a_weight"]


def named(graph, **tensors):
    """A model whose tensors are called as PyTorch calls them; the parser knows no dots in names."""
    proto = model(graph, **tensors)
    renames = {t.name: t.name.replace("__", "::").replace("_DOT_", ".") for t in proto.graph.initializer}
    for held in proto.graph.initializer:
        held.name = renames[held.name]
    for node in proto.graph.node:
        node.input[:] = [renames.get(name, name) for name in node.input]
    return proto


def carried(tmp_path, proto, **settings):
    initialize(proto, normal(64, 6), weights=tmp_path / "w.npz", **settings)
    return dict(np.load(tmp_path / "w.npz"))


def test_a_lost_name_comes_back_from_the_bias_and_the_layout_with_it(tmp_path):
    proto = named(
        "g (float[N,6] x) => (float[N,4] y) { p = MatMul(x, onnx__MatMul_7) y = Add(fc_DOT_bias, p) }",
        onnx__MatMul_7=normal(6, 4),
        fc_DOT_bias=normal(4),
    )
    found = carried(tmp_path, proto)
    assert {name: array.shape for name, array in found.items()} == {"fc.weight": (4, 6), "fc.bias": (4,)}


def test_the_projection_of_an_attention_module(tmp_path):
    proto = named(
        "g (float[N,6] x) => (float[N,9] y) { p = MatMul(x, val_4) y = Add(p, attn_DOT_in_proj_bias) }",
        val_4=normal(6, 9),
        attn_DOT_in_proj_bias=normal(9),
    )
    assert {name: array.shape for name, array in carried(tmp_path, proto).items()} == {
        "attn.in_proj_weight": (9, 6),
        "attn.in_proj_bias": (9,),
    }


@pytest.mark.parametrize("how", ["node name", "metadata"])
def test_a_lost_name_without_a_bias_comes_back_from_the_module(tmp_path, how):
    proto = named("g (float[N,6] x) => (float[N,4] y) { y = MatMul(x, onnx__MatMul_7) }", onnx__MatMul_7=normal(6, 4))
    node = proto.graph.node[0]
    if how == "node name":
        node.name = "/encoder/layers.0/fc/MatMul"
    else:
        node.metadata_props.add(
            key="pkg.torch.onnx.name_scopes",
            value="['', 'encoder', 'encoder.layers.0', 'encoder.layers.0.fc', 'linear']",
        )
    assert {name: array.shape for name, array in carried(tmp_path, proto).items()} == {
        "encoder.layers.0.fc.weight": (4, 6)
    }


def left(proto, tmp_path, **settings):
    """The tensors that could not be carried, with the reasons."""
    report = initialize(proto, normal(64, 6), weights=tmp_path / "w.npz", force=True, **settings).report
    assert report.carried is not None
    assert report.carried.tensors + len(report.carried.left) == report.carried.total
    assert report.exit_code == (1 if report.carried.left else 0)
    return {item.name: item.reason for item in report.carried.left}


def scoped(proto, *names):
    """Node names as PyTorch's legacy exporter writes them."""
    for node, name in zip(proto.graph.node, names, strict=True):
        node.name = name
    return proto


def called(proto, signature, *texts):
    """The calls of PyTorch operators as its exporter with dynamo=True writes them down."""
    names = "\n".join(f"p_{name.replace('.', '_')}: PARAMETER target='{name}'" for name in signature)
    proto.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=f"\n# inputs\n{names}")
    for node, text in zip(proto.graph.node, texts, strict=True):
        operator, _, arguments = text.partition(" ")
        value = (
            f"%y : [num_users=1] = call_function[target=torch.ops.aten.{operator}](args = ({arguments}), kwargs = {{}})"
        )
        node.metadata_props.add(key="pkg.torch.onnx.fx_node", value=value)
    return proto


def test_a_name_that_nothing_tells_is_not_made_up(tmp_path):
    proto = named("g (float[N,6] x) => (float[N,4] y) { y = MatMul(x, onnx__MatMul_7) }", onnx__MatMul_7=normal(6, 4))
    assert "does not tell" in left(proto, tmp_path)["onnx::MatMul_7"]
    assert not dict(np.load(tmp_path / "w.npz"))


def test_two_weights_of_one_module_are_not_told_apart(tmp_path):
    proto = named(
        "g (float[N,6] x) => (float[N,6] z){ y = MatMul(x, onnx__MatMul_7) r = Relu(y) z = MatMul(r, onnx__MatMul_8) }",
        onnx__MatMul_7=normal(6, 6),
        onnx__MatMul_8=normal(6, 6, seed=1),
    )
    scoped(proto, "/mlp/MatMul", "/mlp/Relu", "/mlp/MatMul_1")
    assert sorted(left(proto, tmp_path)) == ["onnx::MatMul_7", "onnx::MatMul_8"]


TWO = (
    "g (float[N,6] x) => (float[N,6] z) { p = MatMul(x, onnx__MatMul_7) y = Add(p, B) r = Relu(y)"
    " q = MatMul(r, onnx__MatMul_8) z = Add(q, C) }"
)


def test_the_scope_comes_before_the_name_of_a_merged_bias(tmp_path):
    """Both biases are zero, and an exporter kept one of them, the second's."""
    text = TWO.replace("B", "second_DOT_bias").replace("C", "second_DOT_bias")
    proto = named(
        text, onnx__MatMul_7=normal(6, 6), onnx__MatMul_8=normal(6, 6, seed=1), second_DOT_bias=np.zeros(6, "f")
    )
    scoped(proto, "/first/MatMul", "/first/Add", "/Relu", "/second/MatMul", "/second/Add")
    done = initialize(proto, normal(64, 6), weights=tmp_path / "w.npz")
    found = np.load(tmp_path / "w.npz")
    np.testing.assert_array_equal(found["first.weight"], tensor(done.model, "onnx::MatMul_7").T)
    np.testing.assert_array_equal(found["second.weight"], tensor(done.model, "onnx::MatMul_8").T)


def test_without_a_scope_a_bias_that_two_layers_read_names_neither(tmp_path):
    text = TWO.replace("B", "second_DOT_bias").replace("C", "second_DOT_bias")
    proto = named(
        text, onnx__MatMul_7=normal(6, 6), onnx__MatMul_8=normal(6, 6, seed=1), second_DOT_bias=np.zeros(6, "f")
    )
    assert sorted(left(proto, tmp_path)) == ["onnx::MatMul_7", "onnx::MatMul_8"]


def test_a_shift_behind_a_layer_is_not_its_bias(tmp_path):
    text = "g (float[N,6] x) => (float[N,4] y) { p = MatMul(x, onnx__MatMul_7) y = Add(p, other_DOT_bias) }"
    proto = named(text, onnx__MatMul_7=normal(6, 4), other_DOT_bias=normal(4))
    found = carried(tmp_path, scoped(proto, "/fc/MatMul", "/Add"))
    assert sorted(found) == ["fc.weight", "other.bias"]


@pytest.mark.parametrize(
    ("node", "bias", "weight"),
    [
        ("/d1/d1.0/MatMul", "d1.0.bias", "d1.0.weight"),
        ("/features/features.3/features.3.1/MatMul", "features.3.1.bias", "features.3.1.weight"),
        ("/layer1/layer1.0/fc/MatMul", "layer1.0.fc.bias", "layer1.0.fc.weight"),
        ("/a/MatMul", "parts.a.bias", "parts.a.weight"),  # nn.ModuleDict is not called
        ("/block/block.0/MatMul", "block.block.0.bias", "block.block.0.weight"),  # a ModuleList of its module's name
        ("/h_1/MatMul", "h.bias", "h.weight"),  # called a second time
        ("/h_1/MatMul", "h_1.bias", "h_1.weight"),
        ("/MatMul", "bias", "weight"),
        ("/d1/d1.0/MatMul", "", "d1.0.weight"),
        ("/up/MatMul", "down.bias", "up.weight"),
        ("/attn/MatMul", "attn.in_proj_bias", "attn.in_proj_weight"),
    ],
)
def test_what_the_legacy_exporters_scopes_mean(tmp_path, node, bias, weight):
    named_bias = bias.replace(".", "_DOT_")
    text = "{ y = MatMul(x, onnx__MatMul_7) }"
    if bias:
        text = f"{{ p = MatMul(x, onnx__MatMul_7) y = Add(p, {named_bias}) }}"
    tensors = {named_bias: normal(18)} if bias else {}
    proto = named(f"g (float[N,6] x) => (float[N,18] y) {text}", onnx__MatMul_7=normal(6, 18), **tensors)
    proto.graph.node[0].name = node
    done = initialize(proto, normal(64, 6), weights=tmp_path / "w.npz")
    np.testing.assert_array_equal(np.load(tmp_path / "w.npz")[weight], tensor(done.model, "onnx::MatMul_7").T)
    assert done.report.layers[0].module == weight.rpartition(".")[0]


def test_a_convolution_without_a_name_was_multiplied_by_its_batch_norm(tmp_path):
    text = "g (float[N,6,1] x) => (float[N,4,1] y) { y = Conv(x, onnx__Conv_7) }"
    proto = scoped(named(text, onnx__Conv_7=normal(4, 6, 1)), "/d1/d1.0/Conv")
    report = initialize(proto, normal(64, 6, 1), weights=tmp_path / "w.npz").report
    assert "multiplied it by its BatchNorm" in report.carried.left[0].reason
    assert report.exit_code == 1
    assert not dict(np.load(tmp_path / "w.npz"))


def test_a_call_of_batch_norm_on_a_convolution_means_that_it_is_multiplied(tmp_path):
    text = "g (float[N,6] x) => (float[N,4] y) { y = Gemm<transB=1>(x, fc_DOT_weight) }"
    proto = named(text, fc_DOT_weight=normal(4, 6))
    called(proto, ["fc.weight", "norm.weight"], "_native_batch_norm_legit_no_training.default %linear, %p_norm_weight")
    assert "multiplied it by its BatchNorm" in left(proto, tmp_path)["fc.weight"]
    assert not dict(np.load(tmp_path / "w.npz"))


@pytest.mark.parametrize("tied", ["share", "untie"])
def test_merged_tensors_go_to_all_their_modules(tmp_path, tied):
    proto = named(
        "g (float[N,6] x) => (float[N,6] z) { y = Gemm<transB=1>(x, a_DOT_weight) r = Relu(y)"
        " z = Gemm<transB=1>(r, a_DOT_weight) }",
        a_DOT_weight=normal(6, 6),
    )
    names = ["a.weight", "b.weight"]
    called(proto, names, "linear.default %x, %p_a_weight", "relu.default %linear", "linear.default %relu, %p_b_weight")
    found = carried(tmp_path, proto, tied=tied)
    assert sorted(found) == names
    assert np.array_equal(found["a.weight"], found["b.weight"]) == (tied == "share")


@pytest.mark.parametrize("tied", ["share", "untie"])
def test_merged_tensors_of_the_legacy_exporter_keep_their_names_as_identities(tmp_path, tied):
    proto = named(
        "g (float[N,6] x) => (float[N,6] z) { again = Identity(a_DOT_weight) y = Gemm<transB=1>(x, a_DOT_weight)"
        " r = Relu(y) z = Gemm<transB=1>(r, again) }",
        a_DOT_weight=normal(6, 6),
    )
    proto.graph.node[0].output[0] = proto.graph.node[3].input[1] = "b.weight"
    found = carried(tmp_path, proto, tied=tied)
    assert sorted(found) == ["a.weight", "b.weight"]
    assert np.array_equal(found["a.weight"], found["b.weight"]) == (tied == "share")


def test_one_tensor_of_the_module_is_not_written_from_two(tmp_path):
    """A module that is called twice has one weight; untied, there are two, and neither is it."""
    text = "g (float[N,6] x) => (float[N,6] z) { y = Gemm(x, h_DOT_weight) r = Relu(y) z = Gemm(r, h_DOT_weight) }"
    proto = scoped(named(text, h_DOT_weight=normal(6, 6)), "/h/Gemm", "/Relu", "/h_1/Gemm")
    assert all("one tensor in the module" in reason for reason in left(proto, tmp_path, tied="untie").values())
    assert not dict(np.load(tmp_path / "w.npz"))
    assert not left(proto, tmp_path, tied="share")


def test_an_embedding_is_not_overwritten_by_the_head_that_it_is_tied_to(tmp_path):
    weight = normal(9, 6)
    text = "g (int64[N] i) => (float[N,9] y) { e = Gather(E, i) y = MatMul(e, onnx__MatMul_7) }"
    proto = scoped(named(text, E=weight, onnx__MatMul_7=weight.T.copy()), "/embed/Gather", "/head/MatMul")
    report = initialize(proto, np.arange(9).repeat(8), weights=tmp_path / "w.npz").report
    assert [item.name for item in report.carried.left] == ["onnx::MatMul_7"]
    called(proto, ["E"], "embedding.default %p_E, %i", "linear.default %embedding, %p_E")
    report = initialize(proto, np.arange(9).repeat(8), weights=tmp_path / "w.npz", force=True).report
    assert "Gather" in report.carried.left[0].reason


PACKED = """g (float[N,6] x, float[N,6] m) => (float[N,6] y) {
    wq = Slice(attn_DOT_in_proj_weight, zero, six, zero) wk = Slice(attn_DOT_in_proj_weight, six, twelve, zero)
    wv = Slice(attn_DOT_in_proj_weight, twelve, all, zero)
    tq = Transpose<perm=[1,0]>(wq) tk = Transpose<perm=[1,0]>(wk) tv = Transpose<perm=[1,0]>(wv)
    q = MatMul(x, tq) k = MatMul(m, tk) v = MatMul(m, tv)
    qk = Mul(q, k) y = Add(qk, v) }"""


def test_the_parts_of_a_packed_tensor_go_back_to_their_places(tmp_path):
    before = normal(18, 6)
    bounds = {name: np.array([at]) for name, at in (("zero", 0), ("six", 6), ("twelve", 12), ("all", 18))}
    proto = named(PACKED, attn_DOT_in_proj_weight=before, **bounds)
    data = {"x": normal(64, 6), "m": normal(64, 6, seed=1)}
    done = initialize(proto, data, weights=tmp_path / "w.npz", exclude="k")
    after = np.load(tmp_path / "w.npz")["attn.in_proj_weight"]
    np.testing.assert_array_equal(after[6:12], before[6:12])
    for rows, x in ((after[:6], data["x"]), (after[12:], data["m"])):
        assert (x.astype(np.float64) @ rows.T.astype(np.float64)).var() == pytest.approx(1, abs=1e-4)
    assert done.report.carried.tensors == 2


@pytest.mark.parametrize("widths", [(6, 6, 6), (6, 5, 5)])
def test_the_products_of_attention_are_those_of_q_k_and_v(tmp_path, widths):
    """nn.MultiheadAttention through the legacy exporter: only out_proj kept its name."""
    _, k, v = widths
    proto = named(
        f"g (float[N,6] x, float[N,{k}] m) => (float[N,6] y) {{ q = MatMul(x, onnx__MatMul_1)"
        " k = MatMul(m, onnx__MatMul_2) v = MatMul(m, onnx__MatMul_3) qk = Mul(q, k) a = Add(qk, v)"
        " y = Gemm<transB=1>(a, attn_DOT_out_proj_DOT_weight) }",
        onnx__MatMul_1=normal(6, 6),
        onnx__MatMul_2=normal(k, 6, seed=1),
        onnx__MatMul_3=normal(v, 6, seed=2),
        attn_DOT_out_proj_DOT_weight=normal(6, 6, seed=3),
    )
    scoped(proto, "/attn/MatMul", "/attn/MatMul_1", "/attn/MatMul_2", "/attn/Mul", "/attn/Add", "/attn/Gemm")
    data = {"x": normal(64, 6), "m": normal(64, k, seed=1)}
    done = initialize(proto, data, weights=tmp_path / "w.npz")
    found = np.load(tmp_path / "w.npz")
    parts = [tensor(done.model, f"onnx::MatMul_{n}").T for n in (1, 2, 3)]
    if k == 6:
        np.testing.assert_array_equal(found["attn.in_proj_weight"], np.concatenate(parts))
    else:
        for letter, part in zip("qkv", parts, strict=True):
            np.testing.assert_array_equal(found[f"attn.{letter}_proj_weight"], part)
    initialize(proto, data, weights=tmp_path / "w.npz", force=True, exclude="/attn/MatMul_1")
    assert "attn.in_proj_weight" not in np.load(tmp_path / "w.npz")


def test_recurrent_tensors_are_written_only_if_they_changed(tmp_path):
    text = """g (float[T,N,4] x) => (float[T,N,3] z, float[T,D,N,5] y) {
        y = LSTM<hidden_size=5>(x, W, R) z = MatMul(x, V) }"""
    proto = model(text, W=normal(1, 20, 4), R=normal(1, 20, 5), V=normal(4, 3))
    initialize(proto, normal(6, 8, 4), weights=tmp_path / "w.npz", batch_size="all")
    assert sorted(np.load(tmp_path / "w.npz")) == ["V"]
    initialize(proto, normal(6, 8, 4), weights=tmp_path / "w.npz", batch_size="all", force=True, recurrent=True)
    assert sorted(np.load(tmp_path / "w.npz")) == ["R", "V", "W"]


def test_statistics_that_were_reset_are_in_it(tmp_path):
    proto = named(
        "g (float[N,6] x) => (float[N,4] y) { h = Gemm<transB=1>(x, fc_DOT_weight)"
        " y = BatchNormalization(h, s, b, bn_DOT_running_mean, bn_DOT_running_var) }",
        fc_DOT_weight=normal(4, 6),
        s=np.ones(4, "f"),
        b=np.zeros(4, "f"),
        bn_DOT_running_mean=normal(4),
        bn_DOT_running_var=np.full(4, 2, "f"),
    )
    assert sorted(carried(tmp_path, proto)) == ["fc.weight"]
    found = carried(tmp_path, proto, reset_norm=True, force=True)
    assert not found["bn.running_mean"].any()
    assert (found["bn.running_var"] == 1).all()


def test_include_and_exclude_know_the_module(tmp_path):
    text = "g (float[N,6] x) => (float[N,6] z) { y = Gemm(x, A) r = Relu(y) z = Gemm(r, B) }"
    proto = scoped(model(text, A=normal(6, 6), B=normal(6, 6)), "/layer4/layer4.1/fc/Gemm", "/Relu", "/head/Gemm")
    for pattern in ("layer4.1.fc", "layer4.*", "/layer4/*"):
        report = initialize(proto, normal(64, 6), exclude=pattern).report
        assert [(layer.module, layer.status) for layer in report.layers] == [
            ("layer4.1.fc", "excluded"),
            ("head", "ok"),
        ]
    assert [x["module"] for x in report.to_json()["layers"]] == ["layer4.1.fc", "head"]
    with pytest.raises(LsuvError, match=r"the layers are layer4\.1\.fc, head"):
        initialize(proto, normal(64, 6), include="nothing")


def test_an_existing_file_is_only_overwritten_by_force(tmp_path):
    (tmp_path / "w.npz").write_bytes(b"precious")
    with pytest.raises(LsuvError, match="`force=True`"):
        initialize(two_layers(), normal(64, 6), weights=tmp_path / "w.npz")
    assert (tmp_path / "w.npz").read_bytes() == b"precious"
    initialize(two_layers(), normal(64, 6), weights=tmp_path / "w.npz", force=True)
    assert sorted(np.load(tmp_path / "w.npz")) == ["W", "a_bias", "a_weight"]


@pytest.mark.parametrize("name", ["w.pt", "w", "nowhere/w.npz"])
def test_a_file_that_cannot_be_written_is_refused_first(tmp_path, name):
    with pytest.raises(LsuvError, match="`weights`"):
        initialize(two_layers(), normal(64, 6), weights=tmp_path / name, output=tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_tensor_that_one_node_reads_whole_and_another_in_parts():
    """A packed bias of zeros that an exporter merged with another: told whole, and row by row."""
    whole = Part("in_proj_bias", lambda array: array)
    rows = Part("in_proj_bias", lambda array: array, np.arange(2, 4), np.ones(6, np.float32))
    zeros = np.zeros(6, np.float32)
    for order in ([(whole, zeros), (rows, zeros[:2])], [(rows, zeros[:2]), (whole, zeros)]):
        array, reason = _assembled("in_proj_bias", order)
        assert not reason
        np.testing.assert_array_equal(array, zeros)
    array, reason = _assembled("in_proj_bias", [(whole, zeros), (rows, zeros[:2] + 1)])
    assert array is None
    assert "different" in reason


@pytest.mark.parametrize("kind", ["BUFFER target='w' persistent=False", "CONSTANT_TENSOR target='w'"])
def test_a_tensor_outside_the_state_dict_has_no_name(tmp_path, kind):
    """Buffers that are not persistent and plain attributes: load_state_dict would not know them."""
    proto = model("g (float[N,6] x) => (float[N,4] y) { y = MatMul(x, w) }", w=normal(6, 4))
    proto.graph.metadata_props.add(
        key="pkg.torch.export.ExportedProgram.graph_signature",
        value=f"\n# inputs\nb_w: {kind}\np_b: PARAMETER target='b'",
    )
    assert "does not tell" in left(proto, tmp_path)["w"]
    assert not dict(np.load(tmp_path / "w.npz"))
