"""One generating request, from its body to the last byte of its answer.

The order of things is vLLM's: a stream's 200 goes out before its KV was fetched, so that a failed transfer is an event in it.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING

import msgspec

from pdserve.sim.engine import EngineDead, GenerationFailed
from pdserve.sim.refusal import Refused, queue_full
from pdserve.sim.wire import PlainWire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.http.server import Headers, Request, Response
    from pdserve.sim.answer import Answer
    from pdserve.sim.api import AnyBody, Api
    from pdserve.sim.fault import Fault, Victim
    from pdserve.sim.handoff import Params
    from pdserve.sim.job import Output
    from pdserve.sim.request import Call
    from pdserve.sim.wire import Wire

JSON: Headers = [(b"content-type", b"application/json")]
EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
_encode = msgspec.json.Encoder().encode


class Exchange:
    """Answers one request."""

    def __init__(self, api: Api, request: Request, response: Response, victim: Victim, faults: Sequence[Fault]) -> None:
        self._api = api
        self._request = request
        self._response = response
        self._victim = victim
        self._engine = victim.engine
        self._faults = faults
        self._is_admitted = False
        self._num_outputs = 0
        self._wire: Wire = PlainWire(response)
        for fault in faults:
            self._wire = fault.wrap(self._wire, response, victim)

    async def run(self) -> None:
        """Answer. Raises Refused."""
        body = self._api.read(self._request.body, self._request.header(b"content-type") or b"")
        for fault in self._faults:
            body.kv_transfer_params = fault.change_params(body.kv_transfer_params)
        try:
            for fault in self._faults:
                await fault.before_admission(self._victim)
            await self._answer(body)
        except (EngineDead, GenerationFailed) as exc:
            raise self._api.dressed(failed(exc)) from exc
        except Refused as refusal:
            raise self._api.dressed(refusal) from refusal
        finally:
            # vLLM does this to whatever ends before a stream has begun, or before a whole answer is complete: also when
            # the client left long after the transfer.
            if not self._is_admitted:
                self._engine.refuse(body.kv_transfer_params)

    async def _answer(self, body: AnyBody) -> None:
        created = int(self._engine.clock.unix_s())
        call, answer = self._api.begin(body, self._request_id(body), created=created)
        self._check_queue(len(call.jobs))
        for fault in self._faults:  # Most requests have none: the copy below is not made for nothing.
            call = dataclasses.replace(call, jobs=tuple(map(fault.change_job, call.jobs)))
        if body.stream:
            await self._stream(body, call, answer)
        else:
            await self._send_whole(body, call, answer)

    def _check_queue(self, num_jobs: int) -> None:
        """As AsyncLLM.check_admission. Raises Refused."""
        limit = self._engine.settings.max_num_queued_reqs
        if limit is not None and self._engine.num_running + self._engine.num_waiting + num_jobs > limit:
            raise queue_full()

    def _request_id(self, body: AnyBody) -> str:
        """The header beats the body's own id (entrypoints/serve/engine/serving.py, _base_request_id)."""
        header = self._request.header(b"x-request-id")
        return header.decode("latin-1") if header is not None else body.request_id or uuid.uuid4().hex[:16]

    async def _send_whole(self, body: AnyBody, call: Call, answer: Answer) -> None:
        async with self._engine.running(call.jobs) as outputs:
            async for index, output in outputs:
                await self._before_output()
                answer.add(index, output)
        whole = answer.whole(self._changed_handoff)
        self._is_admitted = True
        self._api.finished(body, answer)
        await self._wire.send(200, JSON, _encode(whole))

    def _changed_handoff(self, handoff: Params) -> Params | None:
        told: Params | None = handoff
        for fault in self._faults:
            if told is not None:
                told = fault.change_handoff(told, self._victim)
        return told

    async def _stream(self, body: AnyBody, call: Call, answer: Answer) -> None:
        async with self._engine.running(call.jobs) as outputs:
            self._is_admitted = True
            await self._wire.start(200, EVENTS)
            try:
                await self._write(answer.opening())
                async for index, output in outputs:
                    await self._send_events(answer, index, output)
                closing = answer.closing()
                self._api.finished(body, answer)
            except (EngineDead, GenerationFailed) as exc:
                ending = answer.failure(failed(exc), is_output=isinstance(exc, GenerationFailed))
                if ending is None:
                    return  # The server closes a connection whose answer has no end.
                closing = ending
            await self._write(closing)
        await self._wire.end()

    async def _send_events(self, answer: Answer, index: int, output: Output) -> None:
        await self._before_output()
        await self._write(answer.events(index, output))

    async def _write(self, data: bytes) -> None:
        if data:
            await self._wire.write(data)

    async def _before_output(self) -> None:
        """Raises GenerationFailed, where a fault says so."""
        for fault in self._faults:
            await fault.before_output(self._num_outputs)
        self._num_outputs += 1


def failed(error: EngineDead | GenerationFailed) -> Refused:
    """What the client is told of a request that failed in the engine."""
    return Refused(500, "InternalServerError", str(error))
