"""The plainest policy: healthy engines take turns.

A policy sees snapshots and facts, never a socket or a prompt, and says where a request goes; the proxy does the rest.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from pdserve.core import AloneReason, Decision, DecodeAlone, EngineAddress, RemotePrefill, Role
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
        decode = self._next(Role.DECODE, engines)
        if decode is None:
            raise NoEligibleEngine("no decode engine is healthy; `pdserve status` tells which are down")
        if facts.alone_reason is not None:
            return DecodeAlone(decode, facts.alone_reason)
        prefill = self._next(Role.PREFILL, engines)
        if prefill is None:
            return DecodeAlone(decode, AloneReason.NO_PREFILL_ENGINE)
        return RemotePrefill(prefill, decode)

    def _next(self, role: Role, engines: Sequence[EngineSnapshot]) -> EngineAddress | None:
        candidates = [engine.address for engine in engines if engine.address.role == role and engine.is_healthy]
        return candidates[next(self._turns[role]) % len(candidates)] if candidates else None
