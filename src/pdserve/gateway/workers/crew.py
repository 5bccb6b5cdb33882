"""Keeps the workers: starts them, hands them clients, asks them, replaces one that ends or hangs, and stops them all.

A worker is a process that was started, not forked, and lives in a session of its own: a terminal's Ctrl-C reaches the front
alone, which then tells the workers. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import signal
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pdserve.engine.board import Board, open_shared
from pdserve.errors import LaunchError
from pdserve.gateway.workers import link as wire
from pdserve.gateway.workers.intake import Door, hand_over
from pdserve.protocol.admin import GatewayStatus, WorkerInfo
from pdserve.telemetry.metrics import WORKER_RESTARTS
from pdserve.telemetry.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from pdserve.config import Config
    from pdserve.core import EngineAddress
    from pdserve.gateway.workers.link import Answer, FromFront, FromWorker, Link

ANSWER_TIMEOUT_S = 5.0
"""A worker answers between two requests; one that needs longer hangs, and gets no new clients until it answers."""
ASK_EVERY_S = 2.0
"""Each worker is asked so often, so that its silence is noticed though no operator asks."""
HUNG_S = 60.0
"""A worker that has been silent for so long is killed, and replaced: its clients wait in vain."""
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
_STEADY_S = 60.0
"""A worker that has lived so long did not end of what ended the one before."""
_STOP_EXTRA_S = 10.0
"""Beyond `timeouts.shutdown`, for what a worker does after it: cancel, and release P's blocks."""
_FORCED_S = 5.0
"""A worker that was told not to wait has so long before it is killed."""

_Kind = TypeVar("_Kind", bound="Answer")
_logger = logging.getLogger("pdserve.workers")


class WorkerState(enum.StrEnum):
    """A worker as its front sees it."""

    STARTING = "starting"
    """It gets clients only where no other worker can take them: it knows of no decode engine yet."""
    SERVING = "serving"
    LEAVING = "leaving"
    """It was asked to stop, and lets its requests end."""
    SILENT = "silent"
    """It has not answered its last question in time."""
    ENDED = "ended"


class Place:
    """One of the crew's places, and the worker that has it now."""

    def __init__(self, index: int, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever its state or `takes_clients` changes."""
        self.index = index
        self._on_change = on_change
        self.process: asyncio.subprocess.Process | None = None
        self.num_restarts = 0
        self.report: wire.Report | None = None
        """The last one of the worker that is there."""
        self.past = Tally()
        """What those before it counted, as far as they told."""
        self.num_past_requests = 0
        self._link: Link[FromWorker] | None = None
        self._channel: socket.socket | None = None
        self._questions: deque[asyncio.Future[Answer]] = deque()
        # What is known of the worker that is there
        self.can_be_asked = False
        """It has come up, and not ended; it answers while it leaves too."""
        self._is_ready = False
        self._is_leaving = False
        self._is_silent = False

    def __str__(self) -> str:
        return f"worker {self.index} (pid {self.process.pid})" if self.process is not None else f"worker {self.index}"

    @property
    def state(self) -> WorkerState:
        """As the operator sees it, and whoever looks for one that takes a client."""
        if self._link is None:
            return WorkerState.ENDED
        if self._is_leaving:
            return WorkerState.LEAVING
        if self._is_silent:
            return WorkerState.SILENT
        return WorkerState.SERVING if self._is_ready else WorkerState.STARTING

    @property
    def takes_clients(self) -> bool:
        """Whether it can be given any."""
        return self.can_be_asked and not self._is_silent and self._channel is not None

    def tally(self) -> Tally:
        """What was counted in this place since the gateway's start."""
        total = Tally()
        total.include(self.past.dump())
        if self.report is not None:
            total.include(self.report.counts)
        return total

    def info(self) -> WorkerInfo:
        """For the operator."""
        status = self.report.status if self.report is not None else None
        return WorkerInfo(
            state=self.state,
            pid=self.process.pid if self.process is not None and self._link is not None else None,
            num_requests=self.num_past_requests + (status.num_requests if status is not None else 0),
            num_running=status.num_running if status is not None else 0,
            num_restarts=self.num_restarts,
        )

    def attach(self, process: asyncio.subprocess.Process, link: Link[FromWorker], channel: socket.socket) -> None:
        """A worker was started."""
        self.process, self._link, self._channel = process, link, channel
        self.can_be_asked = self._is_ready = self._is_leaving = self._is_silent = False

    def came_up(self) -> None:
        """It takes clients from now on, if need be."""
        self.can_be_asked = True
        self._on_change()

    def became_ready(self) -> None:
        """It knows of a decode engine."""
        self._is_ready = True
        self._on_change()

    async def detach(self) -> None:
        """It has ended."""
        self.can_be_asked = False
        self.take_no_more()
        for question in self._questions:
            question.cancel()
        self._questions.clear()
        if self.report is not None:
            self.past.include(self.report.counts)
            self.num_past_requests += self.report.status.num_requests
            self.report = None
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        self._on_change()

    def take_no_more(self) -> None:
        """Hand no more clients to it; what lies in the channel it still takes."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def hand_over(self, connection: socket.socket) -> bool:
        """Give it a client."""
        return self._channel is not None and hand_over(self._channel, connection)

    def leave(self) -> None:
        """It has been asked to stop."""
        self._is_leaving = True
        self.take_no_more()
        self._on_change()

    def tell(self, order: FromFront) -> None:
        """Give an order, which nobody answers."""
        if self._link is not None:
            self._link.send(order)

    def dismiss(self) -> None:
        """Ask it to stop. One that is not up yet has nobody to end anything for, and would hear it late."""
        if self.can_be_asked:
            self.leave()
            self.tell(wire.Stop())
        else:
            self.kill()

    def kill(self) -> None:
        """Wait for it no longer."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def put(self, question: FromFront) -> asyncio.Future[Answer]:
        """Its answer, once it comes; cancelled when it never will."""
        assert self._link is not None
        answering: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions.append(answering)
        self._link.send(question)
        return answering

    async def try_ask(self, question: FromFront, kind: type[_Kind]) -> _Kind | None:
        """Its answer; None where it ends first, or does not answer in time. One that is silent is not waited for."""
        answering = self.put(question)
        # A late answer finds its question still in the queue, where the next one's must not be taken for it.
        await asyncio.wait([answering], timeout=0 if self._is_silent else ANSWER_TIMEOUT_S)
        if not answering.done():
            self._hear_nothing()
            return None
        if answering.cancelled():
            return None
        answer = answering.result()
        assert isinstance(answer, kind)
        return answer

    def answered(self, answer: Answer) -> None:
        """The oldest question has its answer."""
        if self._is_silent:
            _logger.warning("%s answers again", self)
            self._is_silent = False
            self._on_change()
        if isinstance(answer, wire.Report):
            self.report = answer
        self._questions.popleft().set_result(answer)

    async def look_after(self) -> None:
        """Ask how it is. Where it is silent, wait until it answers or ends, and kill it when that takes too long."""
        await self.try_ask(wire.AskReport(), wire.Report)
        if not self._is_silent or not self._questions:
            return
        oldest = self._questions[0]
        await asyncio.wait([oldest], timeout=HUNG_S)
        if not oldest.done():
            _logger.error("%s has been silent for %g s more, and is killed", self, HUNG_S)
            self.kill()

    def _hear_nothing(self) -> None:
        if not self._is_silent:
            _logger.warning(
                "%s has not answered for %g s; it gets no new clients until it does", self, ANSWER_TIMEOUT_S
            )
            self._is_silent = True
            self._on_change()

    async def receive(self) -> FromWorker | None:
        """What it says next; None at its end."""
        assert self._link is not None
        return await self._link.receive()


def in_turn(places: Sequence[Place], turn: int) -> list[Place]:
    """Whom to offer a client, one after the other: those that serve, beginning with another one each turn, then the rest."""
    serving = [place for place in places if place.state is WorkerState.SERVING]
    rest = [place for place in places if place.takes_clients and place.state is not WorkerState.SERVING]
    start = turn % len(serving) if serving else 0
    return [*serving[start:], *serving[:start], *rest]


class Crew:
    """All workers, while it is entered: they start meanwhile."""

    def __init__(
        self,
        command: Sequence[str],
        config: Config,
        engines: Sequence[EngineAddress],
        listener: socket.socket,
    ) -> None:
        self._command = command
        self._config = config
        self._engines = engines
        self._descriptor = open_shared(num_engines=len(engines), num_workers=config.gateway.workers)
        self._board = Board.shared(self._descriptor, num_engines=len(engines))
        self._door = Door(listener, self._hand_on)
        self._turn = 0
        self._keeping: list[asyncio.Task[None]] = []
        self._watching: list[asyncio.Task[None]] = []
        self._all_up = asyncio.Event()
        self._stopping = asyncio.Event()
        self.places = [Place(index, self._settle) for index in range(config.gateway.workers)]
        self.draining: set[str] = set()
        """Engines that a worker that comes new must be told of."""
        self.changed = asyncio.Event()
        """Set whenever an engine, a pair or a worker changes state; whoever waits on it clears it."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done only by a fault in here."""

    async def __aenter__(self) -> Self:
        self._keeping = [asyncio.create_task(self._keep(place)) for place in self.places]
        self._watching = [asyncio.create_task(self._watch(place)) for place in self.places]
        for task in (*self._keeping, *self._watching):
            task.add_done_callback(self._done)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def until_up(self) -> None:
        """Wait until every worker can take clients. Raises LaunchError when one of them ends before that."""
        coming_up = asyncio.create_task(self._all_up.wait())
        waited_for: list[asyncio.Future[Any]] = [coming_up, self.failed]
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming_up.cancel()
        if self.failed.done():
            await self.failed

    async def stop(self) -> None:
        """Refuse new clients, let open requests end within the limit, and return when no worker is left."""
        _logger.info("stopping: no new clients; open requests have %g s", self._config.timeouts.shutdown)
        self._stopping.set()
        self._door.close()
        for place in self.places:
            place.dismiss()
        _, late = await asyncio.wait(self._keeping, timeout=self._config.timeouts.shutdown + _STOP_EXTRA_S)
        if late:
            _logger.error("workers that do not end are killed")
            self._kill()
            await asyncio.wait(late)
        for watching in self._watching:
            watching.cancel()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def force_stop(self) -> None:
        """Do not wait for open requests any longer."""
        for place in self.places:
            place.tell(wire.Force())
        asyncio.get_running_loop().call_later(_FORCED_S, self._kill)

    def tell_all(self, order: FromFront) -> None:
        """An order to every worker."""
        for place in self.places:
            place.tell(order)

    async def ask_all(self, question: FromFront, kind: type[_Kind]) -> dict[Place, _Kind | None]:
        """What each worker that can be asked answers; None where it did not in time, or has ended since."""
        asked = [place for place in self.places if place.can_be_asked]
        answers = await asyncio.gather(*(place.try_ask(question, kind) for place in asked))
        return dict(zip(asked, answers, strict=True))

    async def statuses(self) -> list[GatewayStatus]:
        """Of those who serve; of those who start as long as nobody serves yet."""
        reports = await self.ask_all(wire.AskReport(), wire.Report)
        told = [(place, report.status) for place, report in reports.items() if report is not None]
        serving = [status for place, status in told if place.state is not WorkerState.STARTING]
        return serving or [status for _, status in told]

    def tally(self) -> Tally:
        """What all workers have counted, those that are gone too."""
        return Tally.joined(place.tally().dump() for place in self.places)

    def _kill(self) -> None:
        for place in self.places:
            place.kill()

    def _hand_on(self, connection: socket.socket) -> bool:
        self._turn += 1
        return any(place.hand_over(connection) for place in in_turn(self.places, self._turn))

    def _settle(self) -> None:
        """A worker has come or gone, or is heard or not heard."""
        if any(place.takes_clients for place in self.places):
            self._door.open()
        else:
            self._door.shut()
        if all(place.can_be_asked for place in self.places):
            self._all_up.set()
        self.changed.set()

    def _done(self, task: asyncio.Task[None]) -> None:
        if self.failed.done() or task.cancelled():
            return
        exc = task.exception()
        if exc is not None:
            self.failed.set_exception(exc)

    async def _watch(self, place: Place) -> None:
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            if place.can_be_asked:
                await place.look_after()

    async def _keep(self, place: Place) -> None:
        """One worker after the other, until the stop."""
        delay_s = _FIRST_DELAY_S
        while True:
            started_at_s = time.monotonic()
            has_served = await self._employ(place)
            if self._stopping.is_set():
                return
            status = _told_status(place)
            if not has_served and place.num_restarts == 0:
                raise LaunchError(f"{place} {status} before it served; what it said stands above")
            if time.monotonic() - started_at_s >= _STEADY_S:
                delay_s = _FIRST_DELAY_S
            place.num_restarts += 1
            place.past.count(WORKER_RESTARTS)
            _logger.error("%s %s; another one starts in %g s", place, status, delay_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
                    return
            delay_s = min(delay_s * 2, _MAX_DELAY_S)

    async def _employ(self, place: Place) -> bool:
        """Start a worker and follow it to its end. Returns whether it has served."""
        await self._hire(place)
        assert place.process is not None
        has_served = False
        while (message := await place.receive()) is not None:
            match message:
                case wire.Up():
                    has_served = True
                    for name in self.draining:
                        place.put(wire.SetDraining(name, is_draining=True))
                    place.came_up()
                case wire.Ready():
                    place.became_ready()
                    _logger.info("%s serves", place)
                case wire.Changed():
                    self.changed.set()
                case wire.Leaving():
                    place.leave()
                case wire.Farewell():
                    place.report = message.report
                case _:
                    place.answered(message)
        await place.process.wait()
        self._board.forget(place.index)
        await place.detach()
        return has_served

    async def _hire(self, place: Place) -> None:
        ours, theirs = socket.socketpair()
        channel, intake = socket.socketpair()
        channel.setblocking(False)
        with theirs, intake:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(place.index),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), intake.fileno(), self._descriptor],
                start_new_session=True,
            )
            link = await wire.link_to_worker(ours)
            place.attach(process, link, channel)
            begin = wire.Begin(
                config=self._config,
                engines=list(self._engines),
                worker=place.index,
                num_workers=len(self.places),
                board_descriptor=self._descriptor,
                intake_descriptor=intake.fileno(),
            )
        place.tell(begin)
        if self._stopping.is_set():  # It came while the others were told.
            place.dismiss()


def _told_status(place: Place) -> str:
    assert place.process is not None
    code = place.process.returncode
    assert code is not None
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
