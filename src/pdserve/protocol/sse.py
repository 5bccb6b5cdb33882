"""Server-sent events as bytes: finds where events end, and looks into one only when it may hold usage.

A piece that ends an event and holds no usage, which is nearly every one, is handed on as it came: two comparisons and one
search. Any chunking of a stream gives the same bytes out. Knows no sockets and no API.
"""

from __future__ import annotations

from typing import Protocol

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""Of one event. The longest is a response's last, which repeats all of it with instructions, tools and logprobs; passed on in
pieces it could be neither edited nor known for the end, so a stream with a longer one fails."""

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_LONGEST_END = 4
_OBJECT_END = b"}\n\n"
PROMPT_TOKENS_MARK = b'"prompt_tokens"'
"""A key of every usage of completions and chat. Inside a longer string its quotes would be escaped; as the whole of one it only
makes the event be looked into."""


class EventTooLong(Exception):
    """An event that is longer than anything an engine has to say in one."""

    def __init__(self) -> None:
        super().__init__(f"sent an event of more than {MAX_EVENT_BYTES} bytes")


class UsageEdit(Protocol):
    """Called with an event that may hold usage; gives back what the client gets, possibly nothing."""

    def __call__(self, event: bytes) -> bytes:
        """One whole event, its blank line included."""


class EventRelay:
    """Splits one stream. Feed it pieces; send on what it gives back."""

    __slots__ = ("_edit", "_mark", "_pending")

    def __init__(self, edit: UsageEdit, *, mark: bytes) -> None:
        self._edit = edit
        self._mark = mark
        """What every event that is to be edited holds."""
        self._pending = bytearray()
        """The beginning of an event. Not a list of pieces: a piece of a few bytes would weigh fifty."""

    def is_plain(self, data: bytes) -> bool:
        """Whether a piece is whole events as they should be, with nothing to edit: `feed` would give it back as it is."""
        return data.endswith(_OBJECT_END) and self._mark not in data and not self._pending and look_sound(data)

    def feed(self, data: bytes) -> bytes:
        """Whole events, edited where they hold usage; an unfinished one waits for its rest. Raises EventTooLong."""
        if self._pending or not data.endswith(_EVENT_ENDS):
            data = self._whole_events(data)
        return self._edited(data) if self._mark in data else data

    def flush(self) -> bytes:
        """What is left when the stream ended in the middle of an event."""
        data, self._pending = bytes(self._pending), bytearray()
        return data

    def _whole_events(self, data: bytes) -> bytes:
        """What is complete with this piece. Only where the piece begins can an end lie across it."""
        held: bytes | bytearray = data
        start = 0
        if self._pending:
            start = max(0, len(self._pending) - _LONGEST_END + 1)
            self._pending += data
            held = self._pending
        end = _last_event_end(held, start)
        if len(held) - end > MAX_EVENT_BYTES:
            self._pending = bytearray()
            raise EventTooLong
        if end or held is data:
            self._pending = bytearray(held[end:])
        return bytes(held[:end])

    def _edited(self, data: bytes) -> bytes:
        return b"".join([self._edit(event) if self._mark in event else event for event in split_events(data)])


def split_events(data: bytes) -> list[bytes]:
    """Cut bytes into events; each keeps the blank line that ends it, and what is unfinished comes last."""
    if b"\r" not in data:
        *events, rest = data.split(b"\n\n")
        events = [event + b"\n\n" for event in events]
        return [*events, rest] if rest else events
    events, start = [], 0
    while start < len(data):
        end = _event_end(data, start)
        events.append(data[start:end])
        start = end
    return events


def look_sound(events: bytes) -> bool:
    """Whether every event ends as an object does; two searches, cheap enough for each piece of a stream."""
    return events.count(b"\n\n") == events.count(_OBJECT_END)


def is_sound(event: bytes) -> bool:
    """Whether an event can be one of vLLM's: a comment, `[DONE]`, or an object from its data's first byte to the last."""
    data = event_data(event).strip()
    return event.startswith(b":") or data == b"[DONE]" or (data[:1] == b"{" and data[-1:] == b"}")


def event_data(event: bytes) -> bytes:
    """The payload of an event: its `data:` lines joined, as the HTML standard has it."""
    return b"\n".join([line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")])


def event_name(event: bytes) -> bytes:
    """What the event calls itself in its first line; empty when it says nothing there."""
    if not event.startswith(b"event:"):
        return b""
    return event.partition(b"\n")[0][6:].strip()


def with_data(event: bytes, data: bytes) -> bytes:
    """The same event with another payload."""
    lines = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    lines += [b"data: " + line for line in data.split(b"\n")]
    return b"\n".join(lines) + b"\n\n"


def _event_end(data: bytes, start: int) -> int:
    end = len(data)
    for mark in _EVENT_ENDS:
        found = data.find(mark, start, end)
        if found >= 0:
            end = found + len(mark)
    return end


def _last_event_end(data: bytes | bytearray, start: int) -> int:
    """Where the last event ends; 0 where none does."""
    found = data.rfind(b"\n\n", start)
    end = found + 2 if found >= 0 else 0
    found = data.rfind(b"\r\n\r\n", start)
    return max(end, found + 4) if found >= 0 else end
