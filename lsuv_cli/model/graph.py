"""The working copy of a model's graph: in order, without functions, with constants told from values.

The user's model is never run or changed through this copy. Constants are references to the model's own
tensors, so that the copy costs no memory for weights.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import AttributeProto, NodeProto, TensorProto, ValueInfoProto, helper

from lsuv_cli.errors import ModelError

# Never constant, whatever their inputs are.
RANDOM_OPS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)

OLDEST_OPSET = 7
NEW_OPSET = 18  # where a model has nothing but operators of other domains


@dataclass(frozen=True)
class Graph:
    """Nodes in an order in which they can run, and who makes and reads each value."""

    nodes: tuple[NodeProto, ...]  # Constant nodes are not among them
    inputs: Mapping[str, ValueInfoProto]  # what the user must feed
    outputs: tuple[str, ...]
    tensors: Mapping[str, TensorProto]  # initializers and the values of Constant nodes
    initializers: frozenset[str]  # those of the tensors that the user's main graph lists as such
    sparse: Mapping[str, onnx.SparseTensorProto]
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    ir_version: int
    own: frozenset[str]  # the values that nodes of the user's own main graph make: those can be rewired
    producer: Mapping[str, int]
    readers: Mapping[str, tuple[int, ...]]
    constant: frozenset[str]  # values that depend on no input
    captured: Mapping[int, tuple[str, ...]]  # outer values that the node's inner graphs read

    def opset(self, domain: str = "") -> int:
        """The version of an operator set that the model imports."""
        return next((o.version for o in self.opsets if o.domain == domain), 1)

    def reads(self, index: int) -> Iterator[str]:
        """All values that a node reads, those that its inner graphs capture included."""
        yield from (name for name in self.nodes[index].input if name)
        yield from self.captured.get(index, ())


def build(model: onnx.ModelProto) -> Graph:
    """Make the working copy of a model."""
    functions = {(f.domain, f.name) for f in model.functions}
    # What a call of a function puts out is made by a node of the function's body.
    own = frozenset(
        name
        for node in model.graph.node
        if (node.domain, node.op_type) not in functions
        for name in node.output
        if name
    )
    listed, inner_constants = _inlined(model) if model.functions else (list(model.graph.node), {})
    tensors = {t.name: t for t in model.graph.initializer} | inner_constants
    sparse = {t.values.name: t for t in model.graph.sparse_initializer}
    nodes: list[NodeProto] = []
    for node in listed:
        tensor = _constant_value(node)
        if isinstance(tensor, TensorProto):
            tensors[node.output[0]] = tensor
        elif tensor is not None:
            sparse[node.output[0]] = tensor
        else:
            nodes.append(node)
    inputs = {i.name: i for i in model.graph.input if i.name not in tensors and i.name not in sparse}
    captured_by = {id(node): tuple(sorted(set(captures(node)))) for node in nodes if _inner_graphs(node)}
    available = {*inputs, *tensors, *sparse}
    ordered = _in_order(nodes, captured_by, available)
    producer = {name: k for k, node in enumerate(ordered) for name in node.output if name}
    captured = {k: captured_by[id(node)] for k, node in enumerate(ordered) if id(node) in captured_by}
    readers: dict[str, list[int]] = defaultdict(list)
    constant = {*tensors, *sparse}
    for k, node in enumerate(ordered):
        names = [*(n for n in node.input if n), *captured.get(k, ())]
        for name in dict.fromkeys(names):
            readers[name].append(k)
        if node.op_type not in RANDOM_OPS and all(name in constant for name in names):
            constant.update(name for name in node.output if name)
    return Graph(
        nodes=tuple(ordered),
        inputs=inputs,
        outputs=tuple(o.name for o in model.graph.output),
        tensors=tensors,
        initializers=frozenset(t.name for t in model.graph.initializer),
        sparse=sparse,
        opsets=_opsets(model),
        ir_version=model.ir_version,
        own=own,
        producer=producer,
        readers={name: tuple(at) for name, at in readers.items()},
        constant=frozenset(constant),
        captured=captured,
    )


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """An attribute's value, or a default where it is absent."""
    for item in node.attribute:
        if item.name == name:
            value = helper.get_attribute_value(item)
            return value.decode() if isinstance(value, bytes) else value
    return default


def captures(node: NodeProto) -> Iterator[str]:
    """The outer values that a node's inner graphs (If, Loop, Scan bodies) read."""
    for inner in _inner_graphs(node):
        inside = {i.name for i in inner.input} | {t.name for t in inner.initializer}
        inside |= {t.values.name for t in inner.sparse_initializer}
        inside |= {name for n in inner.node for name in n.output}
        for n in inner.node:
            yield from (name for name in (*n.input, *captures(n)) if name and name not in inside)
        yield from (o.name for o in inner.output if o.name not in inside)


def inner_nodes(node: NodeProto) -> Iterator[NodeProto]:
    """All nodes of a node's inner graphs, at any depth."""
    for inner in _inner_graphs(node):
        for n in inner.node:
            yield n
            yield from inner_nodes(n)


def _inner_graphs(node: NodeProto) -> list[onnx.GraphProto]:
    found: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            found.append(attribute.g)
        elif attribute.type == AttributeProto.GRAPHS:
            found.extend(attribute.graphs)
    return found


def _opsets(model: onnx.ModelProto) -> tuple[onnx.OperatorSetIdProto, ...]:
    """The operator sets of the working copy: the model's own, with a standard one that probes can be made of.

    onnxruntime runs old models with the operators that opset 7 left as they were. Those that it changed, Add and
    Mul among them, it runs from opset 7 on only; so an older model loses nothing by calling itself opset 7.
    """
    standard = {"", "ai.onnx"}
    version = next((o.version for o in model.opset_import if o.domain in standard), NEW_OPSET)
    others = (o for o in model.opset_import if o.domain not in standard)
    return (helper.make_opsetid("", max(version, OLDEST_OPSET)), *others)


def _inlined(model: onnx.ModelProto) -> tuple[list[NodeProto], dict[str, TensorProto]]:
    """The nodes with every call of a local function replaced by the function's body.

    The initializers stay out of the copy: names of the main graph survive inlining, so they still fit.
    """
    from onnx import inliner

    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    for field in ("name", "node", "input", "output", "value_info"):
        value = getattr(model.graph, field)
        if isinstance(value, str):
            setattr(bare.graph, field, value)
        else:
            getattr(bare.graph, field).extend(value)
    known = {i.name for i in bare.graph.input}
    for tensor in model.graph.initializer:
        if tensor.name not in known:
            bare.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    try:
        flat = inliner.inline_local_functions(bare)
    except Exception as problem:
        raise ModelError(f"the model's local functions cannot be inlined: {problem}") from problem
    return list(flat.graph.node), {t.name: t for t in flat.graph.initializer}


def _constant_value(node: NodeProto) -> TensorProto | onnx.SparseTensorProto | None:
    """The tensor of a Constant node, whichever of its eight attributes holds it; None for other nodes."""
    if node.op_type != "Constant" or node.domain not in {"", "ai.onnx"} or len(node.attribute) != 1:
        return None
    held = node.attribute[0]
    match held.name:
        case "value":
            return held.t
        case "sparse_value":
            return held.sparse_tensor
        case "value_float":
            return helper.make_tensor(node.output[0], TensorProto.FLOAT, [], [held.f])
        case "value_floats":
            return helper.make_tensor(node.output[0], TensorProto.FLOAT, [len(held.floats)], held.floats)
        case "value_int":
            return helper.make_tensor(node.output[0], TensorProto.INT64, [], [held.i])
        case "value_ints":
            return helper.make_tensor(node.output[0], TensorProto.INT64, [len(held.ints)], held.ints)
        case "value_string":
            return TensorProto(name=node.output[0], data_type=TensorProto.STRING, string_data=[held.s])
        case "value_strings":
            dims = [len(held.strings)]
            return TensorProto(name=node.output[0], dims=dims, data_type=TensorProto.STRING, string_data=held.strings)
    return None


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
                    f"node {node.name or node.output[0]!r} ({node.op_type}) reads {name!r}, "
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
        raise ModelError(f"the graph has a cycle through node {stuck.name or stuck.output[0]!r} ({stuck.op_type})")
    return ordered
