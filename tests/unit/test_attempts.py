"""What may be tried again, with whom, and how often."""

from __future__ import annotations

from pdserve.config import RetriesConfig
from pdserve.core import EngineAddress, EngineName, EngineSnapshot, Role
from pdserve.gateway.attempts import Attempts, RetryBudget

P0, P1, D0, D1 = (EngineName(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"))


def _engine(name: EngineName, *, is_healthy: bool = True, partners: tuple[EngineName, ...] = ()) -> EngineSnapshot:
    role = Role.PREFILL if name.startswith("prefill") else Role.DECODE
    address = EngineAddress(name, role, f"http://{name}")
    return EngineSnapshot(address, num_in_flight=0, is_healthy=is_healthy, partners=frozenset(partners))


ENGINES = [_engine(P0, partners=(D0, D1)), _engine(P1, partners=(D0, D1)), _engine(D0), _engine(D1)]


def _attempts(*, max_attempts: int = 3, budget: float = 1.0) -> Attempts:
    return Attempts(RetriesConfig(max_attempts=max_attempts), RetryBudget(budget))


def _names(engines: object) -> list[EngineName]:
    return [engine.address.name for engine in engines]  # type: ignore[attr-defined]


def test_without_failures_everything_is_left() -> None:
    """The same list, not a copy: this is every request's path."""
    assert _attempts().narrowed(ENGINES) is ENGINES


def test_a_failed_prefill_engine_is_not_asked_again() -> None:
    """The other one is."""
    attempts = _attempts()
    attempts.prefill_failed(P0)
    assert _names(attempts.narrowed(ENGINES)) == [P1, D0, D1]


def test_a_failed_decode_engine_gives_way_to_the_others() -> None:
    """As long as there are any."""
    attempts = _attempts()
    attempts.decode_failed(D0, prefill=P0)
    assert _names(attempts.narrowed(ENGINES)) == [P0, P1, D1]


def test_the_last_decode_engine_is_tried_again_but_not_with_the_same_partner() -> None:
    """What failed between P0 and D0 may go well between P1 and D0."""
    engines = [ENGINES[0], ENGINES[1], ENGINES[2], _engine(D1, is_healthy=False)]
    attempts = _attempts()
    attempts.decode_failed(D0, prefill=P0)
    left = attempts.narrowed(engines)
    assert D0 in _names(left)
    partners = {engine.address.name: engine.partners for engine in left}
    assert partners[P0] == {D1}
    assert partners[P1] == {D0, D1}


def test_the_first_leg_costs_nothing_and_the_bound_holds() -> None:
    """Three attempts: the first and two more."""
    attempts = _attempts(max_attempts=3)
    assert attempts.may_prefill()
    attempts.prefill_failed(P0)
    assert attempts.may_prefill()
    attempts.handoff_expired()
    assert attempts.may_prefill()
    attempts.handoff_expired()
    assert not attempts.may_prefill()


def test_one_attempt_means_no_retry() -> None:
    """Whoever wants errors at once gets them."""
    attempts = _attempts(max_attempts=1)
    attempts.decode_failed(D0, prefill=None)
    assert not attempts.may_decode_again()


def test_the_budget_is_a_share_of_the_requests() -> None:
    """After the reserve is gone, one retry in five requests."""
    budget = RetryBudget(0.2)
    while budget.try_spend():
        pass
    num_retries = 0
    for _ in range(100):
        budget.request_came()
        num_retries += budget.try_spend()
    assert 18 <= num_retries <= 20


def test_the_budget_does_not_pile_up() -> None:
    """A quiet day gives no licence for a storm."""
    budget = RetryBudget(0.5)
    for _ in range(10_000):
        budget.request_came()
    assert sum(budget.try_spend() for _ in range(100)) < 15
