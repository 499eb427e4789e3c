# mypy: disable-error-code="misc"
"""A written model seen by someone else than lsuv: flat, its layers found, their outputs measured in float64.

Shares no code with lsuv_cli: functions and branches are put in place here, values run in unoptimized onnxruntime.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from disguises import LAYER_OPS, inner_graphs, reads, renamed
from random_models import Array, session

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16}
VIEWS = {"Identity", "Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Dropout"}
Batches = Sequence[Mapping[str, Array]]


@dataclass(frozen=True)
class Layer:
    """A node that multiplies with a constant, and the values that may be meant by its output."""

    node: NodeProto
    weight: str  # the stored tensor behind it
    measured: tuple[str, ...]  # one, or two where an Add behind it may or may not count as its bias
    float_type: int


def run(
    model: onnx.ModelProto, batches: Batches, names: Sequence[str] | None = None, *, reuse: bool = False
) -> list[list[Array]]:
    """The values of some names, or of all outputs, on each batch. `reuse`: onnxruntime may use buffers again."""
    wanted = [o.name for o in model.graph.output] if names is None else list(names)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    known = {o.name for o in copy.graph.output}
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(wanted) if name not in known)
    one = session(copy, reuse)
    return [one.run(wanted, dict(batch)) for batch in batches]


def flatten(model: onnx.ModelProto, batches: Batches) -> onnx.ModelProto:
    """The model without functions and without the branches that all data takes."""
    flat = onnx.ModelProto()
    flat.CopyFrom(model)
    del flat.functions[:]
    functions = {(f.domain, f.name): f for f in model.functions}
    _put(flat, list(_inlined(model.graph.node, functions, "")))
    while conditional := next((n for n in flat.graph.node if n.op_type == "If" and not n.domain), None):
        taken = {bool(values[0].reshape(-1)[0]) for values in _conditions(flat, batches, conditional.input[0])}
        if len(taken) != 1:
            raise ValueError("data takes both branches")
        chosen = "then_branch" if taken == {True} else "else_branch"
        branch = next(a.g for a in conditional.attribute if a.name == chosen)
        made = {name for node in branch.node for name in node.output} | {t.name for t in branch.initializer}
        new = {o.name: name for o, name in zip(branch.output, conditional.output, strict=True) if o.name in made}
        body = [renamed(node, new) for node in branch.node]
        body += [
            helper.make_node("Identity", [o.name], [name])
            for o, name in zip(branch.output, conditional.output, strict=True)
            if o.name not in new
        ]
        for tensor in branch.initializer:
            flat.graph.initializer.add().CopyFrom(tensor)
            flat.graph.initializer[-1].name = new.get(tensor.name, tensor.name)
        at = list(flat.graph.node).index(conditional)
        _put(flat, [*flat.graph.node[:at], *body, *flat.graph.node[at + 1 :]])
    return flat


def _conditions(flat: onnx.ModelProto, batches: Batches, name: str) -> list[list[Array]]:
    for tensor in flat.graph.initializer:
        if tensor.name == name:
            return [[numpy_helper.to_array(tensor)]]
    return run(flat, batches, [name])


def _put(model: onnx.ModelProto, nodes: Sequence[NodeProto]) -> None:
    held = list(nodes)
    del model.graph.node[:]
    model.graph.node.extend(held)


def _inlined(
    nodes: Sequence[NodeProto], functions: Mapping[tuple[str, str], onnx.FunctionProto], prefix: str
) -> Iterator[NodeProto]:
    """The nodes with calls of functions replaced by their bodies, each value of which gets a name of its own."""
    for k, node in enumerate(nodes):
        function = functions.get((node.domain, node.op_type))
        if function is None:
            copy = NodeProto()
            copy.CopyFrom(node)
            for inner in inner_graphs(copy):
                body = list(_inlined(inner.node, functions, f"{prefix}{k}b:"))
                del inner.node[:]
                inner.node.extend(body)
            yield copy
            continue
        here = f"{prefix}{k}f:"
        new = {name: f"{here}{name}" for name in _made(function.node)}
        new |= dict(zip(function.output, node.output, strict=False)) | dict(
            zip(function.input, node.input, strict=False)
        )
        yield from _inlined([renamed(n, new) for n in function.node], functions, here)


def _made(nodes: Sequence[NodeProto]) -> Iterator[str]:
    for node in nodes:
        yield from (name for name in node.output if name)
        for inner in inner_graphs(node):
            yield from _made(inner.node)


def constants(flat: onnx.ModelProto) -> set[str]:
    """The values that depend on no input."""
    known = {t.name for t in flat.graph.initializer}
    for node in flat.graph.node:
        if not node.op_type.startswith("Random") and all(name in known for name in reads(node)):
            known.update(node.output)
    return known


def only_for_constants(model: onnx.ModelProto, fixed: set[str]) -> set[str]:
    """The stored tensors that are read, but by nothing except nodes that make constants."""
    inside = {name for node in model.graph.node if fixed.issuperset(node.output) for name in reads(node)}
    outside = {name for node in model.graph.node if not fixed.issuperset(node.output) for name in reads(node)}
    return inside - outside - {o.name for o in model.graph.output}


def stored_type(flat: onnx.ModelProto, name: str) -> int:
    for tensor in stored(flat):
        if tensor.name == name:
            return int(tensor.data_type)
    return TensorProto.FLOAT


def stored(flat: onnx.ModelProto) -> Iterator[TensorProto]:
    """The tensors of a model, under the names by which nodes read them: initializers, and values of Constant nodes."""
    yield from flat.graph.initializer
    for node in flat.graph.node:
        for held in node.attribute if node.op_type == "Constant" else ():
            if held.HasField("t"):
                held.t.name = node.output[0]
                yield held.t


def layers(flat: onnx.ModelProto) -> list[Layer]:
    """Every product or convolution of a varying value with a constant one."""
    fixed = constants(flat)
    makers = {name: node for node in flat.graph.node for name in node.output}
    outputs = {o.name for o in flat.graph.output}
    readers = Counter(name for node in flat.graph.node for name in reads(node))
    found = []
    for node in flat.graph.node:
        if node.op_type not in LAYER_OPS or len(node.input) < 2:
            continue
        weights = [name for name in node.input[:2] if name in fixed]
        if len(weights) != 1 or ("Conv" in node.op_type and node.input[1] not in fixed):
            continue
        base = weights[0]
        while base in makers and makers[base].op_type in VIEWS:
            base = makers[base].input[0]
        y = node.output[0]
        measured = [y]
        own = len(node.input) > 2 and node.input[2] and node.op_type != "FusedMatMul"
        if not own and readers[y] == 1 and y not in outputs and not any(a.name == "activation" for a in node.attribute):
            (reader,) = [n for n in flat.graph.node if y in reads(n)]
            if reader.op_type == "Add" and any(name in fixed for name in reader.input):
                measured.append(reader.output[0])
        found.append(Layer(node, base, tuple(measured), stored_type(flat, base)))
    return found


def is_random(flat: onnx.ModelProto) -> bool:
    """Whether some node draws numbers: Random..., or Dropout with a training mode that is true."""
    true = {
        t.name for t in flat.graph.initializer if t.data_type == TensorProto.BOOL and numpy_helper.to_array(t).any()
    }
    true |= {
        n.output[0]
        for n in flat.graph.node
        if n.op_type == "Constant" and any(a.t.data_type == TensorProto.BOOL for a in n.attribute)
    }
    return any(
        n.op_type.startswith("Random") or (n.op_type == "Dropout" and len(n.input) > 2 and n.input[2] in true)
        for n in flat.graph.node
    )


def measure(flat: onnx.ModelProto, batches: Batches, names: Sequence[str], times: int = 1) -> dict[str, list[float]]:
    """The variance of each value over all batches, in float64; several times where the model draws numbers."""
    found: dict[str, list[float]] = {name: [] for name in names}
    seeds = np.random.default_rng(0).integers(1, 2**31, times)  # neighbouring seeds give similar numbers
    for seed in seeds:
        ort.set_seed(int(seed))
        runs = run(flat, batches, names)
        for k, name in enumerate(names):
            found[name].append(variance([values[k] for values in runs]))
    return found


def pooled(flat: onnx.ModelProto, batches: Batches, names: Sequence[str]) -> float:
    """The variance of several values taken together, each around its own mean."""
    runs = run(flat, batches, names)
    values = [_joined([[one[k]] for one in runs]) for k in range(len(names))]
    return float(sum(v.var() * v.size for v in values) / max(sum(v.size for v in values), 1))


def by_channel(flat: onnx.ModelProto, batches: Batches, layer: Layer, name: str) -> tuple[Array, Array]:
    """The mean and the variance of each channel of a layer's output, over all batches."""
    stored = {t.name for t in flat.graph.initializer}
    makers = {output: node for node in flat.graph.node for output in node.output}

    def is_constant(value: str) -> bool:
        node = makers.get(value)
        return value in stored or (node is not None and all(is_constant(x) for x in node.input if x))

    axis = 1 if "Conv" in layer.node.op_type else -2 if is_constant(layer.node.input[0]) else -1
    arrays = [np.asarray(values[0], np.float64) for values in run(flat, batches, [name])]
    table = np.concatenate([np.moveaxis(a, axis, -1).reshape(-1, a.shape[axis]) for a in arrays])
    return table.mean(axis=0), table.var(axis=0)


def without(flat: onnx.ModelProto, weight: str) -> onnx.ModelProto:
    """The model with zeros for a weight."""
    copy = onnx.ModelProto()
    copy.CopyFrom(flat)
    for tensor in stored(copy):
        if tensor.name == weight:
            tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), tensor.name))
    return copy


def is_flat(flat: onnx.ModelProto, batches: Batches, name: str) -> bool:
    """Whether a value varies by less than float32 can tell, relative to its size; lsuv runs double as float32."""
    whole = _joined(run(flat, batches, [name]))
    return bool(whole.var() <= 1e-13 * np.mean(whole**2))


def leaves_range(flat: onnx.ModelProto, batches: Batches, name: str) -> bool:
    """Whether a value that some value is computed from is not finite where it is stored.

    onnxruntime's CPU runs neighbours of float16 in float32, and stores only what others read; here all are read.
    """
    part = _for(flat, [name])
    names = [made for node in part.graph.node for made in node.output if made]
    read = {i.name for i in part.graph.input}
    found = run(part, [{k: v for k, v in batch.items() if k in read} for batch in batches], names)
    return any(np.asarray(v).dtype.kind == "f" and not np.isfinite(v).all() for values in found for v in values)


def variance(arrays: Sequence[Any]) -> float:
    whole = np.concatenate([np.asarray(a, np.float64).reshape(-1) for a in arrays])
    with np.errstate(all="ignore"):
        return float(whole.var()) if whole.size else math.nan


def by_reference(
    flat: onnx.ModelProto, batches: Batches, names: Sequence[str], doubled: bool = True
) -> list[list[Array]]:
    """Values by onnx's reference evaluator, everything that is float32 or float16 made double first, or nothing."""
    double = _for(flat, names)
    if not doubled:
        _put(double, [part for node in double.graph.node for part in _unfused(node)])
        evaluator = ReferenceEvaluator(double)
        with np.errstate(all="ignore"):
            return [evaluator.run(None, dict(batch)) for batch in batches]
    floats = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
    for tensor in double.graph.initializer:
        if tensor.data_type in floats:
            tensor.CopyFrom(_doubled(tensor))
    _put(double, [part for node in double.graph.node for part in _unfused(node)])
    for node in double.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in floats:
                attribute.i = TensorProto.DOUBLE
            elif attribute.HasField("t") and attribute.t.data_type in floats:
                attribute.t.CopyFrom(_doubled(attribute.t))
            elif node.op_type == "Constant" and attribute.name in {"value_float", "value_floats"}:
                number = np.array(attribute.f if attribute.name == "value_float" else list(attribute.floats))
                node.attribute[0].CopyFrom(helper.make_attribute("value", numpy_helper.from_array(number)))
    for item in double.graph.input:
        if item.type.tensor_type.elem_type in floats:
            item.type.tensor_type.elem_type = TensorProto.DOUBLE
    evaluator = ReferenceEvaluator(double)
    read = {i.name for i in double.graph.input}
    batches = [{k: v for k, v in batch.items() if k in read} for batch in batches]
    feeds = [{k: v.astype(np.float64) if v.dtype.kind == "f" else v for k, v in batch.items()} for batch in batches]
    with np.errstate(all="ignore"):
        return [evaluator.run(None, feed) for feed in feeds]


def _for(flat: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """The part of a model that computes some values, with these as its outputs."""
    needed, nodes = set(names), []
    for node in reversed(flat.graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(reads(node))
            nodes.append(node)
    part = onnx.ModelProto()
    part.CopyFrom(flat)
    _put(part, nodes[::-1])
    listed = {t.name for t in part.graph.initializer}  # before IR version 4, among the inputs too
    inputs = [i for i in part.graph.input if i.name in needed or i.name in listed]
    del part.graph.input[:]
    part.graph.input.extend(inputs)
    del part.graph.output[:]
    part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return part


def _unfused(node: NodeProto) -> list[NodeProto]:
    """An operator of onnxruntime's own as standard ones, which the reference evaluator knows."""
    if node.domain != "com.microsoft":
        return [node]
    held = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    inputs, inner = list(node.input), f"{node.output[0]}:inner"
    if node.op_type == "FusedMatMul":
        front = []
        for k, name in enumerate(("transA", "transB")):
            if held.get(name):
                perm = f"{node.output[0]}:{k}"
                front.append(helper.make_node("Einsum", [inputs[k]], [perm], equation="...ij->...ji"))
                inputs[k] = perm
        alpha = helper.make_node("Constant", [], [f"{inner}:a"], value_float=float(held.get("alpha", 1.0)))
        product = helper.make_node("MatMul", inputs, [inner])
        return [*front, alpha, product, helper.make_node("Mul", [inner, f"{inner}:a"], list(node.output))]
    activation = held.pop("activation", b"").decode()
    held = {k: v for k, v in held.items() if not k.startswith("activation")}
    plain = helper.make_node(node.op_type.removeprefix("Fused"), inputs, [inner], **held)
    return [plain, helper.make_node(activation or "Identity", [inner], list(node.output))]


def _doubled(tensor: TensorProto) -> TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)


def noise(flat: onnx.ModelProto, batches: Batches, name: str, exact: bool = True, weight: str = "") -> float:
    """Root mean square of the errors that rounding makes in a value, relative to its standard deviation.

    They are the difference from exact arithmetic, or, if that is not wanted, the model draws numbers, or the reference
    evaluator does not run it, what small errors in inputs and tensors make of it; numbers drawn are the same. With
    `weight`, the value is what that weight contributes to it.
    """
    flat = _for(flat, [name])
    read = {i.name for i in flat.graph.input}
    batches = [{k: v for k, v in batch.items() if k in read} for batch in batches]
    rounded = _contribution(flat, batches, name, weight)
    if exact and not is_random(flat) and not weight:
        with contextlib.suppress(Exception):
            return _difference(rounded, _joined(by_reference(flat, batches, [name])))
    found = []
    scales = {name for node in flat.graph.node if node.op_type in {"Resize", "Upsample"} for name in node.input[1:]}
    # Noise of a few elements may happen to stay as it was, and where a large constant is added to small numbers, an
    # error of 1e-6 in these is rounded away.
    for seed, size in enumerate((1e-6, 1e-6, 1e-5)):
        rng = np.random.default_rng(seed)
        moved = [{k: _moved(v, rng, size) for k, v in batch.items()} for batch in batches]
        copy = onnx.ModelProto()
        copy.CopyFrom(flat)
        for tensor in stored(copy):
            if tensor.data_type in FLOATS and tensor.dims and tensor.name not in scales:
                array = _moved(numpy_helper.to_array(tensor), rng, size)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        found.append(_difference(rounded, _contribution(copy, moved, name, weight)))
    return max(found)


def _contribution(flat: onnx.ModelProto, batches: Batches, name: str, weight: str) -> Array:
    """A value on all batches, or the part of it that goes when a weight is zero."""
    ort.set_seed(1000)
    whole = _joined(run(flat, batches, [name]))
    if not weight:
        return whole
    ort.set_seed(1000)
    return whole - _joined(run(without(flat, weight), batches, [name]))


def _difference(one: Array, other: Array) -> float:
    """Root mean square of a difference, relative to the other's standard deviation."""
    error, spread = float(np.sqrt(np.mean((one - other) ** 2))), float(other.std())
    return error / spread if spread else math.inf


def _moved(array: Array, rng: np.random.Generator, size: float) -> Array:
    """An array with a relative error in each number, of several units in the last place at least."""
    if array.dtype.kind != "f":
        return array
    size = 4e-3 if array.dtype == np.float16 else size
    return (array * (1 + size * rng.standard_normal(array.shape))).astype(array.dtype)


def _joined(runs: Sequence[Sequence[Any]]) -> Array:
    return np.concatenate([np.asarray(values[0], np.float64).reshape(-1) for values in runs])
