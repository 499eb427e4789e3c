"""The device that sessions run on: the one that was asked for, once it has been tried.

A provider that loads may still lack cuDNN, or kernels for the card, and onnxruntime notices that only when a node runs.
So a device is taken only if it runs a negation, a convolution and two reductions, and computes what the CPU computes.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from lsuv_cli.errors import DeviceError, LsuvError
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.providers import PROVIDERS, ROWS, Device, Provider
from lsuv_cli.scaling.runtime import Session, host_value, to_numpy, value_on
from lsuv_cli.scaling.translation import OutOfMemory

MOST_DIGITS = 4  # of a device's number
TOLERANCE = 1e-3  # relative; a device that is off by more computes something else
PROBE = """
    <ir_version: 8, opset_import: ["" : 13]>
    probe (float[2,4,6,6] x, float[8,4,3,3] w) => (conv, mean, pool) {
        own = Neg (x)
        conv = Conv <pads=[1,1,1,1]> (own, w)
        mean = ReduceMean <axes=[2,3]> (conv)
        pool = GlobalAveragePool (conv) }
"""
OPERATORS = {"conv": "Conv", "mean": "ReduceMean", "pool": "GlobalAveragePool"}


def open_device(request: str = "auto", threads: int | None = None) -> Device:
    """The device asked for, such as cuda:1; "auto" is the first that can be used of CUDA and the CPU."""
    count = threads or available_threads()
    provider, index = requested(request)
    if provider is None:
        return _first(count)
    reason = unfit(provider.name, index)
    if reason:
        raise DeviceError(f"`device={request!r}` cannot be used: {reason}")
    return Device(provider, index, count, "as asked")


def requested(request: str) -> tuple[Provider | None, int]:
    """The provider and the number that a request such as cuda:1 names; no provider for "auto"."""
    kind, colon, number = request.lower().partition(":")
    takes_number = kind in PROVIDERS and not Device(PROVIDERS[kind], 0, 1).is_host
    is_number = number.isascii() and number.isdecimal() and len(number) <= MOST_DIGITS
    if kind not in {"auto", *PROVIDERS} or (colon and not (takes_number and is_number)):
        known = ", ".join(name if name == "cpu" else f"{name}[:N]" for name in PROVIDERS)
        raise DeviceError(f"`device` {request!r} is not one of auto, {known}")
    return PROVIDERS.get(kind), int(number or 0)


def _first(threads: int) -> Device:
    """The first device that can be used, with the reasons against those before it."""
    against = []
    for provider in ROWS:
        if provider.automatic:
            reason = unfit(provider.name, 0)
            if not reason:
                return Device(provider, 0, threads, f"auto takes {provider.title} where it computes what the CPU does")
            against.append(f"{provider.title} cannot be used: {reason}")
    return Device(PROVIDERS["cpu"], 0, threads, "; ".join(against))


def available_threads() -> int:
    """The cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def unfit(name: str, index: int) -> str:
    """Why a device cannot be used, with the way out; empty if it can. Each device is tried once in a process."""
    provider = PROVIDERS[name]
    return provider.absent(index) or ("" if provider.memory == "cpu" else probe(provider, index))


def probe(provider: Provider, index: int) -> str:
    """Run the probe on a device and compare; empty if the device computes what the CPU does."""
    device = Device(provider, index, 1)
    try:
        session = Session(_probe(), device, strict=True)
        if provider.key not in session.providers:
            return provider.explain("", index) or f"onnxruntime gives no session on {device}; use `device=cpu`"
        found = _results(session, value_on(device, _numbers(2, 4, 6, 6)))
    except OutOfMemory:
        return f"the memory of {device} is full; end other work on it"
    except LsuvError as problem:
        reason = provider.explain(str(problem.__cause__ or problem), index)
        return reason or f"{problem}; update the driver of {device}, or use `device=cpu`"
    expected = _results(Session(_probe(), Device(PROVIDERS["cpu"], 0, 1)), host_value(_numbers(2, 4, 6, 6)))
    for name, array in expected.items():
        off = float(np.abs(found[name] - array).max() / np.abs(array).max())
        if not off <= TOLERANCE:  # NaN is off too
            wrong = f"{OPERATORS[name]} on {device} is off by {off:.1g} of what the CPU computes"
            return f"{wrong}; update its driver, or use `device=cpu`"
    return ""


def _probe() -> StageModel:
    """A model with a plain kernel of the provider's own, which says so if it was not built for the card, an operator of
    cuDNN, one of the provider's own reductions, and one that may be either.
    """
    proto = onnx.parser.parse_model(PROBE)
    weight = proto.graph.input.pop()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(_numbers(8, 4, 3, 3), weight.name))
    return StageModel(proto, {}, {"x": "x"}, tuple(OPERATORS), ())


def _numbers(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _results(session: Session, value: Any) -> dict[str, NDArray[Any]]:
    kept, _ = session.run({"x": value})
    return {name: to_numpy(value) for name, value in kept.items()}
