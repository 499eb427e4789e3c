"""Names of layers as labels of a bounded width: names that differ stay different."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len

from lsuv_cli.text import printable

MOST_MARKS = 8  # characters in a cell (a letter and its accents): longer names are not measured, which takes its time


def label(name: str) -> str:
    """A name on one line; a name of blanks, which nobody would see, in quotes."""
    return printable(name) if name.strip() else repr(name)


def distinct(names: Sequence[str], width: int) -> list[str]:
    """Names cut to a width such that different ones stay different, if that can be.

    1. All are cut at the same place, where that tells them apart.
    2. Of names that would look the same, the characters are shown by which each differs from any other name, and what
       follows them as far as there is room: …0.attn…q_proj….
    """
    head = _head(names, width)
    shown = [elided(name, width, head) for name in names]
    alike: dict[str, set[str]] = {}
    for name, cut in zip(names, shown, strict=True):
        alike.setdefault(cut, set()).add(name)
    if all(len(others) == 1 for others in alike.values()):
        return shown
    places = _differences(sorted(set(names)))
    for k, name in enumerate(names):
        if len(alike[shown[k]]) > 1:
            shown[k] = _windows(name, places[name], width)
    return shown


def elided(name: str, width: int, head: int | None = None) -> str:
    """A name, without its middle if it is too long: names differ at both ends. `head` is the width before the cut."""
    if len(name) <= MOST_MARKS * width and cell_len(name) <= width:
        return name
    start = _fitting(name, (width - 1) // 2 if head is None else head)
    tail = _fitting(reversed(name), width - 1 - cell_len(start))[::-1]
    return f"{start}…{tail}"


def _head(names: Sequence[str], width: int) -> int:
    """The head nearest to one half with which names that differ do so after the cut; one half if there is none."""
    half = (width - 1) // 2
    different = set(names)
    heads = sorted(range(width), key=lambda head: abs(head - half))
    return next((head for head in heads if len({elided(x, width, head) for x in different}) == len(different)), half)


def _differences(names: Sequence[str]) -> dict[str, set[int]]:
    """Name -> the places at which it first differs from some other one, for names in sorted order.

    The first difference of two names is the least of those between neighbours on the way from one to the other.
    """
    steps = [_first_difference(a, b) for a, b in itertools.pairwise(names)]
    return {
        name: {*itertools.accumulate(steps[k:], min), *itertools.accumulate(reversed(steps[:k]), min)}
        for k, name in enumerate(names)
    }


def _first_difference(a: str, b: str) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _windows(name: str, places: Iterable[int], width: int) -> str:
    """The characters of a name at places, numbers whole, with as much of what follows as a width allows."""
    seen: set[int] = set()
    for place in sorted(places):
        seen |= set(_number_at(name, min(place, len(name) - 1)))
    text = _cut(name, seen)
    grown = True
    while grown:
        grown = False
        for end in [k + 1 for k in sorted(seen) if k + 1 < len(name) and k + 1 not in seen]:
            longer = _cut(name, seen | {end})
            if cell_len(longer) <= width:
                seen.add(end)
                text, grown = longer, True
    return text if cell_len(text) <= width else elided(text, width)


def _number_at(name: str, place: int) -> Iterator[int]:
    """The places of the number that a character belongs to; its own, if it is no digit."""
    yield place
    if name[place].isdigit():
        yield from itertools.takewhile(lambda k: name[k].isdigit(), range(place - 1, -1, -1))
        yield from itertools.takewhile(lambda k: name[k].isdigit(), range(place + 1, len(name)))


def _cut(name: str, seen: set[int]) -> str:
    """The characters at some places, with … for what lies before, between and behind them."""
    parts, last = [], -1
    for place in sorted(seen):
        parts.append(f"{'…' if place > last + 1 else ''}{name[place]}")
        last = place
    return "".join(parts) + ("…" if last < len(name) - 1 else "")


def _fitting(characters: Iterable[str], width: int) -> str:
    """As many of the characters as fit, from the first."""
    fitting = []
    for character in characters:
        width -= cell_len(character)
        if width < 0:
            break
        fitting.append(character)
    return "".join(fitting)
