"""The ways in which a stand-in can be told to fail: a table of small values, each of which changes one step of a request.

A new fault is a new class with the steps that it changes and a line in FAULTS. What vLLM does by itself when it is treated
badly (stale handoffs, half handoffs, dead cores) needs no fault: see handoff.py and engine.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pdserve.errors import ConfigError
from pdserve.sim.request import Refused
from pdserve.sim.wire import BreakingWire, GarbageWire, SlowWire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.http.server import Response
    from pdserve.sim.engine import Engine
    from pdserve.sim.handoff import Params
    from pdserve.sim.wire import Wire

_GARBAGE = b'data: {"id": "cmpl-, nonsense\xff\n\n'


class Victim(Protocol):
    """What a fault may touch besides the request itself."""

    engine: Engine

    def die(self) -> None:
        """Close every socket at once, as a killed process does."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Changes nothing; every fault overrides the steps that it is about."""

    async def before_admission(self) -> None:
        """Before the engine hears of the request. May raise Refused."""

    def change_params(self, params: Params | None) -> Params | None:
        """What the engine is told of `kv_transfer_params`."""
        return params

    def change_handoff(self, handoff: Params, victim: Victim) -> Params | None:
        """What the client is told of the handoff."""
        del victim
        return handoff

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        """What the answer is written to."""
        del response, victim
        return wire


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
    """D computes alone, and answers as if nothing were amiss."""

    def change_params(self, params: Params | None) -> Params | None:
        del params
        return None


@dataclass(frozen=True, slots=True)
class NeverAnswer(Fault):
    """Take the request, and no more."""

    async def before_admission(self) -> None:
        await asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True)
class ErrorStatus(Fault):
    """Refuse before admission."""

    status: int = 503

    async def before_admission(self) -> None:
        kind = "ServiceUnavailableError" if self.status == 503 else "InternalServerError"  # noqa: PLR2004
        raise Refused(self.status, kind, "injected")


@dataclass(frozen=True, slots=True)
class BreakOffAfter(Fault):
    """Reset the connection after so many pieces of the body; 0 is before the head."""

    num_pieces: int = 0

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del victim
        return BreakingWire(wire, self.num_pieces, response.abort)


@dataclass(frozen=True, slots=True)
class Die(Fault):
    """The whole engine is gone after so many pieces of the body; 0 is before the head."""

    num_pieces: int = 0

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response
        return BreakingWire(wire, self.num_pieces, victim.die)


@dataclass(frozen=True, slots=True)
class Slow(Fault):
    """The body comes a byte at a time, with this long between two."""

    byte_delay_s: float = 0.0

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response
        return SlowWire(wire, self.byte_delay_s, victim.engine.clock)


@dataclass(frozen=True, slots=True)
class GarbageSse(Fault):
    """Something that is no event comes after so many events."""

    num_pieces: int = 1

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response, victim
        return GarbageWire(wire, self.num_pieces, _GARBAGE)


FAULTS: Mapping[str, tuple[Callable[..., Fault], type]] = {
    "answer_without_handoff": (AnswerWithoutHandoff, str),
    "half_handoff": (HalfHandoff, str),
    "stale": (Stale, str),
    "ignore_handoff": (IgnoreHandoff, str),
    "never_answer": (NeverAnswer, str),
    "error_status": (ErrorStatus, int),
    "break_off_after": (BreakOffAfter, int),
    "die": (Die, int),
    "slow": (Slow, float),
    "garbage_sse": (GarbageSse, int),
}
"""By the name that the command line uses, with the type of the one value that may follow it."""


def parse_fault(text: str) -> Fault:
    """Read `name` or `name:value`. Raises ConfigError."""
    name, colon, value = text.partition(":")
    if name not in FAULTS:
        raise ConfigError(f"there is no fault {name!r}; there are {', '.join(FAULTS)}")
    fault, kind = FAULTS[name]
    try:
        return fault(kind(value)) if colon else fault()
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"fault {name} does not take {value!r}") from exc


@dataclass(slots=True)
class _Injection:
    fault: Fault
    num_left: int | None


class Faults:
    """What shall go wrong with the requests to come."""

    def __init__(self) -> None:
        self._injections: list[_Injection] = []

    def inject(self, fault: Fault, *, times: int | None = 1) -> None:
        """Let the next so many completion and chat requests suffer a fault; None: all of them."""
        self._injections.append(_Injection(fault, times))

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        self._injections.clear()

    def take(self) -> list[Fault]:
        """The faults of one request."""
        taken = [injection.fault for injection in self._injections]
        for injection in self._injections:
            if injection.num_left is not None:
                injection.num_left -= 1
        self._injections = [injection for injection in self._injections if injection.num_left != 0]
        return taken
