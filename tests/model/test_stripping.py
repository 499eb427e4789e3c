"""What stripping takes out and keeps, and what it warns about."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from helpers import model, normal
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.file import is_stripped, load
from lsuv_cli.model.roles import Role
from lsuv_cli.model.stripping import QUANTIZED, STRIPPABLE, role_of, strip


def stripped(text, keep=(), larger_than=1, change=None, **tensors):
    proto = model(text, **tensors)
    if change is not None:
        change(proto)
    file = load(proto)
    return strip(file, graphs.build(file.proto, file), keep, larger_than), file


LINEAR = "g (float[N,4] x) => (y) { m = MatMul(x, w) y = Add(m, b) }"


@pytest.mark.parametrize(("larger_than", "roles"), [(3, {"w", "b"}), (4, {"w"}), (15, {"w"}), (16, set())])
def test_tensors_of_more_values_than_this_are_stripped(larger_than, roles):
    done, file = stripped(LINEAR, larger_than=larger_than, w=normal(4, 4), b=normal(4))
    assert set(done.roles) == roles
    assert set(done.kept) == {"w", "b"} - roles
    assert done.bytes == sum({"w": 64, "b": 16}[name] for name in roles)
    for held in file.proto.graph.initializer:
        assert bool(held.raw_data) == (held.name not in roles)


def test_what_is_stripped_already_counts_and_nothing_is_absent_afterwards():
    _, file = stripped(LINEAR, w=normal(4, 4), b=normal(4))
    again = load(file.proto)
    assert len(again.absent) == 2
    done = strip(again, graphs.build(again.proto, again), (), 1)
    assert set(done.roles) == {"w", "b"}
    assert done.bytes == 0
    assert not again.absent


def test_patterns_of_names_to_keep():
    done, _ = stripped(LINEAR, keep=["w*"], w=normal(4, 4), b=normal(4))
    assert (set(done.roles), done.kept) == ({"b"}, ["w"])
    with pytest.raises(LsuvError, match="'z' matches no tensor"):
        stripped(LINEAR, keep=["w", "z"], w=normal(4, 4), b=normal(4))


@pytest.mark.parametrize(("count", "warns"), [(4096, False), (4097, True)])
def test_many_integers_are_told(count, warns):
    text = "g (float[N,4] x) => (y, i) { y = MatMul(x, w) }"
    done, _ = stripped(text, w=normal(4, 4), i=np.arange(count))
    assert any("integers was kept" in warning for warning in done.warnings) == warns
    assert set(done.roles) == {"w"}
    assert not done.kept
    done, _ = stripped(text, keep=["i"], w=normal(4, 4), i=normal(count))
    assert not done.warnings


@pytest.mark.parametrize(
    ("domain", "count", "larger_than", "taken", "kept"),
    [
        ("odd", 16, 1, False, False),  # no learned numbers
        ("odd", 17, 1, True, False),
        ("odd", 17, 17, False, True),
        ("ai.onnx.ml", 1, 1, False, False),
        ("ai.onnx.ml", 2, 1, True, False),
        ("ai.onnx.ml", 2, 2, False, True),
    ],
)
def test_lists_of_learned_numbers_are_stripped_like_tensors(domain, count, larger_than, taken, kept):
    node = helper.make_node("Odd", ["x"], ["z"], domain=domain, numbers=[1.5] * count)

    def change(proto):
        proto.graph.node.append(node)

    done, file = stripped(LINEAR, (), larger_than, change, w=normal(5, 5), b=normal(5))
    assert ("z.numbers" in done.roles, "z.numbers" in done.kept) == (taken, kept)
    assert len(file.proto.graph.node[-1].attribute[0].floats) == (0 if taken else count)
    assert done.bytes == 4 * (25 + 5 * (larger_than < 5) + count * taken)
    if taken:
        done, _ = stripped(LINEAR, ["z.*"], larger_than, change, w=normal(5, 5), b=normal(5))
        assert "z.numbers" in done.kept


def test_a_constants_list_becomes_a_tensor_without_values():
    text = "g (float[N,4] x) => (y) { b = Constant<value_floats=[1.0,2.0,3.0,4.0]>() y = Add(x, b) }"
    done, file = stripped(text)
    (held,) = file.proto.graph.node[0].attribute
    assert held.name == "value"
    assert list(held.t.dims) == [4]
    assert not held.t.raw_data
    assert set(done.roles) == {"b"}
    assert not held.floats


def test_graphs_for_training_are_removed():
    done, file = stripped(LINEAR, change=lambda proto: proto.training_info.add(), w=normal(4, 4), b=normal(4))
    assert not file.proto.training_info
    assert any("graphs for training" in warning for warning in done.warnings)


WIDE_INTEGERS = {"INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64", "BOOL", "STRING", "UNDEFINED"}
FULL_FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "COMPLEX64", "COMPLEX128"}


@pytest.mark.parametrize("kind", TensorProto.DataType.keys())
def test_every_type_that_onnx_has(kind):
    """Floats and what has 8 and fewer bits are stripped, the latter as quantized weights; other integers stay."""
    code = TensorProto.DataType.Value(kind)
    assert (code in STRIPPABLE) == (kind not in WIDE_INTEGERS)
    assert (code in QUANTIZED) == (kind not in WIDE_INTEGERS | FULL_FLOATS)
    expected = Role.QUANTIZED if code in QUANTIZED else Role.TABLE
    held = TensorProto(name="t", data_type=code, dims=[3])
    assert role_of(held, Role.TABLE) is expected
    assert role_of(held, Role.BIAS) is Role.BIAS
    assert role_of(held, Role.STRUCTURE) is Role.STRUCTURE


def test_single_numbers_are_not_listed_as_kept():
    text = "g (float[N,4] x) => (y) { m = MatMul(x, w) s = Mul(m, k) y = Add(s, p) }"
    done, _ = stripped(text, larger_than=20, w=normal(4, 4), k=normal(1), p=normal(2, 1)[0, 0])
    assert (done.kept, done.roles) == (["w"], {})


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_tensors_whose_file_is_missing(tmp_path, dtype):
    """Floats are as good as stripped; of integers nobody knows what they were."""
    numbers = np.arange(16).astype(dtype)
    text = "g (float[N,4] x) => (y) { c = Cast<to=1>(i) y = Add(x, c) }"
    proto = model(text, i=numbers)
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="lost", size_threshold=0)
    (tmp_path / "lost").unlink()
    file = load(tmp_path / "m.onnx", without_weights=True)
    if dtype is np.int64:
        with pytest.raises(ModelError, match="'i' of integers has no values"):
            strip(file, graphs.build(file.proto, file), (), 1)
        return
    done = strip(file, graphs.build(file.proto, file), (), 1)
    assert set(done.roles) == {"i"}
    assert done.bytes == 0
    assert done.warnings == ["the data file of 1 tensors is missing; they had no values to take out"]
    (held,) = file.proto.graph.initializer
    assert not held.external_data
    assert is_stripped(held)


def test_a_mask_that_is_added_is_structure_and_stays():
    mask = np.array([0, -1e9, 0, -1e9], np.float32)
    done, _ = stripped(LINEAR, w=normal(4, 4), b=mask)
    assert set(done.roles) == {"w"}
    done, _ = stripped(LINEAR, w=normal(4, 4), b=mask / 1e9)
    assert set(done.roles) == {"w", "b"}


@pytest.mark.skipif("metadata_props" not in TensorProto.DESCRIPTOR.fields_by_name, reason="an older onnx")
def test_what_was_noted_beside_a_tensor_is_stripped_too():
    """An exporter may note the name or a summary of what a tensor held."""
    _, file = stripped(LINEAR, change=lambda p: p.graph.initializer[0].metadata_props.add(key="max", value="3"),
                       w=normal(4, 4), b=normal(4))  # fmt: skip
    assert not file.proto.graph.initializer[0].metadata_props


@pytest.mark.parametrize("kind", ["complex64", "complex128", "float64", "float16"])
def test_numbers_of_every_kind_are_stripped(kind):
    """Without a warning of numpy's that complex numbers lose a part."""
    done, _ = stripped("g (float[N,4] x) => (y, c) { y = Neg(x) }", c=np.ones(4, kind))
    assert set(done.roles) == {"c"}


def test_tensors_of_more_than_one_number_that_stay_are_told():
    text = "g (float[N,2] x) => (y) { m = MatMul(x, w) a = Mul(m, s) y = Add(a, b) }"
    done, _ = stripped(text, larger_than=16, w=normal(2, 2), b=normal(2), s=np.float32(3))
    assert set(done.kept) == {"w", "b"}
