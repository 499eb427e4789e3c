"""Several models in one command: one after another, each in a process of its own, or several at once by workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from lsuv_cli.cli import child_process
from lsuv_cli.cli import options as o
from lsuv_cli.progress import Listener

if TYPE_CHECKING:
    from lsuv_cli.report import Report

Outcome = Callable[[], "Report"]  # the report, or an exception


def one_by_one(count: int, initialized: Callable[[int], Report]) -> Iterator[tuple[int, Outcome]]:
    """The models in turn; one that crashes native code ends alone, where the system can fork."""
    import lsuv_cli.api  # noqa: F401  once, and not in each process

    for index in range(count):
        yield index, functools.partial(child_process.apart, functools.partial(initialized, index))


def at_once(
    models: Sequence[str],
    data: Sequence[str] | None,
    targets: Sequence[str | None],
    writing: o.Writing,
    settings: o.AllSettings,
    listen: Listener,
) -> Iterator[tuple[int, Outcome]]:
    """As many models at once as there are workers, in the order in which they end."""
    from lsuv_cli import model_lists

    requests = [
        model_lists.Request(
            model=model,  # as it is typed: the process that takes it begins in this directory
            data=tuple(data or ()),
            output=target,
            force=writing.force,
            dry_run=writing.dry_run,
            without_weights=writing.without_weights,
            settings=settings,
        )
        for model, target in zip(models, targets, strict=True)
    ]
    return model_lists.initialize_each(requests, settings, listen)
