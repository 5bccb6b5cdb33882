"""What an engine makes of kv_transfer_params, as vLLM 0.32 does."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.sim.handoff import (
    ComputeHere,
    CoreFault,
    KeepForDecode,
    KvRole,
    Pull,
    WaitForever,
    make_handoff,
    notice_target,
    plan_transfer,
    reported_cached_tokens,
    tail_of,
)

_HANDOFF = make_handoff(
    block_ids=[3, 4],
    engine_id="e",
    request_id="cmpl-r-0-12345678",
    host="127.0.0.1",
    port=5600,
    num_tokens=20,
    num_cached=0,
)
_REQUIRED = ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"]


def _without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in _HANDOFF.items() if key not in keys}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {**_HANDOFF, "do_remote_prefill": False}])
def test_nothing_asked_is_an_ordinary_request(params: dict[str, Any] | None) -> None:
    """Without either flag the engine computes alone, and says nothing."""
    assert isinstance(plan_transfer(params, KvRole.CONSUMER), ComputeHere)


@pytest.mark.parametrize("role", [KvRole.PRODUCER, KvRole.CONSUMER, KvRole.BOTH])
def test_any_role_keeps_and_pulls(role: KvRole) -> None:
    """vLLM's connector does not look at the role."""
    assert isinstance(plan_transfer({"do_remote_decode": True}, role), KeepForDecode)
    assert isinstance(plan_transfer(_HANDOFF, role), Pull)


def test_without_a_connector_all_is_ignored() -> None:
    """An engine without --kv-transfer-config takes no notice, not even of what would kill it."""
    for params in ({"do_remote_decode": True}, _HANDOFF, {"do_remote_prefill": True}):
        assert isinstance(plan_transfer(params, KvRole.NONE), ComputeHere)


def test_a_handoff_is_understood_by_the_other_side() -> None:
    """What P answers is what D needs."""
    plan = plan_transfer(_HANDOFF, KvRole.CONSUMER)
    assert plan == Pull("e", "cmpl-r-0-12345678", "127.0.0.1", 5600, [3, 4], sends_heartbeats=True)


@pytest.mark.parametrize("key", _REQUIRED)
def test_a_half_handoff_waits_forever(key: str) -> None:
    """Without one of P's coordinates no transfer is started, and the request still waits for one."""
    assert isinstance(plan_transfer(_without(key), KvRole.CONSUMER), WaitForever)


@pytest.mark.parametrize("key", ["tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode"])
def test_other_keys_may_be_missing(key: str) -> None:
    """They have defaults; without tp_size there are no heartbeats."""
    plan = plan_transfer(_without(key), KvRole.CONSUMER)
    assert isinstance(plan, Pull)
    assert plan.sends_heartbeats == (key != "tp_size")


@pytest.mark.parametrize("blocks", [None, [], [1, 2], [[1], [2]], "x"])
def test_malformed_blocks_kill_the_core(blocks: Any) -> None:
    """No block ids, and block ids that are not one list of one list, end EngineCore."""
    with pytest.raises(CoreFault):
        plan_transfer({**_HANDOFF, "remote_block_ids": blocks}, KvRole.CONSUMER)


def test_the_bare_flag_kills_the_core() -> None:
    """The shortest request that ends an engine."""
    with pytest.raises(CoreFault):
        plan_transfer({"do_remote_prefill": True}, KvRole.CONSUMER)


def test_d_reads_the_last_blocks() -> None:
    """What D has in its own cache is at the front; fewer blocks on P than D needs end EngineCore."""
    assert list(tail_of([1, 2, 3], 2)) == [2, 3]
    assert list(tail_of([1, 2, 3], 0)) == []
    with pytest.raises(CoreFault):
        tail_of([], 1)


def test_a_refused_request_names_whom_to_tell() -> None:
    """The notice goes to P's side channel."""
    assert notice_target(_HANDOFF) == ("127.0.0.1", 5600, "cmpl-r-0-12345678")


@pytest.mark.parametrize("key", [*_REQUIRED, "remote_block_ids"])
def test_refusing_a_half_handoff_kills_the_core(key: str) -> None:
    """vLLM takes the keys without looking."""
    with pytest.raises(CoreFault):
        notice_target(_without(key))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, 7),
        (_HANDOFF, 0),
        ({**_HANDOFF, "remote_prefill_cached_tokens": 3}, 3),
        ({**_HANDOFF, "remote_prefill_cached_tokens": None}, 7),
        (_without("remote_prefill_cached_tokens"), 7),
        ({**_HANDOFF, "do_remote_prefill": False}, 7),
    ],
)
def test_the_told_number_hides_the_own_one(params: dict[str, Any] | None, expected: int) -> None:
    """D reports P's cached tokens where the handoff holds an integer, its own where it does not."""
    assert reported_cached_tokens(params, 7) == expected
