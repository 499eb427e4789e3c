"""How a setting's value is read: from Python's own types, from numpy's numbers, and from text as it is typed."""

from __future__ import annotations

import contextlib
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypeVar, cast

from lsuv_cli import target_variances
from lsuv_cli.errors import LsuvError
from lsuv_cli.target_variances import TargetVariances

MOST_DIGITS = 18  # digits of a number of samples
NAMED_LIST = re.compile(r"(?:(?P<name>.*):)?\[(?P<numbers>[^\[\]]*)\]", re.DOTALL)

T = TypeVar("T")
Kind = TypeVar("Kind", bound=StrEnum)


class Unfit(Exception):
    """A setting does not take a value; the message says which values it takes."""


@dataclass(frozen=True)
class About:
    """How a setting's value is read, its group, how help shows the value, one line of help, and the limits."""

    read: Callable[[Any], object]
    group: str
    metavar: str
    help: str
    above: float | None = None
    least: float | None = None
    most: float = math.inf
    repeatable: bool = False  # the command takes it several times, and `read` all of them as a list
    text_too: bool = False  # `read` also parses text (8G, all, 0.5,0.5), so the command passes it unparsed

    def value(self, name: str, given: object) -> object:
        """The value as `Settings` holds it, or an error that names the setting."""
        try:
            value = self.read(given)
        except Unfit as problem:
            # An option that was given once is shown as it was typed, not as a list.
            shown = given[0] if self.repeatable and isinstance(given, list | tuple) and len(given) == 1 else given
            raise LsuvError(f"`{name}` {shown!r} is not {problem}") from None
        if isinstance(value, TargetVariances):
            for number in value.values:
                self._check_limits(name, number)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            self._check_limits(name, value)
        return value

    def _check_limits(self, name: str, value: float) -> None:
        below = (self.above is not None and not value > self.above) or (self.least is not None and value < self.least)
        if below or not value <= self.most or not math.isfinite(value):
            lower = f"above {self.above}" if self.above is not None else f"at least {self.least}"
            upper = (
                f" and at most {self.most}" if self.most < math.inf else "" if math.isfinite(value) else " and finite"
            )
            raise LsuvError(f"`{name}` is {value}; it must be {lower}{upper}")


def flag(given: object) -> bool:
    if not isinstance(given, bool):
        raise Unfit("True or False")
    return given


def whole(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):  # numpy's integers are welcome
        raise Unfit("a whole number")
    return int(given)


def number(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise Unfit("a number")
    return float(given)


def text(given: object) -> str:
    if not isinstance(given, str):
        raise Unfit("a string")
    return given


def optional(read: Callable[[object], T]) -> Callable[[object], T | None]:
    return lambda given: None if given is None else read(given)


def one_of(kind: type[Kind]) -> Callable[[str], Kind]:
    def read(given: str) -> Kind:
        try:
            return kind(given)
        except ValueError:
            raise Unfit(f"one of {', '.join(kind)}") from None

    return read


def patterns(given: object) -> tuple[str, ...]:
    """A sequence of patterns; a single string is one pattern."""
    items = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(item, str) for item in items):
        raise Unfit("a pattern or a list of patterns")
    return items


def numbers_of(given: object) -> tuple[float, ...]:
    """One number for all channels, or one for each; as text with commas too."""
    items: Iterable[Any] = (given,)
    if isinstance(given, str | Iterable):
        items = given.split(",") if isinstance(given, str) else given
    with contextlib.suppress(TypeError, ValueError):
        found = tuple(float(item) for item in items)
        if all(map(math.isfinite, found)):
            return found
    raise Unfit("a list of numbers such as 0.485,0.456,0.406")


def named_list(text: str) -> tuple[str, tuple[float, ...]]:
    """NAME:[1,3,224,224] in its two parts; the name is empty where there is none."""
    match = NAMED_LIST.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return match["name"] or "", tuple(float(number) for number in match["numbers"].split(",") if number.strip())


def named_lists(check: Callable[[tuple[float, ...]], bool], wanted: str) -> Callable[[object], tuple[str, ...]]:
    """Reads texts NAME:[...], or a mapping of names to lists, to texts of one form; `check`: are these as `wanted`?"""

    def read(given: object) -> tuple[str, ...]:
        items = [given] if isinstance(given, str) else given
        try:
            if isinstance(given, Mapping):
                items = [f"{name}:{list(numbers)}" for name, numbers in given.items()]
            named = [named_list(item) for item in cast(Iterable[str], items)]
        except (TypeError, ValueError):
            raise Unfit(wanted) from None
        if not all(check(numbers) for _, numbers in named):
            raise Unfit(wanted)
        return tuple(f"{name}:[{','.join(f'{x:.17g}' for x in numbers)}]".removeprefix(":") for name, numbers in named)

    return read


def is_shape(numbers: tuple[float, ...]) -> bool:
    return all(number >= 1 and number == int(number) for number in numbers if math.isfinite(number)) and all(
        map(math.isfinite, numbers)
    )


def is_range(numbers: tuple[float, ...]) -> bool:
    return len(numbers) == 2 and all(map(math.isfinite, numbers)) and numbers[0] <= numbers[1]


def batch_size(given: object) -> int | Literal["all"] | None:
    if given is None:
        return None
    if isinstance(given, str) and given == "all":
        return "all"
    if isinstance(given, str) and given.isdecimal() and len(given) <= MOST_DIGITS:
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < 1:
        raise Unfit("a positive number or all")
    return int(given)


def targets(given: object) -> TargetVariances:
    try:
        return target_variances.read(given)
    except ValueError:
        raise Unfit(target_variances.FORMS) from None


def workers(given: object) -> int | str:
    """A number of workers on this machine, or where a Ray cluster is."""
    if isinstance(given, str) and given.isdecimal() and len(given) <= MOST_DIGITS:
        given = int(given)
    if isinstance(given, str) and (given == "auto" or re.fullmatch(r"ray://[^/\s]+:\d{1,5}", given)):
        return given
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < 1:
        raise Unfit("a positive number, auto, or ray://HOST:PORT")
    return int(given)


def bytes_of(given: object) -> int:
    """A number of bytes, or a text such as 8G."""
    if not isinstance(given, str):
        return whole(given)
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number = given.upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in units else ""
    try:
        size = int(float(number.removesuffix(unit)) * units[unit])
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise Unfit("a size such as 500M or 8G")
    return size
