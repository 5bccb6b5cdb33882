"""Whether two answers to one request are the same but for ids and times. Pure.

A stream is folded first: how vLLM cuts a text into chunks depends on how busy the machine is, but not what they add up to.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

_IDS = frozenset({"id", "item_id", "call_id", "tool_call_id", "request_id", "response_id"})
_TIMES = frozenset({"created", "created_at", "completed_at"})
_LEFT_OUT = frozenset({"system_fingerprint", "sequence_number"})
"""vLLM puts the fingerprint into a stream's usage event, or into its last chunk where none follows (0.32,
entrypoints/openai/completion/serving.py), so it goes with the usage that the gateway asked for. Events are numbered, and how
many there are depends on the cuts."""
_LOGPROB_TOLERANCE = 1e-3
"""Nats. D computes the last prompt token in a batch of another shape, which float32 shows in the fifth digit."""
_JOINED = frozenset({"text", "content", "reasoning", "arguments", "partial_json", "thinking", "delta"})
_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    name: str | None
    data: Any
    """Decoded, or the text `[DONE]`."""


def events_of(text: str) -> list[Event]:
    """A stream's events. Raises ValueError where one has no data or the last one is cut off."""
    *blocks, rest = text.split("\n\n")
    if rest:
        raise ValueError(f"the stream ends within an event: {rest!r}")
    return [_event(block) for block in blocks]


def _event(block: str) -> Event:
    fields = dict(line.split(": ", 1) for line in block.splitlines())
    data = fields["data"]
    return Event(fields.get("event"), data if data == _DONE else json.loads(data))


def fold(events: list[Event]) -> dict[str, Any]:
    """What a stream says, however it was cut: its kinds of events in order, and what each part adds up to."""
    if any(isinstance(event.data, dict) and "choices" in event.data for event in events):
        return _fold_choices(events)
    return _fold_typed(events)


def _fold_choices(events: list[Event]) -> dict[str, Any]:
    """Completions and chat. Choices may come in any order among each other, so each has a tale of its own."""
    kinds: dict[str, list[str]] = {}
    choices: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    usages: list[Any] = []
    num_chunks = 0
    for event in events:
        if not isinstance(event.data, dict):
            _note(kinds, "stream", str(event.data))
            continue
        chunk = dict(event.data)
        usages.append(chunk.pop("usage", None))
        parts = chunk.pop("choices", [])
        num_chunks += bool(parts)
        rest = _merged(rest, chunk)
        if not parts:
            _note(kinds, "stream", f"no choice: {sorted(event.data)}")
        for part in parts:
            index = str(part["index"])
            for kind in _kinds_of(part):
                _note(kinds, index, kind)
            choices[index] = _merged(choices.get(index, {}), part)
    num_usages = sum(usage is not None for usage in usages)
    told = (
        "never"
        if not num_usages
        else "at the end"
        if num_usages == 1
        else "always"
        if num_usages >= num_chunks
        else "often"
    )
    last_usage = next((usage for usage in reversed(usages) if usage is not None), None)
    return {"kinds": kinds, "choices": choices, "chunk": rest, "usage": last_usage, "usage is told": told}


def _kinds_of(part: dict[str, Any]) -> list[str]:
    """What a chunk speaks of, not how much. A busy API server puts the last words and the end into one chunk."""
    inner = part.get("delta", part)
    spoken = [name for name in ("role", "content", "text", "tool_calls", "reasoning") if inner.get(name) is not None]
    if part.get("finish_reason") is None:
        return ["+".join(spoken)]
    words = [name for name in spoken if inner[name] and name != "role"]
    return [*(["+".join(words)] if words else []), f"the end: {part['finish_reason']}"]


def _note(kinds: dict[str, list[str]], whose: str, kind: str) -> None:
    """Add a kind unless it only goes on."""
    told = kinds.setdefault(whose, [])
    if not told or told[-1] != kind:
        told.append(kind)


def _fold_typed(events: list[Event]) -> dict[str, Any]:
    """Responses and Messages: every event names its type; deltas add up, the others are compared as they are."""
    folded: list[dict[str, Any]] = []
    for event in events:
        data = event.data if isinstance(event.data, dict) else {"data": event.data}
        kind = event.name or data.get("type")
        if folded and folded[-1]["event"] == kind and str(kind).endswith("delta"):
            folded[-1]["data"] = _merged(folded[-1]["data"], data)
        else:
            folded.append({"event": kind, "data": data})
    return {"events": folded}


def _merged(one: Any, other: Any, *, key: str = "") -> Any:
    """One value after the other has come: texts and lists grow, objects merge, anything else is replaced."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict) and isinstance(other, dict):
        return {**one, **{name: _merged(one.get(name), value, key=name) for name, value in other.items()}}
    if isinstance(one, list) and isinstance(other, list):
        return _merged_lists(one, other)
    if isinstance(one, str) and isinstance(other, str) and key in _JOINED:
        return one + other
    return other


def _merged_lists(one: list[Any], other: list[Any]) -> list[Any]:
    """Parts that carry an index, such as tool calls, merge by it."""
    if not all(isinstance(item, dict) and "index" in item for item in one + other):
        return one + other
    by_index: dict[int, Any] = {}
    for item in one + other:
        by_index[item["index"]] = _merged(by_index.get(item["index"]), item)
    return list(by_index.values())


def normalised(value: Any, *, model: str, key: str = "") -> Any:
    """Without what may differ. An id becomes a mark, so that one that is missing shows."""
    if (key in _TIMES and value is not None) or (key in _IDS and isinstance(value, str) and value != model):
        return "<any>"
    if isinstance(value, dict):
        return {
            name: normalised(inner, model=model, key=name) for name, inner in value.items() if name not in _LEFT_OUT
        }
    if isinstance(value, list):
        return [normalised(inner, model=model) for inner in value]
    return value


def first_difference(ours: Any, theirs: Any, *, where: str = "answer") -> str | None:
    """The first place where two normalised values differ, as a sentence; None when there is none."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{where} has the keys {sorted(ours)} and not {sorted(theirs)}"
        pairs = [(f"{where}.{name}", ours[name], theirs[name]) for name in ours]
    elif isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{where} has {len(ours)} parts and not {len(theirs)}: {ours!r} and not {theirs!r}"
        pairs = [(f"{where}[{at}]", one, other) for at, (one, other) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return None if _is_same(ours, theirs) else f"{where} is {ours!r} and not {theirs!r}"
    differences = (first_difference(one, other, where=place) for place, one, other in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=0, abs_tol=_LOGPROB_TOLERANCE)
    return type(ours) is type(theirs) and bool(ours == theirs)
