"""The `lsuv` command; the only package that prints.

Importing it imports next to nothing, and `main` first installs handlers for SIGINT, SIGTERM and SIGHUP, so that the
heavy imports after that can be interrupted.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsuv_cli.cli.commands import app

__all__ = ["app", "main"]

POLITE = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def main(args: Sequence[str] | None = None) -> None:
    """The `lsuv` command as it is typed, or with the given words and in the caller's process."""
    if args is not None:
        from lsuv_cli.cli.commands import run

        run(args)
        return
    try:
        for number in POLITE:
            if signal.getsignal(number) is not signal.SIG_IGN:  # a signal that nohup or a shell ignores stays ignored
                signal.signal(number, _interrupt)
        from lsuv_cli.cli import child_process, terminal

        terminal.make_whole()
        child_process.run(_command, terminal.complain)
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("lsuv: interrupted; nothing was written\n")
        sys.exit(130)


def _interrupt(number: int, frame: object) -> None:
    """End the process at once: nothing was begun yet. An exception could be lost inside of an import."""
    try:  # noqa: SIM105  contextlib takes time to import, during which no request would be answered
        os.write(2, b"lsuv: interrupted; nothing was written\n")
    except OSError:  # no standard error
        pass
    os._exit(130)


def _command() -> None:
    from lsuv_cli.cli import terminal

    with terminal.imports():
        from lsuv_cli.cli.commands import run
    run(None)


def __getattr__(name: str) -> object:
    if name == "app":
        from lsuv_cli.cli.commands import app

        return app
    raise AttributeError(f"module 'lsuv_cli.cli' has no attribute {name!r}")
