"""The front of a gateway of several processes: has the port and the workers, and is the whole gateway to an operator."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.config import http_url
from pdserve.errors import Reason, RequestError
from pdserve.gateway.admin import AdminApp
from pdserve.gateway.operations import find_engine, render_metrics
from pdserve.gateway.workers import link as wire
from pdserve.gateway.workers.crew import ANSWER_TIMEOUT_S, Crew, WorkerState
from pdserve.gateway.workers.merge import merge_engine, merge_records, merge_status
from pdserve.http.listener import Listener

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import AsyncIterator, Sequence

    from pdserve.config import Config
    from pdserve.core import EngineAddress
    from pdserve.protocol.admin import EngineInfo, GatewayStatus, RequestRecord


class CrewOperations:
    """Of a gateway of several workers: asks each of them, and adds up."""

    def __init__(self, crew: Crew, engines: Sequence[EngineAddress]) -> None:
        self._crew = crew
        self._engines = engines

    async def status(self) -> GatewayStatus:
        """Engines, pairs and counts; the workers too."""
        statuses = await self._crew.statuses()
        workers = [place.info() for place in self._crew.places]
        return merge_status(statuses, workers, self._crew.tally(), self._engines)

    async def last(self, num_records: int) -> list[RequestRecord]:
        """The newest records, newest first. Those of a worker that is gone went with it."""
        answers = await self._crew.ask_all(wire.AskLast(num_records), wire.Records)
        return merge_records([answer.records for answer in answers.values() if answer is not None], num_records)

    async def try_get(self, request_id: str) -> RequestRecord | None:
        """A record by its request's id: one worker has it."""
        answers = await self._crew.ask_all(wire.AskRecord(request_id), wire.Records)
        return next((record for answer in answers.values() if answer is not None for record in answer.records), None)

    async def metrics(self) -> bytes:
        """Prometheus text. No count ever falls: of a worker that is gone its last report stays."""
        status = await self.status()
        return render_metrics(
            self._crew.tally(),
            num_running=status.num_running,
            num_queued=status.num_queued,
            num_workers=sum(worker.state == WorkerState.SERVING for worker in status.workers),
        )

    async def set_draining(self, name: str, *, is_draining: bool) -> EngineInfo:
        """In every worker, and in those that come. Raises InvalidRequest, and RequestError unless all took it."""
        known = find_engine(name, [address.name for address in self._engines])
        if is_draining:
            self._crew.draining.add(known)
        else:
            self._crew.draining.discard(known)
        answers = await self._crew.ask_all(wire.SetDraining(known, is_draining), wire.Engine)
        silent = [str(place) for place, answer in answers.items() if answer is None and place.can_be_asked]
        if silent:
            message = f"{', '.join(silent)} did not answer within {ANSWER_TIMEOUT_S:g} s; all others took it. Ask again"
            raise RequestError(message, status=500, reason=Reason.INTERNAL)
        infos = [answer.info for answer in answers.values() if answer is not None]
        if not infos:
            message = "no worker serves just now; those that come will be told"
            raise RequestError(message, status=500, reason=Reason.INTERNAL)
        return merge_engine(infos)


@dataclass(frozen=True, slots=True)
class Front:
    """A running gateway of several workers."""

    operations: CrewOperations
    crew: Crew
    admin: Listener
    url: str

    @property
    def admin_url(self) -> str:
        """Where the operator connects."""
        return self.admin.url

    @property
    def watching(self) -> asyncio.Future[None]:
        """Ends only by a fault."""
        return self.crew.failed

    @property
    def changed(self) -> asyncio.Event:
        """Set whenever an engine, a pair or a worker changes state; whoever waits on it clears it."""
        return self.crew.changed

    async def until_up(self) -> None:
        """Wait until every worker can take clients. Raises LaunchError when one of them ends before that."""
        await self.crew.until_up()

    def force_stop(self) -> None:
        """Do not wait for open requests any longer."""
        self.crew.force_stop()

    def renew(self) -> None:
        """Every worker reads the clients' keys and the certificate again."""
        self.crew.tell_all(wire.Renew())


@contextlib.asynccontextmanager
async def running_front(
    config: Config,
    engines: Sequence[EngineAddress],
    sockets: tuple[socket.socket, socket.socket],
    *,
    command: Sequence[str],
) -> AsyncIterator[Front]:
    """Serve until the block is left; then drain within `timeouts.shutdown`. The workers come up meanwhile.

    `command` starts a worker; its number and the descriptor of its link are appended.
    """
    host, port = sockets[0].getsockname()[:2]
    crew = Crew(command, config, engines, sockets[0])
    operations = CrewOperations(crew, engines)
    admin = Listener(AdminApp(operations).router(), sockets[1], shutdown_s=1)
    async with admin, crew:
        yield Front(operations, crew, admin, http_url(host, port, is_tls=config.gateway.is_tls))
