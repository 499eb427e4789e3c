"""The initialized tensors on their own, for a framework that already has the network: .safetensors or .npz.

Names and layouts are those a PyTorch module has. Its exporters change some on the way to ONNX, and this changes them
back:

1. A weight that kept its name (`fc.weight`) goes under that name, in the layout the file stores.
2. A weight that lost its name (`onnx::MatMul_12`, `val_3`) takes it from its bias (`fc.bias` -> `fc.weight`), or from
   the module path in its node's name (`/encoder/fc/MatMul` -> `encoder.fc.weight`). Exporters transpose such a
   weight, (in, out) for MatMul; it goes back as (out, in).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.errors import LsuvError
from lsuv_cli.layers import Layer
from lsuv_cli.preparation import Prepared

Array = NDArray[Any]
FORMATS = frozenset({".safetensors", ".npz"})
# Names that exporters make up: onnx::MatMul_12, val_3, _v_7, const_fold_opt__5.
MADE_UP = re.compile(r"^(onnx::|val_\d+$|_v_\d+$|t_\d+$|const_fold)|_\d{3,}$")


def check(path: str | os.PathLike[str], force: bool) -> Path:
    """Refuse a file that cannot be written before any work is done."""
    target = Path(path)
    if target.suffix not in FORMATS:
        raise LsuvError(f"--weights {path} must end in .safetensors or .npz")
    if target.suffix == ".safetensors":
        try:
            import safetensors  # noqa: F401  only to see whether it is there
        except ImportError:
            raise LsuvError("--weights needs safetensors: pip install 'lsuv-cli[weights]', or use .npz") from None
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise LsuvError(f"--weights {path} is a directory, or is in none; give a file name")
    if target.exists() and not force:
        raise LsuvError(f"{path} exists; use --force to overwrite it")
    return target


def collect(prepared: Prepared, read: Callable[[str], Array]) -> dict[str, Array]:
    """The tensors of all initialized layers, under the names a module has."""
    found: dict[str, Array] = {}
    for layer in prepared.found.layers:
        weight = read(layer.weight.base)
        bias = None
        if layer.bias is not None and layer.bias.value in prepared.graph.tensors:
            bias = (layer.bias.value, read(layer.bias.value))
        found |= dict(named(layer, weight, bias))
    return found


def named(layer: Layer, weight: Array, bias: tuple[str, Array] | None) -> Iterator[tuple[str, Array]]:
    """A layer's tensors: the name a module has, and the values in the module's layout."""
    stored = layer.weight.base
    name = stored
    if MADE_UP.search(stored):
        path = bias[0].removesuffix(".bias") if bias and bias[0].endswith(".bias") else _module(layer.name)
        if path:
            name = f"{path}.weight"
            if layer.op == "MatMul" and weight.ndim == 2 and layer.position == 1 and not layer.weight.steps:
                weight = weight.T
    yield name, np.ascontiguousarray(weight)
    if bias:
        yield bias[0], np.ascontiguousarray(bias[1])


def _module(node: str) -> str:
    """The module path in the name that PyTorch's exporter gives a node: /encoder/layers.0/fc/MatMul."""
    parts = [part for part in node.split("/") if part]
    return ".".join(parts[:-1]) if node.startswith("/") and len(parts) > 1 else ""


def write(tensors: dict[str, Array], path: Path) -> None:
    """Write the tensors, whole or not at all."""
    scratch = path.with_name(f".lsuv-{path.name}")
    try:
        if path.suffix == ".npz":
            with scratch.open("wb") as file:
                np.savez(file, **tensors)  # type: ignore[arg-type]
        else:
            from safetensors.numpy import save

            scratch.write_bytes(save(tensors, {"format": "pt"}))
        scratch.replace(path)
    except OSError as problem:
        raise LsuvError(f"--weights {path} cannot be written: {problem.strerror or problem}") from None
    finally:
        scratch.unlink(missing_ok=True)
