"""The operator's side, on a listener of its own: who the engines are, which pairs are proven, what became of requests.

Read only. It tells addresses, so it listens on loopback unless told otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from pdserve import __version__
from pdserve.errors import InvalidRequest, Reason
from pdserve.gateway.app import Router, health_of, send_json
from pdserve.protocol.admin import EngineInfo, GatewayStatus, PairInfo

if TYPE_CHECKING:
    from pdserve.core import EngineName
    from pdserve.engine.pool import EnginePool, Pair
    from pdserve.gateway.journal import Journal
    from pdserve.http.server import Request, Response


_MAX_DIGITS = 6


class AdminApp:
    """What the operator reaches."""

    def __init__(self, pool: EnginePool, journal: Journal) -> None:
        self._pool = pool
        self._journal = journal

    def router(self) -> Router:
        """All paths of the operator's side."""
        return Router(
            {
                b"/status": (b"GET", self.status),
                b"/requests": (b"GET", self.requests),
                b"/requests/*": (b"GET", self.request),
            }
        )

    async def status(self, _request: Request, response: Response) -> None:
        """Engines, pairs and counts."""
        health = health_of(self._pool)
        send_json(
            response,
            GatewayStatus(
                status=health["status"],
                split=health["split"],
                version=__version__,
                engines=[self._engine_info(name) for name in self._pool.names()],
                pairs=[_pair_info(pair) for pair in self._pool.pairs],
                num_requests=self._journal.num_requests,
                num_by_place=self._journal.num_by_place,
                num_released=self._journal.num_released,
                num_release_failures=self._journal.num_release_failures,
            ),
        )

    async def requests(self, request: Request, response: Response) -> None:
        """The newest requests first; `?last=N`, 20 by default."""
        wanted = parse_qs(request.query.decode("latin-1")).get("last", ["20"])[-1]
        if not wanted.isdecimal() or len(wanted) > _MAX_DIGITS:
            raise InvalidRequest(f"last={wanted[:20]!r}: give a number of requests")
        send_json(response, self._journal.last(int(wanted)))

    async def request(self, request: Request, response: Response) -> None:
        """One request by its id."""
        request_id = request.path.rpartition(b"/")[2].decode("latin-1")
        record = self._journal.try_get(request_id)
        if record is None:
            message = f"no request {request_id!r}: it is not at its end yet, or too long ago"
            raise InvalidRequest(message, status=404, reason=Reason.NOT_FOUND)
        send_json(response, record)

    def _engine_info(self, name: EngineName) -> EngineInfo:
        client = self._pool.client(name)
        state, cause = self._pool.state_of(name)
        return EngineInfo(
            name=name,
            role=client.address.role,
            url=client.address.url,
            state=state,
            cause=cause,
            num_in_flight=client.num_in_flight,
        )


def _pair_info(pair: Pair) -> PairInfo:
    return PairInfo(
        prefill=pair.prefill.name,
        decode=pair.decode.name,
        state=pair.state,
        cause=pair.cause,
        first_handoff_s=pair.first_handoff_s,
    )
