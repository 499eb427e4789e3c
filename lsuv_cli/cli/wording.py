"""Messages in the words of the command: `batch_size=4`, as a Python caller reads it, becomes --batch-size 4.

The rest of the package names arguments as Python writes them, in backticks (see errors.py). The command
translates every message here before it prints it: errors, and the warnings and notes of a report.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import TYPE_CHECKING

from lsuv_cli.report import Report
from lsuv_cli.settings import ABOUT

if TYPE_CHECKING:
    from lsuv_cli.examination import Diagnosis

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


def of_a_list(message: str) -> str:
    """A message about one of several models, whose outputs go to --output-dir."""
    return re.sub(r"--output(?![-\w])", "--output-dir", message)


def report_as_typed(report: Report) -> Report:
    """A report whose warnings and notes speak of options."""
    layers = tuple(
        dataclasses.replace(layer, notes=tuple(map(as_typed, layer.notes))) if layer.notes else layer
        for layer in report.layers
    )
    warnings = tuple(map(as_typed, report.warnings))
    return dataclasses.replace(report, layers=layers, warnings=warnings, device_reason=as_typed(report.device_reason))


def diagnosis_as_typed(found: Diagnosis) -> Diagnosis:
    """A diagnosis that speaks of options."""
    problems = tuple(map(as_typed, found.problems))
    return dataclasses.replace(found, problems=problems, device_reason=as_typed(found.device_reason))


def _option(argument: re.Match[str]) -> str:
    name, text = argument.groups()
    if text is None:
        return flag(name)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    return flag(name, on=value) if isinstance(value, bool) else f"{flag(name)} {value}"
