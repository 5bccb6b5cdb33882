"""What is booked of one call while it runs: phases, evidence, status. Becomes response headers and the journal's record.

Knows no engines and no wire form; the exchange says what happened.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdserve.core import Evidence, PrefillPlace, RemotePrefill
from pdserve.protocol.admin import HandoffRecord, Phases, RequestRecord
from pdserve.protocol.usage import judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.core import Decision
    from pdserve.errors import Reason
    from pdserve.gateway.call import Call
    from pdserve.http.server import Headers
    from pdserve.protocol.nixl import Handoff
    from pdserve.protocol.usage import Usage

NOTHING_KNOWN = Evidence(PrefillPlace.UNPROVEN, cause="the request ended before D had given its counts")


class Account:
    """One call's. Times are seconds."""

    def __init__(self, call: Call, *, clock: Callable[[], float]) -> None:
        self._call = call
        self._clock = clock
        self._mark_s = call.received_at_s
        self.phases = Phases()
        self.evidence = NOTHING_KNOWN
        self.usage: Usage | None = None
        self.status: int | None = None
        """What the client was sent."""
        self.reason: Reason | None = None

    def lap(self) -> float:
        """Seconds since the last lap."""
        now_s = self._clock()
        lap_s, self._mark_s = now_s - self._mark_s, now_s
        return lap_s

    @property
    def mark_s(self) -> float:
        """When the last lap was taken."""
        return self._mark_s

    def book(self, usage: Usage | None, *, was_handed: bool) -> None:
        """D's own counts, with a handoff or without."""
        self.usage = usage
        if was_handed:
            self.evidence = judge(usage)
        elif usage is not None:
            known = self.evidence
            self.evidence = Evidence(known.place, usage.prompt_tokens, usage.num_cached_tokens, known.cause)

    def headers(self) -> Headers:
        """pdserve's own, as far as it is known when the answer starts."""
        phases = self.phases
        timing = b"queue;dur=%.2f" % ((phases.queue_s or 0.0) * 1e3)
        if phases.prefill_s is not None:
            timing += b", prefill;dur=%.2f" % (phases.prefill_s * 1e3)
        if phases.handoff_s is not None:
            timing += b", handoff;dur=%.2f" % (phases.handoff_s * 1e3)
        if phases.first_token_s is not None:
            timing += b", first-token;dur=%.2f" % (phases.first_token_s * 1e3)
        if phases.decode_s is not None:
            timing += b", decode;dur=%.2f" % (phases.decode_s * 1e3)
        return [
            (b"x-pdserve-request-id", self._call.request_id.encode()),
            (b"x-pdserve-prefill", self.evidence.place.encode()),
            (b"server-timing", timing),
        ]

    def record(self, decision: Decision | None, handoff: Handoff | None, *, num_failed_legs: int) -> RequestRecord:
        """What the journal keeps."""
        call, evidence = self._call, self.evidence
        return RequestRecord(
            ended_at=time.time(),
            request_id=call.request_id,
            path=str(call.api),
            key_name=call.key_name,
            is_stream=call.facts.is_stream,
            prefill=decision.prefill.name if isinstance(decision, RemotePrefill) else None,
            decode=decision.decode.name if decision is not None else None,
            status=self.status,
            reason=self.reason,
            place=evidence.place,
            cause=evidence.cause,
            num_prompt_tokens=evidence.num_prompt_tokens,
            num_remote_tokens=evidence.num_remote_tokens,
            num_output_tokens=self.usage.completion_tokens if self.usage is not None else None,
            num_failed_legs=num_failed_legs,
            phases=self.phases,
            handoff=HandoffRecord.of(handoff) if handoff is not None else None,
        )
