"""The user's batches as calls of the network: positional and keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lsuv_cli.errors import LsuvError

SAMPLES = 256  # taken from an iterable, if no limit is given
POSITIONAL = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the network: its arguments in the order of `forward`, by name where they have one."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among the arguments, in order."""
        named = {**{f"input_{k}": value for k, value in enumerate(self.args)}, **self.kwargs}
        return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple((name, tuple(value.shape), value.dtype) for name, value in self.tensors.items())

    def first(self, count: int) -> Call:
        """The first samples of the batch."""
        size = samples(self)

        def cut(value: Any) -> Any:
            return value[:count] if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == size else value

        return Call(tuple(map(cut, self.args)), {name: cut(value) for name, value in self.kwargs.items()})


def samples(call: Call) -> int:
    """The length of the first tensor's first axis."""
    first = next(iter(call.tensors.values()))
    return int(first.shape[0]) if first.ndim else 1


@dataclass(frozen=True, eq=False)
class Given:
    """The data as calls of the network, what of a batch is fed and what is left out, and warnings."""

    calls: list[Call]
    source: str
    warnings: tuple[str, ...]


def collect(net: torch.nn.Module, data: Any, limit: int | None) -> Given:
    """The data as calls, all with the first one's shapes."""
    one = isinstance(data, torch.Tensor | tuple | Mapping)
    most = limit if limit is not None else None if one else SAMPLES
    found: list[Call] = []
    source = ""
    warnings: list[str] = []
    other, taken = 0, 0
    for batch in [data] if one else _iterated(data):
        call = _call(net, batch)
        if not found:
            source, warnings = _told(net, batch, call)
        call = call.first(most - taken) if most is not None and samples(call) > most - taken else call
        if found and call.shapes != found[0].shapes:
            other += 1
        else:
            found.append(call)
            taken += samples(call)
        if most is not None and taken + (samples(call) if other else 0) >= most:
            break
    if not found:
        raise LsuvError("the data has no batch")
    if other:
        warnings.append(f"{other} of {other + len(found)} batches have other shapes than the first and were left out")
    return Given(found, source, tuple(warnings))


def _told(net: torch.nn.Module, batch: Any, call: Call) -> tuple[str, list[str]]:
    """What of a batch is fed and what is left out, and a warning if `forward` has a place for what is left out."""
    if isinstance(batch, Mapping):
        left = [str(name) for name in batch if str(name) not in call.kwargs]
        return f"{', '.join(call.kwargs)} of a batch{f' without {_listed(left)}' if left else ''}", []
    if not isinstance(batch, tuple | list):
        return "a tensor", []
    fed, rest = len(call.args), list(range(len(call.args), len(batch)))
    source = f"{_listed(range(fed))} of a batch{f' without {_listed(rest)}' if rest else ''}"
    places = [name for name, p in inspect.signature(net.forward).parameters.items() if p.kind in POSITIONAL][fed:]
    taking = [f"`{name}`" for name, k in zip(places, rest, strict=False) if isinstance(batch[k], torch.Tensor)]
    if not taking:
        return source, []
    many = f"{_listed(rest)} of the batch {'was' if len(rest) == 1 else 'were'} left out as labels"
    return source, [f"{many}, though forward can take {' and '.join(taking)}: to feed that, give a dict by name"]


def _listed(items: Iterable[Any]) -> str:
    """Items of a batch: names as they are, places as "item 1"."""
    return ", ".join(f"item {item}" if isinstance(item, int) else item for item in items)


def _iterated(data: Any) -> Iterator[Any]:
    if not isinstance(data, Iterable) or hasattr(data, "__array__"):
        kind = type(data).__name__
        raise LsuvError(f"the type {kind} is no batch: give a tensor, a tuple, a dict or an iterable of those")
    yield from data


def _call(net: torch.nn.Module, batch: Any) -> Call:
    """A batch as a call of `forward`. Items of a tuple beyond the arguments that `forward` requires are labels."""
    parameters = inspect.signature(net.forward).parameters
    if isinstance(batch, Mapping):
        call = _keywords(parameters, {str(name): value for name, value in batch.items()})
    elif isinstance(batch, tuple | list):
        if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values()):
            call = Call(tuple(batch), {})
        else:
            required = sum(p.kind in POSITIONAL and p.default is p.empty for p in parameters.values())
            call = Call(tuple(batch[: max(1, required)]), {})
    else:
        call = Call((batch,), {})
    if not call.tensors:
        nested = next((x for x in (*call.args, *call.kwargs.values()) if isinstance(x, tuple | list | Mapping)), None)
        if nested is not None:
            kind = type(nested).__name__
            raise LsuvError(
                f"forward takes a {kind}, which cannot be an input of an ONNX model: initialize the parts of the "
                "network that take tensors, such as net.backbone"
            )
        raise LsuvError(f"a batch of type {type(batch).__name__} has no tensor for the network's forward")
    for name, value in call.tensors.items():
        if value.is_nested or value.layout is not torch.strided:
            raise LsuvError(f"{name} of the batch is a nested or sparse tensor, which ONNX lacks: make it dense")
    return call


def _keywords(parameters: Mapping[str, inspect.Parameter], batch: dict[str, Any]) -> Call:
    """The entries of a dict that `forward` has parameters for, in their order, without optional labels."""
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    wanted = {
        name: batch[name]
        for name, parameter in parameters.items()
        if name in batch and not (name.startswith("label") and parameter.default is not parameter.empty)
    }
    rest = {name: value for name, value in batch.items() if name not in parameters and not name.startswith("label")}
    return Call((), {**wanted, **(rest if anything else {})})
