"""Evidence from D's own counts, and what of them the client sees."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pdserve.core import PrefillPlace
from pdserve.protocol.usage import UsageWatch, judge, parse_usage

if TYPE_CHECKING:
    from pdserve.protocol.openai import Fields


def _usage(num_prompt: int, num_cached: int | None) -> dict[str, Any]:
    details = None if num_cached is None else {"cached_tokens": num_cached}
    return {"prompt_tokens": num_prompt, "completion_tokens": 2, "prompt_tokens_details": details}


@pytest.mark.parametrize(
    ("num_cached", "place"),
    [
        (300, PrefillPlace.REMOTE),
        (299, PrefillPlace.LOCAL),
        (256, PrefillPlace.LOCAL),
        (0, PrefillPlace.LOCAL),
        (None, PrefillPlace.UNPROVEN),
    ],
)
def test_only_a_prompt_that_d_computed_nothing_of_came_from_p(num_cached: int | None, place: PrefillPlace) -> None:
    """D's own prefix hits never cover the last token, so they cannot pass for a transfer."""
    evidence = judge(parse_usage(json.dumps(_usage(300, num_cached)).encode()))
    assert evidence.place is place
    assert bool(evidence.cause) == (place is not PrefillPlace.REMOTE)


@pytest.mark.parametrize("raw", [None, b"null", b"3", b"{}", b'{"prompt_tokens":"x"}'])
def test_no_counts_prove_nothing(raw: bytes | None) -> None:
    """A missing or odd usage is unproven, never an error."""
    assert judge(parse_usage(raw)).place is PrefillPlace.UNPROVEN


def _cached(num_tokens: int) -> Fields:
    return {"cached_tokens": msgspec.Raw(b"%d" % num_tokens)}


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def test_the_event_that_only_the_gateway_asked_for_is_taken_out() -> None:
    """A client that did not ask for usage does not see any; the gateway has its evidence."""
    watch = UsageWatch(prefill_details=_cached(0), client_wants_usage=False)
    assert watch.edit_event(_event(choices=[], usage=_usage(9, 9))) == b""
    assert judge(watch.usage).place is PrefillPlace.REMOTE


def test_the_client_sees_ps_prefix_hits() -> None:
    """`cached_tokens` is what one engine alone would have said, not what came over the wire."""
    watch = UsageWatch(prefill_details=_cached(4), client_wants_usage=True)
    out = json.loads(watch.edit_event(_event(id="x", choices=[], usage=_usage(9, 9))).removeprefix(b"data: "))
    assert out == {"id": "x", "choices": [], "usage": _usage(9, 4)}
    assert watch.usage is not None
    assert watch.usage.num_cached_tokens == 9


def test_only_what_d_says_something_of_is_replaced() -> None:
    """D's shape stays: a key that D left out is not brought in, one that P does not know is D's."""
    watch = UsageWatch(
        prefill_details={**_cached(4), "created_cache_tokens": msgspec.Raw(b"16"), "p_only": msgspec.Raw(b"1")},
        client_wants_usage=True,
    )
    body = {
        "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9, "created_cache_tokens": 0, "d": 2}}
    }
    details = json.loads(watch.edit_answer(json.dumps(body).encode()))["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 4, "created_cache_tokens": 16, "d": 2}


def test_a_request_without_a_handoff_keeps_ds_count() -> None:
    """On D alone D's prefix hits are the client's."""
    watch = UsageWatch(prefill_details=None, client_wants_usage=True)
    event = _event(choices=[], usage=_usage(9, 8))
    assert watch.edit_event(event) == event


def test_usage_inside_text_is_left_alone() -> None:
    """An event that only speaks of usage is passed on as it came."""
    watch = UsageWatch(prefill_details=_cached(0), client_wants_usage=False)
    event = _event(choices=[{"delta": {"tool": {"usage": {"a": 1}}}}])
    assert watch.edit_event(event) == event
    assert watch.edit_event(b'data: broken "usage":{\n\n') == b'data: broken "usage":{\n\n'


def test_a_whole_answer_hides_the_connectors_fields() -> None:
    """A client never sees a handoff; everything else stays, in its order."""
    watch = UsageWatch(prefill_details=_cached(1), client_wants_usage=False)
    body = json.dumps({"id": "x", "usage": _usage(5, 5), "kv_transfer_params": {"remote_host": "h"}, "z": 1}).encode()
    out = json.loads(watch.edit_answer(body))
    assert list(out) == ["id", "usage", "kv_transfer_params", "z"]
    assert out["kv_transfer_params"] is None
    assert out["usage"] == _usage(5, 1)


def test_a_whole_answer_without_anything_to_hide_is_not_touched() -> None:
    """The bytes go on as D sent them."""
    body = b'{ "id": "x", "usage": {"prompt_tokens": 5} }'
    assert UsageWatch(prefill_details=_cached(1), client_wants_usage=False).edit_answer(body) == body


def test_an_answer_that_is_no_json_is_passed_on() -> None:
    """The relay is not the judge of an engine's bodies."""
    watch = UsageWatch(prefill_details=_cached(1), client_wants_usage=False)
    assert watch.edit_answer(b"\xff\x00") == b"\xff\x00"
    assert watch.usage is None
