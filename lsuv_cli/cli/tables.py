"""Tables of text that fit a terminal: names are shortened, numbers never; columns are dropped if need be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from lsuv_cli.text import printable, short_names

# Columns are dropped rather than names cut below SHORTEST_NAME; columns of rank 1 already below SHORT_NAME.
SHORTEST_NAME, SHORT_NAME = 14, 24


@dataclass(frozen=True)
class Column:
    """A title and a cell for each row. The column of lowest `rank` above 0 is dropped first; rank 0 never is."""

    title: str
    cells: Sequence[str | Text]
    left: bool = False
    rank: int = 0
    names: bool = False  # better names of the rows

    def __post_init__(self) -> None:
        shown = [printable(cell) if isinstance(cell, str) else cell for cell in self.cells]
        object.__setattr__(self, "cells", shown)

    @property
    def width(self) -> int:
        return max(cell_len(self.title), *(_length(cell) for cell in self.cells), 0)


def lines(names: Sequence[str], columns: Sequence[Column], width: int, title: str = "layer") -> Iterator[Text]:
    """The lines of a table whose first column holds names, of layers mostly. Columns that say nothing are left out.

    A column of better names takes their place where there is no room for both.
    """
    names = [printable(name) for name in names]
    used = [column for column in columns if any(_length(cell) for cell in column.cells)]
    longest = max(5, *(cell_len(name) for name in names), 0)
    gap = 2
    while (room := width - sum(column.width + gap for column in used)) < min(longest, SHORT_NAME):
        leaving = min((column for column in used if column.rank), key=lambda column: column.rank, default=None)
        if gap == 2:
            gap = 1
        elif leaving is not None and (leaving.rank == 1 or room < min(longest, SHORTEST_NAME)):
            used.remove(leaving)
            if leaving.names:
                names = [str(cell) or name for cell, name in zip(leaving.cells, names, strict=True)]
                longest = max(5, *(cell_len(name) for name in names), 0)
        else:
            break
    if longest > room:
        names, prefix = short_names(names)
        if prefix:
            longest = max(5, *(cell_len(name) for name in names), 0)
            yield Text(f"all names begin with {elided(prefix, max(width - 21, 8)).rstrip()}", style="dim")
    room = max(min(room, longest), 5)
    yield _line(set_cell_size(title, room), [(column.title, column) for column in used], gap, "bold")
    for name, k in zip(distinct(names, room), range(len(names)), strict=True):
        yield _line(name, [(column.cells[k], column) for column in used], gap)


def distinct(names: Sequence[str], width: int) -> list[str]:
    """Names cut to a width such that different ones stay different, if that can be.

    All are cut at the same place, where that tells them apart. Of names that would look the same, the part that differs
    is shown: …part….
    """
    head = _head(names, width)
    shown = [elided(name, width, head) for name in names]
    alike: dict[str, list[str]] = {}
    for name, cut in zip(names, shown, strict=True):
        if name not in alike.setdefault(cut, []):
            alike[cut].append(name)
    for k, name in enumerate(names):
        others = alike[shown[k]]
        if len(others) > 1:
            low, high = min(others), max(others)
            start = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), 0)
            while start > 0 and name[start - 1].isdigit():  # a number is shown whole
                start -= 1
            shown[k] = set_cell_size(f"…{_fitting(name[start:], width - 2)}…", width)
    return shown


def _line(name: str, cells: Sequence[tuple[str | Text, Column]], gap: int, style: str = "") -> Text:
    line = Text(name, style=style, no_wrap=True, end="")
    for cell, column in cells:
        padding = " " * (column.width - _length(cell))
        line.append(" " * gap)
        for part in (cell, padding) if column.left else (padding, cell):
            line.append(part)
    line.rstrip()
    return line


def _length(cell: str | Text) -> int:
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)


def elided(name: str, width: int, head: int | None = None) -> str:
    """A name, without its middle if it is too long: names differ at both ends. `head` is the width before the cut."""
    if cell_len(name) <= width:
        return set_cell_size(name, width)
    start = _fitting(name, (width - 1) // 2 if head is None else head)
    tail = _fitting(reversed(name), width - 1 - cell_len(start))[::-1]
    return set_cell_size(f"{start}…{tail}", width)


def _head(names: Sequence[str], width: int) -> int:
    """The head nearest to one half with which names that differ do so after the cut; one half if there is none."""
    half = (width - 1) // 2
    different = set(names)
    heads = sorted(range(width), key=lambda head: abs(head - half))
    return next((head for head in heads if len({elided(x, width, head) for x in different}) == len(different)), half)


def _fitting(characters: Iterable[str], width: int) -> str:
    """As many of the characters as fit, from the first."""
    fitting = []
    for character in characters:
        width -= cell_len(character)
        if width < 0:
            break
        fitting.append(character)
    return "".join(fitting)
