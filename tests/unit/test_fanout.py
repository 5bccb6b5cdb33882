"""The parts of one request: how they run side by side, fail, are cancelled and are slowed down, without any engine."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import EngineProtocolError, EngineStatus, NoEligibleEngine, Reason
from pdserve.gateway import fanout as module
from pdserve.gateway.call import Call
from pdserve.gateway.fanout import answer_parts, merged_head
from pdserve.protocol.api import Api
from pdserve.protocol.openai import facts_of, split_request
from pdserve.protocol.parts import MAX_PARTS_AT_ONCE, take_apart

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pdserve.gateway.call import Reply
    from pdserve.http.server import PausableSource
    from pdserve.protocol.parts import Parts

    Headers = Sequence[tuple[bytes, bytes]]
    Answer = Callable[[Call, Reply], Awaitable[None]]

_HEAD = [(b"content-type", b"text/event-stream"), (b"x-pdserve-request-id", b"pd-1-0")]
_DONE = b"data: [DONE]\n\n"
_ERROR = NoEligibleEngine("no engine is healthy")


class _Client:
    """The client's side of a request."""

    def __init__(self) -> None:
        self.is_started = False
        self.is_ended = False
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.source: PausableSource | None = None
        self.got_more = asyncio.Event()

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.write(body)
        self.end()

    def start(self, status: int, headers: Headers, *, source: PausableSource | None = None) -> None:
        assert not self.is_started
        self.is_started = True
        self.status, self.headers, self.source = status, dict(headers), source

    def write(self, data: bytes) -> None:
        assert self.is_started
        assert not self.is_ended
        self.body += data
        self.got_more.set()

    def end(self) -> None:
        assert not self.is_ended
        self.is_ended = True

    async def until_body_holds(self, text: bytes) -> None:
        while text not in self.body:
            self.got_more.clear()
            await self.got_more.wait()


class _Source:
    """What one part's bytes come from."""

    def __init__(self) -> None:
        self.is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


def _request(num_parts: int, **fields: Any) -> tuple[Call, Parts]:
    own = split_request(json.dumps({"prompt": "hello", "n": num_parts, **fields}).encode())
    parts = take_apart(Api.COMPLETIONS, own)
    assert parts is not None
    return Call(Api.COMPLETIONS, own, facts_of(Api.COMPLETIONS, own), "pd-1", 1.0, [(b"authorization", b"x")]), parts


def _index(call: Call) -> int:
    return int(call.request_id.rpartition("-")[2])


def _event(text: str) -> bytes:
    return b'data: {"id":"cmpl-x","created":1,"choices":[{"index":0,"text":"%b"}]}\n\n' % text.encode()


def _whole(text: str) -> bytes:
    usage = b'{"prompt_tokens":3,"completion_tokens":2}'
    return b'{"id":"cmpl-x","created":1,"choices":[{"index":0,"text":"%b"}],"usage":%b}' % (text.encode(), usage)


class _Watched:
    """Counts the parts that run, and what became of them."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.calls: list[Call] = []
        self.num_running = 0
        self.most_running = 0
        self.started = asyncio.Semaphore(0)
        self.cancelled: list[int] = []

    async def __call__(self, call: Call, reply: Reply) -> None:
        self.calls.append(call)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.started.release()
        try:
            await self._answer(call, reply)
        except asyncio.CancelledError:
            self.cancelled.append(_index(call))
            raise
        finally:
            self.num_running -= 1


async def test_whole_answers_come_as_one() -> None:
    """Every part is a call of its own, with an id of its own; the client gets one answer with the request's id."""

    async def answer(call: Call, reply: Reply) -> None:
        await asyncio.sleep(0)
        reply.send(200, [(b"content-type", b"application/json"), *_HEAD[1:]], _whole(f"text {_index(call)}"))

    client, watched = _Client(), _Watched(answer)
    call, parts = _request(3, seed=7)
    await answer_parts(watched, call, parts, client)
    body = json.loads(client.body)
    assert [choice["text"] for choice in body["choices"]] == ["text 0", "text 1", "text 2"]
    assert (body["id"], body["usage"]["completion_tokens"], client.status) == ("cmpl-pd-1", 6, 200)
    assert client.headers == {b"content-type": b"application/json", b"x-pdserve-request-id": b"pd-1"}
    assert client.is_ended
    assert [part.request_id for part in watched.calls] == ["pd-1-0", "pd-1-1", "pd-1-2"]
    assert [bytes(part.fields["seed"]) for part in watched.calls] == [b"7", b"8", b"9"]
    assert all(part.facts.alone_reason is None for part in watched.calls)
    assert {part.received_at_s for part in watched.calls} == {1.0}
    assert all(part.engine_headers == call.engine_headers for part in watched.calls)


async def test_only_so_many_run_at_once() -> None:
    """The others wait for one to end, and all get their turn."""

    async def answer(_call: Call, reply: Reply) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        reply.send(200, [], _whole("x"))

    client, watched = _Client(), _Watched(answer)
    await answer_parts(watched, *_request(3 * MAX_PARTS_AT_ONCE + 1), client)
    assert watched.most_running == MAX_PARTS_AT_ONCE
    assert len(json.loads(client.body)["choices"]) == 3 * MAX_PARTS_AT_ONCE + 1


async def test_nothing_goes_out_before_a_part_has_answered() -> None:
    """The head of a stream is the first answering part's, with the request's own id."""
    may_start = asyncio.Event()

    async def answer(call: Call, reply: Reply) -> None:
        if _index(call) == 1:
            await may_start.wait()
            reply.start(200, _HEAD)
            reply.write(_event("a") + _DONE)
        else:
            await asyncio.sleep(0)
            assert not client.is_started
            may_start.set()
            await client.until_body_holds(b'"a"')
            reply.start(200, _HEAD)
            reply.write(_event("b") + _DONE)
        reply.end()

    client = _Client()
    await answer_parts(answer, *_request(2, stream=True), client)
    assert client.headers[b"x-pdserve-request-id"] == b"pd-1"
    assert client.body.index(b'"a"') < client.body.index(b'"b"')
    assert client.body.count(_DONE) == 1
    assert client.body.endswith(_DONE)
    assert client.is_ended


async def test_no_parts_events_wait_for_another_part() -> None:
    """Two parts that answer in turn reach the client in turn, each event at once."""
    turns = [asyncio.Event(), asyncio.Event()]

    async def answer(call: Call, reply: Reply) -> None:
        own = _index(call)
        reply.start(200, _HEAD)
        for position in range(3):
            await turns[own].wait()
            turns[own].clear()
            text = f"{own}/{position}"
            reply.write(_event(text))
            assert text.encode() in client.body
            turns[1 - own].set()
        reply.end()

    client = _Client()
    turns[0].set()
    await answer_parts(answer, *_request(2, stream=True), client)
    order = [event["choices"][0] for event in _payloads(client.body)]
    assert [choice["text"] for choice in order] == ["0/0", "1/0", "0/1", "1/1", "0/2", "1/2"]
    assert [choice["index"] for choice in order] == [0, 1, 0, 1, 0, 1]


def _payloads(stream: bytes) -> list[Any]:
    events = stream.decode().split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_answer_is_the_requests_error(stream: bool) -> None:  # noqa: FBT001
    """It is raised as it is, the other parts are cancelled, parts that wait never begin, and nothing went to the client."""

    async def answer(call: Call, _reply: Reply) -> None:
        if _index(call) == 5:
            await asyncio.sleep(0)
            raise _ERROR
        await asyncio.Event().wait()

    client, watched = _Client(), _Watched(answer)
    with pytest.raises(NoEligibleEngine) as caught:
        await answer_parts(watched, *_request(MAX_PARTS_AT_ONCE + 8, stream=stream), client)
    assert caught.value is _ERROR
    assert not client.is_started
    assert len(watched.calls) == MAX_PARTS_AT_ONCE
    assert sorted(watched.cancelled) == [index for index in range(MAX_PARTS_AT_ONCE) if index != 5]


async def test_an_error_in_a_stream_is_left_to_the_caller_to_tell() -> None:
    """What went out stays; the other parts are cancelled, and what they still say goes nowhere."""

    async def answer(call: Call, reply: Reply) -> None:
        reply.start(200, _HEAD)
        reply.write(_event(f"text {_index(call)}"))
        if _index(call) == 1:
            await asyncio.sleep(0)
            raise _ERROR
        try:
            await asyncio.Event().wait()
        finally:
            reply.write(_event("too late"))

    client, watched = _Client(), _Watched(answer)
    with pytest.raises(NoEligibleEngine):
        await answer_parts(watched, *_request(3, stream=True), client)
    assert sorted(watched.cancelled) == [0, 2]
    assert client.is_started
    assert not client.is_ended
    assert b"too late" not in client.body
    assert _DONE not in client.body


async def test_the_first_error_is_the_one() -> None:
    """Errors that come of the cancelling are not told."""

    async def answer(call: Call, _reply: Reply) -> None:
        if _index(call) == 1:
            raise _ERROR
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise NoEligibleEngine("a consequence") from None

    with pytest.raises(NoEligibleEngine) as caught:
        await answer_parts(answer, *_request(3), _Client())
    assert caught.value is _ERROR


async def test_an_engines_error_event_ends_the_stream() -> None:
    """As in vLLM: the error, the end, nothing of the other choices. The part that failed ends by itself."""
    failed = asyncio.Event()

    async def answer(call: Call, reply: Reply) -> None:
        reply.start(200, _HEAD, source=source)
        reply.write(_event("a"))
        if _index(call) == 0:
            await asyncio.Event().wait()
        reply.write(b'data: {"error": {"code": 500}}\n\n')
        await asyncio.sleep(0)
        reply.write(_DONE)
        reply.end()
        failed.set()

    source, client, watched = _Source(), _Client(), _Watched(answer)
    await answer_parts(watched, *_request(2, stream=True), client)
    assert client.body.endswith(b'data: {"error": {"code": 500}}\n\n' + _DONE)
    assert client.is_ended
    assert failed.is_set()
    assert watched.cancelled == [0]


async def test_cancelling_waits_for_every_part() -> None:
    """No part outlives the request, also where its own cleaning up takes a while."""
    cleaned: list[int] = []

    async def answer(call: Call, reply: Reply) -> None:
        reply.start(200, _HEAD)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            cleaned.append(_index(call))

    client, watched = _Client(), _Watched(answer)
    task = asyncio.create_task(answer_parts(watched, *_request(4, stream=True), client))
    for _ in range(4):
        await watched.started.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cleaned) == [0, 1, 2, 3]
    assert watched.num_running == 0


async def test_a_slow_client_slows_every_part() -> None:
    """What runs is paused, what begins while the client is slow begins paused, what has ended is left alone."""
    sources = [_Source() for _ in range(3)]
    go_on = [asyncio.Event() for _ in range(3)]

    async def answer(call: Call, reply: Reply) -> None:
        own = _index(call)
        if own == 2:
            await go_on[2].wait()
        reply.start(200, _HEAD, source=sources[own])
        reply.write(_event(f"text {own}"))
        go_on[own].clear()
        await go_on[own].wait()
        reply.end()

    client = _Client()
    task = asyncio.create_task(answer_parts(answer, *_request(3, stream=True), client))
    await client.until_body_holds(b"text 1")
    assert client.source is not None
    client.source.pause_reading()
    assert [source.is_paused for source in sources] == [True, True, False]
    go_on[2].set()
    await client.until_body_holds(b"text 2")
    assert sources[2].is_paused
    client.source.resume_reading()
    assert not any(source.is_paused for source in sources)
    for event in go_on:
        event.set()
    await task
    client.source.pause_reading()
    assert not any(source.is_paused for source in sources)


async def test_a_broken_stream_leaves_no_part_paused() -> None:
    """The client's connection speaks to us no more once the stream has ended; the failed part must still come to its end."""
    source, may_end = _Source(), asyncio.Event()

    async def answer(call: Call, reply: Reply) -> None:
        if _index(call) == 0:
            await asyncio.Event().wait()
        reply.start(200, _HEAD, source=source)
        assert client.source is not None
        client.source.pause_reading()
        reply.write(b'data: {"error": {"code": 500}}\n\n')
        assert not source.is_paused
        may_end.set()
        reply.end()

    client = _Client()
    await answer_parts(answer, *_request(2, stream=True), client)
    assert may_end.is_set()


async def test_a_fault_in_the_program_is_no_clients_error() -> None:
    """It comes out as it is, and still no part is left."""

    async def answer(call: Call, _reply: Reply) -> None:
        if _index(call) == 1:
            raise KeyError("a fault")
        await asyncio.Event().wait()

    watched = _Watched(answer)
    with pytest.raises(ExceptionGroup) as caught:
        await answer_parts(watched, *_request(2), _Client())
    assert isinstance(caught.value.exceptions[0], KeyError)
    assert watched.num_running == 0


@pytest.mark.parametrize("body", [b"", b'{"choices":[]}', b'{"choices":[{}],"usage":3}'])
async def test_an_answer_that_is_none_is_the_engines_fault(body: bytes) -> None:
    """502, and nothing went out."""

    async def answer(_call: Call, reply: Reply) -> None:
        await asyncio.sleep(0)
        reply.send(200, [], body)

    client = _Client()
    with pytest.raises(EngineProtocolError):
        await answer_parts(answer, *_request(2), client)
    assert not client.is_started


async def test_an_unreadable_stream_is_the_engines_fault() -> None:
    """The engine's connection, which brings the bytes, is not the place to raise it."""

    async def answer(_call: Call, reply: Reply) -> None:
        reply.start(200, _HEAD)
        reply.write(b'data: {"choices":[],"usage":3}\n\n')
        await asyncio.Event().wait()

    with pytest.raises(EngineProtocolError, match="usage"):
        await answer_parts(answer, *_request(2, stream=True), _Client())


async def test_streams_and_whole_answers_do_not_mix() -> None:
    """Parts of one request are answered in one way."""

    async def answer(call: Call, reply: Reply) -> None:
        if _index(call) == 0:
            reply.send(200, [], _whole("a"))
            return
        await asyncio.sleep(0)
        reply.start(200, _HEAD)
        reply.end()

    with pytest.raises(EngineProtocolError, match="stream"):
        await answer_parts(answer, *_request(2, stream=True), _Client())


async def test_another_status_is_the_requests_answer() -> None:
    """Should a part ever be answered with something else than 200, the client gets it as it came."""

    async def answer(_call: Call, reply: Reply) -> None:
        await asyncio.sleep(0)
        reply.send(418, [(b"content-type", b"text/plain")], b"no")

    with pytest.raises(EngineStatus) as caught:
        await answer_parts(answer, *_request(2), _Client())
    assert (caught.value.status, caught.value.body, caught.value.reason) == (418, b"no", Reason.ENGINE_STATUS)


async def test_whole_answers_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own in the relay; many must not fill the memory either."""

    async def answer(_call: Call, reply: Reply) -> None:
        await asyncio.sleep(0)
        reply.send(200, [], _whole("x"))

    monkeypatch.setattr(module, "MAX_WHOLE_ANSWER_BYTES", 2 * len(_whole("x")))
    await answer_parts(answer, *_request(2), _Client())
    with pytest.raises(EngineProtocolError, match="exceed"):
        await answer_parts(answer, *_request(3), _Client())


def test_the_merged_head_says_the_least_that_is_proven() -> None:
    """`remote` only where all parts are; of each phase the longest time."""
    heads = [
        [(b"x-pdserve-prefill", place), (b"server-timing", timing)]
        for place, timing in (
            (b"remote", b"queue;dur=1.00, prefill;dur=9.00"),
            (b"local", b"queue;dur=2.50, decode;dur=3.00"),
        )
    ]
    assert merged_head(heads, request_id="pd-1") == [
        (b"x-pdserve-prefill", b"local"),
        (b"server-timing", b"queue;dur=2.50, prefill;dur=9.00, decode;dur=3.00"),
    ]
    assert merged_head(heads[:1], request_id="pd-1") == heads[0]
    assert merged_head([[(b"server-timing", b"")]], request_id="pd-1") == [(b"server-timing", b"")]
