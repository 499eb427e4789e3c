"""Gauges: how verification reduces a layer's output to mean and variance, by nodes inside the model and sums outside.

A gauge is made after a *sounding*: the layer's output for a few samples, from unoptimized onnxruntime, as an array.
From it come the value's rank, the size of its groups, and a number m near its mean. Then, with d = y - m,

    mean = m + E[d],  Var = E[d²] - E[d]²

where nodes inside the model take E[d] and E[d²] of each group: a channel's positions, or a row. m is 0 where
mean² <= LARGEST_MEAN·variance. Groups of more than LARGEST_GROUP elements, and values whose squares leave float32's
range, are reduced in double.

Gauges share no code with calibration's probes (moments.py), because verification is there to find the probes' mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from lsuv_cli.model.channels import Channels
from lsuv_cli.scaling.moments import ChannelMoments, Moments

Array = NDArray[Any]

LARGEST_GROUP = 4096
LARGEST_MEAN = 4.0  # mean² / variance up to which y is not shifted by its mean
SMALLEST, LARGEST = 1e-12, 1e12  # magnitudes whose squares float32 holds with room to spare
UNIT_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Sounding:
    """A layer's output for a few samples."""

    shape: tuple[int, ...]
    mean: float
    variance: float
    largest: float

    @classmethod
    def of(cls, array: Array) -> Sounding:
        with np.errstate(over="ignore", invalid="ignore"):
            wide = np.asarray(array, np.float64)
            if not wide.size:
                return cls(wide.shape, 0.0, 0.0, 0.0)
            return cls(wide.shape, float(wide.mean()), float(wide.var()), float(np.abs(wide).max()))


@dataclass(frozen=True)
class Units:
    """The units of a value, its channels or features: how many, and the axes behind the unit axis."""

    count: int
    behind: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GaugeSums:
    """What one batch adds to a gauge's meter."""

    rows: int  # the length of the first axis of what was fetched
    count: float = 0.0
    d: float = 0.0
    d2: float = 0.0
    per_group: float | None = None  # elements of a group, where the batch has any
    most: Array | None = None  # the largest value of each unit
    per_channel: Array | None = None  # sums of d and of d² for each channel of a page
    by_channel: Array | None = None  # sums of d and of d² for each channel that is measured


@dataclass(frozen=True)
class Gauge:
    """How one layer's output is measured."""

    value: str  # the measured value: the layer's output y, or c·y behind a norm that multiplies by c
    name: str  # the start of the names of the gauge's own values
    is_plane: bool  # (samples, channels, positions...): a convolution's output
    sounding: Sounding
    divisor: float = 1.0  # c
    accuracy: float = 1e-3  # the relative error that the variance may have
    equal_groups: bool = False  # groups seem to have the same size in all batches, so the size is not fetched
    rows: tuple[int, ...] | None = None  # the first axis in each batch, if equal groups depend on its being this long
    units: Units | None = None  # the units whose largest values are fetched, to find dead ones
    channel_axis: int | None = None  # the axis of the channels whose moments are wanted too
    channels: Channels | None = None  # the channels to be measured one by one, always in double
    careful: bool = False  # reduce in double whatever the sounding says, because float32 was not accurate enough

    @property
    def shift(self) -> float:
        s = self.sounding
        shifted = math.isfinite(s.mean) and s.mean * s.mean > LARGEST_MEAN * s.variance
        return s.mean * self.divisor if shifted else 0.0

    @property
    def group(self) -> tuple[int, ...] | None:
        """The axes of a group; None for a scalar."""
        shape = self.sounding.shape
        if self.channels is not None and shape:
            # With the channels on the last axis the value is a table, a column for each channel.
            axis = self.channels.axis
            return (0,) if axis == -1 else tuple(range(len(shape) + axis + 1, len(shape)))
        if len(shape) > 2 and self.is_plane and 0 < math.prod(shape[2:]) <= LARGEST_GROUP:
            return tuple(range(2, len(shape)))
        return (len(shape) - 1,) if shape else None

    @property
    def in_double(self) -> bool:
        shape, axes = self.sounding.shape, self.group
        size = math.prod(shape[axis] for axis in axes) if axes else 1
        in_range = SMALLEST < self.sounding.largest < LARGEST
        return self.careful or self.channels is not None or size > LARGEST_GROUP or not in_range

    @property
    def fetches(self) -> tuple[str, ...]:
        kinds = ["d", "d2", *([] if self.equal_groups else ["count"]), *(["most"] if self.units else [])]
        kinds += ["channel_d", "channel_d2"] if self.channel_axis is not None and not self.is_plane else []
        return tuple(f"{self.name}.{kind}" for kind in kinds)

    def sums(self, fetched: Sequence[Array]) -> GaugeSums:
        """What one batch adds, from its fetched values."""
        named = dict(zip(self.fetches, fetched, strict=True))
        d, d2 = (np.asarray(named[f"{self.name}.{kind}"], np.float64) for kind in ("d", "d2"))
        rows = d.shape[0] if d.ndim else 1
        if not d.size:
            return GaugeSums(rows)
        per_group = math.prod(self.sounding.shape[axis] for axis in self.group) if self.group else 1.0
        if not self.equal_groups:
            per_group = float(named[f"{self.name}.count"]) / d.size
        if not per_group:
            return GaugeSums(rows, per_group=per_group)
        with np.errstate(over="ignore", invalid="ignore"):
            by_channel = None
            if self.channels is not None:
                columns = (part.reshape(-1, self.channels.count).sum(axis=0) for part in (d, d2))
                by_channel = per_group * np.stack(list(columns))
            return GaugeSums(
                rows,
                count=per_group * d.size,
                d=per_group * float(d.sum()),
                d2=per_group * float(d2.sum()),
                per_group=per_group,
                most=np.asarray(named[f"{self.name}.most"], np.float64).ravel() if self.units else None,
                per_channel=None if self.channel_axis is None else self._per_channel(named, per_group, d, d2),
                by_channel=by_channel,
            )

    def _per_channel(self, named: Mapping[str, Array], per_group: float, d: Array, d2: Array) -> Array:
        if self.is_plane:  # (samples, channels, ...), whatever else a group is
            return np.stack([per_group * x.sum(axis=tuple(k for k in range(x.ndim) if k != 1)) for x in (d, d2)])
        means = [np.asarray(named[f"{self.name}.{kind}"], np.float64) for kind in ("channel_d", "channel_d2")]
        return np.stack([per_group * d.size / x.size * x for x in means])

    def meter(self) -> GaugeMeter:
        return GaugeMeter(self)

    def more_careful(self, moments: Moments) -> Gauge:
        """The same measurement in double, shifted by the mean as measured so far."""
        mean = moments.mean if math.isfinite(moments.mean) else self.sounding.mean
        return replace(self, careful=True, equal_groups=False, sounding=replace(self.sounding, mean=mean))

    def nodes(self, opset: int, element_type: int) -> list[NodeProto]:
        """The nodes that compute the gauge's fetched values."""
        return _GaugeNodes(self, opset, element_type).make()


@dataclass
class GaugeMeter:
    """Adds a gauge's sums over all batches, in float64, in the order of the batches."""

    gauge: Gauge
    count: float = 0.0
    d: float = 0.0
    d2: float = 0.0
    per_group: float = 1.0
    rows: list[int] = field(default_factory=list)
    most: Array = field(default_factory=lambda: np.array(-math.inf))
    per_channel: Array = field(default_factory=lambda: np.zeros((2, 1)))  # sums of d and of d² for each channel
    by_channel: Array = field(default_factory=lambda: np.zeros((2, 1)))  # sums of d and d²

    def add(self, sums: GaugeSums) -> None:
        self.rows.append(sums.rows)
        if sums.per_group is not None:
            self.per_group = sums.per_group
        with np.errstate(over="ignore", invalid="ignore"):
            self.d += sums.d
            self.d2 += sums.d2
            self.by_channel = self.by_channel if sums.by_channel is None else self.by_channel + sums.by_channel
            self.per_channel = self.per_channel if sums.per_channel is None else self.per_channel + sums.per_channel
        self.count += sums.count
        self.most = self.most if sums.most is None else np.maximum(self.most, sums.most)

    def _channel_moments(self) -> tuple[float | None, float | None]:
        """The channels' mean variance and mean squared mean."""
        gauge, channels = self.gauge, self.per_channel.shape[1]
        if gauge.channel_axis is None:
            return None, None
        with np.errstate(over="ignore", invalid="ignore"):
            offset, square = self.per_channel * channels / self.count
            variance = float(np.maximum(square - offset**2, 0.0).mean()) / gauge.divisor**2
            mean_square = float(((gauge.shift + offset) ** 2).mean()) / gauge.divisor**2
        return variance, mean_square

    def result(self) -> Moments:
        if not self.count:
            return Moments(math.nan, math.nan)
        gauge = self.gauge
        with np.errstate(over="ignore", invalid="ignore"):
            offset, square = self.d / self.count, self.d2 / self.count
        variance = max(square - offset * offset, 0.0) if math.isfinite(square) else math.nan
        error = 0.0 if gauge.in_double else self.per_group * UNIT_ROUNDOFF * square
        as_assumed = not gauge.equal_groups or gauge.rows is None or gauge.rows[: len(self.rows)] == tuple(self.rows)
        trusted = gauge.careful or (math.isfinite(square) and error <= gauge.accuracy * variance and as_assumed)
        dead_units = float(np.mean(self.most <= 0)) if gauge.units and math.isfinite(variance) else None
        found = gauge.shift + offset
        mean = found / gauge.divisor
        # A constant output leaves a tiny variance by rounding: it counts as 0.
        if variance <= UNIT_ROUNDOFF**2 * found * found:
            variance = 0.0
        count = round(self.count)
        spread, level = self._channel_moments()
        whole = Moments(
            mean,
            variance / gauge.divisor**2,
            count=count,
            trusted=trusted,
            dead_units=dead_units,
            channel_variance=spread,
            channel_mean_square=level,
        )
        return whole if gauge.channels is None else replace(whole, channels=self._of_channels(gauge.channels))

    def _of_channels(self, channels: Channels) -> ChannelMoments:
        """E[y_c] = m + E[d_c] and Var(y_c) = E[d_c²] - E[d_c]² of each channel."""
        with np.errstate(over="ignore", invalid="ignore"):
            offset, square = self.by_channel / (self.count / channels.count)
            mean = (self.gauge.shift + offset) / self.gauge.divisor
            variance = np.maximum(square - offset**2, 0.0) / self.gauge.divisor**2
        return ChannelMoments(mean, variance, *np.zeros((3, channels.count)))


class _GaugeNodes:
    def __init__(self, gauge: Gauge, opset: int, element_type: int) -> None:
        self.gauge, self.opset, self.element_type = gauge, opset, element_type
        self.made: list[NodeProto] = []

    def make(self) -> list[NodeProto]:
        gauge = self.gauge
        if not gauge.equal_groups:
            self.node("Size", [gauge.value], "count")
        wanted = TensorProto.DOUBLE if gauge.in_double else TensorProto.FLOAT
        y = gauge.value if self.element_type == wanted else self.node("Cast", [gauge.value], "cast", to=wanted)
        if gauge.channels is not None and gauge.channels.axis == -1:
            y = self.reshaped(y, "table_of_channels", [-1, gauge.channels.count])
        elif gauge.group is None:
            y = self.reshaped(y, "row", [1, -1])
        if gauge.shift:
            shift = helper.make_tensor("m", wanted, [], [gauge.shift])
            y = self.node("Sub", [y, self.node("Constant", [], "m", value=shift)], "shifted")
        self.mean(y, "d")
        squared = self.node("Mul", [y, y], "squared")
        self.mean(squared, "d2")
        if gauge.channel_axis is not None and not gauge.is_plane:
            rest = [axis for axis in range(len(gauge.sounding.shape)) if axis != gauge.channel_axis]
            self.reduced("ReduceMean", y, "channel_d", rest)
            self.reduced("ReduceMean", squared, "channel_d2", rest)
        if gauge.units:
            self.most_of_units(gauge.units)
        return self.made

    def node(self, op: str, inputs: list[str], kind: str, **attributes: Any) -> str:
        name = f"{self.gauge.name}.{kind}"
        self.made.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def mean(self, source: str, kind: str) -> None:
        axes = self.gauge.group or (1,)
        if len(axes) > 1 and not self.gauge.in_double:
            # GlobalAveragePool keeps images in the blocked layout in which onnxruntime convolves; ReduceMean does not.
            self.node("GlobalAveragePool", [source], kind)
        else:
            self.reduced("ReduceMean", source, kind, axes)

    def reduced(self, op: str, source: str, kind: str, axes: Sequence[int]) -> str:
        if self.opset < 18:
            return self.node(op, [source], kind, axes=list(axes), keepdims=0)
        constant = self.node("Constant", [], f"{kind}.axes", value_ints=list(axes))
        return self.node(op, [source, constant], kind, keepdims=0)

    def reshaped(self, source: str, kind: str, shape: list[int]) -> str:
        tensor = helper.make_tensor("shape", TensorProto.INT64, [len(shape)], shape)
        return self.node("Reshape", [source, self.node("Constant", [], f"{kind}.shape", value=tensor)], kind)

    def most_of_units(self, units: Units) -> None:
        value = self.gauge.value
        if self.element_type != TensorProto.FLOAT:
            value = self.node("Cast", [value], "units", to=TensorProto.DOUBLE)
        if units.behind:
            value = self.reduced("ReduceMax", value, "behind", units.behind)
        self.reduced("ReduceMax", self.reshaped(value, "table", [-1, units.count]), "most", (0,))
