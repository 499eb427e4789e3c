"""The variance that each layer's output is to have: one number for all layers, and others by their names.

`1`, `"head=0.01"`, `["1", "head=0.01"]` and `{"head": 0.01}` are all read. The plain number is for the layers that no
GLOB matches. Of several GLOBs that match a layer, the last one wins.

Imports nothing heavy: settings.py imports it.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

EVERY = "*"
FORMS = "a number, GLOB=NUMBER, or a list or mapping of these"


@dataclass(frozen=True, repr=False)
class TargetVariances:
    """target(layer) = the number of the last GLOB that matches the layer's name or its module's path, or `default`."""

    default: float = 1.0
    by_glob: tuple[tuple[str, float], ...] = ()

    def of(self, name: str, module: str = "") -> float:
        """A layer's target."""
        chosen = self.named(name, module)
        return self.default if chosen is None else chosen

    def named(self, name: str, module: str = "") -> float | None:
        """The number of the last GLOB that matches a layer; None if there is none."""
        hits = [x for glob, x in self.by_glob if matches(glob, name, module)]
        return hits[-1] if hits else None

    @property
    def globs(self) -> tuple[str, ...]:
        return tuple(glob for glob, _ in self.by_glob)

    @property
    def values(self) -> tuple[float, ...]:
        return (self.default, *(x for _, x in self.by_glob))

    def to_json(self) -> float | dict[str, float]:
        """The default alone if there is no GLOB, else a mapping whose last match wins; `read` takes both."""
        return {EVERY: self.default, **dict(self.by_glob)} if self.by_glob else self.default

    def __repr__(self) -> str:
        return repr(self.to_json())

    def __str__(self) -> str:
        return ", ".join([str(self.default), *(f"{glob}={x}" for glob, x in self.by_glob)])


def matches(glob: str, name: str, module: str = "") -> bool:
    """Whether a user's pattern matches a layer's name or its module's path."""
    return fnmatchcase(name, glob) or (bool(module) and fnmatchcase(module, glob))


def read(given: object) -> TargetVariances:
    """Targets from a number, text, a list or a mapping; a ValueError for anything else."""
    if isinstance(given, TargetVariances):
        return given
    default, by_glob = 1.0, dict[str, float]()
    for glob, number in _pairs(given):
        if not glob or (glob == EVERY and not by_glob):
            default = number
        else:
            by_glob.pop(glob, None)  # so that a GLOB given again counts as the last one
            by_glob[glob] = number
    return TargetVariances(default, tuple(by_glob.items()))


def _pairs(given: object) -> Iterator[tuple[str, float]]:
    """(GLOB, number) for each item; the GLOB of a plain number is empty."""
    if isinstance(given, Mapping):
        for glob, number in given.items():
            if not isinstance(glob, str) or not glob:
                raise ValueError(glob)
            yield glob, _number(number)
    elif isinstance(given, str):
        glob, sign, number = given.rpartition("=")
        if sign and not glob:
            raise ValueError(given)
        yield glob, float(number)
    elif isinstance(given, Iterable):
        for item in given:
            yield from _pairs(item)
    else:
        yield "", _number(given)


def _number(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise ValueError(given)
    return float(given)
