"""The network's state dict as arrays, and the loading of new weights, undone if anything fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils import parametrize

from lsuv_cli.model import graph as graphs
from lsuv_cli.model import layers
from lsuv_cli.model.file import load
from lsuv_cli.model.layers import CONVOLUTIONS
from lsuv_cli.report import Carried
from lsuv_cli.results import Initialized

Array = NDArray[Any]

SAME, SAME_SMALL = 1e-3, 1e-6  # how far a parametrized tensor may be from what it was set to: relative, absolute


def array(tensor: torch.Tensor) -> Array:
    """A tensor's values; bfloat16, which numpy lacks, as ml_dtypes.bfloat16."""
    plain = tensor.detach().cpu()
    if plain.dtype is torch.bfloat16:
        return np.asarray(plain.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return np.asarray(plain.numpy())


def arrays(net: torch.nn.Module) -> dict[str, Array]:
    """The network's state dict as arrays; a tensor with several names is one array."""
    known: dict[tuple[Any, ...], Array] = {}
    found = {}
    for name, tensor in net.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            found[name] = known.setdefault(place, array(tensor)) if tensor.numel() else array(tensor)
    return found


def tensor(values: Array) -> torch.Tensor:
    """An array's values; the inverse of `array`."""
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(values).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(values))


@dataclass(frozen=True, eq=False)
class Uncarried:
    """A weight or bias that could not be traced by value, in the module's layout."""

    tensor: str  # its name in the ONNX file
    module: str  # the path of the module
    name: str  # "weight" or "bias"
    values: Array


@contextlib.contextmanager
def loaded(net: torch.nn.Module, done: Initialized, rest: Sequence[Uncarried]) -> Iterator[Carried]:
    """Load the initialized weights. If the body of the `with` statement fails, the old weights are restored."""
    assert done.weights is not None and done.report.carried is not None
    before = _copied(net)
    try:
        state = net.state_dict()  # carries the modules' format versions (`_metadata`), which a plain dict lacks
        for name in state.keys() & done.weights.keys():
            state[name] = tensor(done.weights[name])
        net.load_state_dict(state, strict=True)
        yield _assigned(net, done.report.carried, rest)
    except BaseException:  # an interruption too must leave the network as it was
        net.load_state_dict(before, strict=True)
        raise


def _copied(module: torch.nn.Module) -> dict[str, Any]:
    """A module's state dict with copies of the tensors."""
    state: dict[str, Any] = module.state_dict()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.clone()
    return state


def _assigned(net: torch.nn.Module, carried: Carried, rest: Sequence[Uncarried]) -> Carried:
    """Set weights that could not be traced by value through their parametrizations, if these have an inverse."""
    taken = {item.tensor for item in rest if _assign(net, item)}
    left = tuple(item for item in carried.left if item.name not in taken)
    return Carried(carried.total - len(left), carried.total, left)


def uncarried(done: Initialized) -> Iterator[Uncarried]:
    """The weights and biases that are not carried, read from the initialized model, whose files must exist."""
    assert done.report.carried is not None
    wanted = {item.name for item in done.report.carried.left}
    if not wanted or done.model is None:
        return
    file = load(done.model)
    graph = graphs.build(file.proto, file)
    for layer in layers.find(graph).layers:
        if wanted & {layer.weight.base, layer.weight.value} and layer.module:
            values = layer.weight.seen(graph.array(layer.weight.base))
            module = values if layer.op in CONVOLUTIONS else layer.form.matrices(values)[0]
            yield Uncarried((wanted & {layer.weight.base, layer.weight.value}).pop(), layer.module, "weight", module)
        if layer.bias is not None and layer.bias.value in wanted and layer.module:
            bias = graph.known(layer.bias.value)
            if bias is not None:
                yield Uncarried(layer.bias.value, layer.module, "bias", bias.reshape(-1))


def _assign(net: torch.nn.Module, item: Uncarried) -> bool:
    """Set a parametrized tensor, and tell whether it then has these values; if not, the old state is restored."""
    try:
        module = net.get_submodule(item.module)
    except AttributeError:
        return False
    if not parametrize.is_parametrized(module, item.name):
        return False
    before = _copied(module)
    wanted = tensor(item.values)
    try:
        setattr(module, item.name, wanted.to(getattr(module, item.name)))
        found = getattr(module, item.name).detach().cpu().double()
        if torch.allclose(found, wanted.double(), rtol=SAME, atol=SAME_SMALL):
            return True
    except (RuntimeError, NotImplementedError, ValueError):  # no right inverse, or none for these values
        pass
    module.load_state_dict(before)
    return False
