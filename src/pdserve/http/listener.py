"""A listening socket with an application behind it, under uvicorn's server: bind, start, drain, stop.

uvicorn's `startup` and `shutdown` are used and its main loop is not: that loop only renews a date header, ten times a
second, and takes the process's signals, which belong to whoever runs several listeners. See `stopped_by_signal`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import time
from typing import TYPE_CHECKING, Self

import uvicorn

from pdserve.config import http_url
from pdserve.errors import ConfigError
from pdserve.http.server import ServerConnection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from types import TracebackType

    from uvicorn.server import ServerState

    from pdserve.http.server import Application, Request

_GREETING_S = 1.0
"""What is left of a TLS handshake when the listener stops has so long."""
_FIRST_BYTES_S = 0.1
"""So long a connection is new. To a stop it is not idle yet: its first request is on its way, and no client sends it again."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 lets the kernel choose. Raises ConfigError when the address is not to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named. With it, what is written after a head waits for
    # the client's delayed acknowledgement of that head: 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}; choose another port") from exc
    sock.setblocking(False)
    return sock


def server_tls(cert: str, key: str) -> ssl.SSLContext:
    """TLS 1.2 and newer with this certificate and its key, both PEM. Raises ConfigError.

    Loading them into the context again changes what new connections get; see `load_certificate`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, cert, key)
    return context


def load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Raises ConfigError."""
    where = f"gateway.tls_cert = {cert!r}, gateway.tls_key = {key!r}"
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as exc:
        what = "they do not belong together" if exc.reason == "KEY_VALUES_MISMATCH" else "no PEM certificate and key"
        raise ConfigError(f"{where}: {what}") from exc
    except ValueError as exc:
        raise ConfigError(f"{where}: the key is encrypted; give one that is not") from exc
    except OSError as exc:
        raise ConfigError(f"{where}: cannot read them: {exc.strerror}") from exc


def _no_password() -> str:
    """Without this, OpenSSL asks for one on the terminal."""
    raise ValueError


class Listener:
    """Serves one application on one socket while it is entered; without one, the clients that are given to `take`.

    `admit` sees the head of a request with a long body before the body is read; what it raises is the answer. Clients beyond
    `max_connections` are refused with 503. `keeps_half_closed`: a client that only finished sending still gets its answer.
    """

    def __init__(
        self,
        application: Application,
        sock: socket.socket | None,
        *,
        tls: ssl.SSLContext | None = None,
        admit: Callable[[Request], None] = lambda _: None,
        max_connections: int | None = None,
        keeps_half_closed: bool = True,
        max_body_bytes: int = 64 * 1024 * 1024,
        keep_alive_s: float = 75.0,
        shutdown_s: float = 30.0,
    ) -> None:
        def connect(server_state: ServerState, **_unused: object) -> ServerConnection:
            self._someone_came()
            return ServerConnection(
                application,
                server_state,
                max_body_bytes=max_body_bytes,
                keep_alive_s=keep_alive_s,
                admit=admit,
                max_connections=max_connections,
                keeps_half_closed=keeps_half_closed,
            )

        self._sockets = [] if sock is None else [sock]
        self._tls = tls
        self._connect = connect
        self._greetings: set[asyncio.Task[None]] = set()
        """Connections on their way in: with TLS that takes a while."""
        self._last_came_at_s = 0.0
        self._is_started = False
        self._server = uvicorn.Server(
            uvicorn.Config(
                _never_asgi,
                http=connect,  # type: ignore[arg-type]
                interface="asgi3",
                lifespan="off",
                log_config=None,
                proxy_headers=False,
                ws="none",
                timeout_graceful_shutdown=max(1, round(shutdown_s)),
            )
        )

    @property
    def url(self) -> str:
        """Where the listener is reached from this machine."""
        (sock,) = self._sockets
        host, port = sock.getsockname()[:2]
        return http_url(host, port, is_tls=self._tls is not None)

    @property
    def num_connections(self) -> int:
        """Clients connected now."""
        return len(self._server.server_state.connections)

    def take(self, connection: socket.socket) -> None:
        """Serve a client whose connection somebody else accepted."""
        greeting = asyncio.create_task(self._greet(connection))
        self._greetings.add(greeting)
        greeting.add_done_callback(lambda _: self._greeted(greeting, connection))

    def renew_certificate(self, cert: str, key: str) -> None:
        """For connections from now on. Raises ConfigError, and then nothing has changed."""
        assert self._tls is not None
        load_certificate(self._tls, cert, key)

    def force_stop(self) -> None:
        """Do not wait for open requests any longer."""
        self._server.force_exit = True

    async def __aenter__(self) -> Self:
        config = self._server.config
        config.load()
        config.ssl = self._tls
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup(sockets=self._sockets)
        self._is_started = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop listening, hear those who have just come, let open requests end within the limit, cancel the rest."""
        if not self._is_started:
            return
        self._is_started = False
        self._stop_listening()
        await self._hear_newcomers()
        await self._server.shutdown(sockets=self._sockets)
        for task in list(self._server.server_state.tasks):
            task.cancel()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    def _stop_listening(self) -> None:
        """As uvicorn's shutdown does, which comes only after the newcomers."""
        for server in self._server.servers:
            server.close()
        for sock in self._sockets:
            sock.close()

    async def _hear_newcomers(self) -> None:
        """uvicorn's shutdown ends whoever has no request under way, also those who had no time yet to send one."""
        if self._greetings:
            await asyncio.wait(self._greetings, timeout=_GREETING_S)
        for greeting in self._greetings:
            greeting.cancel()
        await asyncio.sleep(max(0.0, self._last_came_at_s + _FIRST_BYTES_S - time.monotonic()))

    def _someone_came(self) -> None:
        self._last_came_at_s = time.monotonic()

    def _greeted(self, greeting: asyncio.Task[None], connection: socket.socket) -> None:
        self._greetings.discard(greeting)
        if greeting.cancelled():
            connection.close()

    async def _greet(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        # A client that speaks no TLS, or has left meanwhile, is nobody's concern.
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(
                lambda: self._connect(self._server.server_state), connection, ssl=self._tls
            )
            self._someone_came()


async def _never_asgi(scope: object, receive: object, send: object) -> None:
    """uvicorn wants an ASGI application, and takes anything with fewer arguments for a factory; this is never called."""
    raise AssertionError(scope, receive, send)


class StopSignal:
    """Waits for the first SIGINT or SIGTERM; a second one forces."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._force: list[Callable[[], None]] = []

    async def wait(self) -> None:
        """Until the first signal."""
        await self._stop.wait()

    def on_second(self, force: Callable[[], None]) -> None:
        """What a second signal calls."""
        self._force.append(force)

    def signalled(self) -> None:
        """A signal came."""
        if self._stop.is_set():
            for force in self._force:
                force()
        self._stop.set()


@contextlib.asynccontextmanager
async def stopped_by_signal() -> AsyncIterator[StopSignal]:
    """Take the process's SIGINT and SIGTERM while the block runs."""
    loop = asyncio.get_running_loop()
    stop = StopSignal()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.signalled)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
