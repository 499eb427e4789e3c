"""Output variances of the layers in PyTorch itself, measured at every call of a product or convolution with a weight.

Hooks tell which module is running; a TorchFunctionMode sees each call inside it, of nn.Linear as well as of F.linear.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lsuv_cli.report import LayerReport
from lsuv_cli.torch.batches import Call
from lsuv_cli.torch.export import without_fast_path

# Function -> the positions of the weight and of the bias among its arguments.
WEIGHTED = {
    "linear": (1, 2), "conv1d": (1, 2), "conv2d": (1, 2), "conv3d": (1, 2), "conv_transpose1d": (1, 2),
    "conv_transpose2d": (1, 2), "conv_transpose3d": (1, 2), "addmm": (2, 0),
}  # fmt: skip
LINEAR = functional.linear
CELLS = frozenset({"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"})
PRODUCTS = frozenset({"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum"})


@dataclass(frozen=True)
class Measured:
    """One call of a product or convolution: its module, and the moments of its output over all batches."""

    module: str
    parameter: str  # the parameter that the weight is a part of; empty if it is computed
    size: int  # elements of the weight
    bias: bool
    count: int
    mean: float
    square: float  # sum of squared deviations

    @property
    def variance(self) -> float:
        return self.square / self.count if self.count else math.nan

    def and_then(self, other: Measured) -> Measured:
        """The moments of both batches together."""
        count = self.count + other.count
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        square = self.square + other.square + gap * gap * self.count * other.count / count
        return replace(self, count=count, mean=mean, square=square)


class PathsDiffer(Exception):
    """Two batches lead to different calls: what was exported with one of them is not the whole network."""


def measure(net: torch.nn.Module, given: Sequence[Call]) -> list[Measured]:
    """All calls in execution order, their moments over all batches; `PathsDiffer` if batches lead to other calls."""
    total: list[Measured] = []
    with without_fast_path(), torch.no_grad():
        for k, call in enumerate(given):
            found = _one(net, call)
            if not k:
                total = found
            elif [(c.module, c.size) for c in found] == [(c.module, c.size) for c in total]:
                total = [one.and_then(other) for one, other in zip(total, found, strict=True)]
            else:
                raise PathsDiffer
    return total


def matched(net: torch.nn.Module, layers: Sequence[LayerReport], calls: Sequence[Measured]) -> Mapping[int, Measured]:
    """Index of a layer -> its call.

    Layers and calls of the same parameter are paired in order, if there are as many layers as calls; the rest by
    module and weight size. A module or parameter with several names goes by the first of them, as its calls do.
    """
    modules = _first_names((name, id(part)) for name, part in net.named_modules(remove_duplicate=False))
    held = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    stored = _first_names((name, tensor.data_ptr()) for name, tensor in held)
    by_module = _paired(layers, calls, lambda layer: modules.get(layer.module, layer.module), lambda call: call.module)
    known = [call for call in calls if call.parameter]
    by_parameter = _paired(layers, known, lambda layer: stored.get(layer.weight, ""), lambda call: call.parameter)
    return {**by_module, **by_parameter}


def _first_names(names: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Name -> the first name of the same thing."""
    first: dict[int, str] = {}
    return {name: first.setdefault(identity, name) for name, identity in names}


def _paired(
    layers: Sequence[LayerReport],
    calls: Sequence[Measured],
    of_layer: Callable[[LayerReport], str],
    of_call: Callable[[Measured], str],
) -> dict[int, Measured]:
    there: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    here: dict[tuple[str, int], list[int]] = defaultdict(list)
    for call in calls:
        there[of_call(call), call.size].append(call)
    for k, layer in enumerate(layers):
        if layer.shape:
            here[of_layer(layer), math.prod(layer.shape)].append(k)
    return {
        k: call
        for place, group in here.items()
        if len(group) == len(there[place])
        for k, call in zip(group, there[place], strict=True)
    }


def _one(net: torch.nn.Module, call: Call) -> list[Measured]:
    path: list[str] = []

    def leave(*_: Any) -> None:  # returns None: a hook's result would replace the output
        path.pop()

    handles = []
    for name, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: path.append(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    watcher = _Watcher(net, path)
    try:
        with watcher:
            net(*call.args, **call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return watcher.found


class _Watcher(TorchFunctionMode):  # type: ignore[misc]
    """Measures every call of a function that multiplies with a weight."""

    def __init__(self, net: torch.nn.Module, path: list[str]) -> None:
        super().__init__()
        self.path = path
        self.found: list[Measured] = []
        held = [*net.named_parameters(), *net.named_buffers()]
        self.stored = {tensor.untyped_storage().data_ptr(): name for name, tensor in held if tensor.numel()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "multi_head_attention_forward":  # a function in Python, inside which the mode is off
            with mock.patch.object(functional, "linear", self.linear):
                return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if name in CELLS:
            self.cell(*args)
        self.see(name, args, kwargs or {}, result)
        return result

    def cell(self, x: torch.Tensor, state: Any, w_x: torch.Tensor, w_h: torch.Tensor, *biases: Any) -> None:
        """Measure the two products of a recurrent cell, which PyTorch computes in one operator."""
        hidden = state[0] if isinstance(state, tuple | list) else state
        for value, weight, bias in zip((x, hidden), (w_x, w_h), (*biases, None, None), strict=False):
            self.linear(value, weight, bias)

    def linear(self, *args: Any, **kwargs: Any) -> Any:
        result = LINEAR(*args, **kwargs)
        self.see("linear", args, kwargs, result)
        return result

    def see(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        weight, bias = self.weight(name, args, kwargs)
        if weight is not None and isinstance(result, torch.Tensor) and result.is_floating_point():
            output, weight = _whole(result), _whole(weight)
            variance, mean = torch.var_mean(output.detach().double(), correction=0)
            count = output.numel()
            module = self.path[-1] if self.path else ""
            parameter = self.stored.get(weight.untyped_storage().data_ptr(), "")
            moments = (count, mean.item(), variance.item() * count)
            self.found.append(Measured(module, parameter, weight.numel(), bias, *moments))

    def weight(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor | None, bool]:
        """The weight that a function multiplies with, and whether it adds a bias; None if there is no weight."""
        if name in WEIGHTED:
            at, bias = WEIGHTED[name]
            weight = args[at] if len(args) > at else kwargs.get("weight", kwargs.get("mat2"))
            added = args[bias] if len(args) > bias else kwargs.get("bias")
            return (weight if name != "addmm" or self.is_stored(weight) else None), added is not None
        if name in PRODUCTS:
            return next((arg for arg in args if self.is_stored(arg)), None), False
        return None, False

    def is_stored(self, value: Any) -> bool:
        """Whether a tensor is a parameter or buffer, or a view of one."""
        return isinstance(value, torch.Tensor) and _whole(value).untyped_storage().data_ptr() in self.stored


def _whole(value: torch.Tensor) -> torch.Tensor:
    """The tensor with all its samples, where a function under `torch.vmap` sees one of them."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value
