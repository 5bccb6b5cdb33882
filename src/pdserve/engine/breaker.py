"""A circuit breaker: leaves an engine, or a pair of them, alone after failures in a row, then lets one request try it again.

A health check asks whether an engine is there; this asks whether it does its work. Pure but for the clock it is given.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config import BreakerConfig


class BreakerState(enum.StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing, until its time is up."""
    HALF_OPEN = "half_open"
    """One request at a time, to see."""


class Breaker:
    """Counts failures in a row. `begin` and `end` bracket every request; `succeeded` or `failed` may come in between.

    What began before the breaker opened says nothing of the engine as it is now: only what begins while half open tries it.
    """

    __slots__ = (
        "_clock",
        "_config",
        "_num_failures",
        "_num_trying",
        "_open_s",
        "_opened_at_s",
        "state",
    )

    def __init__(self, config: BreakerConfig, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._num_failures = 0
        self._num_trying = 0
        self._open_s = config.open
        self._opened_at_s = 0.0
        self.state = BreakerState.CLOSED

    @property
    def lets_through(self) -> bool:
        """Whether a request may begin now."""
        if self.state is BreakerState.CLOSED:
            return True
        if self.state is BreakerState.OPEN:
            if self._clock() - self._opened_at_s < self._open_s:
                return False
            self.state = BreakerState.HALF_OPEN
        return self._num_trying == 0

    def begin(self) -> bool:
        """A request begins. Returns whether it tries the engine, which `end` wants to know."""
        if self.state is not BreakerState.HALF_OPEN:
            return False
        self._num_trying += 1
        return True

    def end(self, *, was_try: bool) -> None:
        """It ended, whether or not it told anything of the engine: its client may have left."""
        self._num_trying -= was_try

    def succeeded(self) -> None:
        """The engine did its work."""
        if self._num_failures or self.state is not BreakerState.CLOSED:
            self.reset()

    def failed(self) -> bool:
        """It did not. Returns whether the breaker opened with this."""
        self._num_failures += 1
        if self.state is BreakerState.HALF_OPEN:
            if self._num_trying == 0:
                return False
            self._open_s = min(self._open_s * 2, self._config.max_open)
        elif self.state is BreakerState.OPEN or self._num_failures < self._config.failures:
            return False
        self.state = BreakerState.OPEN
        self._opened_at_s = self._clock()
        return True

    def reset(self) -> None:
        """Forget what was: it works again, or it is another process now."""
        self.state = BreakerState.CLOSED
        self._num_failures = 0
        self._open_s = self._config.open
