"""What several workers say of themselves, as one gateway says it: the worst of their states, and the sums of their counts.

Pure. Each worker looks at the engines by itself, so that for a while one may know what another does not know yet.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import msgspec

from pdserve import __version__
from pdserve.core import PrefillPlace
from pdserve.engine.breaker import BreakerState
from pdserve.engine.pool import EngineState, PairState
from pdserve.protocol.admin import EngineInfo, GatewayStatus
from pdserve.telemetry.metrics import PREFILLS, RELEASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.core import EngineAddress
    from pdserve.protocol.admin import PairInfo, RequestRecord, WorkerInfo
    from pdserve.telemetry.tally import Tally

_STATUSES = ("starting", "warning", "ok")
_ENGINE_STATES = (
    EngineState.DOWN,
    EngineState.STARTING,
    EngineState.PROVING,
    EngineState.DRAINING,
    EngineState.READY,
)
_PAIR_STATES = (
    PairState.FAILING,
    PairState.NOT_MOVING,
    PairState.UNTRIED,
    PairState.UNPROVEN,
    PairState.PROVEN,
)
_BREAKER_STATES = (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED)
"""Each the worst first."""


def merge_status(
    statuses: Sequence[GatewayStatus],
    workers: Sequence[WorkerInfo],
    tally: Tally,
    addresses: Iterable[EngineAddress],
) -> GatewayStatus:
    """One status. The tally has what all workers counted, those that are gone too."""
    health = min((status.status for status in statuses), key=_STATUSES.index, default="starting")
    if health == "ok" and any(worker.state != "serving" for worker in workers):
        health = "warning"
    is_proven = bool(statuses) and all(status.split == "proven" for status in statuses)
    return GatewayStatus(
        status=health,
        split="proven" if is_proven else "unproven",
        version=__version__,
        engines=[merge_engine(infos) for infos in zip(*(status.engines for status in statuses), strict=True)]
        or [_unknown(address) for address in addresses],
        pairs=[_merge_pair(infos) for infos in zip(*(status.pairs for status in statuses), strict=True)],
        num_requests=sum(worker.num_requests for worker in workers),
        num_running=sum(status.num_running for status in statuses),
        num_queued=sum(status.num_queued for status in statuses),
        num_by_place={place: tally.value(PREFILLS, place) for place in PrefillPlace},
        num_released=tally.value(RELEASES, "released"),
        num_release_failures=tally.value(RELEASES, "failed"),
        workers=list(workers),
    )


def merge_engine(infos: Sequence[EngineInfo]) -> EngineInfo:
    """One engine as all workers see it."""
    worst = min(infos, key=lambda info: _ENGINE_STATES.index(EngineState(info.state)))
    return msgspec.structs.replace(
        worst,
        breaker=min((info.breaker for info in infos), key=lambda state: _BREAKER_STATES.index(BreakerState(state))),
        num_in_flight=sum(info.num_in_flight for info in infos),
        num_held=sum(info.num_held for info in infos),
    )


def merge_records(newest: Iterable[Sequence[RequestRecord]], num_records: int) -> list[RequestRecord]:
    """Each worker's records are newest first; so are these."""
    merged = heapq.merge(*newest, key=lambda record: -record.ended_at)
    return list(itertools.islice(merged, num_records))


def _merge_pair(infos: Sequence[PairInfo]) -> PairInfo:
    worst = min(infos, key=lambda info: _PAIR_STATES.index(PairState(info.state)))
    slowest_s = max((info.first_handoff_s for info in infos if info.first_handoff_s is not None), default=None)
    return msgspec.structs.replace(worst, first_handoff_s=slowest_s)


def _unknown(address: EngineAddress) -> EngineInfo:
    return EngineInfo(
        name=address.name,
        role=address.role,
        url=address.url,
        state=EngineState.STARTING,
        cause="no worker of the gateway serves",
        breaker=BreakerState.CLOSED,
        num_in_flight=0,
        num_held=0,
    )
