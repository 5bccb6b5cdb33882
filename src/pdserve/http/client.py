"""The client side: pooled connections to one server, each carrying one exchange at a time into a sink.

A sink's methods are called straight from the socket's callback, so a relayed piece costs neither a queue nor a task switch.
This module knows nothing of OpenAI, engines or KV, and maps no errors: ConnectionFailed and ProtocolViolated say what
happened on the wire, and pdserve.engine.transport makes engine errors of them.
"""

from __future__ import annotations

import asyncio
import errno
import http
import os
import socket
import ssl
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from pdserve.http.head import MAX_HEADER_BYTES, MAX_HEADERS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.http.server import Headers

    Piece = bytes | memoryview

MAX_IDLE_S = 4.0
"""vLLM's server closes a connection that was idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE, vllm/envs.py in 0.32). One that is
used again just then would be lost together with its request, so ours are let go a second earlier."""


_MAX_INTERIM_ANSWERS = 16
"""A server may announce its answer (1xx) as often as it likes; one that does nothing else never answers."""
_FIRST_FINAL_STATUS = 200
_VERSIONS = frozenset({"1.0", "1.1"})
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


_OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""What the kernel says when it is this side that lacks descriptors, memory or a free local port (connect(2), socket(2))."""


class ConnectionFailed(Exception):
    """No connection, or one that ended before the answer was whole. `is_unanswered`: not a byte of an answer had come."""

    def __init__(self, message: str, *, is_unanswered: bool) -> None:
        super().__init__(message)
        self.is_unanswered = is_unanswered


class NoSocketLeft(Exception):
    """This process or its machine has no socket left for a connection; the server was not even asked."""


class ProtocolViolated(Exception):
    """The server answered something that is not HTTP/1.1."""


class Sink(Protocol):
    """Where an answer goes. Exactly one of `on_end` and `on_failure` comes last."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Status and headers; header names in lower case."""

    def on_body(self, data: bytes) -> None:
        """A piece of the body, as the socket delivered it."""

    def on_end(self) -> None:
        """The answer is whole."""

    def on_failure(self, error: ConnectionFailed | ProtocolViolated) -> None:
        """It will not become whole."""


class ClientConnection(asyncio.Protocol):
    """One connection. Owned by its pool when idle, by one exchange when not."""

    def __init__(self, release: Callable[[ClientConnection], None], forget: Callable[[ClientConnection], None]) -> None:
        self._release = release
        self._forget = forget
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        """For all answers in turn; None once nothing more can come, since it refers back to here."""
        self._sink: Sink | None = None
        self._headers: Headers = []
        self._num_headers = 0
        self._header_bytes = 0
        self._num_interim = 0
        self._silent_bytes = 0
        self._has_news = False
        self._has_bytes = False
        self._is_head_whole = False
        self._is_whole = False
        self._may_be_kept = False
        self._has_excess = False
        self._has_length = False
        self.is_closed = False
        self._is_leaving = False
        self._is_paused = False
        self.was_used = False
        self.was_unsent = False
        """Whether it was dropped before all of the request had left: the server cannot have acted on it."""
        self.idle_since_s = 0.0

    def send(self, request: bytes | Sequence[Piece], sink: Sink) -> None:
        """Send a whole request, at once or in pieces that are not copied; its answer goes to the sink."""
        assert self._sink is None
        assert self._transport is not None
        self._sink = sink
        self._has_bytes = self._is_head_whole = self._is_whole = self._has_excess = False
        self._num_interim = self._silent_bytes = 0
        if isinstance(request, bytes):
            self._transport.write(request)
        else:
            self._transport.writelines(request)

    def abort(self) -> None:
        """Drop the exchange and the connection: the server sees its client gone. The sink hears nothing more."""
        self._sink = None
        self.was_unsent |= self._has_unsent
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def try_leave(self) -> bool:
        """Say that nothing more will come, and go on reading: an answer that is on its way can still arrive.

        The server sees its client gone, as with `abort`. False where that cannot be said: over TLS, or in mid-request. The
        caller aborts the connection some time later.
        """
        if self._transport is None or self.is_closed or self._has_unsent or not self._transport.can_write_eof():
            return False
        self._is_leaving = True
        self._transport.write_eof()
        return True

    @property
    def _has_unsent(self) -> bool:
        return self._transport is not None and not self.is_closed and self._transport.get_write_buffer_size() > 0

    def pause_reading(self) -> None:
        """Let the server wait: the sink cannot take more now."""
        if self._transport is not None and not self.is_closed:
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Undo `pause_reading`."""
        if self._is_paused and self._transport is not None and not self.is_closed:
            self._is_paused = False
            self._transport.resume_reading()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, though they do all that these do.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._sink is None or self._parser is None:
            # Bytes that nobody asked for: whatever they are, they must not become the next request's answer.
            self.abort()
            return
        self._has_bytes = True
        self._has_news = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as exc:
            if isinstance(exc.__context__, ProtocolViolated):
                self._fail(exc.__context__)
                return
            # A sink may not raise. If one does, its exchange must end all the same, and the fault be seen.
            self._fail(ProtocolViolated("the answer could not be taken"))
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._has_excess = True
            if not self._is_whole:  # What follows a whole answer ends the connection, not the answer.
                self._fail(ProtocolViolated(f"not a valid HTTP/1.1 answer: {_shown(exc)}"))
        else:
            if self._has_news:
                self._silent_bytes = 0
            else:
                self._watch_silence(len(data))
        if self._is_whole:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._parser = None
        sink, self._sink = self._sink, None
        if sink is None:
            self._forget(self)
            return
        if self._is_head_whole and not self._has_length and exc is None:
            sink.on_end()  # Neither a length nor chunks: the end of the connection is the end of the body (RFC 9112, 6.3).
            return
        what = "before it answered" if not self._has_bytes else "in the middle of its answer"
        sink.on_failure(ConnectionFailed(f"the connection ended {what}", is_unanswered=not self._has_bytes))

    # httptools' side

    def on_message_begin(self) -> None:
        self._has_news = True
        self._has_excess = self._is_whole
        self._headers = []
        self._num_headers = 0
        self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_news = True
        self._num_headers += 1
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS:
            raise _head_too_large()
        if not self._is_head_whole:  # Else it is a trailer, which changes nothing.
            self._headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        if self._is_whole:
            return
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < _FIRST_FINAL_STATUS:
            self._count_interim(status)
            return
        self._is_head_whole = True
        self._has_length = _check_framing(self._parser.get_http_version(), self._headers)
        if self._sink is not None:
            self._sink.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        self._has_news = True
        if self._sink is not None and not self._is_whole:
            self._sink.on_body(data)

    def on_message_complete(self) -> None:
        if self._is_whole or not self._is_head_whole or self._sink is None or self._parser is None:
            return
        self._is_whole = True
        self._may_be_kept = self._parser.should_keep_alive()  # llhttp knows it only here.

    # Inside

    def _finish(self) -> None:
        """The answer is whole; the connection is good for another one unless it holds more bytes already."""
        sink, self._sink = self._sink, None
        if sink is None or self._transport is None:
            return  # The sink dropped it in the meantime.
        if self._may_be_kept and not self._is_leaving and not self._has_excess and not self._transport.is_closing():
            self.resume_reading()
            self.was_used = True
            self._release(self)
        else:
            self.is_closed = True
            self._transport.close()
        sink.on_end()

    def _count_interim(self, status: int) -> None:
        self._num_interim += 1
        if status == http.HTTPStatus.SWITCHING_PROTOCOLS:
            raise ProtocolViolated("the server switches to another protocol, which nobody asked for")
        if self._num_interim > _MAX_INTERIM_ANSWERS:
            raise ProtocolViolated(f"more than {_MAX_INTERIM_ANSWERS} interim answers (1xx) and no answer")

    def _watch_silence(self, num_bytes: int) -> None:
        """httptools keeps a header until it is whole, without a limit: only how much it takes without a word tells."""
        self._silent_bytes += num_bytes
        if self._silent_bytes > MAX_HEADER_BYTES:
            self._fail(_head_too_large())

    def _fail(self, error: ProtocolViolated) -> None:
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.on_failure(error)


def _check_framing(version: str, headers: Headers) -> bool:
    """Whether the answer tells its own end. Raises ProtocolViolated for one that tells two, or in a way not understood."""
    if version not in _VERSIONS:
        raise ProtocolViolated(f"not a valid HTTP/1.1 answer: its version is {version}")
    has_length = False
    for name, value in headers:
        if name not in _FRAMING:
            continue
        if has_length:
            raise ProtocolViolated("not a valid HTTP/1.1 answer: more than one of content-length and transfer-encoding")
        has_length = True
        if name == b"transfer-encoding" and (value.lower() != b"chunked" or version == "1.0"):
            raise ProtocolViolated("not a valid HTTP/1.1 answer: its transfer-encoding is not chunked")
    return has_length


def _head_too_large() -> ProtocolViolated:
    return ProtocolViolated(f"its headers exceed {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} lines")


def _shown(error: httptools.HttpParserError | httptools.HttpParserUpgrade) -> str:
    return "an upgrade" if isinstance(error, httptools.HttpParserUpgrade) else str(error)


def _is_own_limit(error: OSError) -> bool:
    """Whether a connection failed for want of something on this side.

    A resolver without descriptors only says that it found no name, so a descriptor is asked for there.
    """
    if not isinstance(error, socket.gaierror):
        return error.errno in _OWN_LIMITS
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as exc:
        return exc.errno in _OWN_LIMITS
    return False


class ConnectionPool:
    """Connections to one host and port."""

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: deque[ClientConnection] = deque()
        self._loop = asyncio.get_running_loop()

    def try_acquire(self) -> ClientConnection | None:
        """A connection that was used before and is idle; None when there is none that can still be trusted."""
        oldest_s = self._loop.time() - MAX_IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_closed:
                continue
            if connection.idle_since_s > oldest_s:
                return connection
            connection.abort()
        return None

    async def connect(self) -> ClientConnection:
        """A new connection. Raises ConnectionFailed or NoSocketLeft."""
        try:
            _, connection = await self._loop.create_connection(
                lambda: ClientConnection(self._put_back, self._forget), self._host, self._port, ssl=self._tls
            )
        except (OSError, ssl.SSLError) as exc:
            if _is_own_limit(exc):
                raise NoSocketLeft(f"cannot open a connection: {exc.strerror or exc}") from exc
            raise ConnectionFailed(f"cannot connect: {exc.strerror or exc}", is_unanswered=True) from exc
        return connection

    def close(self) -> None:
        """Close what is idle; exchanges under way are their owners' to end."""
        while self._idle:
            self._idle.pop().abort()

    def _forget(self, connection: ClientConnection) -> None:
        """One that ended while it was idle, or that its owner dropped."""
        if connection in self._idle:
            self._idle.remove(connection)

    def _put_back(self, connection: ClientConnection) -> None:
        connection.idle_since_s = self._loop.time()
        self._idle.append(connection)
