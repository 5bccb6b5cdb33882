"""Whether P still held a handoff's blocks when D took them: a question only where D answers after the sure part of P's lease.

A handoff is young when it is sent, but D may come to it late: its core stands still, and its heartbeats with it. P then gives
the blocks to others, and D reads those, answers 200 and continues another request's context (vLLM 0.32, seen). P counts the
leases that nobody came for. Where that count has not risen D's heartbeats have kept the lease, however long D took.

A stream is judged at its first byte. A whole answer tells nobody when D read, so it is judged when it comes: a lease of
somebody else that ran out on P meanwhile makes it be asked for again, which costs a second try and is never wrong.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING

from pdserve.engine.scrape import count_expired
from pdserve.errors import EngineError, EngineUnreachable, OutOfSockets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.engine.transport import EngineClient

_MAX_PAUSE_S = 1.0
"""Between two looks at a P's count, while some of its handoffs take long."""
_PATIENCE_S = 10.0
"""A P that holds handoffs steps without a pause and may be slow to answer."""


class Lease:
    """One handoff's lease on P, from when the gateway got it until D has answered."""

    __slots__ = ("is_open", "look_s", "num_expired_before", "sure_until_s")

    def __init__(self, *, look_s: float, sure_until_s: float) -> None:
        self.look_s = look_s
        """When P's count must be noted if it is still open: well before it can end."""
        self.sure_until_s = sure_until_s
        self.is_open = True
        self.num_expired_before: int | None = None
        """P's count of expired leases while this one was sure; None where nobody looked in time, or P did not tell."""


class Leases:
    """Those on one P. Its /metrics are read only when some are late, and once for all who ask at the same time."""

    def __init__(
        self, prefill: EngineClient, *, sure_for_s: float, clock: Callable[[], float], loop: asyncio.AbstractEventLoop
    ) -> None:
        """For `sure_for_s` from when a handoff came its lease cannot end; half of that is P's to count."""
        self._prefill = prefill
        self._sure_for_s = sure_for_s
        self._clock = clock
        self._loop = loop
        self._pause_s = min(_MAX_PAUSE_S, sure_for_s / 8)
        self._unnoted: deque[Lease] = deque()
        """Oldest first; those that are over by now go when they come up."""
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = 0.0
        self._reading: asyncio.Task[int | None] | None = None

    def open(self, taken_s: float) -> Lease:
        """The lease of a handoff that came from P at that time."""
        lease = Lease(look_s=taken_s + self._sure_for_s / 2, sure_until_s=taken_s + self._sure_for_s)
        unnoted = self._unnoted
        while unnoted and not unnoted[0].is_open:
            unnoted.popleft()
        unnoted.append(lease)
        if self._timer is None:
            self._look_at(lease.look_s)
        return lease

    async def is_kept(self, lease: Lease) -> bool:
        """Whether no lease has run out on P since this one was sure. False also where P does not tell."""
        now, before = await self._count(not_before_s=self._clock()), lease.num_expired_before
        return before is not None and now is not None and now <= before

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reading is not None:
            self._reading.cancel()

    def _look_at(self, when_s: float) -> None:
        self._timer = self._loop.call_later(max(0.0, when_s - self._clock()), self._look)

    def _look(self) -> None:
        """Note P's count for all whose handoff is late by now."""
        self._timer = None
        unnoted, now_s = self._unnoted, self._clock()
        late: list[Lease] = []
        while unnoted and (not unnoted[0].is_open or unnoted[0].look_s <= now_s):
            lease = unnoted.popleft()
            if lease.is_open:
                late.append(lease)
        if late:
            self._start_reading(late)
        if unnoted:
            self._look_at(max(unnoted[0].look_s, now_s + self._pause_s))

    async def _count(self, *, not_before_s: float) -> int | None:
        """The count at some moment from `not_before_s` on; None when P does not tell.

        0 for a P that is gone: it gives its blocks to nobody, and what D reads of it fails.
        """
        reading = self._reading
        if reading is not None and not reading.done() and self._began_s < not_before_s:
            await asyncio.wait([reading])
        if self._reading is None or self._began_s < not_before_s:
            self._start_reading()
        assert self._reading is not None
        return await asyncio.shield(self._reading)

    def _start_reading(self, late: Sequence[Lease] = ()) -> None:
        self._began_s = math.inf  # Whoever asks before the task has its turn is in time.
        self._reading = self._loop.create_task(self._read(late))

    async def _read(self, late: Sequence[Lease]) -> int | None:
        self._began_s = self._clock()
        try:
            count = await count_expired(self._prefill, timeout_s=_PATIENCE_S)
        except EngineUnreachable:
            count = 0
        except (EngineError, OutOfSockets):
            return None
        now_s = self._clock()
        for lease in late:
            if now_s <= lease.sure_until_s:
                lease.num_expired_before = count
        return count
