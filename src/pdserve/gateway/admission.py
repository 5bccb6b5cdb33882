"""Who may start now and who waits: a bound on requests under way, and a queue in order of priority before it.

Knows numbers only: neither requests nor engines.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import TYPE_CHECKING

from pdserve.errors import Overloaded, Reason

if TYPE_CHECKING:
    from pdserve.config import AdmissionConfig

_MAX_RETRY_AFTER_S = 60
_SPARE_ENTRIES = 64
"""So many of those who left may stay in a short queue: clearing it for each would cost more than they weigh."""


class Admission:
    """Seats for requests. Whoever entered must leave with the same weight."""

    def __init__(self, config: AdmissionConfig, *, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._loop = loop
        self._arrivals = itertools.count()
        self._queue: list[tuple[int, int, int, asyncio.Future[None]]] = []
        """Priority (lower first), arrival, weight and the turn that is waited for; cancelled ones stay a while."""
        self.num_running = 0
        self.num_queued = 0

    def try_enter(self, weight: int) -> bool:
        """Start at once if nobody waits and there is room."""
        if self.num_queued or not self._has_room(weight):
            return False
        self.num_running += weight
        return True

    async def enter(self, *, priority: int, weight: int) -> None:
        """Wait for a turn. Raises Overloaded when the queue is full or the turn does not come in time."""
        if self.try_enter(weight):
            return
        if self.num_queued >= self._config.max_queued:
            message = f"{self.num_running} requests are under way and {self.num_queued} wait; come again later"
            raise Overloaded(message, reason=Reason.QUEUE_FULL, retry_after_s=self._retry_after_s())
        turn = self._loop.create_future()
        heapq.heappush(self._queue, (priority, next(self._arrivals), weight, turn))
        self.num_queued += 1
        timer = self._loop.call_later(self._config.max_wait, self._give_up, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(weight)  # The turn came in the moment in which its client left.
            raise
        finally:
            timer.cancel()
            self.num_queued -= 1
            self._start_next()
            self._clear()

    def leave(self, weight: int) -> None:
        """Make room."""
        self.num_running -= weight
        if self._queue:
            self._start_next()

    def _start_next(self) -> None:
        while self._queue:
            _, _, weight, turn = self._queue[0]
            if not turn.done():
                if not self._has_room(weight):
                    return
                self.num_running += weight
                turn.set_result(None)
            heapq.heappop(self._queue)

    def _clear(self) -> None:
        """Under a steady load those who left before their turn might never come up."""
        if len(self._queue) > 2 * self.num_queued + _SPARE_ENTRIES:
            self._queue = [entry for entry in self._queue if not entry[-1].done()]
            heapq.heapify(self._queue)

    def _has_room(self, weight: int) -> bool:
        """A request that is larger than all there is may start when nothing else runs."""
        return self.num_running == 0 or self.num_running + weight <= self._config.max_concurrent

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if not turn.done():
            message = f"no turn came within {self._config.max_wait:g} s; come again later"
            turn.set_exception(Overloaded(message, reason=Reason.QUEUE_TIMEOUT, retry_after_s=self._retry_after_s()))

    def _retry_after_s(self) -> int:
        """A guess that grows with the crowd: how often the seats must turn over until it is gone."""
        return min(_MAX_RETRY_AFTER_S, 1 + self.num_queued // self._config.max_concurrent)
