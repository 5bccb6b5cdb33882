"""The server side of a connection, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from pdserve.http.listener import Listener, bind
from pdserve.http.server import MAX_HEADERS, MAX_PIPELINED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response

_MAX_BODY = 1000


class _App:
    """Answers by path, and notes what it saw."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.streaming = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()
        self.release = asyncio.Event()

    async def handle(self, request: Request, response: Response) -> None:
        self.bodies.append(request.body)
        if request.path == b"/stream":
            response.start(200, [(b"content-type", b"text/plain")])
            for piece in (b"one", b"", b"two"):
                response.write(piece)
            response.end()
        elif request.path == b"/hang":
            self.streaming.set()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            response.send(200, [], b"released")
        elif request.path == b"/flood":
            response.start(200, [], source=self)
            while not self.paused.is_set():
                response.write(b"x" * 65536)
                await asyncio.sleep(0)
            await self.resumed.wait()
            response.end()
        elif request.path == b"/silent":
            return
        else:
            response.send(200, [], b"%b %b?%b %b" % (request.method, request.path, request.query, request.body))

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        return [], f"{error.reason}".encode()

    def pause_reading(self) -> None:
        self.paused.set()

    def resume_reading(self) -> None:
        self.resumed.set()


class _Client:
    """A socket with a deadline on everything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def until(self, end: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(end), 10)

    async def rest(self) -> bytes:
        return await asyncio.wait_for(self.reader.read(), 10)


@contextlib.asynccontextmanager
async def _connected(app: _App, *, shutdown_s: float = 1) -> AsyncIterator[tuple[_Client, Listener]]:
    async with Listener(app, bind("127.0.0.1", 0), max_body_bytes=_MAX_BODY, shutdown_s=shutdown_s) as listener:
        port = int(listener.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield _Client(reader, writer), listener
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _answer(data: bytes) -> tuple[bytes, _App]:
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(data)
        client.writer.write_eof()
        return await client.rest(), app


async def test_a_request_is_parsed_whole() -> None:
    """Method, path, query and body reach the application, a body in chunks too."""
    async with _connected(_App()) as (client, _):
        client.writer.write(b"POST /a?b=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi")
        assert (await client.until(b"hi")).endswith(b"\r\n\r\nPOST /a?b=1 hi")
        client.writer.write(
            b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n"
        )
        assert (await client.until(b"hi!")).endswith(b"POST /c? hi!")


async def test_a_stream_is_framed_in_chunks() -> None:
    """Every piece is a chunk, an empty one is none, and the connection goes on afterwards."""
    async with _connected(_App()) as (client, _):
        for _ in range(2):
            client.writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = await client.until(b"\r\n0\r\n\r\n")
            assert b"transfer-encoding: chunked\r\n" in answer
            assert answer.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_an_old_client_gets_no_chunks() -> None:
    """HTTP/1.0 knows no chunks: there the connection's end is the body's."""
    async with _connected(_App()) as (client, _):
        client.writer.write(b"GET /stream HTTP/1.0\r\n\r\n")
        answer = await client.rest()
        assert answer.endswith(b"\r\n\r\nonetwo")
        assert b"chunked" not in answer


async def test_pipelined_requests_are_answered_in_order() -> None:
    """More than may wait at once are read in turn, and none is lost."""
    num_requests = MAX_PIPELINED * 3
    async with _connected(_App()) as (client, _):
        client.writer.write(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % n for n in range(num_requests)))
        for n in range(num_requests):
            await client.until(b"GET /%d? " % n)


async def test_a_head_request_gets_no_body() -> None:
    """The length is told and the body left out."""
    async with _connected(_App()) as (client, _):
        client.writer.write(b"HEAD /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await client.rest()
        assert b"content-length: 9\r\n" in answer
        assert answer.endswith(b"\r\n\r\n")


async def test_a_client_that_leaves_cancels_its_request() -> None:
    """The application hears of it at once, wherever it is waiting."""
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.streaming.wait(), 10)
        client.writer.transport.abort()
        await asyncio.wait_for(app.cancelled.wait(), 10)


async def test_a_slow_client_pauses_the_source() -> None:
    """What the client does not read is not piled up: the source waits until it does."""
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.paused.wait(), 10)
        assert not app.resumed.is_set()
        await _drain(client)
        assert app.resumed.is_set()


async def _drain(client: _Client) -> None:
    tail = b""
    while not tail.endswith(b"\r\n0\r\n\r\n"):
        tail = (tail + await asyncio.wait_for(client.reader.read(1 << 20), 10))[-16:]


@pytest.mark.parametrize(
    ("data", "status", "reason"),
    [
        (b"nonsense\r\n\r\n", 400, b"malformed_http"),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", 400, b"malformed_http"),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi", 400, b"malformed_http"),
        (
            b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            b"malformed_http",
        ),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400, b"malformed_http"),
        (b"GET /a HTTP/1.1\r\nhost: x\r\na: b\r\n folded\r\n\r\n", 400, b"malformed_http"),
        (b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", 413, b"body_too_large"),
        (
            b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n"
            + b"x" * 1001
            + b"\r\n0\r\n\r\n",
            413,
            b"body_too_large",
        ),
        (b"GET /a HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", 431, b"headers_too_large"),
        (b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431, b"headers_too_large"),
    ],
)
async def test_what_is_not_a_request_is_refused_and_the_connection_closed(
    data: bytes, status: int, reason: bytes
) -> None:
    """Both lengths at once, bad chunks and folded headers are how requests are smuggled; limits end the rest."""
    answer, app = await _answer(data)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.endswith(reason)
    assert app.bodies == []


async def test_a_trailer_is_not_a_header() -> None:
    """What comes after the last chunk changes nothing of the request."""
    async with _connected(_App()) as (client, _):
        client.writer.write(
            b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nexpect: 100-continue\r\n\r\n"
        )
        assert (await client.until(b"? x")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("body", [b"", b"hi"])
async def test_an_upgrade_is_not_taken_up(body: bytes) -> None:
    """Java's client asks for h2c with every first request; it is answered in HTTP/1.1, its body included."""
    async with _connected(_App()) as (client, _):
        for _ in range(2):
            client.writer.write(
                b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
                b"http2-settings: AAMAAABkAAQAAP\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            assert (await client.until(b"POST /a? " + body)).startswith(b"HTTP/1.1 200 ")


async def test_expect_continue_is_answered() -> None:
    """curl waits for it before it sends a long body."""
    async with _connected(_App()) as (client, _):
        client.writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"hi")
        await client.until(b"/a? hi")


async def test_an_application_that_says_nothing_ends_the_connection() -> None:
    """A client must not wait for ever for an answer that nobody will give."""
    async with _connected(_App()) as (client, _):
        client.writer.write(b"GET /silent HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await client.rest() == b""


async def test_a_stop_lets_the_request_in_hand_end() -> None:
    """Stopping waits for what is open, and the answer says that the connection closes."""
    app = _App()
    async with _connected(app, shutdown_s=10) as (client, listener):
        client.writer.write(b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.streaming.wait(), 10)
        stopping = asyncio.create_task(listener.stop())
        await asyncio.sleep(0)
        app.release.set()
        assert (await client.rest()).endswith(b"released")
        await asyncio.wait_for(stopping, 10)


async def test_a_stop_cancels_what_outlasts_its_limit() -> None:
    """A request that does not end is cancelled when the time is up."""
    app = _App()
    async with _connected(app, shutdown_s=1) as (client, listener):
        client.writer.write(b"GET /hang HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.streaming.wait(), 10)
        await asyncio.wait_for(listener.stop(), 10)
        await asyncio.wait_for(app.cancelled.wait(), 10)
