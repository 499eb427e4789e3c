"""Text, numbers and JSON as they may stand in HTML."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from lsuv_cli.text import printable

SHORTEST_PREFIX = 4  # characters that are worth a remark
LONGEST = 300  # characters of a name; a model may have names of any length


def text(value: object, longest: int = LONGEST) -> str:
    """A text for an element or for an attribute in quotes; unprintable characters are escaped, long texts cut."""
    shown = printable(str(value))
    if len(shown) > longest:
        shown = f"{shown[: longest // 2]}…{shown[-longest // 2 :]}"
    return html.escape(shown)


def data(value: Any) -> str:
    """JSON for a script element: no character of it can end the element or begin another one."""
    plain = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def exact(value: float) -> str:
    """A number with five digits, and no zeros in its exponent."""
    return f"{value:.5g}".replace("e-0", "e-").replace("e+0", "e")


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
