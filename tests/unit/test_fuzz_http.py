"""Both HTTP parsers against bytes of every kind: nothing raises, nothing is answered twice, no two readings of one request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import h11
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from pdserve.http.client import ClientConnection, ConnectionFailed, ProtocolViolated
from pdserve.http.head import MAX_HEADER_BYTES, MAX_HEADERS
from pdserve.http.server import ServerConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response

_MAX_BODY = 4096
_CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
_FUZZED = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class _Transport(asyncio.Transport):
    """Takes what is written, and is read from by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.has_eof = False
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.has_eof
        assert not self.is_closed
        self.written += data

    def write_eof(self) -> None:
        self.has_eof = True

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        del name
        return default

    def is_closing(self) -> bool:
        return self.is_closed

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        """Whoever feeds this goes on."""

    def resume_reading(self) -> None:
        """Whoever feeds this never stopped."""

    def close(self) -> None:
        self.is_closed = True

    abort = close


class _App:
    """Answers everything, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def handle(self, request: Request, response: Response) -> None:
        self.requests.append(request)
        response.send(200, [], b"ok")

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        return [], error.reason.encode()


def _serve(pieces: list[bytes]) -> tuple[list[Request], bytes]:
    """What the application got of these bytes, and what the client got back."""

    async def run() -> tuple[list[Request], bytes]:
        app, transport = _App(), _Transport()
        connection = ServerConnection(app, ServerState(), max_body_bytes=_MAX_BODY, keep_alive_s=10)
        connection.connection_made(transport)
        for piece in pieces:
            if not transport.is_closed:
                connection.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(2 * len(b"".join(pieces)) // 20 + 4):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return app.requests, bytes(transport.written)

    return asyncio.run(run())


def _read_by_h11(data: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Method, target and body of each request, until the first one that h11 does not take."""
    try:
        while data := data.lstrip(b"\r\n"):  # Which h11 does not skip, though RFC 9112 (2.2) would have it.
            connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
            connection.receive_data(data)
            request, body = None, b""
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    return
            assert request is not None
            if request.method == b"CONNECT":
                return  # Refused, and with it the connection.
            yield bytes(request.method), bytes(request.target), body
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            data = connection.trailing_data[0]
    except h11.RemoteProtocolError:
        return


def _read_answers(data: bytes) -> list[int]:
    """The final statuses of answers, all of which must be whole."""
    statuses = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        if status < 200:
            data = rest
            continue
        lengths = [int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"content-length: ")]
        assert len(lengths) == 1
        assert len(rest) >= lengths[0]
        statuses.append(status)
        data = rest[lengths[0] :]
    return statuses


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True) if start < end]


_TOKENS = st.sampled_from(
    [
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
        b"\r",
        b" ",
        b"\t",
        b":",
        b";",
        b",",
        b"\x00",
        b"\x7f",
        b"\xff",
        b"0",
        b"1",
        b"5",
        b"a",
        b"0\r\n\r\n",
        b"1\r\nx\r\n",
        b"5;a=b\r\n",
        b"hello",
        b"-1",
        b"+1",
        b"0x5",
        b"ffffffffffffffff",
        b"1 1",
        b"5, 5",
        b"GET / HTTP/1.1\r\n",
        b"POST /a?b HTTP/1.1\r\n",
        b"POST / HTTP/1.0\r\n",
        b"GET / HTTP/2.0\r\n",
        b"GET /\r\n",
        b"GET http://x/y HTTP/1.1\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"CONNECT x:1 HTTP/1.1\r\n",
        b"HEAD / HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"Host: x\r\n",
        b"host: y\r\n",
        b"Host : x\r\n",
        b"host:\r\n",
        b"Content-Length: 5\r\n",
        b"content-length: 0\r\n",
        b"Content-Length:",
        b"content-length: 1\r\n",
        b"chunked",
        b"Transfer-Encoding: chunked\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"Transfer-Encoding:",
        b"identity",
        b"Connection: close\r\n",
        b"connection: keep-alive\r\n",
        b"Connection: upgrade\r\nUpgrade: h2c\r\n",
        b" folded\r\n",
        b"Expect: 100-continue\r\n",
        b"expect: x\r\n",
        b"a: b\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ]
)
_SOUP = st.lists(st.one_of(_TOKENS, st.binary(max_size=6)), max_size=25).map(b"".join)


@st.composite
def _nearly_requests(draw: st.DrawFn) -> bytes:
    """Requests that are right but for a byte or two: soup alone hardly ever gets past the first line."""
    data = b""
    for _ in range(draw(st.integers(1, 3))):
        body = draw(st.binary(max_size=40))
        head = draw(st.sampled_from([b"POST /a HTTP/1.1\r\nhost: x\r\n", b"POST /a?q HTTP/1.1\r\nhost: x\r\na: b\r\n"]))
        head += draw(
            st.sampled_from([b"", b"", b"connection: close\r\n", b"expect: 100-continue\r\n", b"te: trailers\r\n"])
        )
        if draw(st.booleans()):
            cuts = _cut(body, draw(st.lists(st.integers(0, 40), max_size=4)))
            extension = draw(st.sampled_from([b"", b";a=b", b' ;a="b"', b";"]))
            chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in cuts)
            trailer = draw(st.sampled_from([b"", b"t: u\r\n", b"content-length: 3\r\n"]))
            data += head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"
        else:
            data += head + b"content-length: %d\r\n\r\n" % len(body) + body
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(_TOKENS) + data[place + draw(st.integers(0, 2)) :]
    return data


_CUTS = st.lists(st.integers(0, 400), max_size=12)


@_FUZZED
@given(data=st.one_of(_SOUP, _nearly_requests()), cuts=_CUTS)
@example(data=b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", cuts=[])
@example(data=b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 60, cuts=[])
def test_any_bytes_are_read_as_h11_reads_them_or_refused(data: bytes, cuts: list[int]) -> None:
    """Each request that reaches the application has the method and body that an independent parser reads, and one answer."""
    requests, written = _serve(_cut(data, cuts))
    statuses = _read_answers(written) if b"HEAD" not in data else []
    assert len(statuses) <= len(requests) + 1 or b"HEAD" in data
    assert statuses.count(200) == len(requests) or b"HEAD" in data
    wanted = list(_read_by_h11(data))
    assert len(requests) <= len(wanted)
    for request, (method, target, body) in zip(requests, wanted, strict=False):
        assert (request.method, request.body) == (method, body)
        assert request.path in target or request.path in {b"/", b"*"}


@_FUZZED
@given(data=st.one_of(_SOUP, _nearly_requests()), cuts=_CUTS)
def test_how_the_bytes_are_cut_changes_nothing(data: bytes, cuts: list[int]) -> None:
    """The same requests, in whatever pieces the socket delivers them."""
    whole, _ = _serve([data])
    cut, _ = _serve(_cut(data, cuts))
    assert [(one.method, one.path, one.query, one.body, one.headers) for one in whole] == [
        (one.method, one.path, one.query, one.body, one.headers) for one in cut
    ]


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(lambda n: b"GET /" + b"a" * n, id="a target"),
        pytest.param(lambda n: b"GET / HTTP/1.1\r\n" + b"a" * n, id="a name"),
        pytest.param(lambda n: b"GET / HTTP/1.1\r\na: " + b"b" * n, id="a value"),
        pytest.param(lambda n: b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (n // 6), id="headers"),
        pytest.param(lambda n: _CHUNKED + b"0\r\na: " + b"b" * n, id="a trailer"),
        pytest.param(lambda n: _CHUNKED + b"0\r\n" + b"a: b\r\n" * (n // 6), id="trailers"),
        pytest.param(lambda n: _CHUNKED + b"1;a=" + b"b" * n, id="a chunk extension"),
    ],
)
def test_nothing_without_an_end_is_kept(endless: Callable[[int], bytes]) -> None:
    """A part of a request that never ends is refused once it has had its share, whole or in pieces."""
    data = endless(6 * MAX_HEADER_BYTES)
    for size in (MAX_HEADER_BYTES, 4096):
        requests, written = _serve([data[start : start + size] for start in range(0, len(data), size)])
        assert requests == []
        assert _read_answers(written) in ([431], [400])


class _Sink:
    """Keeps what becomes of one answer."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""
        self.ends: list[Exception | None] = []

    def on_head(self, status: int, headers: Headers) -> None:
        del headers
        assert self.status is None
        self.status = status

    def on_body(self, data: bytes) -> None:
        assert self.status is not None
        assert not self.ends
        self.body += data

    def on_end(self) -> None:
        self.ends.append(None)

    def on_failure(self, error: ConnectionFailed | ProtocolViolated) -> None:
        self.ends.append(error)


def _ask(pieces: list[bytes], *, ends: bool = True) -> tuple[_Sink, bool]:
    """What becomes of an answer in these pieces, and whether its connection would be used again."""

    async def run() -> tuple[_Sink, bool]:
        kept: list[ClientConnection] = []
        transport, sink = _Transport(), _Sink()
        connection = ClientConnection(kept.append, lambda _: None)
        connection.connection_made(transport)
        connection.send(b"GET / HTTP/1.1\r\n\r\n", sink)
        for piece in pieces:
            if not transport.is_closed:
                connection.data_received(piece)
        is_kept = bool(kept) and not connection.is_closed
        if ends:
            connection.connection_lost(None)
        return sink, is_kept

    return asyncio.run(run())


def _answer_by_h11(data: bytes) -> tuple[int, bytes] | None:
    """None when h11 finds no whole answer."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    connection.receive_data(b"")
    status, body = 0, b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return status, body
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None


@st.composite
def _nearly_answers(draw: st.DrawFn) -> bytes:
    body = draw(st.binary(max_size=40))
    data = draw(
        st.sampled_from([b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\na: b\r\n\r\n"])
    )
    data += draw(
        st.sampled_from([b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 404 \r\n", b"HTTP/1.1 204 No\r\n"])
    )
    data += draw(st.sampled_from([b"", b"a: b\r\n", b"connection: close\r\n"]))
    framing = draw(st.integers(0, 2))
    if framing == 0:
        data += b"content-length: %d\r\n\r\n" % len(body) + body
    elif framing == 1:
        cuts = _cut(body, draw(st.lists(st.integers(0, 40), max_size=4)))
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cuts)
        data += b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    else:
        data += b"\r\n" + body
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(data)))
        data = data[:place] + draw(_TOKENS) + data[place + draw(st.integers(0, 2)) :]
    return data


@_FUZZED
@given(data=st.one_of(_SOUP, _nearly_answers()), cuts=_CUTS)
@example(data=b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", cuts=[])
@example(data=b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno", cuts=[])
def test_any_bytes_are_an_answer_or_a_failure_once(data: bytes, cuts: list[int]) -> None:
    """An answer ends exactly once, and one that is whole has the body that an independent parser reads."""
    sink, _ = _ask(_cut(data, cuts))
    assert len(sink.ends) == 1
    wanted = _answer_by_h11(data)
    if sink.ends == [None] and wanted is not None:
        assert (sink.status, sink.body) == wanted


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n0\r\n\r\n", "HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\nx", "HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\nx", "HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nx", "not chunked"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1 x\r\n", "HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nxy", "HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\na: b\r\n folded\r\n\r\n", "HTTP/1.1 answer"),
        (b"HTTP/2.0 200 OK\r\n\r\n", "version"),
        (b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", "another protocol"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 17, "interim"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * (MAX_HEADERS + 2), "headers exceed"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 4 * MAX_HEADER_BYTES, "headers exceed"),
    ],
)
def test_an_answer_that_can_be_read_in_two_ways_is_none(answer: bytes, message: str) -> None:
    """What a proxy in between might frame otherwise, and what has no end, is a violated protocol with its cause."""
    sink, is_kept = _ask([answer[start : start + 4096] for start in range(0, len(answer), 4096)])
    (error,) = sink.ends
    assert isinstance(error, ProtocolViolated)
    assert message in str(error)
    assert not is_kept


@pytest.mark.parametrize(
    "excess", [b"x", b"HTTP/1.1 200 OK\r\n", b"\0", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"]
)
@pytest.mark.parametrize("apart", [False, True])
def test_bytes_after_an_answer_end_the_connection_and_not_the_answer(excess: bytes, *, apart: bool) -> None:
    """They would become the next request's answer."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    sink, is_kept = _ask([answer, excess] if apart else [answer + excess])
    assert (sink.body, sink.ends) == (b"ok", [None])
    assert not is_kept
