"""A tap on the wire: a relay between two parties of a test that keeps what went through it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pdserve.http.listener import bind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Tap:
    """What was sent to one engine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.sent = bytearray()
        """On all connections together."""

    def heads(self) -> list[bytes]:
        """The heads of all requests, in lower case but for the method."""
        heads = re.findall(rb"((?:GET|POST) )(/[^ ]* HTTP/1\.1\r\n.*?\r\n)\r\n", self.sent, re.DOTALL)
        return [method + rest.lower() for method, rest in heads]


@contextlib.asynccontextmanager
async def tapped(url: str) -> AsyncIterator[Tap]:
    """An engine's connections through a relay. Its side channel is not relayed: handoffs name it as it is."""
    parts = urlsplit(url)
    sock = bind("127.0.0.1", 0)
    tap = Tap(f"http://127.0.0.1:{sock.getsockname()[1]}")

    relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_connection(parts.hostname, parts.port)
        with contextlib.suppress(OSError):
            await asyncio.gather(_copy(reader, engine_writer, tap.sent), _copy(engine_reader, writer, bytearray()))

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.add(asyncio.create_task(relay(reader, writer)))

    server = await asyncio.start_server(connected, sock=sock)
    try:
        yield tap
    finally:
        server.close()
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
    try:
        while data := await reader.read(65536):
            kept += data
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
