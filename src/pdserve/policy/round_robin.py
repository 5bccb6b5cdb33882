"""The plainest policy: healthy engines take turns.

A policy sees snapshots and facts, never a socket or a prompt, and says where a request goes; the proxy does the rest.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from pdserve.core import AloneReason, Decision, DecodeAlone, EngineName, RemotePrefill, Role
from pdserve.errors import NoEligibleEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.core import EngineSnapshot, RequestFacts


class Policy(Protocol):
    """The seam: whatever decides has this one method."""

    def decide(self, facts: RequestFacts, engines: Sequence[EngineSnapshot]) -> Decision:
        """Where one request goes. Raises NoEligibleEngine."""


class RoundRobin:
    """Turns are counted per role, so that an even load stays even on both sides."""

    def __init__(self) -> None:
        self._turns = {Role.PREFILL: itertools.count(), Role.DECODE: itertools.count()}

    def decide(self, facts: RequestFacts, engines: Sequence[EngineSnapshot]) -> Decision:
        """Where one request goes. Raises NoEligibleEngine when no decode engine is healthy."""
        decodes = _healthy(Role.DECODE, engines)
        if not decodes:
            raise NoEligibleEngine("no decode engine is healthy; `pdserve status` tells which are down")
        if facts.alone_reason is not None:
            return DecodeAlone(self._next(decodes).address, facts.alone_reason)
        prefills = _healthy(Role.PREFILL, engines)
        reached = frozenset[EngineName]().union(*(prefill.partners for prefill in prefills))
        paired = [engine for engine in decodes if engine.address.name in reached]
        if not paired:
            reason = AloneReason.NO_PROVEN_PAIR if prefills else AloneReason.NO_PREFILL_ENGINE
            return DecodeAlone(self._next(decodes).address, reason)
        decode = self._next(paired).address
        prefill = self._next([engine for engine in prefills if decode.name in engine.partners]).address
        return RemotePrefill(prefill, decode)

    def _next(self, candidates: Sequence[EngineSnapshot]) -> EngineSnapshot:
        return candidates[next(self._turns[candidates[0].address.role]) % len(candidates)]


def _healthy(role: Role, engines: Sequence[EngineSnapshot]) -> list[EngineSnapshot]:
    return [engine for engine in engines if engine.address.role == role and engine.is_healthy]
