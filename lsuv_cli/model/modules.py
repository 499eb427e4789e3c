"""The PyTorch module that a node belongs to, read from the node's metadata or name.

1. dynamo=True: the node's metadata has the module's path, exactly.
2. dynamo=False: the node's name is a path of scopes, `/layer1/layer1.0/conv1/Conv`. A module's scope is the last part
   of its path that is not a number, with the numbers behind it, so a container's child repeats the container's name.
   A container that is never called has no scope, and the second call of `h` has the scope `h_1`. The node's module is
   the shortest path with these scopes among the prefixes of stored tensors' names; of several shortest paths, the one
   that the node's weight is named after; if there is none, the path that the scopes spell out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

from onnx import NodeProto

from lsuv_cli.model.graph import Graph

SCOPES = "pkg.torch.onnx.name_scopes"
# Names that exporters make up: onnx::MatMul_12, 12, val_3, t_7, /fc/Transpose_output_0.
MADE_UP = re.compile(r"^(onnx::.*|\d+|(val|_v|t)_\d+|const_fold.*|/.*)$")
AGAIN = re.compile(r"_\d+$")  # ends the scope of a module's second and later calls
DEEPEST = 200  # modules within modules; all prefixes of a name take time and memory by the square of its parts

Path = tuple[str, ...]


class Modules:
    """The modules of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.known = frozenset(_prefixes(parameters(graph)))
        self._found: dict[tuple[Path, Path], str] = {}

    def of(self, node: NodeProto, weight: str = "") -> str:
        """The path of the module that a node belongs to, such as encoder.layers.0.fc; empty if nothing tells.

        `weight` is the name of the stored tensor that the node multiplies with.
        """
        for entry in node.metadata_props:
            if entry.key == SCOPES:
                return _from_metadata(entry.value)
        if not node.name.startswith("/"):
            return ""
        scopes = tuple(part for part in node.name.split("/") if part)[:-1]
        owner = tuple(weight.split(".")[:-1])
        if (scopes, owner) not in self._found:
            self._found[scopes, owner] = self._from_scopes(scopes, owner)
        return self._found[scopes, owner]

    def is_known(self, module: str) -> bool:
        """Whether a stored tensor's name begins with a module's path."""
        return tuple(module.split(".")) in self.known

    def _from_scopes(self, scopes: Path, owner: Path) -> str:
        if not scopes:
            return ""
        for tried in dict.fromkeys((scopes, tuple(AGAIN.sub("", scope) for scope in scopes))):
            fitting = [path for path in self.known if _fits(tried, path)]
            shortest = [path for path in fitting if len(path) == min(map(len, fitting))]
            if len(shortest) == 1:
                return ".".join(shortest[0])
            if owner in shortest:
                return ".".join(owner)
        return spelled_out(scopes)


def parameters(graph: Graph) -> set[str]:
    """The names of stored tensors that the exporter took from the module, including the names of merged tensors."""
    names = set(graph.initializers)
    for node in graph.nodes:
        # PyTorch's legacy exporter merges equal tensors and keeps the other names as those of Identity nodes.
        if node.op_type == "Identity" and node.input[0] in graph.constant:
            names.update(node.output)
    return {name for name in names if not MADE_UP.match(name)}


def spelled_out(scopes: Sequence[str]) -> str:
    """The path that scopes spell out: /d1/d1.0 is d1.0, as a child's scope repeats its container's."""
    path: list[str] = []
    for scope in scopes:
        if path and scope.startswith(f"{path[-1]}."):
            path.pop()
        path.append(scope)
    return ".".join(path)


def _prefixes(names: Iterable[str]) -> Iterable[Path]:
    """The paths of the modules that hold tensors of these names."""
    for name in names:
        if name.count(".") <= DEEPEST:
            parts = tuple(name.split("."))
            yield from (parts[:length] for length in range(1, len(parts)))


def _scope(path: Path) -> str:
    """A module's scope in the legacy exporter: its last part that is not a number, and the numbers behind that."""
    first = next((k for k in reversed(range(len(path))) if not path[k].isnumeric()), 0)
    return ".".join(path[first:])


def _fits(scopes: Path, path: Path) -> bool:
    """Whether the last scope is that of the module at `path`, and the others, in order, those of its ancestors."""
    if _scope(path) != scopes[-1]:
        return False
    around = iter(_scope(path[:length]) for length in range(1, len(path)))
    return all(scope in around for scope in scopes[:-1])


def _from_metadata(text: str) -> str:
    try:
        return str(ast.literal_eval(text)[-2])
    except (ValueError, SyntaxError, IndexError, TypeError, RecursionError, MemoryError):
        return ""
