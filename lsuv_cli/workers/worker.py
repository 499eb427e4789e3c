"""A worker: its shares of the batches, the stages that it runs over them, the weights that it draws.

It knows nothing of Ray; `crew.py` makes it an actor. Errors that the driver is to see are returned as `Failure`,
because an exception that passes through Ray comes out as one of Ray's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from onnx import TypeProto

from lsuv_cli.errors import LsuvError
from lsuv_cli.memory import available_memory
from lsuv_cli.scaling import weights
from lsuv_cli.scaling.devices import open_device
from lsuv_cli.scaling.drawing import Draw
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.runner import free_memory
from lsuv_cli.scaling.shares import Batch, Kinds, Share, is_trusted
from lsuv_cli.version import __version__

Array = NDArray[Any]
T = TypeVar("T")

HEAD = 1 << 16  # bytes at the start and at the end of a file by which it is known


@dataclass(frozen=True)
class Place:
    """Where a worker is."""

    host: str
    address: str  # in the Ray cluster
    pid: int
    device: str
    reason: str  # why this device
    memory: int  # bytes of the host's memory that are available
    free: int | None  # bytes that a stage may take there
    own: bool  # the device has memory of its own
    version: str = __version__  # of lsuv-cli there

    @property
    def node(self) -> tuple[str, str]:
        """What the workers of one machine have in common."""
        return self.host, self.address


@dataclass(frozen=True)
class Sight:
    """A data file, as the driver sees it."""

    path: str
    size: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Sight:
        size = path.stat().st_size
        digest = hashlib.sha256()
        with path.open("rb") as file:
            digest.update(file.read(HEAD))
            file.seek(max(size - HEAD, 0))
            digest.update(file.read(HEAD))
        return cls(str(path.absolute()), size, digest.hexdigest())


@dataclass(frozen=True)
class Failure:
    """An error in a worker, to be raised by the driver."""

    problem: BaseException


@dataclass(frozen=True)
class Ran:
    """What a stage left: the sums of each batch, the types of all values that wait, and their bytes in memory."""

    sums: list[list[Any]]
    types: dict[str, TypeProto]
    waiting: int
    refused: tuple[str, ...] = ()  # what the worker's device has not taken so far, so that its host ran it


class Numbered(Sequence[Batch]):
    """The batches of one share, by their numbers in the share: sent one by one, or read where they are."""

    def __init__(self, numbers: Sequence[int], batches: Sequence[Batch] | None) -> None:
        self.numbers, self.batches = numbers, batches
        self.sent: dict[int, Batch] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        number = self.numbers[index]
        return self.sent[number] if self.batches is None else self.batches[number]


class Lost(Exception):
    """A worker is gone, and what it was doing with it."""


class Worker:
    """One process with a device of its own."""

    def __init__(self, device: str, threads: int | None, directory: str) -> None:
        with contextlib.suppress(OSError):
            os.chdir(directory)  # names of data files may be relative
        opened = _guarded(lambda: open_device(device, threads))
        self.problem = opened if isinstance(opened, Failure) else None
        self.device = open_device("cpu", threads) if isinstance(opened, Failure) else opened
        weights.bound_threads(self.device.threads)
        self.batches: dict[int, Numbered] = {}  # by the share's number
        self.shares: dict[tuple[int, int], Share] = {}  # by the pass and the share's number
        self.stopped = False
        self.done = 0

    def place(self) -> Place | Failure:
        """Where this worker is, or why it cannot work there."""
        if self.problem is not None:
            return self.problem
        device, free = self.device, free_memory(self.device)
        host, address = whereabouts()
        return Place(
            host, address, os.getpid(), str(device), device.reason, available_memory(), free, not device.is_host
        )

    def sees(self, files: Sequence[Sight]) -> bool:
        """Whether all files are here, and are what the driver sees."""
        return sees(files)

    def take(self, share: int, numbers: Sequence[int], batches: Sequence[Batch] | None) -> None:
        """Take a share of the data: its batches are read from files here, or sent one by one."""
        self.batches[share] = Numbered(numbers, batches)

    def receive(self, share: int, number: int, batch: Batch) -> None:
        """A batch of a share, sent by the driver. It is copied, because the object store is for what comes and goes."""
        self.batches[share].sent[number] = {name: np.array(array) for name, array in batch.items()}

    def begin(self, work: int, share: int, kinds: Kinds, memory: int) -> None:
        """Begin a pass over a share."""
        self.shares[work, share] = Share(self.batches[share], kinds, self.device, memory)

    def run(self, work: int, share: int, index: int, model: StageModel, inputs: Sequence[str]) -> Ran | Failure:
        """Run a stage over a share. It stops after the very first batch if its moments are not trusted."""
        self.stopped, self.done = False, 0
        mine = self.shares[work, share]
        sums: list[list[Any]] = []

        def go() -> Ran:
            first = mine.batches.numbers[0] == 0 if isinstance(mine.batches, Numbered) else False
            for part in mine.run(index, model, inputs, self._count):
                sums.append(part)
                if self.stopped or (first and len(sums) == 1 and not is_trusted(model, part)):
                    break
            names = sorted(mine.frontier.kept[0]) if mine.frontier.kept and len(sums) == len(mine.batches) else []
            return Ran(sums, mine.types(names), mine.waiting, tuple(dict.fromkeys(self.device.refused)))

        return _guarded(go)

    def keep_only(self, work: int, share: int, names: set[str]) -> None:
        self.shares[work, share].keep_only(names)

    def close(self, work: int) -> None:
        """End a pass."""
        for key in [key for key in self.shares if key[0] == work]:
            self.shares.pop(key).close()

    def draw(self, draw: Draw) -> Array | Failure:
        """A random weight."""
        return _guarded(draw.make)

    # Called while a stage runs, in a thread beside it.

    def stop(self) -> None:
        """End the stage that runs after its present batch."""
        self.stopped = True

    def progress(self) -> int:
        """The batches that the present stage has run."""
        return self.done

    def _count(self, done: int) -> None:
        self.done = done


def sees(files: Sequence[Sight]) -> bool:
    """Whether all files are on this machine, and are what the driver sees."""
    try:
        return all(Sight.of(Path(file.path)) == file for file in files)
    except OSError:
        return False


def whereabouts() -> tuple[str, str]:
    """The name of this host, and its address in the Ray cluster that this process belongs to."""
    ray = sys.modules.get("ray")
    is_in_a_cluster = ray is not None and ray.is_initialized()
    return socket.gethostname(), ray.util.get_node_ip_address() if ray is not None and is_in_a_cluster else ""


def _guarded(work: Callable[[], T]) -> T | Failure:
    try:
        return work()
    except (LsuvError, MemoryError) as problem:
        return Failure(problem)


def free_on_nodes(places: Sequence[Place]) -> int | None:
    """The bytes that a stage may take where the least is free, with the memory of a host shared by its workers."""
    beside = Counter(place.node for place in places)
    known = [p.free if p.own else p.free // beside[p.node] for p in places if p.free is not None]
    return min(known, default=None)
