"""An engine's answer to a request that is passed through: a whole one is kept, a stream goes to the client as it comes.

Unlike the relay of a D leg it knows neither legs nor evidence, and holds nothing back but an unfinished event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine.transport import MAX_WHOLE_ANSWER_BYTES, Answer, content_type_of
from pdserve.errors import ClientStalled, DeadlinePassed, EngineProtocolError, Reason, RequestError
from pdserve.protocol.sse import EventRelay, EventTooLong
from pdserve.protocol.usage import UsageWatch

if TYPE_CHECKING:
    import asyncio

    from pdserve.config import TimeoutsConfig
    from pdserve.engine.transport import EngineClient
    from pdserve.http.client import ClientConnection, ConnectionFailed, ProtocolViolated
    from pdserve.http.server import Headers, Response
    from pdserve.protocol.openai import Api

_OK = 200
_EVENT_STREAM = b"text/event-stream"


class Passing:
    """A sink.

    `outcome` is a whole Answer, or None when all of it was streamed and the response is to be ended; or it raises RequestError.
    """

    def __init__(
        self,
        response: Response,
        engine: EngineClient,
        connection: ClientConnection,
        *,
        api: Api | None,
        loop: asyncio.AbstractEventLoop,
        timeouts: TimeoutsConfig,
        total_timeout_s: float,
    ) -> None:
        """`total_timeout_s` is what is left of the time that the whole request may take."""
        self._response = response
        self._engine = engine
        self._connection: ClientConnection | None = connection
        self._loop = loop
        self._events: EventRelay | None = None
        if api is not None:
            # A stored stream ends with the whole response, and its connector's fields are not the client's.
            watch = UsageWatch(api, prefill_details=None, client_wants_usage=True)
            self._events = EventRelay(watch.edit_event, mark=watch.mark)
        self._status = 0
        self._headers: Headers = []
        self._is_stream = False
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_paused = False
        self._silence_s = timeouts.silence
        self._timeout_s = timeouts.whole_answer
        self._last_piece_s = loop.time()
        self._total_s = timeouts.total
        self._deadline_s = self._last_piece_s + total_timeout_s
        self._timer = loop.call_at(self._next_check_s(), self._check_time)
        self.outcome: asyncio.Future[Answer | None] = loop.create_future()

    def close(self) -> None:
        """Stop whatever is still going on; the engine sees its client gone unless the answer was whole."""
        self._timer.cancel()
        if not self.outcome.done():
            self.outcome.cancel()
        if self._connection is not None:
            self._connection.abort()

    # The engine's side

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers
        content_type = content_type_of(headers)
        self._is_stream = status == _OK and content_type.startswith(_EVENT_STREAM)
        if not self._is_stream:
            return
        self._timeout_s = self._silence_s
        self._touch()
        self._timer.cancel()
        self._timer = self._loop.call_at(self._next_check_s(), self._check_time)
        self._response.start(_OK, [(b"content-type", content_type), (b"cache-control", b"no-cache")], source=self)

    def on_body(self, data: bytes) -> None:
        self._touch()
        if self._is_stream:
            self._write(data)
            return
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > MAX_WHOLE_ANSWER_BYTES:
            message = f"the answer exceeds {MAX_WHOLE_ANSWER_BYTES} bytes"
            self._fail(EngineProtocolError(message, engine=str(self._engine.address)))

    def on_end(self) -> None:
        self._connection = None
        if self.outcome.done():
            return
        if not self._is_stream:
            self.outcome.set_result(Answer(self._status, self._headers, b"".join(self._pieces)))
            return
        if self._events is not None and self._events.flush():
            message, reason = "the stream ended in the middle of an event", Reason.ENGINE_BROKE_OFF
            self._fail(EngineProtocolError(message, engine=str(self._engine.address), reason=reason))
            return
        self.outcome.set_result(None)

    def on_failure(self, error: ConnectionFailed | ProtocolViolated) -> None:
        self._connection = None
        self._fail(self._engine.error_of(error))

    # The client's side

    def pause_reading(self) -> None:
        self._is_paused = True
        self._touch()
        if self._connection is not None:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._touch()
        if self._connection is not None:
            self._connection.resume_reading()

    # Inside

    def _write(self, data: bytes) -> None:
        if self.outcome.done():
            return
        if self._events is not None:
            try:
                data = self._events.feed(data)
            except EventTooLong as exc:
                self._fail(EngineProtocolError(str(exc), engine=str(self._engine.address)))
                return
        self._response.write(data)

    def _touch(self) -> None:
        self._last_piece_s = self._loop.time()

    def _next_check_s(self) -> float:
        return min(self._last_piece_s + self._timeout_s, self._deadline_s)

    def _check_time(self) -> None:
        now_s = self._loop.time()
        if now_s >= self._deadline_s:
            self._fail(DeadlinePassed(self._total_s))
        elif now_s < self._last_piece_s + self._timeout_s:
            self._timer = self._loop.call_at(self._next_check_s(), self._check_time)
        elif self._is_paused:
            self._fail(ClientStalled(self._timeout_s))
        elif self._is_stream:
            self._fail(self._engine.timeout_of("the next piece", self._timeout_s, reason=Reason.SILENCE_TIMEOUT))
        else:
            self._fail(self._engine.timeout_of("the answer", self._timeout_s, reason=Reason.FIRST_BYTE_TIMEOUT))

    def _fail(self, error: RequestError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)
