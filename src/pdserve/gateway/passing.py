"""An engine's answer to a request that is passed through: a whole one is kept, a stream goes to the client as it comes.

Unlike the relay of a D leg it knows neither legs nor evidence, and holds nothing back but an unfinished event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine.transport import MAX_WHOLE_ANSWER_BYTES, Answer, content_type_of
from pdserve.errors import EngineProtocolError, Reason, RequestError
from pdserve.gateway.patience import Patience
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
        self._patience = Patience(
            engine,
            self._fail,
            loop=loop,
            first="the answer",
            first_timeout_s=timeouts.whole_answer,
            silence_timeout_s=timeouts.silence,
            total_timeout_s=total_timeout_s,
            total_s=timeouts.total,
        )
        self.outcome: asyncio.Future[Answer | None] = loop.create_future()

    def close(self) -> None:
        """Stop whatever is still going on; the engine sees its client gone unless the answer was whole."""
        self._patience.close()
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
        self._patience.begin()
        self._response.start(_OK, [(b"content-type", content_type), (b"cache-control", b"no-cache")], source=self)

    def on_body(self, data: bytes) -> None:
        self._patience.last_piece_s = self._loop.time()
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
        self._patience.pause(is_paused=True)
        if self._connection is not None:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        self._patience.pause(is_paused=False)
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

    def _fail(self, error: RequestError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)
