"""The workers of a request: who has which batches, and who takes over when one is lost.

1. The batches are cut into shares, one after another, as many as there are workers; each worker has one.
2. A worker reads its batches where it sees the same data files as the driver; else they are sent to it, once.
3. A worker that is lost (killed, or its node is gone) is replaced. Where there is no room for another one, a worker
   that is left takes its shares. Either begins with the batches and runs them through the stages that are finished.
4. What loses workers again and again, such as a model that crashes onnxruntime, is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lsuv_cli.errors import LsuvError, ModelError
from lsuv_cli.report import WorkerReport
from lsuv_cli.scaling.drawing import Draw, Drawn
from lsuv_cli.scaling.shares import Batch, Kinds
from lsuv_cli.settings import Settings
from lsuv_cli.version import __version__
from lsuv_cli.workers.cluster import FIRST_SECONDS, Cluster, Slot, opened
from lsuv_cli.workers.draws import DrawnAhead
from lsuv_cli.workers.passes import SharedPass
from lsuv_cli.workers.worker import Failure, Lost, Place, Sight, Worker, free_on_nodes

MOST_LOSSES = 3  # of workers, at one stage or weight
SENT_AT_ONCE = 4  # batches on their way to a worker
MEMORY_RATIO = 0.5  # of a node's memory, for values that wait between stages


@dataclass(frozen=True)
class Hand:
    """A worker as the driver holds it."""

    number: int  # from 1
    slot: Slot
    actor: Any
    place: Place


@dataclass
class Crew:
    """The workers, their shares, and the passes that are under way."""

    cluster: Cluster
    settings: Settings
    hands: dict[int, Hand] = field(default_factory=dict)
    ranges: list[range] = field(default_factory=list)  # the batches of each share
    owner: dict[int, int] = field(default_factory=dict)  # share -> number of the worker that has it
    passes: dict[int, SharedPass] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)  # warnings
    _batches: Sequence[Batch] = ()
    _files: list[Sight] | None = None  # the files that all data is in; None where some of it is not in files
    _whole: Any = None  # the batches in the object store, to be read where the files are seen
    _way: dict[int, str] = field(default_factory=dict)  # worker -> how it got its data
    _begun: int = 0
    _losses: Counter[object] = field(default_factory=Counter)

    # Ray

    @property
    def ray(self) -> Any:
        return self.cluster.ray

    def put(self, value: Any) -> Any:
        """A value in the object store, once for all workers."""
        return self.ray.put(value)

    def get(self, reference: Any) -> Any:
        """What a worker returned; its error is raised. `Lost` if the worker is gone."""
        try:
            result = self.ray.get(reference)
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError) as problem:
            raise Lost(_reason(problem)) from None
        except self.ray.exceptions.RayTaskError as problem:
            raise problem.cause from None
        if isinstance(result, Failure):
            raise result.problem
        return result

    # Workers

    def start(self) -> None:
        """Start all workers."""
        actors = [(slot, self._new(slot)) for slot in self.cluster.slots]
        references = [actor.place.remote() for _, actor in actors]
        ready, _ = self.ray.wait(references, num_returns=len(references), timeout=self.cluster.start_seconds)
        if not ready:
            self.ray.wait(references, num_returns=1, timeout=max(FIRST_SECONDS - self.cluster.start_seconds, 0.0))
        for number, ((slot, actor), reference) in enumerate(zip(actors, references, strict=True), 1):
            place = self._place(reference, 0.1)
            if place is not None:
                self.hands[number] = Hand(number, slot, actor, place)
            else:
                self.ray.kill(actor)  # it would start later, and do nothing
        if not self.hands:
            waited = f"within {FIRST_SECONDS:.0f} s"
            raise LsuvError(f"no worker started {waited}; look at the Ray cluster with `ray status`")
        if len(self.hands) < len(actors):
            begun = f"{len(self.hands)} of {len(actors)} workers started within {self.cluster.start_seconds:.0f} s"
            self.told.append(f"{begun}; Ray may have no room for the others")
        self.cluster.watch()

    def _new(self, slot: Slot) -> Any:
        made = self.ray.remote(max_restarts=0, concurrency_groups={"control": 1})(Worker)
        return made.options(**slot.options).remote(self.settings.device, slot.threads, str(Path.cwd()))

    def _place(self, reference: Any, seconds: float) -> Place | None:
        """Where a worker is, once it has started; None if it does not."""
        try:
            place = self.ray.get(reference, timeout=seconds)
        except self.ray.exceptions.GetTimeoutError:
            return None
        except self.ray.exceptions.RayActorError as problem:
            raise LsuvError(_not_started(problem)) from None
        if isinstance(place, Failure):
            raise place.problem
        assert isinstance(place, Place)
        if place.version != __version__:
            raise LsuvError(f"{place.host} has lsuv-cli {place.version}, this is {__version__}; install the same there")
        return place

    def replace(self, hand: Hand, doing: object, reason: str) -> None:
        """Have the work of a lost worker taken over, if that was not done already. `doing`: what it was lost at."""
        if self.hands.get(hand.number) is not hand:
            return
        self._losses[doing] += 1
        if self._losses[doing] >= MOST_LOSSES:
            raise ModelError(
                f"{MOST_LOSSES} workers were lost one after another at the same work, most likely because onnxruntime "
                f"crashes on this model, or because memory runs out ({reason})"
            )
        with contextlib.suppress(Exception):  # it is gone
            self.ray.kill(hand.actor)
        del self.hands[hand.number]
        shares = [share for share, number in self.owner.items() if number == hand.number]
        another = self._another(hand)
        if another is not None:
            self.hands[hand.number] = another
            takes = "was replaced"
        elif self.hands:
            load = Counter(self.owner.values())
            for share in shares:
                self.owner[share] = min(self.hands, key=lambda number: load[number])
                load[self.owner[share]] += 1
            takes = "its work went to another"
        else:
            raise LsuvError("all workers were lost, and Ray has no room for others; look at it with `ray status`")
        self.cluster.watch()
        self.told.append(f"worker {hand.number} ({hand.place.host}) was lost and {takes}: {reason}")
        for share in shares:
            self._give(share)
            for work in self.passes.values():
                work.replay(share)

    def _another(self, lost: Hand) -> Hand | None:
        """A worker in the place of a lost one, on whatever node has room; None if none has."""
        slot = replace(lost.slot, options={k: v for k, v in lost.slot.options.items() if k != "scheduling_strategy"})
        end = time.monotonic() + self.cluster.replace_seconds
        while (left := end - time.monotonic()) > 0:
            actor = self._new(slot)
            try:
                place = self.ray.get(actor.place.remote(), timeout=left)
            except self.ray.exceptions.GetTimeoutError:
                self.ray.kill(actor)
                return None
            except self.ray.exceptions.RayActorError:
                # Ray may not know yet that a node is gone, and start the worker there.
                time.sleep(1.0)
                continue
            if isinstance(place, Place):
                return Hand(lost.number, slot, actor, place)
            self.ray.kill(actor)  # there is no device for it
            return None
        return None

    def hand_of(self, share: int) -> Hand:
        return self.hands[self.owner[share]]

    # Data

    def share_out(self, batches: Sequence[Batch], files: Sequence[Path] | None) -> None:
        """Give every worker its batches. `files`: where all of the data is, if it is in files."""
        if batches is self._batches:
            return
        self._batches = batches
        self._files = None
        if files is not None:
            with contextlib.suppress(OSError):  # a pipe's temporary file, which has no name any more
                self._files = [Sight.of(path) for path in files]
        self._whole = None if self._files is None else self.put(batches)
        count = min(len(self.hands), len(batches))
        ends = [len(batches) * k // count for k in range(count + 1)]
        self.ranges = [range(start, stop) for start, stop in itertools.pairwise(ends)]
        self.owner = dict(enumerate(sorted(self.hands)[:count]))
        for share in self.owner:
            self._give(share)

    def _give(self, share: int) -> None:
        """Send a worker its share, or tell it where to read it."""
        hand, numbers = self.hand_of(share), self.ranges[share]
        try:
            if self._files is not None and self.get(hand.actor.sees.remote(self._files)):
                self.get(hand.actor.take.remote(share, numbers, self._whole))
                self._way[hand.number] = "read"
                return
            self._way[hand.number] = "sent"
            hand.actor.take.remote(share, numbers, None)
            sent: list[Any] = []
            for number in numbers:
                if len(sent) >= SENT_AT_ONCE:
                    self.get(sent.pop(0))
                sent.append(hand.actor.receive.remote(share, number, dict(self._batches[number])))
            for reference in sent:
                self.get(reference)
        except Lost as problem:
            self.replace(hand, ("data", share), str(problem))

    # What the algorithm asks for (scaling/runner.py)

    def begin(self, kinds: Kinds) -> SharedPass:
        self._begun += 1
        work = SharedPass(self, self._begun, kinds)
        self.passes[work.number] = work
        work.open()
        return work

    def draw(self, draws: Sequence[Draw]) -> Drawn:
        return DrawnAhead(self, draws)

    def free_memory(self) -> int | None:
        return free_on_nodes([hand.place for hand in self.hands.values()])

    def memory(self, share: int) -> int:
        """The bytes that a share's values may take between stages."""
        if self.settings.memory is not None:
            return self.settings.memory // len(self.ranges)
        place = self.hand_of(share).place
        beside = Counter(hand.place.node for hand in self.hands.values())[place.node]
        return int(MEMORY_RATIO * place.memory) // beside

    # The report

    def reports(self) -> tuple[WorkerReport, ...]:
        found = []
        for number, hand in sorted(self.hands.items()):
            batches = sum(len(self.ranges[share]) for share, owner in self.owner.items() if owner == number)
            place, data = hand.place, self._way.get(number, "") if batches else ""
            here = (place.host, place.address, place.pid, place.device)
            found.append(WorkerReport(*here, batches, data, place.reason))
        return tuple(found)

    def close(self) -> None:
        for hand in self.hands.values():
            with contextlib.suppress(Exception):  # lost at the very end
                self.ray.kill(hand.actor)


def _not_started(problem: BaseException) -> str:
    """Why a worker does not start: what is installed on its node, or its process is gone."""
    if getattr(problem, "actor_init_failed", False):
        return f"a worker does not start ({_reason(problem)}); every node needs lsuv-cli {__version__}"
    return (
        f"a worker ended while it started ({_reason(problem)}); it was killed, perhaps because memory ran out, or its "
        "node was lost: start the run again"
    )


def _reason(problem: BaseException) -> str:
    """Ray's words in one line."""
    text = " ".join(str(problem).split())
    if "actor is temporarily unavailable" in text:  # the rest is about calls of Ray's own
        return "the connection to it was lost"
    for mark in ("Worker exit detail: ", "The actor is dead because "):
        if mark in text:
            text = text.partition(mark)[2]
            break
    return text[:160]


@contextlib.contextmanager
def crew(settings: Settings) -> Iterator[Crew | None]:
    """The workers that the settings ask for; None if they ask for none."""
    if settings.workers is None:
        yield None
        return
    with opened(settings) as cluster:
        hired = Crew(cluster, replace(settings, workers=None))
        try:
            hired.start()
            yield hired
        finally:
            hired.close()
