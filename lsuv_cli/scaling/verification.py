"""Verification: every layer's mean and variance on all of the data, measured in the model itself.

1. onnxruntime opens the file as it is; a model that onnxruntime refuses is not called ok.
2. A few samples run through the model without onnxruntime's optimizers; every layer's output is looked at as an array,
   in float64 (the sounding). The model's outputs must be those of the file opened as it is.
3. All data runs through the model as onnxruntime optimizes it, once, and each layer's output is reduced inside it
   (gauges.py). The same few samples go first, and a layer that has another variance there than in step 2 is *disputed*.
4. Where a layer's input is nearly zero, its output may be nothing but rounding noise (noise.py).

A model whose weights take much memory is measured in pieces. Half precision that the device cannot run is run in
float32 with each value rounded as it would be stored. Verification shares only the building and running of models with
calibration (model_builder.py, runner.py), not the measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, TypeProto, helper

from lsuv_cli.details import Histogram
from lsuv_cli.errors import ModelError
from lsuv_cli.memory import give_back
from lsuv_cli.model.channels import of as channels_of
from lsuv_cli.model.constants import numpy_type
from lsuv_cli.model.file import ModelFile
from lsuv_cli.model.flatten import STANDARD_DOMAINS
from lsuv_cli.model.graph import OLDEST_OPSET, Graph, attribute
from lsuv_cli.model.layers import CONVOLUTIONS, Layer
from lsuv_cli.model.prepare import Look
from lsuv_cli.model.random_ops import is_random
from lsuv_cli.scaling import precision, runtime, stages
from lsuv_cli.scaling.gauges import Gauge, Sounding, Units
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.moments import Moments
from lsuv_cli.scaling.noise import find as find_noise
from lsuv_cli.scaling.pieces import Pieces
from lsuv_cli.scaling.precision import Retype
from lsuv_cli.scaling.runner import Pass, Runner
from lsuv_cli.scaling.runtime import Session
from lsuv_cli.scaling.shares import common_type
from lsuv_cli.scaling.stages import Stage
from lsuv_cli.scaling.translation import UnknownOperator, Unsupported

Array = NDArray[Any]

# A model with more bytes of weights is verified in pieces of half as many, and opened without its weights.
VERIFY_BYTES = 256 << 20
# |optimized - unoptimized variance| <= DISPUTE_ACCURACY · accuracy · variance + MEAN_ROUNDING · mean²; else disputed.
DISPUTE_ACCURACY, MEAN_ROUNDING = 10, 1e-9
# So that outputs of zeros can be compared; a device may take float16 below its smallest normal number for zero.
SMALLEST_OUTPUT, SMALLEST_OUTPUT_IN_HALF = 1e-30, 2.0**-14
# Relative difference of outputs, between the file and the working copy: the file runs on the CPU, the working copy on
# the device, and in half precision each of them rounds in its own way.
SAME_OUTPUT, SAME_OUTPUT_IN_HALF = 1e-3, 5e-2
# Operators that make shapes that depend on the data, and operators that take a shape as an input.
SHAPE_MAKERS = frozenset({"NonZero", "Compress", "Unique", "NonMaxSuppression", "Loop", "Scan", "If", "Range"})
SHAPE_TAKERS = frozenset(
    {"Reshape", "Expand", "Tile", "Resize", "Upsample", "Slice", "Pad", "ConstantOfShape", "OneHot", "TopK", "Split",
     "CenterCropPad", "RandomNormal", "RandomUniform", "SequenceAt", "SplitToSequence", "GatherND", "Squeeze"}
)  # fmt: skip


@dataclass(frozen=True)
class ModelMoments:
    """Layer output -> moments, and warnings about the model."""

    moments: Mapping[str, Moments]
    warnings: tuple[str, ...] = ()
    outputs: Mapping[str, Histogram] = field(default_factory=dict)  # on the few samples, if asked for


@dataclass(frozen=True)
class Wanted:
    """What is measured besides every layer's mean and variance."""

    units: bool = False  # the fraction of units that are never above zero
    channels: frozenset[str] = frozenset()  # outputs of the layers that are measured channel by channel
    sums: tuple[str, ...] = ()  # other values, such as residual sums
    details: bool = False  # units, the moments of channels, and histograms, for a page


def measure(file: ModelFile, look: Look, needs: Pass, wanted: Wanted = Wanted()) -> ModelMoments:
    """Measure every layer of a model as it stands."""
    try:
        return _measure(file, look, needs, wanted)
    except ModelError:
        # A model may work with one batch size only, undeclared: then use the whole first batch as the few samples.
        whole = needs.batches[0]
        if all(np.shape(array) == np.shape(whole[name]) for name, array in needs.few.items()):
            raise
        return _measure(file, look, replace(needs, few=whole), wanted)


def _measure(file: ModelFile, look: Look, needs: Pass, wanted: Wanted) -> ModelMoments:
    """Measure every layer, in the model's own types where the device can."""
    outputs, warnings = _open(file, look, needs)
    problem: Unsupported | None = None
    # On the CPU onnxruntime runs much of half precision in float32 and does not always round between two nodes.
    own: list[Retype] = [] if precision.has_half(look.graph) and needs.device.is_host else [{}]
    for retype in (*own, precision.HALF, precision.ALL):
        try:
            measured = _Measuring(look, needs, retype, wanted).run(outputs)
            return replace(measured, warnings=(*warnings, *measured.warnings))
        except Unsupported as why:
            problem = why
    assert problem is not None
    raise problem


def _open(file: ModelFile, look: Look, needs: Pass) -> tuple[dict[str, Array], list[str]]:
    """Open the file in onnxruntime as it is: its outputs for the few samples, if the CPU can run it, and warnings."""
    is_large = _weight_bytes(look.graph) > VERIFY_BYTES
    model: str | bytes = str(file.path)
    if not is_large and (file.path is None or not _is_utf8(str(file.path))):
        model = b"".join(file.chunks())  # onnxruntime takes no path that is not UTF-8
    try:
        if is_large:
            runtime.open_without_weights(file.proto)
            return {}, []
        return runtime.run_whole(model, needs.few, needs.device.threads), []
    except UnknownOperator as problem:
        # Layers before an operator of the user's own can be measured all the same.
        return {}, [f"{problem}; what stands in front of it was measured, the file as a whole could not be opened"]
    except Unsupported as problem:
        # Of an older operator set the CPU runs no more than what its optimizers leave, such as a network without its
        # Dropout.
        if any(o.domain in STANDARD_DOMAINS and o.version < OLDEST_OPSET for o in file.proto.opset_import):
            if is_large:
                raise
            return runtime.run_whole(model, needs.few, needs.device.threads, optimized=True), []
        # It has no kernels for bfloat16 products and double convolutions, say, which other devices and programs run.
        told = f"{problem}; the layers were measured in types that it runs, the file as a whole could not be opened"
        return {}, [told] if needs.device.is_host else []


class _Measuring:
    """One pass over the data, piece by piece."""

    def __init__(self, look: Look, needs: Pass, retype: Retype, wanted: Wanted) -> None:
        self.graph, self.layers, self.needs, self.retype = look.graph, look.layers.layers, needs, retype
        self.wanted = wanted
        whole = _weight_bytes(look.graph) <= VERIFY_BYTES
        self.plan = stages.in_pieces(look.graph, self.layers, VERIFY_BYTES if whole else VERIFY_BYTES // 2)
        self.runner = Runner(look.graph, self.plan, needs, retype)
        self.few = Runner(look.graph, self.plan, needs.alone([needs.few]), retype)
        rounded = precision.stored_types(look.graph, needs.few, retype) if retype else {}
        self.pieces = Pieces(look.graph, self.layers, self.plan, retype, rounded)
        self.names = {layer.output: k for k, layer in enumerate(self.layers)}
        self.random = any(is_random(node, look.graph.tensors) for node in look.graph.nodes)
        self.trains = any(attribute(node, "training_mode", 0) for node in look.graph.nodes)
        shapes = [*needs.shapes, {name: np.shape(array) for name, array in needs.few.items()}]
        equal_shapes = _equal_shapes(shapes, first_axis=0) and not _makes_shapes(look.graph)
        self.rows = None if equal_shapes else tuple(_rows(batch) for batch in needs.shapes)
        self.equal_samples = _equal_shapes(shapes, first_axis=1) and not _makes_shapes(look.graph)
        self.half = precision.has_half(look.graph)
        self.compared: list[str] = []  # names of the file's outputs to compare with those of the working copy
        self.raw: dict[str, Array] = {}  # output of the model -> value for the few samples, unoptimized
        self.histograms: dict[str, Histogram] = {}  # of layer outputs for the few samples, if asked for

    def run(self, outputs: Mapping[str, Array]) -> ModelMoments:
        moments: dict[str, Moments] = {}
        self.compared = list(outputs)
        try:
            for index, stage in enumerate(self.plan.stages):
                moments |= self._piece(index, stage)
                self._give_back()
                self.runner.forget(index)
                self.few.forget(index)
        finally:
            self.runner.close()
            self.few.close()
        warnings = self._check_outputs(outputs)
        noise = find_noise(self.pieces, {name: m for name, m in moments.items() if name in self.names}, self.needs)
        moments |= {name: replace(moments[name], noise=True, begins=begins) for name, begins in noise.items()}
        return ModelMoments(moments, tuple(warnings), self.histograms)

    def _piece(self, index: int, stage: Stage) -> dict[str, Moments]:
        """Sound a piece, then measure it; in double where float32 is not accurate enough."""
        sums = self._sums(stage)
        wanted = [*(x.output for x in stage.layers), *sums, *(self.compared if len(self.plan.stages) == 1 else ())]
        sounded = self._sounded(stage, wanted)
        # Copies, and of the model's outputs alone: an array of onnxruntime's keeps the memory of its session.
        self.raw |= {name: sounded[name].copy() for name in self.compared if name in sounded}
        for layer in stage.layers if self.wanted.details else ():
            if (histogram := Histogram.of(sounded[layer.output])) is not None:
                self.histograms[layer.output] = histogram
        gauges = {x.output: self._gauge(x, stage, Sounding.of(sounded[x.output])) for x in stage.layers}
        gauges |= {name: self._gauge_of_sum(name, Sounding.of(sounded[name])) for name in sums}
        del sounded  # and its session's memory with it
        self._give_back()
        while True:
            model = self._model(stage, gauges, sums)
            session = Session(model, self.needs.device)
            checked = self._checked(session, gauges)
            # The few samples used up random numbers, or changed running statistics; workers have sessions of their own.
            fresh = self.random or self.trains or self.runner.crew is not None
            opened = None if fresh else session
            del session
            moments = dict(zip(gauges, self.runner.run(index, model, opened), strict=True))
            doubtful = {name: m for name, m in moments.items() if not m.trusted and not gauges[name].careful}
            if not doubtful:
                return {name: replace(m, disputed=checked.get(name)) for name, m in moments.items()}
            gauges |= {name: gauges[name].more_careful(m) for name, m in doubtful.items()}

    def _give_back(self) -> None:
        """Give the memory of a session that has ended back where workers run the next one; here it is used again."""
        if self.runner.crew is not None and len(self.plan.stages) > 1:
            give_back()

    def _sounded(self, stage: Stage, names: Sequence[str]) -> dict[str, Array]:
        """Values of a piece for the few samples; values that later pieces read are put into the frontier."""
        found = self.pieces.run(stage, names, self.few, self._input_type)
        return {name: runtime.to_numpy(value) for name, value in found.items() if value.is_tensor()}

    def _checked(self, session: Session, gauges: Mapping[str, Gauge]) -> dict[str, float]:
        """Disputed layer output -> its unoptimized variance, where the optimized one on the few samples is another."""
        values = {name: self.few.value(0, self.needs.few, name) for name in session.model.feeds}
        _, fetched = session.run(values)
        disputed: dict[str, float] = {}
        for (name, gauge), numbers in zip(gauges.items(), fetched, strict=True):
            meter = gauge.meter()
            meter.add(gauge.sums(numbers))
            here, there = meter.result(), gauge.sounding
            # Where mean² is far above the variance, the variance is known only up to rounding of the mean.
            slack = DISPUTE_ACCURACY * self.needs.accuracy * there.variance + MEAN_ROUNDING * there.mean * there.mean
            agree = abs(here.variance - there.variance) <= slack or not (here.finite or math.isfinite(there.variance))
            if not agree and 0 not in there.shape:
                disputed[name] = there.variance
        return disputed

    def _types(self, stage: Stage) -> dict[str, TypeProto]:
        """Piece input -> a type that all batches and the few samples fit."""
        few = self.few.types(stage)
        return {name: common_type(kind, few[name]) for name, kind in self.runner.types(stage).items()}

    def _input_type(self, name: str) -> TypeProto:
        return common_type(self.runner.input_type(name), self.few.input_type(name))

    def _sums(self, stage: Stage) -> list[str]:
        """The residual sums to be measured in a piece: those that it makes, and in a single piece all of them."""
        made = {name for step in stage.steps for name in step.makes}
        return [name for name in self.wanted.sums if name in made or len(self.plan.stages) == 1]

    def _gauge_of_sum(self, name: str, sounding: Sounding) -> Gauge:
        own = f"{self.pieces.prefix}sum{self.wanted.sums.index(name)}"
        return Gauge(name, own, is_plane=len(sounding.shape) > 3, sounding=sounding, accuracy=self.needs.accuracy)

    def _model(self, stage: Stage, gauges: Mapping[str, Gauge], sums: Sequence[str]) -> StageModel:
        builder = self.pieces.builder(stage, self._types(stage))
        for name in sums:
            builder.pull(name, self._input_type)
            builder.nodes += gauges[name].nodes(self.graph.opset(), TensorProto.UNDEFINED)
        for layer in stage.layers:
            kind = int(helper.np_dtype_to_tensor_dtype(numpy_type(layer.weight.read_as)))
            builder.nodes += gauges[layer.output].nodes(self.graph.opset(), self.retype.get(kind, kind))
        return builder.finish(stage.outputs, list(gauges.values()))

    def _gauge(self, layer: Layer, stage: Stage, sounding: Sounding) -> Gauge:
        units = self._rectified(layer) if self.wanted.units or self.wanted.details else None
        value, divisor = layer.output, 1.0
        # Measure behind a norm y = c·x, so that onnxruntime can fuse layer and norm, as it will in use.
        if layer.norm_factor is not None and not self.wanted.units and not self.retype:
            behind = next((s for s in stage.steps if s.layer is None and self._reads_first(s.node, value)), None)
            if behind is not None:
                value, divisor = behind.makes[0], layer.norm_factor
        return Gauge(
            value=value,
            name=f"{self.pieces.prefix}layer{self.names[layer.output]}",
            is_plane=layer.op in CONVOLUTIONS,
            sounding=sounding,
            divisor=divisor,
            accuracy=self.needs.accuracy,
            channels=channels_of(layer) if layer.output in self.wanted.channels else None,
            equal_groups=layer.output not in self.wanted.channels
            and layer.op in CONVOLUTIONS
            and 0 not in sounding.shape
            and self._equal_planes(sounding.shape),
            rows=self.rows,
            units=units,
            channel_axis=_channel_axis(layer, sounding.shape) if self.wanted.details else None,
        )

    def _equal_planes(self, shape: tuple[int, ...]) -> bool:
        """Whether a value of this shape for the few samples seems to have planes of one size in all batches.

        It has if every sample has the same shape, and the samples lie along the value's first axis and no other. The
        first axis of a convolution over (channels, samples, ...) may happen to be as long as the few samples are many:
        the gauge compares it in every batch (`rows`).
        """
        if self.rows is None:
            return True
        few = {np.shape(array)[:1] for array in self.needs.few.values()}
        return self.equal_samples and few == {shape[:1]} and shape[0] not in shape[2:]

    def _reads_first(self, k: int, name: str) -> bool:
        return list(self.graph.nodes[k].input[:1]) == [name]

    def _rectified(self, layer: Layer) -> Units | None:
        """A layer's units, if a Relu reads its output or is fused into it; else None."""
        readers = (self.graph.nodes[k].op_type for k in self.graph.readers.get(layer.output, ()))
        if "Relu" not in (layer.activation, *readers):
            return None
        rank = len(layer.weight.shape)
        if layer.op in CONVOLUTIONS:
            return Units(layer.groups * layer.form.shape[1], tuple(range(2, rank)))
        if rank != 2 or layer.op == "Einsum":
            return None
        return Units(layer.form.shape[1], () if layer.position == 1 else (-1,))

    def _check_outputs(self, outputs: Mapping[str, Array]) -> list[str]:
        """Compare the working copy's outputs with the file's own. Returns a warning for each output with Inf or NaN."""
        warnings: list[str] = []
        for name, array in outputs.items():
            if array.dtype.kind not in "f" or not array.size:
                continue
            here = self.raw.get(name, array)
            if not (np.isfinite(array).all() and np.isfinite(here).all()):
                warnings.append(f"the output {name!r} has Inf or NaN on the first samples")
            elif not (self.random or self.trains or self.retype) and not _same(array, here, self.half):
                raise ModelError(
                    f"the working copy of the model gives another {name!r} than the file itself; nothing is called ok. "
                    "Please report it, with the model if you can"
                )
        return warnings


def _channel_axis(layer: Layer, shape: tuple[int, ...]) -> int | None:
    """The axis of an output's channels or features; None where it has none, or nothing else."""
    if layer.op in CONVOLUTIONS:
        return 1
    if layer.op == "Einsum" or len(layer.weight.shape) != 2 or len(shape) < 2 or 0 in shape:
        return None
    return len(shape) - (1 if layer.position == 1 else 2)


def weights_at_once(graph: Graph) -> int:
    """The bytes of weights in one session of verification, at the most."""
    return min(_weight_bytes(graph), VERIFY_BYTES)


def _weight_bytes(graph: Graph) -> int:
    return sum(graph.nbytes(name) for name in graph.tensors)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a file name of other bytes
        return False
    return True


def _rows(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The length of the first input's first axis; 1 for a scalar."""
    shape = next(iter(shapes.values()))
    return shape[0] if shape else 1


def _equal_shapes(batches: Sequence[Mapping[str, tuple[int, ...]]], first_axis: int) -> bool:
    """Whether shape[first_axis:] of every input is the same in all batches."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for batch in batches:
        for name, shape in batch.items():
            shapes.setdefault(name, set()).add(shape[first_axis:])
    return all(len(seen) == 1 for seen in shapes.values())


def _makes_shapes(graph: Graph) -> bool:
    """Whether a shape inside the model may depend on the data's values, or on a part of the data's shape."""
    for node in graph.nodes:
        if node.op_type in SHAPE_MAKERS:
            return True
        shapes = node.input if node.op_type == "ConstantOfShape" else node.input[1:]
        if node.op_type in SHAPE_TAKERS and any(n and n not in graph.constant for n in shapes):
            return True
    return False


def _same(one: Array, other: Array, half: bool) -> bool:
    most, least = (SAME_OUTPUT_IN_HALF, SMALLEST_OUTPUT_IN_HALF) if half else (SAME_OUTPUT, SMALLEST_OUTPUT)
    if one.shape != other.shape:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
        return bool(np.abs(a - b).max() <= most * max(float(np.abs(a).max()), least))
