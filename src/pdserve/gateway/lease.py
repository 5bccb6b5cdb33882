"""Whether P still held a handoff's blocks when D took them: asked only where D answers after the sure part of P's lease.

A handoff is young when it is sent, but D may come to it late: its core stands still, and its heartbeats with it. P then gives
the blocks to others, and D reads those, answers 200 and continues another request's context (vLLM 0.32, seen). P counts the
leases that nobody came for. Where that count has not risen D's heartbeats have kept the lease, however long D took.

A stream is judged at its first byte. A whole answer tells nobody when D read, so it is judged where the lease could first have
ended: had D's core stood still for the first time after that, nothing here would see it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.engine.scrape import count_expired
from pdserve.errors import EngineError, EngineUnreachable, OutOfSockets

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.engine.transport import EngineClient

_SHARED_FOR_S = 1.0
"""A count from before a lease's end is good for all handoffs of that time; an older one only finds more of them stale."""
_SETTLED_S = 1.0
"""P looks for leases that have run out when it takes its next step."""
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
        """The count at some moment from `not_before_s` on; None when P does not tell within that time.

        0 for a P that is gone: it gives its blocks to nobody, and what D reads of it fails.
        """
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
            return await count_expired(self._prefill, timeout_s=_PATIENCE_S)
        except EngineUnreachable:
            return 0
        except (EngineError, OutOfSockets):
            return None


class LeaseWatch:
    """One handoff's lease, from when it is sent to D until D has answered."""

    def __init__(
        self,
        expired: ExpiredLeases,
        *,
        sure_for_s: float,
        ends_in_s: float,
        clock: Callable[[], float],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """For `sure_for_s` from now the lease cannot end; half of that is P's to count, so that its count is from before.

        In `ends_in_s` it ends, unless D's heartbeats extend it.
        """
        self._expired = expired
        self._clock = clock
        self._loop = loop
        self._patience_s = max(0.0, sure_for_s / 2)
        self._sure_until_s = clock() + sure_for_s
        self._rest_s = max(0.0, ends_in_s - self._patience_s) + _SETTLED_S
        self._before: asyncio.Task[int | None] | None = None
        self._after: asyncio.Task[int | None] | None = None
        self._timer = loop.call_later(self._patience_s, self._look)

    @property
    def is_sure(self) -> bool:
        """Whether there is nothing to ask yet."""
        return self._clock() < self._sure_until_s

    async def is_kept(self) -> bool:
        """Whether no lease has run out on P since this one was sure. False also where P does not tell."""
        return await self._is_kept_by(self._expired.count(not_before_s=self._clock()))

    async def was_kept(self) -> bool:
        """The same for the moment in which this lease would have ended without D's heartbeats, if that has passed."""
        return await self.is_kept() if self._after is None else await self._is_kept_by(self._after)

    def close(self) -> None:
        """Ask no more."""
        self._timer.cancel()
        for task in (self._before, self._after):
            if task is not None:
                task.cancel()

    async def _is_kept_by(self, counting: Awaitable[int | None]) -> bool:
        now, before = await counting, await self._before if self._before is not None else None
        return before is not None and now is not None and now <= before

    def _look(self) -> None:
        self._before = self._loop.create_task(self._count_before())
        self._timer = self._loop.call_later(self._rest_s, self._look_again)

    async def _count_before(self) -> int | None:
        """The count while this lease is sure. None when it came later: a loop that stood still runs its timers late."""
        not_before_s = self._clock() - _SHARED_FOR_S
        count = await self._expired.count(not_before_s=not_before_s, patience_s=self._patience_s)
        return count if self.is_sure else None

    def _look_again(self) -> None:
        self._after = self._loop.create_task(self._expired.count(not_before_s=self._clock()))
