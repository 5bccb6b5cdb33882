"""Time as the stand-in sees it: the event loop's own, or a clock that a test moves by hand.

Everything in sim takes a Clock; nothing there asks the operating system for the time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Where times and waits come from."""

    def now_s(self) -> float:
        """Monotonic seconds."""

    def unix_s(self) -> float:
        """Seconds since the epoch, for answers only."""

    async def sleep(self, delay_s: float) -> None:
        """Wait; even no delay lets others run."""


class LoopClock:
    """Real time."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


class ManualClock:
    """Time that stands still until it is told to go on."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s

    async def sleep(self, delay_s: float) -> None:
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        wake_up = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + delay_s, next(self._order), wake_up))
        await wake_up

    async def advance(self, delay_s: float) -> None:
        """Let time pass; whoever sleeps wakes in order, and runs before the next one wakes."""
        end_s = self._now_s + delay_s
        await _let_others_run()
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self._now_s, _, wake_up = heapq.heappop(self._sleepers)
            if not wake_up.done():
                wake_up.set_result(None)
            await _let_others_run()
        self._now_s = end_s


async def _let_others_run() -> None:
    for _ in range(10):  # A woken task may wake another one, and that one a third.
        await asyncio.sleep(0)
