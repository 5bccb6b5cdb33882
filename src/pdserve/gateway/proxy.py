"""What every request needs, and the way of one client's request: admit, take apart, answer, tell what went wrong.

The eight steps of a single call are exchange.py's; putting several answers together is fanout.py's.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import TYPE_CHECKING

from pdserve.core import AloneReason, Role
from pdserve.errors import ClientStalled, InvalidRequest, RequestError, ShuttingDown
from pdserve.gateway.admission import Admission
from pdserve.gateway.attempts import RetryBudget
from pdserve.gateway.call import Call
from pdserve.gateway.exchange import Exchange
from pdserve.gateway.fanout import answer_parts
from pdserve.gateway.lease import Leases
from pdserve.gateway.passthrough import find_response
from pdserve.protocol import openai
from pdserve.protocol.handoff import Event
from pdserve.protocol.parts import MAX_PARTS_AT_ONCE, take_apart
from pdserve.telemetry.metrics import REQUESTS, UNAUTHORIZED

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import Config
    from pdserve.core import EngineName
    from pdserve.engine.pool import EnginePool
    from pdserve.gateway.auth import Credentials
    from pdserve.gateway.call import Reply
    from pdserve.gateway.journal import Journal
    from pdserve.gateway.release import Releaser
    from pdserve.http.server import Headers, Request, Response
    from pdserve.policy.round_robin import Policy
    from pdserve.protocol.openai import Api, Fields
    from pdserve.protocol.parts import Parts
    from pdserve.telemetry.tally import Tally


class Proxy:
    """Holds nothing of any one request."""

    def __init__(
        self,
        config: Config,
        pool: EnginePool,
        policy: Policy,
        journal: Journal,
        releaser: Releaser,
        *,
        tally: Tally,
        credentials: Credentials,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.journal = journal
        self.releaser = releaser
        self.tally = tally
        self.clock = clock
        self._credentials = credentials
        self.timeouts = config.timeouts
        self.retries = config.retries
        self.retry_budget = RetryBudget(config.retries.budget)
        self.loop = asyncio.get_running_loop()
        """Kept, because asking for the running loop is a system call."""
        self.admission = Admission(config.admission, loop=self.loop)
        # P's lease began a little before its answer came.
        sure_for_s = config.timeouts.kv_lease - config.timeouts.kv_lease_margin / 2
        self.leases = {
            name: Leases(pool.client(name), sure_for_s=sure_for_s, clock=clock, loop=self.loop) for name in pool.names()
        }
        # Unique among gateways by the prefix, within this one by the number; uuid4 would ask the kernel each time.
        self._id_prefix = f"pd-{secrets.token_hex(8)}-"
        self._num_ids = itertools.count()

    async def serve(self, api: Api, request: Request, response: Response) -> None:
        """Answer a client's request. Raises RequestError as long as nothing has been sent to the client."""
        outcome: str = "internal"
        try:
            await self._serve(api, request, response)
            outcome = "ok"
        except asyncio.CancelledError:
            outcome = "disconnected"
            if response.is_client_there:
                stop = ShuttingDown()
                outcome = stop.reason
                if response.is_started:
                    _tell_in_stream(api, response, stop)
            raise
        except RequestError as exc:
            outcome = exc.reason
            if not response.is_started:
                raise
            _tell_in_stream(api, response, exc)
        finally:
            self.tally.count(REQUESTS, api, outcome)

    async def answer(self, call: Call, reply: Reply) -> None:
        """Answer one call. Raises RequestError, also when the reply has started."""
        self.retry_budget.request_came()
        deadline_s = call.received_at_s + self.timeouts.total
        exchange = Exchange(self, call, reply, deadline_s=deadline_s)
        try:
            await exchange.run()
        except asyncio.CancelledError:
            exchange.end(Event.CANCELLED)
            raise
        except RequestError as exc:
            exchange.end(Event.FAILED, exc)
            raise
        finally:
            exchange.end(Event.FAILED)  # Without effect unless a fault of ours came up here.
            self.journal.add(exchange.record())

    def close(self) -> None:
        """Ask engines nothing more."""
        for leases in self.leases.values():
            leases.close()

    def admit(self, request: Request) -> None:
        """Let a request in by its key. Raises InvalidRequest."""
        try:
            self._credentials.admit(request)
        except InvalidRequest:
            self.tally.count(UNAUTHORIZED)
            raise

    def engine_headers(self, request: Request) -> Headers:
        """What of a client's headers goes on to engines."""
        return self._credentials.engine_headers(request.headers)

    async def _serve(self, api: Api, request: Request, response: Response) -> None:
        fields = openai.split_request(request.body)
        parts = take_apart(api, fields)
        facts = openai.facts_of(api, fields)
        headers = self.engine_headers(request)
        weight = min(len(parts.requests), MAX_PARTS_AT_ONCE) if parts is not None else 1
        if not self.admission.try_enter(weight):
            await self.admission.enter(priority=facts.priority, weight=weight)
        try:
            decode: EngineName | None = None
            if facts.alone_reason is AloneReason.PREVIOUS_RESPONSE:
                decode = await self._find_decode(fields, headers)
            call = Call(
                api,
                fields,
                facts,
                self._next_id(),
                request.received_at_s,
                headers,
                key_name=request.key_name,
                decode=decode,
            )
            if parts is None:
                await self.answer(call, response)
            else:
                await self._answer_parts(call, parts, response)
        finally:
            self.admission.leave(weight)

    async def _answer_parts(self, call: Call, parts: Parts, response: Response) -> None:
        error: RequestError | None = None
        try:
            await answer_parts(self.answer, call, parts, response)
        except RequestError as exc:
            error = exc
            raise
        finally:
            self.journal.add_parts(call, error)

    async def _find_decode(self, fields: Fields, headers: Headers) -> EngineName | None:
        """The D that a request must go to because it remembers the conversation; None: any."""
        if len([name for name in self.pool.names() if self.pool.client(name).address.role is Role.DECODE]) == 1:
            return None
        response_id = openai.previous_response_id(fields)
        return None if response_id is None else await find_response(self.pool, response_id, headers)

    def _next_id(self) -> str:
        return f"{self._id_prefix}{next(self._num_ids)}"


def _tell_in_stream(api: Api, response: Response, error: RequestError) -> None:
    """The status is out: say it as an event, and leave `[DONE]` out. A client that reads nothing is hung up on."""
    if isinstance(error, ClientStalled):
        response.abort()
        return
    response.write(openai.error_event(api, error))
    response.end()
