"""HTTP to one engine: whole answers, and answers relayed into a sink, each with its deadline.

The only place where what goes wrong on the wire becomes an EngineError. Knows neither OpenAI bodies nor handoffs.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from pdserve.engine.credentials import OPEN_ACCESS, EngineAccess
from pdserve.errors import (
    EngineError,
    EngineProtocolError,
    EngineStatus,
    EngineTimeout,
    EngineUnreachable,
    OutOfSockets,
    Reason,
)
from pdserve.http.client import ClientConnection, ConnectionFailed, ConnectionPool, NoSocketLeft, ProtocolViolated
from pdserve.http.server import Headers
from pdserve.protocol.openai import JSON_HEADER, NOT_JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from pdserve.core import EngineAddress
    from pdserve.http.client import Piece, Sink

    HeaderSequence = Sequence[tuple[bytes, bytes]]
    Body = bytes | Sequence[Piece]

_Value = TypeVar("_Value")

_ADVICE = frozenset({b"retry-after", b"www-authenticate"})
_KEY_REFUSED = frozenset({401, 403})
_NAME_MISMATCHES = frozenset({62, 64})
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH (OpenSSL's x509_vfy.h)."""
_LATE_S = 1.0
"""How long an answer that nobody awaits any more may take: it had left the engine by then, or never will."""
MAX_WHOLE_ANSWER_BYTES = 256 * 1024 * 1024
"""A chat answer with logprobs for every token of a long context stays well below; beyond it an engine is talking nonsense."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes

    @property
    def content_type(self) -> bytes:
        """As the engine sent it; JSON when it sent none."""
        return content_type_of(self.headers)

    @property
    def advice(self) -> Headers:
        """Those of an error's headers that tell its client what to do."""
        return [header for header in self.headers if header[0] in _ADVICE]


def content_type_of(headers: Headers) -> bytes:
    """The content type among an answer's headers; JSON when there is none."""
    for name, value in headers:
        if name == b"content-type":
            return value
    return b"application/json"


class EngineClient:
    """One engine's connections. Must be made where its event loop runs."""

    def __init__(self, address: EngineAddress, *, connect_timeout_s: float, access: EngineAccess = OPEN_ACCESS) -> None:
        parts = urlsplit(address.url)
        assert parts.hostname is not None
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._connect_timeout_s = connect_timeout_s
        self._authorization = b""
        if access.key is not None:
            self._authorization = b"authorization: Bearer %b\r\n" % access.key.reveal().encode()
        self._common_headers = b"host: %b\r\n%b" % (parts.netloc.encode(), self._authorization)
        tls = (access.tls or ssl.create_default_context()) if is_tls else None
        self._pool = ConnectionPool(parts.hostname, port, tls=tls)

    def get(self, path: str, *, timeout_s: float, headers: HeaderSequence = ()) -> Coroutine[object, None, Answer]:
        """GET a path. Raises EngineError or OutOfSockets."""
        head = b"GET %b HTTP/1.1\r\n%b%b\r\n" % (path.encode(), self._common_headers, self._joined(headers))
        return self._whole(head, timeout_s=timeout_s)

    def post(
        self,
        path: str,
        body: Body,
        *,
        request_id: bytes,
        timeout_s: float,
        headers: HeaderSequence = (),
        timeout_reason: Reason = Reason.ENGINE_TIMEOUT,
        on_late: Callable[[Answer], None] | None = None,
    ) -> Coroutine[object, None, Answer]:
        """POST a JSON body and take the whole answer, whatever its status. Raises EngineError or OutOfSockets.

        `on_late` gets an answer that was on its way when the caller was cancelled, then or a moment later.
        """
        request = self._request(path, body, request_id=request_id, headers=headers)
        return self._whole(request, timeout_s=timeout_s, timeout_reason=timeout_reason, on_late=on_late)

    def try_connect(self) -> ClientConnection | None:
        """A connection for `send` or `ask` that is there already; the caller aborts it unless it is used."""
        return self._pool.try_acquire()

    def send(
        self,
        connection: ClientConnection,
        path: str,
        body: Body,
        sink: Sink,
        *,
        request_id: bytes,
        headers: HeaderSequence = (),
        method: bytes = b"POST",
        content_type: bytes = JSON_HEADER[1],
    ) -> None:
        """Send a request with a body, its answer going to the sink."""
        request = self._request(
            path, body, request_id=request_id, headers=headers, method=method, content_type=content_type
        )
        connection.send(request, sink)

    def ask(
        self, connection: ClientConnection, path: str, body: Body, *, request_id: bytes, headers: HeaderSequence = ()
    ) -> WholeAnswer:
        """Send a JSON body now; `take` waits for the answer."""
        answer = WholeAnswer(self._loop.create_future())
        connection.send(self._request(path, body, request_id=request_id, headers=headers), answer)
        return answer

    async def take(
        self, answer: WholeAnswer, connection: ClientConnection, *, timeout_s: float, timeout_reason: Reason
    ) -> Answer:
        """What `ask` asked for, whatever its status; given up, the engine sees its client gone. Raises EngineError."""
        try:
            return await self._taken(answer, connection, timeout_s, timeout_reason, None)
        except (ConnectionFailed, ProtocolViolated) as exc:
            raise self.error_of(exc) from exc

    def error_of(self, error: ConnectionFailed | ProtocolViolated) -> EngineError:
        """What a failure on the wire means for a request."""
        if isinstance(error, ProtocolViolated):
            return EngineProtocolError(str(error), engine=str(self.address))
        reason = Reason.ENGINE_UNREACHABLE if error.is_unanswered else Reason.ENGINE_BROKE_OFF
        return EngineUnreachable(str(error), engine=str(self.address), reason=reason)

    def status_error(self, answer: Answer, *, status: int | None = None) -> EngineError:
        """An answer that is an error, as one; `status` where the answer itself has none, being an event of a stream.

        A key of pdserve's that the engine refuses is no fault of the client's, which would take it for its own.
        """
        status = status or answer.status
        engine = str(self.address)
        if self._authorization and status in _KEY_REFUSED:
            return EngineProtocolError(
                f"refused pdserve's key ({status}); was it started with another one?", engine=engine
            )
        return EngineStatus(
            engine=engine, status=status, content_type=answer.content_type, body=answer.body, headers=answer.advice
        )

    def decoded(self, answer: Answer, kind: type[_Value]) -> _Value:
        """An answer's JSON as a value. Raises EngineProtocolError when it is something else."""
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except NOT_JSON as exc:
            shown = answer.body[:200].decode(errors="replace")
            message = f"answered {answer.status} with something else than expected: {exc}: {shown!r}"
            raise EngineProtocolError(message, engine=str(self.address)) from exc

    def timeout_of(self, what: str, timeout_s: float, *, reason: Reason) -> EngineTimeout:
        """The error for a deadline that passed; `what` names what was waited for."""
        return EngineTimeout(f"{what} did not come within {timeout_s:g} s", engine=str(self.address), reason=reason)

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.close()

    async def _whole(
        self,
        request: Body,
        *,
        timeout_s: float,
        timeout_reason: Reason = Reason.ENGINE_TIMEOUT,
        on_late: Callable[[Answer], None] | None = None,
    ) -> Answer:
        """An answer; a connection that the engine closed just as it was used again is replaced, once."""
        connection = self._pool.try_acquire() or await self.connect()
        while True:
            answer = WholeAnswer(self._loop.create_future())
            connection.send(request, answer)
            try:
                return await self._taken(answer, connection, timeout_s, timeout_reason, on_late)
            except ConnectionFailed as exc:
                if not (exc.is_unanswered and connection.was_used):
                    raise self.error_of(exc) from exc
            except ProtocolViolated as exc:
                raise self.error_of(exc) from exc
            connection = await self.connect()

    async def _taken(
        self,
        answer: WholeAnswer,
        connection: ClientConnection,
        timeout_s: float,
        timeout_reason: Reason,
        on_late: Callable[[Answer], None] | None,
    ) -> Answer:
        # A timer of our own: asyncio.timeout asks for the running loop and task at every turn, which are system calls.
        timer = self._loop.call_later(timeout_s, answer.expire)
        try:
            return await answer.outcome
        except TimeoutError as exc:
            raise self.timeout_of("the answer", timeout_s, reason=timeout_reason) from exc
        except asyncio.CancelledError:
            if on_late is not None:
                answer.wait_on(on_late)
            raise
        finally:
            timer.cancel()
            if not answer.is_whole:
                self._leave(connection, is_answer_wanted=answer.on_late is not None)

    def _leave(self, connection: ClientConnection, *, is_answer_wanted: bool) -> None:
        if is_answer_wanted and connection.try_leave():
            self._loop.call_later(_LATE_S, connection.abort)
        else:
            connection.abort()

    async def connect(self) -> ClientConnection:
        """A new connection, where there is none already. Raises EngineError or OutOfSockets."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._pool.connect()
        except TimeoutError as exc:
            raise self.timeout_of("a connection", self._connect_timeout_s, reason=Reason.CONNECT_TIMEOUT) from exc
        except ConnectionFailed as exc:
            raise self._explained(exc) from exc
        except NoSocketLeft as exc:
            message = (
                f"no connection to {self.address} could be opened from here: {exc}; raise this process's limit of open files "
                "(ulimit -n) and the machine's range of local ports, or lower admission.max_concurrent"
            )
            raise OutOfSockets(message) from exc

    def _explained(self, error: ConnectionFailed) -> EngineError:
        """TLS has more ways to fail than TCP, and each has its own remedy."""
        cause = error.__cause__
        if not isinstance(cause, ssl.SSLError):
            return self.error_of(error)
        if isinstance(cause, ssl.SSLCertVerificationError):
            is_name = cause.verify_code in _NAME_MISMATCHES
            advice = "use a name or address that stands in it" if is_name else "name its CA in engines.ca_file"
            message = f"its TLS certificate is not trusted: {cause.verify_message.rstrip('.')}; {advice}"
        else:
            message = f"no TLS: {cause.reason or cause}; does it speak TLS at all? If not, write http://"
        return EngineUnreachable(message, engine=str(self.address))

    def _request(
        self,
        path: str,
        body: Body,
        *,
        request_id: bytes,
        headers: HeaderSequence,
        method: bytes = b"POST",
        content_type: bytes = JSON_HEADER[1],
    ) -> Body:
        num_bytes = len(body) if isinstance(body, bytes) else sum([len(piece) for piece in body])
        head = b"%b %b HTTP/1.1\r\n%bcontent-type: %b\r\nx-request-id: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            method,
            path.encode(),
            self._common_headers,
            content_type,
            request_id,
            self._joined(headers) if headers else b"",
            num_bytes,
        )
        return head + body if isinstance(body, bytes) else [head, *body]

    def _joined(self, headers: HeaderSequence) -> bytes:
        """As lines. The engine's key, if there is one, stands in place of anybody else's."""
        if self._authorization:
            headers = [header for header in headers if header[0] != b"authorization"]
        return b"".join([b"%b: %b\r\n" % header for header in headers])


class WholeAnswer:
    """A sink that waits for all of it; `outcome` raises ConnectionFailed, ProtocolViolated or TimeoutError."""

    __slots__ = ("_headers", "_num_bytes", "_pieces", "_status", "is_whole", "on_late", "outcome")

    def __init__(self, outcome: asyncio.Future[Answer]) -> None:
        self.outcome = outcome
        self.is_whole = False
        self.on_late: Callable[[Answer], None] | None = None
        self._status = 0
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = headers

    def on_body(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_WHOLE_ANSWER_BYTES:
            self.on_failure(ProtocolViolated(f"the answer exceeds {MAX_WHOLE_ANSWER_BYTES} bytes"))
            return
        self._pieces.append(data)

    def on_end(self) -> None:
        self.is_whole = True
        if self.on_late is not None:
            self.on_late(self._whole())
        elif not self.outcome.done():
            self.outcome.set_result(self._whole())

    def wait_on(self, on_late: Callable[[Answer], None]) -> None:
        """Nobody awaits the answer any more; `on_late` gets it, if it comes."""
        if self.is_whole:
            on_late(self._whole())
        else:
            self.on_late = on_late

    def on_failure(self, error: ConnectionFailed | ProtocolViolated | TimeoutError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def expire(self) -> None:
        """It took too long."""
        self.on_failure(TimeoutError())

    def _whole(self) -> Answer:
        return Answer(self._status, self._headers, b"".join(self._pieces))
