"""The answer's way out, and the ways in which it can go wrong there.

A Wire is what the stand-in writes its answers to; faults put one of the others around it. Every one honours the client's pace.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.http.server import Headers, Response
    from pdserve.sim.clock import Clock


class Wire(Protocol):
    """Takes one answer."""

    async def start(self, status: int, headers: Headers) -> None:
        """The head of an answer that comes in pieces."""

    async def write(self, data: bytes) -> None:
        """A piece of the body."""

    async def end(self) -> None:
        """The answer is whole."""

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""


class PlainWire:
    """Writes to the client's connection."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._may_write = asyncio.Event()
        self._may_write.set()

    def pause_reading(self) -> None:
        self._may_write.clear()

    def resume_reading(self) -> None:
        self._may_write.set()

    async def start(self, status: int, headers: Headers) -> None:
        self._response.start(status, headers, source=self)

    async def write(self, data: bytes) -> None:
        await self._may_write.wait()
        self._response.write(data)

    async def end(self) -> None:
        self._response.end()

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        self._response.send(status, headers, body)


class BreakingWire:
    """Breaks off after so many pieces: 0 is before the head, and a whole answer is two pieces."""

    def __init__(self, wire: Wire, num_pieces: int, break_off: Callable[[], None]) -> None:
        self._wire = wire
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

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, headers)
        half = len(body) // 2
        for piece in (body[:half], body[half:]):
            await self.write(piece)
        await self.end()

    async def _break(self) -> None:
        self._break_off()
        await asyncio.get_running_loop().create_future()  # The lost connection cancels whoever answers on it.


class SlowWire:
    """Writes bodies a byte at a time."""

    def __init__(self, wire: Wire, byte_delay_s: float, clock: Clock) -> None:
        self._wire = wire
        self._byte_delay_s = byte_delay_s
        self._clock = clock

    async def start(self, status: int, headers: Headers) -> None:
        await self._wire.start(status, headers)

    async def write(self, data: bytes) -> None:
        for value in data:
            await self._wire.write(bytes([value]))
            await self._clock.sleep(self._byte_delay_s)

    async def end(self) -> None:
        await self._wire.end()

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, headers)
        await self.write(body)
        await self.end()


class GarbageWire:
    """Slips bytes that are no event into a stream, after so many pieces; whole answers are garbage altogether."""

    def __init__(self, wire: Wire, num_pieces: int, garbage: bytes) -> None:
        self._wire = wire
        self._num_left = num_pieces
        self._garbage = garbage

    async def start(self, status: int, headers: Headers) -> None:
        await self._wire.start(status, headers)

    async def write(self, data: bytes) -> None:
        if self._num_left == 0:
            await self._wire.write(self._garbage)
        self._num_left -= 1
        await self._wire.write(data)

    async def end(self) -> None:
        await self._wire.end()

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        del body
        await self._wire.send(status, headers, self._garbage)
