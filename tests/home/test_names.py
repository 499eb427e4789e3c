"""The initialized tensors in a file of their own: names and layouts, and the way home to PyTorch."""

import contextlib
import io
import logging
import warnings

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file

from helpers import model, normal, tensor
from lsuv_cli import initialize
from lsuv_cli.errors import LsuvError


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


def test_a_name_that_nothing_tells_stays_as_it_is(tmp_path):
    proto = named("g (float[N,6] x) => (float[N,4] y) { y = MatMul(x, onnx__MatMul_7) }", onnx__MatMul_7=normal(6, 4))
    assert {name: array.shape for name, array in carried(tmp_path, proto).items()} == {"onnx::MatMul_7": (6, 4)}


def test_two_weights_of_one_module_do_not_overwrite_each_other(tmp_path):
    proto = named(
        "g (float[N,6] x) => (float[N,6] z){ y = MatMul(x, onnx__MatMul_7) r = Relu(y) z = MatMul(r, onnx__MatMul_8) }",
        onnx__MatMul_7=normal(6, 6),
        onnx__MatMul_8=normal(6, 6, seed=1),
    )
    for node, name in zip(proto.graph.node, ("/mlp/MatMul", "/mlp/Relu", "/mlp/MatMul_1"), strict=True):
        node.name = name
    assert sorted(carried(tmp_path, proto)) == ["mlp.weight", "onnx::MatMul_8"]


@pytest.mark.parametrize("tied", ["share", "untie"])
def test_merged_tensors_go_to_all_their_modules(tmp_path, tied):
    proto = named(
        "g (float[N,6] x) => (float[N,6] z) { y = Gemm<transB=1>(x, a_DOT_fc_DOT_weight) r = Relu(y)"
        " z = Gemm<transB=1>(r, a_DOT_fc_DOT_weight) }",
        a_DOT_fc_DOT_weight=normal(6, 6),
    )
    for node, name in zip(proto.graph.node, ("/a/fc/Gemm", "/Relu", "/b/fc/Gemm"), strict=True):
        node.name = name
    found = carried(tmp_path, proto, tied=tied)
    assert sorted(found) == ["a.fc.weight", "b.fc.weight"]
    assert np.array_equal(found["a.fc.weight"], found["b.fc.weight"]) == (tied == "share")


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


# The round trip: export, init --weights, load_state_dict, and the module computes what the initialized file computes.


def exported(module, example, path, dynamo):
    import torch

    quiet = logging.getLogger("torch.onnx")
    level, quiet.level = quiet.level, logging.ERROR
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if dynamo:
            shapes = ({0: torch.export.Dim("N")},)
            torch.onnx.export(module, (example,), path, dynamo=True, input_names=["x"], dynamic_shapes=shapes)
        else:
            axes = {"x": {0: "N"}}
            torch.onnx.export(module, (example,), path, dynamo=False, input_names=["x"], dynamic_axes=axes)
    quiet.level = level
    return onnx.load(path)


def convolutions():
    """Conv, a depthwise one, ConvTranspose, and Linear on 3 and 2 axes, with and without bias."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
            self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
            self.sequence = nn.Linear(6, 16)
            self.nobias = nn.Linear(16, 12, bias=False)
            self.head = nn.Linear(12, 5)
            self.last = nn.Linear(5, 5, bias=False)

        def forward(self, x):
            x = torch.relu(self.up(torch.relu(self.depthwise(torch.relu(self.conv(x))))))
            x = torch.relu(self.nobias(torch.relu(self.sequence(x.flatten(2).transpose(1, 2)))))
            return self.last(torch.relu(self.head(x.mean(1))))

    return Net(), torch.randn(16, 3, 8, 8)


def transformer():
    """nn.TransformerEncoder, whose layers are copies of one another until they are trained."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(7, 16)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(16, 3)

        def forward(self, x):
            return self.out(self.encoder(self.embed(x)))

    return Net(), torch.randn(16, 6, 7)


# Which names of the state dict are not names of tensors in the exported file: the exporter changed these.
CHANGED = {
    ("convolutions", False): {"sequence.weight", "nobias.weight", "last.weight"},
    ("convolutions", True): {"sequence.weight", "nobias.weight"},
}


@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("build", [convolutions, transformer])
def test_the_round_trip(tmp_path, build, dynamo):
    import torch
    from safetensors.torch import load_file as load_torch

    torch.manual_seed(0)
    module, data = build()
    module.eval()
    before = exported(module, data, tmp_path / "m.onnx", dynamo)
    done = initialize(
        str(tmp_path / "m.onnx"),
        data.numpy(),
        output=tmp_path / "out.onnx",
        weights=tmp_path / "w.safetensors",
        tied="untie",
    )
    assert done.report.exit_code == 0
    state = load_torch(tmp_path / "w.safetensors")
    names = set(module.state_dict())
    assert set(state) <= names
    weights = {name for name in names if name.endswith("weight") and "norm" not in name}
    assert weights <= set(state)
    if (build.__name__, dynamo) in CHANGED:
        assert weights - {t.name for t in before.graph.initializer} == CHANGED[build.__name__, dynamo]

    assert not module.load_state_dict(state, strict=False).unexpected_keys
    session = ort.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": data.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(module(data).numpy(), expected, rtol=1e-4, atol=1e-4)
