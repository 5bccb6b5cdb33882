"""The plainest policy: healthy engines take turns.

A policy sees snapshots and facts, never a socket or a prompt, and says where a request goes; the proxy does the rest.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from pdserve.core import AloneReason, Decision, DecodeAlone, EngineName, RemotePrefill, Role
from pdserve.errors import NoEligibleEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.core import EngineSnapshot, RequestFacts


class Policy(Protocol):
    """The seam: whatever decides has this one method."""

    def decide(self, facts: RequestFacts, engines: Sequence[EngineSnapshot]) -> Decision:
        """Where one request goes. Raises NoEligibleEngine."""


class RoundRobin:
    """Turns are counted per role, so that an even load stays even on both sides."""

    def __init__(self, *, first_turn: int = 0) -> None:
        """Several that share engines and start at the same turn would all go to the same engine at once."""
        self._prefill_turns = itertools.count(first_turn)
        self._decode_turns = itertools.count(first_turn)

    def decide(self, facts: RequestFacts, engines: Sequence[EngineSnapshot]) -> Decision:
        """Where one request goes. Raises NoEligibleEngine when no decode engine is healthy."""
        healthy = [engine for engine in engines if engine.is_healthy]
        decodes = [engine for engine in healthy if engine.address.role is Role.DECODE]
        if not decodes:
            raise NoEligibleEngine("no decode engine is healthy; `pdserve status` tells which are down")
        if facts.alone_reason is not None:
            return DecodeAlone(_next(decodes, self._decode_turns).address, facts.alone_reason)
        prefills = [engine for engine in healthy if engine.address.role is Role.PREFILL]
        reached = _reached_from(prefills)
        paired = [engine for engine in decodes if engine.address.name in reached]
        if not paired:
            reason = AloneReason.NO_PROVEN_PAIR if prefills else AloneReason.NO_PREFILL_ENGINE
            return DecodeAlone(_next(decodes, self._decode_turns).address, reason)
        decode = _next(paired, self._decode_turns).address
        prefill = _next([engine for engine in prefills if decode.name in engine.partners], self._prefill_turns)
        return RemotePrefill(prefill.address, decode)


def _reached_from(prefills: Sequence[EngineSnapshot]) -> frozenset[EngineName]:
    if len(prefills) == 1:
        return prefills[0].partners
    return frozenset[EngineName]().union(*[prefill.partners for prefill in prefills])


def _next(candidates: Sequence[EngineSnapshot], turns: Iterator[int]) -> EngineSnapshot:
    return candidates[next(turns) % len(candidates)]
