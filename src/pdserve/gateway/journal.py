"""What became of the last requests: one frozen record each, bounded, in memory, for the admin listener."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pdserve.core import PrefillPlace

if TYPE_CHECKING:
    from pdserve.protocol.admin import RequestRecord

MAX_RECORDS = 1024
_ANSWERED = 200


class Journal:
    """The last records, and counts since the start."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self.num_requests = 0
        self.num_by_place = dict.fromkeys(PrefillPlace, 0)
        self.num_released = 0
        self.num_release_failures = 0

    def add(self, record: RequestRecord) -> None:
        """Keep a record; the oldest makes room."""
        self.num_requests += 1
        if record.status == _ANSWERED:
            self.num_by_place[record.place] += 1
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
