"""What stripping takes out and keeps, and what it warns about."""

import numpy as np
import pytest
from onnx import helper

from helpers import model, normal
from lsuv_cli.errors import LsuvError
from lsuv_cli.model import graph as graphs
from lsuv_cli.model.file import load
from lsuv_cli.model.stripping import strip


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


@pytest.mark.parametrize(("domain", "count", "goes"), [("odd", 16, False), ("odd", 17, True), ("ai.onnx.ml", 1, False),
                                                      ("ai.onnx.ml", 2, True)])  # fmt: skip
def test_lists_of_numbers_are_stripped(domain, count, goes):
    node = helper.make_node("Odd", ["x"], ["z"], domain=domain, numbers=[1.5] * count)
    done, file = stripped(LINEAR, change=lambda proto: proto.graph.node.append(node), w=normal(4, 4), b=normal(4))
    assert list(file.proto.graph.node[-1].attribute[0].floats) == ([] if goes else [1.5] * count)
    assert ("z.numbers" in done.roles) == goes


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
