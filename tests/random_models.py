"""Random models for the differential tester (differential.py): layers of every form among operators of every kind.

A model grows node by node. Each new node is run at once, alone, by unoptimized onnxruntime on every batch; one that
onnxruntime does not take, or whose values are not finite, is dropped. So whatever was drawn, the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

Array = np.ndarray
OLDEST, NEWEST = 7, min(26, onnx.defs.onnx_opset_version())
MOST_ELEMENTS = 60_000
LARGEST = 1e12


class Rejected(Exception):
    """A node that cannot be added."""


@dataclass(frozen=True)
class Value:
    """A value of the model and what it is on each batch; a constant is the same on all."""

    name: str
    arrays: tuple[Array, ...]
    constant: bool = False

    @property
    def array(self) -> Array:
        return self.arrays[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def rank(self) -> int:
        return self.array.ndim

    @property
    def is_float(self) -> bool:
        return self.array.dtype in (np.float32, np.float64, np.float16)


@dataclass
class Draft:
    """The parts of a flat model, before it is disguised."""

    opset: int
    batches: list[dict[str, Array]]
    nodes: list[NodeProto] = field(default_factory=list)
    tensors: dict[str, TensorProto] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    features: set[str] = field(default_factory=set)


def session(model: onnx.ModelProto, reuse: bool = False) -> ort.InferenceSession:
    """A session of onnxruntime that runs what the model says: no optimization, one thread.

    Nor are buffers used again, if not asked for: with batches of several sizes, onnxruntime 1.31 fails at Min(x, x) of
    float16.
    """
    chosen = ort.SessionOptions()
    chosen.enable_mem_reuse = reuse
    chosen.log_severity_level = 4
    chosen.intra_op_num_threads = 1
    chosen.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), chosen, providers=["CPUExecutionProvider"])


def opsets(version: int) -> list[onnx.OperatorSetIdProto]:
    return [helper.make_opsetid("", version), helper.make_opsetid("com.microsoft", 1)]


class Builder:
    """Draws one model."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        newest = NEWEST if self.chance(0.3) else 18
        oldest = OLDEST if self.chance(0.4) else 13
        self.opset = int(rng.integers(oldest, newest + 1))
        self.dtype = self.pick([np.float32] * 9 + [np.float16, np.float64])
        self.most = MOST_ELEMENTS
        self.draft = Draft(self.opset, self._batches())
        self.live = [Value(k, tuple(b[k] for b in self.draft.batches)) for k in self.draft.batches[0]]
        for value in self.live:
            self.draft.values[value.name] = value
        self.weights: list[Value] = []
        self.layers: list[str] = []
        self.serial = 0

    # Drawing.

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def normal(self, *shape: int, spread: float = 1.0, mean: float = 0.0) -> Array:
        return (mean + spread * self.rng.standard_normal(shape)).astype(self.dtype)

    def value(self, wanted: Callable[[Value], bool] = lambda v: v.rank > 0, recent: float = 0.7) -> Value:
        """One of the floating-point values so far that will do, the latest ones preferred."""
        fitting = [v for v in self.live if v.is_float and v.array.dtype == self.dtype and wanted(v)]
        if not fitting:
            raise Rejected
        return self.pick(fitting[-3:] if self.chance(recent) else fitting)

    def _batches(self) -> list[dict[str, Array]]:
        """The data: one to three inputs, one to four batches, which may differ in size and in image size."""
        if self.chance(0.03):
            return self._planes()
        count, rows = self.number(1, 4), self.number(2, 8)
        shapes: dict[str, list[int]] = {"x": self._sample(self.number(0, 3))}
        if self.chance(0.2):
            shapes["x2"] = shapes["x"] if self.chance(0.5) else self._sample(self.number(0, 2))
        spread, mean = self.pick([1.0, 1.0, 1.0, 0.1, 30.0]), self.pick([0.0, 0.0, 0.0, 0.5, 30.0])
        batches = []
        sizes = self.chance(0.15) and len(shapes["x"]) > 2
        for k in range(count):
            rows_here = self.number(1, rows) if k + 1 == count or self.chance(0.2) else rows
            batch: dict[str, Array] = {}
            for name, shape in shapes.items():
                sample = [shape[0], *(d + 2 * k for d in shape[1:])] if sizes and name == "x" else shape
                batch[name] = self.normal(rows_here, *sample, spread=spread, mean=mean)
            if self._indices:
                batch["ids"] = self.rng.integers(0, 9, (rows_here, 5))
            batches.append(batch)
        return batches

    def _planes(self) -> list[dict[str, Array]]:
        """Large images of a large mean, or of one value each: sums over them lose digits."""
        self.most = 20 * MOST_ELEMENTS
        side, flat = self.pick([128, 256]), self.chance(0.5)
        images = self.normal(2, 1, 1, 1) if flat else self.normal(2, 1, side, side)
        mean = self.pick([0.0, 30.0, 100.0])
        return [{"x": np.ascontiguousarray(np.broadcast_to(images + mean, (2, 1, side, side)).astype(self.dtype))}]

    @property
    def _indices(self) -> bool:
        if not hasattr(self, "_has_indices"):
            self._has_indices = self.chance(0.12)
        return self._has_indices

    def _sample(self, spatial: int) -> list[int]:
        side = {0: 1, 1: 12, 2: 9, 3: 6}[spatial]
        channels = self.pick([1, 2, 3, 4, 6, 8]) if spatial else self.pick([3, 6, 8, 12, 16])
        return [channels, *(self.number(max(side - 4, 1), side) for _ in range(spatial))]

    # Growing.

    def fresh(self) -> str:
        self.serial += 1
        return f"v{self.serial}"

    def store(self, array: Array) -> Value:
        """A constant: an initializer, or a Constant node in one of its forms."""
        name, array = self.fresh(), np.asarray(array)
        value = Value(name, (array,), constant=True)
        tensor = numpy_helper.from_array(array, name)
        if self.chance(0.2) and (self.opset >= 9 or array.dtype == np.float32):
            attributes: dict[str, Any] = {"value": tensor}
            if self.opset >= 12 and array.ndim < 2 and array.dtype in (np.float32, np.int64) and self.chance(0.7):
                kind = "float" if array.dtype == np.float32 else "int"
                attributes = {f"value_{kind}s": array.tolist()} if array.ndim else {f"value_{kind}": array.item()}
            self.draft.nodes.append(helper.make_node("Constant", [], [name], **attributes))
        else:
            self.draft.tensors[name] = tensor
        self.draft.values[name] = value
        return value

    def op(self, op: str, *inputs: Value | None, outputs: int = 1, domain: str = "", **attributes: Any) -> Value:
        return self.ops(op, *inputs, outputs=outputs, domain=domain, **attributes)[0]

    def ops(
        self, op: str, *inputs: Value | None, outputs: int = 1, domain: str = "", **attributes: Any
    ) -> tuple[Value, ...]:
        """Add a node, if onnxruntime runs it and its values are finite."""
        names = [self.fresh() for _ in range(outputs)]
        listed = [v.name if v else "" for v in inputs]
        node = helper.make_node(op, listed, names, domain=domain, **attributes)
        constant = all(v.constant for v in inputs if v)
        found = self._run(node, [v for v in inputs if v])
        for array in (a for arrays in found for a in arrays):
            if array.size > self.most or (array.dtype.kind == "f" and not _finite(array)):
                raise Rejected
        self.draft.nodes.append(node)
        values = tuple(Value(n, tuple(a), constant) for n, a in zip(names, zip(*found, strict=True), strict=True))
        for value in values:
            self.draft.values[value.name] = value
            if not constant:
                self.live.append(value)
        return values

    def _run(self, node: NodeProto, inputs: list[Value]) -> list[list[Array]]:
        """What a node puts out on each batch."""
        varying = list({v.name: v for v in inputs if not v.constant}.values())
        held = {v.name: numpy_helper.from_array(v.array, v.name) for v in inputs if v.constant}
        infos = [
            helper.make_tensor_value_info(v.name, helper.np_dtype_to_tensor_dtype(v.array.dtype), None) for v in varying
        ]
        outputs = [onnx.ValueInfoProto(name=n) for n in node.output]
        graph = helper.make_graph([node], "g", infos, outputs, list(held.values()))
        model = helper.make_model(graph, opset_imports=opsets(self.opset), ir_version=8)
        times = len(self.draft.batches) if varying else 1
        try:
            one = session(model)
            return [one.run(None, {v.name: v.arrays[k] for v in varying}) for k in range(times)]
        except Exception as problem:
            raise Rejected from problem

    def seed(self, kind: type) -> dict[str, Any]:
        """A seed for two in three nodes that draw numbers: they draw the same numbers in every session."""
        return {"seed": kind(self.serial)} if self.serial % 3 else {}

    def numbers(self, *numbers: int) -> Value:
        return self.store(np.array(numbers, np.int64))

    def scalar(self, number: float) -> Value:
        return self.store(np.array(number, self.dtype))

    def with_axes(self, op: str, x: Value, axes: list[int], since: int, **attributes: Any) -> Value:
        """An operator whose axes became an input with opset `since`."""
        if self.opset >= since:
            return self.op(op, x, self.numbers(*axes), **attributes)
        return self.op(op, x, axes=axes, **attributes)

    def reshape(self, x: Value, *shape: int) -> Value:
        return self.op("Reshape", x, self.numbers(*shape))

    def slice(self, x: Value, axis: int, start: int, end: int) -> Value:
        if self.opset >= 10:
            return self.op("Slice", x, self.numbers(start), self.numbers(end), self.numbers(axis))
        return self.op("Slice", x, starts=[start], ends=[end], axes=[axis])

    def split(self, x: Value, axis: int, parts: int) -> tuple[Value, ...]:
        sizes = [x.shape[axis] // parts] * (parts - 1)
        sizes.append(x.shape[axis] - sum(sizes))
        if self.opset >= 13:
            return self.ops("Split", x, self.numbers(*sizes), outputs=parts, axis=axis)
        return self.ops("Split", x, outputs=parts, axis=axis, split=sizes)

    # Weights.

    def weight(self, *shape: int) -> Value:
        """A constant of the given shape, stored, viewed, computed or shared."""
        same = [w for w in self.weights if w.shape == shape]
        if same and self.chance(0.25):
            self.draft.features.add("tied")
            return self.pick(same)
        turned = [w for w in self.weights if w.shape == shape[::-1] and len(shape) == 2]
        if turned and self.chance(0.15):
            self.draft.features.add("tied")
            return self.op("Transpose", self.pick(turned), perm=[1, 0])
        often, rare = ["cast", "computed", "sliced"], ["split", "read", "embedding", "filled", "dropped"]
        value = self._weight(self.pick(["plain"] * 24 + ["views"] * 10 + 2 * often + rare), shape)
        self.weights.append(value)
        return value

    def _weight(self, form: str, shape: tuple[int, ...]) -> Value:
        spread = 10.0 ** self.number(-2, 1)
        plain = self.normal(*shape, spread=spread)
        if form == "views":
            return self._viewed(plain)
        if form == "cast":
            kind = self.pick([ml_dtypes.bfloat16, np.float16, np.float64])
            return self.op("Cast", self.store(plain.astype(kind)), to=helper.np_dtype_to_tensor_dtype(plain.dtype))
        if form == "computed":
            other = self.store(np.array(self.pick([0.5, -1.0, 3.0]), self.dtype))
            return self.op(self.pick(["Mul", "Div", "Add"]), self.store(plain), other)
        if form == "split":
            self.draft.features.add("split weight")
            axis = self.number(0, len(shape) - 1)
            whole = self.store(np.concatenate([plain, self.normal(*shape, spread=spread)], axis))
            first, second = self.split(whole, axis, 2)
            if self.chance(0.3):
                self.draft.outputs.append(second.name)
            else:
                self.weights.append(second)
            return first
        if form == "sliced":
            whole = self.store(np.concatenate([plain, plain]))
            if self.chance(0.5):
                return self.slice(whole, 0, 0, shape[0])
            return self.op("Gather", whole, self.numbers(*range(shape[0])), axis=0)
        value = self.store(plain)
        if form == "read":
            self.draft.features.add("weight read by Shape")
            self.draft.outputs.append(self.op(self.pick(["Shape", "Size"]), value).name)
        elif form == "embedding" and "ids" in self.draft.values and len(shape) > 1 and shape[0] > 8:
            self.op("Gather", value, self.draft.values["ids"])
        elif form == "dropped" and self.opset >= 12:
            self.draft.features.add("dropout")
            return self.op("Dropout", value, self.scalar(0.3), self.store(np.array(True)), **self.seed(int))
        elif form == "filled":
            filled = numpy_helper.from_array(np.array([0.1], self.dtype))
            if self.opset >= 9:
                return self.op("ConstantOfShape", self.numbers(*shape), value=filled)
        return value

    def _viewed(self, plain: Array) -> Value:
        """A constant behind one to three nodes that only rename or repeat elements."""
        shape = plain.shape
        form = self.pick(["Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten", "two", "repeated"])
        if form == "Transpose":
            order = [int(k) for k in self.rng.permutation(len(shape))]
            stored = self.store(np.ascontiguousarray(plain.transpose(np.argsort(order))))
            return self.op("Transpose", stored, perm=order)
        if form in {"Reshape", "two"}:
            value = self.store(plain.reshape(-1))
            value = self.op("Identity", value) if form == "two" else value
            return self.reshape(value, *shape[:-1], self.pick([-1, shape[-1]]))
        if form == "Squeeze":
            return self.with_axes("Squeeze", self.store(plain[None]), [0], 13)
        if form == "Unsqueeze" and 1 in shape:
            axis = shape.index(1)
            return self.with_axes("Unsqueeze", self.store(plain.squeeze(axis)), [axis], 13)
        if form == "repeated":
            axis = self.number(0, len(shape) - 1)
            if self.opset >= 8 and self.chance(0.5):
                return self.op("Expand", self.store(plain.take([0], axis)), self.numbers(*shape))
            if self.opset >= 6 and shape[axis] % 2 == 0:
                times = [2 if k == axis else 1 for k in range(len(shape))]
                return self.op("Tile", self.store(np.split(plain, 2, axis)[0]), self.numbers(*times))
        if form == "Flatten" and len(shape) == 2:
            return self.op("Flatten", self.store(plain.reshape(shape[0], 1, -1)))
        return self.op("Identity", self.store(plain))

    def add_bias(self, y: Value, *shape: int) -> Value:
        """A bias that an Add puts behind a layer: of its channels, one number, of higher rank, or not constant."""
        kind = self.pick(["channels"] * 5 + ["one", "ranked", "full", "varying"])
        if kind == "varying":
            return self.op("Add", y, self.value(lambda v: v.shape == y.shape))
        shape = {"one": (1,), "ranked": (1,) * max(y.rank - len(shape), 0) + shape, "full": y.shape}.get(kind, shape)
        bias = self.store(self.normal(*shape, spread=self.pick([0.1, 0.5])))
        return self.op("Add", *((y, bias) if self.chance(0.5) else (bias, y)))


def _finite(array: Array) -> bool:
    return bool(np.isfinite(array).all() and (not array.size or np.abs(array.astype(np.float64)).max() < LARGEST))
