"""Mutation testing of `lsuv_cli/scaling` and `lsuv_cli/model`: how many of the mutants do the tests notice?

    python tests/mutants.py map MAP TESTS...   # which lines each test runs, and its time (Python 3.12 or newer)
    python tests/mutants.py run MAP RESULTS    # goes on where it was stopped; --only, --sample, --again
    python tests/mutants.py report RESULTS

1. A mutant (mutations.py) runs in a fork of a process that has imported pytest, numpy and onnx but neither lsuv_cli nor
   onnxruntime, which starts a thread; the mutated module is imported in place of the real one.
2. It gets the tests that run its line: those of the file and room named after the module first, then one of each file
   in turn, the quickest first, until SECONDS of tests. At the level of the module these are the tests that run a line
   which reads the name that is assigned.
3. The first test that fails kills it; so does three times the time that its tests take, of processor time.
4. All runs take place in a copy of the tree: a mutant may write where it should not, and the tree may be edited.

`tests/equivalent_mutants.txt` has the mutants that matter to no result, each with its reason; `report` leaves them out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from mutations import Mutant, of_module

TREE = Path(__file__).resolve().parent.parent
ROOMS = ("scaling", "model")
EQUIVALENT = TREE / "tests" / "equivalent_mutants.txt"
SOURCES = "sources"  # in a map: the modules as they were
LIVE = {"survived", "error", "untested"}  # verdicts; the others are killed, timeout and crash
OVERHEAD = 6.0  # seconds of imports and collection that a mutant may take besides its tests


def modules() -> list[str]:
    return [f"{room}/{path.name}" for room in ROOMS for path in sorted((TREE / "lsuv_cli" / room).glob("*.py"))]


def mutants(only: Sequence[str] = (), sample: int = 0, seed: int = 0) -> list[Mutant]:
    """The mutants of all modules, or at most `sample` of each, in an order that only the seed decides."""
    drawn: list[Mutant] = []
    for module in modules():
        if not only or any(word in module for word in only):
            made = list(of_module(module, (TREE / "lsuv_cli" / module).read_text()))
            random.Random(f"{seed} {module}").shuffle(made)
            drawn += made[: sample or None]
    return drawn


class Recorder:
    """A pytest plugin: the lines of `lsuv_cli` that each test runs, and how long it takes."""

    def __init__(self, path: Path) -> None:
        self.path, self.package = path, str(TREE / "lsuv_cli") + os.sep
        self.known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.began = 0.0
        sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "mutants")
        sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, self.line)

    def line(self, code: CodeType, number: int) -> object:
        if code.co_filename.startswith(self.package):
            self.lines[code.co_filename.removeprefix(self.package)].add(number)
        return sys.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines.clear()
        self.began = time.process_time()
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)
        sys.monitoring.restart_events()
        result = yield
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            taken = time.process_time() - self.began
            lines = {module: sorted(numbers) for module, numbers in self.lines.items()}
            self.known[report.nodeid] = {"seconds": round(taken, 3), "lines": lines}

    def pytest_sessionfinish(self) -> None:
        self.known[SOURCES] = {module: (TREE / "lsuv_cli" / module).read_text() for module in modules()}
        self.path.write_text(json.dumps(self.known))


def _moved(module: str, source: str) -> dict[int, int]:
    """Where the lines of a module have been moved to since the map was made."""
    before, after = source.splitlines(), (TREE / "lsuv_cli" / module).read_text().splitlines()
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    return {one + k + 1: other + k + 1 for one, other, size in blocks for k in range(size)}


class Tests:
    """Which tests a mutant gets."""

    def __init__(self, path: Path) -> None:
        self.known: dict[str, Any] = json.loads(path.read_text())
        moved = {module: _moved(module, text) for module, text in self.known.pop(SOURCES).items()}
        self.by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.readers: dict[str, set[tuple[str, int]]] = defaultdict(set)  # name -> the lines that read it
        for test, found in self.known.items():
            for module, numbers in found["lines"].items():
                for number in numbers:
                    self.by_line[module, moved.get(module, {}).get(number, number)].add(test)
        for path in (TREE / "lsuv_cli").rglob("*.py"):
            module = path.relative_to(TREE / "lsuv_cli").as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
                if name:
                    self.readers[name].add((module, node.lineno))

    def of(self, mutant: Mutant, seconds: float) -> list[str]:
        """The tests that run a mutant's line, the closest first, of about this many seconds in all."""
        covering = self.by_line.get((mutant.module, mutant.line), set()) | self._of_assignment(mutant)
        if not covering:  # a default, or a line of an expression that has no event of its own
            covering = self._nearby(mutant)
        files: dict[str, list[str]] = defaultdict(list)
        for test in sorted(covering, key=lambda test: self.known[test]["seconds"]):
            files[test.partition("::")[0]].append(test)
        room, stem = mutant.module.removesuffix(".py").split("/")

        def distance(file: str) -> tuple[bool, bool, bool, str]:
            return f"test_{stem}" not in file, f"/{room}/" not in file, file.count("/") < 2, file

        chosen: list[str] = []
        total = 0.0
        queues = [files[file] for file in sorted(files, key=distance)]
        for turn in range(max(map(len, queues), default=0)):
            for queue in queues:
                if turn < len(queue) and total < seconds:
                    chosen.append(queue[turn])
                    total += self.known[queue[turn]]["seconds"]
        return chosen

    def _of_assignment(self, mutant: Mutant) -> set[str]:
        """Of a line at the level of the module: the tests that run a line which reads what is assigned there."""
        for node in ast.parse((TREE / "lsuv_cli" / mutant.module).read_text()).body:
            if node.lineno <= mutant.line <= (node.end_lineno or 0) and isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
                lines = {line for name in names for line in self.readers[name]}
                return {test for line in lines for test in self.by_line.get(line, ())}
        return set()

    def _nearby(self, mutant: Mutant) -> set[str]:
        """The tests that run another line of the innermost function or class that has the mutant's line."""
        spans = [
            range(node.lineno, (node.end_lineno or 0) + 1)
            for node in ast.walk(ast.parse((TREE / "lsuv_cli" / mutant.module).read_text()))
            if isinstance(node, ast.stmt) and mutant.line in range(node.lineno, (node.end_lineno or 0) + 1)
        ]
        for span in sorted(spans, key=len):
            if found := {test for number in span for test in self.by_line.get((mutant.module, number), ())}:
                return found
        return set()


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutated source in place of one module of lsuv_cli."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant, self.name = mutant, "lsuv_cli." + mutant.module.removesuffix(".py").replace("/", ".")

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        if fullname.removesuffix(".__init__") != self.name:
            return None
        file = TREE / "lsuv_cli" / self.mutant.module
        return importlib.util.spec_from_file_location(fullname, file, loader=self)  # type: ignore[arg-type]

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.source, str(TREE / "lsuv_cli" / self.mutant.module), "exec"), module.__dict__)


def child(mutant: Mutant, tests: Sequence[str], limit: float, output: Path) -> int:
    """In the fork: run the tests with the mutant in place. 0: all passed, 1: killed, 3: something else is wrong."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    instead = Instead(mutant)
    sys.meta_path.insert(0, instead)
    try:
        importlib.import_module(instead.name)
    except BaseException:
        return 1
    code = int(pytest.main([*tests, "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]))
    return code if code in {0, 1} else 3


def verdict(mutant: Mutant, tests: Sequence[str], normal: float, folder: Path) -> tuple[str, float]:
    """What becomes of a mutant, and the processor time it takes."""
    limit = 3 * normal + OVERHEAD
    output = folder / "output.txt"
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        code = 3
        with contextlib.suppress(BaseException):
            code = child(mutant, tests, limit, output)
        os._exit(code)
    until = time.monotonic() + 20 * limit  # of real time, for what hangs without computing
    while True:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > until:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # what it has started
    taken = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(status):
        return ("timeout" if os.WTERMSIG(status) in {signal.SIGXCPU, signal.SIGKILL} else "crash"), taken
    return {0: "survived", 1: "killed"}.get(os.WEXITSTATUS(status), "error"), taken


def run(options: argparse.Namespace) -> None:
    results = read(options.results)
    tests = Tests(options.map)
    chosen = mutants(options.only, options.sample, options.seed)
    if options.again:
        chosen = [m for m in chosen if results.get(m.key, {}).get("verdict") in LIVE]
        excused = equivalent()
        chosen = [m for m in chosen if m.key not in excused]
    else:
        chosen = [m for m in chosen if m.key not in results]
    random.Random(options.seed).shuffle(chosen)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, options.results.open("a") as file:
        for mutant in chosen:
            if time.monotonic() - began > options.minutes * 60:
                break
            selected = tests.of(mutant, options.seconds)
            outcome, taken = "untested", 0.0
            if selected:
                normal = sum(tests.known[test]["seconds"] for test in selected)
                outcome, taken = verdict(mutant, selected, normal, Path(folder))
            found = {"key": mutant.key, "line": mutant.line, "verdict": outcome, "seconds": round(taken, 2)}
            found |= {"tests": len(selected)}
            if outcome == "error":
                found["output"] = (Path(folder) / "output.txt").read_text()[-500:]
            file.write(json.dumps(found) + "\n")
            file.flush()


def read(path: Path) -> dict[str, Any]:
    """The last verdict of each mutant."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {found["key"]: found for found in map(json.loads, lines)}


def equivalent() -> dict[str, str]:
    """The mutants that matter to no result -> the reason."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    pairs = (line.rpartition("  # ") for line in lines if line and not line.startswith("#"))
    return {key.strip(): reason for key, _, reason in pairs}


def report(options: argparse.Namespace) -> None:
    """A table of the modules; before it, if asked for, the mutants that are left."""
    results, excused = read(options.results), equivalent()
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants(options.only):
        room = mutant.module.partition("/")[0]
        found = results.get(mutant.key)
        for name in (mutant.module, room + ", in all"):
            total[name]["made"] += 1
            if found:
                killed = found["verdict"] not in LIVE
                total[name]["killed" if killed else "excused" if mutant.key in excused else "left"] += 1
        if (
            options.left
            and found
            and found["verdict"] in {"survived", "error", "untested"}
            and mutant.key not in excused
        ):
            print(f"{found['verdict']:8} {mutant.line:4} {mutant.key}")
    print("| module | mutants | tried | without effect | killed | left |\n|---|---|---|---|---|---|")
    for name, n in total.items():
        tried, matter = n["killed"] + n["excused"] + n["left"], n["killed"] + n["left"]
        share = f" ({100 * n['killed'] / matter:.0f} %)" if matter else ""
        print(f"| {name} | {n['made']} | {tried} | {n['excused']} | {n['killed']}{share} | {n['left']} |")


def in_a_copy(arguments: Sequence[str]) -> int:
    """Start this script in a copy of the tree, with one thread for each library."""
    with tempfile.TemporaryDirectory(prefix="mutants-tree-") as folder:
        copy = Path(folder) / "lsuv"
        shutil.copytree(TREE, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache"))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        variables = os.environ | threads | {"PYTHONPATH": str(copy), "LSUV_MUTANTS": "copy", "PYTHONHASHSEED": "0"}
        os.chdir(copy)
        return os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "tests/mutants.py", *arguments], variables)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    mapping = commands.add_parser("map")
    mapping.add_argument("map", type=Path)
    mapping.add_argument("tests", nargs="+")
    running = commands.add_parser("run")
    running.add_argument("map", type=Path)
    running.add_argument("--sample", type=int, default=0, help="at most this many of each module")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--seconds", type=float, default=5.0, help="of tests for each mutant")
    running.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    running.add_argument("--again", action="store_true", help="those that survived")
    reporting = commands.add_parser("report")
    reporting.add_argument("--left", action="store_true", help="list the mutants that are left")
    for command in (running, reporting):
        command.add_argument("results", type=Path)
        command.add_argument("--only", nargs="*", default=[], help="modules, by a part of their name")
    options = parser.parse_args()
    for name in ("map", "results"):
        if hasattr(options, name):
            setattr(options, name, getattr(options, name).resolve())
    if options.command == "report":
        report(options)
    elif os.environ.get("LSUV_MUTANTS") != "copy":
        return in_a_copy([str(x.resolve()) if isinstance(x, Path) else x for x in sys.argv[1:]])
    elif options.command == "map":
        return int(pytest.main([*options.tests, "-p", "no:cacheprovider"], plugins=[Recorder(options.map)]))
    else:
        for name in ("hypothesis", "numpy", "onnx.parser", "onnx.reference", "rich.console", "typer"):
            importlib.import_module(name)  # once, before the forks
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
