"""Weights that a model computes as a·t: a tensor of the checkpoint times fixed numbers, perhaps with elements moved.

A gain (equalized learning rate), or a parametrization that multiplies. The expression f is evaluated with all elements
of t replaced by 1, which gives a, and by indices, which gives the moves. It is verified with t's own values: weight
normalization, standardization and spectral normalization divide by numbers that depend on t, and fail there.
A new weight w goes home as t = w/a. The numbers a must not be 0, as those of a mask are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from lsuv_cli.home.parametrizations import precision
from lsuv_cli.home.values import Tensors
from lsuv_cli.model.graph import Graph, Source

Array = NDArray[Any]
DIGITS = 64  # an index is found by its digits to this base: bfloat16 rounds such numbers by less than 1/2


@dataclass(frozen=True, eq=False)
class Product:
    """A constant that is factors·t[places] for a stored tensor t, computed with other stored tensors."""

    tensor: str
    factors: Array  # in the constant's layout
    places: NDArray[np.int64]  # flat places in t, in the constant's layout
    others: tuple[str, ...]  # stored tensors that the factors are computed from


class Whole(Protocol):
    """Where the values of t itself come from."""

    @property
    def keys(self) -> tuple[str, ...]: ...
    def read(self, tensors: Tensors) -> Array: ...
    def write(self, value: Array, tensors: Tensors) -> dict[str, Array]: ...


@dataclass(frozen=True, eq=False)
class Multiplied:
    """A constant that is a·t, where t comes from the checkpoint."""

    whole: Whole
    product: Product
    shape: tuple[int, ...]  # of t
    fixed: tuple[str, ...] = ()  # keys of the tensors that a is computed from

    @property
    def keys(self) -> tuple[str, ...]:
        return self.whole.keys

    def read(self, tensors: Tensors) -> Array:
        plain = np.asarray(self.whole.read(tensors), np.float64).reshape(-1)
        return np.asarray(plain[self.product.places].reshape(self.product.factors.shape) * self.product.factors)

    def write(self, value: Array, tensors: Tensors) -> dict[str, Array]:
        plain = np.empty(value.size, np.float64)
        plain[self.product.places] = (np.asarray(value, np.float64) / self.product.factors).reshape(-1)
        return self.whole.write(plain.reshape(self.shape), tensors)


@dataclass(frozen=True)
class _Replaced:
    """A source in which some tensors have other values."""

    source: Source
    values: Mapping[int, Array]  # id of a tensor -> its values

    def array(self, tensor: TensorProto) -> Array:
        return self.values[id(tensor)] if id(tensor) in self.values else self.source.array(tensor)


def find(graph: Graph, name: str) -> Product | None:
    """The product that a constant expression is; None if it is none, or if several tensors can be the factor t."""
    value = graph.known(name) if name not in graph.tensors else None
    if value is None:
        return None
    _, stored = graph.expression(name)
    sizes = {tensor: math.prod(graph.tensors[tensor].dims) for tensor in stored}
    large = [tensor for tensor in stored if sizes[tensor] == value.size > 1]
    if len(large) != 1 or graph.array(large[0]).dtype != value.dtype:
        return None  # of a weight and a mask of its size, either could be t
    found = _product(graph, name, large[0], np.asarray(value, np.float64))
    return None if found is None else replace(found, others=tuple(sorted(stored - {large[0]})))


def _product(graph: Graph, name: str, tensor: str, value: Array) -> Product | None:
    own = graph.array(tensor)

    def evaluated(values: Array) -> Array | None:
        put = {id(graph.tensors[tensor]): values.reshape(own.shape).astype(own.dtype)}
        found = replace(graph, source=_Replaced(graph.source, put)).known(name)
        return None if found is None else np.asarray(found, np.float64)

    factors = evaluated(np.ones(own.size))
    if factors is None or factors.size != value.size or not np.all(np.isfinite(factors)) or not np.all(factors):
        return None
    places = np.zeros(value.size)
    indices = np.arange(own.size)
    for digit in range(max(1, math.ceil(math.log(own.size, DIGITS)))):
        moved = evaluated(1 + (indices // DIGITS**digit) % DIGITS)
        if moved is None or not np.all(np.isfinite(moved)):
            return None
        places += (np.rint((moved / factors).reshape(-1)) - 1) * DIGITS**digit
    order = places.astype(np.int64)
    if not np.array_equal(np.sort(order), indices):
        return None
    again = factors * np.asarray(own, np.float64).reshape(-1)[order].reshape(factors.shape)
    if not np.all(np.abs(again - value) <= precision(own.dtype) * np.abs(value)):
        return None
    return Product(tensor, factors, order, ())
