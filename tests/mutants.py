# mypy: disable-error-code="attr-defined"
"""Mutation testing of `lsuv_cli/scaling` and `lsuv_cli/model`: how many of the mutants do the tests notice?

    python tests/mutants.py map MAP TESTS...   # which lines each test runs, and its time (Python 3.12 or newer)
    python tests/mutants.py run MAP RESULTS    # goes on where it was stopped; --only, --share, --rest, --again
    python tests/mutants.py report RESULTS

1. A mutant (mutations.py) runs in a fork of a process that has collected all tests and run none, so that no session of
   onnxruntime has threads. There its function gets the changed code, or its name the changed value; everything is
   imported anew only for what a class's body says.
2. It gets the tests that run its line: some that have the changed word in their text, those of the file named after the
   module, the twenty that run the fewest lines in all, then one of each file in turn, those of the module's room first
   and the quickest first, until there are --seconds of them; none takes a tenth of that. At the level of the module
   or of a class these are the tests that run a line which reads the name, or one that is computed from it.
3. The first test that fails kills it; so does three times the time that its tests take, of processor time.
4. All runs take place in a copy of the tree: a mutant may write where it should not, and the tree may be edited.

`tests/equivalent_mutants.txt` has the mutants that matter to no result, each with its reason; `report` leaves them out.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import importlib.abc
import importlib.util
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from mutations import Mutant, of_module

TREE = Path(__file__).resolve().parent.parent
ROOMS = ("scaling", "model")
EQUIVALENT = TREE / "tests" / "equivalent_mutants.txt"
SOURCES = "sources"  # in a map: the modules as they were
LIVE = {"survived", "error", "untested"}  # verdicts; the others are killed, timeout and crash
PLAIN = (int, float, str, bytes, tuple, list, set, frozenset, dict, re.Pattern)
OVERHEAD = 6.0  # seconds of imports and collection that a mutant may take besides its tests


def modules() -> list[str]:
    return [f"{room}/{path.name}" for room in ROOMS for path in sorted((TREE / "lsuv_cli" / room).glob("*.py"))]


def mutants(only: Sequence[str] = (), share: float = 1.0, seed: int = 0, rest: bool = False) -> list[Mutant]:
    """The mutants of all modules, or this share of each (rounded up) or the rest, in an order that the seed decides."""
    drawn: list[Mutant] = []
    for module in modules():
        if not only or any(word in module for word in only):
            made = list(of_module(module, (TREE / "lsuv_cli" / module).read_text()))
            random.Random(f"{seed} {module}").shuffle(made)
            here = math.ceil(share * len(made))
            drawn += made[here:] if rest else made[:here]
    return drawn


class Recorder:
    """A pytest plugin: the lines of `lsuv_cli` that each test runs, and how long it takes."""

    def __init__(self, path: Path) -> None:
        self.path, self.package = path, str(TREE / "lsuv_cli") + os.sep
        self.known = load(path)
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


def load(path: Path) -> dict[str, Any]:
    """A map, with the numbers that its lines have now."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    moved = {module: _moved(module, text) for module, text in known.pop(SOURCES, {}).items()}
    for found in known.values():
        for module, lines in found["lines"].items():
            if module in moved:
                found["lines"][module] = [moved[module][number] for number in lines if number in moved[module]]
    return known


def _moved(module: str, source: str) -> dict[int, int]:
    """Where the lines of a module have been moved to since the map was made."""
    before, after = source.splitlines(), Path(_file(module)).read_text().splitlines()
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    return {one + k + 1: other + k + 1 for one, other, size in blocks for k in range(size)}


class Tests:
    """Which tests a mutant gets."""

    def __init__(self, path: Path) -> None:
        self.known = load(path)
        self.by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.size = {test: sum(map(len, found["lines"].values())) for test, found in self.known.items()}
        self.texts: dict[str, dict[str, str]] = {}  # file -> test -> its source
        self.readers: dict[str, set[tuple[str, int]]] = defaultdict(set)  # name -> the lines that read it
        for test, found in self.known.items():
            for module, numbers in found["lines"].items():
                for number in numbers:
                    self.by_line[module, number].add(test)
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
        room, stem = mutant.module.removesuffix(".py").split("/")
        quick = [
            test for test in covering if self.known[test]["seconds"] <= seconds / 10 or f"test_{stem}." in test
        ] or covering
        words = [w for w in map(_word, ast.walk(mutant.place.before)) if len(w) > 2]
        specific = sorted(quick, key=lambda test: (self.size[test], test))
        chosen = [test for test in specific if any(word in self.text(test) for word in words)][:20]
        own = [test for test in specific if f"test_{stem}." in test][:300]
        chosen += [test for test in dict.fromkeys([*own, *specific[:20]]) if test not in chosen]
        for test in sorted(quick, key=lambda test: (self.known[test]["seconds"], test)):
            files[test.partition("::")[0]].append(test)

        def distance(file: str) -> tuple[bool, bool, bool, str]:
            return f"test_{stem}" not in file, f"/{room}/" not in file, file.count("/") < 2, file

        total = sum(self.known[test]["seconds"] for test in chosen)
        queues = [files[file] for file in sorted(files, key=distance)]
        for turn in range(max(map(len, queues), default=0)):
            for queue in queues:
                if turn < len(queue) and total < seconds and queue[turn] not in chosen:
                    chosen.append(queue[turn])
                    total += self.known[queue[turn]]["seconds"]
        return chosen

    def text(self, test: str) -> str:
        """A test's name and source."""
        file, _, name = test.partition("::")
        if file not in self.texts:
            source = (TREE / file).read_text()
            functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
            lines = source.splitlines()
            self.texts[file] = {
                f.name: "\n".join(lines[min([f, *f.decorator_list], key=lambda n: n.lineno).lineno - 1 : f.end_lineno])
                for f in functions
            }
        return name + self.texts[file].get(name.partition("[")[0], "")

    def _of_assignment(self, mutant: Mutant) -> set[str]:
        """Of a line at the level of a module or a class: the tests that run a line which reads what is assigned.

        A test of the module may also name it without running any line of the module.
        """
        names = _derived(mutant)
        lines = {line for name in names for line in self.readers[name]}
        own = f"test_{mutant.module.removesuffix('.py').split('/')[1]}."
        naming = {test for test in self.known if own in test and any(name in self.text(test) for name in names)}
        return naming | {test for line in lines for test in self.by_line.get(line, ())}

    def _nearby(self, mutant: Mutant) -> set[str]:
        """The tests that run another line of the innermost function or class that has the mutant's line."""
        spans = [
            range(node.lineno, (node.end_lineno or 0) + 1)
            for node in ast.walk(mutant.place.tree)
            if isinstance(node, ast.stmt) and mutant.line in range(node.lineno, (node.end_lineno or 0) + 1)
        ]
        for span in sorted(spans, key=len):
            if found := {test for number in span for test in self.by_line.get((mutant.module, number), ())}:
                return found
        return set()


class Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a mutant in place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.file = _name(mutant.module), _file(mutant.module)
        self.code = mutant.code(self.file)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        known = fullname == self.name
        return importlib.util.spec_from_file_location(fullname, self.file, loader=self) if known else None

    def exec_module(self, module: ModuleType) -> None:
        exec(self.code, module.__dict__)


class Workshop:
    """A pytest plugin that runs mutants in place of the loop over the tests: each in a fork, with its own tests."""

    def __init__(self, chosen: Sequence[Mutant], tests: Tests, options: argparse.Namespace) -> None:
        self.chosen, self.tests, self.options = chosen, tests, options
        self.items: dict[str, pytest.Item] = {}
        self.functions: dict[str, list[FunctionType]] = defaultdict(list)  # file -> its functions
        self.failed = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        began = time.monotonic()
        self.items = {item.nodeid: item for item in session.items}
        for each in gc.get_objects():
            if isinstance(each, FunctionType):
                self.functions[each.__code__.co_filename].append(each)
        gc.freeze()
        with self.options.results.open("a") as file:
            for mutant in self.chosen:
                if time.monotonic() - began > self.options.minutes * 60:
                    break
                selected = [test for test in self.tests.of(mutant, self.options.seconds) if test in self.items]
                outcome, taken = self.verdict(mutant, selected) if selected else ("untested", 0.0)
                found = {"key": mutant.key, "verdict": outcome, "seconds": round(taken, 2), "tests": len(selected)}
                file.write(json.dumps(found) + "\n")
                file.flush()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed

    def verdict(self, mutant: Mutant, tests: Sequence[str]) -> tuple[str, float]:
        """What becomes of a mutant, and the processor time it takes."""
        limit = 3 * sum(self.tests.known[test]["seconds"] for test in tests) + OVERHEAD
        pid = os.fork()
        if not pid:
            os._exit(self.child(mutant, tests, limit))
        until = time.monotonic() + 20 * limit  # of real time, for what hangs without computing
        while True:
            done, status, used = os.wait4(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        taken = used.ru_utime + used.ru_stime
        if os.WIFSIGNALED(status):
            return ("timeout" if os.WTERMSIG(status) in {signal.SIGXCPU, signal.SIGKILL} else "crash"), taken
        return {0: "survived", 1: "killed"}.get(os.WEXITSTATUS(status), "error"), taken

    def child(self, mutant: Mutant, tests: Sequence[str], limit: float) -> int:
        """In the fork: run the tests with the mutant in place. 0: all passed, 1: killed, 3: something else is wrong."""
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 1))
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
        try:
            if not self.patched(mutant):
                return self.imported(mutant, tests)
            chosen = [self.items[test] for test in tests]
            for item, following in zip(chosen, [*chosen[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.failed:
                    return 1
        except BaseException:
            traceback.print_exc()
            return 3
        return 0

    def patched(self, mutant: Mutant) -> bool:
        """Put a mutant's function, or the value that it assigns, in place of the module's; False if that cannot be."""
        file = _file(mutant.module)
        code = mutant.code(file)
        if mutant.place.function and not mutant.place.is_class:
            parts = dict(_parts(code))
            changed = [(f, parts.get(_label(f.__code__), f.__code__)) for f in self.functions[file]]
            changed = [(f, new) for f, new in changed if new != f.__code__]
            if any(len(f.__code__.co_freevars) != len(new.co_freevars) for f, new in changed):
                return False
            for function, new in changed:
                function.__code__ = new
            return bool(changed)
        if mutant.place.function or not _assigned(mutant):
            return False
        module = sys.modules[_name(mutant.module)]
        made = {**module.__dict__}
        try:
            exec(code, made)
        except Exception:
            return False  # `imported` finds the same
        # What is computed from the changed value is changed as well.
        for name, given in list(module.__dict__.items()):
            if isinstance(given, PLAIN) and made[name] != given:
                for user in [m for n, m in sys.modules.items() if n.startswith("lsuv_cli")]:
                    if user.__dict__.get(name, self) is given:
                        setattr(user, name, made[name])
        return True

    def imported(self, mutant: Mutant, tests: Sequence[str]) -> int:
        """Import everything anew, with the mutant, in a session of its own."""
        mine = ("lsuv_cli", "test_", *(path.stem for path in (TREE / "tests").glob("*.py")))
        for name in [name for name in sys.modules if name.startswith(mine) and name != "mutants"]:
            del sys.modules[name]
        sys.meta_path.insert(0, Instead(mutant))
        try:
            importlib.import_module(_name(mutant.module))
        except BaseException:
            return 1
        code = int(pytest.main([*tests, "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]))
        return code if code in {0, 1} else 3


def _name(module: str) -> str:
    return "lsuv_cli." + module.removesuffix(".py").replace("/", ".")


def _file(module: str) -> str:
    return str(TREE / "lsuv_cli" / module)


def _word(node: ast.AST) -> str:
    """The text of a constant, if it is one word."""
    text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return "" if " " in text else text


def _label(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _parts(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The functions of a module or class, by name and first line."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield _label(part), part
            yield from _parts(part)


def _derived(mutant: Mutant) -> set[str]:
    """The names that are assigned, and those that the module computes from them."""
    names = set(_assigned(mutant))
    for node in mutant.place.tree.body if names else ():
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        if names & {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return names


def _assigned(mutant: Mutant) -> list[str]:
    """The names that a statement at the level of the module, or of the class that the mutant is in, gives a value."""
    bodies = [mutant.place.tree.body]
    if mutant.place.is_class:
        bodies = [node.body for node in ast.walk(mutant.place.tree) if isinstance(node, ast.ClassDef)]
    for node in itertools.chain(*bodies):
        if node.lineno <= mutant.line <= (node.end_lineno or 0) and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return []


def run(options: argparse.Namespace) -> None:
    results = read(options.results)
    tests = Tests(options.map)
    chosen = mutants(options.only, options.share, options.seed, options.rest)
    if options.again:
        chosen = [m for m in chosen if results.get(m.key, {}).get("verdict") in LIVE]
        excused = equivalent()
        tried = Counter(line["key"] for line in lines_of(options.results))
        chosen = sorted((m for m in chosen if m.key not in excused), key=lambda m: tried[m.key])
    else:
        chosen = [m for m in chosen if m.key not in results]
        random.Random(options.seed).shuffle(chosen)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        files = sorted({test.partition("::")[0] for test in tests.known})
        quiet = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}"]
        pytest.main([*files, *quiet], plugins=[Workshop(chosen, tests, options)])


def read(path: Path) -> dict[str, Any]:
    """The last verdict of each mutant."""
    return {found["key"]: found for found in lines_of(path)}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def equivalent() -> dict[str, str]:
    """The mutants that matter to no result -> the reason."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    pairs = (line.rpartition("  # ") for line in lines if line and not line.startswith("#"))
    return {key.strip(): reason for key, _, reason in pairs}


def report(options: argparse.Namespace) -> None:
    """A table of the modules; before it, if asked for, the mutants that are left."""
    results, excused = read(options.results), equivalent()
    total: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants(options.only, options.share, options.seed, options.rest):
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
        share = f" ({100 * n['killed'] / matter:.0f} %, {_interval(n['killed'], matter)})" if matter else ""
        print(f"| {name} | {n['made']} | {tried} | {n['excused']} | {n['killed']}{share} | {n['left']} |")


def _interval(killed: int, n: int, z: float = 1.96) -> str:
    """Wilson's 95 % confidence interval of a proportion."""
    middle, half = (killed + z**2 / 2) / (n + z**2), z / (n + z**2) * math.sqrt(killed * (n - killed) / n + z**2 / 4)
    return f"{100 * (middle - half):.0f} to {100 * (middle + half):.0f} %"


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
    running.add_argument("--seconds", type=float, default=2.5, help="of tests for each mutant")
    running.add_argument("--minutes", type=float, default=1e9, help="stop after this time")
    running.add_argument("--again", action="store_true", help="those that survived")
    reporting = commands.add_parser("report")
    reporting.add_argument("--left", action="store_true", help="list the mutants that are left")
    for command in (running, reporting):
        command.add_argument("results", type=Path)
        command.add_argument("--share", type=float, default=1.0, help="of each module's mutants, drawn at random")
        command.add_argument("--rest", action="store_true", help="those that are not in the share")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--only", nargs="*", default=[], help="modules, by a part of their name")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("map", "results") if hasattr(options, name)}
    for name, path in given.items():
        setattr(options, name, path.resolve())
    if options.command == "report":
        report(options)
    elif os.environ.get("LSUV_MUTANTS") != "copy":
        return in_a_copy([str(Path(word).resolve()) if Path(word) in given.values() else word for word in sys.argv[1:]])
    elif options.command == "map":
        return int(pytest.main([*options.tests, "-p", "no:cacheprovider"], plugins=[Recorder(options.map)]))
    else:
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
