"""The report's entry for each layer: its status (|variance / target - 1| <= tol is ok), its numbers, its notes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.details import Histogram
from lsuv_cli.model import layers
from lsuv_cli.model.file import is_stripped
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer, LayerSet, Recurrent, Skipped
from lsuv_cli.model.prepare import Prepared
from lsuv_cli.report import Carried, ChannelsReport, LayerReport, Status, SumReport
from lsuv_cli.scaling.moments import Moments, pooled
from lsuv_cli.scaling.residuals import Sum
from lsuv_cli.scaling.stages import Plan
from lsuv_cli.scaling.trials import Turn
from lsuv_cli.scaling.weights import mean_and_square
from lsuv_cli.settings import Residual, Scale, Settings

Array = NDArray[Any]

Entries = Sequence[tuple[int, LayerReport]]
"""The entries of a report in the order of execution, each with its node, or the node that has it in its body."""


@dataclass(frozen=True)
class Findings:
    """The measurements of all layers, by the names of their outputs."""

    plan: Plan
    verified: Mapping[str, Moments] = field(default_factory=dict)  # in the written file, or in the inspected model
    given: Mapping[str, Moments] = field(default_factory=dict)  # in the model as given, if asked for
    turns: Mapping[str, Turn] = field(default_factory=dict)
    noise: Collection[str] = ()  # layers whose output proved to be nothing but rounding
    of_live_uses: Collection[str] = ()  # weights whose scale is that of all live uses, because their first use is dead
    outputs: Mapping[str, Histogram] = field(default_factory=dict)  # of the verified file, if asked for


def judge(moments: Moments | None, turn: Turn, tol: float) -> Status:
    """The status of a measured layer: ok if |variance / target - 1| <= tol, for each channel if these were scaled."""
    if moments is None or not moments.finite:
        return Status.NOT_FINITE
    if moments.variance == 0.0 or moments.noise:
        return Status.DEAD
    off = turn.deviation(moments)
    return Status.OK if off <= tol and moments.disputed is None else Status.OUTSIDE


def of_measurement(
    graph: Graph, every: LayerSet, selected: LayerSet, findings: Findings, settings: Settings | None
) -> Entries:
    """Node -> entry, for a model as it stands; each layer is judged by the settings, if there are any."""
    wanted = {layer.output for layer in selected.layers}
    users = layers.by_tensor(every.layers)
    entries = []
    for layer in every.layers:
        status = Status.PLANNED
        if settings:
            status = _measured_status(layer, users[layer.weight.base], findings, settings.tol)
        if layer.output not in wanted:
            status = Status.EXCLUDED
        entry = _entry(graph, layer, status, findings)
        if status not in {Status.PLANNED, Status.EXCLUDED}:
            entry = replace(entry, target=layer.target)
        entries.append((layer.node, replace(entry, shared=len(users[layer.weight.base]) > 1)))
    return _in_order(entries, every, Status.PLANNED)


def aimed_elsewhere(metadata: Mapping[str, str]) -> list[str]:
    """A warning if a model says that it was initialized to other targets than each layer's variance as a whole."""
    said = {
        "`scale='channel'`, so every channel has the target variance by itself": metadata.get("scale") == Scale.CHANNEL,
        "`residual='bounded'`, so branches have smaller targets": metadata.get("residual") == Residual.BOUNDED,
    }
    here = "here each layer's output is judged as a whole, against one target"
    return [f"the model was initialized with {what}; {here}" for what, is_so in said.items() if is_so]


def of_initialization(prepared: Prepared, findings: Findings, settings: Settings, dry_run: bool) -> Entries:
    """Node -> entry, for an initialized model, or for the plan to initialize it."""
    wanted = {layer.output for layer in prepared.layers.layers}
    reasons = {item.node: item for item in prepared.layers.skipped}
    users = layers.by_tensor(prepared.layers.layers)
    entries = []
    for layer in prepared.every.layers:
        turn = findings.turns.get(layer.output)
        before = findings.given.get(layer.output)
        notes = [*layer.notes, *prepared.notes.get(layer.output, ())]
        if layer.output not in wanted:
            left = reasons[layer.node]
            status = Status.EXCLUDED if left.excluded else Status.SKIPPED
            notes = [left.reason]
        else:
            status = _status(layer, users[layer.weight.base], findings, settings, dry_run)
            if findings.turns and turn is None:
                notes.append("scaled at the first use of its weight")
                if layer.is_centred:
                    notes.append("not centred: its weight is scaled at another use")
            if layer.keeps_bias:
                notes.append("bias kept")
            if turn is not None and turn.status is Status.OUTSIDE:
                notes.append(f"not scaled: with its scale, the {layer.activation} inside makes its output constant")
            if turn is not None and turn.centred:
                notes.append("bias centred")
            found = findings.verified.get(layer.output)
            if turn is not None and turn.status is Status.DEAD and found is not None and found.channels is not None:
                notes.append("every channel of its output is constant")
            if turn is not None and turn.dead is not None and turn.dead.any():
                notes.append(f"{turn.dead.sum()} of {len(turn.dead)} channels are dead: constant, and not scaled")
        entry = _entry(prepared.graph, layer, status, findings)
        entry = replace(
            entry,
            variance_given=before.variance if before else None,
            variance_at_turn=turn.variance if turn else None,
            scale=turn.scale if turn else None,
            target=(turn or layer).target if layer.output in wanted else None,
            channels=_channels(turn, findings.verified.get(layer.output)),
            shared=len(users.get(layer.weight.base, ())) > 1,
            notes=tuple(dict.fromkeys([*notes, *entry.notes])),
        )
        entries.append((layer.node, entry))
    recurrent = Status.PRE_INITIALIZED if settings.recurrent else Status.SKIPPED
    return _in_order(entries, replace(prepared.layers, layers=prepared.every.layers), recurrent)


def judged_at_home(entries: Entries, account: Carried | None, prepared: Prepared) -> tuple[Entries, Carried | None]:
    """The entries and the account of carried tensors: a layer that is not carried, or behind one, is not ok.

    It is right in the written model, but at home the old tensor stays, and what follows sees other values.
    """
    if account is None or not account.left:
        return entries, account
    reasons = {item.name: item.reason for item in account.left}
    owners: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    behind = _behind(prepared.graph, reasons)
    for layer in prepared.layers.layers:
        own = {layer.weight.base, layer.weight.value, layer.bias.value if layer.bias is not None else ""}
        for tensor in own & reasons.keys():
            owners.setdefault(tensor, []).append(layer.name)
            notes[layer.name] = f"not carried home: {reasons[tensor]}"
        if layer.output in behind:
            notes.setdefault(layer.name, "behind a layer that is not carried home")
    judged = [
        (node, replace(entry, status=Status.NOT_HOME, notes=(*entry.notes, notes[entry.name])))
        if entry.name in notes and entry.status in {Status.OK, Status.TIED}
        else (node, entry)
        for node, entry in entries
    ]
    left = tuple(replace(item, layers=tuple(owners.get(item.name, ()))) for item in account.left)
    return judged, replace(account, left=left)


def _behind(graph: Graph, tensors: Collection[str]) -> set[str]:
    """The values that depend on any of these constants, on more than their shapes."""
    found = set(tensors)
    for k, node in enumerate(graph.nodes):
        if node.op_type not in {"Shape", "Size"} and found & {*node.input, *graph.captured.get(k, ())}:
            found.update(name for name in node.output if name)
    return found


def of_sums(sums: Sequence[Sum], every: LayerSet, verified: Mapping[str, Moments]) -> tuple[SumReport, ...]:
    """The entries of residual sums, with their moments where these were measured."""
    names = {layer.output: layer.name for layer in every.layers}
    entries = []
    for each in sums:
        found = verified.get(each.output)
        entry = SumReport(each.name, each.number, each.k, each.n, names.get(each.layer, ""))
        entries.append(replace(entry, variance=found.variance, mean=found.mean) if found else entry)
    return tuple(entries)


def _status(layer: Layer, users: list[Layer], findings: Findings, settings: Settings, dry_run: bool) -> Status:
    """The status of an initialized layer."""
    turns, verified = findings.turns, findings.verified
    turn = turns.get(layer.output)
    if not turns:
        return Status.PLANNED if dry_run else Status.PRE_INITIALIZED
    found = verified.get(layer.output)
    if turn is not None and turn.status is not Status.OK:
        # Noise takes a scale that is likely to leave the weight's type.
        return Status.DEAD if turn.status is Status.OVERFLOW and found is not None and found.noise else turn.status
    status = judge(found, turn or Turn(None, target=layer.target), settings.tol)
    if layer.weight.base in findings.of_live_uses:
        deciding, tied = _live(users, verified), {Status.OUTSIDE, Status.DEAD}
    else:
        deciding = [verified[x.output] for x in users if x.output in turns and turns[x.output].status is Status.OK]
        tied = {Status.OUTSIDE}
    if len(users) < 2 or status not in tied or not deciding:
        return status
    first = next((turns[x.output] for x in users if x.output in turns), Turn(None, target=layer.target))
    together = judge(pooled(deciding), first, settings.tol)
    return Status.TIED if together is Status.OK else status


def _measured_status(layer: Layer, users: list[Layer], findings: Findings, tol: float) -> Status:
    """The status of a layer in a model as it stands: for a shared weight, what an initialization would have called it.

    The scale of a shared weight is decided by its uses in the stage of the first one or, if these are dead, by all live
    ones.
    """
    verified, stage_of = findings.verified, findings.plan.stage_of
    turn = Turn(None, target=layer.target)
    status = judge(verified.get(layer.output), turn, tol)
    if len(users) < 2 or status not in {Status.OUTSIDE, Status.DEAD}:
        return status
    stage = stage_of.get(users[0].output)
    first = _live([x for x in users if stage_of.get(x.output) == stage], verified)
    deciding = first or _live(users, verified)
    if not deciding or (first and status is Status.DEAD):
        return status
    return Status.TIED if judge(pooled(deciding), turn, tol) is Status.OK else status


def _live(users: Sequence[Layer], verified: Mapping[str, Moments]) -> list[Moments]:
    found = [verified[x.output] for x in users if x.output in verified]
    return [moments for moments in found if moments.finite and moments.variance > 0.0 and not moments.noise]


def _in_order(entries: list[tuple[int, LayerReport]], layer_set: LayerSet, recurrent: Status) -> Entries:
    """The entries of layers, skipped nodes and recurrent ones, in the order of execution."""
    known = {layer.node for layer in layer_set.layers} | {item.node for item in layer_set.recurrent}
    entries = [
        *entries,
        *((item.node, _skipped(item)) for item in layer_set.skipped if item.node not in known),
        *((item.node, _recurrent(item, recurrent)) for item in layer_set.recurrent),
    ]
    return sorted(entries, key=lambda pair: pair[0])


def _entry(graph: Graph, layer: Layer, status: Status, findings: Findings) -> LayerReport:
    moments = findings.verified.get(layer.output)
    stage = findings.plan.stage_of.get(layer.output)
    notes = list(layer.notes)
    if moments is not None and (moments.noise or (layer.output in findings.noise and not moments.is_zero)):
        notes.append("its output is nothing but rounding errors")
    elif moments is not None and moments.disputed is not None:
        notes.append(
            f"without onnxruntime's optimizers its variance on the first samples is {moments.disputed:.4g}, and with "
            "them another"
        )
    return LayerReport(
        name=layer.name,
        module=layer.module,
        op=layer.op,
        status=status,
        stage=None if stage is None else stage + 1,
        weight=layer.weight.base,
        shape=layer.weight.shape,
        groups=layer.groups,
        dtype=layer.weight.dtype,
        place=layer.weight.place,
        variance=moments.variance if moments else None,
        mean=moments.mean if moments else None,
        dead=moments.dead_units if moments else None,
        weight_std=_deviation(graph.array(layer.weight.base)) if _has_values(graph, layer) else None,
        notes=tuple(notes),
    )


def _channels(turn: Turn | None, moments: Moments | None) -> ChannelsReport | None:
    """A layer's channels, where they were measured one by one."""
    if turn is None or moments is None or moments.channels is None:
        return None
    mean, variance = moments.channels.mean, moments.channels.variance
    live = np.ones(len(mean), bool) if turn.dead is None else ~turn.dead
    if turn.status is Status.DEAD:
        live[:] = False
    scales = turn.scale * turn.ratios[live] if turn.ratios is not None and live.any() else None
    return ChannelsReport(
        count=len(mean),
        dead=int((~live).sum()),
        largest_mean=float(np.abs(mean).max()),
        least_variance=float(variance[live].min(initial=math.inf)) if live.any() else 0.0,
        most_variance=float(variance[live].max(initial=0.0)),
        least_scale=None if scales is None else float(scales.min()),
        most_scale=None if scales is None else float(scales.max()),
    )


def _skipped(item: Skipped) -> LayerReport:
    status = Status.EXCLUDED if item.excluded else Status.SKIPPED
    return LayerReport(item.name, item.op, status, item.module, shape=item.shape, notes=(item.reason,))


def _recurrent(item: Recurrent, status: Status) -> LayerReport:
    note = {
        Status.SKIPPED: "recurrent; `recurrent=True` makes its matrices orthonormal gate by gate",
        Status.PRE_INITIALIZED: "recurrent: pre-initialized gate by gate, not scaled",
    }.get(status, "recurrent")
    weight = item.weights[0][0]
    return LayerReport(
        item.name, item.op, status, item.module, weight=weight.base, shape=weight.shape, dtype=weight.dtype,
        notes=(note,),
    )  # fmt: skip


def _has_values(graph: Graph, layer: Layer) -> bool:
    """Whether a layer's weight is stored as a tensor with values."""
    return layer.weight.place != "folded" and not is_stripped(graph.tensors[layer.weight.base])


def _deviation(array: Array) -> float:
    """The standard deviation of a weight's entries."""
    if not array.size:
        return math.nan
    mean, square = mean_and_square(array)
    return math.sqrt(max(square - mean * mean, 0.0))
