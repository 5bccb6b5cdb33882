"""What a fault is: a small value that changes one step of a request. The steps, and what a fault may touch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pdserve.http.server import Response
    from pdserve.sim.engine import Engine
    from pdserve.sim.handoff import Params
    from pdserve.sim.job import Job
    from pdserve.sim.wire import Wire


class Victim(Protocol):
    """What a fault may touch besides the request itself."""

    @property
    def engine(self) -> Engine:
        """The engine; another one after a restart."""

    def die(self) -> None:
        """Close every socket at once, as a killed process does."""

    def begin_restart(self) -> None:
        """Die and come back, while others go on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Changes nothing; every fault overrides the steps that it is about, which are here in their order."""

    def change_params(self, params: Params | None) -> Params | None:
        """What the engine is told of `kv_transfer_params`."""
        return params

    async def before_admission(self, victim: Victim) -> None:
        """Before the engine hears of the request. May raise Refused and EngineDead."""

    def change_job(self, job: Job) -> Job:
        """What the engine is asked for."""
        return job

    async def before_output(self, number: int) -> None:
        """Before the engine's output of that number (from 0) goes into the answer. May raise GenerationFailed."""

    def change_handoff(self, handoff: Params, victim: Victim) -> Params | None:
        """What the client is told of the handoff."""
        del victim
        return handoff

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        """What the answer is written to."""
        del response, victim
        return wire
