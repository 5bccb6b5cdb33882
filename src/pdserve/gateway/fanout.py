"""Runs the parts of one request side by side and gives their answers to the client as one.

Each part is a call of its own that goes through all eight steps; what one answer is, is protocol/parts.py's matter. Knows no
engines and no sockets.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from pdserve.core import WEAKEST_FIRST
from pdserve.engine.transport import MAX_WHOLE_ANSWER_BYTES
from pdserve.errors import EngineProtocolError, EngineStatus, RequestError
from pdserve.protocol.openai import facts_of
from pdserve.protocol.parts import DONE_EVENT, MAX_PARTS_AT_ONCE, StreamMerge, UnmergeableAnswer, merge_answers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from pdserve.gateway.call import Call, Reply
    from pdserve.http.server import Headers, PausableSource
    from pdserve.protocol.fields import Fields
    from pdserve.protocol.parts import Parts

    Answer = Callable[[Call, Reply], Awaitable[None]]

_OK = 200
_ENGINES = "the engines of a request in parts"
_REQUEST_ID = b"x-pdserve-request-id"
_PLACE = b"x-pdserve-prefill"
_TIMING = b"server-timing"


async def answer_parts(answer: Answer, call: Call, parts: Parts, reply: Reply) -> None:
    """Answer a request that was taken apart.

    Raises the first part's error, before anything went to the client or, where reply.is_started, in the middle of a stream. No
    part runs any more when this returns or raises.
    """
    fanout = _Fanout(answer, call, parts, reply)
    await fanout.run()


class _Fanout:
    """One request in parts. To the client's connection it is what the stream's bytes come from."""

    def __init__(self, answer: Answer, call: Call, parts: Parts, reply: Reply) -> None:
        self._answer = answer
        self._call = call
        self._parts = parts
        self._reply = reply
        self._merge = StreamMerge(parts, request_id=call.request_id)
        self._heads: dict[int, Sequence[tuple[bytes, bytes]]] = {}
        self._bodies: dict[int, bytes] = {}
        self._num_body_bytes = 0
        self._sources: dict[int, PausableSource] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._is_paused = False
        self._is_over = False
        """Nothing goes to the client any more, and no further part begins."""
        self._error: RequestError | None = None

    async def run(self) -> None:
        """Raises RequestError."""
        waiting = iter(enumerate(self._parts.requests))
        async with asyncio.TaskGroup() as group:
            for _ in range(min(MAX_PARTS_AT_ONCE, len(self._parts.requests))):
                group.create_task(self._work(waiting))
        if self._error is None and not self._is_over:
            self._finish()
        if self._error is not None:
            raise self._error

    # The client's side

    def pause_reading(self) -> None:
        self._is_paused = True
        for source in self._sources.values():
            source.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        for source in self._sources.values():
            source.resume_reading()

    # The parts' side: called from an engine's connection, so nothing is raised here

    def take_answer(self, index: int, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """A part's whole answer."""
        if status != _OK:
            content_type = dict(headers).get(b"content-type", b"")
            self._fail(EngineStatus(engine=_ENGINES, status=status, content_type=content_type, body=body))
            return
        self._num_body_bytes += len(body)
        if self._num_body_bytes > MAX_WHOLE_ANSWER_BYTES:
            self._fail_protocol(f"the answers together exceed {MAX_WHOLE_ANSWER_BYTES} bytes")
            return
        self._heads[index] = headers
        self._bodies[index] = body

    def take_head(self, index: int, headers: Sequence[tuple[bytes, bytes]], source: PausableSource | None) -> None:
        """A part's stream begins; the first one's head is the client's."""
        if source is not None:
            self._sources[index] = source
            if self._is_paused:
                source.pause_reading()
        if not self._reply.is_started and not self._is_over:
            self._reply.start(_OK, merged_head([headers], request_id=self._call.request_id), source=self)

    def take_events(self, index: int, data: bytes) -> None:
        """A piece of a part's stream goes out at once, whatever the other parts do."""
        if self._is_over:
            return
        try:
            merged = self._merge.feed(index, data)
        except UnmergeableAnswer as exc:
            self._fail_protocol(str(exc))
            return
        if merged:
            self._reply.write(merged)
        if self._merge.is_broken:
            self._break_off(index)

    # Inside

    async def _work(self, waiting: Iterator[tuple[int, Fields]]) -> None:
        for index, fields in waiting:
            if self._is_over:
                return
            await self._run_part(index, fields)

    async def _run_part(self, index: int, fields: Fields) -> None:
        task = asyncio.current_task()
        assert task is not None
        call = msgspec.structs.replace(
            self._call,
            fields=fields,
            facts=facts_of(self._call.api, fields),
            request_id=f"{self._call.request_id}-{index}",
        )
        part = _Part(self, index)
        self._running[index] = task
        try:
            await self._answer(call, part)
            assert part.is_ended or self._is_over
        except RequestError as exc:
            del self._running[index]
            self._fail(exc)
        finally:
            self._running.pop(index, None)
            self._sources.pop(index, None)

    def _finish(self) -> None:
        num_whole = len(self._bodies)
        if num_whole == len(self._parts.requests):
            self._send_whole()
        elif num_whole:
            self._fail_protocol("some answered with a stream and some did not")
        else:
            self._reply.write(self._merge.finish())
            self._reply.end()

    def _send_whole(self) -> None:
        order = range(len(self._parts.requests))
        bodies = [self._bodies[index] for index in order]
        try:
            body = merge_answers(self._parts, bodies, request_id=self._call.request_id)
        except UnmergeableAnswer as exc:
            self._fail_protocol(str(exc))
            return
        heads = [self._heads[index] for index in order]
        self._reply.send(_OK, merged_head(heads, request_id=self._call.request_id), body)

    def _break_off(self, index: int) -> None:
        """An engine has told the client of its failure: the stream ends as vLLM ends it, and the failed part ends by itself."""
        self._is_over = True
        self._reply.write(DONE_EVENT)
        self._reply.end()
        self.resume_reading()  # The client's connection will not do it any more.
        self._cancel_all_but(index)

    def _fail_protocol(self, message: str) -> None:
        self._fail(EngineProtocolError(message, engine=_ENGINES))

    def _fail(self, error: RequestError) -> None:
        """The first error is the request's."""
        if self._is_over:
            return
        self._is_over = True
        self._error = error
        self._cancel_all_but(None)

    def _cancel_all_but(self, index: int | None) -> None:
        for running, task in self._running.items():
            if running != index:
                task.cancel()


class _Part:
    """Takes one part's answer."""

    __slots__ = ("_fanout", "_index", "is_ended", "is_started")

    def __init__(self, fanout: _Fanout, index: int) -> None:
        self._fanout = fanout
        self._index = index
        self.is_started = False
        self.is_ended = False

    def send(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        self.is_started = self.is_ended = True
        self._fanout.take_answer(self._index, status, headers, body)

    def start(
        self,
        status: int,  # noqa: ARG002 - a stream begins only where the engine answered 200
        headers: Sequence[tuple[bytes, bytes]],
        *,
        source: PausableSource | None = None,
    ) -> None:
        self.is_started = True
        self._fanout.take_head(self._index, headers, source)

    def write(self, data: bytes) -> None:
        self._fanout.take_events(self._index, data)

    def end(self) -> None:
        self.is_ended = True


def merged_head(heads: Iterable[Sequence[tuple[bytes, bytes]]], *, request_id: str) -> Headers:
    """The first part's head, with the request's own id, the weakest proof of all and the slowest part's times."""
    known = [dict(head) for head in heads]
    merged = known[0]
    for name, merge in ((_PLACE, _weakest), (_TIMING, _slowest)):
        values = [head[name] for head in known if name in head]
        if values:
            merged[name] = merge(values)
    if _REQUEST_ID in merged:
        merged[_REQUEST_ID] = request_id.encode()
    return list(merged.items())


def _weakest(places: Sequence[bytes]) -> bytes:
    """`remote` only where all parts are."""
    return next(place.encode() for place in WEAKEST_FIRST if place.encode() in places)


def _slowest(timings: Sequence[bytes]) -> bytes:
    """Of each phase the longest time: the parts run side by side."""
    longest: dict[bytes, float] = {}
    for timing in timings:
        for entry in filter(None, timing.split(b", ")):
            name, _, duration = entry.partition(b";dur=")
            longest[name] = max(longest.get(name, 0.0), float(duration))
    return b", ".join(b"%b;dur=%.2f" % item for item in longest.items())
