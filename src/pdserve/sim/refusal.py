"""An answer that is an error, and reading a body that may be none: what every path of vLLM's API server has in common."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T", bound=msgspec.Struct)

_MISSING = re.compile(r"Object missing required field `(\w+)`")
_INDEX = re.compile(r"\[(\d+)\]")
"""pydantic names a list's items with dots, and what is missing as if it were there."""


class Refused(Exception):
    """An answer that is an error, in vLLM's shape (entrypoints/serve/engine/protocol.py, ErrorResponse)."""

    def __init__(
        self, status: int, kind: str, message: str, param: str | None = None, *, is_anthropic: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.is_anthropic = is_anthropic
        """Whether the answer has Anthropic's shape: what pydantic refuses has not, on the same path."""

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        if self.is_anthropic:
            return {"type": "error", "error": {"type": self.kind, "message": str(self)}}
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}

    def for_anthropic(self) -> Refused:
        """The same in Anthropic's shape."""
        return Refused(self.status, self.kind, str(self), self.param, is_anthropic=True)


def invalid(message: str, param: str | None = None, **value: object) -> Refused:
    """vLLM's VLLMValidationError appends what was wrong to its message."""
    details = [f"parameter={param}"] if param else []
    details += [f"value={item}" for item in value.values()]
    return Refused(400, "BadRequestError", f"{message} ({', '.join(details)})" if details else message, param)


def malformed(error: str, param: str | None) -> Refused:
    """vLLM answers 400 where FastAPI's own answer would be 422 (exception_handling/handlers/validation.py)."""
    return Refused(400, "Bad Request", f"1 validation error:\n  {error}", param)


def queue_full() -> Refused:
    """vLLM's QueueOverflowError."""
    message = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
    return Refused(503, "Service Unavailable", message)


def read_body(body: bytes, content_type: bytes, kind: type[_T]) -> _T:
    """Decode a body. Raises Refused."""
    if content_type.lower().partition(b";")[0] != b"application/json":
        raise malformed("Unsupported Media Type: Only 'application/json' is allowed", None)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise malformed(
            f"{{'type': 'json_invalid', 'loc': 'body', 'msg': 'JSON decode error: {exc}'}}", "body"
        ) from exc
    try:
        return msgspec.convert(value, kind, strict=False)  # pydantic takes "3" for a number as well.
    except msgspec.ValidationError as exc:
        message, _, path = str(exc).partition(" - at `$")
        missing = _MISSING.fullmatch(message)
        param = "body" + _INDEX.sub(r".\1", path.rstrip("`")) + (f".{missing[1]}" if missing else "")
        raise malformed(f"{{'loc': '{param}', 'msg': '{message}'}}", param) from exc
