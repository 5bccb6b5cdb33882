"""Who takes which turn."""

from __future__ import annotations

import pytest

from pdserve.core import (
    AloneReason,
    DecodeAlone,
    EngineAddress,
    EngineName,
    EngineSnapshot,
    RemotePrefill,
    RequestFacts,
    Role,
)
from pdserve.errors import NoEligibleEngine
from pdserve.policy.round_robin import RoundRobin

_FACTS = RequestFacts(prompt_bytes=10, is_stream=False, alone_reason=None)
_NAMES = [EngineName(f"decode-{index}") for index in range(3)]


def _engine(
    name: str, role: Role, *, is_healthy: bool = True, partners: frozenset[EngineName] = frozenset()
) -> EngineSnapshot:
    address = EngineAddress(EngineName(name), role, f"http://{name}")
    return EngineSnapshot(address, num_in_flight=0, is_healthy=is_healthy, partners=partners)


def _engines(*, partners: frozenset[EngineName] = frozenset(_NAMES)) -> list[EngineSnapshot]:
    prefills = [_engine(f"prefill-{index}", Role.PREFILL, partners=partners) for index in range(2)]
    return prefills + [_engine(name, Role.DECODE) for name in _NAMES]


def _pair(policy: RoundRobin, engines: list[EngineSnapshot]) -> tuple[str, str]:
    decision = policy.decide(_FACTS, engines)
    assert isinstance(decision, RemotePrefill)
    return decision.prefill.name, decision.decode.name


def test_engines_take_turns() -> None:
    policy = RoundRobin()
    pairs = [_pair(policy, _engines()) for _ in range(6)]
    assert [pair[0] for pair in pairs] == ["prefill-0", "prefill-1"] * 3
    assert [pair[1] for pair in pairs] == ["decode-0", "decode-1", "decode-2"] * 2


def test_several_policies_do_not_run_in_step() -> None:
    """The first requests of three workers go to three engines."""
    assert {_pair(RoundRobin(first_turn=worker), _engines())[1] for worker in range(3)} == set(_NAMES)


def test_only_pairs_that_are_known_to_work() -> None:
    policy = RoundRobin()
    assert {_pair(policy, _engines(partners=frozenset({_NAMES[1]})))[1] for _ in range(4)} == {_NAMES[1]}


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        (_engines(partners=frozenset()), AloneReason.NO_PROVEN_PAIR),
        ([_engine(_NAMES[0], Role.DECODE)], AloneReason.NO_PREFILL_ENGINE),
    ],
)
def test_alone_where_nothing_else_is_left(engines: list[EngineSnapshot], reason: AloneReason) -> None:
    decision = RoundRobin().decide(_FACTS, engines)
    assert isinstance(decision, DecodeAlone)
    assert decision.reason is reason


def test_nobody_is_there() -> None:
    with pytest.raises(NoEligibleEngine):
        RoundRobin().decide(_FACTS, [_engine(_NAMES[0], Role.DECODE, is_healthy=False)])
