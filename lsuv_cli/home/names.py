"""The initialized tensors on their own, for a framework that already has the network: .safetensors or .npz.

Names and layouts are those a PyTorch module has. Its exporters change some on the way to ONNX, and this changes them
back:

1. A weight that kept its name (`fc.weight`) goes under that name, in the layout the file stores.
2. A weight that lost its name (`onnx::MatMul_12`, `val_3`) takes it from its bias (`fc.bias` -> `fc.weight`), else
   from the module that its node belongs to (`fc` -> `fc.weight`). Exporters transpose such a weight of an inner
   product; it goes back as (out, in).
3. Equal tensors that an exporter merged go under the names of all modules they came from.

The module a node belongs to is in its name (`/encoder/fc/MatMul`, dynamo=False) or its metadata (dynamo=True).
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.errors import LsuvError
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.layers import PRODUCTS, Layer, LayerSet
from lsuv_cli.model.prepare import Prepared
from lsuv_cli.outputs import StrPath

Array = NDArray[Any]
FORMATS = frozenset({".safetensors", ".npz"})
# Names that exporters make up: onnx::MatMul_12, 12, val_3, t_7, /fc/Transpose_output_0.
MADE_UP = re.compile(r"^(onnx::.*|\d+|(val|_v|t)_\d+|const_fold.*|/.*)$")
SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class Names:
    """What a layer's tensors are called in the module."""

    weight: str
    bias: str
    lost: bool  # the weight's own name, and with it its layout


def names(graph: Graph, found: LayerSet) -> dict[str, Names]:
    """The names of all layers' tensors, by the layers' outputs, in a model as it was exported."""
    scopes = {layer.output: _scope(graph, layer) for layer in found.layers}
    first: dict[str, str] = {}  # the module that a tensor's name speaks of
    result: dict[str, Names] = {}
    for layer in found.layers:

        def renamed(name: str, scope: str = scopes[layer.output]) -> str:
            origin = first.setdefault(name, scope)
            return scope + name[len(origin) :] if origin and scope and name.startswith(f"{origin}.") else name

        bias = renamed(layer.bias.value) if layer.bias is not None and layer.bias.constant else ""
        stored = _own_name(graph, layer)
        if stored:
            weight = renamed(stored)
        elif bias.endswith("bias"):
            weight = f"{bias.removesuffix('bias')}weight"
        else:
            weight = f"{scopes[layer.output]}.weight" if scopes[layer.output] else layer.weight.base
        result[layer.output] = Names(weight, bias, lost=not stored and weight != layer.weight.base)
    return result


def _own_name(graph: Graph, layer: Layer) -> str:
    """The name that a weight had in the module; empty if it lost it."""
    weight = layer.weight
    maker = graph.producer.get(weight.value)
    # PyTorch's exporter merges equal tensors and keeps the other names as those of Identity nodes.
    if maker is not None and graph.nodes[maker].op_type == "Identity" and not MADE_UP.match(weight.value):
        return weight.value
    merged = maker is not None and graph.nodes[maker].op_type == "Identity"
    return "" if merged or MADE_UP.match(weight.base) else weight.base


def _scope(graph: Graph, layer: Layer) -> str:
    """The path of the module that a layer's node belongs to, such as encoder.layers.0.fc; empty if nothing tells."""
    node = graph.nodes[layer.node]
    for entry in node.metadata_props:
        if entry.key == SCOPES:
            try:
                path = ast.literal_eval(entry.value)[-2]
            except (ValueError, SyntaxError, IndexError, TypeError):
                return ""
            return str(path)
    parts = [part for part in node.name.split("/") if part]
    return ".".join(parts[:-1]) if node.name.startswith("/") else ""


def check(path: StrPath) -> None:
    """Refuse a format that cannot be written before any work is done."""
    suffix = Path(path).suffix
    if suffix not in FORMATS:
        raise LsuvError(f"`weights` {path} must end in .safetensors or .npz")
    if suffix == ".safetensors":
        try:
            import safetensors  # noqa: F401  only to see whether it is there
        except ImportError:
            raise LsuvError("`weights` needs safetensors: pip install 'lsuv-cli[weights]', or use .npz") from None


def collect(prepared: Prepared, called: Mapping[str, Names]) -> dict[str, Array]:
    """The tensors of all initialized layers, under the names a module has."""
    found: dict[str, Array] = {}
    graph = prepared.graph
    for layer in prepared.layers.layers:
        for name, stored, array in _tensors(layer, called[layer.output], graph):
            clash = name in found and not np.array_equal(found[name], array)
            found[stored if clash else name] = np.ascontiguousarray(array)
    for item in prepared.layers.recurrent:  # frameworks order their gates differently: under their ONNX names
        found |= {weight.base: np.ascontiguousarray(graph.array(weight.base)) for weight, _ in item.weights}
    return found


def _tensors(layer: Layer, called: Names, graph: Graph) -> Iterator[tuple[str, str, Array]]:
    """A layer's tensors: the module's name, the stored tensor's name, and the values in the module's layout."""
    weight = layer.weight
    array = graph.array(weight.base)
    if called.lost and layer.op in PRODUCTS and len(weight.shape) == 2:
        array = layer.form.matrices(weight.seen(array))[0]
    yield called.weight, weight.base, array
    if called.bias and layer.bias is not None:
        bias = graph.known(layer.bias.value)
        if bias is not None:
            yield called.bias, layer.bias.value, bias


def write(tensors: dict[str, Array], path: Path) -> None:
    """Write the tensors to a file; the end of its name tells the format."""
    if path.suffix == ".npz":
        # numpy's format has no bfloat16; as float32 the values are the same.
        plain = {name: array.astype(np.float32) if _is_bfloat16(array) else array for name, array in tensors.items()}
        # As numpy.savez does, which takes no array of the name "file".
        with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
            for name, array in plain.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    else:
        from safetensors.numpy import save

        path.write_bytes(save(tensors, {"format": "pt"}))


def _is_bfloat16(array: Array) -> bool:
    return str(array.dtype) == "bfloat16"
