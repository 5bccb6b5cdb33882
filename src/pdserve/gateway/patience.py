"""How long an answer on its way may take: until its first byte, between two pieces, and as a whole; and its reader to read.

One timer for a whole answer, set anew only when it fires: a timer per piece would cost more than the piece. Whoever takes the
pieces writes down when one came; knows nothing of what is in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ClientStalled, DeadlinePassed, Reason

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from pdserve.engine.transport import EngineClient
    from pdserve.errors import EngineError


class Patience:
    """Of one answer. `on_end` gets the error when it has run out."""

    __slots__ = (
        "_deadline_s",
        "_engine",
        "_first",
        "_loop",
        "_on_end",
        "_silence_timeout_s",
        "_timeout_s",
        "_timer",
        "_total_s",
        "has_begun",
        "is_paused",
        "last_piece_s",
    )

    def __init__(
        self,
        engine: EngineClient,
        on_end: Callable[[EngineError | ClientStalled | DeadlinePassed], None],
        *,
        loop: asyncio.AbstractEventLoop,
        first: str,
        first_timeout_s: float,
        silence_timeout_s: float,
        total_timeout_s: float,
        total_s: float,
    ) -> None:
        """Timeouts in seconds; `first` names what is waited for at first.

        `total_timeout_s` is what is left of the `total_s` that the whole request may take.
        """
        self._engine = engine
        self._on_end = on_end
        self._loop = loop
        self._first = first
        self._silence_timeout_s = silence_timeout_s
        self._timeout_s = first_timeout_s
        self._total_s = total_s
        self.has_begun = False
        self.is_paused = False
        """Whether it is the reader that is waited for."""
        self.last_piece_s = loop.time()
        self._deadline_s = self.last_piece_s + total_timeout_s
        self._timer = loop.call_at(self._next_check_s(), self._check)

    def begin(self) -> None:
        """The first byte came: from now on silence counts. Only the first call does anything."""
        if self.has_begun:
            return
        self.has_begun = True
        self.last_piece_s = self._loop.time()
        self._timeout_s = self._silence_timeout_s
        self._timer.cancel()
        self._timer = self._loop.call_at(self._next_check_s(), self._check)

    def pause(self, *, is_paused: bool) -> None:
        """The reader wants nothing now, or goes on."""
        self.is_paused = is_paused
        self.last_piece_s = self._loop.time()

    def close(self) -> None:
        """It has come, or is not waited for any more. Whoever waited is let go of: no cycle is left for the collector."""
        self._timer.cancel()
        self._on_end = _ignore

    def _next_check_s(self) -> float:
        return min(self.last_piece_s + self._timeout_s, self._deadline_s)

    def _check(self) -> None:
        now_s = self._loop.time()
        if now_s >= self._deadline_s:
            self._on_end(DeadlinePassed(self._total_s))
        elif now_s < self.last_piece_s + self._timeout_s:
            self._timer = self._loop.call_at(self._next_check_s(), self._check)
        elif self.is_paused:
            self._on_end(ClientStalled(self._timeout_s))
        elif self.has_begun:
            self._on_end(self._engine.timeout_of("the next piece", self._timeout_s, reason=Reason.SILENCE_TIMEOUT))
        else:
            self._on_end(self._engine.timeout_of(self._first, self._timeout_s, reason=Reason.FIRST_BYTE_TIMEOUT))


def _ignore(_: EngineError | ClientStalled | DeadlinePassed) -> None:
    """Nobody waits any more."""
