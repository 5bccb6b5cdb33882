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
from pdserve.gateway.auth import read_credentials
from pdserve.gateway.journal import Journal
from pdserve.gateway.proxy import Proxy
from pdserve.gateway.release import Releaser
from pdserve.http.listener import Listener, bind, server_tls
from pdserve.policy.round_robin import RoundRobin
from pdserve.telemetry.tally import Tally

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import AsyncIterator, Sequence

    from pdserve.config import Config, GatewayConfig
    from pdserve.core import EngineAddress
    from pdserve.gateway.auth import Credentials


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
    config: Config,
    engines: Sequence[EngineAddress],
    sockets: tuple[socket.socket, socket.socket],
    *,
    credentials: Credentials | None = None,
    max_clients: int | None = None,
) -> AsyncIterator[Gateway]:
    """Serve until the block is left; then drain within `timeouts.shutdown`. Without credentials, those of `config` alone.

    Clients beyond `max_clients` connections are refused: engines need sockets too.
    """
    credentials = credentials or read_credentials(config, {})
    timeouts, clock = config.timeouts, time.monotonic
    tally = Tally()
    pool = EnginePool(engines, config, tally, access=credentials.engines, clock=clock)
    journal = Journal(tally)
    releaser = Releaser(pool, tally)
    proxy = Proxy(config, pool, RoundRobin(), journal, releaser, tally=tally, credentials=credentials, clock=clock)
    client = Listener(
        ClientApp(proxy, pool).router(guard=proxy.admit),
        sockets[0],
        tls=_client_tls(config.gateway),
        admit=proxy.admit,
        max_connections=max_clients,
        max_body_bytes=config.gateway.max_body_bytes,
        shutdown_s=timeouts.shutdown,
    )
    admin = Listener(AdminApp(proxy).router(), sockets[1], shutdown_s=1)
    watching = asyncio.create_task(pool.run())
    try:
        async with admin, client:
            yield Gateway(pool, journal, proxy, client, admin, watching)
        await releaser.drain()
    finally:
        proxy.close()
        watching.cancel()
        await asyncio.wait([watching])


def _client_tls(config: GatewayConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return server_tls(config.tls_cert, config.tls_key)
