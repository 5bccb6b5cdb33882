"""The operator's side, on a listener of its own: who the engines are, which pairs are proven, what became of requests.

It tells addresses and drains engines, so it listens on loopback unless told otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST

from pdserve.errors import InvalidRequest, Reason
from pdserve.gateway.app import Router, send_json
from pdserve.gateway.auth import refuse_browsers

if TYPE_CHECKING:
    from pdserve.gateway.operations import Operations
    from pdserve.http.server import Request, Response


_MAX_DIGITS = 6


class AdminApp:
    """What the operator reaches."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

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
        send_json(response, await self._operations.status())

    async def requests(self, request: Request, response: Response) -> None:
        """The newest requests first; `?last=N`, 20 by default."""
        wanted = parse_qs(request.query.decode("latin-1")).get("last", ["20"])[-1]
        if not wanted.isdecimal() or len(wanted) > _MAX_DIGITS:
            raise InvalidRequest(f"last={wanted[:20]!r}: give a number of requests")
        send_json(response, await self._operations.last(int(wanted)))

    async def request(self, request: Request, response: Response) -> None:
        """One request by its id."""
        request_id = _last_part(request)
        record = await self._operations.try_get(request_id)
        if record is None:
            message = f"no request {request_id!r}: it is not at its end yet, or too long ago"
            raise InvalidRequest(message, status=404, reason=Reason.NOT_FOUND)
        send_json(response, record)

    async def metrics(self, _request: Request, response: Response) -> None:
        """Prometheus text."""
        response.send(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], await self._operations.metrics())

    async def drain(self, request: Request, response: Response) -> None:
        """Give an engine no new work; `num_in_flight` and `num_held` of its state tell when it has finished what it had."""
        send_json(response, await self._operations.set_draining(_last_part(request), is_draining=True))

    async def undrain(self, request: Request, response: Response) -> None:
        """Give it work again."""
        send_json(response, await self._operations.set_draining(_last_part(request), is_draining=False))


def _last_part(request: Request) -> str:
    return request.path.rpartition(b"/")[2].decode("latin-1")
