"""The engines behind a gateway: which are up, which pairs are proven, and what a policy gets to see of them.

An engine takes traffic once it answers /health and one of its pairs has been tried, or there is nobody to make a pair with.
A pair that cannot be proven still serves: the engines' flags or version may give no proof. Health and proofs are watched apart,
so that an engine that hangs in a proof keeps nobody from being seen to live or die. Knows no client requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from typing import TYPE_CHECKING

from pdserve.core import EngineSnapshot, PrefillPlace, Role
from pdserve.engine import pair as pairs
from pdserve.engine.transport import EngineClient
from pdserve.errors import EngineError, EngineUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.config import TimeoutsConfig
    from pdserve.core import EngineAddress, EngineName

_STARTING_INTERVAL_S = 0.5
_STEADY_INTERVAL_S = 5.0
_HEALTH_TIMEOUT_S = 10.0
"""A CPU engine in the middle of a long prefill was seen to take seconds to answer /health."""
_PROOF_TIMEOUT_S = 120.0
"""For each leg. A cold CPU engine's first prefill took 21 s, and a GPU engine may still compile in it."""
_RETRY_S = 5.0
_MAX_RETRY_S = 60.0
"""A pair that is not proven is tried again, less and less often: each try costs both engines a request."""
_FAILURES_UNTIL_DOWN = 2
"""An engine that refuses the connection is down at once; one that is only slow gets a second chance."""

_logger = logging.getLogger("pdserve.pool")


class EngineState(enum.StrEnum):
    """An engine as the gateway sees it."""

    STARTING = "starting"
    PROVING = "proving"
    READY = "ready"
    DOWN = "down"


class PairState(enum.StrEnum):
    """What is known of a prefill-decode pair."""

    UNTRIED = "untried"
    PROVEN = "proven"
    UNPROVEN = "unproven"
    """It answers, and nothing tells where the prompt was computed."""
    NOT_MOVING = "not_moving"
    """It answers, and D computed the prompt itself."""
    FAILING = "failing"
    """It does not answer."""


_STATE_OF_PLACE = {
    PrefillPlace.REMOTE: PairState.PROVEN,
    PrefillPlace.UNPROVEN: PairState.UNPROVEN,
    PrefillPlace.LOCAL: PairState.NOT_MOVING,
}


class Pair:
    """One prefill engine and one decode engine."""

    def __init__(self, prefill: EngineAddress, decode: EngineAddress) -> None:
        self.prefill = prefill
        self.decode = decode
        self.state = PairState.UNTRIED
        self.cause = ""
        self.first_handoff_s: float | None = None
        self.moved = asyncio.Event()
        """One of its engines came up or went down."""


class _Member:
    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.state = EngineState.STARTING
        self.is_up = False
        self.generation = 0
        """Counts its lives: what was proven of an earlier one says nothing of this one."""
        self.cause = "has not answered yet"
        self.num_failures = 0
        self.is_suspect = False
        """A leg could not reach it since it was last seen well."""
        self.poked = asyncio.Event()


class EnginePool:
    """Watches its engines while `run` is running."""

    def __init__(self, addresses: Iterable[EngineAddress], timeouts: TimeoutsConfig) -> None:
        self._timeouts = timeouts
        self._members = {
            address.name: _Member(EngineClient(address, connect_timeout_s=timeouts.connect)) for address in addresses
        }
        self.pairs = [
            Pair(prefill.client.address, decode.client.address)
            for prefill in self._of(Role.PREFILL)
            for decode in self._of(Role.DECODE)
        ]
        self.changed = asyncio.Event()
        """Set whenever an engine or a pair changes state; whoever waits on it clears it."""

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for member in self._members.values():
                    tasks.create_task(self._watch(member))
                for pair in self.pairs:
                    tasks.create_task(self._watch_pair(pair))
        finally:
            for member in self._members.values():
                member.client.close()

    def snapshots(self) -> list[EngineSnapshot]:
        """What a policy may look at."""
        return [
            EngineSnapshot(
                member.client.address,
                num_in_flight=member.client.num_in_flight,
                is_healthy=not member.is_suspect and member.state is EngineState.READY,
            )
            for member in self._members.values()
        ]

    def client(self, name: EngineName) -> EngineClient:
        """The connections to one engine."""
        return self._members[name].client

    def state_of(self, name: EngineName) -> tuple[EngineState, str]:
        """An engine's state and, where it is not ready, why."""
        member = self._members[name]
        return member.state, "" if member.is_up else member.cause

    def names(self) -> list[EngineName]:
        """Every engine, prefill first as configured."""
        return list(self._members)

    def report_unreachable(self, name: EngineName) -> None:
        """A leg could not reach the engine: send nothing more there until it has been looked at, which is now."""
        self._members[name].is_suspect = True
        self._members[name].poked.set()

    async def _watch(self, member: _Member) -> None:
        while True:
            await self._look_at(member)
            is_steady = member.is_up and member.num_failures == 0
            await _wait(member.poked, _STEADY_INTERVAL_S if is_steady else _STARTING_INTERVAL_S)

    async def _look_at(self, member: _Member) -> None:
        cause = await self._ask_health(member)
        if not cause:
            member.is_suspect = False
            if not member.is_up:
                self._move(member, is_up=True)
        elif member.num_failures >= _FAILURES_UNTIL_DOWN:
            member.cause = cause
            if member.is_up:
                _logger.warning("%s is down: %s", member.client.address, cause)
                self._move(member, is_up=False)

    async def _ask_health(self, member: _Member) -> str:
        """Why the engine is not healthy; empty when it is."""
        try:
            answer = await member.client.get("/health", timeout_s=_HEALTH_TIMEOUT_S)
        except EngineError as exc:
            is_gone = isinstance(exc, EngineUnreachable)
            member.num_failures = _FAILURES_UNTIL_DOWN if is_gone else member.num_failures + 1
            return str(exc)
        member.num_failures = 0 if answer.status == 200 else _FAILURES_UNTIL_DOWN  # noqa: PLR2004
        return "" if member.num_failures == 0 else f"/health answered {answer.status}"

    def _move(self, member: _Member, *, is_up: bool) -> None:
        """It came up or went down. It may come back as another process, with another engine id and other flags."""
        member.is_up = is_up
        member.generation += 1
        for pair in self.pairs:
            if member.client.address in {pair.prefill, pair.decode}:
                pair.state, pair.cause = PairState.UNTRIED, ""
                pair.moved.set()
        self._settle()

    async def _watch_pair(self, pair: Pair) -> None:
        """Prove it whenever both engines are up and it is not proven."""
        sides = [self._members[pair.prefill.name], self._members[pair.decode.name]]
        retry_s = _RETRY_S
        while True:
            pair.moved.clear()
            if all(side.is_up for side in sides) and pair.state is not PairState.PROVEN:
                await self._prove(pair, sides)
            is_final = pair.state in {PairState.UNTRIED, PairState.PROVEN}
            has_moved = await _wait(pair.moved, None if is_final else retry_s)
            retry_s = _RETRY_S if has_moved else min(retry_s * 2, _MAX_RETRY_S)

    async def _prove(self, pair: Pair, sides: list[_Member]) -> None:
        generations = [side.generation for side in sides]
        prefill, decode = (side.client for side in sides)
        first_handoff_s = pair.first_handoff_s
        try:
            model = await pairs.served_model(decode)
            timeout_s = min(self._timeouts.prefill, _PROOF_TIMEOUT_S)
            proof = await pairs.prove_pair(prefill, decode, model=model, timeout_s=timeout_s)
        except EngineError as exc:
            state, cause = PairState.FAILING, str(exc)
        else:
            state, cause = _STATE_OF_PLACE[proof.evidence.place], proof.evidence.cause
            first_handoff_s = proof.total_s
        if [side.generation for side in sides] != generations:
            return  # One of them is another process by now.
        if state is not PairState.PROVEN and (state, cause) != (pair.state, pair.cause):
            _logger.warning("%s -> %s is %s: %s", pair.prefill.name, pair.decode.name, state, cause)
        pair.state, pair.cause, pair.first_handoff_s = state, cause, first_handoff_s
        self._settle()

    def _settle(self) -> None:
        """Something changed: work out every engine's state, here and not at each request's snapshot."""
        for member in self._members.values():
            member.state = self._state_of(member)
        self.changed.set()

    def _state_of(self, member: _Member) -> EngineState:
        if not member.is_up:
            return EngineState.STARTING if member.generation == 0 else EngineState.DOWN
        partners = [
            pair
            for pair in self.pairs
            if (member.client.address == pair.prefill and self._members[pair.decode.name].is_up)
            or (member.client.address == pair.decode and self._members[pair.prefill.name].is_up)
        ]
        is_tried = not partners or any(pair.state is not PairState.UNTRIED for pair in partners)
        return EngineState.READY if is_tried else EngineState.PROVING

    def _of(self, role: Role) -> list[_Member]:
        return [member for member in self._members.values() if member.client.address.role == role]


async def _wait(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Whether the event came in time; it is cleared."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    is_set = event.is_set()
    event.clear()
    return is_set
