"""Text, numbers and JSON as they may stand in HTML."""

from __future__ import annotations

import html
import json
from typing import Any

from lsuv_cli.text import printable

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


def exact(value: float, digits: int = 5) -> str:
    """A number with some digits, and no zeros in its exponent."""
    return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e")
