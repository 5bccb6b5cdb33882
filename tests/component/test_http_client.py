"""The client side against servers that answer in every wrong way, and what becomes of an engine's own errors."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import httpx
import pytest

from pdserve.config import Config, GatewayConfig
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.credentials import OPEN_ACCESS, EngineAccess, Secret
from pdserve.engine.transport import EngineClient
from pdserve.errors import EngineProtocolError, EngineStatus, Reason
from pdserve.gateway.service import bind_gateway, running_gateway
from pdserve.http.head import MAX_HEADER_BYTES, MAX_HEADERS
from pdserve.http.listener import Listener, bind
from split import MODEL, TIMEOUTS, until_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.errors import InvalidRequest
    from pdserve.http.server import Headers, Request, Response

_MIB = 1024 * 1024


@contextlib.asynccontextmanager
async def _says(answer: bytes, *, endless: bytes = b"") -> AsyncIterator[tuple[EngineClient, list[int]]]:
    """An engine that answers with these bytes, and then with `endless` until it is hung up on; how much it got rid of."""
    sock = bind("127.0.0.1", 0)
    num_sent: list[int] = []
    hung_up = asyncio.Event()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        sent = 0
        with contextlib.suppress(OSError):
            writer.write(answer)
            while endless and sent < 256 * _MIB:
                writer.write(endless)
                await writer.drain()
                sent += len(endless)
            await reader.read()
        num_sent.append(sent)
        writer.close()
        hung_up.set()

    server = await asyncio.start_server(on_connection, sock=sock)
    address = EngineAddress(EngineName("e"), Role.DECODE, f"http://127.0.0.1:{sock.getsockname()[1]}")
    client = EngineClient(address, connect_timeout_s=5)
    try:
        yield client, num_sent
    finally:
        client.close()
        await asyncio.wait_for(hung_up.wait(), 10)
        server.close()


_OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "endless", "says"),
    [
        pytest.param(_OK + b"a: ", b"b" * 65536, "headers exceed", id="a header"),
        pytest.param(_OK, b"a: b\r\n" * 8192, "headers exceed", id="headers"),
        pytest.param(_OK + b"b" * 100, b"b" * 65536, "headers exceed|not a valid", id="a header's name"),
        pytest.param(b"HTTP/1.1 200 ", b"b" * 65536, "headers exceed|not a valid", id="a reason"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 64, "interim", id="interim answers"),
        pytest.param(
            _OK + b"transfer-encoding: chunked\r\n\r\n0\r\na: ", b"b" * 65536, "headers exceed", id="a trailer"
        ),
        pytest.param(
            _OK + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 8192, "headers exceed", id="trailers"
        ),
        pytest.param(
            _OK + b"transfer-encoding: chunked\r\n\r\n1;", b"b" * 65536, "headers exceed", id="a chunk extension"
        ),
    ],
)
async def test_an_engine_that_never_comes_to_the_point_is_hung_up_on(answer: bytes, endless: bytes, says: str) -> None:
    """Long before its words fill the memory."""
    async with _says(answer, endless=endless) as (client, num_sent):
        with pytest.raises(EngineProtocolError, match=says):
            await client.get("/x", timeout_s=30)
    assert num_sent[0] < 32 * _MIB  # What both sockets' buffers hold, mostly.


@pytest.mark.parametrize(
    "answer",
    [
        _OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        _OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        _OK + b"content-length: 2\r\ncontent-length: 2\r\n\r\nok",
        _OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nok",
        _OK + b"content-length: -2\r\n\r\nok",
        _OK + b"transfer-encoding: chunked, gzip\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        _OK + b"transfer-encoding: gzip\r\n\r\nok",
        _OK + b"transfer-encoding: chunked\r\n\r\n2 \r\nok\r\n0\r\n\r\n",
        _OK + b"transfer-encoding: chunked\r\n\r\n2\r\nokx\r\n0\r\n\r\n",
        _OK + b"transfer-encoding: chunked\r\n\r\n2\nok\n0\n\n",
        _OK + b"content-length : 2\r\n\r\nok",
        _OK + b"content-length: 2\r\na: b\r\n c\r\n\r\nok",
        _OK + b"content-length: 2\r\na: b\0\r\n\r\nok",
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok",
        b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\ncontent-length: 2\r\n\r\nok",
        b"\x15\x03\x01\x00\x02\x02\x16",
    ],
)
async def test_an_answer_that_can_be_read_in_two_ways_is_an_error(answer: bytes) -> None:
    """It would shift every later answer on the connection, or be framed otherwise by a proxy in between."""
    async with _says(answer) as (client, _):
        with pytest.raises(EngineProtocolError) as caught:
            await client.get("/x", timeout_s=10)
        assert caught.value.reason is Reason.ENGINE_PROTOCOL


async def test_as_many_headers_as_may_be_are_taken() -> None:
    """The limits are for nonsense; real engines stay far below."""
    headers = b"".join(b"a%d: %b\r\n" % (n, b"b" * 100) for n in range(MAX_HEADERS - 1))
    assert len(headers) < MAX_HEADER_BYTES
    async with _says(_OK + headers + b"content-length: 2\r\n\r\nok") as (client, _):
        answer = await client.get("/x", timeout_s=10)
        assert (answer.body, len(answer.headers)) == (b"ok", MAX_HEADERS)


class _BusyEngine:
    """Healthy, and answers every request with one error."""

    def __init__(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers

    async def handle(self, request: Request, response: Response) -> None:
        if request.path == b"/health":
            response.send(200, [], b"")
        else:
            body = b'{"error": {"message": "not now"}}'
            response.send(self._status, [(b"content-type", b"application/json"), *self._headers], body)

    def render_error(self, error: InvalidRequest) -> tuple[Headers, bytes]:
        raise AssertionError(error)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("status", "header"), [(429, (b"retry-after", b"17")), (401, (b"www-authenticate", b'Bearer realm="vllm"'))]
)
async def test_an_engine_says_what_a_client_is_to_do(
    status: int, header: tuple[bytes, bytes], *, is_stream: bool
) -> None:
    """When to come again, and with what key: an engine's own words, and no other header of its."""
    app = _BusyEngine(status, [header, (b"x-internal", b"secret"), (b"server", b"uvicorn")])
    config = Config(gateway=GatewayConfig(port=0, admin_port=0), timeouts=TIMEOUTS)
    async with Listener(app, bind("127.0.0.1", 0), shutdown_s=1) as engine:
        addresses = [EngineAddress(EngineName("decode-0"), Role.DECODE, engine.url)]
        async with running_gateway(config, addresses, bind_gateway(config)) as gateway:
            await until_ready(gateway)
            async with httpx.AsyncClient(base_url=gateway.client.url) as client:
                body = {"model": MODEL, "prompt": "one two", "max_tokens": 1, "stream": is_stream}
                answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == "not now"
    assert answer.headers[header[0].decode()] == header[1].decode()
    assert "x-internal" not in answer.headers
    assert answer.headers.get("server") != "uvicorn"


@pytest.mark.parametrize("access", [OPEN_ACCESS, EngineAccess(Secret("sk-engine"))], ids=["open", "with a key"])
async def test_a_refused_key_of_pdserves_is_not_the_clients_fault(access: EngineAccess) -> None:
    """A client that is told 401 looks for the mistake in its own key."""
    async with Listener(_BusyEngine(401, []), bind("127.0.0.1", 0), shutdown_s=1) as listener:
        address = EngineAddress(EngineName("e"), Role.DECODE, listener.url)
        client = EngineClient(address, connect_timeout_s=5, access=access)
        error = client.status_error(await client.get("/v1/models", timeout_s=10))
        client.close()
    if access.key is None:
        assert isinstance(error, EngineStatus)
        assert error.status == 401
    else:
        assert (error.status, error.reason) == (502, Reason.ENGINE_PROTOCOL)
        assert "refused pdserve's key" in str(error)
        assert "sk-engine" not in str(error)
