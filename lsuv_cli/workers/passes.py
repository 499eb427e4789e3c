"""One pass over the data, spread over the workers: each stage runs over all shares at once.

A stage's model goes into the object store once, and from there once to each node. It stays there until the pass ends,
so that the replacement of a lost worker can run its batches through the finished stages; Ray moves to disk what does
not fit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnx import TypeProto

from lsuv_cli import memory
from lsuv_cli.scaling.model_builder import StageModel
from lsuv_cli.scaling.shares import Done, Kinds, common_type
from lsuv_cli.workers.worker import Lost, Ran

if TYPE_CHECKING:
    from lsuv_cli.workers.crew import Crew, Hand

POLL_SECONDS = 0.25  # between two looks at how far the workers are
MUCH = 1 << 20  # bytes of weights


@dataclass
class Step:
    """A stage that was run: its model in the object store, its inputs, and the values that waited after it."""

    model: Any
    inputs: tuple[str, ...]
    size: int  # bytes of its weights
    kept: set[str] | None = None


class SharedPass:
    """The shares of all workers for one pass (scaling/shares.py)."""

    def __init__(self, crew: Crew, number: int, kinds: Kinds) -> None:
        self.crew, self.number, self.kinds = crew, number, kinds
        self.steps: dict[int, Step] = {}
        self._types: dict[str, TypeProto] = {}
        self._waiting: dict[int, int] = {}  # share -> bytes

    def open(self) -> None:
        for share in self.crew.owner:
            self._begin(share)

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    def run(self, index: int, model: StageModel, inputs: Sequence[str], done: Done) -> Iterator[list[Any]]:
        """Run a stage over all shares at once; yields the sums of each batch in the order of the batches."""
        size = sum(array.nbytes for array in model.tensors.values())
        self.steps[index] = Step(self.crew.put(model), tuple(inputs), size)
        running = {share: self._start(share, index) for share in self.crew.owner}
        results: dict[int, Ran] = {}
        try:
            for share, numbers in enumerate(self.crew.ranges):
                while share not in results:
                    self._wait(running, results, index, done)
                yield from results[share].sums
                if len(results[share].sums) < len(numbers):
                    return  # the first batch's moments are not trusted: the stage will be measured again
        finally:
            self._stop(running)
        for name in results[0].types:
            kind = results[0].types[name]
            for share in range(1, len(results)):
                kind = common_type(kind, results[share].types[name])
            self._types[name] = kind

    def types(self, names: Sequence[str]) -> dict[str, TypeProto]:
        return {name: self._types[name] for name in names}

    def keep_only(self, names: set[str]) -> None:
        last = self.steps[max(self.steps)]
        last.kept = names
        if last.size > MUCH:  # the stage's weights in this process are gone
            memory.give_back()
        for share in self.crew.owner:
            self.crew.hand_of(share).actor.keep_only.remote(self.number, share, names)

    def close(self) -> None:
        self.crew.passes.pop(self.number, None)
        for hand in self.crew.hands.values():
            hand.actor.close.remote(self.number)
        self.steps.clear()

    def replay(self, share: int) -> None:
        """Bring a share to where the pass stands, on the worker that has it now."""
        self._begin(share)
        hand = self.crew.hand_of(share)
        for index, step in sorted(self.steps.items()):
            if step.kept is not None:
                hand.actor.run.remote(self.number, share, index, step.model, step.inputs)
                hand.actor.keep_only.remote(self.number, share, step.kept)

    def _begin(self, share: int) -> None:
        crew = self.crew
        crew.hand_of(share).actor.begin.remote(self.number, share, self.kinds, crew.memory(share))

    def _start(self, share: int, index: int) -> tuple[Hand, Any]:
        hand, step = self.crew.hand_of(share), self.steps[index]
        return hand, hand.actor.run.remote(self.number, share, index, step.model, step.inputs)

    def _wait(self, running: dict[int, tuple[Hand, Any]], results: dict[int, Ran], index: int, done: Done) -> None:
        """Take in what has ended by now; have the work of lost workers done again."""
        ready, _ = self.crew.ray.wait([reference for _, reference in running.values()], timeout=POLL_SECONDS)
        if not ready:
            done(self._progress(running, results))
            return
        for share, (hand, reference) in list(running.items()):
            if reference in ready:
                del running[share]
                try:
                    results[share] = self.crew.get(reference)
                    self._take(share, results[share])
                except Lost as problem:
                    self.crew.replace(hand, (self.number, index), str(problem))
                    running[share] = self._start(share, index)
        done(self._progress({}, results))

    def _take(self, share: int, ran: Ran) -> None:
        self._waiting[share] = ran.waiting
        self.crew.told += [warning for warning in ran.refused if warning not in self.crew.told]

    def _progress(self, running: dict[int, tuple[Hand, Any]], results: dict[int, Ran]) -> int:
        """How many batches all workers together have run."""
        asked = [self._beside(hand.actor.progress) for hand, _ in running.values()] if self.crew.cluster.beside else []
        finished = sum(len(result.sums) for result in results.values())
        ready, _ = self.crew.ray.wait(asked, num_returns=len(asked), timeout=1.0) if asked else ([], [])
        for reference in ready:
            with contextlib.suppress(Exception):  # a worker that is lost is noticed elsewhere
                finished += self.crew.ray.get(reference)
        return finished

    def _beside(self, method: Any) -> Any:
        """Call a worker's method while a stage runs there."""
        return method.options(concurrency_group="control").remote()

    def _stop(self, running: dict[int, tuple[Hand, Any]]) -> None:
        """End what still runs, each worker after its present batch."""
        if not running:
            return
        for hand, _ in running.values() if self.crew.cluster.beside else ():
            self._beside(hand.actor.stop)
        self.crew.ray.wait([reference for _, reference in running.values()], num_returns=len(running), timeout=None)
        running.clear()
