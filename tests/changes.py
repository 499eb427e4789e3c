"""What lsuv changed in a model besides weights, zeroed biases and reset statistics (judgement.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx

import flat_models
from disguises import Case

FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}


def changes(case: Case, written: onnx.ModelProto, report: Any) -> Iterator[tuple[str, str]]:
    """Each part that should be as it was, byte for byte, and is not."""
    given = case.model
    for part in ("ir_version", "doc_string", "producer_name"):
        if getattr(given, part) != getattr(written, part):
            yield part, ""
    for old, new, what in (
        (given.opset_import, written.opset_import, "opsets"),
        (_fed(given), _fed(written), "inputs"),
        (given.graph.output, written.graph.output, "outputs"),
        ([_without_weights(f) for f in given.functions], [_without_weights(f) for f in written.functions], "functions"),
    ):
        if [x.SerializeToString() for x in old] != [x.SerializeToString() for x in new]:
            yield what, ""
    flat = flat_models.flatten(given, case.batches)
    yield from _tensors(case, flat, written, report)
    nodes = {n.output[0]: n for n in written.graph.node}
    fixed = flat_models.constants(flat)
    for node in given.graph.node:
        other = nodes.get(node.output[0])
        if other is None:
            if node.output[0] not in fixed:
                yield node.output[0], "its node is gone"
        elif node.op_type not in {"Constant", "If"} and not _same_but_constants(node, other, fixed):
            yield node.output[0], "its node"


def _without_weights(function: onnx.FunctionProto) -> onnx.FunctionProto:
    """A function without the numbers of its float constants that have axes, or are added: weights, biases."""
    copy = onnx.FunctionProto()
    copy.CopyFrom(function)
    added = {name for node in copy.node if node.op_type in {"Add", "Gemm"} for name in node.input}
    for tensor in _numbers(copy.node):
        if (tensor.dims or tensor.name in added) and tensor.data_type in FLOATS:
            tensor.CopyFrom(onnx.TensorProto(dims=tensor.dims, data_type=tensor.data_type, name=tensor.name))
    return copy


def _numbers(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """The tensors of Constant nodes and of branches."""
    for node in nodes:
        for held in node.attribute:
            if node.op_type == "Constant" and held.HasField("t"):
                yield held.t
            if held.HasField("g"):
                yield from held.g.initializer
                yield from _numbers(held.g.node)


def _fed(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs that are no initializers; old models list those as well."""
    stored = {t.name for t in model.graph.initializer}
    return [item for item in model.graph.input if item.name not in stored]


def _tensors(case: Case, flat: onnx.ModelProto, written: onnx.ModelProto, report: Any) -> Iterator[tuple[str, str]]:
    after = {t.name: t for t in written.graph.initializer}
    may = _may_change(flat, case, report)
    folds = any("folded" in note for entry in report.layers for note in entry.notes)
    folded = set()
    if folds:
        # In the model as given, an If whose branch makes nothing but constants goes with what reads it, and so does its
        # condition.
        fixed = flat_models.constants(flat) | flat_models.constants(case.model)
        folded = flat_models.only_for_constants(flat, fixed) | flat_models.only_for_constants(case.model, fixed)
    for tensor in case.model.graph.initializer:
        new = after.get(tensor.name)
        if new is None:
            if tensor.name not in folded:
                yield tensor.name, "the initializer is gone"
        elif tensor.name not in may and new.SerializeToString() != tensor.SerializeToString():
            yield tensor.name, "is no weight or bias of an initialized layer"
        elif list(new.dims) != list(tensor.dims) or new.data_type != tensor.data_type:
            yield tensor.name, "shape or type"


def _may_change(flat: onnx.ModelProto, case: Case, report: Any) -> set[str]:
    """The stored tensors that hold weights of initialized layers, their biases or statistics behind them."""
    left = {"skipped", "excluded"}
    used = [entry.weight for entry in report.layers if entry.status not in left]
    found = flat_models.layers(flat)
    names = {layer.weight for layer in found if any(weight.startswith(layer.weight) for weight in used)} | {*used}
    for layer in found:
        names.update(layer.node.input[2:3])
        names.update(n for node in flat.graph.node if node.output[0] in layer.measured[1:] for n in node.input)
    for node in flat.graph.node:
        if node.op_type == "BatchNormalization" and case.settings.get("reset_norm"):
            names.update(node.input[3:5])
        if node.op_type in {"LSTM", "GRU", "RNN"} and case.settings.get("recurrent"):
            names.update(node.input[1:3])
    return names


def _same_but_constants(node: onnx.NodeProto, other: onnx.NodeProto, fixed: set[str]) -> bool:
    """Whether two nodes differ at most in the constants that they read, and in the name of one that was folded."""
    copy = onnx.NodeProto()
    copy.CopyFrom(other)
    if len(copy.output) == len(node.output):
        copy.output[:] = [
            a if a in fixed and b == f"{a}.folded" else b for a, b in zip(node.output, copy.output, strict=True)
        ]
    if len(copy.input) == len(node.input):
        copy.input[:] = [a if a in fixed else b for a, b in zip(node.input, copy.input, strict=True)]
    return bool(copy.SerializeToString() == node.SerializeToString())
