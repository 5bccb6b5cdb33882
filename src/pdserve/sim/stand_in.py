"""A stand-in engine that is up: in a test's own process, or as the whole of one.

Owns the sockets. What tests need to see and to break is reached from here in Python, and never over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, cast

from pdserve.http.listener import Listener, bind, stopped_by_signal
from pdserve.sim.engine import Engine
from pdserve.sim.faults import Faults
from pdserve.sim.handoff import KvRole
from pdserve.sim.server import StandInApp
from pdserve.sim.settings import EngineSettings

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

    from pdserve.http.server import ServerConnection
    from pdserve.sim.clock import Clock
    from pdserve.sim.fault import Fault
    from pdserve.sim.server import SeenRequest


_RESTART_TIMEOUT_S = 10.0


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
        for sock in self._sockets:
            sock.close()
        await self.settled(cancels=True)

    async def _hear_newcomers(self) -> None:
        """uvicorn, which vLLM serves with, gives a client that has just come no time to speak."""

    async def settled(self, *, cancels: bool) -> None:
        """Wait for the requests in hand."""
        tasks = [task for task in self._server.server_state.tasks if task is not asyncio.current_task()]
        for task in tasks if cancels else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    @property
    def num_tasks(self) -> int:
        """Requests that are being answered."""
        return len(self._server.server_state.tasks)


class StandIn:
    """One stand-in engine behind HTTP. Raises ConfigError when its port is not to be had."""

    def __init__(
        self,
        role: KvRole,
        settings: EngineSettings | None,
        *,
        host: str,
        port: int,
        clock: Clock | None = None,
        shutdown_s: float,
    ) -> None:
        self._role = role
        self._clock = clock
        self._shutdown_s = shutdown_s
        self._settings = settings = settings or EngineSettings()
        self.requests: list[SeenRequest] = []
        """The generating requests so far, in the order in which they came; restarts do not empty it."""
        self.keeps_requests = True
        """Off for long runs, where remembering every body would be a leak."""
        self.faults = Faults()
        self.gone = asyncio.Event()
        """Set when it has ended by itself: it died, or its core did and vLLM would have ended the process."""
        self._exit: asyncio.Task[None] | None = None
        self._restart: asyncio.Task[None] | None = None
        self._restart_began = asyncio.Event()
        sock = bind(host, port)
        self._address: tuple[str, int] = sock.getsockname()[:2]
        # A socket that is bound and does not listen keeps a port from everybody else while the engine is down.
        self._holders = [bind(*self._address)]
        if role is not KvRole.NONE:
            self._holders.append(bind(settings.side_channel_host, settings.side_channel_port))
            side_channel_port = self._holders[-1].getsockname()[1]
            self._settings = dataclasses.replace(settings, side_channel_port=side_channel_port)
        self._make(sock)
        self.url = self._listener.url

    def _make(self, sock: socket.socket) -> None:
        self.engine = engine = Engine(self._role, self._settings, clock=self._clock)
        """Another one after a restart."""
        self._app = StandInApp(self, self.faults, see=self._see, on_dead_core=lambda: self._core_died(engine))
        # uvicorn, which vLLM serves with, takes a client that has finished sending for one that is gone.
        self._listener = _MortalListener(self._app, sock, keeps_half_closed=False, shutdown_s=self._shutdown_s)

    # What tests ask

    @property
    def num_held_blocks(self) -> int:
        """Blocks kept for other engines."""
        return self.engine.leases.num_blocks

    @property
    def num_connections(self) -> int:
        """Clients connected now."""
        return self._listener.num_connections

    @property
    def leftovers(self) -> dict[str, int]:
        """What is in use, by its name; empty when nothing is. Connections that wait for their next request count."""
        engine = self.engine
        counts = {
            "blocks": engine.pool.num_blocks - engine.pool.num_free,
            "held_blocks": self.num_held_blocks,
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "tasks": engine.num_tasks + self._app.store.num_running + self._listener.num_tasks,
            "connections": self.num_connections,
        }
        return {name: count for name, count in counts.items() if count}

    def counter(self, name: str, **labels: str) -> float:
        """One of the engine's metrics, by its name without `vllm:`, such as `prompt_tokens_total`."""
        return self.engine.metrics.value(f"vllm:{name}", **labels)

    async def idle(self) -> None:
        """Wait until no request is under way and no block is in use."""
        await self.engine.until(lambda: not self.engine.is_busy and self.engine.pool.usage == 0)

    # What tests do

    def die(self) -> None:
        """Close every socket at once, as a killed process does."""
        self.engine.kill("killed")
        self._listener.die()
        self.gone.set()

    async def restart(self) -> None:
        """Die and come back on the same ports: a new engine id, an empty cache, counters at zero, nobody connected."""
        self.die()
        await self.revive()

    def begin_restart(self) -> None:
        """The same, while others go on."""
        self.die()
        if self._restart is None or self._restart.done():
            self._restart = asyncio.get_running_loop().create_task(self.revive())
            self._restart_began.set()

    async def restarted(self) -> None:
        """Wait until a restart that was begun is over. Only where a fault has begun one, or is about to."""
        async with asyncio.timeout(_RESTART_TIMEOUT_S):
            await self._restart_began.wait()
            self._restart_began.clear()
            if self._restart is not None:
                await asyncio.wait([self._restart])

    async def revive(self) -> None:
        """Come back after `die`. Not after the core's death alone: that one ends in its own time."""
        await self._end()
        self._make(bind(*self._address))
        self.gone.clear()
        await self.engine.start()
        await self._listener.__aenter__()

    @contextlib.contextmanager
    def without_blocks(self) -> Iterator[None]:
        """Take all free blocks: requests wait, and nothing is answered, until the block ends."""
        with self.engine.without_blocks():
            yield

    def force_stop(self) -> None:
        """Do not wait for open requests any longer."""
        self._listener.force_stop()

    # Inside

    def _see(self, request: SeenRequest) -> None:
        if self.keeps_requests:
            self.requests.append(request)

    def _core_died(self, engine: Engine) -> None:
        """vLLM ends its API server once a request has seen that EngineCore is gone (entrypoints/launchers/launcher.py)."""
        if engine is not self.engine or self.gone.is_set():
            return  # The last words of one that died, or of the one before a restart.
        if not self.engine.settings.keep_alive_on_engine_death and self._exit is None:
            self._exit = asyncio.get_running_loop().create_task(self._leave())

    async def _leave(self) -> None:
        await self._listener.stop()
        self.gone.set()

    async def _end(self, *, drains: bool = False) -> None:
        """Leave nothing behind."""
        if self._exit is not None:
            await self._exit
            self._exit = None
            await self._listener.settled(cancels=False)
        elif drains:
            await self._listener.stop()
        else:
            await self._listener.drop()
        await self._app.store.close()
        await self.engine.close()

    @contextlib.asynccontextmanager
    async def up(self, *, drains: bool) -> AsyncIterator[StandIn]:
        """Serve while the block runs; then let open requests end, or drop them."""
        await self.engine.start()
        await self._listener.__aenter__()
        try:
            yield self
        finally:
            if self._restart is not None:
                await asyncio.wait([self._restart])
            await self._end(drains=drains)
            for holder in self._holders:
                holder.close()


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
    stand_in = StandIn(KvRole(role), settings, host=host, port=port, clock=clock, shutdown_s=1.0)
    async with stand_in.up(drains=False):
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
    stand_in = StandIn(KvRole(role), settings, host=host, port=port, shutdown_s=shutdown_s)
    stand_in.keeps_requests = False
    for fault in faults:
        stand_in.faults.inject(fault, times=None)
    async with stopped_by_signal() as stop, stand_in.up(drains=True):
        stop.on_second(stand_in.force_stop)
        on_ready(stand_in)
        ends = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(stand_in.gone.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
