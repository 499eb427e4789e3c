"""Progress: the listener that a request calls while it works."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, int, int], None]
"""Called with the phase ("scaling", "verifying"), the steps done and the steps in all."""


def silent(phase: str, done: int, total: int) -> None:
    """A listener that does nothing."""
