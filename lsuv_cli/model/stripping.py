"""Models without weights: each stripped tensor keeps its name, type, shape and role, and has no values.

The format is ordinary ONNX: a stripped TensorProto has `dims`, `data_type` and `name` as before, empty `raw_data`, and
the doc_string `lsuv.stripped ROLE TRT_WEIGHTLESS/`. The last word is the mark of Polygraphy's `surgeon weight-strip`:
its `weight-reconstruct` reads the file too, and what Polygraphy stripped is read here. Programs that look at the
structure open such a file; onnxruntime refuses it, so that nobody runs it by mistake.

1. Every float tensor of more than `larger_than` values is stripped, wherever it is stored, and so are tensors of 8 and
   fewer bits, which are quantized weights. Integers of 16 and more bits are shapes and indices, and are kept.
2. Lists of more than `larger_than` learned numbers in attributes (number_lists.py) are stripped too, under the name
   NODE.ATTRIBUTE.
3. What is structure (roles.py) and what `keep` matches is kept.
4. Graphs for training (training_info) hold further tensors and are removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import onnx
from onnx import AttributeProto, TensorProto, numpy_helper

from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.model import number_lists, roles
from lsuv_cli.model.file import VALUES, ModelFile, byte_size, embed, is_external, is_stripped, stripped_mark, tensors
from lsuv_cli.model.flatten import label
from lsuv_cli.model.graph import Graph
from lsuv_cli.model.roles import Role

FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "COMPLEX64", "COMPLEX128"}
NARROW = {"INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2",
          "FLOAT8E5M2FNUZ", "FLOAT8E8M0", "FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2"}  # fmt: skip
STRIPPABLE = {getattr(TensorProto, name) for name in FLOATS | NARROW if hasattr(TensorProto, name)}
QUANTIZED = {getattr(TensorProto, name) for name in NARROW if hasattr(TensorProto, name)}
NUMBER_BYTES = 4  # of a number in a list
TREES = "nodes_featureids"  # the attribute of trees that says which feature each node asks for
INTEGERS = 4096  # values of a kept tensor of integers that a warning names


@dataclass
class Stripped:
    """What was stripped: tensor -> role, their bytes, the tensors that were kept, and warnings."""

    roles: dict[str, Role] = field(default_factory=dict)
    bytes: int = 0
    kept: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def strip(file: ModelFile, graph: Graph, keep: Sequence[str], larger_than: int) -> Stripped:
    """Strip a model in place; afterwards none of its tensors is in an external file."""
    done = Stripped()
    model = file.proto
    _tensors_for_lists(model)
    by_id = {id(graph.tensors[name]): role for name, role in roles.roles(graph).items()}
    codes = number_lists.codes(model)
    by_id |= {id(tensor): Role.STRUCTURE for tensor in codes}
    missing = {id(tensor) for tensor in file.absent if not is_stripped(tensor)}
    if missing:
        done.warnings.append(f"the data file of {len(missing)} tensors is missing; they had no values to take out")
    matched: set[str] = set()

    def is_kept(name: str) -> bool:
        hits = [pattern for pattern in keep if fnmatchcase(name, pattern)]
        matched.update(hits)
        return bool(hits)

    for number, tensor in enumerate(tensors(model)):
        name = tensor.name or f"constant {number}"
        kept = is_kept(tensor.name)
        role = role_of(tensor, by_id.get(id(tensor), Role.TABLE))
        if is_stripped(tensor):
            done.roles[name] = role
        elif id(tensor) in missing:
            check_can_be_made(file, tensor)
            done.roles[name] = role
            _empty(tensor, role)
        elif _is_large(tensor, larger_than) and not kept and not _is_structure(file, tensor, role):
            done.bytes += byte_size(tensor)
            done.roles[name] = role
            _empty(tensor, role)
        else:
            if math.prod(tensor.dims) > 1 and tensor.data_type in STRIPPABLE:
                done.kept.append(name)
            if is_external(tensor):
                embed(tensor, file.place(tensor).read())
    _strip_lists(model, done, is_kept, larger_than)
    for pattern in keep:
        if pattern not in matched:
            raise LsuvError(f"`keep` {pattern!r} matches no tensor; give the name of one, or a pattern")
    file.ranges.clear()
    file.absent.clear()
    done.warnings += _warnings(model)
    del model.training_info[:]
    return done


def _strip_lists(model: onnx.ModelProto, done: Stripped, is_kept: Callable[[str], bool], larger_than: int) -> None:
    """Strip the learned numbers that are in lists of attributes."""
    for found in number_lists.every(model):
        kept = is_kept(found.name)
        if found.is_stripped:
            done.roles[found.name] = Role.NUMBERS
        elif found.count > larger_than and not kept:
            done.bytes += found.count * NUMBER_BYTES
            done.roles[found.name] = Role.NUMBERS
            found.strip()
        elif found.count > 1:
            done.kept.append(found.name)


def role_of(tensor: TensorProto, by_readers: Role) -> Role:
    """A tensor's role by its type too: narrow integers that are no zero points are quantized weights."""
    narrow = tensor.data_type in QUANTIZED and by_readers not in {Role.BIAS, Role.STRUCTURE}
    return Role.QUANTIZED if narrow else by_readers


def check_can_be_made(file: ModelFile, tensor: TensorProto) -> None:
    """Integers are shapes and indices: no role says what they were."""
    if tensor.data_type not in STRIPPABLE:
        raise ModelError(
            f"{file.name}: tensor {tensor.name!r} of integers has no values, which cannot be made up; give the model "
            "with its data"
        )


def _is_large(tensor: TensorProto, larger_than: int) -> bool:
    return tensor.data_type in STRIPPABLE and math.prod(tensor.dims) > larger_than


def _is_structure(file: ModelFile, tensor: TensorProto, role: Role) -> bool:
    if role is Role.STRUCTURE:
        return True
    added = role in {Role.BIAS, Role.TABLE} and tensor.data_type not in QUANTIZED
    return added and roles.is_mask(file.array(tensor))


def _empty(tensor: TensorProto, role: Role) -> None:
    for values in (*VALUES, "external_data", "data_location", "metadata_props"):
        if values in tensor.DESCRIPTOR.fields_by_name:
            tensor.ClearField(values)
    tensor.raw_data = b""
    tensor.doc_string = stripped_mark(role)


def _tensors_for_lists(model: onnx.ModelProto) -> None:
    """Let Constant nodes hold tensors where they hold lists of floats, so that these can be stripped as well."""
    for node in number_lists.nodes_of(model):
        for held in node.attribute:
            if node.op_type == "Constant" and held.name == "value_floats" and not held.ref_attr_name:
                tensor = numpy_helper.from_array(_floats(held), node.output[0])
                held.CopyFrom(onnx.helper.make_attribute("value", tensor))


def _floats(held: AttributeProto) -> roles.Array:
    import numpy as np

    return np.array(held.floats, np.float32)


def _warnings(model: onnx.ModelProto) -> Iterator[str]:
    if model.training_info:
        yield "graphs for training hold tensors of their own and were removed"
    for node in number_lists.nodes_of(model):
        if any(held.name == TREES for held in node.attribute):
            yield (
                f"the trees of node {label(node)!r} ({node.op_type}) keep their structure, which was learned too: the "
                "feature that each node asks for, and where its branches lead"
            )
    for tensor in tensors(model):
        if tensor.data_type not in STRIPPABLE and math.prod(tensor.dims) > INTEGERS:
            yield f"tensor {tensor.name!r} of {math.prod(tensor.dims):,} integers was kept"
