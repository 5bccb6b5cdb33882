"""What the gateway's admin listener answers: frozen values that the gateway writes and the command line reads.

No prompt and no answer text is part of any of them. Times are seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.core import PrefillPlace, Role

if TYPE_CHECKING:
    from pdserve.protocol.nixl import Handoff


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One engine as the gateway sees it."""

    name: str
    role: Role
    url: str
    state: str
    cause: str
    breaker: str
    num_in_flight: int
    num_held: int
    """Handoffs whose KV it holds for a decode engine that has not answered yet."""


class PairInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill-decode pair."""

    prefill: str
    decode: str
    state: str
    cause: str
    first_handoff_s: float | None
    """How long the first request through the pair took, its NIXL handshake included."""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of a gateway's processes that serve clients."""

    state: str
    """`serving`, `starting`, `leaving` (it was asked to stop), `silent` (it did not answer just now), or `ended`."""
    pid: int | None
    num_requests: int
    num_running: int
    num_restarts: int


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`/status`."""

    status: str
    split: str
    version: str
    engines: list[EngineInfo]
    pairs: list[PairInfo]
    num_requests: int
    num_running: int
    num_queued: int
    num_by_place: dict[PrefillPlace, int]
    num_released: int
    num_release_failures: int
    workers: list[WorkerInfo] = []
    """None where the gateway is one process."""


class HandoffRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A handoff's fields, as far as a person may want to see them."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    num_blocks: int
    num_tokens: int | None
    num_cached_on_prefill: int

    @classmethod
    def of(cls, handoff: Handoff) -> HandoffRecord:
        """From the handoff itself."""
        return cls(
            remote_engine_id=handoff.engine_id,
            remote_request_id=handoff.request_id,
            remote_host=handoff.host,
            remote_port=handoff.port,
            num_blocks=handoff.num_blocks,
            num_tokens=handoff.num_tokens,
            num_cached_on_prefill=handoff.num_cached_on_prefill,
        )


class Phases(msgspec.Struct, kw_only=True, gc=False):
    """Seconds spent in each step; None for a step that was not reached."""

    queue_s: float | None = None
    prefill_s: float | None = None
    handoff_s: float | None = None
    first_token_s: float | None = None
    """Streams: from the D leg's last byte out to D's first byte in, which is the pull of the KV and the first token."""
    stream_s: float | None = None
    """Streams: from the first byte to the last."""
    decode_s: float | None = None
    """Whole answers: from the D leg's last byte out to the answer; nobody outside D can tell its parts."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`/requests/ID`: one request, after its end."""

    request_id: str
    path: str
    key_name: str | None
    is_stream: bool
    prefill: str | None
    decode: str | None
    status: int | None
    """What the client was sent; None when it left before."""
    reason: str | None
    place: PrefillPlace
    cause: str
    num_prompt_tokens: int | None
    num_remote_tokens: int | None
    num_output_tokens: int | None
    num_failed_legs: int
    """Legs that failed before this answer or error."""
    phases: Phases
    handoff: HandoffRecord | None
    ended_at: float = 0.0
    """Seconds since 1970."""
    parts: list[str] = []
    """Ids of the calls that a request for several choices or prompts was taken apart into; each has a record of its own."""
