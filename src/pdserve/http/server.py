"""The server side of one connection: parses requests, hands each to the application, frames what it answers.

Runs under uvicorn's server, which keeps the listening sockets, TLS and the ordered shutdown, as the class that its `http=`
takes. ASGI is left out because its queue and task switch for every piece of a body are most of what a relayed chunk costs.
This module knows nothing of OpenAI, engines or KV.
"""

from __future__ import annotations

import asyncio
import http
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

import httptools

from pdserve.errors import InvalidRequest, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from uvicorn.server import ServerState

Headers = list[tuple[bytes, bytes]]

MAX_HEADER_BYTES = 64 * 1024
"""The request line and all headers together; nginx and Node allow 8 to 16 KiB, some API gateways add long tokens."""
MAX_HEADERS = 128
HEADER_TIMEOUT_S = 30.0
"""From the connection, or a request's first byte, to the end of its headers: a client that sends a byte a minute is cut off."""
BODY_TIMEOUT_S = 300.0
MAX_PIPELINED = 16
"""Requests that may wait behind the one that is being answered before the connection is no longer read."""

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}

_logger = logging.getLogger("pdserve.http")


class PausableSource(Protocol):
    """Whatever a response's bytes come from, when it can be told to wait."""

    def pause_reading(self) -> None:
        """Stop delivering."""

    def resume_reading(self) -> None:
        """Go on."""


class Application(Protocol):
    """What a connection calls."""

    async def handle(self, request: Request, response: Response) -> None:
        """Answer one request. Cancelled when the client goes away. Raises nothing that it can answer itself."""

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        """Headers and body for something that was not a request."""


class Request:
    """One whole request. Header names are lower case."""

    __slots__ = ("body", "headers", "keep_alive", "knows_chunks", "method", "path", "query", "received_at_s")

    def __init__(
        self,
        method: bytes,
        path: bytes,
        query: bytes,
        headers: Headers,
        body: bytes,
        *,
        knows_chunks: bool,
        keep_alive: bool,
        received_at_s: float,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.body = body
        self.knows_chunks = knows_chunks
        """False for HTTP/1.0, where the end of the connection is the end of the body."""
        self.keep_alive = keep_alive
        self.received_at_s = received_at_s

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Response:
    """The answer to one request; writes straight to the client's socket, without a queue of its own."""

    __slots__ = ("_connection", "_head_only", "_is_chunked", "_keep_alive", "_knows_chunks", "is_ended", "is_started")

    def __init__(self, connection: ServerConnection, *, head_only: bool, knows_chunks: bool, keep_alive: bool) -> None:
        self._connection = connection
        self._head_only = head_only
        self._knows_chunks = knows_chunks
        self._keep_alive = keep_alive
        self._is_chunked = False
        self.is_started = False
        self.is_ended = False

    def send(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Answer all at once."""
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
        self.is_started = True
        self._connection.write(head if self._head_only else head + body)
        self.end()

    def start(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], *, source: PausableSource | None = None
    ) -> None:
        """Send the head of an answer whose length is not known; `source` is paused while the client reads too slowly."""
        assert not self.is_started
        self.is_started = True
        self._is_chunked = self._knows_chunks
        framing = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        self._connection.write(self._head(status, headers, framing))
        self._connection.feed_from(source)

    def write(self, data: bytes) -> None:
        """Send a piece of the body that `start` began."""
        if self._head_only or not data:
            return
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def end(self) -> None:
        """Finish. The connection takes its next request."""
        assert self.is_started
        if self.is_ended:
            return
        self.is_ended = True
        if self._is_chunked and not self._head_only:
            self._connection.write(b"0\r\n\r\n")
        self._connection.response_ended(keep_alive=self._keep_alive)

    def abort(self) -> None:
        """Break off: the client sees that the answer is not whole."""
        self.is_ended = True
        self._connection.abort()

    def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]], framing: bytes) -> bytes:
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        closing = b"" if self._keep_alive else b"connection: close\r\n"
        return b"".join((line, *(b"%b: %b\r\n" % header for header in headers), framing, closing, b"\r\n"))


class ServerConnection(asyncio.Protocol):
    """One client's connection: parser, pipeline, keep-alive and the task that answers."""

    def __init__(
        self, application: Application, state: ServerState, *, max_body_bytes: int, keep_alive_s: float
    ) -> None:
        self._application = application
        self._state = state
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Request] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._has_ended_response = False
        self._url = b""
        self._headers: Headers = []
        self._header_bytes = 0
        self._is_in_body = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._is_write_paused = False
        self.source: PausableSource | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, though they do all that these do.
        self._transport = cast("asyncio.Transport", transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._start_timer(HEADER_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._state.connections.discard(self)
        self._is_closing = True
        self._stop_timer()
        self._waiting.clear()
        self.source = None
        if self._task is not None and not self._has_ended_response:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            self._go_on_without_upgrade(data[exc.args[0] :])
        except httptools.HttpParserCallbackError as exc:
            refusal = exc.__context__
            if not isinstance(refusal, InvalidRequest):
                raise
            self._refuse(refusal)
        except httptools.HttpParserError as exc:
            self._refuse(InvalidRequest(f"not a valid HTTP/1.1 request: {exc}", reason=Reason.MALFORMED_HTTP))

    def pause_writing(self) -> None:
        self._is_write_paused = True
        if self.source is not None:
            self.source.pause_reading()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if self.source is not None:
            self.source.resume_reading()

    # httptools' side

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._header_bytes = 0
        self._is_in_body = False
        self._body = []
        self._body_bytes = 0
        if self._task is None:
            self._start_timer(HEADER_TIMEOUT_S)

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_header_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_body:
            return  # A trailer after the last chunk: nothing here may depend on it.
        self._headers.append((name.lower(), value))
        self._count_header_bytes(len(name) + len(value))
        if len(self._headers) > MAX_HEADERS:
            raise InvalidRequest(f"more than {MAX_HEADERS} headers", status=431, reason=Reason.HEADERS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        if self._task is None:
            self._start_timer(BODY_TIMEOUT_S)
        for name, value in self._headers:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_body_bytes:
                self._refuse_body()
            if name == b"expect" and value.lower() == b"100-continue" and self._task is None:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._max_body_bytes:
            self._refuse_body()

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # Not complete at all: see `_go_on_without_upgrade`.
        path, _, query = self._url.partition(b"?")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        # HTTP/1.0 knows no chunks, and keeps a connection only where both sides say so, which is not worth the words.
        is_http_1_0 = self._parser.get_http_version() == "1.0"
        request = Request(
            self._parser.get_method(),
            path,
            query,
            self._headers,
            body,
            knows_chunks=not is_http_1_0,
            keep_alive=self._parser.should_keep_alive() and not is_http_1_0,
            received_at_s=time.monotonic(),
        )
        self._body = []
        if self._task is None:
            self._answer(request)
            return
        self._waiting.append(request)
        if len(self._waiting) >= MAX_PIPELINED and self._transport is not None:
            self._transport.pause_reading()

    # The response's side

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._is_closing:
            self._transport.write(data)

    def feed_from(self, source: PausableSource | None) -> None:
        """Name what the open answer's bytes come from; the client may be too slow already, from an answer before."""
        self.source = source
        if source is not None and self._is_write_paused:
            source.pause_reading()

    def response_ended(self, *, keep_alive: bool) -> None:
        self._has_ended_response = True
        self.source = None
        if not keep_alive:
            self._close()

    def abort(self) -> None:
        self._is_closing = True
        self.source = None
        if self._transport is not None:
            self._transport.abort()

    # uvicorn's side

    def shutdown(self) -> None:
        """Close now when idle, else after the request in hand."""
        self._waiting.clear()
        if self._task is None:
            self._close()
        else:
            self._keep_alive_s = 0.0

    # Inside

    def _answer(self, request: Request) -> None:
        self._stop_timer()
        self._has_ended_response = False
        response = Response(
            self,
            head_only=request.method == b"HEAD",
            knows_chunks=request.knows_chunks,
            keep_alive=request.keep_alive and self._keep_alive_s > 0,
        )
        self._task = self._loop.create_task(self._application.handle(request, response))
        self._state.tasks.add(self._task)
        self._state.total_requests += 1
        self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._state.tasks.discard(task)
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("the application failed", exc_info=error)
        if self._is_closing:
            return
        if not self._has_ended_response or self._keep_alive_s <= 0:
            self._close()
        elif self._waiting:
            request = self._waiting.popleft()
            if self._transport is not None and not self._transport.is_reading():
                self._transport.resume_reading()
            self._answer(request)
        else:
            self._start_timer(self._keep_alive_s)

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Answer in HTTP/1.1, as RFC 9110 (7.8) allows; Java's client asks for h2c with every first request.

        llhttp stops at the end of the headers then, so the same request is read again without that header.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(InvalidRequest("this is no proxy", status=405, reason=Reason.METHOD_NOT_ALLOWED))
            return
        version = self._parser.get_http_version().encode()
        headers = [header for header in self._headers if header[0] not in {b"upgrade", b"http2-settings"}]
        head = b"%b %b HTTP/%b\r\n" % (method, self._url, version)
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(head + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n" + rest)

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise InvalidRequest(
                f"request line and headers exceed {MAX_HEADER_BYTES} bytes", status=431, reason=Reason.HEADERS_TOO_LARGE
            )

    def _refuse_body(self) -> None:
        raise InvalidRequest(f"the body exceeds {self._max_body_bytes} bytes", status=413, reason=Reason.BODY_TOO_LARGE)

    def _refuse(self, error: InvalidRequest) -> None:
        """Answer what is not a request, and close: where the next one begins can no longer be known."""
        if self._task is not None:
            # An answer is under way on this connection; a second one would land in the middle of it.
            self._task.cancel()
            self.abort()
            return
        response = Response(self, head_only=False, knows_chunks=True, keep_alive=False)
        headers, body = self._application.render_error(error)
        response.send(error.status, headers, body)

    def _close(self) -> None:
        self._is_closing = True
        self._stop_timer()
        if self._transport is not None:
            self._transport.close()

    def _start_timer(self, delay_s: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(delay_s, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
