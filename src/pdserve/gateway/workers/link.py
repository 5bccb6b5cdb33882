"""What the front and a worker tell each other, over a pair of sockets that nobody else has: a length, and so much MessagePack.

Not JSON, which has no word for a limit of `inf` in the configuration.

The worker answers questions in the order in which they come, so that no question needs a number. The end of the stream is a
message too: to the front, that the worker is gone; to a worker, that the front is, and that it must stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from pdserve.config import Config
from pdserve.core import EngineAddress
from pdserve.protocol.admin import EngineInfo, GatewayStatus, RequestRecord

if TYPE_CHECKING:
    import socket

_LENGTH_BYTES = 4
_Received = TypeVar("_Received")


class _Message(msgspec.Struct, frozen=True, tag=True):
    """One of them."""


# From the front


class Begin(_Message, frozen=True):
    """The first one: everything that a worker needs to know. Its descriptors are inherited."""

    config: Config
    engines: list[EngineAddress]
    worker: int
    num_workers: int
    board_descriptor: int
    intake_descriptor: int


class AskReport(_Message, frozen=True):
    """Answered by a Report."""


class AskLast(_Message, frozen=True):
    """Answered by Records."""

    num_records: int


class AskRecord(_Message, frozen=True):
    """Answered by Records: one, or none."""

    request_id: str


class SetDraining(_Message, frozen=True):
    """Answered by Engine. Only engines that there are."""

    name: str
    is_draining: bool


class Renew(_Message, frozen=True):
    """Read keys and certificate again. Not answered, like what follows."""


class Stop(_Message, frozen=True):
    """Let open requests end, then end."""


class Force(_Message, frozen=True):
    """Do not wait for open requests any longer."""


FromFront = Begin | AskReport | AskLast | AskRecord | SetDraining | Renew | Stop | Force


# From a worker


class Up(_Message, frozen=True):
    """It can take clients from now on, though it may have no engine for them yet."""


class Ready(_Message, frozen=True):
    """A decode engine takes traffic, for the first time in this worker's life."""


class Changed(_Message, frozen=True):
    """An engine or a pair has changed its state."""


class Leaving(_Message, frozen=True):
    """It was asked to stop by somebody else, and wants no more clients."""


class Report(_Message, frozen=True):
    """What it knows, and all that it has counted."""

    status: GatewayStatus
    counts: list[tuple[str, tuple[str, ...], int]]


class Farewell(_Message, frozen=True):
    """The last report, sent unasked at the end."""

    report: Report


class Records(_Message, frozen=True):
    """The newest first."""

    records: list[RequestRecord]


class Engine(_Message, frozen=True):
    """An engine as it is now."""

    info: EngineInfo


Answer = Report | Records | Engine
FromWorker = Up | Ready | Changed | Leaving | Farewell | Answer


class Link(Generic[_Received]):
    """One end."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[_Received]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    def send(self, message: FromFront | FromWorker) -> None:
        """Without effect when the other side is gone: `receive` tells that."""
        packed = msgspec.msgpack.encode(message)
        self._writer.write(len(packed).to_bytes(_LENGTH_BYTES) + packed)

    async def flush(self) -> None:
        """Wait until the other side can take more."""
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def receive(self) -> _Received | None:
        """The next message; None at the end."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
            packed = await self._reader.readexactly(length)
        except (ConnectionError, asyncio.IncompleteReadError):
            return None  # Whoever was killed in the middle of a message meant nothing by its beginning.
        return self._decoder.decode(packed)

    async def close(self) -> None:
        """Send what is still to be sent, and end."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def link_to_worker(sock: socket.socket) -> Link[FromWorker]:
    """The front's end."""
    return Link(*await _streams(sock), msgspec.msgpack.Decoder(FromWorker))


async def link_to_front(sock: socket.socket) -> Link[FromFront]:
    """A worker's end."""
    return Link(*await _streams(sock), msgspec.msgpack.Decoder(FromFront))


async def _streams(sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(sock=sock)
