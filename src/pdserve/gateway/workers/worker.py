"""A worker: a whole gateway, whose clients a front accepts, and which says to the front what an operator wants to know."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import TYPE_CHECKING

import msgspec

from pdserve.engine.board import Board
from pdserve.gateway.app import health_of
from pdserve.gateway.auth import read_credentials
from pdserve.gateway.service import running_gateway
from pdserve.gateway.workers import link as wire
from pdserve.gateway.workers.intake import Intake

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config import Config
    from pdserve.gateway.service import Gateway
    from pdserve.gateway.workers.link import FromFront, Link


async def serve_worker(control: socket.socket, environ: Mapping[str, str], *, max_clients: int | None) -> None:
    """Serve until the front says stop or is gone, or a signal comes; then drain within `timeouts.shutdown`."""
    link = await wire.link_to_front(control)
    begin = await link.receive()
    if begin is None:
        return
    assert isinstance(begin, wire.Begin)
    config = share_of(begin.config, worker=begin.worker, num_workers=begin.num_workers)
    serving = running_gateway(
        config,
        begin.engines,
        (None, None),
        credentials=read_credentials(config, environ),
        max_clients=max_clients,
        board=Board.shared(begin.board_descriptor, num_engines=len(begin.engines), worker=begin.worker),
    )
    async with serving as gateway:
        worker = _Worker(gateway, link, Intake(socket.socket(fileno=begin.intake_descriptor), gateway.client.take))
        await worker.serve()
    await worker.farewell()


def share_of(config: Config, *, worker: int, num_workers: int) -> Config:
    """One worker's configuration. Seats and queue are dealt out, so that all together have what the configuration says."""
    admission = config.admission
    share = msgspec.structs.replace(
        admission,
        max_concurrent=_dealt(admission.max_concurrent, worker, num_workers),
        max_queued=_dealt(admission.max_queued, worker, num_workers),
    )
    return msgspec.structs.replace(config, admission=share)


def _dealt(total: int, worker: int, num_workers: int) -> int:
    return total // num_workers + (worker < total % num_workers)


class _Worker:
    def __init__(self, gateway: Gateway, link: Link[FromFront], intake: Intake) -> None:
        self._gateway = gateway
        self._link = link
        self._intake = intake
        self._stopping = asyncio.Event()
        self._is_told = False
        """The stop was the front's: it need not hear of it."""
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self) -> None:
        """Until a stop. Raises what ended the watch over the engines."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._gateway.renew)
        self._link.send(wire.Up())
        self._tasks = [asyncio.create_task(self._obey()), asyncio.create_task(self._tell_changes())]
        stopping = asyncio.create_task(self._stopping.wait())
        # A fault in obeying would leave a worker that nobody can stop.
        await asyncio.wait([stopping, self._gateway.watching, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in (self._gateway.watching, *self._tasks):
            if task.done():
                await task
        if not self._is_told:
            self._link.send(wire.Leaving())
        # The front accepted these for this worker, and to the client they are connected.
        await self._intake.closed.wait()

    async def farewell(self) -> None:
        """All that was counted, drained requests included."""
        for task in self._tasks:
            task.cancel()
        self._link.send(wire.Farewell(await self._report()))
        await self._link.close()

    async def _obey(self) -> None:
        """Answer questions and follow orders, also while the gateway drains; ends when the front says so by its end."""
        while (message := await self._link.receive()) is not None:
            match message:
                case wire.Renew():
                    self._gateway.renew()
                case wire.Stop():
                    self._stop()
                case wire.Force():
                    self._gateway.force_stop()
                case _:
                    self._link.send(await self._answer(message))
                    await self._link.flush()
        self._stop()
        await asyncio.Event().wait()

    def _stop(self) -> None:
        self._is_told = True
        self._stopping.set()

    async def _answer(self, question: FromFront) -> wire.Answer:
        operations = self._gateway.operations
        match question:
            case wire.AskReport():
                return await self._report()
            case wire.AskLast():
                return wire.Records(await operations.last(question.num_records))
            case wire.AskRecord():
                record = await operations.try_get(question.request_id)
                return wire.Records([] if record is None else [record])
            case wire.SetDraining():
                return wire.Engine(await operations.set_draining(question.name, is_draining=question.is_draining))
            case _:
                raise AssertionError(question)

    async def _report(self) -> wire.Report:
        operations = self._gateway.operations
        return wire.Report(await operations.status(), operations.tally.dump())

    async def _tell_changes(self) -> None:
        is_ready = False
        while True:
            await self._gateway.changed.wait()
            self._gateway.changed.clear()
            if not is_ready and health_of(self._gateway.pool)["status"] != "starting":
                is_ready = True
                self._link.send(wire.Ready())
            self._link.send(wire.Changed())
