"""The cut into stages, worked out by hand: which layers share a stage, and which scales are pending where."""

from dataclasses import replace

import numpy as np
import pytest

from helpers import normal, square
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.scaling import stages
from working_copies import graph_of


def cut(body, outputs="y", most_pending=stages.MOST_PENDING, **tensors):
    look = layers_of(graph_of(f"g (float[N,8] x) => ({outputs}) {{ {body} }}", **tensors))
    return stages.cut(look.graph, look.layers.layers, most_pending)


def grouped(plan):
    return [[layer.output for layer in stage.layers] for stage in plan.stages]


def test_a_chain_of_relus_is_one_stage():
    plan = cut("a = MatMul(x, u) r = Relu(a) b = MatMul(r, v) s = Relu(b) y = MatMul(s, w)", **square("u", "v", "w"))
    assert grouped(plan) == [["a", "b", "y"]]
    assert plan.in_front == {"a": (), "b": ("a",), "y": ("a", "b")}
    assert plan.stage_of == {"a": 0, "b": 0, "y": 0}
    assert plan.stages[0].inputs == ("x",)
    assert plan.stages[0].outputs == ()


def test_a_tanh_needs_true_values():
    plan = cut("a = MatMul(x, u) r = Relu(a) t = Tanh(r) b = MatMul(t, v) y = MatMul(b, w)", **square("u", "v", "w"))
    assert grouped(plan) == [["a"], ["b", "y"]]
    assert plan.in_front == {"a": (), "b": (), "y": ("b",)}
    (waiting,) = plan.stages[1].inputs
    assert plan.stages[0].outputs == (waiting,)
    assert plan.pending[waiting] == ("a",)
    assert plan.stage_of == {"a": 0, "b": 1, "y": 1}


def test_layers_beside_one_another_share_a_stage():
    plan = cut("a = MatMul(x, u) b = MatMul(x, v) s = Add(a, b) t = Tanh(s) y = MatMul(t, w)", **square("u", "v", "w"))
    assert grouped(plan) == [["a", "b"], ["y"]]
    assert set(plan.stages[1].inputs) == {"a", "b"}
    assert (plan.pending["a"], plan.pending["b"]) == (("a",), ("b",))


def test_an_add_of_equally_scaled_branches_commutes_and_one_of_others_does_not():
    same = cut("a = MatMul(x, u) r = Relu(a) n = Neg(a) s = Add(r, n) y = MatMul(s, w)", **square("u", "w"))
    assert grouped(same) == [["a", "y"]]
    stream = cut("a = MatMul(x, u) s = Add(x, a) y = MatMul(s, w)", **square("u", "w"))
    assert grouped(stream) == [["a"], ["y"]]
    assert set(stream.stages[1].inputs) == {"a", "x"}


def test_a_chain_has_at_most_sixteen_pending_scales():
    names = [f"w{k}" for k in range(20)]
    body = " ".join(f"a{k + 1} = MatMul({'x' if k == 0 else f'a{k}'}, {name})" for k, name in enumerate(names))
    plan = cut(body, "a20", **square(*names))
    assert [len(group) for group in grouped(plan)] == [16, 4]
    assert len(plan.in_front["a16"]) == 15
    assert plan.in_front["a17"] == ()
    short = cut(body, "a20", most_pending=1, **square(*names))
    assert [len(group) for group in grouped(short)] == [1] * 20


@pytest.mark.parametrize(("factor", "groups"), [(2.0**20, 1), (2.0**21, 2), (2.0**-20, 1), (2.0**-21, 2)])
def test_constants_move_a_chain_by_at_most_twenty_powers_of_two(factor, groups):
    body = "a = MatMul(x, u) m = Mul(a, c) y = MatMul(m, w)"
    assert len(cut(body, c=np.float32(factor), **square("u", "w")).stages) == groups
    half = np.float32(np.sqrt(factor))
    twice = "a = MatMul(x, u) m = Mul(a, c) b = MatMul(m, v) n = Mul(b, c) y = MatMul(n, w)"
    assert len(cut(twice, c=half, **square("u", "v", "w")).stages) == groups
    there_and_back = "a = MatMul(x, u) m = Mul(a, c) n = Div(m, c) y = MatMul(n, w)"
    assert len(cut(there_and_back, c=half, **square("u", "w")).stages) == 1


def test_a_shared_weight_is_measured_by_itself():
    body = "a = MatMul(x, u) r = Relu(a) b = MatMul(r, v) s = Relu(b) c = MatMul(s, v) q = Relu(c) y = MatMul(q, w)"
    plan = cut(body, **square("u", "v", "w"))
    assert grouped(plan) == [["a"], ["b"], ["y"]]
    assert plan.in_front["b"] == ()
    assert "c" not in plan.stage_of
    beside = cut("a = MatMul(x, v) t = Tanh(a) b = MatMul(x, v) s = Add(t, b) y = MatMul(s, w)", **square("v", "w"))
    assert grouped(beside) == [["a", "b"], ["y"]]


def test_a_stage_has_a_bounded_size_of_weights(monkeypatch):
    body = "a = MatMul(x, u) r = Relu(a) b = MatMul(r, v) s = Relu(b) y = MatMul(s, w)"
    for limit, expected in ((3 * 256, [3]), (3 * 256 - 1, [2, 1]), (2 * 256 - 1, [1, 1, 1])):
        monkeypatch.setattr(stages, "STAGE_BYTES", limit)
        assert [len(group) for group in grouped(cut(body, **square("u", "v", "w")))] == expected


def test_nodes_that_no_layer_needs_are_not_run():
    plan = cut("a = MatMul(x, u) s = Tanh(a) k = Shape(s) y = Relu(a) q = MatMul(x, w)", "s, y, q", **square("u", "w"))
    assert grouped(plan) == [["a", "q"]]
    assert [step.makes for step in plan.stages[0].steps] == [("a",), ("q",)]


def test_a_shape_does_not_wait_for_a_scale():
    body = "a = MatMul(x, u) k = Shape(a) c = ConstantOfShape(k) e = Add(c, one) y = MatMul(e, w)"
    plan = cut(body, one=np.float32(1), **square("u", "w"))
    assert grouped(plan) == [["a", "y"]]


def test_the_number_of_layers_on_the_longest_path():
    text = """g (float[N,8] x) => (y) {
        a = MatMul(x, u) r = Relu(a) b = MatMul(r, v) s = Add(x, b) y = MatMul(s, w) }"""
    look = layers_of(graph_of(text, **square("u", "v", "w")))
    assert stages.depths(look.graph, look.layers.layers) == {"a": 1, "r": 1, "b": 2, "s": 2, "y": 3}


@pytest.mark.parametrize(
    ("limit", "expected"), [(3 * 256, [3]), (3 * 256 - 1, [2, 1]), (255, [1, 1, 1]), (0, [1, 1, 1])]
)
def test_pieces_for_verification(limit, expected):
    text = """g (float[N,8] x) => (y) {
        a = MatMul(x, u) t = Tanh(a) b = MatMul(t, v) s = Add(t, b) y = MatMul(s, w) }"""
    look = layers_of(graph_of(text, **square("u", "v", "w")))
    plan = stages.in_pieces(look.graph, look.layers.layers, limit)
    assert [len(stage.layers) for stage in plan.stages] == expected
    assert sum(len(stage.steps) for stage in plan.stages) == 5
    assert plan.pending == {}
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        assert set(after.inputs) & set(before.outputs)


def test_a_stage_reads_what_earlier_stages_made_even_long_ago():
    body = """a = MatMul(x, u) t = Tanh(a) b = MatMul(t, v) s = Tanh(b) c = MatMul(s, w) q = Tanh(c) p = Add(q, t)
              y = MatMul(p, z)"""
    plan = cut(body, **square("u", "v", "w", "z"))
    assert grouped(plan) == [["a"], ["b"], ["c"], ["y"]]
    assert plan.stages[0].outputs == ("a",)
    assert plan.stages[1].inputs == ("a",)
    assert set(plan.stages[1].outputs) == {"t", "b"}
    assert plan.pending["t"] == ()
    assert set(plan.stages[3].inputs) == {"c", "t"}
    assert plan.stages[3].outputs == ()


def test_a_bias_that_is_kept_settles_the_scales():
    """With a kept bias the nodes behind need s·y + b, which no pending scale tells."""
    text = "g (float[N,8] x) => (y) { a = Gemm(x, u, b) r = Relu(a) y = MatMul(r, w) }"
    look = layers_of(graph_of(text, b=normal(8), **square("u", "w")))
    kept = [replace(x, bias=replace(x.bias, kept=True)) if x.bias else x for x in look.layers.layers]
    assert grouped(stages.cut(look.graph, look.layers.layers)) == [["a", "y"]]
    assert grouped(stages.cut(look.graph, kept)) == [["a"], ["y"]]


def test_a_computed_bias_that_is_kept_waits_with_its_layer_and_a_constant_one_does_not():
    for bias, waits in (("Tanh(x)", True), ("Neg(c)", False)):
        text = f"g (float[N,8] x) => (y) {{ k = {bias} a = Gemm(x, u, k) t = Tanh(a) y = MatMul(t, v) }}"
        look = layers_of(graph_of(text, c=normal(8), **square("u", "v")))
        kept = [replace(x, bias=x.bias and replace(x.bias, kept=True)) for x in look.layers.layers]
        plan = stages.cut(look.graph, kept)
        assert grouped(plan) == [["a"], ["y"]]
        assert set(plan.stages[1].inputs) == ({"a", "k"} if waits else {"a"})
        assert plan.stages[0].inputs == ("x",)


def test_pieces_hold_about_as_many_bytes_as_asked_for():
    text = "g (float[N,8] x) => (y) { a = MatMul(x, u) b = MatMul(a, v) y = MatMul(b, w) }"
    look = layers_of(graph_of(text, **square("u", "v", "w")))  # 256 bytes each

    def pieces(limit):
        return grouped(stages.in_pieces(look.graph, look.layers.layers, limit))

    assert pieces(768) == [["a", "b", "y"]]
    assert pieces(767) == [["a", "b"], ["y"]]
    assert pieces(512) == [["a", "b"], ["y"]]
    assert pieces(511) == [["a"], ["b"], ["y"]]
    assert pieces(1) == [["a"], ["b"], ["y"]]


def test_a_stage_has_at_most_so_many_bytes_of_weights(monkeypatch):
    body = "a = MatMul(x, u) b = MatMul(a, v) y = MatMul(b, w)"
    for limit, expected in ((768, [["a", "b", "y"]]), (767, [["a", "b"], ["y"]]), (511, [["a"], ["b"], ["y"]])):
        monkeypatch.setattr(stages, "STAGE_BYTES", limit)
        assert grouped(cut(body, **square("u", "v", "w"))) == expected
