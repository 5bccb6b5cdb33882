"""Whether two greedy answers to one prompt agree: equal, or parting only where two tokens were nearly tied.

Pure. Equal text cannot be demanded: D computes the last prompt token in another batch shape than one engine alone does, and
in bfloat16 that is enough to turn a near tie.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

NEAR_TIE_NATS = 0.25
"""bfloat16 keeps 8 bits: logits of a language model, mostly between 8 and 32, are 0.06 to 0.25 apart from their neighbours."""


class Agreement(enum.StrEnum):
    """How two answers relate."""

    EQUAL = "equal"
    NEAR_TIE = "near_tie"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """One output token and what the model thought of the alternatives there, in nats."""

    token: str
    logprob: float
    top_logprobs: dict[str, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers side by side."""

    agreement: Agreement
    index: int | None = None
    """The first token that differs."""
    gap_nats: float | None = None
    """How much the reference preferred its own token there; None when the other was not among its alternatives."""
    explanation: str = ""


def compare(answer: list[TokenChoice], reference: list[TokenChoice]) -> Comparison:
    """Compare token by token; after the first difference the contexts differ and nothing more can be said."""
    for index, (ours, theirs) in enumerate(zip(answer, reference, strict=False)):
        if ours.token != theirs.token:
            return _parted(index, ours, theirs)
    if len(answer) != len(reference):
        return Comparison(
            Agreement.DIFFERENT,
            min(len(answer), len(reference)),
            explanation=f"one answer has {len(answer)} tokens and the other {len(reference)}",
        )
    return Comparison(Agreement.EQUAL)


def _parted(index: int, ours: TokenChoice, theirs: TokenChoice) -> Comparison:
    what = f"token {index} is {ours.token!r} through P and D and {theirs.token!r} on D alone"
    other = theirs.top_logprobs.get(ours.token)
    if other is None:
        return Comparison(Agreement.DIFFERENT, index, None, f"{what}, which D alone did not even consider")
    gap = theirs.logprob - other
    is_tied = abs(gap) <= NEAR_TIE_NATS
    verdict = "nearly tied" if is_tied else "not tied"
    return Comparison(
        Agreement.NEAR_TIE if is_tied else Agreement.DIFFERENT, index, gap, f"{what}; {gap:.3f} nats apart: {verdict}"
    )
