"""Drives one request through the handoff table: decide, P leg, check the handoff, D leg, book the evidence.

The eight steps of docs/structure.md stand here in order. What may follow what is the table's matter
(pdserve.protocol.handoff), the wire form is the connector's (pdserve.protocol.nixl), who takes it is the policy's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import secrets
from typing import TYPE_CHECKING

from pdserve.core import Evidence, PrefillPlace, RemotePrefill, Role
from pdserve.errors import (
    ClientStalled,
    EngineError,
    EngineStatus,
    EngineTimeout,
    EngineUnreachable,
    Reason,
    RequestError,
)
from pdserve.gateway.relay import Relay
from pdserve.protocol import nixl, openai
from pdserve.protocol.admin import HandoffRecord, Phases, RequestRecord
from pdserve.protocol.handoff import Event, RequestLife, State
from pdserve.protocol.usage import UsageWatch, judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import TimeoutsConfig
    from pdserve.core import Decision, EngineAddress, EngineName, RequestFacts
    from pdserve.engine.pool import EnginePool
    from pdserve.engine.transport import Answer, EngineClient
    from pdserve.gateway.journal import Journal
    from pdserve.gateway.release import Releaser
    from pdserve.http.client import ClientConnection
    from pdserve.http.server import Headers, Request, Response
    from pdserve.policy.round_robin import Policy
    from pdserve.protocol.nixl import Handoff
    from pdserve.protocol.openai import Api, Fields

_OK = 200
_BUSY_STATUSES = frozenset({408, 429})
"""A 4xx that speaks of P's state, not of the client's request: D alone may still answer."""
_NOTHING_KNOWN = Evidence(PrefillPlace.UNPROVEN, cause="the request ended before D had given its counts")
_logger = logging.getLogger("pdserve.gateway")


class Proxy:
    """What every request needs; holds nothing of any one request."""

    def __init__(
        self,
        pool: EnginePool,
        policy: Policy,
        journal: Journal,
        releaser: Releaser,
        timeouts: TimeoutsConfig,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.journal = journal
        self.releaser = releaser
        self.timeouts = timeouts
        self.clock = clock
        self.loop = asyncio.get_running_loop()
        """Kept, because asking for the running loop is a system call."""
        # Unique among gateways by the prefix, within this one by the number; uuid4 would ask the kernel each time.
        self._id_prefix = f"pd-{secrets.token_hex(8)}-"
        self._num_ids = itertools.count()

    def next_id(self) -> str:
        """A fresh request id."""
        return f"{self._id_prefix}{next(self._num_ids)}"

    async def serve(self, api: Api, request: Request, response: Response) -> None:
        """Answer one request. Raises RequestError as long as nothing has been sent to the client."""
        exchange = _Exchange(self, api, request, response)
        try:
            await exchange.run()
        except asyncio.CancelledError:
            exchange.end(Event.CANCELLED)
            raise
        except RequestError as exc:
            exchange.end(Event.FAILED, exc)
            if not response.is_started:
                raise
            exchange.tell_in_stream(exc)
        finally:
            exchange.end(Event.FAILED)  # Without effect unless a fault of ours came up here.
            self.journal.add(exchange.record())


class _Exchange:
    """One request on its way."""

    def __init__(self, proxy: Proxy, api: Api, request: Request, response: Response) -> None:
        self._proxy = proxy
        self._api = api
        self._request = request
        self._response = response
        self._life = RequestLife()
        self._request_id = proxy.next_id()
        self._engine_headers = _passed_on(request)
        self._decision: Decision | None = None
        self._handoff: Handoff | None = None
        self._is_stream = False
        self._evidence = _NOTHING_KNOWN
        self._watch: UsageWatch | None = None
        self._relay: Relay | None = None
        self._phases = Phases()
        self._mark_s = request.received_at_s
        self._status: int | None = None
        self._reason: Reason | None = None

    async def run(self) -> None:
        """Steps 1 to 8."""
        fields = openai.split_request(self._request.body)
        facts = openai.facts_of(self._api, fields)
        self._is_stream = facts.is_stream
        decision = self._decision = self._proxy.policy.decide(facts, self._proxy.pool.snapshots())
        if isinstance(decision, RemotePrefill):
            self._handoff = await self._prefill(decision.prefill, fields)
        else:
            self._life.apply(Event.ALONE_CHOSEN)
            self._evidence = Evidence(PrefillPlace.ALONE, cause=f"decided: {decision.reason}")
        await self._decode(*await self._reach_decode(decision, facts), fields)

    # Step 4

    async def _prefill(self, prefill: EngineAddress, fields: Fields) -> Handoff | None:
        """P's handoff, or None when D shall do it all; the evidence then says why."""
        leg = openai.join(nixl.prefill_fields(fields))
        self._phases.queue_s = self._lap()
        self._life.apply(Event.PREFILL_SENT)
        try:
            answer = await self._ask_prefill(prefill, leg)
            self._phases.prefill_s = self._lap()
            handoff = nixl.parse_handoff(answer.body, now_s=self._mark_s)
        except EngineStatus as exc:
            if _is_clients_fault(exc.status):
                self._life.apply(Event.PREFILL_REFUSED)
                raise
            self._go_unsplit(Event.PREFILL_FAILED, str(exc))
            return None
        except (EngineError, nixl.UnusableHandoff) as exc:
            self._go_unsplit(Event.PREFILL_FAILED, str(exc))
            return None
        self._life.apply(Event.HANDOFF_TAKEN)
        return handoff

    async def _ask_prefill(self, prefill: EngineAddress, leg: bytes) -> Answer:
        client = self._proxy.pool.client(prefill.name)
        try:
            with client.in_flight():
                answer = await client.post(
                    self._api,
                    leg,
                    request_id=self._request_id.encode(),
                    timeout_s=self._proxy.timeouts.prefill,
                    headers=self._engine_headers,
                    on_late=self._take_late_handoff,
                )
        except (EngineUnreachable, EngineTimeout):
            self._proxy.pool.report_unreachable(prefill.name)
            raise
        if answer.status != _OK:
            raise _engine_status(client, answer)
        return answer

    def _take_late_handoff(self, answer: Answer) -> None:
        """P's answer came in the same turn as the client left: P holds blocks by now, and they must be released."""
        with contextlib.suppress(nixl.UnusableHandoff):
            self._handoff = nixl.parse_handoff(answer.body, now_s=self._proxy.clock())
            self._life.apply(Event.HANDOFF_TAKEN)

    # Step 5

    async def _reach_decode(self, decision: Decision, facts: RequestFacts) -> tuple[EngineClient, ClientConnection]:
        """A connection to D, or to another D where that one cannot be reached: nothing has been sent yet."""
        pool = self._proxy.pool
        unreachable: set[EngineName] = set()
        while True:
            client = pool.client(decision.decode.name)
            try:
                return client, await client.connect()
            except EngineError:
                pool.report_unreachable(decision.decode.name)
                unreachable.add(decision.decode.name)
                others = [engine for engine in pool.snapshots() if engine.address.name not in unreachable]
                if not any(engine.address.role == Role.DECODE and engine.is_healthy for engine in others):
                    raise
                decode = self._proxy.policy.decide(facts, others).decode
                decision = self._decision = dataclasses.replace(decision, decode=decode)

    def _check_handoff(self, decode: EngineAddress) -> None:
        """Called with the connection to D in hand: from here to the sending nothing is waited for."""
        if self._handoff is None:
            return
        timeouts = self._proxy.timeouts
        max_age_s = timeouts.kv_lease - timeouts.kv_lease_margin
        try:
            nixl.check_reachable(self._handoff, decode_url=decode.url)
            nixl.check_age(self._handoff, now_s=self._proxy.clock(), max_age_s=max_age_s)
        except nixl.UnusableHandoff as exc:
            self._go_unsplit(Event.HANDOFF_REFUSED, str(exc))

    def _go_unsplit(self, event: Event, cause: str) -> None:
        """D computes the prompt too: right for the client, and never silent."""
        _logger.warning("%s: D prefills alone: %s", self._request_id, cause)
        self._evidence = Evidence(PrefillPlace.LOCAL, cause=cause)
        self._apply(event)
        self._handoff = None

    # Steps 6 and 7

    async def _decode(self, client: EngineClient, connection: ClientConnection, fields: Fields) -> None:
        self._check_handoff(client.address)
        handoff, timeouts = self._handoff, self._proxy.timeouts
        # Without a handoff there is nothing to prove: D's usage is the client's, if it asked for any.
        watch = self._watch = UsageWatch(
            prefill_details=handoff.prompt_details if handoff is not None else None,
            client_wants_usage=handoff is None or openai.wants_stream_usage(fields),
        )
        relay = self._relay = Relay(
            self._response,
            client,
            watch,
            connection,
            loop=self._proxy.loop,
            client_headers=self._stream_starts,
            first_byte_timeout_s=timeouts.first_byte if self._is_stream else timeouts.whole_answer,
            silence_timeout_s=timeouts.silence,
        )
        try:
            with client.in_flight():
                self._send_decode(client, connection, relay, fields)
                answer = await self._outcome(client, relay)
        finally:
            relay.close()
        self._finish(watch, answer)

    def _send_decode(self, client: EngineClient, connection: ClientConnection, relay: Relay, fields: Fields) -> None:
        if self._handoff is not None:
            fields = nixl.decode_fields(fields, self._handoff)
            if self._is_stream:
                fields = openai.with_stream_usage(fields)
        body, request_id = openai.join(fields), self._request_id.encode()
        client.send(connection, self._api, body, relay, request_id=request_id, headers=self._engine_headers)
        self._phases.handoff_s = self._lap()
        self._life.apply(Event.DECODE_SENT)

    async def _outcome(self, client: EngineClient, relay: Relay) -> Answer | None:
        try:
            answer = await relay.outcome
        except (EngineError, ClientStalled) as exc:
            self._apply(self._failure_event(exc))
            if isinstance(exc, EngineUnreachable):
                self._proxy.pool.report_unreachable(client.address.name)
            raise
        if answer is not None and answer.status != _OK:
            error = _engine_status(client, answer)
            self._apply(self._failure_event(error))
            raise error
        return answer

    def _failure_event(self, error: EngineError | ClientStalled) -> Event:
        if self._life.state is State.DECODING:
            return Event.BROKE_OFF
        is_refusal = isinstance(error, EngineStatus) and _is_clients_fault(error.status)
        return Event.DECODE_REFUSED if is_refusal else Event.DECODE_LOST

    def _stream_starts(self) -> Headers:
        self._phases.first_token_s = self._lap()
        return self._answered()

    def _answered(self) -> Headers:
        """From now on the status stands. Gives pdserve's own headers."""
        self._life.apply(Event.DECODE_ANSWERED)
        self._status = _OK
        return self._headers()

    # Step 8

    def _finish(self, watch: UsageWatch, answer: Answer | None) -> None:
        if answer is None:
            self._phases.stream_s = self._lap()
            self._book(watch)
            self._response.end()
        else:
            self._phases.decode_s = self._lap()
            body = watch.edit_answer(answer.body)
            self._book(watch)
            headers = self._answered()
            self._response.send(_OK, [(b"content-type", answer.content_type), *headers], body)
        self._life.apply(Event.FINISHED)

    def _book(self, watch: UsageWatch) -> None:
        usage = watch.usage
        if self._handoff is not None:
            self._evidence = judge(usage)
            if self._evidence.place is PrefillPlace.LOCAL:
                _logger.warning("%s: %s", self._request_id, self._evidence.cause)
        elif usage is not None:
            known = self._evidence
            self._evidence = Evidence(known.place, usage.prompt_tokens, usage.num_cached_tokens, known.cause)

    def end(self, event: Event, error: RequestError | None = None) -> None:
        """Close the request's life, whatever state it is in."""
        if error is not None:
            self._reason = error.reason
            if not self._response.is_started:
                self._status = error.status
        if self._life.state is State.CLOSED:
            return
        if error is None and event is Event.FAILED:
            self._reason = Reason.INTERNAL
        if self._life.state is State.DECODING and self._watch is not None and self._watch.usage is not None:
            self._book(self._watch)
        if self._life.state is State.HANDED and self._relay is not None and self._relay.was_unsent:
            event = Event.DECODE_LOST
        self._apply(event)

    def tell_in_stream(self, error: RequestError) -> None:
        """The status is out: say it as an event, and leave `[DONE]` out. A client that reads nothing is hung up on."""
        if isinstance(error, ClientStalled):
            self._response.abort()
            return
        self._response.write(b"data: " + openai.error_body(error) + b"\n\n")
        self._response.end()

    def record(self) -> RequestRecord:
        """What the journal keeps."""
        decision = self._decision
        usage = self._watch.usage if self._watch is not None else None
        return RequestRecord(
            request_id=self._request_id,
            path=str(self._api),
            is_stream=self._is_stream,
            prefill=decision.prefill.name if isinstance(decision, RemotePrefill) else None,
            decode=decision.decode.name if decision is not None else None,
            status=self._status,
            reason=self._reason,
            place=self._evidence.place,
            cause=self._evidence.cause,
            num_prompt_tokens=self._evidence.num_prompt_tokens,
            num_remote_tokens=self._evidence.num_remote_tokens,
            num_output_tokens=usage.completion_tokens if usage is not None else None,
            phases=self._phases,
            handoff=HandoffRecord.of(self._handoff) if self._handoff is not None else None,
        )

    def _apply(self, event: Event) -> None:
        if self._life.apply(event):
            assert self._handoff is not None
            avoid = self._decision.decode if self._decision is not None else None
            self._proxy.releaser.release(self._handoff, headers=self._engine_headers, avoid=avoid)

    def _headers(self) -> Headers:
        phases = self._phases
        timed = (
            ("queue", phases.queue_s),
            ("prefill", phases.prefill_s),
            ("handoff", phases.handoff_s),
            ("first-token", phases.first_token_s),
            ("decode", phases.decode_s),
        )
        timing = ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in timed if seconds is not None)
        return [
            (b"x-pdserve-request-id", self._request_id.encode()),
            (b"x-pdserve-prefill", self._evidence.place.encode()),
            (b"server-timing", timing.encode()),
        ]

    def _lap(self) -> float:
        """Seconds since the last lap."""
        now_s = self._proxy.clock()
        lap_s, self._mark_s = now_s - self._mark_s, now_s
        return lap_s


def _passed_on(request: Request) -> Headers:
    """The client's headers that both engines get: its key, where the engines were started with one."""
    authorization = request.header(b"authorization")
    return [] if authorization is None else [(b"authorization", authorization)]


def _is_clients_fault(status: int) -> bool:
    return 400 <= status < 500 and status not in _BUSY_STATUSES  # noqa: PLR2004


def _engine_status(client: EngineClient, answer: Answer) -> EngineStatus:
    return EngineStatus(
        engine=str(client.address),
        status=answer.status or openai.error_status(answer.body),
        content_type=answer.content_type,
        body=answer.body,
    )
