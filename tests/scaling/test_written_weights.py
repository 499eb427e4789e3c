"""What is stored of a weight, and what readers see its layer's output multiplied by."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers import normal
from lsuv_cli.model.prepare import layers_of
from lsuv_cli.report import Status
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.running_weights import RunningWeight
from lsuv_cli.scaling.solve import Solution
from lsuv_cli.scaling.trials import Turn
from lsuv_cli.scaling.written_weights import Writer, Written
from working_copies import graph_of

NORMED = "z = Conv(x, w) y = BatchNormalization<epsilon=0.0>(z, two, no, no, four)"


@pytest.mark.parametrize(
    ("body", "shape", "factor"),
    [
        ("y = MatMul(x, w)", (4,), 3),
        ("y = MatMul(w, x)", (4, 1), 3),
        ("y = Conv(x, w)", (4, 1), 3),
        (NORMED, (4, 1), 6),
    ],
)
def test_the_factor_of_a_layer_and_of_its_channels(body, shape, factor):
    """The norm has weight 2·√4 = 4 and divides by √4: c = 2."""
    tensors = {"two": np.full(4, 4, "f"), "no": np.zeros(4, "f"), "four": np.full(4, 4, "f")}
    rank = "N,4,4" if "Conv" in body else "4,4"
    weight = normal(4, 4, 1) if "Conv" in body else normal(4, 4)
    look = layers_of(graph_of(f"g (float[{rank}] x) => (y) {{ {body} }}", w=weight, **tensors))
    (layer,) = look.layers.layers
    assert Written(Solution(), 3.0).factor(layer) == factor
    ratios = np.array([1.0, 2.0, 0.5, 1.5])
    found = np.asarray(Written(Solution(ratios=ratios), 3.0).factor(layer))
    assert found.shape == shape
    np.testing.assert_allclose(found.ravel(), factor * ratios)


class Stored(dict[str, Any]):
    """A draft that remembers what is stored."""

    def store(self, tensor, array):
        self[tensor.name] = np.array(array)


def written(solution, keep, undone=None, factor=2.0, cast="", stored=None):
    """What is stored of a weight of ones that ran times `factor`."""
    body = f"c = Cast<to={cast}>(w) f = Cast<to=1>(c) y = MatMul(x, f)" if cast else "y = MatMul(x, w)"
    look = layers_of(graph_of(f"g (float[N,4] x) => (y) {{ {body} }}", w=np.ones((4, 4), "f")))
    (layer,) = look.layers.layers
    if cast:
        layer = replace(layer, weight=replace(layer.weight, cast="float16"))
    draft: Any = Stored() if stored is None else stored
    running = RunningWeight(np.full((4, 4), factor, "f"), factor)
    made = Writer(draft, look.graph, keep).write([layer], running, solution, [Moments(0.0, 1.0)], undone)
    return made, draft.get("w", np.zeros(1)).flat[0]


@pytest.mark.parametrize("keep", [True, False])
def test_a_scaled_weight_is_stored(keep):
    made, value = written(Solution(3.0), keep)
    assert (made.solution.scale, made.effective, value) == (3.0, 3.0, 6.0)


def test_a_weight_that_cannot_be_scaled_is_stored_as_it_was_drawn_and_a_kept_one_is_not_touched():
    made, value = written(Solution(status=Status.DEAD), keep=False)
    assert (made.solution.status, made.effective, value) == (Status.DEAD, 0.5, 1.0)
    draft: Any = Stored()
    made, _ = written(Solution(status=Status.DEAD), keep=True, stored=draft)
    assert not draft
    assert made.effective == 0.5


@pytest.mark.parametrize(("keep", "value"), [(True, 0.25), (False, 1.0)])
def test_an_earlier_turn_is_undone_where_the_stored_weight_has_it(keep, value):
    _, found = written(Solution(status=Status.DEAD), keep, undone=Turn(1.0, 4.0))
    assert found == value


def test_an_earlier_turn_of_each_channel_is_undone_channel_by_channel():
    draft: Any = Stored()
    undone = Turn(1.0, 4.0, ratios=np.array([1.0, 2.0, 0.5, 4.0]))
    written(Solution(status=Status.DEAD), keep=True, undone=undone, stored=draft)
    np.testing.assert_allclose(draft["w"], np.broadcast_to([0.25, 0.125, 0.5, 0.0625], (4, 4)))


@pytest.mark.parametrize(("scale", "cast", "status"), [(1e5, "", Status.OK), (1e5, "10", Status.OVERFLOW),
                                                      (1e39, "", Status.OVERFLOW), (1e4, "10", Status.OK)])  # fmt: skip
def test_a_scaled_weight_must_fit_every_type_it_is_read_in(scale, cast, status):
    made, value = written(Solution(scale), keep=False, cast=cast)
    assert made.solution.status is status
    if status is Status.OVERFLOW:
        assert value == 1.0
