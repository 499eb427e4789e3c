"""Several models at once: each is one task of Ray, in a process apart, so that one that crashes ends alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lsuv_cli import scratch
from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.progress import Listener
from lsuv_cli.report import Report, WorkerReport
from lsuv_cli.scratch import Scratch
from lsuv_cli.settings import Settings
from lsuv_cli.workers.cluster import Cluster, Slot, opened
from lsuv_cli.workers.worker import Failure, whereabouts

MOST_NODES_LOST = 3  # while one model is worked on
CRASHED = (
    "the run crashed, most likely inside onnxruntime on this model, or memory ran out; the input is untouched, and no "
    "half-written file is left"
)

Work = Callable[[Any, int], Report]  # a request and a number of threads -> its report
Outcome = Callable[[], Report]  # the report, or an exception


@dataclass(frozen=True)
class Places:
    """What every worker has to see, to be of use: files that are read, and the directory that is written to."""

    read: tuple[Path, ...]
    written: Path | None


def at_once(
    work: Work, requests: Sequence[Any], places: Places, settings: Settings, listen: Listener
) -> Iterator[tuple[int, Outcome]]:
    """Work on the requests, as many at once as there are workers. Yields (place in the list, outcome) as they end."""
    with opened(settings) as cluster:
        idle = _seeing(cluster, places)
        task = cluster.ray.remote(max_retries=0)(_one)
        waiting = list(range(len(requests)))
        under_way: dict[Any, tuple[int, Slot]] = {}
        lost = [0] * len(requests)
        ended = 0
        listen("models", 0, len(requests))
        while waiting or under_way:
            while waiting and idle:
                index, slot = waiting.pop(0), idle.pop(0)
                given = (work, requests[index], slot.threads, str(Path.cwd()))
                under_way[task.options(**slot.options).remote(*given)] = index, slot
                cluster.watch()
            (reference,), _ = cluster.ray.wait(list(under_way), num_returns=1)
            index, slot = under_way.pop(reference)
            idle.append(slot)
            outcome = _outcome(cluster.ray, reference, places.written)
            if outcome is None and lost[index] + 1 < MOST_NODES_LOST:
                lost[index] += 1
                waiting.insert(0, index)
                continue
            ended += 1
            listen("models", ended, len(requests))
            yield index, outcome or _raising(ModelError("its nodes were lost one after another; start it again"))


def _one(work: Work, request: Any, threads: int, directory: str) -> Report | Failure:
    """One request, in a process of Ray."""
    with contextlib.suppress(OSError):
        os.chdir(directory)
    try:
        report = work(request, threads)
    except (LsuvError, MemoryError) as problem:
        return Failure(problem)
    here = WorkerReport(*whereabouts(), os.getpid(), report.device, report.batches, "read" if report.batches else "")
    return replace(report, workers=(here,))


def _outcome(ray: Any, reference: Any, written: Path | None) -> Outcome | None:
    """How a task ended; None if its node was lost."""
    try:
        result = ray.get(reference)
    except (ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError):
        return None
    except ray.exceptions.RayTaskError as problem:
        return _raising(problem.cause)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError):
        if written is not None:
            scratch.sweep(written)
        return _raising(ModelError(CRASHED))
    if isinstance(result, Failure):
        return _raising(result.problem)
    return lambda: result


def _raising(problem: BaseException) -> Outcome:
    def outcome() -> Report:
        raise problem

    return outcome


def _seeing(cluster: Cluster, places: Places) -> list[Slot]:
    """The room for workers on nodes that see everything they need."""
    sees = cluster.ray.remote(num_cpus=0, max_retries=1)(_sees)
    with contextlib.ExitStack() as stack:
        marks = [str(path.absolute()) for path in places.read]
        if places.written is not None:
            marks.append(str(stack.enter_context(Scratch(places.written)).path.absolute()))
        where = [{k: v for k, v in slot.options.items() if k == "scheduling_strategy"} for slot in cluster.slots]
        answers = cluster.ray.get([sees.options(**each).remote(marks) for each in where])
    seeing = [slot for slot, answer in zip(cluster.slots, answers, strict=True) if answer]
    if not seeing:
        raise LsuvError(
            "no worker sees the models, the data and the output directory; use a file system that all share"
        )
    return seeing


def _sees(paths: Sequence[str]) -> bool:
    return all(map(os.path.exists, paths))
