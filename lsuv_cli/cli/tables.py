"""Tables of text that fit a terminal: names are shortened, numbers never; columns are dropped if need be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from lsuv_cli.labels import distinct, elided, label
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

    @cached_property
    def width(self) -> int:
        return max(cell_len(self.title), *(_length(cell) for cell in self.cells), 0)


def lines(names: Sequence[str], columns: Sequence[Column], width: int, title: str = "layer") -> Iterator[Text]:
    """The lines of a table whose first column holds names, of layers mostly. Columns that say nothing are left out.

    A column of better names takes their place where there is no room for both.
    """
    names = [label(name) for name in names]
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
            yield Text(f"all names begin with {elided(prefix, max(width - 21, 8))}", style="dim")
    room = max(min(room, longest), 5)
    yield _line(set_cell_size(title, room), [(column.title, column) for column in used], gap, "bold")
    for name, k in zip(distinct(names, room), range(len(names)), strict=True):
        yield _line(set_cell_size(name, room), [(column.cells[k], column) for column in used], gap)


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
