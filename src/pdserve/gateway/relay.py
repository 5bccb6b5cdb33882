"""D's answer on its way to the client: from the engine's socket straight to the client's, without a queue or a task switch.

Nothing reaches the client before D has answered: a status cannot be taken back, and until the first byte everything can
still be tried otherwise. A stream's pieces are not parsed; only the event that holds the usage is. Knows no policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.engine.transport import MAX_WHOLE_ANSWER_BYTES, Answer, content_type_of
from pdserve.errors import ClientStalled, EngineError, EngineProtocolError
from pdserve.protocol.sse import EventRelay, event_data, split_events

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pdserve.engine.transport import EngineClient
    from pdserve.http.client import ClientConnection, ConnectionFailed, ProtocolViolated
    from pdserve.http.server import Headers, Response
    from pdserve.protocol.usage import UsageWatch

_EVENT_STREAM = b"text/event-stream"
_OK = 200
_ERROR_EVENT = b'data: {"error"'
"""How vLLM starts a stream that failed after its status had gone out (0.32, entrypoints/openai/completion/serving.py)."""


class Relay:
    """A sink for the D leg.

    `outcome` is a whole Answer, or None when it was streamed to its end; or it raises EngineError or ClientStalled.
    """

    def __init__(
        self,
        response: Response,
        engine: EngineClient,
        watch: UsageWatch,
        connection: ClientConnection,
        *,
        loop: asyncio.AbstractEventLoop,
        client_headers: Callable[[], Headers],
        first_byte_timeout_s: float,
        silence_timeout_s: float,
    ) -> None:
        self._loop = loop
        self._response = response
        self._engine = engine
        self._client_headers = client_headers
        self._silence_timeout_s = silence_timeout_s
        self._events = EventRelay(watch.edit_event)
        self._status = 0
        self._headers: Headers = []
        self._whole: list[bytes] | None = None
        self._whole_bytes = 0
        self._connection: ClientConnection | None = connection
        """What feeds this sink, to be paused while the client reads too slowly; None once the answer is whole."""
        self._is_paused = False
        self._last_piece_s = self._loop.time()
        self._timeout_s = first_byte_timeout_s
        self._timer = self._loop.call_later(first_byte_timeout_s, self._check_silence)
        self.first_byte_at_s: float | None = None
        self.was_unsent = False
        """Whether the D leg was given up before all of it had left, so that D never had it."""
        self.outcome: asyncio.Future[Answer | None] = self._loop.create_future()

    def close(self) -> None:
        """Stop whatever is still going on; the engine sees its client gone unless the answer was whole."""
        self._timer.cancel()
        if not self.outcome.done():
            self.outcome.cancel()
        if self._connection is not None:
            self.was_unsent = self._connection.has_unsent
            self._connection.abort()

    # The engine's side

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers
        is_stream = status == _OK and content_type_of(headers).startswith(_EVENT_STREAM)
        self._whole = None if is_stream else []

    def on_body(self, data: bytes) -> None:
        self._last_piece_s = self._loop.time()
        if self._whole is not None:
            self._collect(data)
            return
        events = self._events.feed(data)
        if not events:
            return
        if self.first_byte_at_s is None and not self._start(events):
            return
        self._response.write(events)

    def on_end(self) -> None:
        self._connection = None
        if self.outcome.done():
            return
        if self._whole is not None:
            self._note_first_byte()
            self.outcome.set_result(Answer(self._status, self._headers, b"".join(self._whole)))
        elif self.first_byte_at_s is None:
            self._fail(EngineProtocolError("the stream ended before its first event", engine=str(self._engine.address)))
        else:
            self._response.write(self._events.flush())
            self.outcome.set_result(None)

    def on_failure(self, error: ConnectionFailed | ProtocolViolated) -> None:
        self._connection = None
        self._fail(self._engine.error_of(error))

    # The client's side

    def pause_reading(self) -> None:
        self._is_paused = True
        self._last_piece_s = self._loop.time()
        if self._connection is not None:
            self._connection.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._last_piece_s = self._loop.time()
        if self._connection is not None:
            self._connection.resume_reading()

    # Inside

    def _start(self, events: bytes) -> bool:
        """Send the head; False when the first event is an error, which can still be told with a status of its own."""
        self._note_first_byte()
        if events.startswith(_ERROR_EVENT):
            body = event_data(split_events(events)[0])
            self._whole = [body]
            self._status = 0
            self._headers = []
            if not self.outcome.done():
                self.outcome.set_result(Answer(0, [], body))
            return False
        headers = [(b"content-type", content_type_of(self._headers)), (b"cache-control", b"no-cache")]
        self._response.start(_OK, headers + self._client_headers(), source=self)
        return True

    def _note_first_byte(self) -> None:
        if self.first_byte_at_s is None:
            self.first_byte_at_s = self._last_piece_s = self._loop.time()
            self._timeout_s = self._silence_timeout_s
            self._timer.cancel()
            self._timer = self._loop.call_later(self._timeout_s, self._check_silence)

    def _collect(self, data: bytes) -> None:
        assert self._whole is not None
        self._whole.append(data)
        self._whole_bytes += len(data)
        if self._whole_bytes > MAX_WHOLE_ANSWER_BYTES:
            message = f"the answer exceeds {MAX_WHOLE_ANSWER_BYTES} bytes"
            self._fail(EngineProtocolError(message, engine=str(self._engine.address)))

    def _check_silence(self) -> None:
        """One timer for a whole answer, set anew only when it fires: a timer per piece would cost more than the piece."""
        idle_s = self._loop.time() - self._last_piece_s
        if idle_s < self._timeout_s:
            self._timer = self._loop.call_later(self._timeout_s - idle_s, self._check_silence)
            return
        if self._is_paused:
            self._fail(ClientStalled(self._timeout_s))
            return
        what = "the first byte" if self.first_byte_at_s is None else "the next piece"
        self._fail(self._engine.timeout_of(what, self._timeout_s))

    def _fail(self, error: EngineError | ClientStalled) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)
