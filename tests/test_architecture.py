"""The directions of imports between the rooms of the package (docs/architecture.md), and the size of its functions.

That only `lsuv_cli/cli` prints is a rule of ruff (T20).
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import lsuv_cli
from lsuv_cli.scaling import moments

PACKAGE = Path(lsuv_cli.__file__).parent
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
SOURCES = {name: (PACKAGE / name).read_text().splitlines() for name in TREES}

# The modules beside the rooms, and which room each of them counts as.
BESIDE = {
    "__init__": "api",
    "api": "api",
    "pipeline": "pipeline",
    "layer_reports": "pipeline",
    "examination": "pipeline",
    "results": "pipeline",
    "arguments": "api",
    "model_lists": "api",
    "calibration_data": "pipeline",
}
BESIDE |= dict.fromkeys(
    [
        "errors",
        "details",
        "settings",
        "setting_values",
        "text",
        "labels",
        "target_variances",
        "version",
        "memory",
        "temporary",
        "outputs",
        "scratch",
        "spool",
        "interruption",
        "progress",
        "safetensors_format",
        "dumps",
    ],
    "words",
)
BESIDE |= {"layer_details": "pipeline", "report": "report"}
# A report draws itself as a page, and a page knows only its JSON.
MAY_IMPORT = {
    "cli": {"api", "pipeline", "report", "words"},
    "torch": {"api", "pipeline", "home", "model", "report", "words"},
    "api": {"pipeline", "workers", "scaling", "data", "home", "model", "report", "words"},
    "pipeline": {"workers", "scaling", "data", "home", "model", "report", "words"},
    "workers": {"scaling", "data", "report", "words"},
    "scaling": {"model", "report", "words"},
    "home": {"model", "report", "words"},
    "data": {"report", "words"},
    "model": {"report", "words"},
    "report": {"page", "words"},
    "page": {"words"},
    "words": set(),
}

PARAMETERS, LINES = 7, 50
TOO_MANY_PARAMETERS: set[str] = set()
TOO_LONG: set[str] = set()


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported, at whatever depth of the code; `from package import name` as `package.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """The room of `model/graph.py`, and of `model.graph.Graph`; what is no module is a name of the Python API."""
    first = name.removesuffix(".py").replace("/", ".").partition(".")[0]
    return first if first in MAY_IMPORT else BESIDE.get(first, "api")


def functions() -> Iterator[tuple[str, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path} {node.name}", "\n".join(SOURCES[path][node.lineno - 1 : node.end_lineno]), node


def test_every_module_is_in_a_room_or_known_beside_them() -> None:
    assert {path.partition("/")[0].removesuffix(".py") for path in TREES} <= MAY_IMPORT.keys() | BESIDE.keys()


def test_imports_go_from_the_command_down_to_the_words() -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in TREES.items()
        for name in imported(tree)
        if name.startswith("lsuv_cli")
        and room(name.removeprefix("lsuv_cli.")) not in {room(path), *MAY_IMPORT[room(path)]}
    ]
    assert not wrong


def test_verification_measures_by_means_of_its_own() -> None:
    """No size, name or shape logic of calibration's measurement, and of its results the bare numbers."""
    calibration = {"stage_model", "channel_moments", "solve", "fused", "model_builder.own_prefix"}
    calibration |= {f"moments.{name}" for name in vars(moments) if name not in {"Moments", "ChannelMoments"}}
    modules = ("verification", "gauges", "pieces", "noise")
    found = {name for each in modules for name in imported(TREES[f"scaling/{each}.py"])}
    shared = [name for name in found for other in calibration if f"{name}.".startswith(f"lsuv_cli.scaling.{other}.")]
    assert not shared


def test_only_two_modules_know_onnxruntime() -> None:
    users = {path for path, tree in TREES.items() for name in imported(tree) if name.split(".")[0] == "onnxruntime"}
    assert users == {"scaling/providers.py", "scaling/runtime.py"}


def test_only_the_workers_know_ray() -> None:
    users = {path for path, tree in TREES.items() for name in imported(tree) if name.split(".")[0] == "ray"}
    assert {room(path) for path in users} == {"workers"}


def test_functions_take_few_parameters() -> None:
    large = set()
    for name, _, node in functions():
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        if sum(a is not None and a.arg not in {"self", "cls"} for a in given) > PARAMETERS:
            large.add(name)
    assert large == TOO_MANY_PARAMETERS


def test_functions_are_short_or_say_why_not() -> None:
    long = {name for name, text, _ in functions() if text.count("\n") >= LINES and "# long because " not in text}
    assert long == TOO_LONG
