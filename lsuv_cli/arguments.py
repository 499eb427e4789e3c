"""The arguments of the Python functions: their types as keywords, and a check that says which one is of a wrong type.

Settings are checked where they are read (setting_values.py), data where it is fitted to the inputs.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import onnx

from lsuv_cli.errors import LsuvError
from lsuv_cli.outputs import StrPath
from lsuv_cli.progress import Listener, silent
from lsuv_cli.settings import Settings, SettingsDict

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Keywords(SettingsDict, total=False):
    """The keywords that all functions share: the settings, and what a caller wants to hear and to draw."""

    listen: Listener
    drawn: Mapping[str, StrPath] | None
    details: bool


class InitializeKeywords(Keywords, total=False):
    """The keywords of `initialize` besides what it makes."""

    force: bool
    without_weights: bool


@dataclass(frozen=True)
class Call:
    """A call's keywords, taken apart."""

    settings: Settings
    listen: Listener = silent
    drawn: Mapping[str, StrPath] | None = None
    details: bool = False
    force: bool = False
    without_weights: bool = False

    @classmethod
    def of(cls, given: Keywords, *own_too: str, **defaults: object) -> Call:
        """Take keywords apart; those that are not the call's own must be settings."""
        own = {k: v for k, v in given.items() if k in {"listen", "drawn", "details", *own_too}}
        settings = {k: v for k, v in given.items() if k not in own}
        return cls(Settings.of(cast(SettingsDict, defaults | settings)), **cast(Mapping[str, Any], own))


def _is_flag(given: object) -> bool:
    return isinstance(given, bool)


def _is_path(given: object) -> bool:
    return given is None or isinstance(given, str | os.PathLike)


def _is_list_of_strings(given: object) -> bool:
    return isinstance(given, str) or (isinstance(given, Iterable) and all(isinstance(item, str) for item in given))


FLAG, PATH = (_is_flag, "True or False"), (_is_path, "a path")
TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "model": (
        lambda given: isinstance(given, str | os.PathLike | bytes | onnx.ModelProto),
        "a path, the bytes of an ONNX file or a ModelProto",
    ),
    "output": PATH,
    "weights": PATH,
    "dump": PATH,
    "like": (lambda given: _is_path(given) or isinstance(given, Mapping), "a path, or a mapping of names to arrays"),
    "dry_run": FLAG,
    "details": FLAG,
    "force": FLAG,
    "without_weights": FLAG,
    "listen": (callable, "a function of a phase, the steps done and the steps in all"),
    "drawn": (lambda given: given is None or isinstance(given, Mapping), "a mapping of names to paths"),
    "keep": (_is_list_of_strings, "a pattern or a list of patterns"),
}


def checked(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, with an error that names the argument where one is of a wrong type."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:  # an argument too many or too few: Python's own message names the function
            return function(*args, **kwargs)
        for name, given in {**bound, **kwargs}.items():
            is_right, wanted = TYPES.get(name, (None, ""))
            if is_right is not None and not is_right(given):
                raise LsuvError(f"`{name}` {_shown(given)} is not {wanted}")
        return function(*args, **kwargs)

    return call


def _shown(given: object) -> str:
    return repr(given) if isinstance(given, str | int | float | None) else f"of type {type(given).__name__}"
