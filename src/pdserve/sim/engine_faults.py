"""Faults of the engine: handoffs, transfers, refusals, deaths. What happens to the answer on its way is in wire_faults.py.

What vLLM does by itself when it is treated badly (stale and half handoffs, dead cores) needs no fault: handoff.py, engine.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.sim.bad_wires import LastWordWire
from pdserve.sim.bare import BareConnection
from pdserve.sim.engine import EngineDead, GenerationFailed
from pdserve.sim.fault import Fault
from pdserve.sim.refusal import Refused, queue_full

if TYPE_CHECKING:
    from pdserve.http.server import Response
    from pdserve.sim.fault import Victim
    from pdserve.sim.handoff import Params
    from pdserve.sim.job import Job
    from pdserve.sim.wire import Wire

_DISCARD_PORT = 9
"""Nobody listens there, and connecting is refused at once."""
_REFUSALS = {
    400: ("BadRequestError", "injected"),
    404: ("NotFoundError", "The model `injected` does not exist."),
    422: ("UnprocessableEntityError", "injected"),
    429: ("Too Many Requests", "injected: vLLM never says this, but what stands in front of it may"),
    500: ("InternalServerError", "Internal server error"),
    501: ("NotImplementedError", "injected"),
}
"""With vLLM's types and words where it has some (entrypoints/serve/exception_handling, vllm/exceptions.py)."""


@dataclass(frozen=True, slots=True)
class AnswerWithoutHandoff(Fault):
    """P prefills and keeps the blocks, but does not say where they are."""

    def change_handoff(self, handoff: Params, victim: Victim) -> Params | None:
        del handoff, victim
        return None


@dataclass(frozen=True, slots=True)
class HalfHandoff(Fault):
    """P's handoff lacks a key."""

    key: str = "remote_port"

    def change_handoff(self, handoff: Params, victim: Victim) -> Params | None:
        del victim
        return {key: value for key, value in handoff.items() if key != self.key}


@dataclass(frozen=True, slots=True)
class Stale(Fault):
    """P's lease ends the moment it has answered, and another request's KV takes its place."""

    def change_handoff(self, handoff: Params, victim: Victim) -> Params | None:
        victim.engine.let_lapse(handoff["remote_request_id"])
        return handoff


@dataclass(frozen=True, slots=True)
class IgnoreHandoff(Fault):
    """D computes alone, and answers as if nothing were amiss. P's blocks stay until the lease ends."""

    def change_params(self, params: Params | None) -> Params | None:
        del params
        return None


@dataclass(frozen=True, slots=True)
class RefuseHandshake(Fault):
    """D does not reach P's side channel: 500 after the handshake's timeout, in a stream whatever the API has for an error.

    Matters on D only. P hears nothing either, and keeps the blocks until its lease ends or somebody else releases them.
    """

    def change_params(self, params: Params | None) -> Params | None:
        return params if params is None or "remote_port" not in params else {**params, "remote_port": _DISCARD_PORT}


@dataclass(frozen=True, slots=True)
class NeverLoad(Fault):
    """D waits for KV that never comes: a stream's head is out, and nothing follows.

    Matters on D only. Its heartbeats keep P's lease alive as long as the client stays. D's own blocks are free when the client
    leaves; the like with blocks that are never free again is a handoff without `remote_host`.
    """

    def change_job(self, job: Job) -> Job:
        return dataclasses.replace(job, never_loads=True)


@dataclass(frozen=True, slots=True)
class ComeLate(Fault):
    """D comes to the request so much later, and its heartbeats are lost: P's lease may have ended by then.

    Matters on D only. Whoever was given P's blocks meanwhile shows in the text. For `beats_s` before that it keeps the lease.
    """

    delay_s: float = 1.0
    beats_s: float = 0.0

    def change_job(self, job: Job) -> Job:
        return dataclasses.replace(job, comes_late_s=self.delay_s, beats_before_s=self.beats_s)


@dataclass(frozen=True, slots=True)
class NeverAnswer(Fault):
    """Take the request, and no more."""

    async def before_admission(self, victim: Victim) -> None:
        del victim
        await asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True)
class ErrorStatus(Fault):
    """Refuse before admission; D tells P that its blocks may go."""

    status: int = 503

    async def before_admission(self, victim: Victim) -> None:
        del victim
        if self.status == 503:  # noqa: PLR2004
            raise queue_full()
        kind, message = _REFUSALS.get(self.status, ("InternalServerError", "injected"))
        raise Refused(self.status, kind, message)


@dataclass(frozen=True, slots=True)
class ErrorAfter(Fault):
    """The request fails in the engine after so many outputs; with 0, when its KV has been pulled and before the first one.

    500 for a whole answer. A stream has its 200 already: an error event in completions, chat and messages, and a connection
    that breaks off in responses.
    """

    num_outputs: int = 0

    async def before_output(self, number: int) -> None:
        if number == self.num_outputs:
            raise GenerationFailed


@dataclass(frozen=True, slots=True)
class StallAfter(Fault):
    """Nothing comes from the engine any more after so many outputs."""

    num_outputs: int = 1

    async def before_output(self, number: int) -> None:
        if number == self.num_outputs:
            await asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True)
class KillCore(Fault):
    """EngineCore dies of this request: 500, and with keep_alive_on_engine_death 500 for ever after."""

    async def before_admission(self, victim: Victim) -> None:
        victim.engine.kill("injected")
        raise EngineDead


@dataclass(frozen=True, slots=True)
class DieAfterAnswer(Fault):
    """The whole engine is gone right after the answer's last byte: on P, between the legs."""

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        async def die() -> None:
            victim.die()

        return LastWordWire(wire, BareConnection(response), die)


@dataclass(frozen=True, slots=True)
class RestartAfterAnswer(Fault):
    """The engine restarts right after the answer's last byte: same ports, new engine id, nothing remembered."""

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        async def restart() -> None:
            victim.begin_restart()

        return LastWordWire(wire, BareConnection(response), restart)
