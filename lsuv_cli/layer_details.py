"""What a page shows of each layer beyond the report's numbers (details.py), gathered once all is measured."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping

import numpy as np
import onnx

from lsuv_cli.details import Details, Histogram, LayerDetails, digits
from lsuv_cli.layer_reports import Entries, Findings
from lsuv_cli.model.file import ModelFile
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import Layer, LayerSet
from lsuv_cli.model.outline import outline
from lsuv_cli.scaling import runtime
from lsuv_cli.spool import Spool
from lsuv_cli.version import __version__


def of_run(graph: Graph, every: LayerSet, entries: Entries, findings: Findings, files: Mapping[str, str]) -> Details:
    """The details of a run whose report has these entries, by their nodes."""
    by_node = {layer.node: layer for layer in every.layers}
    layers = tuple(
        _of_layer(graph, by_node[node], findings) if node in by_node else LayerDetails() for node, _ in entries
    )
    return Details(
        dict(files),
        _versions(),
        layers,
        outline(graph, {node: k for k, (node, _) in reversed(list(enumerate(entries)))}),
    )


def fingerprints(file: ModelFile) -> dict[str, str]:
    """File -> SHA-256, for the model as given and for each file with its weights.

    Taken before the model is edited: a model that was given in memory has no other copy.
    """
    if isinstance(file.given, Spool):
        with file.given.path.open("rb") as stream:
            return {file.name: hashlib.file_digest(stream, "sha256").hexdigest()}
    if file.path is None:
        return {file.name: hashlib.sha256(file.given or file.proto.SerializeToString()).hexdigest()}
    found = {}
    for path in [file.path, *sorted(file.data_files)]:
        with path.open("rb") as stream:
            found[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def _of_layer(graph: Graph, layer: Layer, findings: Findings) -> LayerDetails:
    moments = findings.verified.get(layer.output)
    stored = layer.weight.place != "folded"
    return LayerDetails(
        channel_variance=_digits(moments.channel_variance) if moments else None,
        channel_mean_square=_digits(moments.channel_mean_square) if moments else None,
        weights=Histogram.of(graph.array(layer.weight.base)) if stored else None,
        outputs=findings.outputs.get(layer.output),
    )


def _digits(value: float | None) -> float | None:
    return None if value is None else digits(value)


def _versions() -> dict[str, str]:
    return {
        "lsuv": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnx": onnx.__version__,
        "onnxruntime": runtime.VERSION,
        "system": platform.platform(),
    }
