"""LSUV for a PyTorch network in one call: `from lsuv_cli.torch import lsuv_; report = lsuv_(net, batch)`.

1. The network is exported to ONNX as it is, in eval mode, with BatchNorm left unfolded (export.py).
2. The ONNX model is initialized, and each weight is traced by its values to a tensor of the network's state dict.
3. The new state dict is loaded in place; parametrized weights go through their parametrization (loading.py). If some
   layer's weight cannot be carried home, 2 and 3 are done once more without that layer, so that the others are right.
4. Every layer is measured once more in PyTorch on the same data (calls.py), and the report has that variance too.

If any step fails, the network keeps its old weights.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

try:
    import torch
except ImportError as problem:
    raise ImportError("lsuv_cli.torch needs PyTorch: pip install 'lsuv-cli[torch]'") from problem

from lsuv_cli import api
from lsuv_cli.errors import LsuvError
from lsuv_cli.report import Carried, LayerReport, NotCarried, Report, Status
from lsuv_cli.results import Initialized
from lsuv_cli.settings import Settings, SettingsDict
from lsuv_cli.torch import batches, calls, export, loading, network
from lsuv_cli.torch.batches import Call, Given
from lsuv_cli.torch.network import Tensors

__all__ = ["lsuv_"]

FAILED = (LsuvError, export.ExportFailed)
UNMEASURED = "not measured in PyTorch"
WANTED = "in PyTorch, where the target is"
UNRUNNABLE = "PyTorch cannot run the network with its new weights, so it keeps the old ones"


def lsuv_(net: torch.nn.Module, data: Any, *, dynamo: bool | None = None, **settings: Unpack[SettingsDict]) -> Report:
    """Initialize a network's weights by LSUV, in place.

    `data` is a batch as the network takes it (a tensor, a tuple, or a dict of keyword arguments), or an iterable of
    batches such as a DataLoader, of which the first 256 samples are taken, or `limit`. Items of a tuple beyond the
    arguments that `forward` requires are labels, and left out. `dynamo` chooses PyTorch's exporter as in
    `torch.onnx.export`; by default the legacy exporter (False) is tried first, then the newer one (True). The other
    arguments are the fields of `Settings`.

    The report has each layer's variance in the ONNX model (`variance`) and in PyTorch (`variance_home`), both in eval
    mode. A layer that is outside the tolerance in PyTorch is not `ok`, and makes `report.exit_code` 1.
    """
    chosen = Settings.of(settings)
    net = network.accepted(net)
    if not (dynamo is None or isinstance(dynamo, bool)):
        raise LsuvError(f"`dynamo` {dynamo!r} is not True, False or None")
    settings["limit"], settings["batch_size"] = None, "all"
    with network.untouched(net):
        given = batches.collect(net, data, chosen.limit)
        net.eval()
        before = network.buffers(net)
        output = network.tried(net, given.calls[0])
        network.put_back(net, before)
        with network.exportable(net, output):
            return _run(net, given, chosen, dynamo, settings)


def _run(net: torch.nn.Module, given: Given, chosen: Settings, dynamo: bool | None, settings: SettingsDict) -> Report:
    """Steps 1 to 4."""
    done = _initialized(net, given.calls, dynamo, settings)
    behind: tuple[NotCarried, ...] = ()
    while True:
        try:
            report = _brought_home(net, given, done, chosen, behind)
            network.put_back(net, done.buffers)
            return report
        except _LeftBehind as left:
            behind = left.tensors
            again: SettingsDict = {**settings, "exclude": [*chosen.exclude, *_patterns(behind)]}
            done = _initialized(net, given.calls, done.dynamo, again)


@dataclass(frozen=True)
class _Done:
    """The initialized ONNX model, what of it has no place in the state dict, the exporter that it came from, and the
    buffers as they are to be."""

    initialized: Initialized
    rest: tuple[loading.Uncarried, ...]
    dynamo: bool
    buffers: Tensors


class _LeftBehind(Exception):
    """Layers whose weight or bias cannot be carried home, found after the others were loaded."""

    def __init__(self, tensors: tuple[NotCarried, ...]) -> None:
        super().__init__()
        self.tensors = tensors


def _patterns(left: Sequence[NotCarried]) -> list[str]:
    """Patterns that match these tensors' layers and no others."""
    return [glob.escape(name) for item in left for name in item.layers]


def _brought_home(
    net: torch.nn.Module, given: Given, done: _Done, settings: Settings, behind: tuple[NotCarried, ...]
) -> Report:
    """Load the weights and measure the layers. `behind`: tensors whose layers were left as they are in `done`."""
    with loading.loaded(net, done.initialized, done.rest) as carried:
        left = tuple(item for item in carried.left if item.layers)
        if left and not behind:
            raise _LeftBehind(left)
        carried = Carried(carried.tensors, carried.total + len(behind), (*behind, *carried.left))
        report = replace(done.initialized.report, model=type(net).__name__, data=given.source, carried=carried)
        layers = _restored(report, carried, settings)
        try:
            home = calls.matched(net, report.layers, calls.measure(net, given.calls))
            entries = tuple(_judged(layer, home.get(k), settings) for k, layer in enumerate(layers))
        except calls.PathsDiffer:
            entries = tuple(_not_known(layer) for layer in layers)
        except Exception as problem:  # the user's code raises exceptions of any type
            raise LsuvError(f"{UNRUNNABLE}: {network.first_line(problem)}") from problem
        warnings = (*report.warnings, *given.warnings, *_unmeasured(entries), *_different(entries, done.dynamo))
        return replace(report, layers=entries, warnings=warnings, settings=settings.to_json())


def _initialized(net: torch.nn.Module, given: list[Call], dynamo: bool | None, settings: SettingsDict) -> _Done:
    """The initialized ONNX model, from the first exporter with which export and initialization succeed."""
    reasons: dict[str, str] = {}
    buffers = network.buffers(net)
    path = ""
    for way in (False, True) if dynamo is None else (dynamo,):
        try:
            with export.exported(net, given[0], dynamo=way) as model:
                network.put_back(net, buffers)
                feeds = [export.feeds(call, model) for call in given]
                path = str(model.path)
                made = api.initialize(path, feeds, like=loading.arrays(net), **settings)
                weights = made.weights or {}
                settled = {name: loading.tensor(weights[name]) for name in buffers if name in weights}
                return _Done(made, tuple(loading.uncarried(made)), way, settled)
        except FAILED as problem:
            reasons[f"dynamo={way}"] = str(problem).replace(path, type(net).__name__) if path else str(problem)
    if len(set(reasons.values())) == 1:
        raise LsuvError(next(iter(reasons.values())))
    raise LsuvError("; ".join(f"{way}: {reason}" for way, reason in reasons.items()))


def _restored(report: Report, carried: Carried, settings: Settings) -> list[LayerReport]:
    """The entries with status NOT_HOME only where a layer's own tensor is left behind: PyTorch measures the others."""
    reasons = {name: item.reason for item in carried.left for name in item.layers}

    def restored(layer: LayerReport) -> LayerReport:
        if layer.name in reasons:
            note = f"left as it was, since it cannot be carried home: {reasons[layer.name]}"
            return replace(layer, status=Status.NOT_HOME, notes=(note,))
        if layer.status is not Status.NOT_HOME:
            return layer
        assert layer.variance is not None
        # Of layers that were fine in the file, only one that shares its weight may be outside by itself.
        within = not layer.shared or abs(layer.variance / (layer.target or 1.0) - 1) <= settings.tol
        return replace(layer, status=Status.OK if within else Status.TIED, notes=layer.notes[:-1])

    return [restored(layer) for layer in report.layers]


def _judged(layer: LayerReport, call: calls.Measured | None, settings: Settings) -> LayerReport:
    """A layer's report entry with its variance in PyTorch, and status OUTSIDE if that misses the tolerance."""
    if layer.variance is None or layer.status in {Status.SKIPPED, Status.EXCLUDED, Status.NOT_HOME}:
        return layer if call is None else replace(layer, variance_home=call.variance)
    if call is None or (not call.bias and not {"bias kept", "bias centred"}.isdisjoint(layer.notes)):
        return replace(layer, notes=(*layer.notes, UNMEASURED))
    found = replace(layer, variance_home=call.variance)
    # The layer's own variance in the file is the measure where only uses together, or channels, have the target.
    by_channel = layer.channels is not None and layer.channels.least_scale is not None
    wanted = layer.variance if by_channel or layer.status is Status.TIED else layer.target or 1.0
    judged = layer.status in {Status.OK, Status.TIED}
    if judged and not abs(call.variance / wanted - 1) <= settings.tol:
        note = f"variance {call.variance:.4g} {WANTED} {wanted:.4g}"
        return replace(found, status=Status.OUTSIDE, notes=(*layer.notes, note))
    return found


def _different(layers: Sequence[LayerReport], dynamo: bool) -> list[str]:
    """A warning if layers are right in the exported model and not in PyTorch, with all weights carried."""
    names = [x.module or x.name for x in layers if x.status is Status.OUTSIDE and any(WANTED in y for y in x.notes)]
    if not names:
        return []
    way = f"what PyTorch exports (dynamo={dynamo}) computes something else than the network"
    return [f"{_and_more(names)}: {way}; try dynamo={not dynamo}, or write that part of the network in another way"]


def _not_known(layer: LayerReport) -> LayerReport:
    """The entry of a layer of a network whose batches take different paths, of which the file has one."""
    if layer.status not in {Status.OK, Status.TIED}:
        return layer
    note = "batches take different paths through the network, and the export has the path of the first batch alone"
    return replace(layer, status=Status.OUTSIDE, notes=(*layer.notes, note))


def _unmeasured(layers: Sequence[LayerReport]) -> list[str]:
    """A warning if the calls of some layers were not found in PyTorch."""
    names = [layer.module or layer.name for layer in layers if UNMEASURED in layer.notes]
    if not names:
        return []
    return [f"{_and_more(names)}: {UNMEASURED}, where no call of a product with this weight was seen"]


def _and_more(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
