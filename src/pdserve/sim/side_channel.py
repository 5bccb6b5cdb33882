"""The way between two stand-ins, in place of NIXL: questions and answers, one JSON object a line, over TCP.

D asks P who it is, reads blocks, extends leases and gives notice that it needs a request's blocks no longer. As with NIXL,
reading does not ask whether the blocks are still the request's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator

_MAX_LINE_BYTES = 64 * 1024 * 1024
"""A prompt's blocks are one line: a million tokens of six digits fit eight times."""


class TransferFailed(Exception):
    """P's side channel was not reached, is another engine's, or did not give what was asked for."""


class Owner(Protocol):
    """The engine whose blocks the side channel gives access to."""

    engine_id: str

    def contents(self, block_ids: Collection[int]) -> list[list[int]]:
        """What stands in blocks. Raises KeyError."""

    def extend_leases(self, request_ids: Collection[str]) -> None:
        """A heartbeat came."""

    def take_notice(self, request_id: str) -> None:
        """A request's blocks may go."""


class _Question(msgspec.Struct, omit_defaults=True):
    engine_id: str | None = None
    """Set: whoever has another id shall refuse."""
    read: list[int] | None = None
    extend: list[str] | None = None
    notice: str | None = None


class _Answer(msgspec.Struct, omit_defaults=True):
    error: str | None = None
    blocks: list[list[int]] | None = None


_encode = msgspec.json.Encoder().encode
_decode_question = msgspec.json.Decoder(_Question).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


class SideChannel:
    """P's side."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; the port, which for 0 the kernel chose."""
        self._server = await asyncio.start_server(self._accepted, host, port, limit=_MAX_LINE_BYTES)
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    def abort(self) -> None:
        """Stop listening and drop whoever is connected."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """Stop for good."""
        self.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._answer_all(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                writer.write(_encode(self._answer(line)) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            pass  # Gone, or a line beyond the limit: there is nobody left to tell.
        finally:
            self._writers.discard(writer)
            writer.close()

    def _answer(self, line: bytes) -> _Answer:
        try:
            question = _decode_question(line)
        except msgspec.DecodeError as exc:
            return _Answer(error=f"not a question: {exc}")
        if question.engine_id not in {None, self._owner.engine_id}:
            return _Answer(error=f"expected engine {question.engine_id}, this is {self._owner.engine_id}")
        if question.extend is not None:
            self._owner.extend_leases(question.extend)
        if question.notice is not None:
            self._owner.take_notice(question.notice)
        return self._read(question.read) if question.read is not None else _Answer()

    def _read(self, block_ids: list[int]) -> _Answer:
        try:
            return _Answer(blocks=self._owner.contents(block_ids))
        except KeyError as exc:
            return _Answer(error=f"there is no block {exc}")


class Peer:
    """D's side: a connection to another engine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, timeout_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self._owes_answer = False
        """Asked and not answered, also when the asker has given up: the next answer would be the last one's."""

    @property
    def is_usable(self) -> bool:
        """Whether another question can be asked."""
        return not self._owes_answer and not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        """Hang up."""
        self._writer.close()

    async def check(self, engine_id: str | None) -> None:
        """The handshake: is it the engine that it is said to be? Raises TransferFailed."""
        if not isinstance(engine_id, str):
            raise TransferFailed(f"no engine is called {engine_id!r}")
        await self._ask(_Question(engine_id=engine_id))

    async def read_blocks(self, engine_id: str | None, block_ids: Collection[int]) -> list[list[int]]:
        """What stands in the engine's blocks, if it is still the same one. Raises TransferFailed."""
        answer = await self._ask(_Question(engine_id=engine_id, read=list(block_ids)))
        if answer.blocks is None or len(answer.blocks) != len(block_ids):
            raise TransferFailed("the answer holds other blocks than were asked for")
        return answer.blocks

    async def extend_leases(self, request_ids: Collection[str]) -> None:
        """Send a heartbeat. Raises TransferFailed."""
        await self._ask(_Question(extend=list(request_ids)))

    async def give_notice(self, request_id: str) -> None:
        """Tell the engine that a request's blocks are needed no longer. Raises TransferFailed."""
        await self._ask(_Question(notice=request_id))

    async def _ask(self, question: _Question) -> _Answer:
        with _failures():
            async with asyncio.timeout(self._timeout_s):
                self._owes_answer = True
                self._writer.write(_encode(question) + b"\n")
                answer = _decode_answer(await self._reader.readline())
                self._owes_answer = False
        if answer.error is not None:
            raise TransferFailed(answer.error)
        return answer


class Peers:
    """Connections to other engines' side channels, kept for the next use, as NIXL keeps its agents."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        """For connecting, and for each answer."""
        self._idle: dict[tuple[str, int], list[Peer]] = {}

    @contextlib.asynccontextmanager
    async def connected(self, host: str, port: int) -> AsyncIterator[Peer]:
        """A connection that nobody else uses meanwhile. Raises TransferFailed."""
        peer = self._take_idle(host, port) or await self._connect(host, port)
        try:
            yield peer
        finally:
            if peer.is_usable:
                self._idle.setdefault((host, port), []).append(peer)
            else:
                peer.close()

    def close(self) -> None:
        """Hang up on everybody."""
        for peers in self._idle.values():
            for peer in peers:
                peer.close()
        self._idle.clear()

    def _take_idle(self, host: str, port: int) -> Peer | None:
        peers = self._idle.get((host, port))
        while peers:
            peer = peers.pop()
            if peer.is_usable:
                return peer
            peer.close()
        return None

    async def _connect(self, host: str, port: int) -> Peer:
        with _failures():
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES)
        return Peer(reader, writer, timeout_s=self._timeout_s)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """What sockets and JSON raise, as TransferFailed: a timeout is an OSError, a host that is no name a ValueError."""
    try:
        yield
    except (OSError, ValueError, OverflowError) as exc:
        raise TransferFailed(str(exc) or "no answer in time") from exc
