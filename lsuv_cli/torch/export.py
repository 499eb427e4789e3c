"""The network as an ONNX file with nothing folded: every weight in the file is a tensor of the network.

dynamo=False: `training=TrainingMode.PRESERVE, do_constant_folding=False`; dynamo=True: `optimize=False`. Both
exporters fix the shapes to those of one batch; initialization needs no other shapes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import torch
from numpy.typing import NDArray

from lsuv_cli.torch import loading
from lsuv_cli.torch.batches import Call
from lsuv_cli.torch.network import first_line

Array = NDArray[Any]
LARGE = 1 << 30  # bytes of weights above which the weights go to an external data file


class ExportFailed(Exception):
    """Why PyTorch could not export a network, in one line."""


@dataclass(frozen=True)
class Exported:
    """An ONNX file, and its inputs in the order of the call's tensors."""

    path: Path
    inputs: tuple[str, ...]


@contextlib.contextmanager
def exported(net: torch.nn.Module, call: Call, *, dynamo: bool) -> Iterator[Exported]:
    """Export a network that is in eval mode; the file is deleted at the end of the `with` statement."""
    with tempfile.TemporaryDirectory(prefix="lsuv-") as directory:
        path = Path(directory) / "model.onnx"
        large = sum(value.nbytes for value in net.state_dict().values() if isinstance(value, torch.Tensor)) > LARGE
        names = list(call.tensors)
        options: dict[str, Any] = {"input_names": names, "kwargs": call.kwargs or None, "dynamo": dynamo}
        if dynamo:
            options |= {"optimize": False, "external_data": large, "verbose": False}
        else:
            options |= {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
        try:
            with _quiet(), without_fast_path():
                torch.onnx.export(net, call.args, str(path), **options)
        except Exception as problem:  # exporters raise exceptions of any type
            raise ExportFailed(f"PyTorch's exporter failed: {first_line(problem)}") from problem
        if not dynamo:
            _separate(path, net)
        held = onnx.load(path, load_external_data=False).graph
        stored = {tensor.name for tensor in held.initializer}
        yield Exported(path, tuple(value.name for value in held.input if value.name not in stored))


def feeds(call: Call, model: Exported) -> dict[str, Array]:
    """A call's tensors as the ONNX model takes them."""
    given = {name: loading.array(tensor) for name, tensor in call.tensors.items()}
    unknown = [name for name in model.inputs if name not in given]
    if unknown:
        raise ExportFailed(f"the exported model has an input {unknown[0]!r} that no tensor of the batch is")
    return {name: given[name] for name in model.inputs}


def _separate(path: Path, net: torch.nn.Module) -> None:
    """Undo the legacy exporter's merging of equal tensors: it keeps one and makes the others Identity nodes."""
    model = onnx.load(path)
    state = {name: value for name, value in net.state_dict().items() if isinstance(value, torch.Tensor)}
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    merged = [
        node
        for node in model.graph.node
        if node.op_type == "Identity" and node.input[0] in stored and node.output[0] in state
        if node.input[0] not in state or state[node.input[0]].data_ptr() != state[node.output[0]].data_ptr()
    ]
    for node in merged:
        copy = model.graph.initializer.add()
        copy.CopyFrom(stored[node.input[0]])
        copy.name = node.output[0]
        model.graph.node.remove(node)
    if merged:
        onnx.save(model, path)


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Compute attention as matrix products: in eval mode PyTorch uses one fused operator, which ONNX does not have."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' prints, logs and warnings: their exception says what went wrong."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            # The legacy exporter prints the whole graph when it fails, from C++, whatever `verbose` says.
            mock.patch.object(torch._C, "_jit_onnx_log", lambda *_: None, create=True),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
