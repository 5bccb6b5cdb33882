"""What the gateway has to answer, and where the answer goes: the seam between a request's outside and its two legs.

A client's request is one call, or several when it asks for many choices. Knows no engines and no sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from pdserve.core import EngineName, RequestFacts
from pdserve.http.server import Headers
from pdserve.protocol.openai import Api, Fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.http.server import PausableSource


class Call(msgspec.Struct, frozen=True, gc=False):
    """One prompt with one choice: what goes through the eight steps."""

    api: Api
    fields: Fields
    facts: RequestFacts
    request_id: str
    received_at_s: float
    engine_headers: Headers
    """Sent to the engines with every leg."""
    key_name: str | None = None
    """Whose API key it came with."""
    decode: EngineName | None = None
    """The only decode engine that can answer it, where that is known."""


class Reply(Protocol):
    """Takes one answer. The client's own `http.server.Response` is one."""

    is_started: bool

    def send(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """The whole answer at once."""

    def start(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], *, source: PausableSource | None = None
    ) -> None:
        """The head of a stream; `source` is paused while its reader is too slow."""

    def write(self, data: bytes) -> None:
        """Whole events of the stream."""

    def end(self) -> None:
        """The stream is whole."""
