"""The network as the user gives it: what cannot be initialized is refused, and its state outside the weights restored.

1. What `torch.compile` or DataParallel wraps is taken out, and nothing is compiled while we work.
2. A scripted module, and one without values in memory, are refused, with the way out.
3. The network is called once, so that an error of its own is not taken for one of PyTorch's exporters; what these do
   not take of its output is left out while we work.
4. Training modes, buffers and the random states of PyTorch, numpy and Python are as they were at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lsuv_cli.errors import LsuvError
from lsuv_cli.torch.batches import Call

Tensors = Mapping[str, torch.Tensor]


def accepted(net: Any) -> torch.nn.Module:
    """The module whose weights are initialized; `LsuvError` if it is none that can be."""
    if isinstance(net, type) and issubclass(net, torch.nn.Module):
        raise LsuvError(f"{net.__name__} is a class, not a network: give an object of it, {net.__name__}(...)")
    if not isinstance(net, torch.nn.Module):
        raise LsuvError(f"the type {type(net).__name__} is no network: give a torch.nn.Module")
    net = getattr(net, "_orig_mod", net)  # of torch.compile
    if isinstance(net, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        net = net.module
    for name, module in net.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise LsuvError(
                f"{_called(name)} is a torch.jit.ScriptModule, whose layers cannot be measured in PyTorch: "
                "initialize the module that it was scripted or traced from, then script it"
            )
    for name, tensor in net.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta and not torch.nn.parameter.is_lazy(tensor):
            raise LsuvError(
                f"{name} is on the meta device and has no values: net.to_empty(device='cpu'), then reset its parameters"
            )
    return net


def _called(name: str) -> str:
    return name or "the network"


def tried(net: torch.nn.Module, call: Call) -> Any:
    """The network's output; lazy modules get their shapes by the call. An error of the network is told as such."""
    try:
        return net(*call.args, **call.kwargs)
    except Exception as problem:  # the user's code raises exceptions of any type
        raise LsuvError(f"the network fails on the first batch: {first_line(problem)}") from problem


@contextlib.contextmanager
def exportable(net: torch.nn.Module, output: Any) -> Iterator[None]:
    """Let the network give its tensors alone if its output has what no exporter takes, as transformers' caches."""
    leaves = list(_leaves(output))
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise LsuvError("the network's output has no tensor, so it cannot be exported: let forward return one")
    if not _is_dataclass(output) and all(isinstance(leaf, torch.Tensor | int | float | str | None) for leaf in leaves):
        yield
        return

    def tensors(_net: torch.nn.Module, _args: Any, given: Any) -> tuple[torch.Tensor, ...]:
        return tuple(leaf for leaf in _leaves(given) if isinstance(leaf, torch.Tensor))

    handle = net.register_forward_hook(tensors)
    try:
        yield
    finally:
        handle.remove()


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, Mapping)  # transformers' outputs are both


def _leaves(value: Any) -> Iterator[Any]:
    """What is in nested dicts, tuples, lists and dataclasses."""
    if _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def first_line(problem: Exception) -> str:
    """The first line of the exception at the root of the chain of causes, which states the reason."""
    cause: BaseException = problem
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def buffers(net: torch.nn.Module) -> Tensors:
    """Copies of the buffers; of a lazy module, those that exist."""
    held = net.named_buffers()
    return {name: buffer.clone() for name, buffer in held if not torch.nn.parameter.is_lazy(buffer)}


def put_back(net: torch.nn.Module, before: Tensors) -> None:
    """Give buffers that a forward pass changes (counters, running statistics) the values they had before."""
    for name, buffer in net.named_buffers():
        if name in before and buffer.shape == before[name].shape:
            buffer.copy_(before[name].to(buffer))


@contextlib.contextmanager
def untouched(net: torch.nn.Module) -> Iterator[None]:
    """Work without gradients and compilation; restore training modes and random states at the end."""
    modes = [(module, module.training) for module in net.modules()]
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"), _writable(net):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, training in modes:
            module.training = training


def _writable(net: torch.nn.Module) -> Any:
    """No gradients; for tensors that were made under `torch.inference_mode`, that mode, which alone may write them."""
    held = [*net.parameters(), *net.buffers()]
    inference = any(tensor.is_inference() for tensor in held if not torch.nn.parameter.is_lazy(tensor))
    return torch.inference_mode() if inference else torch.no_grad()
