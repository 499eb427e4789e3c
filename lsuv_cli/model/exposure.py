"""A model that also puts out its layers' values, typed, in the order of execution, under the names that they have.

Only values of the main graph have a name that an output can have: a layer inside a function or a branch is left out.
So are nodes that look like a layer and are none (a quantized weight, a weight that is computed from the input), and
recurrent layers. All that is left out is told (`told`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx
from onnx import ValueInfoProto, helper

from lsuv_cli.model.constants import FLOATS
from lsuv_cli.model.file import is_elsewhere
from lsuv_cli.model.graph import SHAPE_BYTES
from lsuv_cli.model.layers import Layer, Recurrent, Skipped
from lsuv_cli.model.prepare import Look

NAMED = 6  # layers that a warning names


@dataclass(frozen=True)
class Exposure:
    """(layer, output) for each layer that the model puts out now, and the layers that cannot be put out."""

    layers: tuple[tuple[Layer, str], ...]
    hidden: tuple[Layer, ...]


def expose(model: onnx.ModelProto, look: Look, layers: Sequence[Layer]) -> Exposure:
    """Add the layers' outputs to the graph's outputs, in place."""
    made = {name for node in model.graph.node for name in node.output}
    shown = [layer for layer in layers if layer.output in made]
    types = _types(model)
    outputs = {output.name for output in model.graph.output}
    for layer in shown:
        if layer.output in outputs:
            continue
        outputs.add(layer.output)
        kind = next(kind for kind, name in FLOATS.items() if name == layer.weight.read_as)
        known = types.get(layer.output) or helper.make_tensor_value_info(layer.output, kind, None)
        model.graph.output.append(known)
    # A value that is an output must not be described twice.
    kept = [info for info in model.graph.value_info if info.name not in outputs]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    hidden = tuple(layer for layer in layers if layer.output not in made)
    return Exposure(tuple((layer, layer.output) for layer in shown), hidden)


def told(hidden: Iterable[Layer], recurrent: Iterable[Recurrent], skipped: Iterable[Skipped]) -> Iterator[str]:
    """A warning for each reason why something that looks like a layer is not put out."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for layer in hidden:
        by_reason["it is inside functions or branches, where no output can be"].append(layer.name)
    for cell in recurrent:
        by_reason[f"it is recurrent ({cell.op})"].append(cell.name)
    for item in skipped:
        by_reason[item.reason].append(item.name)
    for reason, names in by_reason.items():
        shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
        yield f"not put out: {shown}: {reason}"


def _types(model: onnx.ModelProto) -> dict[str, ValueInfoProto]:
    """Value -> its type and shape, as far as onnx infers them from the model without its weights."""
    body = onnx.GraphProto(name="types", node=model.graph.node, output=model.graph.output)
    stored = {tensor.name for tensor in model.graph.initializer}
    body.input.extend(info for info in model.graph.input if info.name not in stored)
    body.value_info.extend(model.graph.value_info)
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) * 8 <= SHAPE_BYTES and not is_elsewhere(tensor):
            body.initializer.append(tensor)
        else:
            body.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    bare = onnx.ModelProto(ir_version=max(model.ir_version, 4), graph=body, opset_import=model.opset_import)
    bare.functions.extend(model.functions)
    try:
        inferred = onnx.shape_inference.infer_shapes(bare, data_prop=True)
    except Exception:  # inference fails on healthy models too; then only the element type is known
        return {}
    found = {info.name: info for info in inferred.graph.value_info}
    return {name: info for name, info in found.items() if info.type.tensor_type.elem_type}
