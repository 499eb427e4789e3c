"""Random weights that workers draw ahead of their use, a few at a time.

As many are under way as there are workers; beyond them, only as many as take AHEAD_BYTES. So what waits in the object
store does not grow with the model.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from lsuv_cli.scaling.drawing import Draw
from lsuv_cli.workers.worker import Lost

if TYPE_CHECKING:
    from lsuv_cli.workers.crew import Crew, Hand

Array = NDArray[Any]

SMALL = 1 << 16  # numbers of a weight that is drawn sooner than a worker is asked for it
AHEAD_BYTES = 1 << 28  # of weights that wait beyond one for each worker


class DrawnAhead:
    """Weights in the order in which they will be taken."""

    def __init__(self, crew: Crew, draws: Sequence[Draw]) -> None:
        self.crew = crew
        self.queue = deque(draw for draw in draws if math.prod(draw.shape) > SMALL)
        self.under_way: dict[Draw, tuple[Hand, Any]] = {}
        self._fill()

    def take(self, draw: Draw) -> Array:
        if draw not in self.under_way:
            return draw.make()
        while True:
            hand, reference = self.under_way[draw]
            try:
                array: Array = self.crew.get(reference)
                break
            except Lost as problem:
                self.crew.replace(hand, draw, str(problem))
                for other, (held, _) in list(self.under_way.items()):
                    if held is hand:
                        self._start(other)
        del self.under_way[draw]
        self._fill()
        return array

    def close(self) -> None:
        self.queue.clear()
        self.under_way.clear()

    def _fill(self) -> None:
        while self.queue:
            waiting = sum(4 * math.prod(draw.shape) for draw in (*self.under_way, self.queue[0]))
            if len(self.under_way) >= len(self.crew.hands) and waiting > AHEAD_BYTES:
                return
            if len(self.under_way) >= 4 * len(self.crew.hands):
                return
            self._start(self.queue.popleft())

    def _start(self, draw: Draw) -> None:
        load = Counter(hand.number for hand, _ in self.under_way.values())
        hand = min(self.crew.hands.values(), key=lambda hand: load[hand.number])
        self.under_way[draw] = hand, hand.actor.draw.remote(draw)
