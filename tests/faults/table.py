"""Every fault of the stand-in, by the side that suffers it: what the client gets, what pdserve does, which metric moves.

The tests play each row; docs/operations.md shows the same rows. A row is asked through all four APIs, whole and streamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.asking import APIS, RESPONSES
from pdserve.core import PrefillPlace, Role
from pdserve.errors import Reason
from pdserve.telemetry.metrics import (
    ENGINE_FAILURES,
    HANDOFFS_REFUSED,
    PAIR_FAILURES,
    PREFILLS,
    REQUESTS,
    RETRIES,
    Metric,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.telemetry.tally import Tally


@dataclass(frozen=True, slots=True)
class Right:
    """The answer that one engine alone gives; `place` is where its prompt was computed."""

    place: PrefillPlace

    def __str__(self) -> str:
        return f"the right answer ({self.place})"


@dataclass(frozen=True, slots=True)
class Told:
    """An error with a status of its own, before anything else was sent."""

    status: int
    reason: Reason

    def __str__(self) -> str:
        return f"{self.status} `{self.reason}`"


@dataclass(frozen=True, slots=True)
class Cut:
    """The beginning of the right answer, then an error event and no end mark."""

    reason: Reason

    def __str__(self) -> str:
        return f"the beginning, then an error event, `{self.reason}`"


Outcome = Right | Told | Cut
REMOTE, LOCAL = Right(PrefillPlace.REMOTE), Right(PrefillPlace.LOCAL)
UNREACHABLE = Told(502, Reason.ENGINE_UNREACHABLE)
BROKE_OFF = Told(502, Reason.ENGINE_BROKE_OFF)
NONSENSE = Told(502, Reason.ENGINE_PROTOCOL)
SILENT = Told(504, Reason.FIRST_BYTE_TIMEOUT)


@dataclass(frozen=True, slots=True)
class Shape:
    """One way to ask."""

    api: str
    is_stream: bool

    def __str__(self) -> str:
        return f"{self.api}{' streamed' if self.is_stream else ''}"


SHAPES = tuple(Shape(api, is_stream) for api in APIS for is_stream in (False, True))


@dataclass(frozen=True, slots=True)
class Seen:
    """What clients get. `unlike` holds the shapes that get something else than their kind."""

    whole: Outcome
    stream: Outcome
    unlike: tuple[tuple[Shape, Outcome], ...] = ()

    def by(self, shape: Shape) -> Outcome:
        """What a client that asks in this way gets."""
        return dict(self.unlike).get(shape, self.stream if shape.is_stream else self.whole)


def same(outcome: Outcome) -> Seen:
    """For whoever asks in whatever way."""
    return Seen(outcome, outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fault of one side."""

    fault: str
    """As `pdserve sim engine --fault` spells it."""
    side: Role
    once: Seen
    """1P1D, and the fault strikes one leg."""
    always: Seen
    """1P1D, and it strikes every leg."""
    other: Seen
    """2P2D, and it strikes every leg to one of the two: what those clients get whose request went there first."""
    is_slow: bool
    """A deadline ends it."""
    waits_for_lease: bool
    """P's blocks stay until its lease ends: nobody but P knows of them, or no D is left to tell it."""
    always_waits_for_lease: bool
    """The same, where the fault strikes always: the release suffers it too."""
    metric: Metric
    """What must move when it strikes once."""
    labels: tuple[str, ...]
    """The metric's first labels; of client requests, the outcome."""
    does: str

    @property
    def name(self) -> str:
        """For tests."""
        return f"{self.side}: {self.fault}"

    @property
    def shown_labels(self) -> tuple[tuple[str, str], ...]:
        """The metric's labels by name."""
        if self.metric is REQUESTS:
            return (("outcome", self.labels[0]),)
        return tuple(zip(self.metric.labels, self.labels, strict=False))

    def count(self, tally: Tally) -> int:
        """Where the metric stands."""
        if self.metric is REQUESTS:
            return sum(tally.value(REQUESTS, api, *self.labels) for api in APIS)
        return tally.value(self.metric, *self.labels)


def _rows(
    side: Role,
    faults: str,
    does: str,
    moves: tuple[Metric, *tuple[str, ...]],
    *,
    once: Seen,
    always: Seen | None = None,
    other: Seen | None = None,
    is_slow: bool = False,
    waits: bool = False,
    always_waits: bool = False,
) -> Iterator[Row]:
    """Faults that come to the same; `always` is as `once`, and `other` as the right answer, unless told otherwise."""
    metric, *labels = moves
    for fault in faults.split():
        yield Row(
            fault=fault,
            side=side,
            once=once,
            always=always or once,
            other=other or same(REMOTE),
            is_slow=is_slow,
            waits_for_lease=waits,
            always_waits_for_lease=waits or always_waits,
            metric=metric,
            labels=tuple(labels),
            does=does,
        )


def _refusals(side: Role, statuses: tuple[int, ...]) -> Iterator[Row]:
    for status in statuses:
        told = same(Told(status, Reason.ENGINE_STATUS))
        does = "It speaks of the client's request: handed on as the engine said it, and not tried again."
        moves = (REQUESTS, "engine_status")
        yield from _rows(side, f"error_status:{status}", does, moves, once=told, other=told)


_P_FAILED = "Another P is asked, else D computes the prompt."
_P_LEFT = f"P is looked at before it gets more. {_P_FAILED}"
_P_LATE = f"`timeouts.prefill` ends the leg. {_P_FAILED}"
_P_UNUSABLE = f"P's answer holds no handoff that D could take. {_P_FAILED}"
_P_LOST = f"P's answer cannot be read, so nobody knows its handoff. {_P_FAILED}"
_P_AGAIN = "A kept connection that ends unanswered is replaced, once."
_P_PROVEN = "P's pairs are proven again before they get traffic."
_AGAIN = "Before the first byte: a fresh P leg and another D; with one D, that one without a handoff."
_KV_GONE = f"D cannot fetch the KV and fails. {_AGAIN}"
_CUT = "After the first byte an error event ends the stream, without its end mark."
_WHOLE_AGAIN = f"{_CUT} A whole answer is tried again."
_LATE = f"`timeouts.first_byte` ends a stream's leg. {_AGAIN} A whole answer has had all its time."

_P, _D = Role.PREFILL, Role.DECODE
_P_BROKE_OFF = (RETRIES, "prefill", "engine_broke_off")
_P_SILENT = (RETRIES, "prefill", "prefill_timeout")
_P_STATUS = (ENGINE_FAILURES, "prefill-0", "engine_status")
_P_NONSENSE = (ENGINE_FAILURES, "prefill-0", "engine_protocol")
_P_UNREACHABLE = (RETRIES, "prefill", "engine_unreachable")
_PAIR = (PAIR_FAILURES, "prefill-0", "decode-0")
_REMOTE = (PREFILLS, "remote")
_BROKE = (ENGINE_FAILURES, "decode-0", "engine_broke_off")

PREFILL_ROWS = (
    *_rows(
        _P,
        "answer_without_handoff half_handoff:remote_engine_id half_handoff:remote_request_id half_handoff:remote_host "
        "half_handoff:remote_port half_handoff:remote_block_ids",
        _P_UNUSABLE,
        (HANDOFFS_REFUSED, "unusable"),
        once=same(LOCAL),
        waits=True,
    ),
    *_rows(_P, "never_answer", _P_LATE, _P_SILENT, once=same(LOCAL), is_slow=True),
    *_rows(_P, "head_only stall_after:0", _P_LATE, _P_SILENT, once=same(LOCAL), is_slow=True, waits=True),
    *_refusals(_P, (400, 404, 422)),
    *_rows(_P, "error_status:429 error_status:503", _P_FAILED, (RETRIES, "prefill", "engine_status"), once=same(LOCAL)),
    *_rows(_P, "error_status:500 error_status:501", _P_FAILED, _P_STATUS, once=same(LOCAL)),
    *_rows(_P, "error_after:0", _P_FAILED, _P_STATUS, once=same(LOCAL), waits=True),
    *_rows(_P, "kill_core", _P_LEFT, (RETRIES, "prefill"), once=same(LOCAL)),
    *_rows(_P, "die:0", _P_LEFT, _P_UNREACHABLE, once=same(LOCAL)),
    *_rows(_P, "die:1", _P_LEFT, _P_BROKE_OFF, once=same(LOCAL)),
    *_rows(_P, "restart:0", _P_PROVEN, _P_UNREACHABLE, once=same(LOCAL)),
    *_rows(_P, "restart:1", _P_PROVEN, _P_BROKE_OFF, once=same(LOCAL)),
    *_rows(_P, "die_after_answer restart_after_answer", _KV_GONE, _PAIR, once=same(LOCAL)),
    *_rows(
        _P,
        "break_off_after:0 reset_after:0 half_close_after:0",
        _P_AGAIN,
        _REMOTE,
        once=same(REMOTE),
        always=same(LOCAL),
        waits=True,
    ),
    *_rows(
        _P,
        "break_off_after:1 reset_after:1 half_close_after:1 half_close_in_length long_length:100",
        _P_LOST,
        _P_BROKE_OFF,
        once=same(LOCAL),
        waits=True,
    ),
    *_rows(
        _P,
        "garbage_sse:0 truncate_after:1 end_without_done short_length:10 false_chunks no_http answer_instead "
        "answer_instead:<html> answer_instead:",
        _P_LOST,
        _P_NONSENSE,
        once=same(LOCAL),
        waits=True,
    ),
    *_rows(_P, "slow", "An answer is read in whatever pieces it comes.", _REMOTE, once=same(REMOTE)),
)

_CUT_OFF = Cut(Reason.ENGINE_BROKE_OFF)
_FAILED = Told(500, Reason.ENGINE_STATUS)
_RESPONSES_STREAM = Shape(RESPONSES, is_stream=True)

DECODE_ROWS = (
    *_rows(
        _D,
        "ignore_handoff",
        "D answers 200 and computed the prompt itself; its own count tells.",
        (PREFILLS, "local"),
        once=same(LOCAL),
        other=same(LOCAL),
        waits=True,
    ),
    *_rows(_D, "refuse_handshake", _AGAIN, _PAIR, once=same(LOCAL), always_waits=True),
    *_rows(
        _D,
        "never_load",
        _LATE,
        _PAIR,
        once=Seen(SILENT, LOCAL),
        other=Seen(SILENT, REMOTE),
        is_slow=True,
        always_waits=True,
    ),
    *_rows(
        _D,
        "never_answer head_only stall_after:0",
        _LATE,
        _PAIR,
        once=Seen(SILENT, LOCAL),
        always=same(SILENT),
        other=Seen(SILENT, REMOTE),
        is_slow=True,
        always_waits=True,
    ),
    *_rows(
        _D,
        "stall_after:3",
        f"`timeouts.silence` ends a stream's leg. {_CUT} A whole answer has had all its time.",
        (ENGINE_FAILURES, "decode-0", "silence_timeout"),
        once=Seen(SILENT, Cut(Reason.SILENCE_TIMEOUT)),
        other=Seen(SILENT, Cut(Reason.SILENCE_TIMEOUT)),
        is_slow=True,
        always_waits=True,
    ),
    *_rows(_D, "come_late:0.05", "D's heartbeats keep P's lease; the answer comes late.", _REMOTE, once=same(REMOTE)),
    *_refusals(_D, (400, 404, 422)),
    *(
        row
        for status in (429, 503)
        for row in _rows(
            _D,
            f"error_status:{status}",
            "D is busy: another D is asked, else the client is told.",
            (REQUESTS, "engine_status"),
            once=same(Told(status, Reason.ENGINE_STATUS)),
        )
    ),
    *(
        row
        for status in (500, 501)
        for row in _rows(
            _D,
            f"error_status:{status}",
            _AGAIN,
            _PAIR,
            once=same(LOCAL),
            always=same(Told(status, Reason.ENGINE_STATUS)),
        )
    ),
    *_rows(
        _D,
        "error_after:0",
        _AGAIN,
        _PAIR,
        once=same(LOCAL),
        always=Seen(_FAILED, _FAILED, ((_RESPONSES_STREAM, BROKE_OFF),)),
    ),
    *_rows(
        _D,
        "error_after:3",
        _WHOLE_AGAIN,
        (ENGINE_FAILURES, "decode-0"),
        once=Seen(LOCAL, Cut(Reason.ENGINE_STATUS), ((_RESPONSES_STREAM, _CUT_OFF),)),
        always=Seen(_FAILED, Cut(Reason.ENGINE_STATUS), ((_RESPONSES_STREAM, _CUT_OFF),)),
        other=Seen(REMOTE, Cut(Reason.ENGINE_STATUS), ((_RESPONSES_STREAM, _CUT_OFF),)),
    ),
    *_rows(
        _D,
        "kill_core die:0 restart:0",
        f"D is looked at before it gets more. {_AGAIN}",
        (REQUESTS, "engine_unreachable"),
        once=same(UNREACHABLE),
        waits=True,
    ),
    *_rows(
        _D,
        "die:2 restart:2",
        _WHOLE_AGAIN,
        _BROKE,
        once=Seen(UNREACHABLE, _CUT_OFF),
        other=Seen(REMOTE, _CUT_OFF),
        waits=True,
    ),
    *_rows(
        _D,
        "break_off_after:0 reset_after:0 half_close_after:0",
        f"D is looked at, and keeps its traffic. {_AGAIN}",
        (ENGINE_FAILURES, "decode-0", "engine_unreachable"),
        once=same(LOCAL),
        always=same(UNREACHABLE),
    ),
    *_rows(
        _D,
        "break_off_after:2 reset_after:2 half_close_after:2",
        _WHOLE_AGAIN,
        _BROKE,
        once=Seen(LOCAL, _CUT_OFF),
        always=Seen(BROKE_OFF, _CUT_OFF),
        other=Seen(REMOTE, _CUT_OFF),
    ),
    *_rows(
        _D,
        "half_close_in_length long_length:100",
        "A stream is whole once its end mark came. A whole answer of another length than announced is tried again.",
        _BROKE,
        once=Seen(LOCAL, REMOTE),
        always=Seen(BROKE_OFF, REMOTE),
    ),
    *_rows(
        _D,
        "truncate_after:1 end_without_done short_length:10",
        _WHOLE_AGAIN,
        _PAIR,
        once=Seen(LOCAL, _CUT_OFF),
        always=Seen(NONSENSE, _CUT_OFF),
        other=Seen(REMOTE, _CUT_OFF),
    ),
    *_rows(
        _D,
        "garbage_sse:3",
        _WHOLE_AGAIN,
        (REQUESTS, "engine_protocol"),
        once=Seen(LOCAL, Cut(Reason.ENGINE_PROTOCOL)),
        always=Seen(NONSENSE, Cut(Reason.ENGINE_PROTOCOL)),
        other=Seen(REMOTE, Cut(Reason.ENGINE_PROTOCOL)),
    ),
    *_rows(
        _D,
        "garbage_sse:0 false_chunks no_http answer_instead answer_instead:<html> answer_instead:",
        _AGAIN,
        _PAIR,
        once=same(LOCAL),
        always=same(NONSENSE),
    ),
    *_rows(_D, "slow", "Events are put together from whatever pieces they come in.", _REMOTE, once=same(REMOTE)),
    *_rows(
        _D,
        "die_after_answer restart_after_answer",
        "The answer was whole: it stands. The next one finds D gone.",
        _REMOTE,
        once=same(REMOTE),
    ),
)

ROWS = (*PREFILL_ROWS, *DECODE_ROWS)

UNHARMED = {
    Role.PREFILL: ("ignore_handoff", "refuse_handshake", "never_load"),
    Role.DECODE: ("answer_without_handoff", "half_handoff", "stale"),
}
"""Faults that matter on the other side only."""
UNSEEN = {Role.PREFILL: ("stale", "come_late")}
"""Faults that no gateway can see: see docs/operations.md."""
