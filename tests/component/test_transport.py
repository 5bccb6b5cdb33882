"""The client side: engines that answer in every way a socket allows, and what becomes of each."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from descriptors import no_descriptor_left
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine import transport
from pdserve.engine.transport import EngineClient
from pdserve.errors import EngineError, EngineProtocolError, EngineTimeout, EngineUnreachable, OutOfSockets, Reason
from pdserve.http import client as http_client
from pdserve.http.listener import bind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def _says(*pieces: bytes, close: bool = True) -> Script:
    """A server that answers every request on a connection with these pieces."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                if close:
                    return

    return script


class _Server:
    def __init__(self, url: str) -> None:
        self.url = url
        self.num_connections = 0
        self.connection_lost = asyncio.Event()


@contextlib.asynccontextmanager
async def _engine(script: Script, *, connect_timeout_s: float = 5.0) -> AsyncIterator[tuple[EngineClient, _Server]]:
    sock = bind("127.0.0.1", 0)
    server = _Server(f"http://127.0.0.1:{sock.getsockname()[1]}")

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.num_connections += 1
        try:
            await script(reader, writer)
        finally:
            writer.close()
            server.connection_lost.set()

    listening = await asyncio.start_server(on_connection, sock=sock)
    client = EngineClient(EngineAddress(EngineName("e"), Role.DECODE, server.url), connect_timeout_s=connect_timeout_s)
    try:
        yield client, server
    finally:
        client.close()
        listening.close()


async def test_a_whole_answer() -> None:
    """Status, headers in lower case, body."""
    said = b"HTTP/1.1 404 Not Found\r\nContent-Type: text/plain\r\ncontent-length: 2\r\n\r\nno"
    async with _engine(_says(said)) as (client, _):
        answer = await client.get("/x", timeout_s=10)
        assert (answer.status, answer.content_type, answer.body) == (404, b"text/plain", b"no")


@pytest.mark.parametrize(
    "pieces",
    [
        [_OK],
        [bytes([byte]) for byte in _OK],
        [b"HTTP/1.1 100 Continue\r\n\r\n", _OK],
        [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n", b"1\r\nk\r\n0\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n\r\no", b"k"],
        [b"HTTP/1.0 200 OK\r\n\r\nok"],
    ],
    ids=["whole", "byte_by_byte", "after_100", "chunked", "until_close", "http_1_0"],
)
async def test_every_framing_is_understood(pieces: list[bytes]) -> None:
    """A length, chunks, or the connection's end; in any pieces."""
    async with _engine(_says(*pieces)) as (client, _):
        assert (await client.get("/x", timeout_s=10)).body == b"ok"


async def test_a_connection_is_used_again() -> None:
    """A second request needs no second handshake."""
    async with _engine(_says(_OK, close=False)) as (client, server):
        for _ in range(3):
            await client.post("/x", b"{}", request_id=b"r", timeout_s=10)
        assert server.num_connections == 1


async def test_an_idle_connection_is_let_go_before_the_engine_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is sent just as the engine closes would be lost."""
    monkeypatch.setattr(http_client, "MAX_IDLE_S", -1.0)
    async with _engine(_says(_OK, close=False)) as (client, server):
        for _ in range(2):
            await client.get("/x", timeout_s=10)
        assert server.num_connections == 2


async def test_bytes_that_nobody_asked_for_never_become_an_answer() -> None:
    """An engine that says more than it announced would shift every later answer by one: that connection is dropped."""
    async with _engine(_says(_OK + _OK.replace(b"ok", b"no"), close=False)) as (client, server):
        for _ in range(2):
            with contextlib.suppress(EngineError):
                assert (await client.get("/x", timeout_s=10)).body == b"ok"
        assert server.num_connections == 2


@pytest.mark.parametrize(
    ("pieces", "kind", "reason"),
    [
        ([], EngineUnreachable, Reason.ENGINE_UNREACHABLE),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok"], EngineUnreachable, Reason.ENGINE_BROKE_OFF),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nok"], EngineUnreachable, Reason.ENGINE_BROKE_OFF),
        ([b"HTTP/1.1 200 OK\r\ncontent-le"], EngineUnreachable, Reason.ENGINE_BROKE_OFF),
        ([b"SSH-2.0-OpenSSH_9\r\n\r\n"], EngineProtocolError, Reason.ENGINE_PROTOCOL),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], EngineProtocolError, Reason.ENGINE_PROTOCOL),
    ],
)
async def test_a_failing_answer_is_told_by_its_kind(
    pieces: list[bytes], kind: type[EngineError], reason: Reason
) -> None:
    """Whether a byte had come decides what may be tried again."""
    async with _engine(_says(*pieces)) as (client, _):
        with pytest.raises(kind, match=r"decode engine e at http://127\.0\.0\.1") as caught:
            await client.get("/x", timeout_s=10)
        assert caught.value.reason is reason


async def test_nobody_listening_is_unreachable() -> None:
    """A refused connection names the engine."""
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    sock.close()
    client = EngineClient(EngineAddress(EngineName("e"), Role.PREFILL, url), connect_timeout_s=5)
    with pytest.raises(EngineUnreachable, match="cannot connect"):
        await client.get("/x", timeout_s=5)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_lack_of_descriptors_is_not_the_engines_fault(host: str) -> None:
    """The engine is there: whoever asks has no socket to ask with, nor one to look its name up with."""
    async with _engine(_says(_OK)) as (_, server):
        url = server.url.replace("127.0.0.1", host)
        client = EngineClient(EngineAddress(EngineName("e"), Role.DECODE, url), connect_timeout_s=5)
        with no_descriptor_left(), pytest.raises(OutOfSockets) as caught:
            await client.connect()
        assert (caught.value.status, caught.value.reason) == (503, Reason.OUT_OF_SOCKETS)
        assert url in str(caught.value)
        assert (await client.get("/x", timeout_s=10)).body == b"ok"
        client.close()


async def test_a_silent_engine_meets_the_deadline_and_is_hung_up_on() -> None:
    """The engine sees its client gone, so that it aborts what nobody waits for."""

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)

    async with _engine(silent) as (client, server):
        with pytest.raises(EngineTimeout, match=r"the answer did not come within 0\.05 s"):
            await client.post("/x", b"{}", request_id=b"r", timeout_s=0.05)
        await asyncio.wait_for(server.connection_lost.wait(), 10)


async def test_a_cancelled_request_hangs_up() -> None:
    """A client that leaves takes its legs with it."""
    arrived = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        await reader.read(-1)

    async with _engine(silent) as (client, server):
        task = asyncio.create_task(client.get("/x", timeout_s=60))
        await asyncio.wait_for(arrived.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.connection_lost.wait(), 10)


async def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body above the limit ends in an error instead of in memory."""
    monkeypatch.setattr(transport, "MAX_WHOLE_ANSWER_BYTES", 10)
    said = b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n" + b"x" * 20
    async with _engine(_says(said)) as (client, _):
        with pytest.raises(EngineProtocolError, match="exceeds 10 bytes"):
            await client.get("/x", timeout_s=10)
