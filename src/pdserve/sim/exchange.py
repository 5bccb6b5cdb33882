"""One completion or chat request, from its body to the last byte of its answer.

The order of things is vLLM's: a stream's 200 goes out before its KV was fetched, so that a failed transfer is an event in it.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

import msgspec

from pdserve.sim.answer import Answer
from pdserve.sim.engine import EngineDead, GenerationFailed
from pdserve.sim.request import (
    CompletionBody,
    Refused,
    prepare_chat,
    prepare_completion,
    read_chat,
    read_completion,
)
from pdserve.sim.wire import PlainWire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.http.server import Headers, Request, Response
    from pdserve.sim.faults import Fault, Victim
    from pdserve.sim.handoff import Params
    from pdserve.sim.job import Output
    from pdserve.sim.request import Call, ChatBody
    from pdserve.sim.wire import Wire

CHAT_PATH = b"/v1/chat/completions"

_JSON: Headers = [(b"content-type", b"application/json")]
_EVENTS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
_encode = msgspec.json.Encoder().encode


class Exchange:
    """Answers one request."""

    def __init__(self, request: Request, response: Response, victim: Victim, faults: Sequence[Fault]) -> None:
        self._request = request
        self._victim = victim
        self._engine = victim.engine
        self._faults = faults
        self._is_admitted = False
        self._wire: Wire = PlainWire(response)
        for fault in faults:
            self._wire = fault.wrap(self._wire, response, victim)

    async def run(self) -> None:
        """Answer. Raises Refused."""
        body = self._read()
        for fault in self._faults:
            body.kv_transfer_params = fault.change_params(body.kv_transfer_params)
        try:
            for fault in self._faults:
                await fault.before_admission()
            await self._answer(body)
        except (EngineDead, GenerationFailed) as exc:
            raise _failed(exc) from exc
        finally:
            # vLLM does this to whatever ends before a stream has begun, or before a whole answer is complete: also when
            # the client left long after the transfer.
            if not self._is_admitted:
                self._engine.refuse(body.kv_transfer_params)

    def _read(self) -> CompletionBody | ChatBody:
        read = read_chat if self._request.path == CHAT_PATH else read_completion
        return read(self._request.body, self._request.header(b"content-type") or b"")

    async def _answer(self, body: CompletionBody | ChatBody) -> None:
        call = self._prepare(body)
        answer = Answer(
            call,
            model=self._engine.settings.model,
            created=int(self._engine.clock.unix_s()),
            has_details=self._engine.settings.enable_prompt_tokens_details,
        )
        if body.stream:
            await self._stream(call, answer)
        else:
            await self._send_whole(call, answer)

    def _prepare(self, body: CompletionBody | ChatBody) -> Call:
        """The header beats the body's own id (entrypoints/serve/engine/serving.py, _base_request_id)."""
        header = self._request.header(b"x-request-id")
        request_id = header.decode("latin-1") if header is not None else body.request_id or uuid.uuid4().hex[:16]
        if isinstance(body, CompletionBody):
            return prepare_completion(body, request_id, self._engine.settings)
        return prepare_chat(body, request_id, self._engine.settings)

    async def _send_whole(self, call: Call, answer: Answer) -> None:
        async with self._engine.running(call.jobs) as outputs:
            async for index, output in outputs:
                answer.add(index, output)
        whole = answer.whole()
        whole["kv_transfer_params"] = self._changed_handoff(whole["kv_transfer_params"])
        self._is_admitted = True
        await self._wire.send(200, _JSON, _encode(whole))

    def _changed_handoff(self, handoff: Params | None) -> Params | None:
        for fault in self._faults:
            if handoff is not None:
                handoff = fault.change_handoff(handoff, self._victim)
        return handoff

    async def _stream(self, call: Call, answer: Answer) -> None:
        async with self._engine.running(call.jobs) as outputs:
            self._is_admitted = True
            await self._wire.start(200, _EVENTS)
            try:
                async for index, output in outputs:
                    await self._send_events(answer, index, output)
                if call.includes_usage:
                    await self._wire.write(b"data: %b\n\n" % _encode(answer.usage_event()))
            except (EngineDead, GenerationFailed) as exc:
                # Of all events only this one has spaces in its JSON, and [DONE] follows it.
                await self._wire.write(f"data: {json.dumps(_failed(exc).body())}\n\n".encode())
        await self._wire.write(b"data: [DONE]\n\n")
        await self._wire.end()

    async def _send_events(self, answer: Answer, index: int, output: Output) -> None:
        for event in answer.add(index, output):
            await self._wire.write(b"data: %b\n\n" % _encode(event))


def _failed(error: EngineDead | GenerationFailed) -> Refused:
    return Refused(500, "InternalServerError", str(error))
