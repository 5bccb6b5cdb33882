"""The answer's way out. Faults put wires of their own around it: bad_wires.py. Every one honours the client's pace."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pdserve.http.server import Headers, Response


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
