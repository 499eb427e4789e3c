"""Sizes in bytes that are worked out before anything runs, against sizes by hand."""

import shutil
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from helpers import normal
from lsuv_cli.errors import LsuvError
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.scaling import memory_needs, stages
from lsuv_cli.scaling.filling import _Store
from lsuv_cli.scaling.inference import inferred_types
from working_copies import Source, graph_of

TEXT = """g (float[N,8] x) => (z) {
    a = MatMul(x, u) t = Tanh(a) b = MatMul(t, v) s = Tanh(b) c = MatMul(s, w) z = Add(c, t) }"""
TENSORS = {"u": normal(8, 16), "v": normal(16, 4), "w": normal(4, 16)}


def planned(text=TEXT, tensors=TENSORS):
    look = layers_of(graph_of(text, **tensors))
    return look.graph, stages.cut(look.graph, look.layers.layers)


def batch(rows):
    return {"x": normal(rows, 8)}


def test_the_bytes_of_values():
    graph, _ = planned()
    found = memory_needs.value_bytes(graph, batch(10))
    assert {name: found[name] for name in "atbscz"} == {
        name: 4 * 10 * (16 if name in "atcz" else 4) for name in "atbscz"
    }


def test_the_bytes_of_weights_in_the_largest_stage():
    graph, plan = planned()
    assert len(plan.stages) == 3
    assert memory_needs.stage_weights(graph, plan) == 4 * 8 * 16


def test_the_bytes_that_wait_between_stages():
    graph, plan = planned()
    # Behind the first stage a or t waits until the end, behind the second b as well.
    assert memory_needs.between_stages(graph, plan, [batch(10)] * 3) == 3 * 4 * 10 * (16 + 4)
    assert memory_needs.between_stages(graph, plan, []) is None
    alone, cut = planned("g (float[N,8] x) => (a) { a = MatMul(x, u) }", {"u": normal(8, 16)})
    assert memory_needs.between_stages(alone, cut, [batch(10)]) == 0


def test_the_layer_that_needs_most():
    graph, plan = planned()
    sizes = memory_needs.value_bytes(graph, batch(10))
    assert memory_needs.most_needed(plan.stages[1], sizes) == ("b", 4 * 10 * (16 + 4))
    assert memory_needs.most_needed(plan.stages[1], {}) == ("b", 0)


def test_a_batch_that_does_not_fit_is_refused_with_one_that_does():
    graph, plan = planned()
    sizes = memory_needs.value_bytes(graph, batch(10))
    needed = 4 * 10 * (16 + 4)
    memory_needs.check_batch(plan.stages[1], sizes, batch(10), needed)
    memory_needs.check_batch(plan.stages[1], sizes, batch(10), None)
    with pytest.raises(LsuvError, match=r"a batch of 10 needs at least .* in layer b, .*`batch_size=1`"):
        memory_needs.check_batch(plan.stages[1], sizes, batch(10), needed - 1)
    with pytest.raises(LsuvError, match=r"use `batch_size=1`$"):
        memory_needs.check_batch(plan.stages[1], sizes, batch(10), 10)
    with pytest.raises(LsuvError, match="it takes more memory"):
        memory_needs.check_batch(plan.stages[1], sizes, batch(1), 10)


def test_the_batch_size_that_fits():
    graph, plan = planned()
    # The data comes first: a batch of 1,000 times its own size is not looked at.
    assert memory_needs.fitting_batch(graph, plan, batch(10), 4 * 10 * 8 * 1000) is None
    # Layer a reads x, whose size is the user's and not inferred, and writes 16 numbers for each sample.
    most = max(memory_needs.most_needed(stage, memory_needs.value_bytes(graph, batch(10)))[1] for stage in plan.stages)
    assert memory_needs.fitting_batch(graph, plan, batch(10), 6 * most) is None
    assert memory_needs.fitting_batch(graph, plan, batch(10), 6 * most - 1) == 9
    assert memory_needs.fitting_batch(graph, plan, batch(10), 3 * most) == 5
    assert memory_needs.fitting_batch(graph, plan, batch(10), -1) == 1  # the weights alone do not fit
    assert memory_needs.fitting_batch(graph, plan, batch(10), most // 5) == 1
    assert memory_needs.fitting_batch(graph, plan, batch(1), 10) is None
    assert memory_needs.fitting_batch(graph, plan, batch(2), 10) == 1
    assert memory_needs.fitting_batch(graph, plan, batch(10), None) is None


def test_what_waits_must_fit_into_memory_or_the_temporary_directory(monkeypatch):
    _, plan = planned()
    sizes = dict.fromkeys(plan.stages[0].outputs, 100)
    count = len(plan.stages[0].outputs)

    def check(waiting, budget, free):
        usage = shutil.disk_usage("/")._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
        memory_needs.check_waiting(plan.stages[0], sizes, 3, waiting, budget)

    more = 300 * count
    check(waiting=0, budget=more, free=0)
    check(waiting=50, budget=more, free=50)
    check(waiting=10_000, budget=100, free=more)  # what waits already has its place
    for waiting, budget, free in ((50, more, 49), (10_000, 100, more - 1), (0, 0, more - 1)):
        with pytest.raises(LsuvError, match="have to wait in a file between stages"):
            check(waiting, budget, free)


# Types and shapes as onnx infers them


def dims(kind):
    return [d.dim_value for d in kind.shape.dim]


def test_shapes_follow_small_constants_and_the_data():
    text = "g (float[N,6] x) => (y) { r = Reshape(x, s) y = MatMul(r, w) k = Add(y, big) }"
    tensors = {"s": np.array([-1, 3]), "w": normal(3, 200), "big": normal(1, 200)}
    graph = graph_of(text, **tensors)
    found = inferred_types(graph, {"x": normal(5, 6)})
    assert (dims(found["r"]), dims(found["y"]), dims(found["k"])) == ([10, 3], [10, 200], [10, 200])
    assert found["y"].elem_type == TensorProto.FLOAT


def test_large_tensors_are_not_read_for_their_shapes():
    class Refusing(Source):
        def array(self, tensor):
            assert np.prod(tensor.dims) * 8 <= 1024
            assert tensor.data_type != TensorProto.DOUBLE
            return super().array(tensor)

    text = "g (float[N,6] x) => (y) { y = MatMul(x, w) d = Cast<to=11>(y) e = Add(d, b) }"
    graph = graph_of(text, w=normal(6, 30), b=normal(30, dtype=np.float64), source=Refusing())
    assert dims(inferred_types(graph, {"x": normal(5, 6)})["e"]) == [5, 30]
    small = graph_of(text, w=normal(6, 21), b=normal(21, dtype=np.float64), source=Refusing())
    assert dims(inferred_types(small, {"x": normal(5, 6)})["y"]) == [5, 21]


def test_nothing_is_known_where_inference_fails():
    text = "g (float[N,6] x) => (y) { y = MatMul(x, w) }"
    graph = graph_of(text, w=normal(5, 4))
    assert inferred_types(graph, {"x": normal(5, 6)}) == {}


def test_memory_that_runs_out_is_no_failure_of_inference(monkeypatch):
    def full(*given, **more):
        raise MemoryError

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", full)
    with pytest.raises(MemoryError):
        inferred_types(graph_of("g (float[N,6] x) => (y) { y = Neg(x) }"), {"x": normal(5, 6)})


def test_constants_of_a_model_of_ir_3_need_not_be_inputs():
    graph = graph_of("g (float[N,6] x) => (y) { r = Reshape(x, s) y = Neg(r) }", ir=3, s=np.array([-1, 3]))
    assert dims(inferred_types(graph, {"x": normal(5, 6)})["y"]) == [10, 3]


def test_the_samples_of_a_batch_are_those_of_its_longest_input():
    several = {"x": normal(10, 8), "state": normal(2, 8), "number": np.array(1)}
    assert memory_needs._samples(several) == 10
    assert memory_needs._samples({"number": np.array(1)}) == 1


def test_a_value_whose_size_nobody_knows_waits_in_unknown_space():
    text = """g (float[N,8] x) => (z) {
        a = MatMul(x, u) o = local.Odd(a) b = MatMul(o, v) c = Add(b, a) t = Tanh(c) z = MatMul(t, w) }"""
    graph, plan = planned(text, {"u": normal(8, 8), "v": normal(8, 8), "w": normal(8, 8)})
    assert len(plan.stages) == 3
    assert memory_needs.between_stages(graph, plan, [batch(10)]) is None


# Values of stripped tensors that go to a file


def test_values_in_a_file_follow_one_another(tmp_path):
    class File:
        places: ClassVar[dict[str, Any]] = {}

        def put(self, tensor, place):
            self.places[tensor.name] = place

    file: Any = File()
    store = _Store(file, tmp_path)
    given = {name: normal(5, seed=k) for k, name in enumerate("abc")}
    for name, array in given.items():
        store.put(TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[5]), array)
    data = (tmp_path / "filled.data").read_bytes()
    assert data == b"".join(array.tobytes() for array in given.values())
    assert [(place.offset, place.length) for place in File.places.values()] == [(0, 20), (20, 20), (40, 20)]


def test_a_value_that_no_later_stage_reads_waits_no_longer():
    """a of 16 numbers waits until the second stage, b of 4 and c of 16 after it: 20 at a time, not 36."""
    text = """g (float[N,8] x) => (z) {
        a = MatMul(x, u) t = Tanh(a) b = MatMul(t, v) s = Tanh(b) c = MatMul(s, w) r = Tanh(c) z = MatMul(r, k) }"""
    tensors = {"u": normal(8, 16), "v": normal(16, 4), "w": normal(4, 16), "k": normal(16, 2)}
    graph, plan = planned(text, tensors)
    assert len(plan.stages) == 4
    assert memory_needs.between_stages(graph, plan, [batch(10)]) == 4 * 10 * 20
