"""Evidence from D's own counts, and what of them the client sees."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pdserve.core import PrefillPlace
from pdserve.protocol import usage as usages
from pdserve.protocol.openai import Api, Fields
from pdserve.protocol.usage import Usage, UsageWatch, judge, parse_usage

CHAT = Api.CHAT_COMPLETIONS


def _usage(num_prompt: int, num_cached: int | None) -> dict[str, Any]:
    details = None if num_cached is None else {"cached_tokens": num_cached}
    return {"prompt_tokens": num_prompt, "completion_tokens": 2, "prompt_tokens_details": details}


def _response_usage(num_prompt: int, num_cached: int) -> dict[str, Any]:
    """As vLLM 0.32 writes it."""
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cache_write_tokens": num_prompt - num_cached,
            "cached_tokens": num_cached,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": 2,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": num_prompt + 2,
    }


def _message_usage(num_prompt: int, num_cached: int, num_created: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": num_prompt - num_cached - num_created,
        "output_tokens": 2,
        "cache_creation_input_tokens": num_created,
        "cache_read_input_tokens": num_cached,
    }


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
    evidence = judge(parse_usage(CHAT, json.dumps(_usage(300, num_cached)).encode()))
    assert evidence.place is place
    assert bool(evidence.cause) == (place is not PrefillPlace.REMOTE)


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize("raw", [None, b"null", b"3", b"{}", b'{"prompt_tokens":"x"}', b'{"input_tokens":[]}'])
def test_no_counts_prove_nothing(api: Api, raw: bytes | None) -> None:
    """A missing or odd usage is unproven, never an error."""
    assert judge(parse_usage(api, raw)).place is PrefillPlace.UNPROVEN


@pytest.mark.parametrize(
    ("api", "usage"),
    [
        (Api.COMPLETIONS, _usage(300, 128)),
        (CHAT, _usage(300, 128)),
        (Api.RESPONSES, _response_usage(300, 128)),
        (Api.MESSAGES, _message_usage(300, 128)),
        (Api.MESSAGES, _message_usage(300, 128, 64)),
    ],
)
def test_each_apis_counts_are_the_same_counts(api: Api, usage: dict[str, Any]) -> None:
    """Anthropic's `input_tokens` leave out what came from the cache or went into it; the others' do not."""
    assert parse_usage(api, json.dumps(usage).encode()) == Usage(300, 2, 128)


def _cached(num_tokens: int) -> Fields:
    return {"cached_tokens": msgspec.Raw(b"%d" % num_tokens)}


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def _named_event(name: str, **fields: Any) -> bytes:
    data = json.dumps({"type": name, **fields}, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n".encode()


def _data(event: bytes) -> Any:
    return json.loads(event.partition(b"data: ")[2])


def test_the_event_that_only_the_gateway_asked_for_is_taken_out() -> None:
    """A client that did not ask for usage does not see any; the gateway has its evidence."""
    watch = UsageWatch(CHAT, prefill_details=_cached(0), client_wants_usage=False)
    assert watch.edit_event(_event(choices=[], usage=_usage(9, 9))) == b""
    assert judge(watch.usage).place is PrefillPlace.REMOTE


def test_the_client_sees_ps_prefix_hits() -> None:
    """`cached_tokens` is what one engine alone would have said, not what came over the wire."""
    watch = UsageWatch(CHAT, prefill_details=_cached(4), client_wants_usage=True)
    out = _data(watch.edit_event(_event(id="x", choices=[], usage=_usage(9, 9))))
    assert out == {"id": "x", "choices": [], "usage": _usage(9, 4)}
    assert watch.usage == Usage(9, 2, 9)


def test_only_what_d_says_something_of_is_replaced() -> None:
    """D's shape stays: a key that D left out is not brought in, one that P does not know is D's."""
    watch = UsageWatch(
        CHAT,
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
    watch = UsageWatch(CHAT, prefill_details=None, client_wants_usage=True)
    event = _event(choices=[], usage=_usage(9, 8))
    assert watch.edit_event(event) == event


def test_usage_inside_text_is_left_alone() -> None:
    """An event that only speaks of usage is passed on as it came."""
    watch = UsageWatch(CHAT, prefill_details=_cached(0), client_wants_usage=False)
    event = _event(choices=[{"delta": {"tool": {"usage": {"a": 1}}}}])
    assert watch.edit_event(event) == event
    assert watch.edit_event(b'data: broken "usage":{\n\n') == b'data: broken "usage":{\n\n'


def test_a_whole_answer_hides_the_connectors_fields() -> None:
    """A client never sees a handoff; everything else stays, in its order."""
    watch = UsageWatch(CHAT, prefill_details=_cached(1), client_wants_usage=False)
    body = json.dumps({"id": "x", "usage": _usage(5, 5), "kv_transfer_params": {"remote_host": "h"}, "z": 1}).encode()
    out = json.loads(watch.edit_answer(body))
    assert list(out) == ["id", "usage", "kv_transfer_params", "z"]
    assert out["kv_transfer_params"] is None
    assert out["usage"] == _usage(5, 1)


@pytest.mark.parametrize("api", Api)
def test_a_whole_answer_without_anything_to_hide_is_not_touched(api: Api) -> None:
    """The bytes go on as D sent them."""
    body = b'{ "id": "x", "usage": {"prompt_tokens": 5}, "kv_transfer_params": null }'
    assert UsageWatch(api, prefill_details=_cached(1), client_wants_usage=False).edit_answer(body) == body


@pytest.mark.parametrize("api", Api)
def test_an_answer_that_is_no_json_is_passed_on(api: Api) -> None:
    """The relay is not the judge of an engine's bodies."""
    watch = UsageWatch(api, prefill_details=_cached(1), client_wants_usage=False)
    assert watch.edit_answer(b"\xff\x00") == b"\xff\x00"
    assert watch.edit_event(b"data: \xff\x00\n\n") == b"data: \xff\x00\n\n"
    assert watch.usage is None


@pytest.mark.parametrize(
    ("api", "name"),
    [(Api.COMPLETIONS, "choices"), (CHAT, "choices"), (Api.RESPONSES, "output"), (Api.MESSAGES, "content")],
)
def test_what_is_no_answer_is_noted(api: Api, name: str) -> None:
    """By the member without which no client could read it; nonsense with status 200 is an engine's fault."""
    for body, has_answer in (
        (b'{"%b": []}' % name.encode(), True),
        (b'{"usage": {}}', False),
        (b"[]", False),
        (b"", False),
    ):
        watch = UsageWatch(api, prefill_details=_cached(1), client_wants_usage=False)
        watch.edit_answer(body)
        assert watch.has_answer is has_answer


def _response(num_cached: int, **fields: Any) -> dict[str, Any]:
    return {"id": "resp_1", "output": [{"text": '"usage"'}], "usage": _response_usage(300, num_cached), **fields}


def _response_details(num_cached: int) -> Fields:
    details = usages.prompt_details(Api.RESPONSES, msgspec.Raw(json.dumps(_response_usage(300, num_cached)).encode()))
    assert details is not None
    return details


def test_a_response_tells_ps_prefix_hits() -> None:
    """What P wrote to its cache is P's to tell as well."""
    watch = UsageWatch(Api.RESPONSES, prefill_details=_response_details(128), client_wants_usage=True)
    body = json.dumps(_response(300, kv_transfer_params={"remote_host": "h"})).encode()
    assert json.loads(watch.edit_answer(body)) == _response(128, kv_transfer_params=None)
    assert watch.usage == Usage(300, 2, 300)


def test_a_responses_last_event_is_edited_as_the_whole_answer_is() -> None:
    """It holds all of the response; the events before hold no usage."""
    watch = UsageWatch(Api.RESPONSES, prefill_details=_response_details(128), client_wants_usage=True)
    created = _named_event("response.created", sequence_number=0, response={"id": "r", "usage": None})
    assert watch.edit_event(created) == created
    assert watch.usage is None
    done = _named_event(
        "response.completed", sequence_number=9, response=_response(300, kv_transfer_params={"remote_host": "h"})
    )
    out = watch.edit_event(done)
    assert out == _named_event(
        "response.completed", sequence_number=9, response=_response(128, kv_transfer_params=None)
    )
    assert judge(watch.usage).place is PrefillPlace.REMOTE


def _message_details(num_cached: int, num_created: int) -> Fields:
    usage = json.dumps(_message_usage(300, num_cached, num_created)).encode()
    details = usages.prompt_details(Api.MESSAGES, msgspec.Raw(usage))
    assert details is not None
    return details


def test_a_message_tells_ps_counts() -> None:
    """One count cannot change without the others: together they are the prompt."""
    watch = UsageWatch(Api.MESSAGES, prefill_details=_message_details(128, 128), client_wants_usage=True)
    body = json.dumps(
        {"id": "m", "usage": _message_usage(300, 300), "kv_transfer_params": {"a": 1}, "type": "message"}
    ).encode()
    assert json.loads(watch.edit_answer(body)) == {
        "id": "m",
        "usage": _message_usage(300, 128, 128),
        "type": "message",
    }
    assert judge(watch.usage).place is PrefillPlace.REMOTE


def test_a_message_whose_p_gave_only_a_number_still_adds_up() -> None:
    """Without details from P's usage, its handoff's count of prefix hits is all there is."""
    watch = UsageWatch(Api.MESSAGES, prefill_details=usages.cache_hits(Api.MESSAGES, 128), client_wants_usage=True)
    body = json.dumps({"usage": _message_usage(300, 300)}).encode()
    assert json.loads(watch.edit_answer(body))["usage"] == _message_usage(300, 128)


def test_a_messages_stream_tells_its_counts_at_its_end() -> None:
    """The first event speaks of the prompt alone and says nothing of a cache, so there is nothing to replace in it."""
    watch = UsageWatch(Api.MESSAGES, prefill_details=_message_details(128, 128), client_wants_usage=True)
    start = _named_event("message_start", message={"id": "m", "usage": {"output_tokens": 0, "input_tokens": 300}})
    assert watch.edit_event(start) == start
    assert watch.usage is None
    delta = _named_event("message_delta", delta={"stop_reason": "end_turn"}, usage=_message_usage(300, 300))
    out = watch.edit_event(delta)
    assert out == _named_event("message_delta", delta={"stop_reason": "end_turn"}, usage=_message_usage(300, 128, 128))
    assert watch.usage == Usage(300, 2, 300)


def test_a_message_that_tells_nothing_of_a_cache_is_not_changed() -> None:
    """D runs without --enable-prompt-tokens-details: so would one engine alone."""
    watch = UsageWatch(Api.MESSAGES, prefill_details=_message_details(128, 0), client_wants_usage=True)
    body = b'{"usage": {"input_tokens": 300, "output_tokens": 2}}'
    assert watch.edit_answer(body) == body
    assert judge(watch.usage).place is PrefillPlace.UNPROVEN


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (Api.COMPLETIONS, _event(choices=[], usage=_usage(9, 9))),
        (CHAT, _event(choices=[], usage=_usage(9, 9))),
        (Api.RESPONSES, _named_event("response.completed", response={"usage": _response_usage(9, 9)})),
        (Api.MESSAGES, _named_event("message_delta", usage=_message_usage(9, 9))),
    ],
)
def test_every_usage_holds_its_mark(api: Api, event: bytes) -> None:
    """The relay looks only into events that hold it."""
    assert UsageWatch(api, prefill_details=None, client_wants_usage=True).mark in event
