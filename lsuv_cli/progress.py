"""Progress: how a caller hears of it while a request is worked on."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, int, int], None]
"""Called with the phase ("scaling", "verifying"), the steps done and the steps in all."""


def silent(phase: str, done: int, total: int) -> None:
    """The listener of a caller who does not want to hear."""
