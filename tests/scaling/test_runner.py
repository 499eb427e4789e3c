"""Passes over the data: which process runs them, with which session, and data and weights changed a little."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers import normal
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.scaling import shares, stages, values
from lsuv_cli.scaling.drawing import AsUsed
from lsuv_cli.scaling.pieces import Pieces, times
from lsuv_cli.scaling.providers import PROVIDERS, Device
from lsuv_cli.scaling.runner import Pass, Runner, drawn_ahead, free_memory
from lsuv_cli.scaling.runtime import Session, to_numpy
from lsuv_cli.scaling.translation import Unsupported
from lsuv_cli.settings import PreInit
from working_copies import graph_of

CPU = Device(PROVIDERS["cpu"], 0, 1)
X = normal(6, 4)


def looked(body, **tensors):
    tensors = tensors or {"w": normal(4, 4), "v": normal(4, 4, seed=1)}
    return layers_of(graph_of(f"g (float[N,4] x) => (y) {{ {body} }}", **tensors))


def needed(*batches, crew=None):
    return Pass(batches or [{"x": X}], CPU, 10**6, lambda *_: None, 1e-3, {"x": X[:2]}, crew)


def in_pieces(look, limit=10**6):
    return Pieces(look.graph, look.layers.layers, stages.in_pieces(look.graph, look.layers.layers, limit), {}, {})


def test_data_and_weights_times_a_factor():
    """h = 2x·2w = 4·xw; a constant that is no layer's weight, and integers, stay."""
    look = looked("a = MatMul(x, w) t = Relu(a) s = Add(t, c) y = MatMul(s, v)", w=normal(4, 4), v=normal(4, 4, seed=1),
                  c=normal(4))  # fmt: skip
    pieces = in_pieces(look)
    needs = needed()
    runner = Runner(look.graph, pieces.plan, needs, {})
    for factor in (1.0, 2.0):
        found = pieces.run(pieces.plan.stages[0], ["a", "y"], runner, factor=factor)
        a = factor**2 * X.astype(np.float64) @ normal(4, 4)
        y = (np.maximum(a, 0) + normal(4)) @ (factor * normal(4, 4, seed=1))
        np.testing.assert_allclose(to_numpy(found["a"]), a, rtol=1e-5)
        np.testing.assert_allclose(to_numpy(found["y"]), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(times(np.arange(3), 2.0), np.arange(3))
    runner.close()


def test_a_folded_weight_is_run_as_it_is():
    look = looked("n = Neg(w) y = MatMul(x, n)")
    pieces = in_pieces(look)
    found = pieces.run(pieces.plan.stages[0], ["y"], Runner(look.graph, pieces.plan, needed(), {}), factor=2.0)
    np.testing.assert_allclose(to_numpy(found["y"]), -2 * X @ normal(4, 4), rtol=1e-5)


class Crew:
    """Workers that are asked for their shares, or for weights."""

    def __init__(self):
        self.kinds, self.draws = [], []

    def begin(self, kinds):
        self.kinds.append(kinds)
        return self

    def draw(self, draws):
        self.draws.append(draws)
        return self


@pytest.mark.parametrize(
    ("body", "by_workers"),
    [
        ("y = MatMul(x, w)", True),
        ("r = RandomNormalLike(x) y = Add(x, r)", False),
        ("y, m, n = BatchNormalization<training_mode=1>(x, o, o, o, o)", False),
        ("y = BatchNormalization(x, o, o, o, o)", True),
    ],
)
def test_workers_run_what_does_not_depend_on_the_batches_before(body, by_workers):
    look = looked(body, w=normal(4, 4), o=np.ones(4, "f"))
    crew: Any = Crew()
    plan = stages.in_pieces(look.graph, look.layers.layers, 10**6)
    runner = Runner(look.graph, plan, needed(crew=crew), {})
    assert (runner.shares is crew) == by_workers
    assert crew.kinds == ([{"x": None}] if by_workers else [])
    assert Runner(look.graph, plan, needed(), {}).shares is not crew


def test_weights_are_drawn_ahead_by_workers_once_each():
    look = looked("a = MatMul(x, w) b = MatMul(a, v) y = MatMul(b, w)")
    crew: Any = Crew()
    layers = look.layers.layers
    drawn: Any = drawn_ahead(layers, PreInit.ORTHONORMAL, 3, crew)
    assert drawn is crew
    assert [(draw.name, draw.seed) for draw in crew.draws[0]] == [("w", 3), ("v", 3)]
    assert isinstance(drawn_ahead(layers, PreInit.KEEP, 3, crew), AsUsed)
    assert isinstance(drawn_ahead(layers, PreInit.ORTHONORMAL, 3, None), AsUsed)


def test_a_session_that_is_given_is_used(monkeypatch):
    look = looked("y = MatMul(x, w)")
    pieces = in_pieces(look)
    runner = Runner(look.graph, pieces.plan, needed(), {})
    stage = pieces.plan.stages[0]
    builder = pieces.builder(stage, runner.types(stage))
    model = builder.finish(["y"], ())
    made = []
    monkeypatch.setattr(shares, "Session", lambda *a, **k: made.append(1) or Session(*a, **k))
    runner.run(0, model, Session(model, CPU))
    assert not made
    runner.run(0, model)
    assert made == [1]


@pytest.mark.parametrize(("after", "tries"), [(0, 3), (1, 1)])
def test_values_in_types_that_the_device_lacks_are_tried_in_others_unless_some_were_given(after, tries, monkeypatch):
    given = []

    def fails(look, layers, needs, retype):
        given.append(retype)
        yield from [("layer", X)] * after
        raise Unsupported("no kernel")

    monkeypatch.setattr(values, "_outputs", fails)
    with pytest.raises(Unsupported):
        list(values.layer_outputs(None, (), None))
    assert len(given) == tries


def test_the_values_of_layers_batch_by_batch_piece_by_piece(monkeypatch):
    look = looked("a = MatMul(x, w) t = Tanh(a) y = MatMul(t, v)")
    monkeypatch.setattr(values, "PIECE_BYTES", 64)
    batches = [{"x": X}, {"x": 2 * X[:3]}]
    found = list(values.layer_outputs(look, look.layers.layers, needed(*batches)))
    assert [layer.output for layer, _ in found] == ["a", "a", "y", "y"]
    for (_, a), (_, y), batch in zip(found[:2], found[2:], batches, strict=True):
        np.testing.assert_allclose(a, batch["x"] @ normal(4, 4), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(y, np.tanh(batch["x"] @ normal(4, 4)) @ normal(4, 4, seed=1), rtol=1e-4, atol=1e-5)
    (only,) = values.layer_outputs(look, look.layers.layers[1:], needed())
    assert only[0].output == "y"


@pytest.mark.parametrize(("tells", "expected"), [((30, 100), 30), (None, None)])
def test_the_memory_of_a_device_is_what_the_device_tells(tells, expected):
    provider = SimpleNamespace(free_memory=lambda index: tells if index == 2 else None)
    device: Any = SimpleNamespace(is_host=False, index=2, provider=provider)
    assert free_memory(device) == expected


def test_values_that_no_later_stage_reads_are_freed():
    look = looked("a = MatMul(x, w) t = Tanh(a) y = MatMul(t, v)")
    pieces = in_pieces(look, limit=1)
    needs = needed()
    runner = Runner(look.graph, pieces.plan, needs, {})
    pieces.run(pieces.plan.stages[0], [], runner)
    runner.forget(0)
    assert runner.frontier.bytes == X.nbytes  # a, which the second piece reads
    runner.forget(1)
    assert runner.frontier.bytes == 0
    runner.close()


@pytest.mark.parametrize("kind", ["float32", "float16", "float64", "bfloat16"])
def test_numbers_of_every_type_of_float_are_multiplied(kind):
    made = times(np.array([1.5, -2.0]).astype(np.dtype(kind)), 2.0)
    assert str(made.dtype) == kind
    np.testing.assert_array_equal(made.astype(np.float64), [3.0, -4.0])


def test_a_stage_reads_the_data_and_what_waits_in_every_batch():
    look = looked("a = MatMul(x, w) t = Tanh(a) s = Add(t, x) y = MatMul(s, v)")
    pieces = in_pieces(look, limit=1)
    first, second = pieces.plan.stages
    assert second.inputs == ("a", "x")
    runner = Runner(look.graph, pieces.plan, needed({"x": X}, {"x": 2 * X}), {})
    for index, (stage, wanted) in enumerate([(first, ("a",)), (second, ("y",))]):
        runner.run(index, pieces.builder(stage, runner.types(stage)).finish(wanted, ()))
    for number, x in enumerate([X, 2 * X]):
        expected = (np.tanh(x.astype(np.float64) @ normal(4, 4)) + x) @ normal(4, 4, seed=1)
        np.testing.assert_allclose(to_numpy(runner.frontier.get(number, "y")), expected, rtol=1e-4, atol=1e-5)
    runner.close()
