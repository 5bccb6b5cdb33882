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
import msgspec

from pdserve.errors import InvalidRequest, MethodNotAllowed, Reason
from pdserve.http.hang_up import HangUpWatch
from pdserve.http.head import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    read_head,
    read_target,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from uvicorn.server import ServerState

Headers = list[tuple[bytes, bytes]]

HEADER_TIMEOUT_S = 30.0
"""From the connection, or a request's first byte, to the end of its headers: a client that sends a byte a minute is cut off."""
BODY_TIMEOUT_S = 300.0
MAX_PIPELINED = 16
"""Requests that may wait behind the one that is being answered before the connection is no longer read."""
MAX_UNADMITTED_BYTES = 64 * 1024
"""A longer body is only read once its head has been admitted: who may not ask must not fill the memory either."""
LINGER_S = 2.0
"""How long a client's bytes are still taken, and dropped, after its last answer: closing in the middle of them would reset
the connection, and the client would lose that answer."""
PROBE_INTERVAL_S = 5.0
"""How often a half-closed client is asked whether it is still there."""
FLUSH_INTERVAL_S = 15.0
"""A closing connection must get rid of some of its last bytes in this time: a client that reads nothing is not waited for."""
DRAIN_INTERVAL_S = 120.0
"""The same for whole answers on a connection that stays; a stream's source minds its own client."""

_MAX_PIECES = 256

_METHODS = ("GET", "HEAD", "OPTIONS", "POST")

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
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


class Request(msgspec.Struct):
    """One whole request. Header names are lower case."""

    method: bytes
    path: bytes
    query: bytes
    headers: Headers
    knows_chunks: bool
    """False for HTTP/1.0, where the end of the connection is the end of the body."""
    keep_alive: bool
    received_at_s: float
    body: bytes = b""
    key_name: str | None = None
    """Whose key came with it, once the application knows: a name that may be shown anywhere."""

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Response(msgspec.Struct):
    """The answer to one request; writes straight to the client's socket, without a queue of its own."""

    connection: ServerConnection
    head_only: bool
    knows_chunks: bool
    keep_alive: bool
    is_chunked: bool = False
    is_started: bool = False
    is_ended: bool = False

    def send(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Answer all at once."""
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
        self.is_started = True
        self.connection.write(head if self.head_only else head + body)
        self.end()

    def start(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], *, source: PausableSource | None = None
    ) -> None:
        """Send the head of an answer whose length is not known; `source` is paused while the client reads too slowly."""
        assert not self.is_started
        self.is_started = True
        self.is_chunked = self.knows_chunks
        framing = b"transfer-encoding: chunked\r\n" if self.is_chunked else b""
        self.connection.write(self._head(status, headers, framing))
        self.connection.feed_from(source)

    def write(self, data: bytes) -> None:
        """Send a piece of the body that `start` began."""
        if self.head_only or not data:
            return
        self.connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self.is_chunked else data)

    def end(self) -> None:
        """Finish. The connection takes its next request."""
        assert self.is_started
        if self.is_ended:
            return
        self.is_ended = True
        if self.is_chunked and not self.head_only:
            self.connection.write(b"0\r\n\r\n")
        self.connection.response_ended(keep_alive=self.keep_alive)

    @property
    def is_client_there(self) -> bool:
        """Whether what is sent can still arrive: in a task that is cancelled it tells a stop from a client that left."""
        return not self.connection.is_closing

    def abort(self) -> None:
        """Break off: the client sees that the answer is not whole."""
        self.is_ended = True
        self.connection.abort()

    def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]], framing: bytes) -> bytes:
        line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        self.keep_alive = self.keep_alive and self.connection.keeps_alive
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        return b"".join([line, *[b"%b: %b\r\n" % header for header in headers], framing, closing, b"\r\n"])


class ServerConnection(asyncio.Protocol):
    """One client's connection: parser, pipeline, keep-alive and the task that answers."""

    def __init__(
        self,
        application: Application,
        state: ServerState,
        *,
        max_body_bytes: int,
        keep_alive_s: float,
        admit: Callable[[Request], None] = lambda _: None,
        max_connections: int | None = None,
        keeps_half_closed: bool = True,
    ) -> None:
        """Beyond `max_connections` of the same listener, one is refused with 503."""
        self._application = application
        self._admit = admit
        self._max_connections = max_connections
        self._keeps_half_closed = keeps_half_closed
        self._state = state
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = 0.0
        self._due_s = 0.0
        self._on_due: Callable[[], None] | None = None
        self.is_closing = False
        self._is_deaf = False
        """What comes now is no request any more: after a refusal, or behind a request that was to be the last."""
        self._has_excess = False
        # What is being answered
        self._task: asyncio.Task[None] | None = None
        self._response: Response | None = None
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._refusal: InvalidRequest | None = None
        """The last answer of this connection, when the requests before it have theirs."""
        self._hang_up: HangUpWatch | None = None
        self._unread: HangUpWatch | None = None
        """While the client is not read because too many of its requests wait: it may leave all the same."""
        self._is_write_paused = False
        self._drain_timer: asyncio.TimerHandle | None = None
        self.source: PausableSource | None = None
        # What is being read
        self._has_news = False
        self._silent_bytes = 0
        self._is_in_message = False
        self._is_in_body = False
        self._are_headers_timed = False
        self._is_body_timed = False
        self._owes_continue = False
        self._url = b""
        self._headers: Headers = []
        self._header_bytes = 0
        self._num_headers = 0
        self._pieces: list[bytes] = []
        """The body's first pieces, to be put together once."""
        self._rest = bytearray()
        """What comes after so many of them: pieces of a byte would weigh fifty each."""
        self._num_body_bytes = 0
        self._request: Request | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, though they do all that these do.
        self._transport = cast("asyncio.Transport", transport)
        self._state.connections.add(self)  # type: ignore[arg-type]
        if self._max_connections is not None and len(self._state.connections) > self._max_connections:
            self._refuse(_too_many_connections(self._max_connections))
        else:
            self._start_timer(HEADER_TIMEOUT_S, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._state.connections.discard(self)
        self.is_closing = True
        self._cancel_timer()
        self._stop_drain_timer()
        self._stop_unread_watch()
        if self._hang_up is not None:
            self._hang_up.close()
        self._waiting.clear()
        self.source = None
        if self._task is not None and not self._has_ended_response:
            self._task.cancel()

    def eof_received(self) -> bool:
        """Whether the connection stays: a client that has nothing more to send still gets its answer (RFC 9112, 9.6).

        A gone client looks the same until something is sent to it. Before an answer has begun there is a harmless word to
        send, and its reset comes within a round trip. Without one to send (HTTP/1.0, a stream that has begun) it counts as
        gone, and so it does under TLS, which knows no half of a connection.
        """
        if not self._keeps_half_closed:
            return False
        transport, response = self._transport, self._response
        if self.is_closing or transport is None or transport.get_extra_info("sslcontext") is not None:
            return False
        if response is None or not (self._waiting if self._is_between_answers else self._can_ask_if_gone(response)):
            return False
        watch = self._watch(transport)
        if watch is None:
            return False
        self._is_deaf = True
        self._hang_up = watch
        self._ask_if_gone()
        return True

    def data_received(self, data: bytes) -> None:
        while data and not self._is_deaf and not self.is_closing:
            data = self._parse(data)
        self._has_excess |= self._is_deaf and bool(data)

    def pause_writing(self) -> None:
        """The client takes too little: neither its next answer nor its next request may fill the memory."""
        self._is_write_paused = True
        if self.source is not None:
            self.source.pause_reading()
        if not self.is_closing:
            self._steer_reading()
            self._await_drain()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._stop_drain_timer()
        if self.source is not None:
            self.source.resume_reading()
        if self.is_closing:
            return
        self._steer_reading()
        if self._task is None:
            self._take_next()

    # httptools' side

    def on_message_begin(self) -> None:
        self._has_news = True
        self._is_in_message = True
        self._is_in_body = False
        self._owes_continue = False
        self._url = b""
        self._headers = []
        self._header_bytes = 0
        self._num_headers = 0
        self._are_headers_timed = self._is_body_timed = False

    def on_url(self, url: bytes) -> None:
        self._has_news = True
        self._url += url
        self._header_bytes += len(url)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise _headers_too_large()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_news = True
        self._num_headers += 1
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise _headers_too_large()
        if self._num_headers > MAX_HEADERS:
            raise InvalidRequest(f"more than {MAX_HEADERS} headers", status=431, reason=Reason.HEADERS_TOO_LARGE)
        if not self._is_in_body:  # A trailer after the last chunk: nothing here may depend on it.
            self._headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        version = self._parser.get_http_version()
        head = read_head(version, self._headers)
        if self._parser.should_upgrade():
            return  # The same head comes again: see `_without_upgrade`.
        self._is_in_body = True
        if head.length > self._max_body_bytes:
            raise _body_too_large(self._max_body_bytes)
        request = self._request = self._read_request(version)
        if head.length > MAX_UNADMITTED_BYTES or head.is_chunked:
            self._admit(request)
        self._owes_continue = head.expects_continue

    def on_chunk_header(self) -> None:
        self._has_news = True

    def on_body(self, data: bytes) -> None:
        self._has_news = True
        self._owes_continue = False
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._max_body_bytes:
            raise _body_too_large(self._max_body_bytes)
        if len(self._pieces) < _MAX_PIECES:
            self._pieces.append(data)
        else:
            self._rest += data

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # Not complete at all: see `_without_upgrade`.
        self._is_in_message = False
        request, self._request = self._request, None
        assert request is not None
        pieces = self._pieces
        request.body = pieces[0] if len(pieces) == 1 else b"".join([*pieces, self._rest])
        request.received_at_s = time.monotonic()
        request.keep_alive = request.knows_chunks and self._parser.should_keep_alive()  # llhttp knows it only here.
        self._drop_body()
        self._is_deaf = not request.keep_alive
        if self._is_between_answers and not self._waiting and not self._is_write_paused:
            self._answer(request)
        else:
            self._queue(request)

    # The response's side

    @property
    def keeps_alive(self) -> bool:
        """Whether another request may come after the one in hand."""
        return self._keep_alive_s > 0

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self.is_closing:
            self._transport.write(data)

    def feed_from(self, source: PausableSource | None) -> None:
        """Name what the open answer's bytes come from; the client may be too slow already, from an answer before."""
        self.source = source
        if source is not None and self._is_write_paused:
            source.pause_reading()

    def response_ended(self, *, keep_alive: bool) -> None:
        self.source = None
        if not keep_alive:
            self._close(lingers=self._has_excess or self._refusal is not None)

    def abort(self) -> None:
        self.is_closing = True
        self.source = None
        if self._transport is not None:
            self._transport.abort()

    # uvicorn's side

    def shutdown(self) -> None:
        """Close now when idle, else after the request in hand, also when only part of it is here yet."""
        is_second = self._keep_alive_s <= 0
        self._waiting.clear()
        self._keep_alive_s = 0.0
        if self._task is None and (is_second or not self._is_in_message):
            self._close()

    # Reading

    def _parse(self, data: bytes) -> bytes:
        """What is to be read again, which is nothing but for an upgrade."""
        self._has_news = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            return self._without_upgrade(data[exc.args[0] :])
        except httptools.HttpParserCallbackError as exc:
            refusal = exc.__context__
            if not isinstance(refusal, InvalidRequest):
                raise
            self._refuse(refusal)
        except httptools.HttpParserError as exc:
            if self._is_deaf:  # llhttp minds what comes behind `connection: close`.
                return data
            self._refuse(InvalidRequest(f"not a valid HTTP/1.1 request: {exc}", reason=Reason.MALFORMED_HTTP))
        else:
            if self._has_news:
                self._silent_bytes = 0
            else:
                self._watch_silence(len(data))
            if self._is_in_message and self._task is None:
                self._await_rest()
        return b""

    def _watch_silence(self, num_bytes: int) -> None:
        """httptools keeps a header until it is whole, without a limit: only how much it takes without a word tells."""
        self._silent_bytes += num_bytes
        if self._silent_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Answer in HTTP/1.1, as RFC 9110 (7.8) allows; Java's client asks for h2c with every first request.

        llhttp stops at the end of the headers then, so the same request is read again without that header.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(MethodNotAllowed("this is no proxy", allowed=_METHODS))
            return b""
        version = self._parser.get_http_version().encode()
        headers = [header for header in self._headers if header[0] not in {b"upgrade", b"http2-settings"}]
        head = b"%b %b HTTP/%b\r\n" % (method, self._url, version)
        self._parser = httptools.HttpRequestParser(self)
        return head + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n" + rest

    def _drop_body(self) -> None:
        self._pieces = []
        if self._rest:
            self._rest = bytearray()
        self._num_body_bytes = 0

    def _read_request(self, version: str) -> Request:
        """Its head."""
        method = self._parser.get_method()
        path, query = read_target(method, self._url)
        # HTTP/1.0 knows no chunks, and keeps a connection only where both sides say so, which is not worth the words.
        return Request(method, path, query, self._headers, version != "1.0", keep_alive=False, received_at_s=0.0)

    def _await_rest(self) -> None:
        """Of the request that is half here: its headers from their beginning, its body from theirs.

        Most requests come whole, and are not waited for at all.
        """
        if not self._is_in_body:
            if not self._are_headers_timed:
                self._are_headers_timed = True
                self._start_timer(HEADER_TIMEOUT_S, self._time_out)
        elif not self._is_body_timed:
            self._is_body_timed = True
            self._start_timer(BODY_TIMEOUT_S, self._time_out)
            if self._owes_continue:
                self._owes_continue = False
                self.write(_CONTINUE)

    def _time_out(self) -> None:
        """The next request did not come, or not to its end."""
        if not self._is_in_message:
            self._close()
            return
        what = "body" if self._is_in_body else "headers"
        message = f"the request's {what} did not come in time"
        self._refuse(InvalidRequest(message, status=408, reason=Reason.REQUEST_TIMEOUT))

    # Answering

    def _queue(self, request: Request) -> None:
        self._waiting.append(request)
        self._waiting_bytes += len(request.body)
        self._steer_reading()

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= MAX_PIPELINED or self._waiting_bytes > self._max_body_bytes

    def _steer_reading(self) -> None:
        """Read on only while the client takes its answers and few of its requests wait."""
        transport = self._transport
        if transport is None or self._hang_up is not None or transport.is_closing():
            return
        is_full = self._is_full
        is_reading = not (is_full or self._is_write_paused)
        if is_reading != transport.is_reading():
            if is_reading:
                transport.resume_reading()
            else:
                transport.pause_reading()
        if not is_full:
            self._stop_unread_watch()
        elif self._unread is None:
            self._watch_unread(transport)

    def _watch_unread(self, transport: asyncio.Transport) -> None:
        """Even the end of what it sends may not get through to a socket that is full."""
        self._unread = self._watch(transport)
        if self._unread is not None and self._task is not None:
            self._start_timer(PROBE_INTERVAL_S, self._ask_if_gone)

    def _watch(self, transport: asyncio.Transport) -> HangUpWatch | None:
        """None when there is no descriptor left for it."""
        sock = transport.get_extra_info("socket")
        if sock is None:
            return None
        try:
            return HangUpWatch(self._loop, sock.fileno(), self.abort)
        except OSError:
            return None

    def _stop_unread_watch(self) -> None:
        if self._unread is not None:
            self._unread.close()
            self._unread = None

    def _answer(self, request: Request) -> None:
        self._await_nothing()
        response = self._response = Response(
            self, request.method == b"HEAD", knows_chunks=request.knows_chunks, keep_alive=request.keep_alive
        )
        self._task = self._loop.create_task(self._application.handle(request, response))
        self._state.tasks.add(self._task)
        self._state.total_requests += 1
        self._task.add_done_callback(self._answered)
        if self._hang_up is not None or self._unread is not None:
            self._start_timer(PROBE_INTERVAL_S, self._ask_if_gone)

    def _can_ask_if_gone(self, response: Response) -> bool:
        return not response.is_started and response.knows_chunks

    def _ask_if_gone(self) -> None:
        """A client that is half closed or not read may leave later, and its machine says nothing of it by itself."""
        response = self._response
        if self._hang_up is None and self._unread is None:
            return
        if response is not None and self._can_ask_if_gone(response):
            self.write(_CONTINUE)
            self._start_timer(PROBE_INTERVAL_S, self._ask_if_gone)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._state.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("the application failed", exc_info=error)
        if task is not self._task:
            return  # Its answer was whole already, and the client's next request came faster than this.
        self._task = None
        if self.is_closing:
            return
        if not self._has_ended_response:
            self._close()
        elif not self._is_write_paused:
            self._take_next()

    def _take_next(self) -> None:
        """The client has its answer: its next request, or what else is due."""
        if self._waiting:
            self._answer_next()
        elif self._refusal is not None:
            self._answer_refusal(self._refusal)
        elif not self.keeps_alive or self._hang_up is not None:
            self._close()
        else:
            self._await_request()

    def _answer_next(self) -> None:
        request = self._waiting.popleft()
        self._waiting_bytes -= len(request.body)
        self._answer(request)
        self._steer_reading()

    def _await_request(self) -> None:
        """The next one may be half here already."""
        if self._is_in_message:
            self._await_rest()
        else:
            self._start_timer(self._keep_alive_s, self._time_out)

    @property
    def _is_between_answers(self) -> bool:
        return self._task is None or self._has_ended_response

    @property
    def _has_ended_response(self) -> bool:
        return self._response is not None and self._response.is_ended

    def _refuse(self, error: InvalidRequest) -> None:
        """Answer what is not a request, and close: where the next one begins can no longer be known."""
        self._is_deaf = True
        self._refusal = error
        if self._task is None and not self._is_write_paused:
            self._answer_refusal(error)

    def _answer_refusal(self, error: InvalidRequest) -> None:
        response = Response(self, head_only=False, knows_chunks=True, keep_alive=False)
        headers, body = self._application.render_error(error)
        response.send(error.status, headers, body)

    # Closing

    def _close(self, *, lingers: bool = False) -> None:
        self.is_closing = True
        self._await_nothing()
        self._stop_drain_timer()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if lingers and self._hang_up is None:
            if transport.can_write_eof():
                transport.write_eof()
            self._start_timer(LINGER_S, self._close)
            return
        transport.close()
        self._await_flush(transport, transport.get_write_buffer_size())

    def _await_flush(self, transport: asyncio.Transport, num_bytes: int) -> None:
        """asyncio would wait without an end for a client that reads nothing."""
        if num_bytes:
            self._start_timer(FLUSH_INTERVAL_S, lambda: self._check_flush(transport, num_bytes))

    def _check_flush(self, transport: asyncio.Transport, num_bytes_before: int) -> None:
        num_bytes = transport.get_write_buffer_size()
        if num_bytes >= num_bytes_before:
            transport.abort()
        else:
            self._await_flush(transport, num_bytes)

    def _await_drain(self) -> None:
        transport = self._transport
        if transport is not None:
            self._stop_drain_timer()
            num_bytes = transport.get_write_buffer_size()
            self._drain_timer = self._loop.call_later(DRAIN_INTERVAL_S, self._check_drain, transport, num_bytes)

    def _check_drain(self, transport: asyncio.Transport, num_bytes_before: int) -> None:
        if self.source is None and transport.get_write_buffer_size() >= num_bytes_before:
            self.abort()
        else:
            self._await_drain()

    def _stop_drain_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    def _start_timer(self, delay_s: float, on_due: Callable[[], None]) -> None:
        """The only one of this connection; one that is set already is set anew only if this is due before it rings.

        A keep-alive connection changes its mind about what it waits for four times a request.
        """
        self._on_due = on_due
        self._due_s = due_s = self._loop.time() + delay_s
        if self._timer is not None:
            if self._rings_s <= due_s:
                return
            self._timer.cancel()
        self._rings_s = due_s
        self._timer = self._loop.call_at(due_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        on_due, self._on_due = self._on_due, None
        if on_due is None:
            return
        if self._loop.time() < self._due_s:
            self._start_timer(self._due_s - self._loop.time(), on_due)
        else:
            on_due()

    def _await_nothing(self) -> None:
        self._on_due = None

    def _cancel_timer(self) -> None:
        self._on_due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _too_many_connections(max_connections: int) -> InvalidRequest:
    message = f"{max_connections} clients are connected, and no more may be; come again later"
    return InvalidRequest(message, status=503, reason=Reason.OUT_OF_SOCKETS)


def _body_too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(f"the body exceeds {max_bytes} bytes", status=413, reason=Reason.BODY_TOO_LARGE)


def _headers_too_large() -> InvalidRequest:
    message = f"request line and headers exceed {MAX_HEADER_BYTES} bytes"
    return InvalidRequest(message, status=431, reason=Reason.HEADERS_TOO_LARGE)
