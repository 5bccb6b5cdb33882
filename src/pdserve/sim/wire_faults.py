"""Faults of the answer on its way to the client. "Pieces" are a stream's events; a whole answer is two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.sim.bad_wires import (
    BreakingWire,
    GarbageWire,
    InsteadWire,
    LyingWire,
    NoHttpWire,
    SilentWire,
    SlowWire,
    TruncatingWire,
    WithoutLastPieceWire,
)
from pdserve.sim.bare import BareConnection
from pdserve.sim.fault import Fault

if TYPE_CHECKING:
    from pdserve.http.server import Response
    from pdserve.sim.fault import Victim
    from pdserve.sim.wire import Wire

_GARBAGE = b'data: {"id": "cmpl-, nonsense\xff\n\n'


@dataclass(frozen=True, slots=True)
class BreakOffAfter(Fault):
    """Close the connection after so many pieces of the body; 0 is before the head."""

    num_pieces: int = 0

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del victim
        return BreakingWire(wire, self.num_pieces, BareConnection(response).drop)


@dataclass(frozen=True, slots=True)
class ResetAfter(Fault):
    """Reset the connection (RST) after so many pieces of the body; 0 is before the head."""

    num_pieces: int = 0

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del victim
        return BreakingWire(wire, self.num_pieces, BareConnection(response).reset)


@dataclass(frozen=True, slots=True)
class HalfCloseAfter(Fault):
    """End the sending side after so many pieces, and go on listening: nobody hangs up."""

    num_pieces: int = 1

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del victim
        return BreakingWire(wire, self.num_pieces, BareConnection(response).half_close)


@dataclass(frozen=True, slots=True)
class HalfCloseInLength(Fault):
    """End the sending side in the middle of a body whose length was announced."""

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del wire, victim
        connection = BareConnection(response)
        return LyingWire(connection, lambda length: b"content-length: %d\r\n" % (2 * length + 1), connection.half_close)


@dataclass(frozen=True, slots=True)
class Die(Fault):
    """The whole engine is gone after so many pieces of the body; 0 is before the head."""

    num_pieces: int = 0

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response
        return BreakingWire(wire, self.num_pieces, victim.die)


@dataclass(frozen=True, slots=True)
class Restart(Fault):
    """The engine restarts after so many pieces of the body: same ports, new engine id, nothing remembered."""

    num_pieces: int = 0

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response
        return BreakingWire(wire, self.num_pieces, victim.begin_restart)


@dataclass(frozen=True, slots=True)
class Slow(Fault):
    """The body comes a byte at a time, with this long between two."""

    byte_delay_s: float = 0.0

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response
        return SlowWire(wire, self.byte_delay_s, victim.engine.clock)


@dataclass(frozen=True, slots=True)
class HeadOnly(Fault):
    """A head, and no body ever."""

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response, victim
        return SilentWire(wire)


@dataclass(frozen=True, slots=True)
class GarbageSse(Fault):
    """Something that is no event comes after so many events."""

    num_pieces: int = 1

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response, victim
        return GarbageWire(wire, self.num_pieces, _GARBAGE)


@dataclass(frozen=True, slots=True)
class TruncateAfter(Fault):
    """The body ends in good order, in the middle of the piece after so many."""

    num_pieces: int = 1

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response, victim
        return TruncatingWire(wire, self.num_pieces)


@dataclass(frozen=True, slots=True)
class EndWithoutDone(Fault):
    """A stream ends in good order without [DONE], or what the API has in its place, and without an error."""

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response, victim
        return WithoutLastPieceWire(wire)


@dataclass(frozen=True, slots=True)
class LongLength(Fault):
    """The announced length is larger than the body by so much; then the connection closes."""

    num_bytes: int = 100

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del wire, victim
        return LyingWire(BareConnection(response), lambda length: b"content-length: %d\r\n" % (length + self.num_bytes))


@dataclass(frozen=True, slots=True)
class ShortLength(Fault):
    """The announced length is smaller than the body by so much: the rest looks like another answer."""

    num_bytes: int = 10

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del wire, victim
        length_of = lambda length: b"content-length: %d\r\n" % max(0, length - self.num_bytes)  # noqa: E731
        return LyingWire(BareConnection(response), length_of)


@dataclass(frozen=True, slots=True)
class FalseChunks(Fault):
    """The head announces chunks, and the body is plain."""

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del wire, victim
        return LyingWire(BareConnection(response), lambda _: b"transfer-encoding: chunked\r\n")


@dataclass(frozen=True, slots=True)
class NoHttp(Fault):
    """What comes is no HTTP."""

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del wire, victim
        return NoHttpWire(BareConnection(response), b"\x15\x03\x03\x00\x02\x02\x46 no such protocol\r\n\r\n")


@dataclass(frozen=True, slots=True)
class AnswerInstead(Fault):
    """200, with another body: by default JSON of another shape; `<html>` is no JSON, and nothing is nothing."""

    body: str = '{"hello": ["world"]}'

    def wrap(self, wire: Wire, response: Response, victim: Victim) -> Wire:
        del response, victim
        return InsteadWire(wire, self.body.encode())
