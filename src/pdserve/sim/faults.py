"""The faults by name, and what shall go wrong with the requests to come.

A new fault is a new class, in engine_faults.py or wire_faults.py, with the steps that it changes and a line in FAULTS.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.sim.engine_faults import (
    AnswerWithoutHandoff,
    ComeLate,
    DieAfterAnswer,
    ErrorAfter,
    ErrorStatus,
    HalfHandoff,
    IgnoreHandoff,
    KillCore,
    NeverAnswer,
    NeverLoad,
    RefuseHandshake,
    RestartAfterAnswer,
    Stale,
    StallAfter,
)
from pdserve.sim.fault import Fault, Victim
from pdserve.sim.wire_faults import (
    AnswerInstead,
    BreakOffAfter,
    Die,
    EndWithoutDone,
    FalseChunks,
    GarbageSse,
    HalfCloseAfter,
    HalfCloseInLength,
    HeadOnly,
    LongLength,
    NoHttp,
    ResetAfter,
    Restart,
    ShortLength,
    Slow,
    TruncateAfter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "FAULTS",
    "AnswerInstead",
    "AnswerWithoutHandoff",
    "BreakOffAfter",
    "ComeLate",
    "Die",
    "DieAfterAnswer",
    "EndWithoutDone",
    "ErrorAfter",
    "ErrorStatus",
    "FalseChunks",
    "Fault",
    "Faults",
    "GarbageSse",
    "HalfCloseAfter",
    "HalfCloseInLength",
    "HalfHandoff",
    "HeadOnly",
    "IgnoreHandoff",
    "KillCore",
    "LongLength",
    "NeverAnswer",
    "NeverLoad",
    "NoHttp",
    "RefuseHandshake",
    "ResetAfter",
    "Restart",
    "RestartAfterAnswer",
    "ShortLength",
    "Slow",
    "Stale",
    "StallAfter",
    "TruncateAfter",
    "Victim",
    "parse_fault",
]

FAULTS: Mapping[str, tuple[Callable[..., Fault], type]] = {
    # Handoff and transfer
    "answer_without_handoff": (AnswerWithoutHandoff, str),
    "half_handoff": (HalfHandoff, str),
    "stale": (Stale, str),
    "ignore_handoff": (IgnoreHandoff, str),
    "refuse_handshake": (RefuseHandshake, str),
    "never_load": (NeverLoad, str),
    "come_late": (ComeLate, float),
    # Engine
    "never_answer": (NeverAnswer, str),
    "error_status": (ErrorStatus, int),
    "error_after": (ErrorAfter, int),
    "stall_after": (StallAfter, int),
    "kill_core": (KillCore, str),
    "die": (Die, int),
    "die_after_answer": (DieAfterAnswer, str),
    "restart": (Restart, int),
    "restart_after_answer": (RestartAfterAnswer, str),
    # Connection
    "break_off_after": (BreakOffAfter, int),
    "reset_after": (ResetAfter, int),
    "half_close_after": (HalfCloseAfter, int),
    "half_close_in_length": (HalfCloseInLength, str),
    "slow": (Slow, float),
    "head_only": (HeadOnly, str),
    # What the answer says
    "garbage_sse": (GarbageSse, int),
    "truncate_after": (TruncateAfter, int),
    "end_without_done": (EndWithoutDone, str),
    "long_length": (LongLength, int),
    "short_length": (ShortLength, int),
    "false_chunks": (FalseChunks, str),
    "no_http": (NoHttp, str),
    "answer_instead": (AnswerInstead, str),
}
"""By the name that the command line uses, with the type of the one value that may follow it."""


def parse_fault(text: str) -> Fault:
    """Read `name` or `name:value`. Raises ConfigError."""
    name, colon, value = text.partition(":")
    if name not in FAULTS:
        raise ConfigError(f"there is no fault {name!r}; there are {', '.join(FAULTS)}")
    fault, kind = FAULTS[name]
    try:
        return fault(kind(value)) if colon else fault()
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"fault {name} does not take {value!r}") from exc


@dataclass(slots=True)
class _Injection:
    fault: Fault
    num_left: int | None
    share: float
    chance: random.Random

    def strikes(self) -> bool:
        """Whether the next request suffers."""
        if self.share < 1 and self.chance.random() >= self.share:
            return False
        if self.num_left is not None:
            self.num_left -= 1
        return True


class Faults:
    """What shall go wrong with the requests to come."""

    def __init__(self) -> None:
        self._injections: list[_Injection] = []
        self.num_struck = 0
        """How often a fault was dealt out."""

    def inject(self, fault: Fault, *, times: int | None = 1, share: float | None = None, seed: int = 0) -> None:
        """Let the next so many generating requests suffer a fault; None: all of them.

        With a share, each request to come suffers it with that probability, whatever `times` says.
        """
        chance = random.Random(seed)  # noqa: S311 - a run that can be repeated
        num_left, share = (times, 1.0) if share is None else (None, share)
        self._injections.append(_Injection(fault, num_left, share, chance))

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        self._injections.clear()

    def take(self) -> list[Fault]:
        """The faults of one request."""
        if not self._injections:
            return []
        taken = [injection.fault for injection in self._injections if injection.strikes()]
        self._injections = [injection for injection in self._injections if injection.num_left != 0]
        self.num_struck += len(taken)
        return taken
