"""The comparison behind the conformance matrix: it overlooks how a stream is cut, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.conformance.compare import events_of, first_difference, fold, normalised


def _stream(*chunks: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _chunk(text: str, *, index: int = 0, end: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": f"cmpl-{text}", "choices": [{"index": index, "text": text, "finish_reason": end}], **fields}


def _typed(*events: dict[str, Any]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def _difference(ours: str, theirs: str) -> str | None:
    values = [normalised(fold(events_of(text)), model="m") for text in (ours, theirs)]
    return first_difference(*values)


_WHOLE = _stream(_chunk("ab"), _chunk("c", end="stop"), {"choices": [], "usage": {"n": 3}})


@pytest.mark.parametrize(
    "other",
    [
        _stream(_chunk("a"), _chunk("b"), _chunk("c", end="stop"), {"choices": [], "usage": {"n": 3}}),
        _stream(_chunk("a"), _chunk("bc", end="stop"), {"choices": [], "usage": {"n": 3}}),
    ],
)
def test_cuts_are_overlooked(other: str) -> None:
    """The same text in other chunks, under other ids."""
    assert _difference(other, _WHOLE) is None


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (_stream(_chunk("ab"), _chunk("d", end="stop"), {"choices": [], "usage": {"n": 3}}), "text"),
        (_stream(_chunk("ab"), _chunk("c", end="length"), {"choices": [], "usage": {"n": 3}}), "kinds"),
        (_stream(_chunk("ab"), _chunk("c", end="stop"), {"choices": [], "usage": {"n": 4}}), "usage"),
        (_stream(_chunk("ab"), _chunk("c", end="stop")), "kinds"),
        (_stream(_chunk("ab", usage={"n": 2}), _chunk("c", end="stop"), {"choices": [], "usage": {"n": 3}}), "told"),
        (_stream(_chunk("abc"), _chunk("", index=1, end="stop"), {"choices": [], "usage": {"n": 3}}), "kinds"),
        (_WHOLE.replace("data: [DONE]\n\n", ""), "kinds"),
    ],
)
def test_anything_else_in_a_stream_is_seen(other: str, where: str) -> None:
    """Text, finish reason, usage and when it is told, choices, and the end."""
    difference = _difference(other, _WHOLE)
    assert difference is not None
    assert where in difference


def test_typed_events_are_compared_in_order() -> None:
    """Deltas add up, the others stand for themselves."""
    start, end = {"type": "start", "response": {"id": "1"}}, {"type": "end", "usage": 2}
    deltas = [{"type": "text.delta", "delta": letter, "index": 0} for letter in "ab"]
    joined = {"type": "text.delta", "delta": "ab", "index": 0}
    assert _difference(_typed(start, *deltas, end), _typed(start, joined, end)) is None
    assert _difference(_typed(start, deltas[0], end), _typed(start, joined, end)) is not None
    assert _difference(_typed(start, joined), _typed(start, joined, end)) is not None


def test_ids_and_times_are_marks() -> None:
    """What may differ is not compared, but that it is there is; a model's id is its name."""
    one = {"id": "a", "created": 1, "model": "m", "data": [{"id": "m"}], "system_fingerprint": "x"}
    other = {"id": "b", "created": 2, "model": "m", "data": [{"id": "m"}]}
    assert first_difference(normalised(one, model="m"), normalised(other, model="m")) is None
    assert first_difference(normalised({"id": None}, model="m"), normalised({"id": "a"}, model="m")) is not None
    assert first_difference(normalised({"data": [{"id": "n"}]}, model="m"), normalised(other, model="m")) is not None


def test_logprobs_may_differ_a_little() -> None:
    """Numbers are the same type and, where they are fractions, the same to 0.001."""
    assert first_difference({"logprob": -1.0}, {"logprob": -1.0004}) is None
    assert first_difference({"logprob": -1.0}, {"logprob": -1.01}) is not None
    assert first_difference({"usage": 1}, {"usage": True}) is not None


def test_a_stream_that_is_cut_off_is_no_stream() -> None:
    """Rather an error than half a comparison."""
    with pytest.raises(ValueError, match="within an event"):
        events_of('data: {"a": 1}\n\ndata: {"b"')
