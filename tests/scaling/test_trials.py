"""What is kept between trials: turns that multiply, noise that is left alone and freed, and the worst deviation."""

import math
from dataclasses import replace

import numpy as np
import pytest

from helpers import normal, square
from lsuv_cli.model.prepare import Prepared, layers_of
from lsuv_cli.report import Status
from lsuv_cli.scaling import stages
from lsuv_cli.scaling.moments import ChannelMoments, Moments
from lsuv_cli.scaling.running_weights import RunningWeight
from lsuv_cli.scaling.solve import Solution
from lsuv_cli.scaling.trials import Trials, Turn
from lsuv_cli.settings import PreInit, Settings
from working_copies import graph_of

CHAIN = "a = MatMul(x, u) b = MatMul(a, v) t = Tanh(b) y = MatMul(t, w)"
TIED = "a = MatMul(z, w) t = Tanh(a) y = MatMul(t, w) s = Tanh(y) q = MatMul(s, w)"
SIGNAL, ZERO, LOST = Moments(0.0, 1.0, count=10), Moments(3.0, 0.0, count=10), Moments(math.nan, math.nan)
NOISE, BEGINS = Moments(0.0, 1.0, noise=True), Moments(0.0, 1.0, noise=True, begins=True)


def trials(body=CHAIN, settings=None, microsoft=False, **tensors):
    tensors = tensors or square("u", "v", "w")
    text = f"g (float[N,8] x, float[N,8] z) => (y) {{ {body} }}"
    found = layers_of(graph_of(text, microsoft=microsoft, **tensors))
    prepared = Prepared(found.graph, found.layers, found.layers, {}, ())
    return Trials(prepared, settings or Settings(), stages.cut(found.graph, found.layers.layers))


def took(state, **turns):
    state.take({name: turn if isinstance(turn, Turn) else Turn(1.0, turn) for name, turn in turns.items()})
    return state


def by_channel(mean, variance):
    zeros = np.zeros((3, len(mean)))
    channels = ChannelMoments(np.array(mean), np.array(variance), *zeros)
    return Moments(0.0, 1.5, count=10, channels=channels)


# Turns


def test_two_turns_as_one():
    first = Turn(9.0, 3.0, ratios=np.array([1.0, 2.0]))
    both = first.then(Turn(1.1, 0.5, Status.OUTSIDE, target=4.0, ratios=np.array([3.0, 0.5])))
    assert (both.variance, both.scale, both.status, both.target) == (9.0, 1.5, Status.OUTSIDE, 4.0)
    np.testing.assert_array_equal(both.ratios, [3.0, 1.0])
    np.testing.assert_array_equal(first.then(Turn(1.0)).ratios, [1.0, 2.0])
    assert Turn(1.0).then(Turn(1.0)).ratios is None


def test_the_deviation_of_a_layer():
    assert Turn(1.0, target=2.0).deviation(Moments(0.0, 3.0)) == pytest.approx(0.5)
    assert Turn(1.0, target=2.0).deviation(Moments(0.0, 1.0)) == pytest.approx(0.5)
    channels = by_channel([0.1, -0.8, 9.0], [2.2, 1.0, 0.0])
    assert Turn(1.0, target=2.0).deviation(channels) == pytest.approx(0.25)  # 1.5 of 2, as a whole
    dead, ratios = np.array([False, False, True]), np.ones(3)
    assert Turn(1.0, target=2.0, ratios=ratios, dead=dead).deviation(channels) == pytest.approx(0.5)
    assert Turn(1.0, target=2.0, ratios=ratios).deviation(channels) == pytest.approx(1.0)
    assert Turn(1.0, target=4.0, dead=dead, centred=True).deviation(channels) == pytest.approx(1 - 1.5 / 4)
    assert Turn(1.0, target=1.0, dead=dead, centred=True).deviation(channels) == pytest.approx(0.8)
    assert Turn(1.0, target=1.44, dead=dead, centred=True).deviation(channels) == pytest.approx(0.8 / 1.2)


@pytest.mark.parametrize("pre_init", [PreInit.ORTHONORMAL, PreInit.KEEP])
def test_scales_multiply_unless_weights_are_drawn_anew(pre_init):
    state = trials(settings=Settings(pre_init=pre_init))
    assert state.pre_init is pre_init
    took(state, a=2.0)
    assert state.pre_init is PreInit.KEEP
    took(state, a=3.0)
    assert state.turns["a"].scale == 6.0
    state.cut_shorter()
    assert state.pre_init is pre_init
    took(state, a=5.0)
    assert state.turns["a"].scale == (30.0 if pre_init is PreInit.KEEP else 5.0)


def test_a_layers_turn_is_that_of_the_pre_initialized_weight():
    """The weight ran times 2, so the variance that is told is a quarter, and the scale twice the one that was found."""
    state = trials()
    layer = replace(state.layers[0], target=3.0)
    running = RunningWeight(normal(8, 8), 2.0)
    turn = state.turn(layer, Moments(0.0, 8.0), Solution(5.0), running)
    assert (turn.variance, turn.scale, turn.status, turn.target) == (2.0, 10.0, Status.OK, 3.0)
    assert not turn.centred
    assert math.isnan(state.turn(layer, LOST, Solution(status=Status.NOT_FINITE), running).variance)
    state.unscaled["a"] = None
    assert state.turn(layer, SIGNAL, Solution(), running).status is Status.DEAD
    state.saturated.add("a")
    assert state.turn(layer, SIGNAL, Solution(), running).status is Status.OUTSIDE


@pytest.mark.parametrize(("status", "centred"), [(Status.OK, True), (Status.DEAD, False)])
def test_a_layer_that_has_no_scale_is_not_centred(status, centred):
    body = "h = MatMul(x, u) y = Add(h, c)"
    state = trials(body, u=normal(8, 8), c=normal(8))
    (layer,) = state.layers
    layer = replace(layer, bias=replace(layer.bias, centred=True))
    assert state.turn(layer, SIGNAL, Solution(status=status), RunningWeight(normal(8, 8), 1.0)).centred == centred


# Pending scales


def test_a_layer_lost_behind_a_pending_scale_asks_for_shorter_chains():
    state = took(trials(), a=1.0, b=Turn(None, status=Status.NOT_FINITE), y=1.0)
    assert state.lost_behind_pending_scales()
    state.cut_shorter()
    assert state.plan.in_front == {"a": (), "b": (), "y": ()}
    assert state.anew
    assert not state.lost_behind_pending_scales()


@pytest.mark.parametrize("status", [Status.NOT_FINITE, Status.DEAD, Status.OUTSIDE])
@pytest.mark.parametrize("name", ["a", "b", "y"])
def test_no_other_layer_asks_for_them(name, status):
    state = took(trials(), **dict.fromkeys("aby", 1.0) | {name: Turn(None, status=status)})
    assert state.lost_behind_pending_scales() == (name == "b" and status is not Status.OUTSIDE)
    state.unscaled["b"] = None
    assert not state.lost_behind_pending_scales()


# Noise


def test_noise_is_left_unscaled_in_the_next_trial_which_begins_anew():
    state = took(trials(), a=2.0, b=3.0, y=4.0)
    undo = state.turns["a"]
    assert not state.learn({"a": SIGNAL, "b": SIGNAL, "y": SIGNAL})
    assert not state.anew
    assert state.learn({"a": BEGINS, "b": NOISE, "y": SIGNAL})
    assert state.anew
    assert state.noise == {"a", "b"}
    first, second, third = state.layers
    assert state.undone([first]) is undo
    assert state.undone([third]) is None
    assert state.live([first, third], [SIGNAL, ZERO]) == [ZERO]
    running = RunningWeight(normal(8, 8), 2.0)
    assert state.decided([first, second], running).status is Status.DEAD
    assert state.decided([first, third], running) is None
    took(state, a=Turn(1.0, status=Status.DEAD), b=Turn(1.0, status=Status.DEAD), y=1.0)
    assert state.undone([first]) is None
    assert state.noise == {"a", "b"}
    result = state.result({"a": SIGNAL}, 2)
    assert (result.trials, result.noise, result.turns) == (2, {"a", "b"}, state.turns)


@pytest.mark.parametrize(("found", "status"), [(ZERO, Status.OK), (NOISE, Status.OK), (NOISE, Status.OUTSIDE)])
def test_what_was_scaled_and_is_constant_or_noise_is_new(found, status):
    state = took(trials(), a=Turn(1.0, status=status), b=1.0, y=1.0)
    learned = state.learn({"a": found, "b": SIGNAL, "y": SIGNAL})
    assert learned == (status is Status.OK)
    assert ("a" in state.unscaled) == learned


@pytest.mark.parametrize(("found", "freed"), [(SIGNAL, True), (ZERO, False), (LOST, False), (NOISE, False)])
def test_a_layer_that_proves_to_have_a_signal_is_freed(found, freed):
    state = took(trials(), a=1.0, b=1.0, y=1.0)
    state.unscaled = {"b": None}
    assert state.learn({"a": SIGNAL, "b": found, "y": SIGNAL}) == freed
    assert ("b" in state.unscaled) != freed
    assert state.freed["b"] == freed
    assert state.anew == freed


@pytest.mark.parametrize(("found", "times", "lost"), [(BEGINS, 1, True), (NOISE, 1, False), (NOISE, 3, True)])
def test_noise_that_begins_at_a_freed_layer_and_the_third_time_of_any_are_for_good(found, times, lost):
    """Behind another layer of noise, which may be where it comes from."""
    state = took(trials(), a=1.0, b=1.0, y=1.0)
    state.freed["b"] = times
    state.learn({"a": NOISE, "b": found, "y": SIGNAL})
    assert ("b" in state.lost) == lost
    state.learn({"a": SIGNAL, "b": SIGNAL, "y": SIGNAL})
    assert ("b" in state.unscaled) == lost


def test_the_first_layer_that_is_noise_again_is_for_good():
    state = took(trials(), a=1.0, b=1.0, y=1.0)
    state.freed["b"] = state.freed["y"] = 1
    state.learn({"a": SIGNAL, "b": NOISE, "y": NOISE})
    assert state.lost == {"b"}


def test_noise_that_begins_at_a_layer_that_was_never_freed_is_not_for_good():
    state = took(trials(), a=1.0, b=1.0, y=1.0)
    state.learn({"a": SIGNAL, "b": BEGINS, "y": SIGNAL})
    assert not state.lost


@pytest.mark.parametrize(("activation", "found", "saturated"), [("Sigmoid", ZERO, True), ("Sigmoid", NOISE, False),
                                                               ("Relu", ZERO, False)])  # fmt: skip
def test_an_activation_that_its_layer_saturates_is_for_good(activation, found, saturated):
    call = f'com.microsoft.FusedGemm<activation="{activation}">(x, u)'
    state = took(trials(f"y = {call}", microsoft=True, u=normal(8, 8)), y=2.0)
    state.learn({"y": found})
    assert state.saturated == ({"y"} if saturated else set())
    assert state.noise == (set() if saturated else {"y"})
    assert ("y" in state.lost) == saturated


# A shared weight whose first use is dead


def tied():
    state = trials(TIED, w=normal(8, 8))
    return took(state, a=Turn(0.0, status=Status.DEAD))


def test_a_shared_weight_whose_first_use_is_dead_is_scaled_by_its_live_uses():
    """Variances 4 and 1 of equally many values, pooled 2.5; the weight ran times 2."""
    state = tied()
    verified = {"a": ZERO, "y": Moments(0.0, 4.0, count=5), "q": Moments(0.0, 1.0, count=5)}
    assert state.learn(verified)
    assert state.feedback == {"w": pytest.approx(1 / math.sqrt(2.5))}
    assert not state.anew
    decided = state.decided(state.layers, RunningWeight(normal(8, 8), 2.0))
    assert decided.scale == pytest.approx(1 / math.sqrt(2.5) / 2)
    took(state, a=decided.scale)
    assert not state.learn(verified | {"q": Moments(0.0, 4.0, count=5)})
    assert state.feedback == {"w": pytest.approx(1 / 2)}
    assert state.worst(verified) == pytest.approx(1.5)
    assert state.result(verified, 3).of_live_uses == {"w"}


@pytest.mark.parametrize("found", [ZERO, LOST, NOISE])
def test_uses_without_a_signal_do_not_count(found):
    state = tied()
    state.learn({"a": ZERO, "y": found, "q": Moments(0.0, 4.0, count=10)})
    assert state.feedback == {"w": pytest.approx(1 / 2)}


def test_a_first_use_that_is_alive_decides():
    state = took(trials(TIED, w=normal(8, 8)), a=1.0)
    assert not state.learn({"a": SIGNAL, "y": SIGNAL, "q": SIGNAL})
    assert not state.feedback


def test_a_dead_layer_that_has_its_weight_for_itself_gets_no_feedback():
    state = took(trials(), a=Turn(0.0, status=Status.DEAD), b=1.0, y=1.0)
    assert not state.learn({"a": SIGNAL, "b": SIGNAL, "y": SIGNAL})
    assert not state.feedback


# The worst layer


def test_the_worst_deviation_is_that_of_layers_that_can_be_scaled():
    state = took(trials(), a=1.0, b=1.0, y=1.0)
    found = {"a": Moments(0.0, 1.25), "b": Moments(0.0, 0.5), "y": Moments(0.0, 1.125)}
    assert state.worst(found) == 0.5
    state.unscaled = {"b": None}
    assert state.worst(found) == 0.25
    state.turns["a"] = Turn(1.0, status=Status.UNREACHABLE)
    assert state.worst(found) == 0.125
    state.turns["y"] = Turn(1.0, status=Status.DEAD)
    assert state.worst(found) == 0.0
