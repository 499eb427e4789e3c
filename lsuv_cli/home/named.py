"""The initialized tensors under their names in the network's state dict: .safetensors or .npz.

A changed tensor is written if the file tells its name (names.py); otherwise it is reported, with the reason.

1. A tensor of the module is not written if two uses in the model have different values for it.
2. It is not written if another node of the model still reads its old values, as an embedding tied to a head does.
3. A packed tensor is written whole, or not at all if some of its elements are unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.errors import LsuvError
from lsuv_cli.home import calls, checkpoints
from lsuv_cli.home.names import Home, Homes, Part
from lsuv_cli.model import constants
from lsuv_cli.model.prepare import Prepared
from lsuv_cli.outputs import StrPath
from lsuv_cli.report import Carried, NotCarried

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Changed:
    """A constant of the initialized model, as its operator reads it."""

    tensor: str  # its name in the ONNX file
    value: Array
    home: Home


def collect(prepared: Prepared, homes: Homes, recurrent: bool) -> tuple[dict[str, Array], Carried]:
    """The tensors of all initialized layers under the module's names, and the reason for each tensor left out."""
    changed = list(_changed(prepared, homes, recurrent))
    parts: dict[str, list[tuple[Changed, Part]]] = defaultdict(list)
    reasons = {item.tensor: item.home.reason for item in changed if not item.home.parts}
    for item in changed:
        for part in item.home.parts:
            parts[part.name].append((item, part))
    found: dict[str, Array] = {}
    for name, given in parts.items():
        array, reason = _assembled(name, [(part, item.value) for item, part in given])
        whole = all(part.places is None for _, part in given)
        if array is not None and whole and (reader := _other_reader(prepared, homes, name, array)):
            reason = f"{name} is one tensor in the module, and {reader} reads it too"
        if array is None or reason:
            reasons |= {item.tensor: reason for item, _ in given}
        else:
            found[name] = np.ascontiguousarray(array)
    every = dict.fromkeys(item.tensor for item in changed)
    left = tuple(NotCarried(name, reason) for name, reason in reasons.items())
    return found, Carried(len(every) - len(left), len(every), left)


def assumed(prepared: Prepared, homes: Homes) -> list[str]:
    """Warnings about weights that have no name in the file: what they are named after, and when that is wrong."""
    uses = [homes.of(layer.output, "weight") for layer in prepared.layers.layers]
    warnings = []
    if taken := [part.name for home in uses if home.taken for part in home.parts]:
        warnings.append(
            f"{_and_more(taken)}: the exporter's folding took the name, so it is taken for the module's weight, "
            "transposed; wrong if the module multiplies or computes its weight (a gain, a mask): then use `like`"
        )
    if found := [part.name for home in uses if home.assumed for part in home.parts]:
        warnings.append(
            f"{_and_more(found)}: named after the module's scope alone, which leaves out containers that are not "
            "called; load_state_dict(..., strict=False).unexpected_keys must be empty"
        )
    return warnings


def _and_more(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _changed(prepared: Prepared, homes: Homes, recurrent: bool) -> Iterator[Changed]:
    """All constants that initialization wrote, with or without a name in the module."""
    graph = prepared.graph
    for layer in prepared.layers.layers:
        weight = layer.weight
        yield Changed(weight.base, weight.seen(graph.array(weight.base)), homes.of(layer.output, "weight"))
        if layer.bias is not None and layer.bias.constant:
            home = homes.of(layer.output, "bias")
            if (item := _if_changed(prepared, layer.bias.value, home)) is not None:
                yield item
    for rnn in prepared.layers.recurrent if recurrent else ():
        for position, (weight, _) in enumerate(rnn.weights, start=1):
            yield Changed(weight.base, weight.seen(graph.array(weight.base)), homes.of(rnn.output, f"input {position}"))
    for node in graph.nodes:
        if node.op_type == "BatchNormalization" and len(node.input) >= 5:
            for position in (3, 4):
                home = homes.of(node.output[0], f"input {position}")
                found = _if_changed(prepared, node.input[position], home)
                if found is not None and not np.array_equal(found.value, found.home.before):  # type: ignore[arg-type]
                    yield found


def _if_changed(prepared: Prepared, value: str, home: Home) -> Changed | None:
    """A bias or a statistic; None if its value cannot be worked out, or if it has no name and is unchanged."""
    array = prepared.graph.known(value)
    if array is None or home.before is None or (not home.parts and np.array_equal(array, home.before)):
        return None
    return Changed(value, array, home)


def _assembled(name: str, given: list[tuple[Part, Array]]) -> tuple[Array | None, str]:
    """A module's tensor from all its parts, or why there is none."""
    arrays = [part.arrange(array) for part, array in given]
    if all(part.places is None for part, _ in given):
        if all(np.array_equal(array, arrays[0]) for array in arrays):
            return arrays[0], ""
        return None, f"{name} is one tensor in the module, and here its uses have different ones (`tied='share'`)"
    rest = next((part.rest for part, _ in given if part.rest is not None), None)
    # A part that is the whole tensor (`places` is None) states no shape: its array has it.
    shape = next(
        (x.shape for (part, _), x in zip(given, arrays, strict=True) if part.places is None), given[0][0].shape
    )
    whole = np.array(rest) if rest is not None else np.zeros(shape, arrays[0].dtype)
    done = np.zeros(whole.size, bool)
    for (part, _), array in zip(given, arrays, strict=True):
        places = part.places if part.places is not None else np.arange(whole.size)
        flat = array.reshape(-1)
        if np.any(whole.reshape(-1)[places][done[places]] != flat[done[places]]):
            return None, f"{name} is one tensor in the module, and here its uses have different ones"
        whole.reshape(-1)[places] = flat
        done[places] = True
    if rest is None and not done.all():
        return None, f"only a part of {name} was initialized, and the rest is not in the file"
    return whole, ""


def _other_reader(prepared: Prepared, homes: Homes, name: str, array: Array) -> str:
    """A node that still reads the old values of a parameter; empty if there is none."""
    graph = prepared.graph
    if name not in graph.tensors:
        return ""
    written = {layer.node for layer in prepared.layers.layers} | {
        layer.bias.node for layer in prepared.layers.layers if layer.bias is not None
    }
    for k, _ in constants.readers_of(graph, name):
        if k < 0 or k in written or graph.nodes[k].op_type == "Shape":
            continue
        call = calls.of_node(graph.nodes[k], {fx: target for target, fx in homes.parameters.items()})
        if call is not None and name not in call.arguments:
            continue  # an exporter merged another parameter with this one
        stored = graph.array(name)
        if stored.shape != array.shape or not np.array_equal(stored, array):
            return f"{graph.nodes[k].op_type} {graph.nodes[k].name}"
    return ""


def storable(tensors: Mapping[str, Array], path: Path) -> dict[str, Array]:
    """The tensors as a file of weights can hold them: numpy's format has no bfloat16, whose values float32 has too."""
    if path.suffix != ".npz":
        return dict(tensors)
    return {k: v.astype(np.float32) if str(v.dtype) == "bfloat16" else v for k, v in tensors.items()}


def check(path: StrPath) -> None:
    """Refuse a format that cannot be written before any work is done."""
    if Path(path).suffix not in checkpoints.FORMATS:
        raise LsuvError(f"`weights` {path} must end in .safetensors or .npz")
