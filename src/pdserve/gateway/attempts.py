"""What one request has tried so far, and whether it may try again: before the first byte, within a bound and a budget.

Pure: values in, decisions out. Knows neither sockets nor the wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.core import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.config import RetriesConfig
    from pdserve.core import EngineName, EngineSnapshot

_RESERVE = 10.0
"""Retries that are always to be had again after a while: a share of few requests would be none at all."""
_NONE: frozenset[EngineName] = frozenset()


class RetryBudget:
    """One for a gateway: retries may be a share of the requests, so that an outage is not answered with more load."""

    __slots__ = ("_share", "_tokens")

    def __init__(self, share: float) -> None:
        self._share = share
        self._tokens = _RESERVE

    def request_came(self) -> None:
        """Every request pays in."""
        if self._tokens < _RESERVE:
            self._tokens += self._share

    def try_spend(self) -> bool:
        """Whether one retry may be made now."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Attempts:
    """One request's failed legs."""

    __slots__ = ("_budget", "_config", "_decodes", "_pairs", "_prefills", "num_decode", "num_prefill")

    def __init__(self, config: RetriesConfig, budget: RetryBudget) -> None:
        self._config = config
        self._budget = budget
        self._prefills: frozenset[EngineName] = _NONE
        self._decodes: frozenset[EngineName] = _NONE
        self._pairs: tuple[tuple[EngineName, EngineName], ...] = ()
        self.num_prefill = 0
        """P legs that failed or came to nothing."""
        self.num_decode = 0
        """D legs that failed."""

    def may_prefill(self) -> bool:
        """Whether a P leg may be sent: the first always, further ones within bound and budget."""
        return self.num_prefill == 0 or (self.num_prefill < self._config.max_attempts and self._budget.try_spend())

    def may_decode_again(self) -> bool:
        """Whether a D leg may be sent after one that failed."""
        return self.num_decode < self._config.max_attempts and self._budget.try_spend()

    def prefill_failed(self, name: EngineName) -> None:
        """A P gave no handoff that could be used."""
        self.num_prefill += 1
        self._prefills |= {name}

    def handoff_expired(self) -> None:
        """A handoff grew too old in our hands, which is not P's fault."""
        self.num_prefill += 1

    def decode_failed(self, name: EngineName, *, prefill: EngineName | None) -> None:
        """A D failed, with a handoff from `prefill` or alone."""
        self.num_decode += 1
        self._decodes |= {name}
        if prefill is not None:
            self._pairs += ((prefill, name),)

    def decode_unreachable(self, name: EngineName) -> None:
        """A D could not be connected to; nothing was sent."""
        self._decodes |= {name}

    def narrowed(self, engines: Sequence[EngineSnapshot]) -> Sequence[EngineSnapshot]:
        """What is left to choose from. A D that failed comes last: alone, and only while it is healthy."""
        if not (self._prefills or self._decodes):
            return engines
        fresh = {
            engine.address.name
            for engine in engines
            if engine.address.role is Role.DECODE and engine.is_healthy and engine.address.name not in self._decodes
        }
        return [
            self._without_failed_pairs(engine)
            for engine in engines
            if engine.address.name not in self._prefills
            and (engine.address.role is not Role.DECODE or not fresh or engine.address.name in fresh)
        ]

    def _without_failed_pairs(self, engine: EngineSnapshot) -> EngineSnapshot:
        failed = {decode for prefill, decode in self._pairs if prefill == engine.address.name}
        return msgspec.structs.replace(engine, partners=engine.partners - failed) if failed else engine
