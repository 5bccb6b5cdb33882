"""Frees P's blocks at once when no decode engine will ever fetch them.

Otherwise they stay until P's lease ends, and a client that comes and goes could fill P's cache with them. Runs beside the
requests, since the client's own task may be cancelled by then. Never raises: a release that fails is what the lease is for.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pdserve.core import Role
from pdserve.engine.release import try_release
from pdserve.protocol import nixl
from pdserve.telemetry.metrics import RELEASES

if TYPE_CHECKING:
    from pdserve.core import EngineAddress, EngineName
    from pdserve.engine.pool import EnginePool
    from pdserve.http.server import Headers
    from pdserve.protocol.nixl import Handoff
    from pdserve.telemetry.tally import Tally

_TIMEOUT_S = 10.0
_logger = logging.getLogger("pdserve.gateway")


class Releaser:
    """Sends releases; one task each."""

    def __init__(self, pool: EnginePool, tally: Tally) -> None:
        self._pool = pool
        self._tally = tally
        self._tasks: set[asyncio.Task[None]] = set()

    def release(
        self, handoff: Handoff, *, prefill: EngineName, headers: Headers, avoid: EngineAddress | None = None
    ) -> None:
        """Start freeing a handoff's blocks through any decode engine, healthy ones first and `avoid` last.

        D connects to the host that stands in the handoff for this too, so a foreign one is left to the lease.
        """
        try:
            self._pool.check_handoff_host(prefill, handoff)
        except nixl.UnusableHandoff as exc:
            self._give_up(handoff, str(exc))
            return
        task = asyncio.get_running_loop().create_task(self._release(handoff, headers, avoid))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Wait for what has been started."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _release(self, handoff: Handoff, headers: Headers, avoid: EngineAddress | None) -> None:
        for decode in self._candidates(avoid):
            client = self._pool.client(decode.name)
            if await try_release(client, handoff, headers=headers, timeout_s=_TIMEOUT_S):
                self._tally.count(RELEASES, "released")
                return
        self._give_up(handoff, "no decode engine took the release")

    def _give_up(self, handoff: Handoff, cause: str) -> None:
        self._tally.count(RELEASES, "failed")
        _logger.warning(
            "%s of %s: engine %s keeps %d blocks until its lease ends",
            cause,
            handoff.request_id,
            handoff.engine_id,
            handoff.num_blocks,
        )

    def _candidates(self, avoid: EngineAddress | None) -> list[EngineAddress]:
        """The healthy ones first; one that just failed may still take a release, and there may be nobody else."""
        decodes = [snapshot for snapshot in self._pool.snapshots() if snapshot.address.role == Role.DECODE]
        decodes.sort(key=lambda decode: (not decode.is_healthy, decode.address == avoid))
        return [decode.address for decode in decodes]
