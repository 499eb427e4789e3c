"""Mean and variance of each channel of a value: the nodes that reduce it inside the graph, and the sums outside.

With y_c the elements of channel c and C channels of equally many elements,

    E[y] = Σ E[y_c] / C,  Var(y) = Σ Var(y_c) / C + Var(E[y_c]),

the latter over channels: so the moments of the whole follow from those of its channels. Everything is centred and in
double, because a channel may be nearly constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper

from lsuv_cli.errors import ModelError
from lsuv_cli.model.channels import Channels
from lsuv_cli.scaling.moments import ChannelMoments, Moments, of_channels

Array = NDArray[Any]
Floats = NDArray[np.float64]

CONSTANT = 1e-12  # variance / mean² up to which a channel's variance is rounding error of float32


@dataclass(frozen=True, eq=False)
class ChannelSums:
    """What one batch adds to an accumulator: elements of one channel, and sums over them for each channel."""

    count: float
    terms: Floats


@dataclass(frozen=True)
class ChannelProbe:
    """A value whose channels are measured, and the kept bias, if any, that is added to it later."""

    value: str
    prefix: str  # of the names of the probe's nodes and outputs; no name in the model starts with it
    channels: Channels
    bias: str = ""

    @property
    def fetches(self) -> tuple[str, ...]:
        kinds = ["size", "mean", "square", *(["bias_mean", "bias_square", "product"] if self.bias else [])]
        return tuple(self.own(kind) for kind in kinds)

    def own(self, kind: str) -> str:
        return f"{self.prefix}channel_{kind}/{self.value}"

    def sums(self, fetched: Sequence[Array]) -> ChannelSums:
        """What one batch adds, from its fetched outputs."""
        size, *parts = fetched
        count = self.channels.count
        if not int(size):
            return ChannelSums(0.0, np.zeros((0, count)))
        if parts[0].size % count:
            raise ModelError(
                f"the output {self.value!r} has no axis of {count} channels, as its weight has; its layer can be "
                "excluded, or scaled with `scale='layer'` and `bias='zero'`"
            )
        mean, square, *others = (np.asarray(part, np.float64).reshape(-1, count) for part in parts)
        with np.errstate(over="ignore", invalid="ignore"):
            terms = [mean, square, mean * mean]
            if others:
                bias, bias_square, product = others
                terms += [bias, bias_square, bias * bias, product, mean * bias]
            weight = int(size) / mean.size  # elements in a group
            return ChannelSums(int(size) / count, np.stack([weight * term.sum(axis=0) for term in terms]))

    def meter(self) -> ChannelAccumulator:
        return ChannelAccumulator(self, np.zeros((8, self.channels.count)))

    def nodes(self, opset: int) -> list[NodeProto]:
        """The nodes that compute the fetched values: moments of each group, a part of one channel."""
        return _ProbeNodes(self, opset).make()


@dataclass
class ChannelAccumulator:
    """Adds the sums of one probe over all batches, in float64, in the order of the batches."""

    probe: ChannelProbe
    sums: Floats
    count: float = 0.0  # elements of one channel

    def add(self, sums: ChannelSums) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.sums[: len(sums.terms)] += sums.terms
        self.count += sums.count

    def result(self) -> Moments:
        if not self.count:
            return Moments(math.nan, math.nan)
        with np.errstate(over="ignore", invalid="ignore"):
            mean, square, means, bias, bias_square, biases, product, between = self.sums / self.count
            variance = square + (means - mean * mean)
            variance = np.where(variance <= CONSTANT * mean * mean, 0.0, variance)
            bias_variance = np.maximum(bias_square + (biases - bias * bias), 0.0)
            found = ChannelMoments(mean, variance, bias, bias_variance, product + (between - mean * bias))
        return of_channels(found, round(self.count * len(mean)))


class _ProbeNodes:
    def __init__(self, probe: ChannelProbe, opset: int) -> None:
        self.probe, self.opset = probe, opset
        self.made: list[NodeProto] = []

    def make(self) -> list[NodeProto]:
        value, bias = self.probe.value, self.probe.bias
        self.node("Size", [value], "size")
        wide = self.node("Cast", [value], "double", to=TensorProto.DOUBLE)
        y = self.centred(wide, "")
        self.mean(self.node("Mul", [y, y], "squared"), "square")
        if bias:
            # y - y + b is b in y's shape; Expand came only with opset 8.
            zeros = self.node("Sub", [wide, wide], "nothing")
            cast = self.node("Cast", [bias], "bias_double", to=TensorProto.DOUBLE)
            b = self.centred(self.node("Add", [zeros, cast], "bias_spread"), "bias_")
            self.mean(self.node("Mul", [b, b], "bias_squared"), "bias_square")
            self.mean(self.node("Mul", [y, b], "crossed"), "product")
        return self.made

    def centred(self, source: str, prefix: str) -> str:
        """y - E[y] within each group, as a table with a column for each channel if the channels are the last axis."""
        if self.probe.channels.axis == -1:
            shape = helper.make_tensor("shape", TensorProto.INT64, [2], [-1, self.probe.channels.count])
            source = self.node("Reshape", [source, self.constant(f"{prefix}shape", value=shape)], f"{prefix}table")
        return self.node("Sub", [source, self.mean(source, f"{prefix}mean")], f"{prefix}centred")

    def mean(self, source: str, kind: str) -> str:
        """The mean over the axes behind the channels; over the rows of a table."""
        axis = self.probe.channels.axis
        axes = [0] if axis == -1 else list(range(axis + 1, 0))
        if self.opset < 18:
            return self.node("ReduceMean", [source], kind, axes=axes, keepdims=1)
        return self.node("ReduceMean", [source, self.constant(f"{kind}/axes", value_ints=axes)], kind, keepdims=1)

    def constant(self, kind: str, **value: Any) -> str:
        return self.node("Constant", [], kind, **value)

    def node(self, op: str, inputs: list[str], kind: str, **attributes: Any) -> str:
        self.made.append(helper.make_node(op, inputs, [self.probe.own(kind)], **attributes))
        return self.probe.own(kind)
