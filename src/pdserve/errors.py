"""Every error pdserve raises on purpose, and the closed set of reasons.

    PdserveError
      ConfigError                     exit 2: found before anything starts
      LaunchError                     exit 1: a process did not start or did not become ready
        EngineExited                  carries the log's tail and the likely cause
        EngineNotReady
        ModelUnavailable
      VerifyFailed                    exit 1: KV did not move, or the answers differ
      RequestError                    has a status and a reason; becomes an OpenAI error body
        InvalidRequest 4xx            the client's fault
          MethodNotAllowed 405        with the methods that the path takes
        Overloaded 429                the queue is full, or a turn did not come in time
        NoEligibleEngine 503
        DeadlinePassed 504            the request as a whole took too long
        ShuttingDown 503              the gateway stops, and its time for open requests is up
        OutOfSockets 503              this machine gave the gateway no socket to ask an engine with
        ClientStalled                 the client stopped reading; it is hung up on
        EngineError                   an engine's fault, with its role and URL
          EngineUnreachable 502
          EngineTimeout 504
          EngineProtocolError 502
          EngineStatus                the engine's own status and body, handed on

This module knows no wire format and no terminal: who shows an error decides how it looks.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Reason(enum.StrEnum):
    """Why a request ended without an answer, as spelled in bodies, headers, metric labels and logs."""

    MALFORMED_HTTP = "malformed_http"
    MALFORMED_JSON = "malformed_json"
    INVALID_FIELD = "invalid_field"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    REQUEST_TIMEOUT = "request_timeout"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    NO_ENGINE = "no_engine"
    DEADLINE = "deadline"
    SHUTTING_DOWN = "shutting_down"
    OUT_OF_SOCKETS = "out_of_sockets"
    CONNECT_TIMEOUT = "connect_timeout"
    PREFILL_TIMEOUT = "prefill_timeout"
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    SILENCE_TIMEOUT = "silence_timeout"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_TIMEOUT = "engine_timeout"
    """One of pdserve's own questions to an engine, such as /health or /metrics."""
    ENGINE_PROTOCOL = "engine_protocol"
    ENGINE_STATUS = "engine_status"
    ENGINE_BROKE_OFF = "engine_broke_off"
    WRONG_CONTEXT = "wrong_context"
    """D counted other prompt tokens than P: the KV that it continued was not this prompt's."""
    STALE_HANDOFF = "stale_handoff"
    """D answered after P's lease, and P may have given the blocks to another request before D read them."""
    CLIENT_STALLED = "client_stalled"
    INTERNAL = "internal"


class PdserveError(Exception):
    """Base of every error that pdserve raises on purpose."""


class ConfigError(PdserveError):
    """The configuration, the flags or the machine do not allow what was asked. Nothing has started yet."""


class LaunchError(PdserveError):
    """A process that pdserve runs did not start, or did not become ready."""


class EngineExited(LaunchError):
    """An engine's process ended by itself."""

    def __init__(self, name: str, status: str, *, cause: str, log_tail: str, log_path: str) -> None:
        super().__init__(f"engine {name} {status}. Likely cause: {cause}")
        self.name = name
        self.status = status
        self.cause = cause
        self.log_tail = log_tail
        self.log_path = log_path


class EngineNotReady(LaunchError):
    """An engine runs but did not become ready in time."""


class ModelUnavailable(LaunchError):
    """A model could not be fetched or converted."""


class VerifyFailed(PdserveError):
    """The proof failed; the message says what happened instead."""


class RequestError(PdserveError):
    """A request that ends with an error for its client."""

    def __init__(self, message: str, *, status: int, reason: Reason) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class InvalidRequest(RequestError):
    """The client sent something that no engine should see."""

    def __init__(self, message: str, *, status: int = 400, reason: Reason = Reason.INVALID_FIELD) -> None:
        super().__init__(message, status=status, reason=reason)


class MethodNotAllowed(InvalidRequest):
    """The path is there and takes other methods."""

    def __init__(self, message: str, *, allowed: Sequence[str]) -> None:
        super().__init__(message, status=405, reason=Reason.METHOD_NOT_ALLOWED)
        self.allowed = allowed


class NoEligibleEngine(RequestError):
    """No engine of the needed role can take the request."""

    def __init__(self, message: str, *, reason: Reason = Reason.NO_ENGINE) -> None:
        super().__init__(message, status=503, reason=reason)


class Overloaded(RequestError):
    """The gateway has as much work as it may have; the client should come again after `retry_after_s`."""

    def __init__(self, message: str, *, reason: Reason, retry_after_s: int = 1) -> None:
        super().__init__(message, status=429, reason=reason)
        self.retry_after_s = retry_after_s


class DeadlinePassed(RequestError):
    """The request as a whole took longer than `timeouts.total`."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the request did not end within {timeout_s:g} s", status=504, reason=Reason.DEADLINE)


class ShuttingDown(RequestError):
    """The gateway was stopped, and the time that open requests had for their end is up."""

    def __init__(self) -> None:
        message = "the gateway is being stopped and could not wait for this request any longer; send it again"
        super().__init__(message, status=503, reason=Reason.SHUTTING_DOWN)


class OutOfSockets(RequestError):
    """The gateway's own machine gave it no socket for an engine: it says nothing of that engine."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, reason=Reason.OUT_OF_SOCKETS)


class ClientStalled(RequestError):
    """The client has not read for so long that its request is given up."""

    def __init__(self, timeout_s: float) -> None:
        message = f"the client has not read for {timeout_s:g} s"
        super().__init__(message, status=499, reason=Reason.CLIENT_STALLED)


class EngineError(RequestError):
    """An engine failed; `engine` names it as `role url`."""

    def __init__(self, message: str, *, engine: str, status: int, reason: Reason) -> None:
        super().__init__(f"{engine}: {message}", status=status, reason=reason)
        self.engine = engine


class EngineUnreachable(EngineError):
    """No connection, or one that broke before the engine answered."""

    def __init__(self, message: str, *, engine: str, reason: Reason = Reason.ENGINE_UNREACHABLE) -> None:
        super().__init__(message, engine=engine, status=502, reason=reason)


class EngineTimeout(EngineError):
    """The engine was silent for longer than its deadline."""

    def __init__(self, message: str, *, engine: str, reason: Reason = Reason.ENGINE_TIMEOUT) -> None:
        super().__init__(message, engine=engine, status=504, reason=reason)


class EngineProtocolError(EngineError):
    """The engine answered something that is not HTTP, not JSON, or not what vLLM answers."""

    def __init__(self, message: str, *, engine: str, reason: Reason = Reason.ENGINE_PROTOCOL) -> None:
        super().__init__(message, engine=engine, status=502, reason=reason)


class EngineStatus(EngineError):
    """The engine answered with an error of its own; `body` is what it said, and the client gets it as it came."""

    def __init__(
        self,
        *,
        engine: str,
        status: int,
        content_type: bytes,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(f"answered {status}", engine=engine, status=status, reason=Reason.ENGINE_STATUS)
        self.content_type = content_type
        self.body = body
        self.headers = headers
        """Those of its headers that tell the client what to do, such as retry-after."""
