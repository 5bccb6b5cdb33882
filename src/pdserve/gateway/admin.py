"""The operator's side, on a listener of its own: who the engines are, which pairs are proven, what became of requests.

It tells addresses and drains engines, so it listens on loopback unless told otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST

from pdserve import __version__
from pdserve.errors import InvalidRequest, Reason
from pdserve.gateway.app import Router, health_of, send_json
from pdserve.gateway.auth import refuse_browsers
from pdserve.protocol.admin import EngineInfo, GatewayStatus, PairInfo
from pdserve.telemetry.metrics import RELEASES

if TYPE_CHECKING:
    from pdserve.core import EngineName
    from pdserve.engine.pool import Pair
    from pdserve.gateway.proxy import Proxy
    from pdserve.http.server import Request, Response


_MAX_DIGITS = 6


class AdminApp:
    """What the operator reaches."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._pool = proxy.pool
        self._journal = proxy.journal

    def router(self) -> Router:
        """All paths of the operator's side."""
        return Router(
            {
                b"/status": (b"GET", self.status),
                b"/requests": (b"GET", self.requests),
                b"/requests/*": (b"GET", self.request),
                b"/metrics": (b"GET", self.metrics),
                b"/drain/*": (b"POST", self.drain),
                b"/undrain/*": (b"POST", self.undrain),
            },
            guard=refuse_browsers,
        )

    async def status(self, _request: Request, response: Response) -> None:
        """Engines, pairs and counts."""
        health, tally, admission = health_of(self._pool), self._proxy.tally, self._proxy.admission
        send_json(
            response,
            GatewayStatus(
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

    async def metrics(self, _request: Request, response: Response) -> None:
        """Prometheus text."""
        admission = self._proxy.admission
        gauges = {
            "pdserve_requests_running": ("Requests under way.", admission.num_running),
            "pdserve_requests_queued": ("Requests that wait for their turn.", admission.num_queued),
        }
        response.send(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], self._proxy.tally.render(gauges))

    async def drain(self, request: Request, response: Response) -> None:
        """Give an engine no new work; `num_in_flight` and `num_held` of its state tell when it has finished what it had."""
        self._set_draining(request, response, is_draining=True)

    async def undrain(self, request: Request, response: Response) -> None:
        """Give it work again."""
        self._set_draining(request, response, is_draining=False)

    def _set_draining(self, request: Request, response: Response, *, is_draining: bool) -> None:
        shown = request.path.rpartition(b"/")[2].decode("latin-1")
        names = {str(name): name for name in self._pool.names()}
        if shown not in names:
            message = f"there is no engine {shown[:64]!r}; there are {', '.join(names)}"
            raise InvalidRequest(message, status=404, reason=Reason.NOT_FOUND)
        self._pool.set_draining(names[shown], is_draining=is_draining)
        send_json(response, self._engine_info(names[shown]))

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
            num_in_flight=client.num_in_flight,
            num_held=self._pool.num_held(name),
        )


def _pair_info(pair: Pair) -> PairInfo:
    return PairInfo(
        prefill=pair.prefill.name,
        decode=pair.decode.name,
        state=pair.state,
        cause=pair.cause,
        first_handoff_s=pair.first_handoff_s,
    )
