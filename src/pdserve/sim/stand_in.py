"""A stand-in engine that is up: in a test's own process, or as the whole of one.

Owns the sockets. What tests need to see and to break is reached from here in Python, and never over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

from pdserve.http.listener import Listener, bind, stopped_by_signal
from pdserve.sim.engine import Engine
from pdserve.sim.faults import Faults
from pdserve.sim.handoff import KvRole
from pdserve.sim.server import StandInApp

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterable

    from pdserve.http.server import ServerConnection
    from pdserve.sim.clock import Clock
    from pdserve.sim.faults import Fault
    from pdserve.sim.server import SeenRequest
    from pdserve.sim.settings import EngineSettings


class _MortalListener(Listener):
    """A listener that can go without a farewell."""

    def die(self) -> None:
        """Reset every connection and refuse new ones."""
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            cast("ServerConnection", connection).abort()

    async def drop(self) -> None:
        """Stop without waiting for anybody: uvicorn's orderly stop takes a tenth of a second even when nobody is there."""
        if not self._is_started:
            return
        self._is_started = False
        self.die()
        self._sock.close()
        tasks = list(self._server.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class StandIn:
    """One stand-in engine behind HTTP."""

    def __init__(self, engine: Engine, sock: socket.socket, *, shutdown_s: float) -> None:
        self.engine = engine
        self.faults = Faults()
        self.gone = asyncio.Event()
        """Set when it has ended by itself: it died, or its core did and vLLM would have ended the process."""
        self._app = StandInApp(self, self.faults, on_dead_core=self._core_died)
        self._listener = _MortalListener(self._app, sock, shutdown_s=shutdown_s)
        self._exit: asyncio.Task[None] | None = None
        self.url = self._listener.url

    @property
    def requests(self) -> list[SeenRequest]:
        """The completion and chat requests so far, in the order in which they came."""
        return self._app.requests

    @property
    def num_held_blocks(self) -> int:
        """Blocks kept for other engines."""
        return self.engine.leases.num_blocks

    @property
    def num_connections(self) -> int:
        """Clients connected now."""
        return self._listener.num_connections

    def counter(self, name: str, **labels: str) -> float:
        """One of the engine's metrics, by its name without `vllm:`, such as `prompt_tokens_total`."""
        return self.engine.metrics.value(f"vllm:{name}", **labels)

    async def idle(self) -> None:
        """Wait until no request is under way and no block is in use."""
        await self.engine.until(lambda: not self.engine.is_busy and self.engine.pool.usage == 0)

    def die(self) -> None:
        """Close every socket at once, as a killed process does."""
        self.engine.kill("killed")
        self._listener.die()
        self.gone.set()

    def _core_died(self) -> None:
        """vLLM ends its API server once a request has seen that EngineCore is gone (entrypoints/launchers/launcher.py)."""
        if not self.engine.settings.keep_alive_on_engine_death and self._exit is None:
            self._exit = asyncio.get_running_loop().create_task(self._leave())

    async def _leave(self) -> None:
        await self._listener.stop()
        self.gone.set()

    def force_stop(self) -> None:
        """Do not wait for open requests any longer."""
        self._listener.force_stop()

    async def _close(self, *, drains: bool) -> None:
        if self._exit is not None:
            await self._exit
        elif not drains:
            await self._listener.drop()

    @contextlib.asynccontextmanager
    async def up(self, *, drains: bool) -> AsyncIterator[StandIn]:
        """Serve while the block runs; then let open requests end, or drop them."""
        await self.engine.start()
        try:
            async with self._listener:
                try:
                    yield self
                finally:
                    await self._close(drains=drains)
        finally:
            await self.engine.close()


@contextlib.asynccontextmanager
async def run_stand_in(
    role: KvRole | str,
    settings: EngineSettings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    clock: Clock | None = None,
) -> AsyncIterator[StandIn]:
    """A stand-in in this process, listening when the block begins, gone when it ends. Raises ConfigError."""
    engine = Engine(KvRole(role), settings, clock=clock)
    async with StandIn(engine, bind(host, port), shutdown_s=1.0).up(drains=False) as stand_in:
        yield stand_in


async def serve_stand_in(
    role: KvRole | str,
    settings: EngineSettings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    faults: Iterable[Fault] = (),
    on_ready: Callable[[StandIn], None] = lambda _: None,
    shutdown_s: float = 30.0,
) -> None:
    """Serve until SIGINT or SIGTERM, or until it ends as vLLM would; every request suffers `faults`. Raises ConfigError."""
    stand_in = StandIn(Engine(KvRole(role), settings), bind(host, port), shutdown_s=shutdown_s)
    for fault in faults:
        stand_in.faults.inject(fault, times=None)
    async with stopped_by_signal() as stop, stand_in.up(drains=True):
        stop.on_second(stand_in.force_stop)
        on_ready(stand_in)
        ends = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(stand_in.gone.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
