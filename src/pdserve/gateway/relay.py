"""D's answer on its way to the client: from the engine's socket straight to the client's, without a queue or a task switch.

Nothing reaches the client before D has something of the answer itself: a status cannot be taken back, and until the first byte
everything can still be tried otherwise. A stream's pieces are not parsed; only an event that holds usage is. Knows no policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdserve.engine.transport import MAX_WHOLE_ANSWER_BYTES, Answer, content_type_of
from pdserve.errors import ClientStalled, DeadlinePassed, EngineError, EngineProtocolError, EngineStatus, Reason
from pdserve.gateway.patience import Patience
from pdserve.protocol.openai import error_status
from pdserve.protocol.preamble import ends_stream, error_marks, is_preamble, stream_error
from pdserve.protocol.sse import EventRelay, EventTooLong, is_sound, look_sound, split_events

if TYPE_CHECKING:
    import asyncio

    from pdserve.engine.transport import EngineClient
    from pdserve.gateway.call import Reply
    from pdserve.http.client import ClientConnection, ConnectionFailed, ProtocolViolated
    from pdserve.http.server import Headers
    from pdserve.protocol.openai import Api
    from pdserve.protocol.usage import UsageWatch

_EVENT_STREAM = b"text/event-stream"
_OK = 200
_MAX_HELD_BYTES = 1024 * 1024
"""Of events that carry nothing of the answer yet. The Responses API's first ones repeat the request's tools."""


class AnswerChecks(Protocol):
    """What the relay asks before and while an answer goes out."""

    def stream_starts(self) -> Headers:
        """The status stands from now on; gives headers of its own for the client."""

    def wrong_usage(self) -> EngineError | None:
        """Whether what D has counted so far speaks against its answer."""

    def lease_check(self) -> asyncio.Task[EngineError | None] | None:
        """What is still to be found out before a stream's first byte may go; None: nothing."""


class Relay:
    """A sink for the D leg of a stream.

    `outcome` is a whole Answer, or None when it was streamed to its end; or it raises EngineError, ClientStalled or
    DeadlinePassed.
    """

    __slots__ = (
        "_api",
        "_check",
        "_checks",
        "_connection",
        "_early",
        "_engine",
        "_error_marks",
        "_events",
        "_has_ended_early",
        "_headers",
        "_held",
        "_is_cut",
        "_is_plain",
        "_loop",
        "_patience",
        "_reply",
        "_status",
        "_tail",
        "_watch",
        "_whole",
        "_whole_bytes",
        "outcome",
    )

    def __init__(
        self,
        reply: Reply,
        engine: EngineClient,
        watch: UsageWatch,
        connection: ClientConnection,
        checks: AnswerChecks,
        *,
        api: Api,
        loop: asyncio.AbstractEventLoop,
        first_byte_timeout_s: float,
        silence_timeout_s: float,
        total_timeout_s: float,
        total_s: float,
    ) -> None:
        """Timeouts in seconds. `total_timeout_s` is what is left of the `total_s` that the whole request may take."""
        self._loop = loop
        self._reply = reply
        self._api = api
        self._engine = engine
        self._watch = watch
        self._checks = checks
        self._check: asyncio.Task[EngineError | None] | None = None
        self._early: list[bytes] = []
        """What came of the stream while that was found out."""
        self._has_ended_early = False
        self._is_cut = False
        self._error_marks = error_marks(api)
        self._events = EventRelay(self._edit, mark=watch.mark)
        self._status = 0
        self._headers: Headers = []
        self._whole: list[bytes] | None = None
        self._whole_bytes = 0
        self._is_plain = False
        """Whether events go out now, and nothing is held, waited for or collected."""
        self._connection: ClientConnection | None = connection
        """What feeds this sink, to be paused while the client reads too slowly; None once the answer is whole."""
        self._held = b""
        """Events that carry nothing of the answer yet."""
        self._tail = b""
        """The last events that came."""
        self._patience = Patience(
            engine,
            self._fail,
            loop=loop,
            first="the first byte",
            first_timeout_s=first_byte_timeout_s,
            silence_timeout_s=silence_timeout_s,
            total_timeout_s=total_timeout_s,
            total_s=total_s,
        )
        self.outcome: asyncio.Future[Answer | None] = loop.create_future()

    def close(self) -> None:
        """Stop whatever is still going on; the engine sees its client gone unless the answer was whole."""
        self._patience.close()
        self._events = EventRelay(_as_it_is, mark=self._watch.mark)  # The old one refers back to here.
        if self._check is not None:
            self._check.cancel()
        if not self.outcome.done():
            self.outcome.cancel()
        if self._connection is not None:
            self._connection.abort()

    # The engine's side

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers
        is_stream = status == _OK and content_type_of(headers).startswith(_EVENT_STREAM)
        self._whole = None if is_stream else []

    def on_body(self, data: bytes) -> None:
        """Nearly every piece is one event or a few with nothing in them that is anybody's here: those go straight out."""
        self._patience.last_piece_s = self._loop.time()
        if self._is_plain and self._events.is_plain(data) and not self._tells_error(data):
            self._tail = data
            self._reply.write(data)
        else:
            self._look_into(data)

    def _tells_error(self, events: bytes) -> bool:
        for mark in self._error_marks:  # noqa: SIM110 - making a generator takes longer than the search
            if mark in events:
                return True
        return False

    def _look_into(self, data: bytes) -> None:
        if self._whole is not None:
            self._collect(data)
            return
        if self._check is not None:
            self._early.append(data)
            return
        try:
            events = self._events.feed(data)
        except EventTooLong as exc:
            self._cut(EngineProtocolError(str(exc), engine=str(self._engine.address)))
            return
        if not look_sound(events):
            events = self._until_garbage(events)
        if not events or self._is_cut:
            return
        if not self._patience.has_begun:
            events = self._begin(events)
        elif self._tells_error(events):
            events = self._until_error(events)
        if events:
            self._tail = events
            self._reply.write(events)

    def on_end(self) -> None:
        self._connection = None
        if self.outcome.done():
            return
        if self._check is not None:
            self._has_ended_early = True
            return
        if self._whole is not None:
            self._patience.begin()
            self.outcome.set_result(Answer(self._status, self._headers, b"".join(self._whole)))
        elif not self._patience.has_begun:
            self._fail(
                EngineProtocolError("the stream ended before it said anything", engine=str(self._engine.address))
            )
        elif not ends_stream(self._api, self._tail):
            # The end of the body is not the end of the answer: a client would take the half for the whole.
            message = "the stream ended in the middle of its answer"
            reason = Reason.ENGINE_BROKE_OFF
            self._fail(EngineProtocolError(message, engine=str(self._engine.address), reason=reason))
        else:
            self.outcome.set_result(None)  # What follows the end mark is no event and nobody's.

    def on_failure(self, error: ConnectionFailed | ProtocolViolated) -> None:
        self._connection = None
        if self._is_streaming and ends_stream(self._api, self._tail) and not self.outcome.done():
            self.outcome.set_result(
                None
            )  # The client has all of it: an error after the end mark would be read by nobody.
        else:
            self._fail(self._engine.error_of(error))

    # The client's side

    def pause_reading(self) -> None:
        self._patience.pause(is_paused=True)
        if self._connection is not None:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        self._patience.pause(is_paused=False)
        if self._connection is not None:
            self._connection.resume_reading()

    # Inside

    @property
    def _is_streaming(self) -> bool:
        """Whether events of the answer have gone to the client."""
        return self._whole is None and self._patience.has_begun

    def _edit(self, event: bytes) -> bytes:
        """An event with usage, for the client; with the wrong usage it is the end."""
        edited = self._watch.edit_event(event)
        error = self._checks.wrong_usage()
        if error is not None:
            self._cut(error)
            return b""
        return edited

    def _cut(self, error: EngineError) -> None:
        """Nothing more goes to the client, not even what came in the same piece, such as [DONE]."""
        self._is_cut = True
        self._is_plain = False
        self._whole = []
        self._fail(error)

    def _begin(self, events: bytes) -> bytes:
        """Hold back what carries nothing of the answer; then send the head. Gives what may go to the client.

        An error that comes first can still be told with a status of its own, or be tried again.
        """
        has_content = False
        for event in split_events(events):
            body = stream_error(self._api, event)
            if body is not None:
                self._become_whole(body)
                return b""
            has_content |= len(self._held) >= _MAX_HELD_BYTES or not is_preamble(self._api, event)
            self._held += event
        if not has_content:
            return b""
        check = self._checks.lease_check()
        if check is None:
            return self._start()
        self._wait_for(check)
        return b""

    def _start(self) -> bytes:
        """Send the head; gives what was held back."""
        self._patience.begin()
        headers = [(b"content-type", content_type_of(self._headers)), (b"cache-control", b"no-cache")]
        self._reply.start(_OK, headers + self._checks.stream_starts(), source=self)
        self._is_plain = True
        held, self._held = self._held, b""
        return held

    def _wait_for(self, check: asyncio.Task[EngineError | None]) -> None:
        self._check = check
        if self._connection is not None:
            self._connection.pause_reading()
        check.add_done_callback(self._go_on)

    def _go_on(self, check: asyncio.Task[EngineError | None]) -> None:
        """The stream from its first event, or its end."""
        if check.cancelled() or self.outcome.done():
            return
        error = check.result()
        self._check = None
        if error is not None:
            self._fail(error)
            return
        self._tail = self._start()
        self._reply.write(self._tail)
        if self._connection is not None and not self._patience.is_paused:
            self._connection.resume_reading()
        early, self._early = self._early, []
        for data in early:
            self.on_body(data)
        if self._has_ended_early:
            self.on_end()

    def _become_whole(self, error: bytes) -> None:
        """The stream told an error before anything else: its body is the answer, and names the status."""
        self._patience.begin()
        self._whole = [error]
        self._headers = []
        if not self.outcome.done():
            self.outcome.set_result(Answer(0, [], error))

    def _until_error(self, events: bytes) -> bytes:
        """All of it, unless the engine tells an error there: that ends the stream, and whoever awaits the outcome tells it."""
        before = b""
        for event in split_events(events):
            body = stream_error(self._api, event)
            if body is not None:
                if before:
                    self._reply.write(before)
                engine = str(self._engine.address)
                status, kind = error_status(body), b"application/json"
                self._cut(EngineStatus(engine=engine, status=status, content_type=kind, body=body))
                return b""
            before += event
        return events

    def _until_garbage(self, events: bytes) -> bytes:
        """All of it, unless there is something that is no event: no client could read on from there."""
        before = b""
        for event in split_events(events):
            if not is_sound(event):
                if before and self._is_streaming:
                    self._reply.write(before)
                message = f"sent {len(event)} bytes that are no event"
                self._cut(EngineProtocolError(message, engine=str(self._engine.address)))
                return b""
            before += event
        return events

    def _collect(self, data: bytes) -> None:
        assert self._whole is not None
        self._whole.append(data)
        self._whole_bytes += len(data)
        if self._whole_bytes > MAX_WHOLE_ANSWER_BYTES:
            message = f"the answer exceeds {MAX_WHOLE_ANSWER_BYTES} bytes"
            self._fail(EngineProtocolError(message, engine=str(self._engine.address)))

    def _fail(self, error: EngineError | ClientStalled | DeadlinePassed) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


def _as_it_is(event: bytes) -> bytes:
    return event
