"""Drives one call through the handoff table: decide, P leg, check the handoff, D leg, book the evidence.

The eight steps of docs/structure.md stand here in order, and again from step 2 when a leg failed and may be tried again. What
may follow what is the table's matter (pdserve.protocol.handoff), the wire form is the connector's (pdserve.protocol.nixl), who
takes it is the policy's, whether to try again is attempts.py's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pdserve.core import AloneReason, DecodeAlone, Evidence, PrefillPlace, RemotePrefill
from pdserve.errors import (
    ClientStalled,
    DeadlinePassed,
    EngineError,
    EngineProtocolError,
    EngineStatus,
    EngineTimeout,
    EngineUnreachable,
    NoEligibleEngine,
    Reason,
    RequestError,
)
from pdserve.gateway.account import NOTHING_KNOWN, Account
from pdserve.gateway.attempts import Attempts
from pdserve.gateway.checks import EXPIRED, WRONG_TEXT, no_answer, refusal_of, stale_read, wrong_context
from pdserve.gateway.relay import Relay
from pdserve.protocol import nixl, openai
from pdserve.protocol.handoff import Event, RequestLife, State
from pdserve.protocol.usage import UsageWatch
from pdserve.telemetry.metrics import ALONE, HANDOFFS_REFUSED, RETRIES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from pdserve.core import Decision, EngineAddress, EngineName, EngineSnapshot
    from pdserve.engine.transport import Answer, Body, EngineClient
    from pdserve.gateway.call import Call, Reply
    from pdserve.gateway.lease import Lease
    from pdserve.gateway.proxy import Proxy
    from pdserve.http.client import ClientConnection
    from pdserve.http.server import Headers
    from pdserve.protocol.admin import RequestRecord
    from pdserve.protocol.nixl import Handoff

_OK = 200
_BUSY_STATUSES = frozenset({408, 429, 503})
"""They speak of an engine's state, not of the client's request and not of a fault: another engine may still answer."""
_FOR_WANT_OF_PREFILL = frozenset(
    {AloneReason.NO_PREFILL_ENGINE, AloneReason.NO_PROVEN_PAIR, AloneReason.ATTEMPTS_FAILED}
)
_HOLDING = frozenset({State.HELD, State.HANDED})
_logger = logging.getLogger("pdserve.gateway")


class Exchange:
    """One call on its way. `run` once, then `end`, then `record`."""

    def __init__(self, proxy: Proxy, call: Call, reply: Reply, *, deadline_s: float) -> None:
        self._proxy = proxy
        self._call = call
        self._reply = reply
        self._deadline_s = deadline_s
        self._life = RequestLife()
        self._attempts = Attempts(proxy.retries, proxy.retry_budget)
        self._decision: Decision | None = None
        self._handoff: Handoff | None = None
        self._setback = ""
        """Why the prompt was not computed on P though it was to be."""
        self._last_error: EngineError | None = None
        self._account = Account(call, clock=proxy.clock)
        self._watch: UsageWatch | None = None
        self._connection: ClientConnection | None = None
        """To D, until it has answered."""
        self._salt: str | None = None
        """That D has with this request."""
        self._lease: Lease | None = None
        """Of the handoff in hand, until D has answered."""

    async def run(self) -> None:
        """Steps 2 to 8. Raises RequestError, when the reply has started too."""
        self._account.phases.queue_s = self._account.lap()
        while True:
            decision = self._decision = self._decide()
            if isinstance(decision, RemotePrefill) and not await self._prefill(decision.prefill):
                continue
            if await self._decode():
                return

    # Steps 2 and 3

    def _decide(self) -> Decision:
        """The policy's choice of what has not failed yet."""
        proxy, facts = self._proxy, self._call.facts
        engines = self._candidates()
        decision = proxy.policy.decide(facts, engines)
        if isinstance(decision, RemotePrefill) and not self._attempts.may_prefill():
            decision = DecodeAlone(decision.decode, AloneReason.ATTEMPTS_FAILED)
        if isinstance(decision, DecodeAlone):
            self._go_alone(decision)
        return decision

    def _candidates(self) -> Sequence[EngineSnapshot]:
        engines = self._attempts.narrowed(self._proxy.pool.snapshots())
        pinned = self._call.decode
        return engines if pinned is None else [engine for engine in engines if engine.address.name == pinned]

    def _go_alone(self, decision: DecodeAlone) -> None:
        """Raises RequestError where D is not to stand in for P."""
        if self._proxy.retries.without_prefill == "error" and decision.reason in _FOR_WANT_OF_PREFILL:
            raise self._last_error or NoEligibleEngine(
                "no prefill engine can take the request, and D is not to compute it"
            )
        if self._setback:
            self._account.evidence = Evidence(PrefillPlace.LOCAL, cause=self._setback)
            _logger.warning("%s: D prefills alone: %s", self._call.request_id, self._setback)
            return
        self._proxy.tally.count(ALONE, decision.reason)
        self._account.evidence = Evidence(PrefillPlace.ALONE, cause=f"decided: {decision.reason}")

    # Step 4

    async def _prefill(self, prefill: EngineAddress) -> bool:
        """Whether there is a handoff in hand now. Raises RequestError when there is no point in going on."""
        account = self._account
        account.evidence = NOTHING_KNOWN
        leg = openai.join_pieces(nixl.prefill_fields(self._call.api, self._call.fields))
        self._life.apply(Event.PREFILL_SENT)
        try:
            answer = await self._ask_prefill(prefill, leg)
            account.phases.prefill_s = (account.phases.prefill_s or 0.0) + account.lap()
            self._handoff = nixl.parse_handoff(self._call.api, answer.body, now_s=account.mark_s)
        except EngineStatus as exc:
            if _is_clients_fault(exc.status):
                self._life.apply(Event.PREFILL_REFUSED)
                raise
            self._prefill_failed(prefill, exc)
            return False
        except EngineError as exc:
            self._prefill_failed(prefill, exc)
            return False
        except nixl.UnusableHandoff as exc:
            self._proxy.tally.count(HANDOFFS_REFUSED, "unusable")
            self._prefill_failed(prefill, EngineProtocolError(str(exc), engine=str(prefill)))
            return False
        self._apply(Event.HANDOFF_TAKEN)
        self._proxy.pool.report_success(prefill.name)
        return True

    async def _ask_prefill(self, prefill: EngineAddress, leg: Body) -> Answer:
        timeout_s, is_all_left = self._bounded(self._proxy.timeouts.prefill)
        try:
            with self._proxy.pool.leg(prefill.name) as client:
                answer = await client.post(
                    self._call.api,
                    leg,
                    request_id=self._call.request_id.encode(),
                    timeout_s=timeout_s,
                    headers=self._call.engine_headers,
                    timeout_reason=Reason.PREFILL_TIMEOUT,
                    on_late=self._take_late_handoff,
                )
        except EngineTimeout as exc:
            if is_all_left and exc.reason is Reason.PREFILL_TIMEOUT:
                raise DeadlinePassed(self._proxy.timeouts.total) from exc
            raise
        if answer.status != _OK:
            raise _engine_status(client, answer)
        return answer

    def _take_late_handoff(self, answer: Answer) -> None:
        """P's answer was on its way when the client left: P holds blocks by now, and they must be released."""
        try:
            handoff = nixl.parse_handoff(self._call.api, answer.body, now_s=self._proxy.clock())
        except nixl.UnusableHandoff:
            return
        if self._life.state is State.PREFILLING:
            self._handoff = handoff
            self._apply(Event.HANDOFF_TAKEN)
        elif (prefill := self._prefill_name()) is not None:
            self._proxy.releaser.release(handoff, prefill=prefill, headers=self._call.engine_headers)

    def _prefill_failed(self, prefill: EngineAddress, error: EngineError) -> None:
        """Another P may do better, or D alone."""
        self._life.apply(Event.PREFILL_FAILED)
        self._blame(prefill, error)
        self._attempts.prefill_failed(prefill.name)
        self._give_up_split(error, "prefill")

    # Step 5

    async def _reach_decode(self) -> tuple[EngineClient, ClientConnection]:
        """A connection to D, or to another D where that one cannot be reached: nothing has been sent yet."""
        pool = self._proxy.pool
        assert self._decision is not None
        while True:
            decode = self._decision.decode
            client = pool.client(decode.name)
            try:
                return client, client.try_connect() or await client.connect()
            except EngineError as exc:
                pool.report_unreachable(decode.name, may_be_another=isinstance(exc, EngineUnreachable))
                self._attempts.decode_unreachable(decode.name)
                self._redirect(exc)

    def _redirect(self, error: EngineError) -> None:
        """Choose another D for the same P. Raises `error` when there is none."""
        assert self._decision is not None
        engines = self._candidates()
        if isinstance(self._decision, RemotePrefill):
            prefill = self._decision.prefill
            engines = [engine for engine in engines if engine.address == prefill or engine.address.role != prefill.role]
        try:
            decision = self._proxy.policy.decide(self._call.facts, engines)
        except NoEligibleEngine:
            raise error from None
        self._proxy.tally.count(RETRIES, "decode", error.reason)
        if isinstance(self._decision, RemotePrefill):
            # Where this pair is not proven, the handoff's check will say so.
            self._decision = RemotePrefill(self._decision.prefill, decision.decode)
        else:
            self._decision = DecodeAlone(decision.decode, self._decision.reason)

    def _accept_handoff(self, decode: EngineAddress) -> bool:
        """Whether what is in hand may go to D. From here to the sending nothing is waited for."""
        handoff, decision = self._handoff, self._decision
        if handoff is None or not isinstance(decision, RemotePrefill):
            return True
        proxy, prefill = self._proxy, decision.prefill
        refusal = refusal_of(handoff, prefill, decode, pool=proxy.pool, timeouts=proxy.timeouts, now_s=proxy.clock())
        if refusal is None:
            return True
        cause, message = refusal
        proxy.tally.count(HANDOFFS_REFUSED, cause)
        if cause == EXPIRED:
            self._attempts.handoff_expired()
        else:
            self._attempts.prefill_failed(prefill.name)
        self._give_up_split(EngineProtocolError(message, engine=str(prefill)), "prefill")
        self._apply(Event.HANDOFF_REFUSED)
        return False

    def _give_up_split(self, error: EngineError, leg: str) -> None:
        """This attempt came to nothing: right for the client, and never silent."""
        self._setback, self._last_error = str(error), error
        self._proxy.tally.count(RETRIES, leg, error.reason)
        _logger.info("%s: %s", self._call.request_id, self._setback)

    # Steps 6 and 7

    async def _decode(self) -> bool:
        """Whether the client has its answer. False: try again. Raises RequestError when that may not be."""
        client, connection = await self._reach_decode()
        if not self._accept_handoff(client.address):
            connection.abort()
            return False
        self._connection = connection
        body = b""
        try:
            with self._proxy.pool.leg(client.address.name):
                answer = await (self._stream if self._call.facts.is_stream else self._ask_decode)(client, connection)
                self._connection = None  # It may be another request's by now.
            if answer is not None:
                body = await self._checked(client, answer)
        except EngineError as exc:
            if not self._may_decode_again(exc):
                raise
            return False
        self._proxy.pool.report_success(client.address.name, prefill=self._prefill_name())
        if answer is None:
            self._finish_stream()
        else:
            self._finish_whole(answer, body)
        return True

    async def _ask_decode(self, client: EngineClient, connection: ClientConnection) -> Answer:
        """The whole answer, a 200. Raises EngineError or DeadlinePassed."""
        call = self._call
        try:
            timeout_s, is_all_left = self._bounded(self._proxy.timeouts.whole_answer)
        except DeadlinePassed:
            connection.abort()
            raise
        self._watch_usage()
        leg, request_id = self._decode_leg(client), call.request_id.encode()
        asked = client.ask(connection, call.api, leg, request_id=request_id, headers=call.engine_headers)
        self._decode_sent()
        try:
            answer = await client.take(asked, connection, timeout_s=timeout_s, timeout_reason=Reason.FIRST_BYTE_TIMEOUT)
        except EngineError as exc:
            if is_all_left and isinstance(exc, EngineTimeout):
                deadline = DeadlinePassed(self._proxy.timeouts.total)
                self._decode_failed(client, deadline)
                raise deadline from exc
            self._decode_failed(client, exc)
            raise
        return self._answered_ok(client, answer)

    async def _stream(self, client: EngineClient, connection: ClientConnection) -> Answer | None:
        """None when it went to the client to its end, or what D answered whole, a 200.

        Raises EngineError, ClientStalled or DeadlinePassed.
        """
        call, timeouts = self._call, self._proxy.timeouts
        relay = Relay(
            self._reply,
            client,
            self._watch_usage(),
            connection,
            self,
            api=call.api,
            loop=self._proxy.loop,
            first_byte_timeout_s=timeouts.first_byte,
            silence_timeout_s=timeouts.silence,
            total_timeout_s=self._deadline_s - self._proxy.clock(),
            total_s=timeouts.total,
        )
        try:
            leg, request_id = self._decode_leg(client), call.request_id.encode()
            client.send(connection, call.api, leg, relay, request_id=request_id, headers=call.engine_headers)
            self._decode_sent()
            try:
                answer = await relay.outcome
            except (EngineError, ClientStalled, DeadlinePassed) as exc:
                self._decode_failed(client, exc)
                raise
        finally:
            relay.close()
        return None if answer is None else self._answered_ok(client, answer)

    def _watch_usage(self) -> UsageWatch:
        handoff, call = self._handoff, self._call
        # Without a handoff there is nothing to prove: D's usage is the client's, if it asked for any.
        watch = self._watch = UsageWatch(
            call.api,
            prefill_details=handoff.prompt_details if handoff is not None else None,
            client_wants_usage=handoff is None or openai.wants_stream_usage(call.api, call.fields),
        )
        return watch

    def _decode_leg(self, client: EngineClient) -> Body:
        call, fields = self._call, self._call.fields
        salt = self._salt = self._proxy.pool.cache_salt(client.address.name)
        if salt is not None:
            fields = openai.with_cache_salt(fields, salt)
        if self._handoff is not None:
            fields = nixl.decode_fields(fields, self._handoff)
            if call.facts.is_stream:
                fields = openai.with_stream_usage(call.api, fields)
        return openai.join_pieces(fields)

    def _decode_sent(self) -> None:
        phases = self._account.phases
        phases.handoff_s = (phases.handoff_s or 0.0) + self._account.lap()
        self._apply(Event.DECODE_SENT)

    def _answered_ok(self, client: EngineClient, answer: Answer) -> Answer:
        if answer.status == _OK:
            return answer
        error = _engine_status(client, answer)
        self._decode_failed(client, error)
        raise error

    async def _checked(self, client: EngineClient, answer: Answer) -> bytes:
        """A whole answer for the client. Raises EngineError for one that is none, or stands on a wrong context."""
        assert self._watch is not None
        body = self._watch.edit_answer(answer.body)
        engine = client.address
        error = self.wrong_usage() or no_answer(self._watch, body, engine)
        if error is None and (check := self.lease_check()) is not None:
            error = await check
        if error is None:
            return body
        self._decode_failed(client, error)
        raise error

    # What the relay asks

    def wrong_usage(self) -> EngineError | None:
        """Whether what D has counted so far speaks against its answer."""
        assert self._watch is not None
        assert self._decision is not None
        return wrong_context(self._handoff, self._watch.usage, self._decision.decode)

    def lease_check(self) -> asyncio.Task[EngineError | None] | None:
        """What must be known before D's answer may go to the client; None: nothing."""
        lease = self._lease
        if lease is None or self._proxy.clock() < lease.sure_until_s:
            return None
        return self._proxy.loop.create_task(self._stale_read(lease))

    async def _stale_read(self, lease: Lease) -> EngineError | None:
        decision = self._decision
        assert isinstance(decision, RemotePrefill)
        is_kept = await self._proxy.leases[decision.prefill.name].is_kept(lease)
        return None if is_kept else stale_read(decision.decode)

    def stream_starts(self) -> Headers:
        """The status stands from now on."""
        self._account.phases.first_token_s = self._account.lap()
        return self._answered()

    # When D failed

    def _decode_failed(self, client: EngineClient, error: EngineError | ClientStalled | DeadlinePassed) -> None:
        """Book it: in the table, and against whoever may be at fault."""
        name, prefill = client.address.name, self._prefill_name()
        event = self._failure_event(error)
        self._apply(event)
        if not isinstance(error, EngineError) or (isinstance(error, EngineStatus) and _is_clients_fault(error.status)):
            return
        if error.reason in WRONG_TEXT:
            self._proxy.pool.report_wrong_text(name, error.reason, salt=self._salt)
            if prefill is not None and error.reason is Reason.WRONG_CONTEXT:
                self._proxy.pool.report_pair_failure(prefill, name, str(error))
        elif prefill is not None and event is Event.DECODE_LOST and not self._is_gone(error):
            self._proxy.pool.report_pair_failure(prefill, name, str(error))
        else:
            self._blame(client.address, error)
        self._attempts.decode_failed(name, prefill=prefill)

    def _is_gone(self, error: EngineError) -> bool:
        """Whether it was the engine that left, and not only this request that failed.

        A responses stream whose KV did not come just breaks off (vLLM 0.32, responses/serving.py): that engine is there.
        """
        is_stream = self._call.api is openai.Api.RESPONSES and self._call.facts.is_stream
        return isinstance(error, EngineUnreachable) and not (is_stream and error.reason is Reason.ENGINE_BROKE_OFF)

    def _failure_event(self, error: RequestError) -> Event:
        if self._life.state is State.DECODING:
            return Event.BROKE_OFF
        if not isinstance(error, EngineStatus) or not _is_clients_fault(error.status):
            return Event.DECODE_LOST
        is_told = nixl.tells_prefill(error.body)
        return Event.DECODE_REFUSED if is_told else Event.DECODE_REFUSED_UNTOLD

    def _may_decode_again(self, error: EngineError) -> bool:
        """Before the first byte, if it is D's fault, another try makes sense, and bound and budget allow it."""
        if self._life.state is not State.OPEN or not self._call.facts.is_repeatable:
            return False
        if error.reason is Reason.FIRST_BYTE_TIMEOUT and not self._call.facts.is_stream:
            return False  # It took the whole time that an answer may take.
        if not self._has_decode_left(error) or not self._attempts.may_decode_again():
            return False
        self._give_up_split(error, "decode")
        self._handoff = None
        return True

    def _has_decode_left(self, error: EngineError) -> bool:
        """A D to try: another one, or the same when it is healthy and was not just busy or gone."""
        try:
            decision = self._proxy.policy.decide(self._call.facts, self._candidates())
        except NoEligibleEngine:
            return False
        is_same = self._decision is not None and decision.decode == self._decision.decode
        return not is_same or not (isinstance(error, EngineStatus) and error.status in _BUSY_STATUSES)

    def _answered(self) -> Headers:
        """From now on the status stands. Gives pdserve's own headers."""
        self._apply(Event.DECODE_ANSWERED)
        self._account.status = _OK
        return self._account.headers()

    # Step 8

    def _finish_stream(self) -> None:
        self._account.phases.stream_s = self._account.lap()
        self._book()
        self._reply.end()
        self._life.apply(Event.FINISHED)

    def _finish_whole(self, answer: Answer, body: bytes) -> None:
        self._account.phases.decode_s = self._account.lap()
        self._book()
        self._reply.send(_OK, [(b"content-type", answer.content_type), *self._answered()], body)
        self._life.apply(Event.FINISHED)

    def _book(self) -> None:
        assert self._watch is not None
        self._account.book(self._watch.usage, was_handed=self._handoff is not None)
        if self._handoff is not None and self._account.evidence.place is PrefillPlace.LOCAL:
            _logger.warning("%s: %s", self._call.request_id, self._account.evidence.cause)

    def end(self, event: Event, error: RequestError | None = None) -> None:
        """Close the request's life, whatever state it is in."""
        if error is not None:
            self._account.reason = error.reason
            if not self._reply.is_started:
                self._account.status = error.status
        if self._life.state is State.CLOSED:
            return
        if error is None and event is Event.FAILED:
            self._account.reason = Reason.INTERNAL
        if self._life.state is State.DECODING and self._watch is not None and self._watch.usage is not None:
            self._book()
        if self._life.state is State.HANDED and self._connection is not None and self._connection.was_unsent:
            self._apply(Event.DECODE_LOST)
        self._apply(event)

    def record(self) -> RequestRecord:
        """What the journal keeps."""
        num_failed_legs = self._attempts.num_prefill + self._attempts.num_decode
        return self._account.record(self._decision, self._handoff, num_failed_legs=num_failed_legs)

    # Inside

    def _apply(self, event: Event) -> None:
        releases = self._life.apply(event)
        is_held = self._life.state in _HOLDING
        if is_held != (self._lease is not None):
            self._hold(is_held=is_held)
        if releases:
            handoff, decision = self._handoff, self._decision
            assert handoff is not None
            assert isinstance(decision, RemotePrefill)
            headers, avoid = self._call.engine_headers, decision.decode
            self._proxy.releaser.release(handoff, prefill=decision.prefill.name, headers=headers, avoid=avoid)
            if self._life.state is State.OPEN:
                self._handoff = None

    def _hold(self, *, is_held: bool) -> None:
        decision, handoff = self._decision, self._handoff
        assert isinstance(decision, RemotePrefill)
        assert handoff is not None
        prefill = decision.prefill.name
        self._proxy.pool.hold(prefill, 1 if is_held else -1)
        if is_held:
            self._lease = self._proxy.leases[prefill].open(handoff.taken_at_s)
        elif self._lease is not None:
            self._lease.is_open = False
            self._lease = None

    def _blame(self, engine: EngineAddress, error: EngineError) -> None:
        pool = self._proxy.pool
        if isinstance(error, EngineStatus) and error.status in _BUSY_STATUSES:
            return
        pool.report_failure(engine.name, error.reason)
        if isinstance(error, EngineTimeout | EngineUnreachable):
            pool.report_broken(engine.name)

    def _prefill_name(self) -> EngineName | None:
        """The P whose handoff is or was in hand in this attempt."""
        return self._decision.prefill.name if isinstance(self._decision, RemotePrefill) else None

    def _bounded(self, timeout_s: float) -> tuple[float, bool]:
        """How long a leg may take, and whether that is all that is left to the whole request. Raises DeadlinePassed.

        Which of the two it was is settled before the wait: a timer may ring a little early.
        """
        left_s = self._deadline_s - self._proxy.clock()
        if left_s <= 0:
            raise DeadlinePassed(self._proxy.timeouts.total)
        return (left_s, True) if left_s < timeout_s else (timeout_s, False)


def _is_clients_fault(status: int) -> bool:
    return 400 <= status < 500 and status not in _BUSY_STATUSES  # noqa: PLR2004


def _engine_status(client: EngineClient, answer: Answer) -> EngineError:
    return client.status_error(answer, status=answer.status or openai.error_status(answer.body))
