"""Puts a gateway together and runs it: pool, policy, proxy, and the two listeners."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine.pool import EnginePool
from pdserve.gateway.admin import AdminApp
from pdserve.gateway.app import ClientApp
from pdserve.gateway.journal import Journal
from pdserve.gateway.proxy import Proxy
from pdserve.gateway.release import Releaser
from pdserve.http.listener import Listener, bind
from pdserve.policy.round_robin import RoundRobin

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Sequence

    from pdserve.config import Config
    from pdserve.core import EngineAddress


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    pool: EnginePool
    journal: Journal
    proxy: Proxy
    client: Listener
    admin: Listener
    watching: asyncio.Task[None]
    """Ends only by a fault: a gateway that no longer knows its engines must not look alive."""


def bind_gateway(config: Config) -> tuple[socket.socket, socket.socket]:
    """Sockets for clients and for the operator. Raises ConfigError."""
    client = bind(config.gateway.host, config.gateway.port)
    try:
        return client, bind(config.gateway.admin_host, config.admin_port)
    except BaseException:
        client.close()
        raise


@contextlib.asynccontextmanager
async def running_gateway(
    config: Config, engines: Sequence[EngineAddress], sockets: tuple[socket.socket, socket.socket]
) -> AsyncIterator[Gateway]:
    """Serve until the block is left; then drain within `timeouts.shutdown`."""
    timeouts = config.timeouts
    pool = EnginePool(engines, timeouts)
    journal = Journal()
    releaser = Releaser(pool, journal)
    proxy = Proxy(pool, RoundRobin(), journal, releaser, timeouts, clock=time.monotonic)
    client = Listener(
        ClientApp(proxy, pool).router(),
        sockets[0],
        max_body_bytes=config.gateway.max_body_bytes,
        shutdown_s=timeouts.shutdown,
    )
    admin = Listener(AdminApp(pool, journal).router(), sockets[1], shutdown_s=1)
    watching = asyncio.create_task(pool.run())
    try:
        async with admin, client:
            yield Gateway(pool, journal, proxy, client, admin, watching)
        await releaser.drain()
    finally:
        watching.cancel()
        await asyncio.wait([watching])
