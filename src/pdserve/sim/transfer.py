"""D's side of a handoff: shake hands with P, read its blocks, keep its lease alive, give notice. Counts what happened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from pdserve.sim.handoff import Pull, tail_of
from pdserve.sim.side_channel import Peers, TransferFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pdserve.sim.blocks import Block
    from pdserve.sim.clock import Clock
    from pdserve.sim.handoff import Plan
    from pdserve.sim.metrics import NixlMetrics
    from pdserve.sim.settings import EngineSettings
    from pdserve.sim.side_channel import Peer

_NUM_LAYERS = 30
_KV_BYTES_PER_TOKEN = 23040
"""SmolLM2-135M in bf16: NIXL moves one descriptor per layer and block."""
_MIN_BEAT_S = 0.01
"""A lease of no length must not make D busy with extending it."""

_logger = logging.getLogger("pdserve.sim")


class Transfers:
    """All transfers of one engine."""

    def __init__(self, settings: EngineSettings, clock: Clock, metrics: NixlMetrics) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics = metrics
        self._known_engines: set[str | None] = set()
        self._peers = Peers(timeout_s=settings.handshake_timeout_s)

    def close(self) -> None:
        """Hang up on everybody."""
        self._peers.close()

    async def pull(self, plan: Pull, blocks: Sequence[Block]) -> None:
        """Fill blocks with P's. Raises TransferFailed and CoreFault."""
        try:
            async with self._shaken_hands(plan) as peer:
                await self._copy(peer, plan, blocks)
                await self._notify(peer, plan.request_id)
        except TransferFailed:
            self._metrics.transfer_failed()
            raise

    async def give_notice(self, host: str, port: int, request_id: str) -> None:
        """Tell P that a request's blocks may go. Never fails: P's lease ends by itself."""
        try:
            async with self._peers.connected(host, port) as peer:
                await self._notify(peer, request_id)
        except TransferFailed as exc:
            self._notice_failed(exc)

    @contextlib.asynccontextmanager
    async def heartbeats(self, plan: Plan) -> AsyncIterator[None]:
        """Extend P's lease while the block runs: D may be long in coming to the request."""
        if not isinstance(plan, Pull) or not plan.sends_heartbeats:
            yield
            return
        task = asyncio.get_running_loop().create_task(self._beat(plan))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _beat(self, plan: Pull) -> None:
        interval_s = max(_MIN_BEAT_S, self._settings.kv_lease_duration_s / 6)  # A sixth: base_scheduler.py.
        while True:
            await self._clock.sleep(interval_s)
            with contextlib.suppress(TransferFailed):
                async with self._peers.connected(plan.host, plan.port) as peer:
                    await peer.extend_leases([plan.request_id])

    @contextlib.asynccontextmanager
    async def _shaken_hands(self, plan: Pull) -> AsyncIterator[Peer]:
        """A connection to P, once it is known to be P."""
        timeout_s = self._settings.handshake_timeout_s
        started_s = self._clock.now_s()
        async with contextlib.AsyncExitStack() as stack:
            try:
                peer = await stack.enter_async_context(self._peers.connected(plan.host, plan.port))
                is_new = not isinstance(plan.engine_id, str) or plan.engine_id not in self._known_engines
                if is_new:
                    await peer.check(plan.engine_id)
            except TransferFailed:
                # ZeroMQ does not tell a refused connection from a slow one: vLLM waits its time out all the same.
                await self._clock.sleep(max(0.0, timeout_s - (self._clock.now_s() - started_s)))
                raise
            if is_new:
                await self._clock.sleep(self._settings.timing.handshake_s)
                self._known_engines.add(plan.engine_id)
            yield peer

    async def _copy(self, peer: Peer, plan: Pull, blocks: Sequence[Block]) -> None:
        started_s = self._clock.now_s()
        await self._clock.sleep(self._settings.timing.transfer_s)
        contents = await peer.read_blocks(plan.engine_id, tail_of(plan.block_ids, len(blocks)))
        if any(len(tokens) != self._settings.block_size for tokens in contents):
            raise TransferFailed("the other engine has another block size")
        for block, tokens in zip(blocks, contents, strict=True):
            block.tokens[:] = tokens
        self._metrics.transferred(
            duration_s=self._clock.now_s() - started_s,
            num_bytes=len(blocks) * self._settings.block_size * _KV_BYTES_PER_TOKEN,
            num_descriptors=len(blocks) * _NUM_LAYERS,
        )

    async def _notify(self, peer: Peer, request_id: str) -> None:
        try:
            await peer.give_notice(request_id)
        except TransferFailed as exc:
            self._notice_failed(exc)

    def _notice_failed(self, error: TransferFailed) -> None:
        _logger.warning("notification failed; P's blocks will be freed after timeout: %s", error)
        self._metrics.notice_failed()
