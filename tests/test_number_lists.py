"""Learned numbers in lists of attributes (ai.onnx.ml): stripped, and made up again."""

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from helpers import model, normal, tensor, values
from lsuv_cli import LsuvError, initialize, inspect, strip
from lsuv_cli.model.number_lists import NumberList, every, stripped
from shell import lsuv

NODES = 7  # of a whole tree of two levels


def numbers(count, seed):
    return normal(count, seed=seed).tolist()


def scaler():
    return helper.make_node(
        "Scaler", ["x"], ["s"], "scaler", domain="ai.onnx.ml", offset=numbers(8, 1), scale=numbers(8, 2)
    )


def linear():
    return helper.make_node(
        "LinearRegressor", ["s"], ["l"], "linear", domain="ai.onnx.ml", targets=4,
        coefficients=numbers(32, 3), intercepts=numbers(4, 4),
    )  # fmt: skip


def trees():
    """One tree: three nodes that ask, four leaves."""
    return helper.make_node(
        "TreeEnsembleRegressor", ["s"], ["t"], "trees", domain="ai.onnx.ml", n_targets=1,
        nodes_treeids=[0] * NODES, nodes_nodeids=list(range(NODES)), nodes_featureids=[1, 2, 3, 0, 0, 0, 0],
        nodes_modes=["BRANCH_LEQ"] * 3 + ["LEAF"] * 4, nodes_values=numbers(NODES, 5),
        nodes_truenodeids=[1, 3, 5, 0, 0, 0, 0], nodes_falsenodeids=[2, 4, 6, 0, 0, 0, 0],
        target_treeids=[0] * 4, target_nodeids=[3, 4, 5, 6], target_ids=[0] * 4, target_weights=numbers(4, 6),
    )  # fmt: skip


def pipeline():
    """Scaler, then a linear model into a layer, and a tree."""
    made = model("g (float[N,8] x) => (float[N,5] y, float[N,1] t) { y = MatMul(l, w) }", w=normal(4, 5))
    made.opset_import.add(domain="ai.onnx.ml", version=3)
    layer = onnx.NodeProto.FromString(made.graph.node[0].SerializeToString())
    del made.graph.node[:]
    made.graph.node.extend([scaler(), linear(), layer, trees()])
    return made


LISTS = {
    "scaler.offset": 1, "scaler.scale": 2, "linear.coefficients": 3, "linear.intercepts": 4, "trees.nodes_values": 5,
    "trees.target_weights": 6,
}  # fmt: skip


def attribute(proto, node, name):
    (found,) = [n for n in proto.graph.node if n.name == node]
    return next(a for a in found.attribute if a.name == name)


def test_no_number_of_a_stripped_list_is_in_the_file(tmp_path):
    onnx.save(pipeline(), tmp_path / "m.onnx")
    done = lsuv("strip", tmp_path / "m.onnx", "-o", tmp_path / "s.onnx")
    assert done.code == 0, done.err
    assert "the trees of node 'trees' (TreeEnsembleRegressor) keep their structure" in done.err
    content = (tmp_path / "s.onnx").read_bytes()
    for name, seed in LISTS.items():
        for number in numbers(40, seed)[:4]:
            assert np.float32(number).tobytes() not in content, name
    assert set(strip(pipeline()).roles) == {*LISTS, "w"}


def test_stripped_lists_are_made_up_and_run(tmp_path):
    small = strip(pipeline()).model
    done = initialize(small, normal(64, 8), seed=3)
    assert "7 tensors had no values and were made by their role: 1 weight, 6 lists of numbers" in done.report.warnings
    found = values(done.model, {"x": normal(64, 8)}, ["l", "y", "t"])
    assert found["y"].var() == pytest.approx(1, rel=1e-3)
    assert 0.1 < found["l"].var() < 10
    assert found["t"].var() > 0
    assert attribute(done.model, "scaler", "scale").floats == [1.0] * 8
    assert attribute(done.model, "linear", "intercepts").floats == [0.0] * 4
    assert not any(a.doc_string for node in done.model.graph.node for a in node.attribute)
    assert initialize(small, normal(64, 8), seed=3).to_bytes() == done.to_bytes()
    assert initialize(small, normal(64, 8), seed=4).to_bytes() != done.to_bytes()


def test_what_has_no_numbers_is_not_run():
    small = strip(pipeline(), keep="w").model
    np.testing.assert_array_equal(tensor(small, "w"), normal(4, 5))
    with pytest.raises(LsuvError, match=r"6 tensors have no values, 'scaler.offset' the first"):
        inspect(small, normal(4, 8))
    assert "6 tensors have no values" in inspect(small).warnings[0]


def test_lists_are_kept_by_name_and_by_length():
    done = strip(pipeline(), keep=["trees.*", "scaler.scale"])
    assert {name for name in done.roles if "." in name} == {"scaler.offset", "linear.coefficients", "linear.intercepts"}
    assert attribute(done.model, "trees", "nodes_values").floats == pytest.approx(numbers(NODES, 5))
    assert {"trees.nodes_values", "scaler.scale"} <= set(done.kept)
    assert set(strip(pipeline(), larger_than=8).roles) == {"linear.coefficients", "w"}
    assert strip(strip(pipeline()).model).to_bytes() == strip(pipeline()).to_bytes()


def test_a_model_of_trees_alone_is_stripped_and_filled(tmp_path):
    made = helper.make_model(
        helper.make_graph(
            [scaler(), trees()],
            "g",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 8])],
            [helper.make_tensor_value_info("t", onnx.TensorProto.FLOAT, ["N", 1])],
        ),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)],
        ir_version=9,
    )
    onnx.save(strip(made).model, tmp_path / "s.onnx")
    done = lsuv("init", tmp_path / "s.onnx", "--data", "random", "-o", tmp_path / "f.onnx")
    assert done.code == 1, done.err  # no layer was initialized
    found = values(onnx.load(tmp_path / "f.onnx"), {"x": normal(64, 8)}, ["t"])["t"]
    assert np.isfinite(found).all()
    assert len(np.unique(found)) == 4


def test_trees_of_tensors_keep_their_codes():
    """TreeEnsemble of ai.onnx.ml 5 has its modes as a tensor of uint8, which is no quantized weight."""
    modes, splits = np.zeros(3, np.uint8), normal(3, seed=5)
    node = helper.make_node(
        "TreeEnsemble", ["x"], ["t"], "trees", domain="ai.onnx.ml", n_targets=1, nodes_featureids=[1, 2, 3],
        nodes_modes=numpy_helper.from_array(modes, "modes"), nodes_splits=numpy_helper.from_array(splits, "splits"),
        nodes_truenodeids=[1, 0, 2], nodes_trueleafs=[0, 1, 1],
        nodes_falsenodeids=[2, 1, 3], nodes_falseleafs=[0, 1, 1],
        leaf_targetids=[0] * 4, leaf_weights=numpy_helper.from_array(normal(4, seed=6), "leaves"), tree_roots=[0],
    )  # fmt: skip
    made = model("g (float[N,8] x) => (float[N,5] y, float[N,1] t) { y = MatMul(x, w) }", w=normal(8, 5))
    made.opset_import.add(domain="ai.onnx.ml", version=5)
    made.graph.node.append(node)
    done = strip(made)
    assert set(done.roles) == {"w", "splits", "leaves"}
    filled = initialize(done.model, normal(64, 8)).model
    assert math.isclose(values(filled, {"x": normal(64, 8)}, ["y"])["y"].var(), 1, rel_tol=1e-3)


@pytest.mark.parametrize("count", ["", "many", "-3", str(1 << 60)])
def test_a_length_that_cannot_be(count):
    small = strip(pipeline()).model
    attribute(small, "linear", "coefficients").doc_string = f"lsuv.stripped numbers {count}"
    with pytest.raises(LsuvError, match=r"linear\.coefficients has no numbers"):
        initialize(small, normal(64, 8))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("intercepts", 0), ("offset", 0), ("rho", 0), ("base_values", 0), ("imputed_value_floats", 0), ("scale", 1),
        ("nodes_hitrates", 1), ("prob_a", -1), ("prob_b", 0),
    ],
)  # fmt: skip
def test_lists_that_are_filled_with_what_changes_nothing(name, expected):
    """No offset, a factor of 1; Platt's 1 / (1 + exp(a·f + b)) with a = -1, b = 0 is the sigmoid of f."""
    lists: Any = {name: [3.0, 4.0]}
    node = helper.make_node("Op", [], [], domain="ai.onnx.ml", **lists)
    found = NumberList(node, node.attribute[0])
    found.strip()
    assert (found.count, list(found.attribute.floats), found.is_stripped) == (2, [], True)
    found.fill(np.random.default_rng(0))
    assert (list(found.attribute.floats), found.is_stripped) == ([expected] * 2, False)


@pytest.mark.parametrize(
    ("lists", "name", "std"),
    [
        ({"coefficients": [0.5] * 4000, "intercepts": [0.5] * 40}, "coefficients", 0.1),  # 100 for each output
        ({"coefficients": [0.5] * 2500}, "coefficients", 0.02),
        ({"support_vectors": [0.5] * 2500}, "support_vectors", 0.02),
        ({"nodes_values": [0.5] * 2500}, "nodes_values", 1.0),
        ({"coefficients": [0.5], "intercepts": [0.5] * 3}, "coefficients", None),  # fewer numbers than outputs
    ],
)
def test_lists_of_products_have_the_variance_of_one_over_their_inputs(lists, name, std):
    node = helper.make_node("Op", [], [], domain="ai.onnx.ml", **lists)
    (held,) = (attribute for attribute in node.attribute if attribute.name == name)
    count = len(held.floats)
    NumberList(node, held).strip()
    NumberList(node, held).fill(np.random.default_rng(0))
    drawn = np.random.default_rng(0).standard_normal(count, np.float32)
    assert len(held.floats) == count
    assert not held.doc_string
    if std is None:
        np.testing.assert_array_equal(held.floats, drawn)
    else:
        assert np.std(held.floats) == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize(
    ("node", "learned"),
    [
        (helper.make_node("SVMRegressor", ["x"], ["y"], domain="ai.onnx.ml", rho=[1.0]), ["rho"]),
        (helper.make_node("SVMRegressor", ["x"], ["y"], domain="ai.onnx.ml", kernel_params=[1.0, 2.0, 3.0]), []),
        (helper.make_node("Constant", [], ["y"], value_floats=[1.0] * 20), []),
        (helper.make_node("Op", ["x"], ["y"], numbers=[1.0] * 16), []),
        (helper.make_node("Op", ["x"], ["y"], numbers=[1.0] * 17), ["numbers"]),
        (helper.make_node("Op", ["x"], ["y"], integers=[1] * 17), []),
    ],
)
def test_which_lists_are_learned(node, learned):
    proto = helper.make_model(helper.make_graph([node], "g", [], []))
    assert [found.attribute.name for found in every(proto)] == learned
    assert stripped(proto) == []


@pytest.mark.parametrize("text", ["lsuv.stripped numbers", "lsuv.stripped numbers many", "lsuv.stripped numbers -1"])
def test_a_stripped_list_that_does_not_say_how_long_it_was(text):
    node = helper.make_node("Op", [], [], domain="ai.onnx.ml", rho=[1.0])
    node.attribute[0].ClearField("floats")
    node.attribute[0].doc_string = text
    with pytest.raises(LsuvError, match="does not say how many it had"):
        _ = NumberList(node, node.attribute[0]).count
