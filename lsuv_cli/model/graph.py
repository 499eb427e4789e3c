"""The working copy of a model's graph: flat, in order, with constants told from values, and knowing the constants'
numbers.

The user's model is never run or changed through this copy. Constants are references to the model's own tensors, so that
the copy costs no memory for weights; `Graph.array` reads them when asked, as they are then.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from lsuv_cli.errors import ModelError
from lsuv_cli.model.flatten import STANDARD_DOMAINS, Place, flatten, inner_graphs, label
from lsuv_cli.model.random_ops import is_random

Array = NDArray[Any]

OLDEST_OPSET = 7
NEW_OPSET = 18  # where a model has nothing but operators of other domains
LARGEST_CONSTANT = 1 << 30  # elements of a value in an expression of constants; a damaged model can ask for any number


class Unknown(Exception):
    """A constant whose value cannot be worked out; the message says why."""


class Source(Protocol):
    """Whatever holds the tensors: a model's file, or the draft of a new one."""

    def array(self, tensor: TensorProto) -> Array:
        """A tensor's values as they are now."""


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can run, who makes and reads each value, and what the constants are."""

    nodes: tuple[NodeProto, ...]  # Constant nodes are not among them
    inputs: Mapping[str, ValueInfoProto]  # what the user must feed
    outputs: tuple[str, ...]
    tensors: Mapping[str, TensorProto]  # initializers and the values of Constant nodes
    initializers: Mapping[str, onnx.GraphProto]  # those of the tensors that a graph lists as such, and that graph
    sparse: Mapping[str, onnx.SparseTensorProto]
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    ir_version: int
    functions: tuple[onnx.FunctionProto, ...]  # of which calls are left
    places: Mapping[str, Place]  # values whose node can be rewired or folded, and where it stands
    untaken: tuple[tuple[str, onnx.GraphProto], ...]  # branches that the data does not take, by the name of their If
    producer: Mapping[str, int]
    readers: Mapping[str, tuple[int, ...]]
    constant: frozenset[str]  # values that depend on no input and on no random number
    captured: Mapping[int, tuple[str, ...]]  # outer values that the node's inner graphs read
    source: Source

    def opset(self, domain: str = "") -> int:
        """The version of an operator set that the model imports."""
        return next((o.version for o in self.opsets if o.domain == domain), 1)

    def reads(self, index: int) -> Iterator[str]:
        """All values that a node reads, those that its inner graphs capture included."""
        yield from (name for name in self.nodes[index].input if name)
        yield from self.captured.get(index, ())

    def array(self, name: str) -> Array:
        """A stored tensor's values as they are now."""
        return self.source.array(self.tensors[name])

    def nbytes(self, name: str) -> int:
        """What a stored tensor takes while it runs in float32; 0 for anything else."""
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
        except Exception as problem:  # operators that the evaluator lacks, or that the model calls wrongly: anything
            raise Unknown(f"it is computed by {ops}, which cannot be folded") from problem
        return np.asarray(array)

    def known(self, name: str) -> Array | None:
        """The value of a constant; None if it cannot be worked out."""
        try:
            return self.evaluate(name)
        except Unknown:
            return None

    def expression(self, name: str) -> tuple[set[int], set[str]]:
        """The nodes that make a constant, and the stored tensors they begin with."""
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
    inputs = {i.name: i for i in model.graph.input if i.name not in flat.tensors and i.name not in flat.sparse}
    captured_by = {id(node): tuple(sorted(set(captures(node)))) for node in flat.nodes if inner_graphs(node)}
    available = {*inputs, *flat.tensors, *flat.sparse}
    ordered = _in_order(flat.nodes, captured_by, available)
    producer = {name: k for k, node in enumerate(ordered) for name in node.output if name}
    captured = {k: captured_by[id(node)] for k, node in enumerate(ordered) if id(node) in captured_by}
    readers: dict[str, list[int]] = defaultdict(list)
    constant = {*flat.tensors, *flat.sparse}
    for k, node in enumerate(ordered):
        names = [*(n for n in node.input if n), *captured.get(k, ())]
        for name in dict.fromkeys(names):
            readers[name].append(k)
        if all(name in constant for name in names) and not is_random(node, flat.tensors):
            constant.update(name for name in node.output if name)
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
        untaken=tuple(flat.untaken),
        producer=producer,
        readers={name: tuple(at) for name, at in readers.items()},
        constant=frozenset(constant),
        captured=captured,
        source=source,
    )


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


def captures(node: NodeProto) -> Iterator[str]:
    """The outer values that a node's inner graphs (If, Loop, Scan bodies) read."""
    for inner in inner_graphs(node):
        inside = {i.name for i in inner.input} | {t.name for t in inner.initializer}
        inside |= {t.values.name for t in inner.sparse_initializer}
        inside |= {name for n in inner.node for name in n.output}
        for n in inner.node:
            yield from (name for name in (*n.input, *captures(n)) if name and name not in inside)
        yield from (o.name for o in inner.output if o.name not in inside)


def _opsets(model: onnx.ModelProto) -> tuple[onnx.OperatorSetIdProto, ...]:
    """The operator sets of the working copy: the model's own, with a standard one that probes can be made of.

    onnxruntime runs old models with the operators that opset 7 left as they were. Those that it changed, Add and
    Mul among them, it runs from opset 7 on only; so an older model loses nothing by calling itself opset 7.
    """
    version = next((o.version for o in model.opset_import if o.domain in STANDARD_DOMAINS), NEW_OPSET)
    others = (o for o in model.opset_import if o.domain not in STANDARD_DOMAINS)
    return (helper.make_opsetid("", max(version, OLDEST_OPSET)), *others)


def _largest(model: onnx.ModelProto) -> int:
    """The elements of the largest value whose shape can be inferred."""
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception:  # inference fails on healthy models too, and is only a precaution
        return 0
    shapes = [info.type.tensor_type.shape.dim for info in (*inferred.graph.value_info, *inferred.graph.output)]
    return max((math.prod(max(d.dim_value, 1) for d in dims) for dims in shapes), default=0)


def _in_order(nodes: list[NodeProto], captured_by: Mapping[int, Iterable[str]], available: set[str]) -> list[NodeProto]:
    """The nodes in an order in which each value is made before it is read; the given order where it will do."""
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
    ready = [k for k, count in missing.items() if count == 0]
    heapq.heapify(ready)
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
