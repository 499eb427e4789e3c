"""What happened to each layer, judged and put into words for the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from lsuv_cli.model import layers
from lsuv_cli.model.layers import Found, Layer, Recurrent, Skipped
from lsuv_cli.model.prepare import Prepared
from lsuv_cli.report import LayerReport, Status
from lsuv_cli.scaling.algorithm import Turn, pooled
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.stages import Plan
from lsuv_cli.scaling.weights import mean_and_square
from lsuv_cli.settings import Settings

Array = NDArray[Any]


def judge(moments: Moments | None, settings: Settings) -> Status:
    """Whether a layer's output has the variance it should have."""
    if moments is None or not moments.finite:
        return Status.NOT_FINITE
    if moments.variance == 0.0:
        return Status.DEAD
    off = abs(moments.variance / settings.target_variance - 1)
    return Status.OK if off <= settings.tol else Status.OUTSIDE


def of_measurement(
    every: Found, chosen: Found, plan: Plan, verified: Mapping[str, Moments], settings: Settings | None, read: Reader
) -> list[LayerReport]:
    """The entries of a model as it stands, judged by the settings, or not at all."""
    wanted = {layer.output for layer in chosen.layers}
    users = layers.by_tensor(every.layers)
    entries = []
    for layer in every.layers:
        status = judge(verified.get(layer.output), settings) if settings else Status.PLANNED
        if layer.output not in wanted:
            status = Status.EXCLUDED
        entry = _entry(layer, status, plan, verified, read)
        entries.append((layer.node, replace(entry, shared=len(users[layer.weight.base]) > 1)))
    return _in_order(entries, every, Status.PLANNED)


def of_initialization(
    prepared: Prepared,
    plan: Plan,
    turns: Mapping[str, Turn],
    verified: Mapping[str, Moments],
    given: Mapping[str, Moments],
    settings: Settings,
    read: Reader,
    dry_run: bool,
) -> list[LayerReport]:
    """The entries of an initialized model, or of the plan to initialize it."""
    found = prepared.found
    wanted = {layer.output for layer in found.layers}
    reasons = {item.node: item for item in found.skipped}
    users = layers.by_tensor(found.layers)
    entries = []
    for layer in prepared.every.layers:
        turn = turns.get(layer.output)
        notes = [*layer.notes, *prepared.notes.get(layer.output, ())]
        tied = len(users.get(layer.weight.base, ())) > 1
        if layer.output not in wanted:
            left = reasons[layer.node]
            status = Status.EXCLUDED if left.excluded else Status.SKIPPED
            notes = [left.reason]
        elif not turns:
            status = Status.PLANNED if dry_run else Status.PRE_INITIALIZED
        elif turn is not None and turn.status is not Status.OK:
            status = turn.status
        else:
            status = judge(verified.get(layer.output), settings)
            if turn is None:
                notes.append("scaled at the first use of its weight")
            together = [verified[x.output] for x in users[layer.weight.base] if x.output in turns]
            if tied and status is Status.OUTSIDE and judge(pooled(together), settings) is Status.OK:
                status = Status.TIED
        if layer.output in prepared.keeps_bias and layer.output in wanted:
            notes.append("bias kept")
        before = given.get(layer.output)
        entry = replace(
            _entry(layer, status, plan, verified, read),
            variance_given=before.variance if before else None,
            variance_at_turn=turn.variance if turn else None,
            scale=turn.scale if turn else None,
            shared=tied,
            notes=tuple(dict.fromkeys(notes)),
        )
        entries.append((layer.node, entry))
    recurrent = Status.PRE_INITIALIZED if settings.recurrent else Status.SKIPPED
    return _in_order(entries, replace(found, layers=prepared.every.layers), recurrent)


Reader = Callable[[str], Array]


def _in_order(entries: list[tuple[int, LayerReport]], found: Found, recurrent: Status) -> list[LayerReport]:
    """Layers, skipped nodes and recurrent ones in the order of execution."""
    known = {layer.node for layer in found.layers} | {item.node for item in found.recurrent}
    entries = [
        *entries,
        *((item.node, _skipped(item)) for item in found.skipped if item.node not in known),
        *((item.node, _recurrent(item, recurrent)) for item in found.recurrent),
    ]
    return [entry for _, entry in sorted(entries, key=lambda pair: pair[0])]


def _entry(layer: Layer, status: Status, plan: Plan, verified: Mapping[str, Moments], read: Reader) -> LayerReport:
    moments = verified.get(layer.output)
    return LayerReport(
        name=layer.name,
        module=layer.module,
        op=layer.op,
        status=status,
        stage=plan.stage_of.get(layer.output),
        weight=layer.weight.base,
        shape=layer.weight.shape,
        groups=layer.groups,
        dtype=layer.weight.dtype,
        place=layer.weight.place,
        variance=moments.variance if moments else None,
        mean=moments.mean if moments else None,
        dead=moments.dead if moments else None,
        weight_std=_deviation(read(layer.weight.base)) if layer.weight.place != "folded" else None,
        notes=layer.notes,
    )


def _skipped(item: Skipped) -> LayerReport:
    status = Status.EXCLUDED if item.excluded else Status.SKIPPED
    return LayerReport(item.name, item.op, status, item.module, shape=item.shape, notes=(item.reason,))


def _recurrent(item: Recurrent, status: Status) -> LayerReport:
    note = {
        Status.SKIPPED: "recurrent; --recurrent makes its matrices orthonormal gate by gate",
        Status.PRE_INITIALIZED: "recurrent: pre-initialized gate by gate, not scaled",
    }.get(status, "recurrent")
    weight = item.weights[0][0]
    return LayerReport(
        item.name, item.op, status, item.module, weight=weight.base, shape=weight.shape, dtype=weight.dtype,
        notes=(note,),
    )  # fmt: skip


def _deviation(array: Array) -> float:
    """The standard deviation of a weight's entries."""
    if not array.size:
        return math.nan
    mean, square = mean_and_square(array)
    return math.sqrt(max(square - mean * mean, 0.0))
