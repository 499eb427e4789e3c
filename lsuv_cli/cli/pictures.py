"""The files that show a report: a plot, a page. Checked before any work is done, written when all of it is done."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from lsuv_cli import outputs
from lsuv_cli.errors import LsuvError
from lsuv_cli.outputs import Target

if TYPE_CHECKING:
    from lsuv_cli.report import Comparison, Report

PLOT, HTML, EXPLORER = "--plot", "--html", "--model-explorer"
# A file that is only drawn is overwritten without a question, so its name has to say what it is.
ENDINGS = {PLOT: (".pdf", ".png", ".svg"), HTML: (".html",), EXPLORER: (".json",)}


class Wanted(TypedDict):
    """Keywords that all of the Python functions have."""

    drawn: dict[str, Path]
    details: bool


@dataclass(frozen=True)
class Pictures:
    """What a user wants drawn: option -> file."""

    targets: Mapping[str, Target] = field(default_factory=dict)

    @classmethod
    def check(cls, given: Mapping[str, str | None]) -> Pictures:
        """Refuse files that cannot be drawn, by the options that name them."""
        paths = {option: path for option, path in given.items() if path is not None}
        for option, path in paths.items():
            if Path(path).suffix.lower() not in ENDINGS[option] and (option == PLOT or not path.startswith("/dev/")):
                ends = ENDINGS[option]
                raise LsuvError(f"{option} {path} must end in {'one of ' * (len(ends) > 1)}{', '.join(ends)}")
        targets = outputs.check({}, (), drawn=paths)
        if PLOT in targets:
            try:
                import matplotlib  # noqa: F401  only to see whether it is there
            except ImportError:
                raise LsuvError("--plot needs matplotlib: pip install 'lsuv-cli[plot]'") from None
        return cls(targets)

    def __bool__(self) -> bool:
        return bool(self.targets)

    @property
    def drawn(self) -> dict[str, Path]:
        """Option -> path, for the Python functions to check against all that they read and write."""
        return {option: target.given for option, target in self.targets.items()}

    @property
    def wanted(self) -> Wanted:
        """The keywords of the Python functions that these files ask for."""
        return {"drawn": self.drawn, "details": self.details}

    @property
    def details(self) -> bool:
        """Whether more is to be measured than the report's numbers."""
        return HTML in self.targets

    def draw(self, shown: Report | Comparison, words: Sequence[str]) -> None:
        """Write all files. `words` are the command's, as typed."""
        from lsuv_cli.report import Report

        for option, target in self.targets.items():
            if option == PLOT:
                from lsuv_cli.cli import plot

                plot.draw_shown(shown, target)
            elif option == EXPLORER:
                report = shown if isinstance(shown, Report) else next(iter(shown.values()))
                _write(target, json.dumps(report.to_model_explorer(), indent=1) + "\n")
            else:
                _write(target, shown.to_html(f"lsuv {shlex.join(words)}"))


def _write(target: Target, text: str) -> None:
    with outputs.growing(target) as path:
        path.write_text(text, encoding="utf-8", newline="\n")
        target.deliver(path)
