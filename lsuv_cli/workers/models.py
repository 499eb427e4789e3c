"""Several models at once: each is one task of Ray, in a process apart, so that one that crashes ends alone.

A task gets the names of files where its node sees them, else the files themselves; what it writes then comes back.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lsuv_cli import scratch, temporary
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.progress import Listener
from lsuv_cli.report import Report, WorkerReport
from lsuv_cli.scratch import Scratch
from lsuv_cli.settings import Settings
from lsuv_cli.workers.cluster import Cluster, Slot, opened
from lsuv_cli.workers.worker import Failure, Sight, sees, whereabouts

MOST_NODES_LOST = 3  # while one model is worked on
CRASHED = (
    "the run crashed, most likely inside onnxruntime on this model, or memory ran out; the input is untouched, and no "
    "half-written file is left"
)

Outcome = Callable[[], Report]  # the report, or an exception


@dataclass(frozen=True)
class Trade:
    """What is done with a request: in the driver (reads, pack, publish) and in a worker (here, apart)."""

    reads: Callable[[Any], list[Path]]  # the files that tell whether a worker sees what the request reads
    here: Callable[[Any, int], Report]  # a request and a number of threads
    pack: Callable[[Any, Callable[[Any], Any]], tuple[Any, list[Any]]]  # a parcel, and what it holds, in the store
    apart: Callable[..., tuple[Report, Any]]  # a parcel, threads, what it holds -> the report, and what was written
    publish: Callable[[Any, Any], None]  # a request, and what was written for it


@dataclass(eq=False)
class Seat:
    """Room for one task, and whether the files of requests are seen from there."""

    slot: Slot
    sees: bool

    @property
    def node(self) -> dict[str, Any]:
        """Ray's options for a task on the same node."""
        return {k: v for k, v in self.slot.options.items() if k == "scheduling_strategy"}


@dataclass(frozen=True)
class Unseen:
    """A worker's answer where it does not see a request's files."""


def at_once(
    trade: Trade, requests: Sequence[Any], written: Path | None, settings: Settings, listen: Listener
) -> Iterator[tuple[int, Outcome]]:
    """Work on the requests, as many at once as there are workers. Yields (place in the list, outcome) as they end.

    `written`: the directory that the requests write to.
    """
    with temporary.swept(written), opened(settings) as cluster:
        office = _Office(cluster, trade, requests, written)
        listen("models", 0, len(requests))
        for ended, (index, outcome) in enumerate(office.outcomes(), 1):
            listen("models", ended, len(requests))
            yield index, outcome


@dataclass
class _Office:
    """The requests that wait, and the tasks that are under way."""

    cluster: Cluster
    trade: Trade
    requests: Sequence[Any]
    written: Path | None
    under_way: dict[Any, tuple[int, Seat]] = field(default_factory=dict)

    def outcomes(self) -> Iterator[tuple[int, Outcome]]:
        idle, waiting = self._seats(), list(range(len(self.requests)))
        lost = [0] * len(self.requests)
        while waiting or self.under_way:
            while waiting and idle:
                index = waiting.pop(0)
                try:
                    self._start(index, idle[0])
                    idle.pop(0)
                except (LsuvError, MemoryError) as problem:
                    yield index, functools.partial(_raise, problem)
            if not self.under_way:
                continue
            (reference,), _ = self.cluster.ray.wait(list(self.under_way), num_returns=1)
            index, seat = self.under_way.pop(reference)
            idle.append(seat)
            outcome = self._outcome(reference, index, seat)
            if isinstance(outcome, Unseen):
                waiting.insert(0, index)
            elif outcome is None and lost[index] + 1 < MOST_NODES_LOST:
                lost[index] += 1
                waiting.insert(0, index)
            else:
                again = ModelError("its nodes were lost one after another; start it again")
                yield index, outcome or functools.partial(_raise, again)

    def _start(self, index: int, seat: Seat) -> None:
        ray, request, threads = self.cluster.ray, self.requests[index], seat.slot.threads
        if seat.sees:
            sights: list[Sight] = []
            with contextlib.suppress(OSError):  # the worker will tell what is wrong
                sights = [Sight.of(path) for path in self.trade.reads(request)]
            given = [_here, self.trade.here, request, sights, threads, str(Path.cwd())]
        else:
            parcel, contents = self.trade.pack(request, ray.put)
            given = [_apart, self.trade.apart, parcel, threads, *contents]
        task = ray.remote(max_retries=0)(given[0]).options(**seat.slot.options)
        self.under_way[task.remote(*given[1:])] = index, seat
        self.cluster.watch()

    def _outcome(self, reference: Any, index: int, seat: Seat) -> Outcome | Unseen | None:
        """How a task ended; None if its node was lost."""
        errors = self.cluster.ray.exceptions
        try:
            result = self.cluster.ray.get(reference)
        except (errors.NodeDiedError, errors.ObjectLostError):
            return None
        except errors.RayTaskError as problem:
            return functools.partial(_raise, problem.cause)
        except (errors.WorkerCrashedError, errors.OutOfMemoryError):
            if not seat.sees:
                self.cluster.ray.remote(num_cpus=0)(_sweep).options(**seat.node).remote()
            elif self.written is not None:
                scratch.sweep(self.written)
            return functools.partial(_raise, ModelError(CRASHED))
        if isinstance(result, Unseen):
            seat.sees = False
            return result
        if isinstance(result, Failure):
            return functools.partial(_raise, result.problem)
        return functools.partial(self._published, index, *result)

    def _published(self, index: int, report: Report, files: Any) -> Report:
        if files is not None:
            self.trade.publish(self.requests[index], files)
        return report

    def _seats(self) -> list[Seat]:
        """The room for tasks, and from where the directory that is written to is seen."""
        look = self.cluster.ray.remote(num_cpus=0, max_retries=1)(os.path.exists)
        seats = [Seat(slot, True) for slot in self.cluster.slots]
        if self.written is not None:
            with Scratch(self.written) as mark:
                asked = [look.options(**seat.node).remote(str(mark.path.absolute())) for seat in seats]
                for seat, answer in zip(seats, self.cluster.ray.get(asked), strict=True):
                    seat.sees = answer
        return seats


def _here(
    work: Callable[[Any, int], Report], request: Any, sights: Sequence[Sight], threads: int, directory: str
) -> tuple[Report, None] | Failure | Unseen:
    """One request, in a process of Ray, with the files where they are."""
    with contextlib.suppress(OSError):
        os.chdir(directory)
    if not sees(sights):
        return Unseen()
    try:
        return _signed(work(request, threads), "read"), None
    except (LsuvError, MemoryError) as problem:
        return Failure(problem)


def _apart(
    work: Callable[..., tuple[Report, Any]], parcel: Any, threads: int, *contents: Any
) -> tuple[Report, Any] | Failure:
    """One request, in a process of Ray, with the files that were sent."""
    try:
        report, files = work(parcel, threads, *contents)
    except (LsuvError, MemoryError) as problem:
        return Failure(problem)
    return _signed(report, "sent"), files


def _signed(report: Report, way: str) -> Report:
    """The report with this process as its worker."""
    data = way if report.batches else ""
    me = WorkerReport(*whereabouts(), os.getpid(), report.device, report.batches, data, report.device_reason)
    return replace(report, workers=(me,))


def _sweep() -> None:
    """Remove what a crashed task left in the temporary directory of its node."""
    scratch.sweep(Path(tempfile.gettempdir()))


def _raise(problem: BaseException) -> Report:
    raise problem
