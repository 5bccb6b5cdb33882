"""`/v1/responses` beyond one request: those that run in the background, and asking for a response again. Answers over HTTP."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import msgspec

from pdserve.sim.engine import EngineDead, GenerationFailed
from pdserve.sim.exchange import EVENTS, JSON

if TYPE_CHECKING:
    from pdserve.http.server import Response
    from pdserve.sim.api import ResponsesApi
    from pdserve.sim.engine import Engine
    from pdserve.sim.request import Call
    from pdserve.sim.response_store import EventLog
    from pdserve.sim.responses import ResponsesAnswer, ResponsesBody

_encode = msgspec.json.Encoder().encode


class Background:
    """Runs responses that nobody waits for."""

    def __init__(self, api: ResponsesApi, engine: Engine) -> None:
        self._api = api
        self._store = api.store
        self._engine = engine

    async def begin(self, body: ResponsesBody, response: Response) -> None:
        """Answer a request with `background` at once. Raises Refused."""
        call, answer = self._api.begin(body, uuid.uuid4().hex[:16], created=int(self._engine.clock.unix_s()))
        queued = answer.response("queued", [])
        self._store.keep(queued)
        if not body.stream:
            self._store.run(call.request_id, self._run(body, call, answer))
            response.send(200, JSON, _encode(queued))
            return
        log = self._store.open_log(call.request_id)
        self._store.run(call.request_id, self._run_into(log, body, call, answer))
        await _send_log(log, 0, response)

    async def send(self, response_id: str, response: Response, *, start: int | None) -> None:
        """Answer with a response that is kept, or with its events from `start` on. Raises Refused."""
        kept = self._store.get(response_id)
        if start is None:
            response.send(200, JSON, _encode(kept))
            return
        log = self._store.log_of(response_id)
        if log is not None:
            await _send_log(log, start, response)
        else:
            response.start(200, EVENTS)  # vLLM finds out too late that there are no events, and breaks off.

    async def cancel(self, response_id: str, response: Response) -> None:
        """Answer a request to end a response. Raises Refused."""
        response.send(200, JSON, _encode(await self._store.cancel(response_id)))

    async def _run(self, body: ResponsesBody, call: Call, answer: ResponsesAnswer) -> None:
        try:
            async with self._engine.running(call.jobs) as outputs:
                async for index, output in outputs:
                    answer.add(index, output)
        except (EngineDead, GenerationFailed):
            return  # The response stays `queued` for ever, as in vLLM.
        answer.whole(lambda handoff: handoff)
        self._api.finished(body, answer)

    async def _run_into(self, log: EventLog, body: ResponsesBody, call: Call, answer: ResponsesAnswer) -> None:
        log.append(answer.opening())
        try:
            async with self._engine.running(call.jobs) as outputs:
                async for index, output in outputs:
                    log.append(answer.events(index, output))
        except (EngineDead, GenerationFailed):
            return
        log.append(answer.closing())
        log.end()
        self._api.finished(body, answer)


async def _send_log(log: EventLog, start: int, response: Response) -> None:
    response.start(200, EVENTS)
    async for event in log.read(start):
        response.write(event)
    response.end()
