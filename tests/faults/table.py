"""Every fault of the stand-in, by the side that suffers it: what the client gets, what pdserve does, which metric moves.

The tests play each row; docs/operations.md shows the same rows. A row is asked through all four APIs, whole and streamed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.asking import APIS, MESSAGES, RESPONSES
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
REFUSED = {status: Told(status, Reason.ENGINE_STATUS) for status in (400, 404, 422, 429, 500, 501, 503)}
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


_RESPONSES_STREAM = Shape(RESPONSES, is_stream=True)
_MESSAGES_STREAM = Shape(MESSAGES, is_stream=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fault of one side."""

    fault: str
    """As `pdserve sim engine --fault` spells it."""
    side: Role
    once: Seen
    """1P1D, and the fault strikes one leg."""
    always: Seen | None
    """1P1D, and it strikes every leg; None where the deadlines make it the same but slow."""
    other: Seen = field(default_factory=lambda: same(REMOTE))
    """2P2D, and it strikes every leg to one of the two: what those clients get whose request went there first."""
    is_slow: bool = False
    """A deadline ends it."""
    waits_for_lease: bool = False
    """P's blocks stay until its lease ends: nobody but P knows of them, or no D is left to tell it."""
    always_waits_for_lease: bool = False
    """The same, where the fault strikes always: the release suffers it too."""
    metric: Metric | None
    labels: tuple[str, ...] = ()
    does: str

    @property
    def name(self) -> str:
        """The row's name, here and in the document."""
        return f"{self.side}: {self.fault}"


def _prefill(
    fault: str,
    does: str,
    *,
    metric: Metric = RETRIES,
    labels: tuple[str, ...] = ("prefill",),
    once: Seen | None = None,
    always: Seen | None = None,
    waits: bool = False,
    slow: bool = False,
    other: Seen | None = None,
) -> Row:
    """P fails: D computes the prompt itself, or another P does."""
    return Row(
        fault=fault,
        side=Role.PREFILL,
        once=once or same(LOCAL),
        always=None if slow else always or once or same(LOCAL),
        other=other or same(REMOTE),
        waits_for_lease=waits,
        always_waits_for_lease=waits,
        is_slow=slow,
        metric=metric,
        labels=labels,
        does=does,
    )


def _decode(
    fault: str,
    does: str,
    *,
    metric: Metric = RETRIES,
    labels: tuple[str, ...] = ("decode",),
    once: Seen,
    always: Seen | None,
    waits: bool = False,
    always_waits: bool = False,
    slow: bool = False,
    other: Seen | None = None,
) -> Row:
    """D fails."""
    return Row(
        fault=fault,
        side=Role.DECODE,
        once=once,
        always=always,
        other=other or same(REMOTE),
        waits_for_lease=waits,
        always_waits_for_lease=waits or always_waits,
        is_slow=slow,
        metric=metric,
        labels=labels,
        does=does,
    )


_UNUSABLE = "P's answer holds no handoff that D could take: another P is asked, else D computes the prompt."
_P_FAILED = "Another P is asked, else D computes the prompt."
_P_LOST = "P's answer cannot be read, so nobody knows its handoff. Another P is asked, else D computes the prompt."
_CLIENTS = "It speaks of the client's request: handed on as the engine said it, and not tried again."
_AGAIN = "Before the first byte: a fresh P leg and another D; with one D it computes the prompt itself."
_NOT_AGAIN = "No other D is left: the client is told."
_CUT = "The status is out: an error event ends the stream, and its end mark is left out."

_UNHARMED = "Matters on the other side only."

PREFILL_ROWS = (
    _prefill("answer_without_handoff", _UNUSABLE, metric=HANDOFFS_REFUSED, labels=("unusable",), waits=True),
    *(
        _prefill(f"half_handoff:{key}", _UNUSABLE, metric=HANDOFFS_REFUSED, labels=("unusable",), waits=True)
        for key in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")
    ),
    _prefill("never_answer", f"`timeouts.prefill` ends the leg. {_P_FAILED}", labels=("prefill", "prefill_timeout"), slow=True),
    _prefill("head_only", f"`timeouts.prefill` ends the leg. {_P_FAILED}", labels=("prefill", "prefill_timeout"), waits=True, slow=True),
    _prefill("stall_after:0", f"`timeouts.prefill` ends the leg. {_P_FAILED}", labels=("prefill", "prefill_timeout"), waits=True, slow=True),
    *(
        _prefill(f"error_status:{status}", _CLIENTS, metric=REQUESTS, labels=(), once=same(REFUSED[status]), other=same(REFUSED[status]))
        for status in (400, 404, 422)
    ),
    *(_prefill(f"error_status:{status}", _P_FAILED, labels=("prefill", "engine_status")) for status in (429, 503)),
    *(
        _prefill(f"error_status:{status}", _P_FAILED, metric=ENGINE_FAILURES, labels=("prefill-0", "engine_status"))
        for status in (500, 501)
    ),
    _prefill("error_after:0", _P_FAILED, metric=ENGINE_FAILURES, labels=("prefill-0", "engine_status"), waits=True),
    _prefill("kill_core", f"P is looked at before it gets more. {_P_FAILED}", labels=("prefill",)),
    _prefill("die:0", f"P is looked at before it gets more. {_P_FAILED}", labels=("prefill", "engine_unreachable")),
    _prefill("die:1", f"P is looked at before it gets more. {_P_FAILED}", labels=("prefill", "engine_broke_off")),
    _prefill("die_after_answer", f"D cannot fetch the KV and fails. {_AGAIN}", metric=PAIR_FAILURES, labels=("prefill-0",)),
    _prefill("restart:0", "Its pairs are proven again before they get traffic.", labels=("prefill", "engine_unreachable")),
    _prefill("restart:1", "Its pairs are proven again before they get traffic.", labels=("prefill", "engine_broke_off")),
    _prefill("restart_after_answer", f"D cannot fetch the KV and fails. {_AGAIN}", metric=PAIR_FAILURES, labels=("prefill-0",)),
    *(
        _prefill(
            f"{fault}:0",
            "A kept connection that ends unanswered is replaced, once.",
            once=same(REMOTE), always=same(LOCAL), metric=PREFILLS, labels=(), waits=True,
        )
        for fault in ("break_off_after", "reset_after", "half_close_after")
    ),
    *(
        _prefill(f"{fault}:1", _P_LOST, labels=("prefill", "engine_broke_off"), waits=True)
        for fault in ("break_off_after", "reset_after", "half_close_after")
    ),
    *(
        _prefill(fault, _P_LOST, labels=("prefill", "engine_broke_off"), waits=True)
        for fault in ("half_close_in_length", "long_length:100")
    ),
    *(
        _prefill(fault, _P_LOST, metric=ENGINE_FAILURES, labels=("prefill-0", "engine_protocol"), waits=True)
        for fault in (
            "garbage_sse:0", "truncate_after:1", "end_without_done", "short_length:10", "false_chunks", "no_http",
            "answer_instead", "answer_instead:<html>", "answer_instead:",
        )
    ),
    _prefill("slow", "An answer is read in whatever pieces it comes.", once=same(REMOTE), metric=PREFILLS, labels=("remote",)),
)  # fmt: skip

_MID_STREAM = Seen(BROKE_OFF, Cut(Reason.ENGINE_BROKE_OFF))
_ENGINE_BREAKS_OFF = ((_RESPONSES_STREAM, Cut(Reason.ENGINE_BROKE_OFF)),)
_RESPONSES_BREAKS = ((_RESPONSES_STREAM, BROKE_OFF),)

DECODE_ROWS = (
    _decode("ignore_handoff", "D answers 200 and computed the prompt itself; its own count tells.", once=same(LOCAL), always=same(LOCAL),
            other=same(LOCAL), metric=PREFILLS, labels=("local",), waits=True),
    _decode("refuse_handshake", _AGAIN, once=same(LOCAL), always=same(LOCAL), metric=PAIR_FAILURES, labels=("prefill-0", "decode-0"),
            always_waits=True),
    _decode("never_load", f"`timeouts.first_byte` ends a stream's leg. {_AGAIN} A whole answer has had its time.",
            once=Seen(SILENT, LOCAL), always=None, other=Seen(SILENT, REMOTE), slow=True, metric=PAIR_FAILURES, labels=("prefill-0", "decode-0")),
    _decode("come_late:0.05", "D's heartbeats keep P's lease; the answer comes late.", once=same(REMOTE), always=same(REMOTE),
            metric=PREFILLS, labels=("remote",)),
    *(
        _decode(fault, f"`timeouts.first_byte` ends a stream's leg. {_AGAIN} A whole answer has had its time.",
                once=Seen(SILENT, LOCAL), always=None, other=Seen(SILENT, REMOTE), slow=True,
                metric=PAIR_FAILURES, labels=("prefill-0", "decode-0"))
        for fault in ("never_answer", "head_only", "stall_after:0")
    ),
    _decode("stall_after:3", f"`timeouts.silence` ends the leg. {_CUT}", once=Seen(SILENT, Cut(Reason.SILENCE_TIMEOUT)), always=None,
            other=Seen(SILENT, Cut(Reason.SILENCE_TIMEOUT)), slow=True, metric=ENGINE_FAILURES, labels=("decode-0", "silence_timeout")),
    *(
        _decode(f"error_status:{status}", _CLIENTS, once=same(REFUSED[status]), always=same(REFUSED[status]), other=same(REFUSED[status]),
                metric=REQUESTS, labels=())
        for status in (400, 404, 422)
    ),
    *(
        _decode(f"error_status:{status}", f"D is busy: another D is asked. {_NOT_AGAIN}", once=same(REFUSED[status]), always=same(REFUSED[status]),
                metric=REQUESTS, labels=())
        for status in (429, 503)
    ),
    *(
        _decode(f"error_status:{status}", _AGAIN, once=same(LOCAL), always=same(REFUSED[status]), metric=PAIR_FAILURES, labels=("prefill-0", "decode-0"))
        for status in (500, 501)
    ),
    _decode("error_after:0", _AGAIN, once=same(LOCAL), always=Seen(REFUSED[500], REFUSED[500], _RESPONSES_BREAKS),
            metric=PAIR_FAILURES, labels=("prefill-0", "decode-0")),
    _decode("error_after:3", _CUT, once=Seen(LOCAL, Cut(Reason.ENGINE_STATUS), _ENGINE_BREAKS_OFF),
            always=Seen(REFUSED[500], Cut(Reason.ENGINE_STATUS), _ENGINE_BREAKS_OFF),
            other=Seen(REMOTE, Cut(Reason.ENGINE_STATUS), _ENGINE_BREAKS_OFF), metric=ENGINE_FAILURES, labels=("decode-0",)),
    *(
        _decode(fault, f"{_AGAIN} {_NOT_AGAIN}", once=same(UNREACHABLE), always=same(UNREACHABLE), metric=REQUESTS, labels=(), waits=True)
        for fault in ("kill_core", "die:0")
    ),
    _decode("restart:0", f"{_AGAIN} {_NOT_AGAIN}", once=same(UNREACHABLE), always=same(UNREACHABLE), metric=REQUESTS, labels=(), waits=True),
    *(
        _decode(fault, f"D is looked at, and gets its traffic meanwhile. {_AGAIN}", once=same(LOCAL), always=same(UNREACHABLE),
                metric=ENGINE_FAILURES, labels=("decode-0", "engine_unreachable"))
        for fault in ("break_off_after:0", "reset_after:0", "half_close_after:0")
    ),
    *(
        _decode(fault, _CUT, once=Seen(UNREACHABLE, Cut(Reason.ENGINE_BROKE_OFF)), always=Seen(UNREACHABLE, Cut(Reason.ENGINE_BROKE_OFF)),
                other=Seen(REMOTE, Cut(Reason.ENGINE_BROKE_OFF)), metric=ENGINE_FAILURES, labels=("decode-0", "engine_broke_off"), waits=True)
        for fault in ("die:2", "restart:2")
    ),
    *(
        _decode(fault, f"{_CUT} A whole answer is tried again.", once=Seen(LOCAL, Cut(Reason.ENGINE_BROKE_OFF)), always=_MID_STREAM,
                other=Seen(REMOTE, Cut(Reason.ENGINE_BROKE_OFF)), metric=ENGINE_FAILURES, labels=("decode-0", "engine_broke_off"))
        for fault in ("break_off_after:2", "reset_after:2", "half_close_after:2")
    ),
    *(
        _decode(fault, "The end mark came, so the stream is whole. A whole answer of another length than announced is tried again.",
                once=Seen(LOCAL, REMOTE), always=Seen(BROKE_OFF, REMOTE), metric=ENGINE_FAILURES, labels=("decode-0", "engine_broke_off"))
        for fault in ("half_close_in_length", "long_length:100")
    ),
    _decode("truncate_after:1", f"{_CUT} A whole answer that is none is tried again.",
            once=Seen(LOCAL, Cut(Reason.ENGINE_BROKE_OFF)),
            always=Seen(NONSENSE, Cut(Reason.ENGINE_BROKE_OFF)),
            other=Seen(REMOTE, Cut(Reason.ENGINE_BROKE_OFF)), metric=PAIR_FAILURES, labels=("prefill-0", "decode-0")),
    *(
        _decode(fault, f"{_CUT} A whole answer that is none is tried again.", once=Seen(LOCAL, Cut(Reason.ENGINE_BROKE_OFF)),
                always=Seen(NONSENSE, Cut(Reason.ENGINE_BROKE_OFF)), other=Seen(REMOTE, Cut(Reason.ENGINE_BROKE_OFF)),
                metric=PAIR_FAILURES, labels=("prefill-0", "decode-0"))
        for fault in ("end_without_done", "short_length:10")
    ),
    _decode("garbage_sse:0", _AGAIN, once=same(LOCAL), always=same(NONSENSE), metric=PAIR_FAILURES, labels=("prefill-0", "decode-0")),
    _decode("garbage_sse:3", _CUT, once=Seen(LOCAL, Cut(Reason.ENGINE_PROTOCOL)), always=Seen(NONSENSE, Cut(Reason.ENGINE_PROTOCOL)),
            other=Seen(REMOTE, Cut(Reason.ENGINE_PROTOCOL)), metric=REQUESTS, labels=()),
    *(
        _decode(fault, _AGAIN, once=same(LOCAL), always=same(NONSENSE), metric=PAIR_FAILURES, labels=("prefill-0", "decode-0"))
        for fault in ("false_chunks", "no_http", "answer_instead", "answer_instead:<html>", "answer_instead:")
    ),
    _decode("slow", "Events are put together from whatever pieces they come in.", once=same(REMOTE), always=same(REMOTE),
            metric=PREFILLS, labels=("remote",)),
    *(
        _decode(fault, "The answer was whole: it stands. D is looked at once its connections end.", once=same(REMOTE), always=same(REMOTE),
                metric=PREFILLS, labels=("remote",))
        for fault in ("die_after_answer", "restart_after_answer")
    ),
)  # fmt: skip

ROWS = (*PREFILL_ROWS, *DECODE_ROWS)

UNHARMED = {
    Role.PREFILL: ("ignore_handoff", "refuse_handshake", "never_load"),
    Role.DECODE: ("answer_without_handoff", "half_handoff", "stale"),
}
"""Faults that matter on the other side only."""
UNSEEN = {Role.PREFILL: ("stale", "come_late")}
"""Faults that no gateway can see: see docs/operations.md."""
