"""The mutants of a module: copies with one change each, which the tests should notice.

One change per place:

1. A comparison is moved by its boundary (`<` and `<=`) or turned around (`==`, `is`, `in`); `and` and `or`, `min` and
   `max`, `any` and `all`, `+` and `-`, `*` and `/`, `|` and `&` are exchanged; `not` and the minus sign are removed.
2. A number n becomes n + 1 (a float 2n, 0.0 becomes 1.0), a bool its opposite, a text that is a name another name.
3. The condition of `if`, `while`, a conditional expression or a comprehension is forced to be true or false, by turns.
4. `return x` gives `not x` where the function is annotated as bool. A statement that only has effects is removed: a
   call, a change of an attribute or an element, `continue`, `break`, `raise`, a bare `return`.

Excluded, because no result depends on them:

1. Docstrings, annotations, imports, decorators, assertions, `__repr__`, and what only type checkers read.
2. Texts: whatever is inside a `raise`, an f-string, or a text with a space. (That an error is raised does matter.)
3. `strict=` of zip, which asserts something; calls of what reports progress; arguments that decide no more than the
   number of BLAS's threads, or numpy's warnings.
4. What no test could miss: that a function other than a bool one returns something, that `__init__` sets an attribute.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitXor: ast.BitOr,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
SILENT = {"progress"}  # calls of what reports progress
SPEED = {"_bounded_blas", "errstate"}  # calls whose arguments decide threads and warnings, and no result


@dataclass
class Place:
    """A node, what it is replaced by, and where: a field of its parent (and an index, if that field is a list)."""

    tree: ast.Module
    parent: ast.AST
    name: str
    index: int | None
    before: Any
    after: Any
    function: str  # "" at the level of the module
    is_class: bool  # whether that is no function but a class

    @contextlib.contextmanager
    def changed(self) -> Iterator[ast.Module]:
        self._put(self.after)
        yield self.tree
        self._put(self.before)

    def _put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.name, node)
        else:
            getattr(self.parent, self.name)[self.index] = node


@dataclass(frozen=True)
class Mutant:
    key: str  # the module, the function, the change and its number among equal ones: stays the same when lines move
    module: str
    place: Place

    @property
    def line(self) -> int:
        return int(self.place.before.lineno)

    def code(self, file: str) -> CodeType:
        """The module with the change; its lines have the numbers they had."""
        with self.place.changed() as tree:
            return compile(tree, file, "exec")


def of_module(module: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its source."""
    seen: Counter[str] = Counter()
    tree = ast.parse(source)
    for place in list(_places(tree, tree, _Scope())):
        change = f"{module}:{place.function or '-'}: {_text(place.before)} -> {_text(place.after)}"
        seen[change] += 1
        yield Mutant(change + (f" #{seen[change]}" if seen[change] > 1 else ""), module, place)


def _text(node: ast.AST) -> str:
    return ast.unparse(node).partition("\n")[0]


@dataclass(frozen=True)
class _Scope:
    """The function or class that a node is in: its name, its annotation, and whether it is a class."""

    name: str = ""
    kind: str = ""
    is_class: bool = False

    def entered(self, node: ast.AST) -> _Scope:
        """The scope of what is inside a node."""
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            return self
        kind = ast.unparse(node.returns) if isinstance(node, ast.FunctionDef) and node.returns else ""
        return _Scope(f"{self.name}.{node.name}".lstrip("."), kind, isinstance(node, ast.ClassDef))


def _places(tree: ast.Module, node: ast.AST, scope: _Scope) -> Iterator[Place]:
    """All places inside a node."""
    scope = scope.entered(node)
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_excluded(child):
                continue
            after = _forced(node, name, child) or _changed(child, scope.kind)
            if after is not None and not (isinstance(child, ast.Assign) and scope.name.endswith("__init__")):
                yield Place(tree, node, name, index, child, after, scope.name, scope.is_class)
            negative = isinstance(child, ast.UnaryOp) and isinstance(child.operand, ast.Constant)
            if not negative and not isinstance(child, ast.Raise):
                yield from _places(tree, child, scope)


def _forced(parent: ast.AST, name: str, node: ast.AST) -> ast.AST | None:
    """A condition that is no comparison and no `not`, `and`, `or` (which change by themselves), forced."""
    condition = name == "test" or (name == "ifs" and isinstance(parent, ast.comprehension))
    if not condition or isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
        return None
    chosen = not isinstance(parent, ast.While) and bool(zlib.crc32(ast.unparse(node).encode()) & 1)
    return ast.copy_location(ast.Constant(chosen), node)


def _is_excluded(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr | ast.expr_context):
        return True
    if isinstance(node, ast.FunctionDef) and node.name == "__repr__":
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_type(node.value):
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.Call) and _called(node) in SPEED:
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _called(node.value) in SILENT
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_type(value: ast.AST) -> bool:
    """Whether an assigned value is an alias of types, such as `NDArray[Any]` or `Callable[[int], None]`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return _is_type(value.left) or _is_type(value.right)
    generic = {"NDArray", "Callable", "Mapping", "Sequence", "dict", "tuple", "list", "TypeVar", "Iterable"}
    return isinstance(value, ast.Subscript) and ast.unparse(value.value).split(".")[-1] in generic


def _changed(node: ast.AST, kind: str) -> ast.AST | None:
    """The node as it is after its change, or None if nothing is changed at this node itself."""
    after: Any = None
    if isinstance(node, ast.Compare):
        after = copy.deepcopy(node)
        after.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp):
        if type(node.op) in SWAPS and not (isinstance(node, ast.BinOp) and _has_text(node)):
            after = copy.deepcopy(node)
            after.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp):
        after = copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant):
        after = _other_constant(node.value)
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        after = ast.Name(NAMES[node.id], ast.Load())
    elif isinstance(node, ast.Return):
        if node.value is None:
            after = ast.Pass()
        elif kind == "bool" and not isinstance(node.value, ast.Constant | ast.Compare | ast.BoolOp | ast.UnaryOp):
            after = ast.Return(ast.UnaryOp(ast.Not(), node.value))
    elif _is_effect(node):
        after = ast.Pass()
    return None if after is None else ast.fix_missing_locations(ast.copy_location(after, node))


def _is_effect(node: ast.AST) -> bool:
    """Whether a node is a statement that gives no name a value."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return called or isinstance(node, ast.Continue | ast.Break | ast.Raise)


def _has_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


def _other_constant(value: object) -> ast.AST | None:
    if isinstance(value, bool):
        return ast.Constant(not value)
    if isinstance(value, int):
        return ast.Constant(value + 1)
    if isinstance(value, float):
        return ast.Constant(2 * value or 1.0)
    if isinstance(value, str) and value and " " not in value:
        return ast.Constant(value + "_other")
    return None
