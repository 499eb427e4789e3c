"""Text for people: names from a file made harmless, numbers of bounded length, plurals, names that share a path."""

from __future__ import annotations

import math
from collections.abc import Sequence

SHORTEST_PREFIX = 4  # characters that are worth a remark
SMALLEST_DECIMAL, LARGEST_DECIMAL = 1e-3, 1e4  # outside of these, numbers are shown with an exponent


def printable(text: str) -> str:
    """A text on one line, with unprintable characters as escapes such as \\x1b and \\n."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def number(value: float | None) -> str:
    """At most eight characters, whatever the size."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or SMALLEST_DECIMAL <= abs(value) < LARGEST_DECIMAL:
        return f"{value:.4f}"[: 7 if value < 0 else 6].rstrip(".")
    return f"{value:.1e}"


def plural(count: int, noun: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{count} {noun}{'s' if count != 1 else ''}"


def decades(variance: float | None, target: float) -> float:
    """log10(variance / target): below 0 it vanishes, above 0 it explodes; NaN where it is not known."""
    if variance is None or math.isnan(variance):
        return math.nan
    if variance <= 0 or math.isinf(variance):
        return math.copysign(math.inf, variance - 0.5)
    return math.log10(variance / target)


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """The names without the path that all of them begin with, and that path."""
    if len(names) < 2:
        return list(names), ""
    low, high = min(names), max(names)
    same = next((k for k, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    cut = max(low.rfind(mark, 0, same) for mark in "/.") + 1
    if cut < SHORTEST_PREFIX:
        return list(names), ""
    return [name[cut:] for name in names], low[:cut]
