"""What became of the last calls: one frozen record each, bounded, in memory, for the admin listener.

A request for several choices or prompts has a record too, beside those of its parts.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pdserve.core import WEAKEST_FIRST, PrefillPlace
from pdserve.protocol.admin import Phases, RequestRecord
from pdserve.telemetry.metrics import PREFILLS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.errors import RequestError
    from pdserve.gateway.call import Call
    from pdserve.telemetry.tally import Tally

MAX_RECORDS = 1024
_ANSWERED = 200


class Journal:
    """The last records, and counts since the start."""

    def __init__(self, tally: Tally) -> None:
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._tally = tally
        self.num_requests = 0

    @property
    def num_by_place(self) -> dict[PrefillPlace, int]:
        """Answered calls by where the prompt was computed."""
        return {place: self._tally.value(PREFILLS, place) for place in PrefillPlace}

    def add(self, record: RequestRecord) -> None:
        """Keep a record; the oldest makes room."""
        self.num_requests += 1
        if record.status == _ANSWERED:
            self._tally.count(PREFILLS, record.place)
        self._keep(record)

    def add_parts(self, call: Call, error: RequestError | None) -> None:
        """Keep the record of a request whose parts have records already."""
        prefix = f"{call.request_id}-"
        parts = [record for name, record in self._records.items() if name.startswith(prefix)]
        if parts:
            self._keep(_record_of_parts(call, parts, error))

    def _keep(self, record: RequestRecord) -> None:
        self._records[record.request_id] = record
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def try_get(self, request_id: str) -> RequestRecord | None:
        """A record by its request's id."""
        return self._records.get(request_id)

    def last(self, num_records: int) -> list[RequestRecord]:
        """The newest records, newest first."""
        newest_first = reversed(self._records.values())
        return [record for _, record in zip(range(num_records), newest_first, strict=False)]


def _record_of_parts(call: Call, parts: Sequence[RequestRecord], error: RequestError | None) -> RequestRecord:
    """The weakest proof of all parts, and their sums."""
    weakest = min(parts, key=lambda part: WEAKEST_FIRST.index(part.place))
    statuses = {part.status for part in parts}
    return RequestRecord(
        request_id=call.request_id,
        path=str(call.api),
        key_name=call.key_name,
        is_stream=call.facts.is_stream,
        prefill=None,
        decode=None,
        status=error.status if error is not None else statuses.pop() if len(statuses) == 1 else None,
        reason=error.reason if error is not None else None,
        place=weakest.place,
        cause=weakest.cause,
        num_prompt_tokens=_sum(part.num_prompt_tokens for part in parts),
        num_remote_tokens=_sum(part.num_remote_tokens for part in parts),
        num_output_tokens=_sum(part.num_output_tokens for part in parts),
        num_failed_legs=sum(part.num_failed_legs for part in parts),
        phases=Phases(),
        handoff=None,
        ended_at=max(part.ended_at for part in parts),
        parts=[part.request_id for part in parts],
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
