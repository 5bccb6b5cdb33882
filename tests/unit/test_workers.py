"""What several workers count and say, put together; no process and no socket."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING
from unittest.mock import Mock

import msgspec
import pytest

from pdserve.config import AdmissionConfig, Config, parse_config
from pdserve.core import EngineAddress, EngineName, PrefillPlace, Role
from pdserve.engine.board import Board, open_shared
from pdserve.errors import ConfigError
from pdserve.gateway.workers.crew import Place, in_turn
from pdserve.gateway.workers.merge import merge_engine, merge_records, merge_status
from pdserve.gateway.workers.worker import share_of
from pdserve.protocol.admin import EngineInfo, GatewayStatus, PairInfo, Phases, RequestRecord, WorkerInfo
from pdserve.telemetry.metrics import BREAKER_OPENED, ENGINE_RESTARTS, PREFILLS, RELEASES, REQUESTS
from pdserve.telemetry.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

_DECODE = EngineAddress(EngineName("decode-0"), Role.DECODE, "http://127.0.0.1:1")


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    """Three workers' views of five engines."""
    descriptor = open_shared(num_engines=5, num_workers=3)
    yield [Board.shared(descriptor, num_engines=5, worker=worker) for worker in range(3)]
    os.close(descriptor)


def test_all_workers_see_the_sum_of_all_legs(boards: list[Board]) -> None:
    """Each counts its own; nobody's engine is taken for another one."""
    for worker, board in enumerate(boards):
        for engine in range(5):
            board.mine[engine] += 10**worker * (engine + 1)
    for board in boards:
        assert [board.total(engine) for engine in range(5)] == [111, 222, 333, 444, 555]
    boards[1].mine[2] -= 30
    assert boards[0].total(2) == 303


def test_a_worker_that_is_gone_has_no_legs(boards: list[Board]) -> None:
    """The others' stay."""
    for board in boards:
        board.mine[4] += 1
        board.mine[0] += 1
    boards[0].forget(2)
    assert (boards[0].total(4), boards[1].total(0)) == (2, 2)
    assert list(boards[2].mine) == [0] * 5


def test_a_salt_is_new_for_every_worker_and_never_comes_back(boards: list[Board]) -> None:
    """Whoever renews it, all have the new one; also after a worker has gone."""
    seen: list[str | None] = [boards[0].salt(3)]
    for worker in (0, 1, 1, 2, 0):
        boards[worker].renew_salt(3)
        boards[0].forget(worker)
        (salt,) = {board.salt(3) for board in boards}
        assert salt is not None
        assert salt not in seen
        seen.append(salt)
    assert seen[0] is None
    assert {board.salt(2) for board in boards} == {None}


def test_no_two_gateways_have_the_same_salt() -> None:
    """An engine may outlive its gateway, and what it cached stays wrong."""
    salts = set()
    for _ in range(2):
        board = Board.alone(2)
        board.renew_salt(1)
        salts.add(board.salt(1))
    assert len(salts) == 2


@pytest.mark.parametrize(("seats", "queue"), [(10, 3), (3, 0), (4096, 4097)])
def test_seats_and_queue_are_dealt_out_whole(seats: int, queue: int) -> None:
    """All workers together have what the configuration says."""
    config = Config(admission=AdmissionConfig(max_concurrent=seats, max_queued=queue))
    shares = [share_of(config, worker=worker, num_workers=3).admission for worker in range(3)]
    assert sum(share.max_concurrent for share in shares) == seats
    assert sum(share.max_queued for share in shares) == queue
    assert min(share.max_concurrent for share in shares) >= 1


def test_more_workers_than_seats_are_refused() -> None:
    """One of them could not take any request."""
    table: dict[str, object] = {"gateway": {"workers": 3}, "admission": {"max_concurrent": 2}}
    with pytest.raises(ConfigError, match=r"gateway\.workers = 3 share admission\.max_concurrent = 2"):
        parse_config(table, source="test")


def test_counts_travel_and_add_up() -> None:
    """As they come from a worker."""
    tally, total = Tally(), Tally()
    tally.count(REQUESTS, "/v1/completions", "ok")
    tally.count(PREFILLS, PrefillPlace.REMOTE)
    dump = msgspec.msgpack.decode(msgspec.msgpack.encode(tally.dump()), type=list[tuple[str, tuple[str, ...], int]])
    total.include(dump)
    total.include(dump)
    assert total.value(REQUESTS, "/v1/completions", "ok") == 2
    assert total.value(PREFILLS, "remote") == 2
    assert total.render({}) != tally.render({})


def test_records_are_merged_newest_first() -> None:
    """Each worker's come in that order."""
    newest = [[_record("c", 3.0), _record("a", 1.0)], [], [_record("d", 4.0), _record("b", 2.0)]]
    assert [record.request_id for record in merge_records(newest, 3)] == ["d", "c", "b"]


def test_the_worst_state_counts_and_loads_add_up() -> None:
    """One worker knows of a failure before the others do."""
    merged = merge_engine(
        [
            _engine(state="ready", num_in_flight=2, num_held=1),
            _engine(state="down", cause="refused", breaker="open", num_in_flight=1),
        ]
    )
    assert merged == _engine(state="down", cause="refused", breaker="open", num_in_flight=3, num_held=1)


def test_one_status_of_several() -> None:
    """Sums, the worst of what is seen, and what workers that are gone had counted."""
    tally = Tally()
    for outcome in ("released", "released", "failed"):
        tally.count(RELEASES, outcome)
    tally.count(PREFILLS, PrefillPlace.REMOTE)
    one = _status("ok", pair=_pair("proven", first_handoff_s=0.2), num_running=1)
    other = _status("warning", pair=_pair("failing", cause="500"), num_running=2)
    merged = merge_status([one, other], [_worker(num_requests=5), _worker(num_requests=2)], tally, [_DECODE])
    assert (merged.status, merged.split, merged.num_running, merged.num_requests) == ("warning", "unproven", 3, 7)
    assert merged.pairs == [_pair("failing", cause="500", first_handoff_s=0.2)]
    assert (merged.num_released, merged.num_release_failures) == (2, 1)
    assert merged.num_by_place[PrefillPlace.REMOTE] == 1


def test_a_worker_that_is_missing_is_a_warning() -> None:
    """The others serve, and there are fewer of them than there should be."""
    statuses = [_status("ok", pair=_pair("proven"))]
    assert merge_status(statuses, [_worker(), _worker()], Tally(), [_DECODE]).status == "ok"
    assert merge_status(statuses, [_worker(), _worker(state="ended")], Tally(), [_DECODE]).status == "warning"


def test_without_any_worker_the_engines_are_still_named() -> None:
    """The operator sees what is wrong instead of an error."""
    merged = merge_status([], [_worker(state="ended")], Tally(), [_DECODE])
    assert (merged.status, merged.split) == ("starting", "unproven")
    assert [engine.cause for engine in merged.engines] == ["no worker of the gateway serves"]


def test_an_event_that_all_workers_see_is_counted_once() -> None:
    """An engine restarts once, however many look at it; what each does itself adds up."""
    tallies = [Tally(), Tally(), Tally()]
    for tally in tallies:
        tally.count(ENGINE_RESTARTS, "decode-0")
        tally.count(BREAKER_OPENED, "decode-0")
    tallies[1].count(ENGINE_RESTARTS, "decode-0")
    total = Tally.joined(tally.dump() for tally in tallies)
    assert total.value(ENGINE_RESTARTS, "decode-0") == 2
    assert total.value(BREAKER_OPENED, "decode-0") == 3


def test_those_that_serve_take_turns_without_the_one_that_is_gone() -> None:
    """Its turns are not its neighbour's."""
    places = [_place(index, "serving") for index in (0, 2, 3)]
    places.insert(1, Place(1, Mock()))
    firsts = Counter(in_turn(places, turn)[0].index for turn in range(300))
    assert firsts == {0: 100, 2: 100, 3: 100}


def test_one_that_starts_gets_clients_where_nobody_serves() -> None:
    """And where those that serve take none; one that is not up, or leaves, gets none."""
    starting, serving, leaving = _place(0, "up"), _place(1, "serving"), _place(2, "leaving")
    assert in_turn([starting, serving, leaving, _place(3, "there")], 7) == [serving, starting]
    assert in_turn([starting, leaving], 7) == [starting]
    assert in_turn([leaving], 7) == []


def test_one_that_leaves_does_not_serve_again() -> None:
    """Whatever it may say of its engines meanwhile."""
    place = _place(0, "leaving")
    place.became_ready()
    assert (place.state, place.takes_clients, place.can_be_asked) == ("leaving", False, True)


def _place(index: int, state: str) -> Place:
    """One with a worker that has come so far."""
    steps = ["there", "up", "serving", "leaving"]
    place = Place(index, Mock())
    place.attach(Mock(), Mock(), Mock())
    for step in steps[1 : steps.index(state) + 1]:
        {"up": place.came_up, "serving": place.became_ready, "leaving": place.leave}[step]()
    return place


def _record(request_id: str, ended_at: float) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        path="/v1/completions",
        key_name=None,
        is_stream=False,
        prefill=None,
        decode=None,
        status=200,
        reason=None,
        place=PrefillPlace.ALONE,
        cause="",
        num_prompt_tokens=None,
        num_remote_tokens=None,
        num_output_tokens=None,
        num_failed_legs=0,
        phases=Phases(),
        handoff=None,
        ended_at=ended_at,
    )


def _engine(
    *, state: str, cause: str = "", breaker: str = "closed", num_in_flight: int = 0, num_held: int = 0
) -> EngineInfo:
    return EngineInfo(
        name=_DECODE.name,
        role=_DECODE.role,
        url=_DECODE.url,
        state=state,
        cause=cause,
        breaker=breaker,
        num_in_flight=num_in_flight,
        num_held=num_held,
    )


def _pair(state: str, *, cause: str = "", first_handoff_s: float | None = None) -> PairInfo:
    return PairInfo(prefill="prefill-0", decode="decode-0", state=state, cause=cause, first_handoff_s=first_handoff_s)


def _worker(*, state: str = "serving", num_requests: int = 0) -> WorkerInfo:
    return WorkerInfo(state=state, pid=1, num_requests=num_requests, num_running=0, num_restarts=0)


def _status(status: str, *, pair: PairInfo, num_running: int = 0) -> GatewayStatus:
    return GatewayStatus(
        status=status,
        split="proven" if pair.state == "proven" else "unproven",
        version="",
        engines=[_engine(state="ready")],
        pairs=[pair],
        num_requests=0,
        num_running=num_running,
        num_queued=0,
        num_by_place={},
        num_released=0,
        num_release_failures=0,
    )
