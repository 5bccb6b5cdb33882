"""What an operator may ask of a gateway and do to it, whatever the gateway is made of: one process, or several workers.

The admin listener (admin.py) puts it into HTTP. Knows no HTTP itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pdserve import __version__
from pdserve.errors import InvalidRequest, Reason
from pdserve.gateway.app import health_of
from pdserve.protocol.admin import EngineInfo, GatewayStatus, PairInfo
from pdserve.telemetry.metrics import RELEASES

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.core import EngineName
    from pdserve.engine.pool import Pair
    from pdserve.gateway.proxy import Proxy
    from pdserve.protocol.admin import RequestRecord
    from pdserve.telemetry.tally import Tally


class Operations(Protocol):
    """The seam between the admin listener and what it speaks for."""

    async def status(self) -> GatewayStatus:
        """Engines, pairs and counts."""

    async def last(self, num_records: int) -> list[RequestRecord]:
        """The newest records, newest first."""

    async def try_get(self, request_id: str) -> RequestRecord | None:
        """A record by its request's id."""

    async def metrics(self) -> bytes:
        """Prometheus text."""

    async def set_draining(self, name: str, *, is_draining: bool) -> EngineInfo:
        """Give an engine no new work, or give it work again. Raises InvalidRequest, 404, where there is none of that name."""


class LocalOperations:
    """Of a gateway in this process."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._pool = proxy.pool
        self._journal = proxy.journal

    @property
    def tally(self) -> Tally:
        """All counts."""
        return self._proxy.tally

    async def status(self) -> GatewayStatus:
        """Engines, pairs and counts."""
        health, tally, admission = health_of(self._pool), self._proxy.tally, self._proxy.admission
        return GatewayStatus(
            status=health["status"],
            split=health["split"],
            version=__version__,
            engines=[self._engine_info(name) for name in self._pool.names()],
            pairs=[_pair_info(pair) for pair in self._pool.pairs],
            num_requests=self._journal.num_requests,
            num_running=admission.num_running,
            num_queued=admission.num_queued,
            num_by_place=self._journal.num_by_place,
            num_released=tally.value(RELEASES, "released"),
            num_release_failures=tally.value(RELEASES, "failed"),
        )

    async def last(self, num_records: int) -> list[RequestRecord]:
        """The newest records, newest first."""
        return self._journal.last(num_records)

    async def try_get(self, request_id: str) -> RequestRecord | None:
        """A record by its request's id."""
        return self._journal.try_get(request_id)

    async def metrics(self) -> bytes:
        """Prometheus text."""
        admission = self._proxy.admission
        return render_metrics(
            self._proxy.tally, num_running=admission.num_running, num_queued=admission.num_queued, num_workers=1
        )

    async def set_draining(self, name: str, *, is_draining: bool) -> EngineInfo:
        """Give an engine no new work, or give it work again. Raises InvalidRequest."""
        known = find_engine(name, self._pool.names())
        self._pool.set_draining(known, is_draining=is_draining)
        return self._engine_info(known)

    def _engine_info(self, name: EngineName) -> EngineInfo:
        client = self._pool.client(name)
        state, cause = self._pool.state_of(name)
        return EngineInfo(
            name=name,
            role=client.address.role,
            url=client.address.url,
            state=state,
            cause=cause,
            breaker=self._pool.breaker_state(name),
            num_in_flight=self._pool.num_in_flight(name),
            num_held=self._pool.num_held(name),
        )


def find_engine(shown: str, names: Collection[EngineName]) -> EngineName:
    """The engine that is called so. Raises InvalidRequest, 404."""
    for name in names:
        if name == shown:
            return name
    message = f"there is no engine {shown[:64]!r}; there are {', '.join(names)}"
    raise InvalidRequest(message, status=404, reason=Reason.NOT_FOUND)


def render_metrics(tally: Tally, *, num_running: int, num_queued: int, num_workers: int) -> bytes:
    """Prometheus text: all counts, and what is so at this moment."""
    return tally.render(
        {
            "pdserve_requests_running": ("Requests under way.", num_running),
            "pdserve_requests_queued": ("Requests that wait for their turn.", num_queued),
            "pdserve_workers": ("Processes that serve clients.", num_workers),
        }
    )


def _pair_info(pair: Pair) -> PairInfo:
    return PairInfo(
        prefill=pair.prefill.name,
        decode=pair.decode.name,
        state=pair.state,
        cause=pair.cause,
        first_handoff_s=pair.first_handoff_s,
    )
