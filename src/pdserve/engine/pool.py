"""The engines behind a gateway: which are up, which pairs are proven, and what a policy gets to see of them.

An engine takes traffic once it answers /health and every pair that it forms with an engine of the other role has been tried.
A pair that cannot be proven still serves: the engines' flags or version may give no proof. Knows no client requests.
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


class _Member:
    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.state = EngineState.STARTING
        self.cause = "has not answered yet"
        self.num_failures = 0
        self.poked = asyncio.Event()


class EnginePool:
    """Watches its engines while `run` is running."""

    def __init__(self, addresses: Iterable[EngineAddress], timeouts: TimeoutsConfig) -> None:
        self._timeouts = timeouts
        self._members = {
            address.name: _Member(EngineClient(address, connect_timeout_s=timeouts.connect)) for address in addresses
        }
        self._proving = asyncio.Lock()
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
        finally:
            for member in self._members.values():
                member.client.close()

    def snapshots(self) -> list[EngineSnapshot]:
        """What a policy may look at."""
        return [
            EngineSnapshot(
                member.client.address,
                num_in_flight=member.client.num_in_flight,
                is_healthy=member.state is EngineState.READY,
            )
            for member in self._members.values()
        ]

    def client(self, name: EngineName) -> EngineClient:
        """The connections to one engine."""
        return self._members[name].client

    def state_of(self, name: EngineName) -> tuple[EngineState, str]:
        """An engine's state and, where it is not ready, why."""
        member = self._members[name]
        return member.state, member.cause

    def names(self) -> list[EngineName]:
        """Every engine, prefill first as configured."""
        return list(self._members)

    def report_unreachable(self, name: EngineName) -> None:
        """A leg could not reach the engine: look at it now rather than at the next round."""
        self._members[name].poked.set()

    async def _watch(self, member: _Member) -> None:
        while True:
            await self._look_at(member)
            is_steady = member.state is EngineState.READY
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STEADY_INTERVAL_S if is_steady else _STARTING_INTERVAL_S):
                    await member.poked.wait()
            member.poked.clear()

    async def _look_at(self, member: _Member) -> None:
        cause = await self._ask_health(member)
        if cause:
            self._mark_down(member, cause)
        elif member.state is not EngineState.READY:
            self._set_state(member, EngineState.PROVING, "")
            await self._try_pairs(member)
            self._set_state(member, EngineState.READY, "")
        else:
            await self._try_pairs(member)

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

    def _mark_down(self, member: _Member, cause: str) -> None:
        if member.state is EngineState.STARTING or member.num_failures < _FAILURES_UNTIL_DOWN:
            member.cause = cause if member.state is not EngineState.READY else ""
            return
        if member.state is not EngineState.DOWN:
            _logger.warning("%s is down: %s", member.client.address, cause)
        for pair in self._pairs_of(member):
            # It may come back as another process, with another engine id and other flags.
            pair.state, pair.cause = PairState.UNTRIED, ""
        self._set_state(member, EngineState.DOWN, cause)

    async def _try_pairs(self, member: _Member) -> None:
        """Prove the member's pairs that are not settled yet; one at a time, since both sides' watchers come here."""
        async with self._proving:
            for pair in self._pairs_of(member):
                is_open = pair.state in {PairState.UNTRIED, PairState.FAILING}
                if is_open and self._is_up(self._counterpart(pair, member)):
                    await self._prove(pair)

    async def _prove(self, pair: Pair) -> None:
        prefill, decode = self.client(pair.prefill.name), self.client(pair.decode.name)
        try:
            model = await pairs.served_model(decode)
            proof = await pairs.prove_pair(prefill, decode, model=model, timeout_s=self._timeouts.prefill)
        except EngineError as exc:
            pair.state, pair.cause = PairState.FAILING, str(exc)
        else:
            pair.state = _STATE_OF_PLACE[proof.evidence.place]
            pair.cause = proof.evidence.cause
            pair.first_handoff_s = proof.total_s
        if pair.state is not PairState.PROVEN:
            _logger.warning("%s -> %s is %s: %s", pair.prefill.name, pair.decode.name, pair.state, pair.cause)
        self.changed.set()

    def _pairs_of(self, member: _Member) -> list[Pair]:
        return [pair for pair in self.pairs if member.client.address in {pair.prefill, pair.decode}]

    def _counterpart(self, pair: Pair, member: _Member) -> _Member:
        other = pair.decode if member.client.address == pair.prefill else pair.prefill
        return self._members[other.name]

    def _is_up(self, member: _Member) -> bool:
        return member.state in {EngineState.PROVING, EngineState.READY}

    def _of(self, role: Role) -> list[_Member]:
        return [member for member in self._members.values() if member.client.address.role == role]

    def _set_state(self, member: _Member, state: EngineState, cause: str) -> None:
        member.state = state
        member.cause = cause
        self.changed.set()
