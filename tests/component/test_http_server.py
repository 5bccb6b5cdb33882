"""The server side of a connection, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

import pytest

from pdserve.http import server
from pdserve.http.head import MAX_HEADERS
from pdserve.http.listener import Listener, bind
from pdserve.http.server import MAX_PIPELINED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response

_MAX_BODY = 1000
_LARGE = 256 * 1024


class _App:
    """Answers by path, and notes what it saw."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.streaming = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()
        self.release = asyncio.Event()
        self.ended = asyncio.Event()

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
        elif request.path == b"/large":
            response.send(200, [], b"x" * _LARGE)
            self.ended.set()
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
async def _connected(
    app: _App, *, shutdown_s: float = 1, max_connections: int | None = None
) -> AsyncIterator[tuple[_Client, Listener]]:
    async with Listener(
        app, bind("127.0.0.1", 0), max_body_bytes=_MAX_BODY, shutdown_s=shutdown_s, max_connections=max_connections
    ) as listener:
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


def _request(*lines: bytes, body: bytes = b"") -> bytes:
    return b"\r\n".join((*lines, b"", b"")) + body


_CHUNKED = (b"POST /a HTTP/1.1", b"host: x", b"transfer-encoding: chunked")
_POST = (b"POST /a HTTP/1.1", b"host: x")
_GET = (b"GET /a HTTP/1.1", b"host: x")


@pytest.mark.parametrize(
    "data",
    [
        _request(*_POST, b"content-length: 1", b"transfer-encoding: chunked", body=b"0\r\n\r\n"),
        _request(*_CHUNKED, b"content-length: 1", body=b"0\r\n\r\n"),
        _request(*_POST, b"content-length: 2", b"content-length: 2", body=b"hi"),
        _request(*_POST, b"content-length: 2", b"content-length: 1", body=b"hi"),
        _request(*_POST, b"content-length: 2, 2", body=b"hi"),
        _request(*_POST, b"content-length: -2", body=b"hi"),
        _request(*_POST, b"content-length: +2", body=b"hi"),
        _request(*_POST, b"content-length: 0x2", body=b"hi"),
        _request(*_POST, b"content-length: 1 2", body=b"hi"),
        _request(*_POST, b"content-length:", body=b"hi"),
        _request(*_POST, b"content-length: 99999999999999999999", body=b"hi"),
        _request(*_POST, b"transfer-encoding: chunked, identity", body=b"0\r\n\r\n"),
        _request(*_POST, b"transfer-encoding: chunked, chunked", body=b"0\r\n\r\n"),
        _request(*_CHUNKED, b"transfer-encoding: chunked", body=b"0\r\n\r\n"),
        _request(*_CHUNKED, b"transfer-encoding: identity", body=b"0\r\n\r\n"),
        _request(*_POST, b"transfer-encoding: \x0bchunked", body=b"0\r\n\r\n"),
        _request(*_POST, b"transfer-encoding:", body=b"0\r\n\r\n"),
        _request(b"POST /a HTTP/1.0", b"transfer-encoding: chunked", body=b"0\r\n\r\n"),
        _request(*_CHUNKED, body=b"1 zz\r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"1 \r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"0x1\r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"-1\r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"+1\r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"\r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"1\nx\n0\n\n"),
        _request(*_CHUNKED, body=b"1\r\nxy\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"10000000000000000\r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"1;a\nb\r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"1;a\rb\r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"1;a\0b\r\nx\r\n0\r\n\r\n"),
        _request(*_CHUNKED, body=b"1\r\nx\r\n0\r\ncontent-length: 5\r\n\r\n"),
        _request(*_CHUNKED, body=b"1\r\nx\r\n0\r\ntransfer-encoding: chunked\r\n\r\n"),
        _request(*_GET, b"a: b", b" folded"),
        _request(b"GET /a HTTP/1.1", b" host: x"),
        b"GET /a HTTP/1.1\nhost: x\n\n",
        b"GET /a HTTP/1.1\r\nhost: x\na: b\r\n\r\n",
        b"GET /a HTTP/1.1\r\nhost: x\r\n\n",
        b"GET /a HTTP/1.1\r\nhost: x\ra: b\r\n\r\n",
        _request(*_GET, b"a: b\rc"),
        _request(*_GET, b"a: b\0c"),
        _request(*_GET, b"a: b\x01c"),
        _request(*_GET, b"a: b\x7fc"),
        _request(*_GET, b"a\0b: c"),
        _request(*_GET, b"content-length : 0"),
        _request(*_GET, b"a b: c"),
        _request(*_GET, b": b"),
        _request(*_GET, b"no colon"),
        _request(b"GET /a HTTP/1.1"),
        _request(*_GET, b"host: x"),
        _request(*_GET, b"host: y"),
        _request(b"GET /a HTTP/1.1", b"host: x, y"),
        _request(b"GET /a HTTP/1.1", b"host: user@x"),
        _request(b"GET /a HTTP/1.1", b"host: x/y"),
        _request(b"GET /a HTTP/1.0", b"host: x", b"host: x"),
        b"GET /a\r\n\r\n",
        _request(b"GET /a HTTP/0.9"),
        _request(b"GET /a HTTP/1.2", b"host: x"),
        _request(b"GET /a http/1.1", b"host: x"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        _request(b"GET * HTTP/1.1", b"host: x"),
        _request(b"GET a HTTP/1.1", b"host: x"),
        _request(b"GET /a#b HTTP/1.1", b"host: x"),
        _request(b"GET /a b HTTP/1.1", b"host: x"),
        _request(b"GET /\x01 HTTP/1.1", b"host: x"),
        _request(b"GET /\xff HTTP/1.1", b"host: x"),
        _request(b"GET ftp://x/a HTTP/1.1", b"host: x"),
        _request(b"GET http:///a HTTP/1.1", b"host: x"),
        _request(b"GET http://u@x/a HTTP/1.1", b"host: x"),
        _request(b"get /a HTTP/1.1", b"host: x"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_what_could_be_read_in_two_ways_is_refused(data: bytes) -> None:
    """A proxy in front may frame it otherwise, and what it takes for one request's body would be ours to answer as another."""
    answer, app = await _answer(data)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"malformed_http")
    assert app.bodies == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (_request(*_POST, b"transfer-encoding: gzip, chunked", body=b"0\r\n\r\n"), 501),
        (_request(*_POST, b"transfer-encoding: identity", body=b"hi"), 501),
        (_request(*_POST, b"transfer-encoding: xchunked", body=b"0\r\n\r\n"), 501),
        (_request(b"GET /a HTTP/2.0", b"host: x"), 505),
        (_request(*_GET, b"expect: a-miracle"), 417),
        (_request(*_GET, b"expect: 100-continue, a-miracle"), 417),
        (_request(b"CONNECT x:443 HTTP/1.1", b"host: x:443"), 405),
    ],
)
async def test_what_is_asked_for_in_vain_is_said(data: bytes, status: int) -> None:
    """Well-formed, and nothing that is done here."""
    answer, app = await _answer(data)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert app.bodies == []


@pytest.mark.parametrize(
    ("data", "end"),
    [
        (_request(b"GET http://y/a?b=1 HTTP/1.1", b"host: x"), b"GET /a?b=1 "),
        (_request(b"GET HTTPS://[::1]:80/a HTTP/1.1", b"host: x"), b"GET /a? "),
        (_request(b"GET http://y HTTP/1.1", b"host: x"), b"GET /? "),
        (_request(b"GET http://y?b HTTP/1.1", b"host: x"), b"GET /?b "),
        (_request(b"OPTIONS * HTTP/1.1", b"host: x"), b"OPTIONS *? "),
        (_request(b"OPTIONS http://y HTTP/1.1", b"host: x"), b"OPTIONS *? "),
        (_request(b"GET /a HTTP/1.1", b"host:"), b"GET /a? "),
        (_request(b"GET /a HTTP/1.1", b"host: [::1]:8192"), b"GET /a? "),
        (_request(b"GET /a HTTP/1.0"), b"GET /a? "),
        (_request(b"GET /a HTTP/1.0", b"expect: a-miracle"), b"GET /a? "),
        (b"\r\n" + _request(*_GET), b"GET /a? "),
        (_request(*_CHUNKED, body=b'1;a=b\r\nx\r\n01;c="d"\r\ny\r\n0\r\nt: u\r\n\r\n'), b"POST /a? xy"),
        (_request(*_POST, b"Transfer-Encoding:\tChunked ", body=b"1\r\nx\r\n0\r\n\r\n"), b"POST /a? x"),
        (_request(*_POST, b"content-length: 002 ", body=b"hi"), b"POST /a? hi"),
    ],
)
async def test_what_is_unusual_and_plain_is_answered(data: bytes, end: bytes) -> None:
    """Every form of target that a server must take (RFC 9112, 3.2), chunk extensions, trailers, spellings."""
    async with _connected(_App()) as (client, _):
        client.writer.write(data)
        answer = await client.until(end)
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_what_follows_a_refused_request_is_not_read() -> None:
    """Where the next request begins is not known any more: it may be the refused one's body."""
    answer, app = await _answer(_request(*_GET, b"a : b") + _request(*_GET))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert app.bodies == []


async def test_a_refusal_waits_for_the_answers_before_it() -> None:
    """A good request keeps its answer when something else comes behind it."""
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(_request(b"GET /hang HTTP/1.1", b"host: x") + _request(*_GET) + b"nonsense\r\n\r\n")
        await asyncio.wait_for(app.streaming.wait(), 10)
        app.release.set()
        answer = await client.rest()
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert answer.endswith(b"malformed_http")


async def test_what_follows_the_last_request_changes_nothing() -> None:
    """A client that said `connection: close` gets its answer, whatever it goes on to send."""
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(_request(b"GET /hang HTTP/1.1", b"host: x", b"connection: close") + _request(*_GET))
        await asyncio.wait_for(app.streaming.wait(), 10)
        client.writer.write(b"nonsense\r\n\r\n")
        app.release.set()
        assert (await client.rest()).endswith(b"released")
        assert len(app.bodies) == 1


async def test_a_refused_upload_still_reads_its_refusal() -> None:
    """Closing in the middle of a body would reset the connection, and the client would never see why."""
    async with _connected(_App()) as (client, _):
        client.writer.write(_request(*_POST, b"content-length: 9999999"))
        for _ in range(64):
            client.writer.write(b"x" * 65536)
            await asyncio.sleep(0)
        assert (await client.rest()).endswith(b"body_too_large")


async def test_a_refused_client_is_not_listened_to_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for which the rest of a refused request is still taken ends."""
    monkeypatch.setattr(server, "LINGER_S", 0.05)
    async with _connected(_App()) as (client, _):
        client.writer.write(b"nonsense\r\n\r\n")
        assert (await client.rest()).endswith(b"malformed_http")
        with pytest.raises(OSError):  # noqa: PT011 - a reset or a broken pipe, as the moment has it
            await asyncio.wait_for(_send_for_ever(client), 10)


async def _send_for_ever(client: _Client) -> None:
    while True:
        client.writer.write(b"more")
        await client.writer.drain()


@pytest.mark.parametrize(
    ("data", "limit", "said"),
    [
        (b"", "HEADER_TIMEOUT_S", b""),
        (b"GET /a HT", "HEADER_TIMEOUT_S", b"request_timeout"),
        (b"GET /a HTTP/1.1\r\nhost", "HEADER_TIMEOUT_S", b"request_timeout"),
        (_request(*_POST, b"content-length: 9", body=b"hi"), "BODY_TIMEOUT_S", b"request_timeout"),
        (_request(*_CHUNKED, body=b"0\r\n"), "BODY_TIMEOUT_S", b"request_timeout"),
    ],
)
async def test_a_request_must_come_in_time(
    monkeypatch: pytest.MonkeyPatch, data: bytes, limit: str, said: bytes
) -> None:
    """A client that sends a byte a minute is told so and cut off; one that says nothing is only cut off."""
    monkeypatch.setattr(server, limit, 0.05)
    async with _connected(_App()) as (client, _):
        client.writer.write(data)
        answer = await client.rest()
        assert answer.endswith(said)
        assert answer.startswith(b"HTTP/1.1 408 ") or not said


async def test_half_a_request_behind_an_answer_must_come_in_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of it during the answer before does not buy it the time of an idle connection."""
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 0.05)
    async with _connected(_App()) as (client, _):
        client.writer.write(_request(*_GET) + b"GET /")
        assert b"request_timeout" in await client.rest()


async def test_a_pipelined_client_that_waits_for_a_word_gets_it() -> None:
    """`expect: 100-continue` behind another request is answered when its turn comes."""
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(_request(b"GET /hang HTTP/1.1", b"host: x"))
        await asyncio.wait_for(app.streaming.wait(), 10)
        client.writer.write(_request(*_POST, b"expect: 100-continue", b"content-length: 2"))
        await asyncio.sleep(0)
        app.release.set()
        await client.until(b"released")
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.writer.write(b"hi")
        await client.until(b"/a? hi")


async def test_a_client_that_has_no_more_to_send_gets_its_answer() -> None:
    """Half-closed is not gone (RFC 9112, 9.6), for every request that it had sent."""
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(_request(b"GET /hang HTTP/1.1", b"host: x") + _request(*_GET))
        client.writer.write_eof()
        await asyncio.wait_for(app.streaming.wait(), 10)
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        app.release.set()
        answer = await client.rest()
        assert b"released" in answer
        assert answer.endswith(b"GET /a? ")


async def test_a_half_closed_client_that_leaves_cancels_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is gone altogether, the application hears of it, though its machine says nothing by itself."""
    monkeypatch.setattr(server, "PROBE_INTERVAL_S", 0.05)
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(_request(b"GET /hang HTTP/1.1", b"host: x"))
        client.writer.write_eof()
        await asyncio.wait_for(app.streaming.wait(), 10)
        await client.until(b"\r\n\r\n")
        assert not app.cancelled.is_set()
        client.writer.transport.abort()
        await asyncio.wait_for(app.cancelled.wait(), 10)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_that_closes_in_order_cancels_its_request(version: bytes) -> None:
    """A close without a reset looks like half of one, until something is sent to it."""
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(_request(b"GET /hang HTTP/" + version, b"host: x"))
        await asyncio.wait_for(app.streaming.wait(), 10)
        client.writer.close()
        await asyncio.wait_for(app.cancelled.wait(), 10)


async def test_a_client_that_reads_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bytes of a closing connection must go somewhere."""
    monkeypatch.setattr(server, "FLUSH_INTERVAL_S", 0.05)
    app = _App()
    app.resumed.set()
    async with _connected(app) as (client, listener):
        cast("asyncio.ReadTransport", client.writer.transport).pause_reading()
        client.writer.write(_request(b"GET /flood HTTP/1.1", b"host: x", b"connection: close"))
        await asyncio.wait_for(app.paused.wait(), 10)
        async with asyncio.timeout(10):
            while listener.num_connections:  # noqa: ASYNC110 - uvicorn tells nobody
                await asyncio.sleep(0.01)


def _stop_reading(client: _Client) -> None:
    cast("asyncio.ReadTransport", client.writer.transport).pause_reading()


def _start_reading(client: _Client) -> None:
    cast("asyncio.ReadTransport", client.writer.transport).resume_reading()


async def _until_still(app: _App) -> int:
    """How many requests were answered when no more are."""
    async with asyncio.timeout(20):
        while True:
            before = len(app.bodies)
            await asyncio.sleep(0.2)
            if before and before == len(app.bodies):
                return before


async def test_a_pipelining_client_that_reads_nothing_gets_no_more_answers() -> None:
    """Whole answers may not pile up in memory; once it reads, it gets every one of them."""
    app, num_requests = _App(), 400
    async with _connected(app) as (client, listener):
        _stop_reading(client)
        client.writer.write(_request(b"GET /large HTTP/1.1", b"host: x") * num_requests)
        assert await _until_still(app) < num_requests // 4
        (connection,) = listener._server.server_state.connections
        assert connection._transport.get_write_buffer_size() < 2 * _LARGE  # type: ignore[union-attr]
        _start_reading(client)
        for _ in range(num_requests):
            await client.until(b"\r\n\r\n")
            await asyncio.wait_for(client.reader.readexactly(_LARGE), 10)
        assert len(app.bodies) == num_requests


async def test_a_client_that_never_reads_its_answers_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that stays is not kept for bytes that nobody takes."""
    monkeypatch.setattr(server, "DRAIN_INTERVAL_S", 0.05)
    app = _App()
    async with _connected(app) as (client, listener):
        _stop_reading(client)
        client.writer.write(_request(b"GET /large HTTP/1.1", b"host: x") * 400)
        async with asyncio.timeout(10):
            await app.ended.wait()
            while listener.num_connections:  # noqa: ASYNC110 - uvicorn tells nobody
                await asyncio.sleep(0.01)
        assert len(app.bodies) < 400


@pytest.mark.parametrize("num_waiting", [MAX_PIPELINED, 100_000])
async def test_a_client_with_many_requests_that_leaves_cancels_the_one_in_hand(
    monkeypatch: pytest.MonkeyPatch, *, num_waiting: int
) -> None:
    """Though nothing is read of it while so many of its requests wait."""
    monkeypatch.setattr(server, "PROBE_INTERVAL_S", 0.05)
    app = _App()
    async with _connected(app) as (client, _):
        client.writer.write(_request(b"GET /hang HTTP/1.1", b"host: x"))
        await asyncio.wait_for(app.streaming.wait(), 10)
        client.writer.write(_request(*_GET) * num_waiting)
        await client.until(b"\r\n\r\n")
        client.writer.transport.abort()
        await asyncio.wait_for(app.cancelled.wait(), 10)


async def test_a_client_with_many_requests_and_no_more_to_send_gets_all_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of what it sends is not taken for its leaving."""
    monkeypatch.setattr(server, "PROBE_INTERVAL_S", 0.05)
    app, num_requests = _App(), MAX_PIPELINED * 4
    async with _connected(app) as (client, _):
        client.writer.write(_request(b"GET /hang HTTP/1.1", b"host: x"))
        await asyncio.wait_for(app.streaming.wait(), 10)
        for _ in range(num_requests):
            client.writer.write(_request(*_GET))
        client.writer.write_eof()
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert not app.cancelled.is_set()
        app.release.set()
        assert (await client.rest()).count(b"GET /a? ") == num_requests


async def test_clients_beyond_the_limit_are_refused() -> None:
    """They get an answer, and whoever is connected keeps the connection."""
    async with _connected(_App(), max_connections=1) as (client, listener):
        client.writer.write(_request(*_GET))
        await client.until(b"GET /a? ")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(listener.url.rpartition(":")[2]))
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert answer.endswith(b"out_of_sockets")
        writer.close()
        client.writer.write(_request(*_GET))
        await client.until(b"GET /a? ")


async def test_a_stop_waits_for_a_request_that_is_half_here() -> None:
    """Its client has begun to send and cannot know; it is answered, and told that the connection closes."""
    async with _connected(_App(), shutdown_s=10) as (client, listener):
        client.writer.write(_request(*_POST, b"content-length: 2", b"expect: 100-continue"))
        await client.until(b"\r\n\r\n")
        stopping = asyncio.create_task(listener.stop())
        await asyncio.sleep(0.2)  # uvicorn tells its connections a moment after it stops listening
        client.writer.write(b"hi")
        answer = await client.rest()
        assert answer.endswith(b"POST /a? hi")
        assert b"connection: close\r\n" in answer
        await asyncio.wait_for(stopping, 10)
