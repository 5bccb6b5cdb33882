"""The engines behind a gateway: which are up, which pairs are proven, and what a policy gets to see of them.

An engine takes traffic once it answers /health and one of its pairs has been tried, or there is nobody to make a pair with.
A pair that answers serves, even where nothing proves its KV to move: the engines' flags or version may give no proof. One that
does not answer, or whose engines may be other processes by now, serves only after it was tried again. Health and proofs are
watched apart, so that an engine that hangs in a proof keeps nobody from being seen to live or die. Knows no client requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
from typing import TYPE_CHECKING

from pdserve.core import EngineSnapshot, PrefillPlace, Role
from pdserve.engine import pair as pairs
from pdserve.engine.board import Board
from pdserve.engine.breaker import Breaker, BreakerState
from pdserve.engine.credentials import OPEN_ACCESS
from pdserve.engine.side_channel import allowed_hosts_of
from pdserve.engine.transport import EngineClient
from pdserve.errors import EngineError, EngineUnreachable, OutOfSockets
from pdserve.protocol.side_channel_hosts import AllowedHosts
from pdserve.telemetry.metrics import BREAKER_OPENED, ENGINE_FAILURES, ENGINE_RESTARTS, PAIR_FAILURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.config import Config
    from pdserve.core import EngineAddress, EngineName
    from pdserve.engine.credentials import EngineAccess
    from pdserve.errors import Reason
    from pdserve.protocol.nixl import Handoff
    from pdserve.telemetry.tally import Tally

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
_PAIR_FAILURES_UNTIL_FAILING = 3
_MAX_ENGINE_IDS = 64
"""One URL can stand for several engines: data-parallel ranks, or replicas behind a load balancer."""

_logger = logging.getLogger("pdserve.pool")


class EngineState(enum.StrEnum):
    """An engine as the gateway sees it."""

    STARTING = "starting"
    PROVING = "proving"
    READY = "ready"
    DRAINING = "draining"
    """It finishes what it has and gets nothing new."""
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
        self.num_failures = 0
        """Handoffs in a row that failed on D since the last one that did not."""
        self.is_doubted = False
        """To be tried again beside its traffic."""
        self.is_being_tried = False
        self.moved = asyncio.Event()
        """One of its engines came up or went down, or it must be tried again."""

    @property
    def is_usable(self) -> bool:
        """Whether handoffs may go through it."""
        return self.state not in {PairState.UNTRIED, PairState.FAILING}


class _Member:
    def __init__(self, index: int, client: EngineClient, breaker: Breaker) -> None:
        self.index = index
        self.client = client
        self.breaker = breaker
        self.state = EngineState.STARTING
        self.is_up = False
        self.generation = 0
        """Counts its lives: what was proven of an earlier one says nothing of this one."""
        self.cause = "has not answered yet"
        self.num_failures = 0
        self.is_suspect = False
        """A leg could not reach it since it was last seen well."""
        self.may_be_another = False
        """It refused a connection: the process behind it may have been replaced."""
        self.is_doubted = False
        """A connection to it ended too early since it was last seen well."""
        self.is_draining = False
        self.was_tried = False
        """One of its pairs has been tried in its present life: another engine's restart takes no traffic from it."""
        self.view = EngineSnapshot(client.address, num_in_flight=0, is_healthy=False)
        self.num_held = 0
        """Handoffs whose KV it holds for a D that has not answered yet."""
        self.engine_ids: set[str] = set()
        """Under which its handoffs were proven."""
        self.allowed_hosts = AllowedHosts.of((), engine=str(client.address))
        self.poked = asyncio.Event()


class Leg:
    """One leg under way. Not a generator: that would cost as much as all the rest of it."""

    __slots__ = ("_breaker", "_client", "_index", "_legs", "_was_try")

    def __init__(self, client: EngineClient, breaker: Breaker, legs: memoryview, index: int) -> None:
        self._client = client
        self._breaker = breaker
        self._legs = legs
        self._index = index
        self._was_try = False

    def __enter__(self) -> EngineClient:
        self._legs[self._index] += 1
        self._was_try = self._breaker.begin()
        return self._client

    def __exit__(self, *_: object) -> None:
        self._legs[self._index] -= 1
        if self._was_try:
            self._breaker.end(was_try=True)


class EnginePool:
    """Watches its engines while `run` is running."""

    def __init__(
        self,
        addresses: Iterable[EngineAddress],
        config: Config,
        tally: Tally,
        *,
        access: EngineAccess = OPEN_ACCESS,
        board: Board | None = None,
        clock: Callable[[], float],
    ) -> None:
        """Without a board it has one of its own: no other process sees its load."""
        addresses = list(addresses)
        self._board = board or Board.alone(len(addresses))
        self._timeouts = config.timeouts
        self._side_channel_hosts = config.prefill.side_channel_hosts
        self._tally = tally
        self._members = {
            address.name: _Member(
                index,
                EngineClient(address, connect_timeout_s=config.timeouts.connect, access=access),
                Breaker(config.breaker, clock=clock),
            )
            for index, address in enumerate(addresses)
        }
        self._views = [member.view for member in self._members.values()]
        self.pairs = [
            Pair(prefill.client.address, decode.client.address)
            for prefill in self._of(Role.PREFILL)
            for decode in self._of(Role.DECODE)
        ]
        self._pairs = {(pair.prefill.name, pair.decode.name): pair for pair in self.pairs}
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

    def snapshots(self) -> Sequence[EngineSnapshot]:
        """What a policy may look at, as it is now; good until the next call."""
        total = self._board.total
        for member in self._members.values():
            view = member.view
            view.num_in_flight = total(member.index)
            view.is_healthy = (
                member.state is EngineState.READY and not member.is_suspect and member.breaker.lets_through
            )
        return self._views

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

    def leg(self, name: EngineName) -> Leg:
        """Counts a leg as the engine's load while it is entered."""
        member = self._members[name]
        return Leg(member.client, member.breaker, self._board.mine, member.index)

    def num_in_flight(self, name: EngineName) -> int:
        """Legs that this process has under way on an engine."""
        return self._board.mine[self._members[name].index]

    def num_held(self, name: EngineName) -> int:
        """Handoffs whose KV an engine holds for a D that has not answered yet."""
        return self._members[name].num_held

    def hold(self, name: EngineName, change: int) -> None:
        """A handoff was taken from an engine (1), or is settled (-1)."""
        self._members[name].num_held += change

    def breaker_state(self, name: EngineName) -> BreakerState:
        """Whether an engine is left alone for its failures."""
        return self._members[name].breaker.state

    def set_draining(self, name: EngineName, *, is_draining: bool) -> None:
        """Give an engine no new work, or give it work again."""
        self._members[name].is_draining = is_draining
        self._settle()

    def report_unreachable(self, name: EngineName, *, may_be_another: bool = False) -> None:
        """A leg could not reach the engine: send nothing more there until it has been looked at, which is now.

        `may_be_another`: it refused a connection, so that its pairs must be proven before they get traffic.
        """
        member = self._members[name]
        member.is_suspect = True
        member.may_be_another |= may_be_another
        member.poked.set()

    def report_broken(self, name: EngineName) -> None:
        """A connection ended in the middle of a leg: look at the engine now, and prove its pairs again beside their traffic.

        One that answers right after is the process that was there, since none starts so fast; and a connection may end for
        many a reason, so that taking a D's traffic away would fail every request over a single one that broke.
        """
        member = self._members[name]
        member.is_doubted = True
        member.poked.set()

    def report_success(self, name: EngineName, *, prefill: EngineName | None = None) -> None:
        """A leg did what it should; with `prefill`, so did the handoff from there."""
        self._members[name].breaker.succeeded()
        if prefill is not None:
            self._pairs[prefill, name].num_failures = 0

    def report_failure(self, name: EngineName, reason: Reason) -> None:
        """A leg failed though the engine was there."""
        self._tally.count(ENGINE_FAILURES, name, reason)
        member = self._members[name]
        if member.breaker.failed():
            self._tally.count(BREAKER_OPENED, name)
            _logger.warning("%s failed too often (%s) and is left alone for a while", member.client.address, reason)

    def report_pair_failure(self, prefill: EngineName, decode: EngineName, cause: str) -> None:
        """A handoff failed on D, which may be either's fault: after some in a row the pair is proven again before more."""
        self._tally.count(PAIR_FAILURES, prefill, decode)
        pair = self._pairs[prefill, decode]
        pair.num_failures += 1
        if pair.num_failures >= _PAIR_FAILURES_UNTIL_FAILING and pair.is_usable:
            _logger.warning("%s -> %s failed too often and is tried anew before it gets traffic", prefill, decode)
            pair.state, pair.cause = PairState.FAILING, cause
            pair.moved.set()
            self._settle()

    def is_usable(self, prefill: EngineName, decode: EngineName) -> bool:
        """Whether handoffs may go from one engine to the other."""
        return decode in self._members[prefill].view.partners

    def cache_salt(self, name: EngineName) -> str | None:
        """What every request to a decode engine must add to its cache salt; None: nothing."""
        return self._board.salt(self._members[name].index)

    def report_wrong_text(self, name: EngineName, reason: Reason, *, salt: str | None) -> None:
        """A decode engine read KV that was not its request's, or may have; `salt` is what that request carried.

        vLLM has put those blocks into its prefix cache under the prompt's hash by then (0.32, v1/core/sched/scheduler.py,
        _update_waiting_for_remote_kv), where every later request with that prefix would find them. From now on all requests
        to the engine carry another salt, with which nothing of before is found. Of many that were sent with the same salt
        only the first one changes it.
        """
        self._tally.count(ENGINE_FAILURES, name, reason)
        if salt != self.cache_salt(name):
            return
        self._board.renew_salt(self._members[name].index)
        message = "%s may have read KV of another request (%s): what its prefix cache holds is not used any more"
        _logger.error(message, self._members[name].client.address, reason)

    def check_handoff_host(self, name: EngineName, handoff: Handoff) -> None:
        """Refuse a handoff that would make D connect anywhere but to P. Raises UnusableHandoff."""
        self._members[name].allowed_hosts.check(handoff.host)

    def knows_engine_id(self, name: EngineName, engine_id: str) -> bool:
        """Whether a handoff's engine is one that was proven; if not, the engine restarted, and is proven again now."""
        member = self._members[name]
        if engine_id in member.engine_ids:
            return True
        if member.view.partners:  # Else it is being proven already: once is enough for all requests that meet it.
            _logger.warning("%s shows itself as engine %s, which is not proven yet", member.client.address, engine_id)
            self._untry(member)
        return False

    async def _watch(self, member: _Member) -> None:
        while True:
            await self._look_at(member)
            is_steady = member.is_up and member.num_failures == 0
            await _wait(member.poked, _STEADY_INTERVAL_S if is_steady else _STARTING_INTERVAL_S)

    async def _look_at(self, member: _Member) -> None:
        cause = await self._ask_health(member)
        if not cause:
            if not member.is_up or member.may_be_another:
                # Its name may mean another address by now.
                member.allowed_hosts = await allowed_hosts_of(member.client.address, self._side_channel_hosts)
                self._move(member, is_up=True)
            elif member.is_doubted:
                self._doubt_pairs(member)
            member.is_suspect = member.is_doubted = False
        elif member.num_failures >= _FAILURES_UNTIL_DOWN:
            member.cause = cause
            if member.is_up:
                _logger.warning("%s is down: %s", member.client.address, cause)
                self._move(member, is_up=False)

    async def _ask_health(self, member: _Member) -> str:
        """Why the engine is not healthy; empty when it is."""
        try:
            answer = await member.client.get("/health", timeout_s=_HEALTH_TIMEOUT_S)
        except OutOfSockets as exc:
            return str(exc)  # That says nothing of the engine: what is known of it stays.
        except EngineError as exc:
            is_gone = isinstance(exc, EngineUnreachable)
            member.num_failures = _FAILURES_UNTIL_DOWN if is_gone else member.num_failures + 1
            return str(exc)
        member.num_failures = 0 if answer.status == 200 else _FAILURES_UNTIL_DOWN  # noqa: PLR2004
        return "" if member.num_failures == 0 else f"/health answered {answer.status}"

    def _move(self, member: _Member, *, is_up: bool) -> None:
        """It came up or went down. It may come back as another process, with another engine id and other flags."""
        member.is_up = is_up
        member.may_be_another = False
        member.breaker.reset()
        self._untry(member)

    def _doubt_pairs(self, member: _Member) -> None:
        for pair in self.pairs:
            if member.client.address in {pair.prefill, pair.decode}:
                pair.is_doubted = True
                pair.moved.set()

    def _untry(self, member: _Member) -> None:
        """What was proven of it is not sure any more."""
        if member.generation and member.is_up:
            self._tally.count(ENGINE_RESTARTS, member.client.address.name)
        member.generation += 1
        member.was_tried = False
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
            if all(side.is_up for side in sides) and (pair.is_doubted or pair.state is not PairState.PROVEN):
                pair.is_doubted, pair.is_being_tried = False, True
                await self._prove(pair, sides)
                pair.is_being_tried = False
            is_final = not pair.is_doubted and pair.state in {PairState.UNTRIED, PairState.PROVEN}
            has_moved = await _wait(pair.moved, None if is_final else retry_s)
            retry_s = _RETRY_S if has_moved else min(retry_s * 2, _MAX_RETRY_S)

    async def _prove(self, pair: Pair, sides: list[_Member]) -> None:
        generations = [side.generation for side in sides]
        prefill, decode = (side.client for side in sides)
        first_handoff_s = pair.first_handoff_s
        try:
            model = await pairs.served_model(decode)
            timeout_s = min(self._timeouts.prefill, _PROOF_TIMEOUT_S)
            hosts = sides[0].allowed_hosts
            proof = await pairs.prove_pair(prefill, decode, model=model, hosts=hosts, timeout_s=timeout_s)
        except OutOfSockets:
            pair.is_doubted = True  # Nothing was learned.
            return
        except EngineError as exc:
            state, cause = PairState.FAILING, str(exc)
        else:
            state, cause = _STATE_OF_PLACE[proof.evidence.place], proof.evidence.cause
            first_handoff_s = proof.total_s
            if proof.handoff is not None:
                self._learn_engine_id(sides[0], proof.handoff.engine_id)
        if [side.generation for side in sides] != generations:
            return  # One of them is another process by now.
        if state is not PairState.PROVEN and (state, cause) != (pair.state, pair.cause):
            _logger.warning("%s -> %s is %s: %s", pair.prefill.name, pair.decode.name, state, cause)
        pair.state, pair.cause, pair.first_handoff_s, pair.num_failures = state, cause, first_handoff_s, 0
        for side in sides:
            side.was_tried = True
        self._settle()

    def _learn_engine_id(self, prefill: _Member, engine_id: str) -> None:
        if len(prefill.engine_ids) >= _MAX_ENGINE_IDS:
            prefill.engine_ids.clear()  # What is still in use will be proven again.
        prefill.engine_ids.add(engine_id)

    def _settle(self) -> None:
        """Something changed: work out every engine's state, here and not at each request's snapshot."""
        for member in self._members.values():
            member.state = self._state_of(member)
            member.view.partners = frozenset(
                pair.decode.name for pair in self.pairs if pair.prefill == member.client.address and pair.is_usable
            )
        self.changed.set()

    def _state_of(self, member: _Member) -> EngineState:
        if not member.is_up:
            return EngineState.STARTING if member.generation == 0 else EngineState.DOWN
        if member.is_draining:
            return EngineState.DRAINING
        partners = [
            pair
            for pair in self.pairs
            if (member.client.address == pair.prefill and self._members[pair.decode.name].is_up)
            or (member.client.address == pair.decode and self._members[pair.prefill.name].is_up)
        ]
        is_tried = member.was_tried or not partners or any(pair.state is not PairState.UNTRIED for pair in partners)
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
