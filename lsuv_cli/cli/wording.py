"""Messages in the words of the command: `batch_size=4`, as a Python caller reads it, becomes --batch-size 4.

The rest of the package names arguments as Python writes them, in backticks (see errors.py). The command
translates every message here before it prints it: errors, and the warnings and notes of a report.
"""

from __future__ import annotations

import ast
import dataclasses
import re

from lsuv_cli.report import Report
from lsuv_cli.settings import ABOUT

ARGUMENTS = (
    *ABOUT,
    *("data", "output", "weights", "like", "force", "dry_run", "without_weights"),
    *("inits", "dump", "keep", "larger_than"),
)
"""The arguments of the Python functions that are options of the command."""

_NAMED = re.compile(rf"`({'|'.join(ARGUMENTS)})(?:=([^`]*))?`")


def flag(name: str, *, on: bool = True) -> str:
    """The command-line option of an argument: `batch_size` -> --batch-size."""
    return f"--{'' if on else 'no-'}{name.replace('_', '-')}"


def as_typed(message: str) -> str:
    """A message with options in place of arguments."""
    return _NAMED.sub(_option, message)


def report_as_typed(report: Report) -> Report:
    """A report whose warnings and notes speak of options."""
    layers = tuple(
        dataclasses.replace(layer, notes=tuple(map(as_typed, layer.notes))) if layer.notes else layer
        for layer in report.layers
    )
    return dataclasses.replace(report, layers=layers, warnings=tuple(map(as_typed, report.warnings)))


def _option(argument: re.Match[str]) -> str:
    name, text = argument.groups()
    if text is None:
        return flag(name)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return flag(name, on=value) if isinstance(value, bool) else f"{flag(name)} {value}"
