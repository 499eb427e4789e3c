"""Mean and variance of a value: the nodes that reduce it inside the graph, and the sums outside, in float64.

A value is reduced in small groups (one sample's channel, or one row), because float32 sums over millions of
elements lose digits. The fast form, E[y²] - E[y]² with the squares in float32, is good unless the mean dwarfs the
spread or the squares leave float32's range. Then `trusted` is false, and the exact form, centred and in double
inside the graph, decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

Array = NDArray[Any]

# Beyond these the fast form has lost more than three of float32's seven digits, or is near the edge of its range.
WORST_RATIO = 1e3
SMALLEST_SQUARE, LARGEST_SQUARE = 1e-30, 1e30


@dataclass(frozen=True)
class Units:
    """A value's channels or features: how many, and the axes behind theirs."""

    count: int
    behind: tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """What is to be measured: a value, perhaps a bias that will be added to it, perhaps its units one by one."""

    value: str
    axes: tuple[int, ...] | None  # the axes of a group; None where the value may have no axis at all
    bias: str = ""
    exact: bool = False
    units: Units | None = None  # whose largest values are wanted
    group: int = 0  # elements of a group, if they are known beforehand
    divisor: float = 1.0  # what is wanted are the moments of value / divisor

    @property
    def fetches(self) -> tuple[str, ...]:
        """The graph outputs that hold the result."""
        kinds = ["mean", "square", *(["bias_mean", "bias_square", "product"] if self.bias else [])]
        kinds += [] if self.group else ["size"]
        kinds += ["largest"] if self.units else []
        return tuple(f"{self.value}/{kind}" for kind in kinds)


@dataclass(frozen=True)
class Moments:
    """Of y over all data, and of the bias b where there is one."""

    mean: float
    variance: float
    bias_variance: float = 0.0
    covariance: float = 0.0
    count: int = 0
    trusted: bool = True
    dead: float | None = None  # share of the units that are never above zero, if asked for

    @property
    def finite(self) -> bool:
        return math.isfinite(self.mean) and math.isfinite(self.variance)


@dataclass
class Accumulator:
    """Adds up what one probe finds, batch after batch."""

    probe: Probe
    count: int = 0
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(8))
    largest: float | Array = -math.inf  # of each unit

    def add(self, fetched: Sequence[Array]) -> None:
        parts = [np.asarray(part, np.float64).ravel() for part in fetched]
        largest = parts.pop() if self.probe.units else None
        size = self.probe.group * parts[0].size or int(parts.pop()[0])
        if size == 0:
            return
        if largest is not None:
            self.largest = np.maximum(self.largest, largest)
        weight = size / parts[0].size  # elements in a group
        mean, square = parts[:2]
        with np.errstate(over="ignore", invalid="ignore"):
            found = [mean.sum(), square.sum(), mean @ mean]
            if self.probe.bias:
                bias, bias_square, product = parts[2:]
                found += [bias.sum(), bias_square.sum(), bias @ bias, product.sum(), mean @ bias]
            self.sums[: len(found)] += weight * np.array(found)
        self.count += size

    def result(self) -> Moments:
        found = self._moments()
        if self.probe.divisor != 1.0:
            divisor = self.probe.divisor
            found = replace(found, mean=found.mean / divisor, variance=found.variance / divisor**2)
        if self.probe.units is None or not found.finite:
            return found
        return replace(found, dead=float(np.mean(np.asarray(self.largest) <= 0)))

    def _moments(self) -> Moments:
        if self.count == 0:
            return Moments(math.nan, math.nan)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, square, means, bias, bias_square, biases, product, between = (self.sums / self.count).tolist()
            if not self.probe.exact:
                variance = square - mean * mean
                trusted = SMALLEST_SQUARE < square < LARGEST_SQUARE and mean * mean <= WORST_RATIO * variance
                return Moments(mean, max(variance, 0.0), count=self.count, trusted=trusted)
            variance = square + (means - mean * mean)
            # What is left of a constant after rounding is no variance.
            if variance <= 1e-14 * mean * mean:
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
    # Size would take a value out of the layout in which onnxruntime keeps images.
    made = [] if probe.group else [helper.make_node("Size", [value], [f"{value}/size"])]

    def node(op: str, inputs: list[str], name: str, **attributes: Any) -> str:
        made.append(helper.make_node(op, inputs, [f"{value}/{name}"], **attributes))
        return f"{value}/{name}"

    def mean(source: str, name: str) -> str:
        if probe.axes is not None and len(probe.axes) > 1 and is_float32 and not probe.exact:
            return node("GlobalAveragePool", [source], name)
        axes = list(probe.axes or (-1,))
        if opset < 18:
            return node("ReduceMean", [source], name, axes=axes, keepdims=1)
        constant = node("Constant", [], f"{name}/axes", value_ints=axes)
        return node("ReduceMean", [source, constant], name, keepdims=1)

    def largest(source: str, name: str, axes: tuple[int, ...]) -> str:
        if opset < 18:
            return node("ReduceMax", [source], name, axes=list(axes), keepdims=0)
        constant = node("Constant", [], f"{name}/axes", value_ints=list(axes))
        return node("ReduceMax", [source, constant], name, keepdims=0)

    def row(source: str, name: str) -> str:
        if probe.axes is not None:
            return source
        shape = helper.make_tensor("shape", TensorProto.INT64, [2], [1, -1])
        return node("Reshape", [source, node("Constant", [], f"{name}/shape", value=shape)], name)

    if probe.units:
        source = value if is_float32 else node("Cast", [value], "units", to=TensorProto.DOUBLE)
        source = largest(source, "largest_behind", probe.units.behind) if probe.units.behind else source
        table = helper.make_tensor("shape", TensorProto.INT64, [2], [-1, probe.units.count])
        source = node("Reshape", [source, node("Constant", [], "units/shape", value=table)], "units/table")
        largest(source, "largest", (0,))

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
