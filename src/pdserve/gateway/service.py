"""Puts a gateway together and runs it: pool, policy, proxy, and the two listeners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.engine.pool import EnginePool
from pdserve.errors import ConfigError
from pdserve.gateway.admin import AdminApp
from pdserve.gateway.app import ClientApp
from pdserve.gateway.auth import read_credentials
from pdserve.gateway.journal import Journal
from pdserve.gateway.operations import LocalOperations
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
    from pdserve.engine.board import Board
    from pdserve.gateway.auth import Credentials

_logger = logging.getLogger("pdserve.gateway")


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    config: Config
    credentials: Credentials
    operations: LocalOperations
    pool: EnginePool
    journal: Journal
    proxy: Proxy
    client: Listener
    admin: Listener
    watching: asyncio.Task[None]
    """Ends only by a fault: a gateway that no longer knows its engines must not look alive."""

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self.client.url

    @property
    def admin_url(self) -> str:
        """Where the operator connects."""
        return self.admin.url

    @property
    def changed(self) -> asyncio.Event:
        """Set whenever an engine or a pair changes state; whoever waits on it clears it."""
        return self.pool.changed

    def force_stop(self) -> None:
        """Do not wait for open requests any longer."""
        self.client.force_stop()

    def renew(self) -> None:
        """Read the clients' keys and the certificate again, from their files. What is not right changes nothing."""
        self.credentials.clients.reload()
        cert, key = self.config.gateway.tls_cert, self.config.gateway.tls_key
        if cert is None or key is None:
            return
        try:
            self.client.renew_certificate(cert, key)
        except ConfigError as exc:
            _logger.error("the certificate stays as it is: %s", exc)  # noqa: TRY400 - the message says it all
        else:
            _logger.info("certificate read again")


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
    sockets: tuple[socket.socket | None, socket.socket | None],
    *,
    credentials: Credentials | None = None,
    max_clients: int | None = None,
    board: Board | None = None,
) -> AsyncIterator[Gateway]:
    """Serve until the block is left; then drain within `timeouts.shutdown`. Without credentials, those of `config` alone.

    Clients beyond `max_clients` connections are refused: engines need sockets too. A worker among several has a `board`, and
    no sockets: its front gives it its clients, and asks its `operations`.
    """
    credentials = credentials or read_credentials(config, {})
    timeouts, clock = config.timeouts, time.monotonic
    tally = Tally()
    pool = EnginePool(engines, config, tally, access=credentials.engines, clock=clock, board=board)
    journal = Journal(tally)
    releaser = Releaser(pool, tally)
    policy = RoundRobin(first_turn=board.worker if board is not None else 0)
    proxy = Proxy(config, pool, policy, journal, releaser, tally=tally, credentials=credentials, clock=clock)
    client = Listener(
        ClientApp(proxy, pool).router(guard=proxy.admit),
        sockets[0],
        tls=_client_tls(config.gateway),
        admit=proxy.admit,
        max_connections=max_clients,
        max_body_bytes=config.gateway.max_body_bytes,
        shutdown_s=timeouts.shutdown,
    )
    operations = LocalOperations(proxy)
    admin = Listener(AdminApp(operations).router(), sockets[1], shutdown_s=1)
    watching = asyncio.create_task(pool.run())
    try:
        async with admin, client:
            yield Gateway(config, credentials, operations, pool, journal, proxy, client, admin, watching)
        await releaser.drain()
    finally:
        proxy.close()
        watching.cancel()
        await asyncio.wait([watching])


def _client_tls(config: GatewayConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return server_tls(config.tls_cert, config.tls_key)
