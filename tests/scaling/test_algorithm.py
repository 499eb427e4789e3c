"""The loop of Algorithm 1: when another trial is made, and which one is the last."""

import math

import pytest

from helpers import square
from lsuv_cli.model.prepare import Prepared, layers_of
from lsuv_cli.report import Status
from lsuv_cli.scaling import algorithm, stages
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.trials import Turn
from lsuv_cli.settings import Settings
from working_copies import graph_of


@pytest.fixture
def run(monkeypatch):
    """Runs the loop on a chain of two layers whose second has these variances in the file, one after each trial."""

    def go(*variances, tol=0.01, max_trials=10, turns=(), first=(), between="Relu"):
        body = f"a = MatMul(x, u) t = {between}(a) y = MatMul(t, v)"
        look = layers_of(graph_of(f"g (float[N,8] x) => (y) {{ {body} }}", **square("u", "v")))
        prepared = Prepared(look.graph, look.layers, look.layers, {}, ())
        found = iter(variances)
        of_the_first = iter(first)
        given = iter(turns)
        plans = []

        def scaled(draft, state, needs):
            plans.append(state.plan)
            return {"a": Turn(1.0), "y": next(given, Turn(1.0))}

        def verify():
            number = next(found)
            noisy = number == "noise"
            a = Moments(0.0, next(of_the_first, 1.0))
            return {"a": a, "y": Moments(0.0, 1.0 if noisy else number, noise=noisy, begins=noisy)}

        monkeypatch.setattr(algorithm, "scale_layers", scaled)
        settings = Settings(tol=tol, max_trials=max_trials)
        plan = stages.cut(look.graph, look.layers.layers)
        return algorithm.lsuv(None, prepared, plan, settings, None, verify), plans

    return go


@pytest.mark.parametrize(
    ("variances", "trials"),
    [
        ((1.005,), 1),
        ((1.01 + 1e-12, 1.0), 2),
        ((1.25, 1.0), 2),
        ((1.5, 1.4, 1.0), 3),
        ((1.5, 1.46), 2),  # not worth while: more than 0.9 of the deviation is left
        ((1.5, 2.0), 2),
        ((math.nan,), 1),
    ],
)
def test_trials_go_on_while_they_help(variances, trials, run):
    result, _ = run(*variances)
    assert result.trials == trials


def test_there_are_no_more_trials_than_asked_for(run):
    result, _ = run(2.0, 1.5, 1.25, max_trials=3)
    assert result.trials == 3
    result, _ = run(2.0, max_trials=1)
    assert result.trials == 1


def test_noise_asks_for_another_trial_if_there_is_one(run):
    result, _ = run("noise", "noise")
    assert (result.trials, result.noise) == (2, {"y"})
    result, _ = run("noise", 1.0, 1.0)  # a signal once it is left alone, so it is scaled
    assert (result.trials, result.noise) == (3, set())
    result, _ = run("noise", max_trials=1)
    assert result.trials == 1


def test_behind_a_layer_that_stays_outside_the_others_are_scaled_once_more(run):
    result, _ = run(0.9, 0.9, 1.0, first=(1.1, 1.1, 1.1))
    assert result.trials == 3
    result, _ = run(1.0, 1.0, first=(1.1, 1.1))  # nothing else is outside
    assert result.trials == 2
    result, _ = run(0.9, 0.9, 0.9, 0.9, first=(1.1,) * 4)  # the second stays outside too
    assert result.trials == 4
    result, _ = run(0.9, 0.9, first=(math.inf,) * 2)
    assert result.trials == 1


def test_a_layer_that_is_constant_once_it_is_scaled_is_dead_for_good(run):
    """In the second trial it has no variance: what the first one scaled was rounding, though verification saw none."""
    given = [Turn(1e-15, 3e7), Turn(0.0, status=Status.DEAD), Turn(1e-15, status=Status.DEAD)]
    result, _ = run(0.12, 0.12, 1e-15, turns=given, between="Tanh")
    assert (result.trials, result.noise) == (3, {"y"})
    assert (result.turns["y"].status, result.turns["y"].scale) == (Status.DEAD, 1.0)


def test_a_layer_that_is_lost_behind_pending_scales_is_measured_again_within_the_trial(run):
    lost = Turn(None, status=Status.NOT_FINITE)
    result, plans = run(1.0, turns=[lost])
    assert result.trials == 1
    assert [len(plan.stages) for plan in plans] == [1, 2]
    assert result.turns["y"].status is Status.OK
    _, plans = run(1.0)
    assert len(plans) == 1
