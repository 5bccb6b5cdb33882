"""Whether P still held a handoff's blocks when D took them: asked only where D answers after the sure part of P's lease.

A handoff is young when it is sent, but D may come to it late: its core stands still, and its heartbeats with it. P then gives
the blocks to others, and D reads those, answers 200 and continues another request's context (vLLM 0.32, seen). P counts the
leases that nobody came for. Where that count has not risen D's heartbeats have kept the lease, however long D took.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.engine.scrape import scrape
from pdserve.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.transport import EngineClient

_SHARED_FOR_S = 1.0
"""A count from before a lease's end is good for all handoffs of that time; an older one only finds more of them stale."""
_PATIENCE_S = 10.0
"""A P that holds handoffs steps without a pause and may be slow to answer."""


class ExpiredLeases:
    """How many leases have run out on one P. Its /metrics are read once for all who ask at the same time."""

    def __init__(self, prefill: EngineClient, *, clock: Callable[[], float]) -> None:
        self._prefill = prefill
        self._clock = clock
        self._began_s = 0.0
        self._reading: asyncio.Task[int | None] | None = None

    async def count(self, *, not_before_s: float, patience_s: float = _PATIENCE_S) -> int | None:
        """The count at some moment from `not_before_s` on; None when P does not tell within that time."""
        try:
            async with asyncio.timeout(patience_s):
                return await self._count(not_before_s)
        except TimeoutError:
            return None

    async def _count(self, not_before_s: float) -> int | None:
        if self._reading is not None and not self._reading.done() and self._began_s < not_before_s:
            await asyncio.wait([self._reading])
        if self._reading is None or self._began_s < not_before_s:
            self._began_s = self._clock()
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)

    async def _read(self) -> int | None:
        try:
            return (await scrape(self._prefill, timeout_s=_PATIENCE_S)).num_expired
        except EngineError:
            return None


class LeaseWatch:
    """One handoff's lease, from when it is sent to D until D has answered."""

    def __init__(
        self,
        expired: ExpiredLeases,
        *,
        sure_for_s: float,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """For `sure_for_s` from now the lease cannot end; half of that is P's to count, so that its count is from before."""
        self._expired = expired
        self._clock = clock
        self._loop = loop
        self._patience_s = max(0.0, sure_for_s / 2)
        self._before: asyncio.Task[int | None] | None = None
        self._timer = loop.call_later(self._patience_s, self._look)

    @property
    def is_sure(self) -> bool:
        """Whether there is nothing to ask yet."""
        return self._before is None

    async def is_kept(self) -> bool:
        """Whether no lease has run out on P since this one was sure. False also where P does not tell."""
        assert self._before is not None
        before = await self._before
        return before is not None and before == await self._expired.count(not_before_s=self._clock())

    def close(self) -> None:
        """Ask no more."""
        self._timer.cancel()
        if self._before is not None:
            self._before.cancel()

    def _look(self) -> None:
        not_before_s = self._clock() - _SHARED_FOR_S
        count = self._expired.count(not_before_s=not_before_s, patience_s=self._patience_s)
        self._before = self._loop.create_task(count)
