"""Data from the user's own code: a Python file with a function that yields dicts of arrays by input name.

The convention is that of Polygraphy's --data-loader-script: PATH.py[:FUNCTION], the function `load_data` if none is
named, called without arguments. The file is run because the user named it, with the user's rights and no others;
nothing else in this package runs code from a file. What it prints goes to standard error, because standard output may
carry a model or JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from lsuv_cli.errors import DataError

FUNCTION = "load_data"
MODULE = "lsuv_data_loader"  # the name under which the file is run

_NAMED = re.compile(r"(?P<path>.+\.py)(?::(?P<function>\w+))?")


@dataclass(frozen=True)
class Loader:
    """A Python file and the name of the function in it that yields the data."""

    path: Path
    function: str = FUNCTION

    def __str__(self) -> str:
        return f"{self.path}:{self.function}"

    def batches(self) -> Iterator[Any]:
        """What the function yields, one by one; any exception on the way as one line."""
        with self._guarded():
            yielded = self._called()
        if not isinstance(yielded, Iterable) or isinstance(yielded, str | bytes | dict):
            raise DataError(
                f"{self}: gives a {type(yielded).__name__}; let it yield dicts of arrays by input name, one for a batch"
            )
        with self._guarded():
            batches = iter(yielded)
        count = 0
        while True:
            with self._guarded():
                try:
                    batch = next(batches)
                except StopIteration:
                    break
            count += 1
            yield batch
        if not count:
            raise DataError(f"{self}: yields nothing; let it yield at least one dict of arrays")

    def _called(self) -> Any:
        module = self._module()
        function = getattr(module, self.function, None)
        if not callable(function):
            others = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise DataError(
                f"{self.path}: has no function {self.function!r}; name one as {self.path}:FUNCTION"
                + (f" (it has {', '.join(others[:6])})" if others else "")
            )
        return function()

    def _module(self) -> ModuleType:
        if not self.path.is_file():
            raise DataError(f"{self.path}: no such file; give a Python file with a function that yields the data")
        spec = importlib.util.spec_from_file_location(MODULE, self.path)
        assert spec is not None and spec.loader is not None  # for a name that ends in .py both are there
        module = importlib.util.module_from_spec(spec)
        sys.modules[MODULE] = module  # dataclasses and pickle of the loader's own look for it there
        spec.loader.exec_module(module)
        return module

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Run the user's code: its modules are found beside it, its output goes to standard error."""
        folder = str(self.path.absolute().parent)
        sys.path.insert(0, folder)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except (DataError, MemoryError):
            raise
        except (Exception, SystemExit) as problem:
            reason = " ".join(str(problem).split()) or "no message"
            raise DataError(
                f"{self}: {type(problem).__name__}{self._line(problem)}: {reason}; the data loader must not fail"
            ) from problem
        finally:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)

    def _line(self, problem: BaseException) -> str:
        """The line of the loader's own file at which it failed, if it did there."""
        lines = [f.lineno for f in traceback.extract_tb(problem.__traceback__) if f.filename == str(self.path)]
        if isinstance(problem, SyntaxError) and problem.filename == str(self.path):
            lines.append(problem.lineno)
        return f" in line {lines[-1]}" if lines else ""


def named(source: str) -> Loader | None:
    """The loader that a source names as PATH.py or PATH.py:FUNCTION; None if it names something else."""
    match = _NAMED.fullmatch(source)
    return None if match is None else Loader(Path(match["path"]), match["function"] or FUNCTION)
