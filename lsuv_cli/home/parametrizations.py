"""Weights that are computed from checkpoint tensors in ways that can be undone.

Weight normalization: w = g·v/|v|. A new w goes home as v = w, g = |w|.

A folded BatchNorm: w' = f·w and b' = beta + f·(b - mean), with f = gamma / sqrt(var + eps) for each output channel. A
new w' goes home as w = w'/f; a new b' as b + (b' - old b')/f, or without a b as beta + (b' - old b'). As the other
tensors of the BatchNorm are unchanged, the network computes what the file computes. The BatchNorm's eps is not in the
checkpoint: it is the one number that makes f right for all channels.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsuv_cli.home import layouts
from lsuv_cli.home.checkpoints import Checkpoint
from lsuv_cli.home.layouts import Layout
from lsuv_cli.home.values import Tensors
from lsuv_cli.model.matrices import MatrixForm

Array = NDArray[Any]

PAIRS = (("weight_g", "weight_v"), ("original0", "original1"))  # g and v, by PyTorch's older and newer name
MOST_EPSILON = 0.1
NEAR = 8  # places between tensors of one BatchNorm, in a checkpoint whose keys name no modules


def precision(dtype: np.dtype[Any]) -> float:
    """A bound on the rounding error of a product of a few numbers of a type, relative to the largest element."""
    return {"float64": 1e-7, "float32": 2e-6, "float16": 4e-3}.get(dtype.name, 3e-2)


@dataclass(frozen=True, eq=False)
class Normalized:
    """A constant that is g·v/|v|."""

    g: str
    v: str
    layout: Layout

    @property
    def keys(self) -> tuple[str, ...]:
        return self.g, self.v

    def read(self, tensors: Tensors) -> Array:
        return self.layout.forward(weight_norm(tensors(self.g), tensors(self.v)))

    def write(self, value: Array, tensors: Tensors) -> dict[str, Array]:
        v = self.layout.backward(np.asarray(value, np.float64)).reshape(tensors(self.v).shape)
        return {self.v: v, self.g: _norm(v, tensors(self.g))}


def weight_norm(g: Array, v: Array) -> Array:
    """The weight of weight normalization, in float64."""
    wide = np.asarray(v, np.float64)
    with np.errstate(all="ignore"):
        return np.asarray(g, np.float64) * wide / _norm(wide, g)


def _norm(v: Array, g: Array) -> Array:
    """|v| in the shape of g, which has an axis of length 1 where the norm is taken."""
    axes = tuple(k for k in range(v.ndim) if g.ndim != v.ndim or g.shape[k] == 1)
    found: Array = np.sqrt(np.sum(np.square(v), axis=axes, keepdims=True))
    return found.reshape(g.shape)


def normalized(checkpoint: Checkpoint, value: Array) -> Iterator[Normalized]:
    """Pairs of g and v that make a constant."""
    for key in checkpoint.floats:
        for g_name, v_name in PAIRS:
            g = f"{key.removesuffix(v_name)}{g_name}"
            v_array = checkpoint.tensors[key]
            if not key.endswith(v_name) or g not in checkpoint.tensors or v_array.size != value.size:
                continue
            g_array = checkpoint.tensors[g]
            if g_array.ndim not in (0, v_array.ndim):
                continue
            made = weight_norm(g_array, v_array)
            for layout in layouts.find(value, made, 4 * precision(value.dtype))[:1]:
                yield Normalized(g, key, layout)


@dataclass(frozen=True, eq=False)
class Multiple:
    """A weight that is f·w for each output channel of its layer."""

    key: str
    layout: Layout
    form: MatrixForm
    factors: Array  # (groups, out, 1)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, tensors: Tensors) -> Array:
        plain = self.layout.forward(np.asarray(tensors(self.key), np.float64))
        return self.form.weight(self.form.matrices(plain) * self.factors, plain.shape)

    def write(self, value: Array, tensors: Tensors) -> dict[str, Array]:
        wide = np.asarray(value, np.float64)
        plain = self.form.weight(self.form.matrices(wide) / self.factors, wide.shape)
        return {self.key: self.layout.backward(plain).reshape(tensors(self.key).shape)}


@dataclass(frozen=True, eq=False)
class Shifted:
    """A bias that is f·t + an offset: t is the layer's own bias or, with f = 1, beta of the folded BatchNorm."""

    key: str
    factors: Array
    offset: Array
    shape: tuple[int, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self, tensors: Tensors) -> Array:
        plain = np.ravel(np.asarray(tensors(self.key), np.float64))
        found: Array = (plain * self.factors + self.offset).reshape(self.shape)
        return found

    def write(self, value: Array, tensors: Tensors) -> dict[str, Array]:
        plain = (np.ravel(np.asarray(value, np.float64)) - self.offset) / self.factors
        return {self.key: plain.reshape(tensors(self.key).shape)}


def multiples(checkpoint: Checkpoint, keys: Sequence[str], value: Array, form: MatrixForm) -> list[Multiple]:
    """The checkpoint tensors of which a weight is a multiple, channel by channel."""
    wanted = form.matrices(np.asarray(value, np.float64))
    found: list[Multiple] = []
    for key in keys:
        array = checkpoint.tensors[key]
        if array.size != value.size or array.ndim < 2:
            continue
        for layout in layouts.hypotheses(value.shape, array.shape):
            factors = _factors(wanted, form, layout, array, precision(value.dtype))
            if factors is not None:
                found.append(Multiple(key, layout, form, factors))
    return found


def _factors(wanted: Array, form: MatrixForm, layout: Layout, array: Array, tolerance: float) -> Array | None:
    plain = form.matrices(layout.forward(array))
    for part in (slice(0, 1), slice(None)):  # one channel first: most candidates fail there
        rows, aim = np.asarray(plain[:, part], np.float64), wanted[:, part]
        squares = np.sum(rows * rows, axis=2, keepdims=True)
        with np.errstate(all="ignore"):
            factors = np.sum(aim * rows, axis=2, keepdims=True) / squares
        most = np.abs(aim).max(axis=2, keepdims=True)
        if not np.all(np.isfinite(factors)) or np.any(np.abs(factors * rows - aim) > 4 * tolerance * most):
            return None
    return np.asarray(factors) if aim.shape[2] > 1 else None  # rows of one number are always multiples


@dataclass(frozen=True)
class Norm:
    """The tensors of a BatchNorm that explains a layer's factors."""

    gamma: str
    var: str


def norms(checkpoint: Checkpoint, factors: Array, dtype: np.dtype[Any]) -> list[Norm]:
    """BatchNorms with gamma / sqrt(var + eps) = f for one eps; gamma may be absent, which is 1."""
    f = np.ravel(factors)
    order = [key for key in checkpoint.floats if checkpoint.tensors[key].size == f.size]
    place = {key: k for k, key in enumerate(checkpoint.tensors)}
    found: list[Norm] = []
    for gamma, var in itertools.product(["", *order], order):
        if gamma and (gamma == var or not (_siblings(gamma, var) or abs(place[gamma] - place[var]) < NEAR)):
            continue
        scale = np.ravel(np.asarray(checkpoint.tensors[gamma], np.float64)) if gamma else np.ones(f.size)
        variance = np.ravel(np.asarray(checkpoint.tensors[var], np.float64))
        if np.any(f == 0) or np.any(variance < 0) or np.any(np.sign(scale) != np.sign(f)):
            continue
        epsilon = (scale / f) ** 2 - variance
        size = np.abs(variance) + MOST_EPSILON
        middle = float(np.median(epsilon))
        if 0 <= middle <= MOST_EPSILON and np.all(np.abs(epsilon - middle) <= 8 * precision(dtype) * size):
            found.append(Norm(gamma, var))
    return found


def shifted(checkpoint: Checkpoint, norms: Sequence[Norm], factors: Array, bias: Array) -> Shifted | None:
    """How a bias is beta + f·(b - mean) of one of the BatchNorms, where the layer's own b may be absent.

    None if more than one tensor could take a new value.
    """
    f, wanted = np.ravel(factors), np.ravel(np.asarray(bias, np.float64))
    own: dict[str, Shifted] = {}
    betas: dict[str, Shifted] = {}
    for norm in norms:
        arrays = _near(checkpoint, norm, f.size)
        for beta, mean in itertools.permutations(arrays, 2):
            for b in ("", *(key for key in arrays if key not in (beta, mean) and np.any(arrays[key]))):
                shift = f * ((arrays[b] if b else 0.0) - arrays[mean])
                size = np.max(np.abs(arrays[beta]) + np.abs(shift))
                if np.any(np.abs(arrays[beta] + shift - wanted) > 8 * precision(bias.dtype) * size):
                    continue
                betas[beta] = Shifted(beta, np.ones(f.size), wanted - arrays[beta], bias.shape)
                if b:
                    own[b] = Shifted(b, f, wanted - f * arrays[b], bias.shape)
    return next((next(iter(found.values())) for found in (own, betas) if len(found) == 1), None)


def _near(checkpoint: Checkpoint, norm: Norm, size: int) -> dict[str, Array]:
    """Tensors of one number per channel that may belong to a BatchNorm's module or to the layer before it."""
    place = {key: k for k, key in enumerate(checkpoint.tensors)}
    return {
        key: np.ravel(np.asarray(checkpoint.tensors[key], np.float64))
        for key in checkpoint.floats
        if checkpoint.tensors[key].size == size
        and key not in (norm.gamma, norm.var)
        and (_siblings(norm.var, key) or abs(place[norm.var] - place[key]) < NEAR)
    }


def _siblings(one: str, other: str) -> bool:
    """Whether two keys are of one module: `bn.weight` and `bn.bias`, `params/bn/scale` and `batch_stats/bn/var`."""
    mine, others = _module(one), _module(other)
    return bool(mine) and (mine == others or (len(mine) == len(others) > 1 and mine[1:] == others[1:]))


@functools.cache
def _module(key: str) -> tuple[str, ...]:
    return tuple(re.split(r"[/.]", key)[:-1])
