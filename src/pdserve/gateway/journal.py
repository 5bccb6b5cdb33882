"""What became of the last requests: one frozen record each, bounded, in memory, for the admin listener."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pdserve.core import PrefillPlace
from pdserve.telemetry.metrics import PREFILLS

if TYPE_CHECKING:
    from pdserve.protocol.admin import RequestRecord
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
            self._tally.count(PREFILLS, record.place.value)
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
