"""The event splitter: whatever the chunking, the same bytes come out."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protocol import sse
from pdserve.protocol.sse import EventRelay, EventTooLong, event_data, event_name, split_events, with_data

_LINE = st.sampled_from(
    [
        b'data: {"choices":[{"text":" a"}]}',
        b'data: {"choices":[],"usage":{"prompt_tokens":3}}',
        b'data: {"choices":[{"text":"\\"usage\\":{ \\n"}]}',
        b": comment",
        b"event: ping\ndata: x",
        b"data: [DONE]",
        b"data:",
    ]
)
_EVENT = st.tuples(_LINE, st.sampled_from([b"\n\n", b"\r\n\r\n"])).map(b"".join)


@st.composite
def _chunked(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    events = draw(st.lists(_EVENT, max_size=12))
    stream = b"".join(events)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    bounds = [0, *cuts, len(stream)]
    return events, [stream[start:end] for start, end in itertools.pairwise(bounds)]


@given(_chunked())
def test_any_chunking_gives_the_same_bytes(case: tuple[list[bytes], list[bytes]]) -> None:
    """Cutting a stream anywhere changes neither its bytes nor which events are looked into."""
    events, chunks = case
    seen: list[bytes] = []

    def edit(event: bytes) -> bytes:
        seen.append(event)
        return b"<" + event + b">"

    relay = EventRelay(edit, mark=sse.PROMPT_TOKENS_MARK)
    out = b"".join(relay.feed(chunk) for chunk in chunks) + relay.flush()
    with_usage = [event for event in events if b'"usage":{' in event]
    assert seen == with_usage
    assert out == b"".join(b"<" + event + b">" if event in with_usage else event for event in events)


@given(_chunked())
def test_only_whole_events_go_out(case: tuple[list[bytes], list[bytes]]) -> None:
    """After every piece, what went out ends at the end of an event."""
    _, chunks = case
    relay = EventRelay(lambda event: event, mark=sse.PROMPT_TOKENS_MARK)
    for chunk in chunks:
        out = relay.feed(chunk)
        assert not out or out.endswith((b"\n\n", b"\r\n\r\n"))


def test_an_endless_event_ends_the_stream() -> None:
    """An unfinished event above the limit neither grows in memory nor goes out in pieces."""
    relay = EventRelay(lambda event: event, mark=sse.PROMPT_TOKENS_MARK)
    piece = b"x" * (sse.MAX_EVENT_BYTES // 2)
    assert [relay.feed(piece) for _ in range(2)] == [b"", b""]
    with pytest.raises(EventTooLong):
        relay.feed(b"x")
    assert relay.flush() == b""


def test_a_long_event_stays_whole() -> None:
    """However long it is and however it was cut, it is looked into, and the end mark behind it is an event of its own."""
    event = b'data: {"text":"%b","usage":{"prompt_tokens":3}}\n\n' % (b"x" * (3 * 1024 * 1024))
    stream = event + b"data: [DONE]\n\n"
    seen: list[bytes] = []

    def edit(event: bytes) -> bytes:
        seen.append(event)
        return b"edited"

    relay = EventRelay(edit, mark=sse.PROMPT_TOKENS_MARK)
    pieces = [stream[start : start + 65536] for start in range(0, len(stream), 65536)]
    assert [relay.feed(piece) for piece in pieces[:-1]] == [b""] * (len(pieces) - 1)
    assert relay.feed(pieces[-1]) == b"editeddata: [DONE]\n\n"
    assert seen == [event]


def test_a_long_event_in_small_pieces_costs_no_more_than_its_bytes() -> None:
    """What is held is neither copied nor searched again with each piece."""
    relay = EventRelay(lambda event: event, mark=sse.PROMPT_TOKENS_MARK)
    event = b"data: " + b"x" * (8 * 1024 * 1024) + b"\n\n"
    started_s = time.process_time()
    out = b"".join(relay.feed(event[start : start + 256]) for start in range(0, len(event), 256))
    assert out == event
    assert time.process_time() - started_s < 5  # Copying all that is held with each piece takes minutes.


def test_a_stream_cut_short_keeps_its_rest() -> None:
    """What follows the last whole event is given by flush, once."""
    relay = EventRelay(lambda event: event, mark=sse.PROMPT_TOKENS_MARK)
    assert relay.feed(b"data: a\n\ndata: b") == b"data: a\n\n"
    assert relay.flush() == b"data: b"
    assert relay.flush() == b""


@given(st.lists(_EVENT, max_size=10))
def test_split_events_finds_every_end(events: list[bytes]) -> None:
    """Events joined and split again are the same events."""
    assert split_events(b"".join(events)) == events


def test_event_data_joins_lines() -> None:
    """Several data lines of one event are one payload; comments and other fields are not part of it."""
    assert event_data(b": c\nevent: e\ndata: a\ndata:b\n\n") == b"a\nb"


@given(_chunked())
def test_the_mark_is_the_apis(case: tuple[list[bytes], list[bytes]]) -> None:
    """Each API has its own word for usage; an event without it is not looked into."""
    events, chunks = case
    seen: list[bytes] = []

    def look(event: bytes) -> bytes:
        seen.append(event)
        return event

    relay = EventRelay(look, mark=b": comment")
    out = b"".join(relay.feed(chunk) for chunk in chunks) + relay.flush()
    assert seen == [event for event in events if b": comment" in event]
    assert out == b"".join(events)


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (b"event: message_start\ndata: {}\n\n", b"message_start"),
        (b"event:ping\r\ndata: {}\r\n\r\n", b"ping"),
        (b'data: {"a":"\\nevent: error"}\n\n', b""),
        (b": comment\n\n", b""),
        (b"event: x", b"x"),
    ],
)
def test_an_events_name_is_its_first_lines(event: bytes, name: bytes) -> None:
    """Only what vLLM writes: the name before the data."""
    assert event_name(event) == name


def test_another_payload_leaves_the_other_lines() -> None:
    """A named event keeps its name; a payload of several lines stays one."""
    assert with_data(b"event: e\nid: 3\ndata: a\ndata: b\n\n", b"c") == b"event: e\nid: 3\ndata: c\n\n"
    assert event_data(with_data(b"data: a\r\n\r\n", b"{\n}")) == b"{\n}"
