"""Two greedy answers side by side: equal, near tie, or different."""

from __future__ import annotations

import pytest

from pdserve.verify.compare import NEAR_TIE_NATS, Agreement, TokenChoice, compare


def _answer(*tokens: str) -> list[TokenChoice]:
    return [TokenChoice(token, -1.0, {token: -1.0}) for token in tokens]


def test_the_same_tokens_are_equal() -> None:
    """Nothing more is asked."""
    assert compare(_answer("a", "b"), _answer("a", "b")).agreement is Agreement.EQUAL


@pytest.mark.parametrize(
    ("gap", "agreement"),
    [(0.0, Agreement.NEAR_TIE), (NEAR_TIE_NATS, Agreement.NEAR_TIE), (NEAR_TIE_NATS * 2, Agreement.DIFFERENT)],
)
def test_a_first_difference_counts_by_how_near_the_tie_was(gap: float, agreement: Agreement) -> None:
    """What bfloat16 can turn is no fault; what it cannot is one."""
    reference = [TokenChoice("a", -1.0, {}), TokenChoice("b", -1.0, {"b": -1.0, "c": -1.0 - gap})]
    comparison = compare(_answer("a", "c", "x"), [*reference, TokenChoice("y", -1.0, {})])
    assert comparison.agreement is agreement
    assert comparison.index == 1
    assert comparison.gap_nats == pytest.approx(gap)


def test_a_token_that_was_not_even_considered_is_different() -> None:
    """Another request's context looks like this."""
    comparison = compare(_answer("a", "z"), _answer("a", "b"))
    assert comparison.agreement is Agreement.DIFFERENT
    assert "did not even consider" in comparison.explanation


def test_a_shorter_answer_is_different() -> None:
    """Equal as far as it goes is not equal."""
    assert compare(_answer("a"), _answer("a", "b")).agreement is Agreement.DIFFERENT
