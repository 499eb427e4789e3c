"""The working copy of a model's graph: flat, in execution order, with constants marked and their values at hand.

The user's model is never run or changed through this copy. Constants are references to the model's own tensors, so that
the copy costs no memory for weights; `Graph.array` reads them when asked, as they are then.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from lsuv_cli.errors import ModelError
from lsuv_cli.model import node_checks
from lsuv_cli.model.flatten import (
    STANDARD_DOMAINS,
    Flat,
    Place,
    flatten,
    free_name,
    inner_graphs,
    label,
    outer_reads,
)
from lsuv_cli.model.random_ops import is_random

Array = NDArray[Any]

SHAPE_BYTES = 1024  # a constant up to this size may be a shape, whose values shape inference has to see
OLDEST_OPSET = 7
NEW_OPSET = 18  # for a model that has only operators of other domains
LARGEST_CONSTANT = 1 << 30  # elements of any value in a constant expression; a damaged model can ask for any size


class Unknown(Exception):
    """A constant whose value cannot be worked out; the message says why."""


class Source(Protocol):
    """Whatever holds the tensors: a model's file, or the draft of a new one."""

    def array(self, tensor: TensorProto) -> Array:
        """A tensor's values as they are now."""


@dataclass(frozen=True)
class Graph:
    """Nodes in execution order, the producer and the readers of each value, and the constants."""

    nodes: tuple[NodeProto, ...]  # Constant nodes are not among them
    inputs: Mapping[str, ValueInfoProto]  # graph inputs without an initializer, which the user must feed
    outputs: tuple[str, ...]
    tensors: Mapping[str, TensorProto]  # initializers and the values of Constant nodes
    initializers: Mapping[str, onnx.GraphProto]  # initializer -> the graph that lists it
    sparse: Mapping[str, onnx.SparseTensorProto]
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    ir_version: int
    functions: tuple[onnx.FunctionProto, ...]  # all, if a call of any is left; else none
    places: Mapping[str, Place]  # value -> its node in the model, if it can be edited
    of_functions: frozenset[str]  # stored tensors of functions' bodies that can be written
    untaken: tuple[tuple[str, onnx.GraphProto], ...]  # (name of the If, its untaken branch)
    untaken_reads: frozenset[str]  # outer values that untaken branches read
    chosen: frozenset[str]  # constants that would be others if an If's condition, which is no constant, were another
    producer: Mapping[str, int]
    readers: Mapping[str, tuple[int, ...]]
    constant: frozenset[str]  # values that depend on no input and on no random number
    random: frozenset[str]  # values that depend on random numbers and on no input
    captured: Mapping[int, tuple[str, ...]]  # outer values that the node's inner graphs read
    source: Source

    def opset(self, domain: str = "") -> int:
        """The version of an operator set that the model imports."""
        return next((o.version for o in self.opsets if o.domain == domain), 1)

    def reads(self, index: int) -> Iterator[str]:
        """All values that a node reads, including outer values that its inner graphs read."""
        yield from (name for name in self.nodes[index].input if name)
        yield from self.captured.get(index, ())

    def is_writable(self, name: str) -> bool:
        """Whether a value is a stored tensor that can be given other values where it is stored."""
        held = name in self.tensors and name in self.places  # the value of a Constant node
        return held or name in self.initializers or name in self.of_functions

    def array(self, name: str) -> Array:
        """A stored tensor's values as they are now."""
        return self.source.array(self.tensors[name])

    def nbytes(self, name: str) -> int:
        """The bytes of a stored tensor in float32; 0 for any other value."""
        return math.prod(self.tensors[name].dims) * 4 if name in self.tensors else 0

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a constant."""
        if name in self.tensors:
            return tuple(self.tensors[name].dims)
        return self.evaluate(name).shape

    def evaluate(self, name: str) -> Array:
        """The value of a constant, stored or computed from stored ones; `Unknown` if it cannot be worked out."""
        if name in self.tensors:
            return np.asarray(self.array(name))
        if name not in self.constant:
            raise Unknown("it depends on the model's input")
        indices, stored = self.expression(name)
        arrays = {tensor: np.asarray(self.array(tensor)) for tensor in sorted(stored)}
        nodes = [self.nodes[k] for k in sorted(indices)]
        ops = ", ".join(dict.fromkeys(node.op_type for node in nodes))
        if any(inner_graphs(node) for node in nodes) or self.functions:
            raise Unknown(f"it is computed by {ops}, which is not worked out beforehand")
        tensors = [numpy_helper.from_array(array, tensor) for tensor, array in arrays.items()]
        body = helper.make_graph(nodes, "constants", [], [ValueInfoProto(name=name)], tensors)
        model = helper.make_model(body, opset_imports=self.opsets, ir_version=max(self.ir_version, 4))
        if (size := _largest(model)) > LARGEST_CONSTANT:
            raise Unknown(f"it is computed by way of a tensor of {size:,} elements")
        from onnx.reference import ReferenceEvaluator

        try:
            with np.errstate(all="ignore"):
                (array,) = ReferenceEvaluator(model).run(None, {})
        except MemoryError:
            raise
        except Exception as problem:  # any type: the evaluator lacks an operator, or the model calls one wrongly
            raise Unknown(f"it is computed by {ops}, which cannot be folded") from problem
        return np.asarray(array)

    def known(self, name: str) -> Array | None:
        """The value of a constant; None if it cannot be worked out."""
        try:
            return self.evaluate(name)
        except Unknown:
            return None

    def expression(self, name: str) -> tuple[set[int], set[str]]:
        """The nodes that compute a constant, and the stored tensors that they compute it from."""
        stored: set[str] = set()
        indices: set[int] = set()
        wanted = [name]
        while wanted:
            value = wanted.pop()
            if value in self.tensors:
                stored.add(value)
            elif value in self.sparse:
                raise Unknown("it is computed from a sparse tensor")
            elif (k := self.producer[value]) not in indices:
                indices.add(k)
                wanted.extend(self.reads(k))
        return indices, stored


def build(model: onnx.ModelProto, source: Source, branches: Mapping[str, bool] | None = None) -> Graph:
    """Make the working copy of a model. `branches`: which branch an If takes, by its first output."""
    flat = flatten(model, branches or {})
    if any(o.domain in STANDARD_DOMAINS and o.version < OLDEST_OPSET for o in model.opset_import):
        flat.nodes = [_modern(node, flat.tensors) if is_standard(node) else node for node in flat.nodes]
    version = _version(model)
    inputs = {i.name: i for i in model.graph.input if i.name not in flat.tensors and i.name not in flat.sparse}
    captured_by = {id(node): tuple(sorted(set(captures(node)))) for node in flat.nodes if inner_graphs(node)}
    available = {*inputs, *flat.tensors, *flat.sparse}
    ordered = _in_order(flat.nodes, captured_by, available)
    producer = {name: k for k, node in enumerate(ordered) for name in node.output if name}
    captured = {k: captured_by[id(node)] for k, node in enumerate(ordered) if id(node) in captured_by}
    readers: dict[str, list[int]] = defaultdict(list)
    constant = {*flat.tensors, *flat.sparse}
    random: set[str] = set()
    for k, node in enumerate(ordered):
        node_checks.check(node, version)
        names = [*(n for n in node.input if n), *captured.get(k, ())]
        for name in dict.fromkeys(names):
            readers[name].append(k)
        if all(name in constant or name in random for name in names):
            drawn = is_random(node, flat.tensors) or not random.isdisjoint(names)
            (random if drawn else constant).update(name for name in node.output if name)
    return Graph(
        nodes=tuple(ordered),
        inputs=inputs,
        outputs=tuple(o.name for o in model.graph.output),
        tensors=flat.tensors,
        initializers=flat.initializers,
        sparse=flat.sparse,
        opsets=_opsets(model),
        ir_version=model.ir_version,
        functions=tuple(flat.functions),
        places=flat.places,
        of_functions=frozenset(flat.of_functions),
        untaken=tuple(flat.untaken),
        untaken_reads=frozenset(flat.untaken_reads),
        chosen=_chosen(flat, ordered, constant),
        producer=producer,
        readers={name: tuple(at) for name, at in readers.items()},
        constant=frozenset(constant),
        random=frozenset(random),
        captured=captured,
        source=source,
    )


def _chosen(flat: Flat, ordered: Sequence[NodeProto], constant: set[str]) -> frozenset[str]:
    """The constants that come out of an If whose condition is no constant, and those that are computed from them."""
    chosen = {value for value, condition in flat.conditions.items() if condition not in constant} & constant
    for node in ordered if chosen else ():
        if not chosen.isdisjoint(node.input):
            chosen.update(constant.intersection(node.output))
    return frozenset(chosen)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """An attribute's value, or a default where it is absent."""
    for item in node.attribute:
        if item.name == name:
            value = helper.get_attribute_value(item)
            return value.decode(errors="replace") if isinstance(value, bytes) else value
    return default


def is_standard(node: NodeProto) -> bool:
    """Whether a node's operator is one of ONNX's own operator set."""
    return node.domain in STANDARD_DOMAINS


def _modern(node: NodeProto, tensors: dict[str, TensorProto]) -> NodeProto:
    """A node of an operator set below 7 as opset 7 writes it, where onnxruntime runs the old form; else the node.

    Reshape's shape was an attribute before opset 5, and two attributes without a meaning today are gone.
    """
    copied = NodeProto()
    copied.CopyFrom(node)
    del copied.attribute[:]
    copied.attribute.extend(held for held in node.attribute if held.name not in {"consumed_inputs", "is_test"})
    shape = attribute(node, "shape") if node.op_type == "Reshape" and len(node.input) == 1 else None
    if shape is not None:
        name = free_name(f"{node.output[0]}/shape", tensors)
        tensors[name] = helper.make_tensor(name, TensorProto.INT64, [len(shape)], shape)
        del copied.attribute[:]
        copied.input.append(name)
    return copied if copied != node else node


def captures(node: NodeProto) -> Iterator[str]:
    """The outer values that a node's inner graphs read."""
    for inner in inner_graphs(node):
        yield from outer_reads(inner)


def _opsets(model: onnx.ModelProto) -> tuple[onnx.OperatorSetIdProto, ...]:
    """The operator sets of the working copy: the model's own, with ONNX's operator set raised to at least opset 7.

    Probes need Add and Mul, which opset 7 changed and which onnxruntime runs from opset 7 on only. An older model
    loses nothing: onnxruntime runs an operator of an older opset only if opset 7 left it unchanged, but for what
    `_modern` rewrites.
    """
    others = (o for o in model.opset_import if o.domain not in STANDARD_DOMAINS)
    return (helper.make_opsetid("", max(_version(model), OLDEST_OPSET)), *others)


def _version(model: onnx.ModelProto) -> int:
    """The version of ONNX's operator set in a model."""
    return next((o.version for o in model.opset_import if o.domain in STANDARD_DOMAINS), NEW_OPSET)


def _largest(model: onnx.ModelProto) -> int:
    """The number of elements of the largest value whose shape can be inferred."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except MemoryError:
        raise
    except Exception:  # inference fails on healthy models too, and is only a precaution
        return 0
    shapes = [info.type.tensor_type.shape.dim for info in (*inferred.graph.value_info, *inferred.graph.output)]
    return max((math.prod(max(d.dim_value, 1) for d in dims) for dims in shapes), default=0)


def _in_order(nodes: list[NodeProto], captured_by: Mapping[int, Iterable[str]], available: set[str]) -> list[NodeProto]:
    """The nodes in an order in which each value is made before it is read, as near to the given order as possible."""
    made = {name for node in nodes for name in node.output if name}
    missing: dict[int, int] = {}
    waiting: dict[str, list[int]] = defaultdict(list)
    for k, node in enumerate(nodes):
        needs = {n for n in (*node.input, *captured_by.get(id(node), ())) if n and n not in available}
        for name in needs:
            if name not in made:
                raise ModelError(
                    f"node {label(node)!r} ({node.op_type}) reads {name!r}, "
                    "which is no input, initializer or node output of the model"
                )
            waiting[name].append(k)
        missing[k] = len(needs)
    ready = [k for k, count in missing.items() if count == 0]  # in order, and so a heap
    ordered: list[NodeProto] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        ordered.append(node)
        for name in node.output:
            for k in waiting.pop(name, ()) if name else ():
                missing[k] -= 1
                if missing[k] == 0:
                    heapq.heappush(ready, k)
    if len(ordered) < len(nodes):
        done = {id(node) for node in ordered}
        stuck = next(node for node in nodes if id(node) not in done)
        raise ModelError(f"the graph has a cycle through node {label(stuck)!r} ({stuck.op_type})")
    return ordered
