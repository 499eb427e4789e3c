# mypy: disable-error-code="attr-defined"
"""The same random model in other clothes: functions, If, names, declared shapes, old file versions. Values stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, ValueInfoProto, helper, numpy_helper

from random_models import MOST_ELEMENTS, Array, Builder, Draft, opsets
from random_steps import grow

# Names that another tool might give to values of its own beside a value y.
SUFFIXES = [
    "/factor",
    "/mean",
    "/square",
    "/size",
    "/pending",
    "/sum",
    "/scale",
    "/count",
    "_scaled",
    ".1",
    "/value",
    "/linear",
]
ODD_NAMES = ["größe", "名前", "a b", "x.y/z::w", "0", "lsuv", "/", "w[0]*?"]
LAYER_OPS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "FusedConv", "FusedGemm", "FusedMatMul"}


@dataclass
class Case:
    """A model, its data by batches, and what lsuv is asked for."""

    model: onnx.ModelProto
    batches: list[dict[str, Array]]
    settings: dict[str, Any]
    features: set[str] = field(default_factory=set)

    def data(self) -> Any:
        """What `initialize` is given: all samples in one array for each input, or the batches as they are."""
        if "batch_size" not in self.settings:
            return self.batches
        return {
            k: v if not v.ndim else np.concatenate([b[k] for b in self.batches]) for k, v in self.batches[0].items()
        }


def draw(seed: int, number: int) -> Case:
    """The case of a number; the same in every run with the same versions of onnx, onnxruntime and numpy."""
    b = Builder(np.random.default_rng([seed, number]))
    grow(b, b.number(1, 5) if b.chance(0.4) or b.most > MOST_ELEMENTS else b.number(5, 30))
    draft = b.draft
    _choose_outputs(b, draft)
    _rename(b, draft)
    functions: list[onnx.FunctionProto] = []
    infos: dict[str, int] = {}
    if b.chance(0.12):
        _branch(b, draft, infos)
    for k in range(b.number(1, 3) if b.chance(0.2) else 0):
        functions += _outline(b, draft, k)
    _name_nodes(b, draft)
    model = _model(b, draft, functions, infos)
    settings = _settings(b, draft)
    kinds = {np.float16: "float16", np.float64: "double"}
    draft.features |= {kinds[b.dtype]} if b.dtype in kinds else set()
    return Case(model, draft.batches, settings, draft.features)


def _choose_outputs(b: Builder, draft: Draft) -> None:
    """Values that nothing reads are outputs; sometimes only the last is, and sometimes others are too."""
    read = {name for node in draft.nodes for name in node.input}
    unread = [v.name for v in b.live if v.name not in read and v.name not in draft.batches[0]]
    chosen = unread[-1:] if b.chance(0.25) else unread
    if b.chance(0.25):
        chosen.append(b.pick(b.layers))
    draft.outputs = list(dict.fromkeys([*draft.outputs, *chosen]))


def _rename(b: Builder, draft: Draft) -> None:
    """Give a few values and constants names that a careless tool would use itself."""
    if not b.chance(0.15) or not b.layers:
        return
    draft.features.add("names")
    own = [n for n in draft.values if n not in draft.batches[0]]
    new: dict[str, str] = {}
    for _ in range(b.number(1, 6)):
        old = b.pick(own)
        if old in new or old in b.layers:
            continue
        wanted = b.pick(b.layers) + b.pick(SUFFIXES) if b.chance(0.7) else b.pick(ODD_NAMES)
        if wanted not in new.values() and wanted not in draft.values:
            new[old] = wanted
    draft.nodes = [renamed(node, new) for node in draft.nodes]
    for old in [k for k in draft.tensors if k in new]:
        tensor = draft.tensors.pop(old)
        tensor.name = new[old]
        draft.tensors[new[old]] = tensor
    draft.values = {new.get(k, k): v for k, v in draft.values.items()}
    draft.outputs = [new.get(k, k) for k in draft.outputs]


def renamed(node: NodeProto, new: Mapping[str, str]) -> NodeProto:
    """A copy of a node with other names for values, in its inner graphs too."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [new.get(k, k) for k in node.input]
    copy.output[:] = [new.get(k, k) for k in node.output]
    for inner in inner_graphs(copy):
        nodes = [renamed(n, new) for n in inner.node]
        del inner.node[:]
        inner.node.extend(nodes)
        for item in (*inner.output, *inner.initializer, *inner.input):
            item.name = new.get(item.name, item.name)
    return copy


def inner_graphs(node: NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g


def reads(node: NodeProto) -> Iterator[str]:
    """The names that a node reads; those that its inner graphs take from outside included."""
    yield from (name for name in node.input if name)
    for inner in inner_graphs(node):
        own = {t.name for t in inner.initializer} | {name for n in inner.node for name in n.output}
        yield from (name for n in inner.node for name in reads(n) if name not in own)
        yield from (o.name for o in inner.output if o.name not in own)


def _stretch(b: Builder, draft: Draft) -> tuple[int, int, list[str], list[str]]:
    """Neighbouring nodes, what they read from elsewhere, and what is read elsewhere of what they make."""
    first = b.number(0, len(draft.nodes) - 1)
    last = min(len(draft.nodes), first + b.number(1, 8))
    inside = draft.nodes[first:last]
    made = [name for node in inside for name in node.output if name]
    taken = list(dict.fromkeys(name for node in inside for name in reads(node) if name not in made))
    outside = {name for node in draft.nodes[:first] + draft.nodes[last:] for name in reads(node)} | {*draft.outputs}
    return first, last, taken, [name for name in made if name in outside]


def _outline(b: Builder, draft: Draft, k: int) -> list[onnx.FunctionProto]:
    """Make neighbouring nodes a local function, which may import another version of the operators."""
    first, last, taken, given = _stretch(b, draft)
    if not given:
        return []
    body = draft.nodes[first:last]
    version = draft.opset
    if b.chance(0.3):
        same = [v for v in range(7, 24) if all(_same(node, v, draft.opset) for node in body)]
        version = b.pick(same or [version])
    draft.features.add("function" if version == draft.opset else "function of another opset")
    imports = [*opsets(version), helper.make_opsetid("local", 1)]
    function = helper.make_function("local", f"Block{k}", taken, given, body, imports)
    draft.nodes[first:last] = [helper.make_node(f"Block{k}", taken, given, domain="local")]
    return [function]


def _same(node: NodeProto, version: int, other: int) -> bool:
    """Whether an operator of the standard domain is the same in two versions."""
    if node.domain or any(True for _ in inner_graphs(node)):
        return bool(node.domain)
    try:
        schemas = [onnx.defs.get_schema(node.op_type, v, "") for v in (version, other)]
    except onnx.defs.SchemaError:
        return False
    return bool(schemas[0].since_version == schemas[1].since_version)


def _branch(b: Builder, draft: Draft, infos: dict[str, int]) -> None:
    """Put neighbouring nodes into a branch of an If that all data takes."""
    first, last, _, given = _stretch(b, draft)
    if not given:
        return
    draft.features.add("if")
    body = draft.nodes[first:last]
    made = [name for node in body for name in node.output if name]
    taken = _graph(draft, body, {name: f"{name}_in" for name in made}, given, "taken")
    elsewhere = {name for node in draft.nodes[:first] + draft.nodes[last:] for name in reads(node)} | {*draft.outputs}
    if b.chance(0.5):
        own = [name for name in draft.tensors if name not in elsewhere and any(name in node.input for node in body)]
        taken.initializer.extend(draft.tensors.pop(name) for name in own)
    if b.chance(0.3) and not taken.initializer:
        other = _graph(draft, body, {name: f"{name}_other" for name in made}, given, "other")
    else:
        other = onnx.GraphProto(name="other")
        for name in given:
            array = np.zeros([1] * draft.values[name].rank, draft.values[name].array.dtype)
            other.node.append(helper.make_node("Constant", [], [f"{name}_0"], value=numpy_helper.from_array(array)))
            other.output.append(_info(f"{name}_0", array))
    front, condition, yes = _condition(b, draft)
    branches = (taken, other) if yes else (other, taken)
    node = helper.make_node("If", [condition], given, then_branch=branches[0], else_branch=branches[1])
    draft.nodes[first:last] = [node]
    draft.nodes[:0] = front


def _graph(
    draft: Draft, body: Sequence[NodeProto], new: Mapping[str, str], given: Sequence[str], name: str
) -> onnx.GraphProto:
    graph = onnx.GraphProto(name=name)
    graph.node.extend(renamed(node, new) for node in body)
    graph.output.extend(_info(new[k], draft.values[k].array) for k in given)
    return graph


def _info(name: str, array: Array) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)


def _condition(b: Builder, draft: Draft) -> tuple[list[NodeProto], str, bool]:
    """A condition, its nodes and its value: a constant, one behind Not, by the data's size, by an input of its own."""
    form = b.pick(["initializer", "constant", "not", "size", "input"])
    yes = b.chance(0.5)
    truth = numpy_helper.from_array(np.array(yes), "condition")
    front: list[NodeProto] = []
    if form == "constant":
        front = [helper.make_node("Constant", [], ["condition"], value=truth)]
    elif form in {"size", "input"}:
        first = next(iter(draft.batches[0]))
        if form == "input":
            draft.batches = [{**batch, "rate": np.array(16000 if yes else 8000)} for batch in draft.batches]
        draft.tensors["rate/wanted"] = numpy_helper.from_array(np.array(16000 if form == "input" else 0), "rate/wanted")
        read = "rate" if form == "input" else "rate/size"
        front = [] if form == "input" else [helper.make_node("Size", [first], ["rate/size"])]
        front.append(helper.make_node("Equal", [read, "rate/wanted"], ["condition"]))
        yes = yes and form == "input"
    else:
        draft.tensors["condition"] = truth
    if form != "not":
        return front, "condition", yes
    return [helper.make_node("Not", ["condition"], ["condition/not"])], "condition/not", not yes


def _name_nodes(b: Builder, draft: Draft) -> None:
    """Names of nodes: unique, none, or those of values; onnxruntime refuses repeated ones."""
    style = b.pick(["none", "unique", "unique", "nasty"])
    taken = {""}
    for k, node in enumerate(draft.nodes):
        name = f"node{k}" if style == "unique" else ""
        if style == "nasty" and b.chance(0.5):
            name = b.pick([*draft.values]) + b.pick(["", *SUFFIXES])
        node.name = "" if name in taken else name
        taken.add(name)


def _model(
    b: Builder, draft: Draft, functions: Sequence[onnx.FunctionProto], infos: Mapping[str, int]
) -> onnx.ModelProto:
    old = not functions and draft.opset <= 9 and b.chance(0.7)
    listed = old or b.chance(0.05)
    read = {name for node in draft.nodes for name in reads(node)} | {*draft.outputs}
    unread = [name for name in draft.batches[0] if name not in read]
    draft.batches = [{k: v for k, v in batch.items() if k not in unread} for batch in draft.batches]
    inputs = _declared(b, draft.batches, draft.features)
    tensors = [t for name, t in draft.tensors.items() if name in read or b.chance(0.5)]
    if listed:
        inputs += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in tensors]
    outputs = [_info(name, draft.values[name].array) for name in draft.outputs]
    graph = helper.make_graph(draft.nodes, "random", inputs, outputs, tensors, doc_string="made at random")
    imports = [*opsets(draft.opset), *([helper.make_opsetid("local", 1)] if functions else [])]
    model = helper.make_model(graph, opset_imports=imports, ir_version=3 if old else b.pick([8, 9, 10]))
    model.functions.extend(functions)
    helper.set_model_props(model, {"kept": "as it is"})
    return model


def _declared(b: Builder, batches: Sequence[Mapping[str, Array]], features: set[str]) -> list[ValueInfoProto]:
    """The inputs' declared shapes: fixed, symbolic, unknown, -1, or none; onnxruntime takes 0 literally."""
    form = b.pick(["batch"] * 5 + ["symbols", "unknown", "negative", "none", "fixed"])
    found = []
    for name in batches[0]:
        arrays = [batch[name] for batch in batches]
        shape: list[Any] = []
        for axis, size in enumerate(arrays[0].shape):
            varies = axis == 0 or any(a.shape[axis] != size for a in arrays)
            symbol: Any = "N" if axis == 0 else f"{name}_{axis}"
            loose = {"unknown": None, "negative": -1}.get(form, symbol)
            shape.append(loose if varies or form == "symbols" else size)
        if form == "fixed" and all(a.shape == arrays[0].shape for a in arrays):
            shape = list(arrays[0].shape)
        if form == "negative" and shape:
            features.add("dimension declared -1")
        kind = helper.np_dtype_to_tensor_dtype(arrays[0].dtype)
        found.append(helper.make_tensor_value_info(name, kind, None if form == "none" else shape))
    return found


def _settings(b: Builder, draft: Draft) -> dict[str, Any]:
    """What lsuv is asked for; mostly its defaults."""
    chosen: dict[str, Any] = {"seed": b.number(0, 9)}
    for name, options, probability in (
        ("bias", ["zero", "keep"], 0.6),
        ("tied", ["share", "untie", "skip"], 0.5),
        ("pre_init", ["orthonormal", "gaussian", "xavier", "msra", "orthonormal-msra", "keep"], 0.4),
        ("target_variance", [1.0, 0.25, 4.0], 0.15),
        ("tol", [0.01, 0.001, 0.05], 0.3),
        ("reset_norm", [True], 0.2),
        ("recurrent", [True], 0.3),
    ):
        if b.chance(probability):
            chosen[name] = b.pick(options)
    rows = [next((a.shape[0] for a in batch.values() if a.ndim), 0) for batch in draft.batches]
    alike = {tuple(a.shape[1:] for a in batch.values()) for batch in draft.batches}
    if len(alike) == 1 and len({*rows[:-1]}) < 2 and rows[-1] <= rows[0] and b.chance(0.7):
        chosen["batch_size"] = rows[0]
    names = [
        n.name
        for n in draft.nodes
        if n.op_type in LAYER_OPS
        and n.name.startswith("node")
        and any(draft.values[k].constant for k in n.input[:2] if k in draft.values)
    ]
    if names and b.chance(0.15):
        chosen["exclude"] = [b.pick(names)]
    elif names and b.chance(0.08):
        chosen["include"] = [b.pick(names), b.pick(names)]
    return chosen
