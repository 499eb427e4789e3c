"""A model's nodes as one flat list: calls of local functions, and Ifs whose branch is known, replaced by their bodies.

1. Main-graph names stay as they are; names inside a body get a prefix (the call's or the If's name) and are made
   unique.
2. Nodes of the main graph are the user's own, nodes of bodies are renamed copies. Tensors are references into the
   user's model, so that the list costs no memory for weights and a weight can be written where it is stored.
3. `places` gives, for a value, the graph and the node that make it in the user's model, where the node can be rewired
   or folded. Nodes of a function's body have no place, because they may serve several calls.
4. A tensor of a function's body has one name, whatever the number of calls: layers of several calls share a weight. It
   can be written in place (`of_functions`), unless the function is also called where no branch is known or puts it out.
5. A function is not inlined if any of its operators has another version in the model's operator sets than in the
   function's: its calls stay calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto, defs, helper

from lsuv_cli.errors import ModelError

MOST_NODES = 1_000_000  # functions that call functions can multiply without bound
TOO_MANY = f"the model has more than {MOST_NODES:,} nodes once its functions are written out"
DEEPEST = 100  # bodies within bodies
STANDARD_DOMAINS = frozenset({"", "ai.onnx"})

FunctionKey = tuple[str, str, str]  # domain, name, overload


@dataclass(frozen=True)
class Place:
    """Where a node stands in the user's model."""

    body: GraphProto
    node: NodeProto


@dataclass
class Flat:
    """The flat list, and where its parts come from."""

    nodes: list[NodeProto] = field(default_factory=list)
    tensors: dict[str, TensorProto] = field(default_factory=dict)  # initializers and values of Constant nodes
    sparse: dict[str, onnx.SparseTensorProto] = field(default_factory=dict)
    initializers: dict[str, GraphProto] = field(default_factory=dict)  # initializer -> the graph that lists it
    places: dict[str, Place] = field(default_factory=dict)  # by the node's outputs
    of_functions: set[str] = field(default_factory=set)  # tensors of functions' bodies that can be written
    functions: list[FunctionProto] = field(default_factory=list)  # all, if a call of any is left; else none
    untaken: list[tuple[str, GraphProto]] = field(default_factory=list)  # (name of the If, its untaken branch)
    untaken_reads: set[str] = field(default_factory=set)  # outer values that untaken branches read
    conditions: dict[str, str] = field(default_factory=dict)  # output of a replaced If -> its condition


def flatten(model: onnx.ModelProto, branches: Mapping[str, bool]) -> Flat:
    """The model's nodes as one list. `branches` tells, by an If's first output in this list, which branch it takes."""
    return _Flattener(model, branches).run()


def inner_graphs(node: NodeProto) -> list[GraphProto]:
    """The bodies of If, Loop and Scan: the graphs among a node's attributes."""
    graphs: list[GraphProto] = []
    for held in node.attribute:
        if held.type == AttributeProto.GRAPH:
            graphs.append(held.g)
        elif held.type == AttributeProto.GRAPHS:
            graphs.extend(held.graphs)
    return graphs


def outer_reads(graph: GraphProto) -> Iterator[str]:
    """The values that an inner graph (a body of If, Loop or Scan) reads from outside."""
    inside = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    inside |= {t.values.name for t in graph.sparse_initializer}
    inside |= {name for node in graph.node for name in node.output}
    for node in graph.node:
        deeper = (name for inner in inner_graphs(node) for name in outer_reads(inner))
        yield from (name for name in (*node.input, *deeper) if name and name not in inside)
    yield from (o.name for o in graph.output if o.name not in inside)


def label(node: NodeProto) -> str:
    """A node's name for people: its own, else that of its first output."""
    return node.name or next((name for name in node.output if name), "")


def constant_value(node: NodeProto, name: str) -> TensorProto | onnx.SparseTensorProto | None:
    """The tensor of a Constant node, whichever of its eight attributes holds it; None for other nodes.

    `value` and `sparse_value` are given by reference, the others as new tensors under `name`.
    """
    if node.op_type != "Constant" or node.domain not in STANDARD_DOMAINS or len(node.attribute) != 1:
        return None
    held = node.attribute[0]
    match held.name:
        case "value":
            return held.t
        case "sparse_value":
            return held.sparse_tensor
        case "value_float":
            return helper.make_tensor(name, TensorProto.FLOAT, [], [held.f])
        case "value_floats":
            return helper.make_tensor(name, TensorProto.FLOAT, [len(held.floats)], held.floats)
        case "value_int":
            return helper.make_tensor(name, TensorProto.INT64, [], [held.i])
        case "value_ints":
            return helper.make_tensor(name, TensorProto.INT64, [len(held.ints)], held.ints)
        case "value_string":
            return TensorProto(name=name, data_type=TensorProto.STRING, string_data=[held.s])
        case "value_strings":
            dims = [len(held.strings)]
            return TensorProto(name=name, dims=dims, data_type=TensorProto.STRING, string_data=held.strings)
    return None


@dataclass(frozen=True)
class _Scope:
    """One body in the course of being flattened."""

    body: GraphProto | None  # None for a function's body, which is not to be edited
    prefix: str  # of the names inside; empty for the main graph
    rename: dict[str, str]  # name in the body -> name in the flat list
    attributes: Mapping[str, AttributeProto]  # of the function call, which the body's nodes may refer to
    depth: int = 0
    function: FunctionKey | None = None  # whose body this is, or is in


class _Flattener:
    def __init__(self, model: onnx.ModelProto, branches: Mapping[str, bool]) -> None:
        self.model = model
        self.branches = branches
        self.functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self.versions = {o.domain: o.version for o in model.opset_import}
        self.agrees = {key: self._agrees(function) for key, function in self.functions.items()}
        self.flat = Flat()
        self.taken = _main_names(model.graph)
        self.once: dict[int, str] = {}  # tensor of a function's body, by its id -> its name in the flat list
        self.owners: dict[str, FunctionKey] = {}  # that name -> the function

    def run(self) -> Flat:
        if self._count(self.model.graph.node, {}) > MOST_NODES:
            raise ModelError(TOO_MANY)
        scope = _Scope(self.model.graph, "", {}, {})
        self._graph(self.model.graph, scope)
        left = {_key(node) for node in self.flat.nodes} | {
            _key(inner) for node in self.flat.nodes for inner in nodes_inside(node)
        }
        if left & self.functions.keys():
            self.flat.functions = list(self.model.functions)  # they may call one another
        untaken = {_key(node) for _, body in self.flat.untaken for node in _nodes_of(body)}
        elsewhere = self._called(left | untaken)
        self.flat.of_functions = {name for name, owner in self.owners.items() if owner not in elsewhere}
        return self.flat

    def _called(self, keys: Iterable[FunctionKey]) -> set[FunctionKey]:
        """The functions among these, and those that their bodies call."""
        called: set[FunctionKey] = set()
        wanted = [key for key in keys if key in self.functions]
        while wanted:
            key = wanted.pop()
            if key not in called:
                called.add(key)
                inside = (_key(n) for node in self.functions[key].node for n in (node, *nodes_inside(node)))
                wanted += [inner for inner in inside if inner in self.functions]
        return called

    def _count(self, nodes: Sequence[NodeProto], known: dict[FunctionKey, int], depth: int = 0) -> int:
        """The number of nodes once functions are written out. A recursion and what is nested too deep count as 0.

        Each function is counted once, so that a bomb of functions is refused without being written out.
        """
        if depth > DEEPEST:
            return 0
        total = 0
        for key in map(_key, nodes):
            if key in self.functions and self.agrees[key]:
                if key not in known:
                    known[key] = 0
                    known[key] = self._count(self.functions[key].node, known, depth + 1)
                total += known[key]
            else:
                total += 1
        return total

    def _graph(self, graph: GraphProto, scope: _Scope) -> None:
        put_out = {output.name for output in graph.output}
        for tensor in graph.initializer:
            name = self._local(tensor.name, scope)
            if tensor.name not in put_out:
                name = self._once(tensor, tensor.name, scope)
            self.flat.tensors[name] = tensor
            if scope.body is not None:
                self.flat.initializers[name] = graph
        for sparse in graph.sparse_initializer:
            self.flat.sparse[self._local(sparse.values.name, scope)] = sparse
        self._nodes(graph.node, scope)

    def _nodes(self, nodes: Sequence[NodeProto], scope: _Scope) -> None:
        if scope.depth > DEEPEST:
            raise ModelError(f"bodies are nested more than {DEEPEST} deep at {scope.prefix!r}")
        for node in nodes:
            key = _key(node)
            if key in self.functions and self.agrees[key]:
                self._call(node, self.functions[key], scope)
            elif node.op_type == "If" and node.domain in STANDARD_DOMAINS and self._taken_branch(node, scope):
                pass
            else:
                self._node(node, scope)
            if len(self.flat.nodes) > MOST_NODES:
                raise ModelError(TOO_MANY)

    def _node(self, node: NodeProto, scope: _Scope) -> None:
        copied = self._renamed(node, scope)
        for name in copied.output:
            if name and scope.body is not None:
                self.flat.places[name] = Place(scope.body, node)
        referring = any(held.ref_attr_name for held in node.attribute)
        value = constant_value(copied if referring else node, copied.output[0]) if copied.output else None
        if isinstance(value, TensorProto):
            self.flat.tensors[copied.output[0]] = value
        elif value is not None:
            self.flat.sparse[copied.output[0]] = value
        else:
            self.flat.nodes.append(copied)

    def _call(self, node: NodeProto, function: FunctionProto, scope: _Scope) -> None:
        """A function's body in place of a call of it."""
        call = self._renamed(node, scope)
        given = {a.name: a for a in call.attribute}
        attributes = {a.name: a for a in function.attribute_proto} | given
        inputs = [*call.input, *[""] * (len(function.input) - len(call.input))]
        rename = dict(zip(function.input, inputs, strict=False))
        # A function output that is also a function input, or is listed twice, is made by an Identity.
        made = {name for inner in function.node for name in inner.output}
        twice = [name for name, count in Counter(function.output).items() if count > 1]
        direct = {
            n: o for n, o in zip(function.output, call.output, strict=False) if n in made and n not in twice and o
        }
        prefix = f"{label(call)}/"
        body = _Scope(None, prefix, {**rename, **direct}, attributes, scope.depth + 1, _key(node))
        self._name_outputs(function.node, body, direct, function.output)
        self._nodes(function.node, body)
        for inner, outer in zip(function.output, call.output, strict=False):
            if outer and inner not in direct:
                self.flat.nodes.append(helper.make_node("Identity", [body.rename.get(inner, inner)], [outer]))

    def _taken_branch(self, node: NodeProto, scope: _Scope) -> bool:
        """Replace an If by the branch that it takes; False if that branch is not known."""
        outputs = [scope.rename.get(name, name) for name in node.output]
        taken = self.branches.get(outputs[0] if outputs else "")
        if taken is None:
            return False
        bodies = {a.name: a.g for a in node.attribute if a.type == AttributeProto.GRAPH}
        then, other = bodies.get("then_branch"), bodies.get("else_branch")
        if then is None or other is None:
            return False
        graph, left = (then, other) if taken else (other, then)
        # An If inside must not get the first output of this If, by which `branches` tells one If from another.
        opaque = [inner.op_type == "If" or _key(inner) in self.functions for inner in graph.node]
        made = {name for inner, skip in zip(graph.node, opaque, strict=True) if not skip for name in inner.output}
        names = [o.name for o in graph.output]
        direct = {n: o for n, o in zip(names, outputs, strict=False) if n in made and names.count(n) == 1 and o}
        prefix = f"{scope.rename.get(label(node), label(node))}/"
        inside = {**scope.rename, **direct}
        editable = graph if scope.body is not None else None
        body = _Scope(editable, prefix, inside, scope.attributes, scope.depth + 1, scope.function)
        self._name_outputs(graph.node, body, direct, names)
        self._graph(graph, body)
        for inner, outer in zip(names, outputs, strict=False):
            if outer and inner not in direct:
                self.flat.nodes.append(helper.make_node("Identity", [body.rename.get(inner, inner)], [outer]))
        condition = scope.rename.get(node.input[0], node.input[0])
        self.flat.conditions |= {outer: condition for outer in outputs if outer}
        self.flat.untaken.append((label(node), left))
        self.flat.untaken_reads |= {scope.rename.get(name, name) for name in outer_reads(left)}
        return True

    def _name_outputs(
        self, nodes: Sequence[NodeProto], scope: _Scope, direct: Mapping[str, str], put_out: Iterable[str]
    ) -> None:
        """Name the outputs of all nodes of a body first, because the nodes may be listed in any order."""
        outputs = set(put_out)
        for node in nodes:
            for name in node.output:
                if name and name not in direct:
                    self._local(name, scope)
            held = next(iter(node.attribute), None) if len(node.output) == 1 else None
            if held is None or held.ref_attr_name or held.name != "value" or node.output[0] in outputs:
                continue
            if isinstance(tensor := constant_value(node, node.output[0]), TensorProto):
                self._once(tensor, node.output[0], scope)

    def _once(self, tensor: TensorProto, name: str, scope: _Scope) -> str:
        """The flat list's name of a tensor that a body stores; in a function's body the same for all calls."""
        if scope.function is None:
            return scope.rename.get(name, name)
        scope.rename[name] = self.once.setdefault(id(tensor), scope.rename[name])
        self.flat.tensors[scope.rename[name]] = tensor  # which keeps the object, and with it its id
        self.owners[scope.rename[name]] = scope.function
        return scope.rename[name]

    def _local(self, name: str, scope: _Scope) -> str:
        """The flat list's name of a value that a body defines itself; it shadows an outer value of the same name."""
        if not scope.prefix or not name:
            return name
        unique = free_name(f"{scope.prefix}{name}", self.taken)
        self.taken.add(unique)
        scope.rename[name] = unique
        return unique

    def _renamed(self, node: NodeProto, scope: _Scope) -> NodeProto:
        """A node as the flat list has it: a renamed copy, or the node itself in the main graph."""
        if not scope.prefix and not scope.attributes:
            return node
        copied = NodeProto()
        copied.CopyFrom(node)
        _resolve(copied, scope.attributes)
        _rename(copied, scope.rename)
        if node.name:
            copied.name = f"{scope.prefix}{node.name}"
        return copied

    def _agrees(self, function: FunctionProto) -> bool:
        """Whether each operator of a function has the same version in the function's and the model's operator sets."""
        own = {o.domain: o.version for o in function.opset_import}

        def since(node: NodeProto, versions: Mapping[str, int]) -> int | None:
            domain = "" if node.domain == "ai.onnx" else node.domain
            version = versions.get(domain, versions.get("ai.onnx", 0) if not domain else 0)
            try:
                return int(defs.get_schema(node.op_type, version, domain).since_version)
            except (defs.SchemaError, TypeError):  # a TypeError for a version beyond 32 bits
                return None  # not an ONNX operator: onnxruntime knows it or not, whatever the version

        listed = [n for node in function.node for n in (node, *nodes_inside(node))]
        return all(
            since(node, own) == since(node, self.versions) for node in listed if _key(node) not in self.functions
        )


def free_name(wanted: str, taken: set[str] | Mapping[str, object] | Callable[[str], bool]) -> str:
    """A name like the wanted one that nothing has yet."""
    is_taken = taken if callable(taken) else taken.__contains__
    name, count = wanted, 1
    while is_taken(name):
        count += 1
        name = f"{wanted}_{count}"
    return name


def nodes_inside(node: NodeProto) -> Iterator[NodeProto]:
    """All nodes of a node's inner graphs, at any depth."""
    for graph in inner_graphs(node):
        yield from _nodes_of(graph)


def _nodes_of(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        yield from nodes_inside(node)


def _key(node: NodeProto) -> FunctionKey:
    return node.domain, node.op_type, node.overload


def _main_names(graph: GraphProto) -> set[str]:
    names = {i.name for i in (*graph.input, *graph.output)} | {t.name for t in graph.initializer}
    names |= {t.values.name for t in graph.sparse_initializer}
    return names | {name for node in graph.node for name in (*node.input, *node.output)}


def _resolve(node: NodeProto, attributes: Mapping[str, AttributeProto]) -> None:
    """Replace references to the call's attributes, in a function body's node and its inner graphs, by their values."""
    kept: list[AttributeProto] = []
    for held in node.attribute:
        if held.ref_attr_name:
            if held.ref_attr_name in attributes:
                value = AttributeProto()
                value.CopyFrom(attributes[held.ref_attr_name])
                value.name = held.name
                kept.append(value)
        else:
            kept.append(held)
    if len(kept) < len(node.attribute) or any(held.ref_attr_name for held in node.attribute):
        copies = [AttributeProto.FromString(held.SerializeToString()) for held in kept]
        del node.attribute[:]
        node.attribute.extend(copies)
    for graph in inner_graphs(node):
        for inner in graph.node:
            _resolve(inner, attributes)


def _rename(node: NodeProto, rename: Mapping[str, str]) -> None:
    """Rename a node's inputs and outputs, and the outer values that its inner graphs read."""
    for names in (node.input, node.output):
        for k, name in enumerate(names):
            names[k] = rename.get(name, name)
    for graph in inner_graphs(node):
        own = {i.name for i in graph.input} | {t.name for t in graph.initializer}
        own |= {name for inner in graph.node for name in inner.output}
        outer = {old: new for old, new in rename.items() if old not in own}
        for inner in graph.node:
            _rename(inner, outer)
        for output in graph.output:
            output.name = outer.get(output.name, output.name)
