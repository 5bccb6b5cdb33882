"""The ways in which an answer can go wrong on its way out. Each is put around the wire that it spoils."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.http.server import Headers
    from pdserve.sim.bare import BareConnection
    from pdserve.sim.clock import Clock
    from pdserve.sim.wire import Wire


async def _until_the_client_leaves() -> None:
    await asyncio.get_running_loop().create_future()


class _Around:
    """Passes everything on; a whole answer goes as a head, pieces and an end."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def start(self, status: int, headers: Headers) -> None:
        await self._wire.start(status, headers)

    async def write(self, data: bytes) -> None:
        await self._wire.write(data)

    async def end(self) -> None:
        await self._wire.end()

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, headers)
        half = len(body) // 2
        for piece in (body[:half], body[half:]):
            await self.write(piece)
        await self.end()


class BreakingWire(_Around):
    """Breaks off after so many pieces: 0 is before the head, and a whole answer is two pieces."""

    def __init__(self, wire: Wire, num_pieces: int, break_off: Callable[[], None]) -> None:
        super().__init__(wire)
        self._num_left = num_pieces
        self._break_off = break_off

    async def start(self, status: int, headers: Headers) -> None:
        if not self._num_left:
            await self._break()
        await self._wire.start(status, headers)

    async def write(self, data: bytes) -> None:
        if not self._num_left:
            await self._break()
        self._num_left -= 1
        await self._wire.write(data)

    async def end(self) -> None:
        if not self._num_left:
            await self._break()
        await self._wire.end()

    async def _break(self) -> None:
        self._break_off()
        await _until_the_client_leaves()  # The lost connection cancels whoever answers on it.


class LastWordWire(_Around):
    """Does something once the answer is whole and with the client's kernel."""

    def __init__(self, wire: Wire, connection: BareConnection, then: Callable[[], Awaitable[None]]) -> None:
        super().__init__(wire)
        self._connection = connection
        self._then = then

    async def end(self) -> None:
        await self._wire.end()
        await self._connection.flushed()
        await self._then()

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        await self._wire.send(status, headers, body)
        await self._connection.flushed()
        await self._then()


class SlowWire(_Around):
    """Writes bodies a byte at a time."""

    def __init__(self, wire: Wire, byte_delay_s: float, clock: Clock) -> None:
        super().__init__(wire)
        self._byte_delay_s = byte_delay_s
        self._clock = clock

    async def write(self, data: bytes) -> None:
        for value in data:
            await self._wire.write(bytes([value]))
            await self._clock.sleep(self._byte_delay_s)


class GarbageWire(_Around):
    """Slips bytes that are no event into a stream, after so many pieces; whole answers are garbage altogether."""

    def __init__(self, wire: Wire, num_pieces: int, garbage: bytes) -> None:
        super().__init__(wire)
        self._num_left = num_pieces
        self._garbage = garbage

    async def write(self, data: bytes) -> None:
        if self._num_left == 0:
            await self._wire.write(self._garbage)
        self._num_left -= 1
        await self._wire.write(data)

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        del body
        await self._wire.send(status, headers, self._garbage)


class TruncatingWire(_Around):
    """Ends in good order, in the middle of the piece after so many; the rest is never said."""

    def __init__(self, wire: Wire, num_pieces: int) -> None:
        super().__init__(wire)
        self._num_left = num_pieces

    async def write(self, data: bytes) -> None:
        if self._num_left == 0:
            await self._wire.write(data[: len(data) // 2])
            await self._wire.end()
        if self._num_left > 0:
            await self._wire.write(data)
        self._num_left -= 1

    async def end(self) -> None:
        if self._num_left >= 0:
            await self._wire.end()


class WithoutLastPieceWire(_Around):
    """Ends in good order, but for the last piece: [DONE], or whatever the API has in its place."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self._held: bytes = b""

    async def write(self, data: bytes) -> None:
        held, self._held = self._held, data
        if held:
            await self._wire.write(held)


class SilentWire(_Around):
    """A head, and nothing after it."""

    async def write(self, data: bytes) -> None:
        del data
        await _until_the_client_leaves()

    async def end(self) -> None:
        await _until_the_client_leaves()


class InsteadWire:
    """Answers with another body."""

    def __init__(self, wire: Wire, body: bytes) -> None:
        self._wire = wire
        self._body = body
        self._is_sent = False

    async def start(self, status: int, headers: Headers) -> None:
        self._is_sent = True
        await self._wire.send(status, headers, self._body)

    async def write(self, data: bytes) -> None:
        pass

    async def end(self) -> None:
        pass

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        del body
        await self.start(status, headers)


class LyingWire:
    """Announces one framing and sends another; the connection ends with the body."""

    def __init__(
        self,
        connection: BareConnection,
        framing: Callable[[int], bytes],
        close: Callable[[], None] | None = None,
    ) -> None:
        self._connection = connection
        self._framing = framing
        self._close = close
        self._head: tuple[int, Headers] | None = None
        self._pieces: list[bytes] = []

    async def start(self, status: int, headers: Headers) -> None:
        self._head = (status, headers)

    async def write(self, data: bytes) -> None:
        self._pieces.append(data)

    async def end(self) -> None:
        """Streams are held back until here: the length is part of the lie."""
        assert self._head is not None
        await self.send(*self._head, b"".join(self._pieces))

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        fields = b"".join(b"%b: %b\r\n" % header for header in headers)
        self._connection.write(b"HTTP/1.1 %d OK\r\n%b%b\r\n%b" % (status, fields, self._framing(len(body)), body))
        if self._close is None:
            self._connection.close()
            return
        self._close()
        await _until_the_client_leaves()


class NoHttpWire:
    """Answers in no HTTP at all."""

    def __init__(self, connection: BareConnection, data: bytes) -> None:
        self._connection = connection
        self._data = data

    async def start(self, status: int, headers: Headers) -> None:
        del status, headers
        self._connection.write(self._data)
        self._connection.close()

    async def write(self, data: bytes) -> None:
        pass

    async def end(self) -> None:
        pass

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        del body
        await self.start(status, headers)
