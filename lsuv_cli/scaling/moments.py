"""Mean and variance of a value: the nodes that reduce it inside the graph, and the sums outside, in float64.

A value is reduced in groups (one sample's channel, or one row), because a float32 sum of n elements can be off by
n·eps/2 of itself. The fast form is E[y²] - E[y]² with the squares in float32; its relative error is at most

    n·eps/2 · E[y²] / Var(y)

Where that error is above the accuracy wanted, or the squares leave float32's range, `trusted` is false, and the value
is measured again in the exact form: centred, in double, inside the graph. Planes of more than LARGEST_GROUP
elements are reduced row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

Array = NDArray[Any]
Floats = NDArray[np.float64]

EPSILON = float(np.finfo(np.float32).eps)
LARGEST_GROUP = 4096
# A mean square outside these bounds is near the edge of float32's range.
SMALLEST_SQUARE, LARGEST_SQUARE = 1e-30, 1e30
ROUNDING = 1e-14  # variance / mean² up to which a variance is rounding error of the sums in double


@dataclass(frozen=True)
class Sums:
    """What one batch adds to an accumulator: elements, sums over them, and the elements of a group."""

    count: int = 0
    terms: tuple[float, ...] = ()
    group: float = 0.0


@dataclass(frozen=True)
class Probe:
    """A value to be measured, and the kept bias, if any, that is added to it later."""

    value: str
    prefix: str  # of the names of the probe's nodes and outputs; no name in the model starts with it
    axes: tuple[int, ...] | None  # the axes of a group; None where the value may have no axis at all
    accuracy: float  # the relative error that the variance may have
    bias: str = ""
    exact: bool = False
    group: int = 0  # elements of a group, if they are known beforehand

    @property
    def fetches(self) -> tuple[str, ...]:
        """The graph outputs that hold the result."""
        kinds = ["mean", "square", *(["bias_mean", "bias_square", "product"] if self.bias else [])]
        kinds += [] if self.group else ["size"]
        return tuple(self.own(kind) for kind in kinds)

    @property
    def is_plane(self) -> bool:
        """Whether a group is one channel's positions."""
        return self.axes is not None and self.axes[0] == 2

    def over(self, plane: Sequence[int]) -> Probe:
        """The probe for planes of this shape: a group is a whole plane or, above LARGEST_GROUP elements, a row."""
        if math.prod(plane) <= LARGEST_GROUP or self.bias:
            return replace(self, group=math.prod(plane))
        return replace(self, group=plane[-1], axes=(-1,))

    def sums(self, fetched: Sequence[Array]) -> Sums:
        """What one batch adds, from its fetched outputs."""
        parts = [np.asarray(part, np.float64).ravel() for part in fetched]
        size = self.group * parts[0].size if self.group else int(parts.pop()[0])
        if size == 0:
            return Sums()
        weight = size / parts[0].size  # elements in a group
        mean, square = parts[:2]
        with np.errstate(over="ignore", invalid="ignore"):
            terms = [mean.sum(), square.sum(), mean @ mean]
            if self.bias:
                bias, bias_square, product = parts[2:]
                terms += [bias.sum(), bias_square.sum(), bias @ bias, product.sum(), mean @ bias]
            return Sums(size, tuple((weight * np.array(terms)).tolist()), weight)

    def meter(self) -> Accumulator:
        return Accumulator(self)

    def own(self, kind: str) -> str:
        """The name of a value that the probe's nodes compute."""
        return f"{self.prefix}{kind}/{self.value}"


@dataclass(frozen=True, eq=False)
class ChannelMoments:
    """Mean and variance of each channel of y; of b, and their covariance, where a bias b is kept."""

    mean: Floats
    variance: Floats
    bias_mean: Floats
    bias_variance: Floats
    covariance: Floats


@dataclass(frozen=True)
class Moments:
    """Mean and variance of y over all data; Var(b) and Cov(y, b) where a bias b is kept."""

    mean: float
    variance: float
    bias_variance: float = 0.0
    covariance: float = 0.0
    count: int = 0
    trusted: bool = True
    dead_units: float | None = None  # fraction of the units that are never above zero, if asked for
    noise: bool = False  # the output is nothing but rounding
    begins: bool = False  # the noise begins at this layer, and not at one in front of it
    disputed: float | None = None  # the unoptimized variance on a few samples, where the optimized one differs
    channel_variance: float | None = None  # mean over channels of their variances, if asked for
    channel_mean_square: float | None = None  # mean over channels of their squared means, if asked for
    channels: ChannelMoments | None = None  # where channels are measured one by one

    @property
    def finite(self) -> bool:
        return math.isfinite(self.mean) and math.isfinite(self.variance)

    @property
    def is_zero(self) -> bool:
        """Whether the value does not vary at all."""
        return self.finite and self.variance == 0.0

    def times(self, factor: float) -> Moments:
        """The moments of factor·y."""
        if factor == 1.0:
            return self
        product = self.covariance * factor
        return replace(self, mean=self.mean * factor, variance=self.variance * factor * factor, covariance=product)


def pooled(parts: Sequence[Moments]) -> Moments:
    """Σ nᵢ·Mᵢ / Σ nᵢ: the moments of several outputs, weighted by their counts, each variance about its own mean."""
    if len(parts) == 1:
        return parts[0]
    count = sum(part.count for part in parts)
    ratios = [part.count / count for part in parts]

    def average(name: str) -> float:
        return math.fsum(w * getattr(part, name) for w, part in zip(ratios, parts, strict=True))

    by_channel = [part.channels for part in parts if part.channels is not None]
    if len(by_channel) == len(parts):
        names = [each.name for each in fields(ChannelMoments)]
        sums = {k: sum(w * getattr(c, k) for w, c in zip(ratios, by_channel, strict=True)) for k in names}
        channels = ChannelMoments(**sums)
    else:
        channels = None
    means = average("mean"), average("variance"), average("bias_variance"), average("covariance")
    return Moments(*means, count, channels=channels)


def of_channels(channels: ChannelMoments, count: int) -> Moments:
    """The moments of a whole from those of its channels: E[y] = E[E[y_c]], Var(y) = E[Var(y_c)] + Var(E[y_c])."""
    c = channels
    with np.errstate(over="ignore", invalid="ignore"):
        mean, bias = float(c.mean.mean()), float(c.bias_mean.mean())
        return Moments(
            mean,
            float(c.variance.mean() + c.mean.var()),
            float(c.bias_variance.mean() + c.bias_mean.var()),
            float(c.covariance.mean() + ((c.mean - mean) * (c.bias_mean - bias)).mean()),
            count,
            channels=channels,
        )


@dataclass
class Accumulator:
    """Adds the sums of one probe over all batches, in float64, in the order of the batches."""

    probe: Probe
    count: int = 0
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(8))
    group: float = 0.0  # elements of the largest group so far

    def add(self, sums: Sums) -> None:
        self.group = max(self.group, sums.group)
        with np.errstate(over="ignore", invalid="ignore"):
            self.sums[: len(sums.terms)] += sums.terms
        self.count += sums.count

    def result(self) -> Moments:
        if self.count == 0:
            return Moments(math.nan, math.nan)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, square, means, bias, bias_square, biases, product, between = (self.sums / self.count).tolist()
            if not self.probe.exact:
                variance = square - mean * mean
                error = self.group * EPSILON / 2 * square
                trusted = SMALLEST_SQUARE < square < LARGEST_SQUARE and error <= self.probe.accuracy * variance
                return Moments(mean, max(variance, 0.0), count=self.count, trusted=trusted)
            variance = square + (means - mean * mean)
            # A constant output leaves a tiny variance by rounding: it counts as 0.
            if variance <= ROUNDING * mean * mean:
                variance = 0.0
            return Moments(
                mean,
                variance,
                max(bias_square + (biases - bias * bias), 0.0),
                product + (between - mean * bias),
                self.count,
            )


def nodes(probe: Probe, opset: int, is_float32: bool) -> list[NodeProto]:
    """The nodes that reduce a value to its probe's outputs."""
    value = probe.value
    # A Size node would force images out of the blocked layout in which onnxruntime convolves.
    made = [] if probe.group else [helper.make_node("Size", [value], [probe.own("size")])]

    def node(op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        made.append(helper.make_node(op, inputs, [probe.own(name)], **attributes))
        return probe.own(name)

    def mean(source: str, name: str) -> str:
        if probe.axes is not None and len(probe.axes) > 1 and is_float32 and not probe.exact:
            return node("GlobalAveragePool", [source], name)
        axes = list(probe.axes or (-1,))
        if opset < 18:
            return node("ReduceMean", [source], name, axes=axes, keepdims=1)
        constant = node("Constant", [], f"{name}/axes", value_ints=axes)
        return node("ReduceMean", [source, constant], name, keepdims=1)

    def row(source: str, name: str) -> str:
        if probe.axes is not None:
            return source
        shape = helper.make_tensor("shape", TensorProto.INT64, [2], [1, -1])
        return node("Reshape", [source, node("Constant", [], f"{name}/shape", value=shape)], name)

    if not probe.exact:
        source = row(value if is_float32 else node("Cast", [value], "float", to=TensorProto.FLOAT), "row")
        mean(source, "mean")
        mean(node("Mul", [source, source], "squared"), "square")
        return made

    def centred(source: str, prefix: str) -> str:
        middle = mean(source, f"{prefix}mean")
        return node("Sub", [source, middle], f"{prefix}centred")

    wide = node("Cast", [value], "double", to=TensorProto.DOUBLE)
    source = centred(row(wide, "row"), "")
    mean(node("Mul", [source, source], "squared"), "square")
    if probe.bias:
        bias = node("Cast", [probe.bias], "bias_double", to=TensorProto.DOUBLE)
        # y - y + b is b in y's shape; Expand came only with opset 8.
        spread = node("Add", [node("Sub", [wide, wide], "nothing"), bias], "bias_spread")
        other = centred(row(spread, "bias_row"), "bias_")
        mean(node("Mul", [other, other], "bias_squared"), "bias_square")
        mean(node("Mul", [source, other], "crossed"), "product")
    return made
