"""Request bodies: split at the top level, exact in every byte that is not ours to change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core import AloneReason, RequestFacts
from pdserve.errors import InvalidRequest, NoEligibleEngine, Reason
from pdserve.protocol import openai
from pdserve.protocol.openai import Api

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), _JSON, max_size=8))
def test_a_body_survives_the_split(body: dict[str, Any]) -> None:
    """Split and joined, a body is the same value in the same order, less what clients may not say."""
    out = json.loads(openai.join(openai.split_request(json.dumps(body).encode())))
    expected = {name: value for name, value in body.items() if name not in openai.RESERVED_FIELDS}
    assert list(out.items()) == list(expected.items())


@given(st.binary(max_size=64))
def test_garbage_is_a_400_and_nothing_else(body: bytes) -> None:
    """Whatever a client sends, the splitter answers or refuses."""
    with pytest.raises(InvalidRequest) as caught:
        openai.split_request(b"[" + body)
    assert (caught.value.status, caught.value.reason) == (400, Reason.MALFORMED_JSON)


def test_big_integers_stay_exact() -> None:
    """A seed above 2**53 is not rounded on the way."""
    body = b'{"prompt":"p","seed":123456789012345678901234567890}'
    assert openai.join(openai.split_request(body)) == body


@pytest.mark.parametrize("name", sorted(openai.RESERVED_FIELDS))
def test_reserved_fields_are_dropped(name: str) -> None:
    """Only the gateway may tell an engine where KV lies."""
    assert name not in openai.split_request(json.dumps({"prompt": "p", name: {"do_remote_prefill": True}}).encode())


def test_an_escaped_reserved_name_is_dropped_too() -> None:
    """The name is compared after JSON's escapes are undone, as the engine would."""
    assert openai.split_request(rb'{"prompt":"p","kv_transfer_param\u0073":{}}').keys() == {"prompt"}


def test_reserved_names_in_xargs_are_dropped() -> None:
    """vLLM copies `vllm_xargs` to where it looks for a handoff."""
    body = rb'{"prompt":"p","vllm_xargs":{"kv_transfer_param\u0073":"x","mine":1}}'
    assert json.loads(openai.join(openai.split_request(body)))["vllm_xargs"] == {"mine": 1}


def _facts(api: Api = Api.COMPLETIONS, **fields: Any) -> RequestFacts:
    return openai.facts_of(api, openai.split_request(json.dumps(fields).encode()))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "p", "n": 2}, AloneReason.MANY_CHOICES),
        ({"prompt": "p", "best_of": 3}, AloneReason.MANY_CHOICES),
        ({"prompt": ["a", "b"]}, AloneReason.MANY_PROMPTS),
        ({"prompt": [[1, 2], [3]]}, AloneReason.MANY_PROMPTS),
        ({"prompt": "p", "echo": True}, AloneReason.PROMPT_ECHO),
        ({"prompt": "p", "prompt_logprobs": 0}, AloneReason.PROMPT_LOGPROBS),
        ({"prompt": "p", "use_beam_search": True}, AloneReason.BEAM_SEARCH),
        ({"prompt_embeds": "AAAA"}, AloneReason.MANY_PROMPTS),
        ({"prompt": "p", "n": "2"}, AloneReason.MANY_CHOICES),
        ({"prompt": "p", "n": 1.0}, AloneReason.MANY_CHOICES),
        ({"prompt": "p", "echo": 1}, AloneReason.PROMPT_ECHO),
        ({"prompt": "p", "use_beam_search": "yes"}, AloneReason.BEAM_SEARCH),
        ({"prompt": "p", "max_tokens": "5"}, AloneReason.UNUSUAL_FIELDS),
        ({"prompt": "p", "min_tokens": -1}, AloneReason.UNUSUAL_FIELDS),
        ({"prompt": "p", "stream": 1}, AloneReason.UNUSUAL_FIELDS),
        ({"prompt": "p", "stream_options": {"include_usage": True}}, AloneReason.UNUSUAL_FIELDS),
        ({"prompt": "p", "stream": True, "stream_options": {"include_usage": 1}}, AloneReason.UNUSUAL_FIELDS),
        ({"prompt": "p", "stream": True, "stream_options": "x"}, AloneReason.UNUSUAL_FIELDS),
    ],
)
def test_what_one_handoff_cannot_stand_for_goes_to_d_alone(fields: dict[str, Any], reason: AloneReason) -> None:
    """One handoff is one prompt and one choice."""
    assert _facts(**fields).alone_reason is reason


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "p"},
        {"prompt": ["a"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2, 3]]},
        {"prompt": "p", "n": 1, "best_of": 1, "echo": False, "prompt_logprobs": None, "use_beam_search": False},
        {"prompt": "p", "n": None, "prompt_embeds": None, "max_tokens": None, "stream_options": None},
        {"prompt": "p", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": None}},
    ],
)
def test_one_prompt_and_one_choice_can_be_split(fields: dict[str, Any]) -> None:
    """A list that holds one prompt is one prompt."""
    assert _facts(**fields).alone_reason is None


@pytest.mark.parametrize("prompt", [b'[%b"a", "b"]' % (b" " * 500), b'[\n\t"a","b"]', b"[ [1], [2] ]"])
def test_blanks_hide_no_second_prompt(prompt: bytes) -> None:
    """A second prompt would be given the first one's KV."""
    fields = openai.split_request(b'{"prompt": %b}' % prompt)
    assert openai.facts_of(Api.COMPLETIONS, fields).alone_reason is AloneReason.MANY_PROMPTS


@pytest.mark.parametrize("body", [b'{"prompt":"p","a":' + b"[" * 100_000, b'{"prompt":"p","n":1e999}', b'{"a":"\xff"}'])
def test_what_breaks_a_decoder_is_no_fault_of_ours(body: bytes) -> None:
    """Depth, size and bad UTF-8 end in a 400 or in a request for D alone, never in an exception of another kind."""
    try:
        facts = openai.facts_of(Api.COMPLETIONS, openai.split_request(body))
    except InvalidRequest:
        return
    assert facts.alone_reason is AloneReason.MANY_CHOICES


def test_a_request_without_a_prompt_is_refused() -> None:
    """It would cost two engines a round trip to learn the same."""
    with pytest.raises(InvalidRequest, match="'messages' is missing"):
        _facts(Api.CHAT_COMPLETIONS, prompt="p")


@pytest.mark.parametrize(
    ("options", "wants"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
def test_usage_is_asked_for_and_the_clients_wish_is_known(options: object, wants: bool) -> None:  # noqa: FBT001
    """The gateway needs the usage event as evidence; whether the client sees it is the client's wish."""
    fields = openai.split_request(json.dumps({"prompt": "p", "stream": True, "stream_options": options}).encode())
    assert openai.wants_stream_usage(fields) is wants
    assert openai.wants_stream_usage(openai.with_stream_usage(fields))


def test_other_stream_options_survive() -> None:
    """Asking for usage changes nothing else of what the client asked for."""
    fields = openai.split_request(b'{"prompt":"p","stream_options":{"continuous_usage_stats":true}}')
    sent = json.loads(openai.join(openai.with_stream_usage(fields)))["stream_options"]
    assert sent == {"continuous_usage_stats": True, "include_usage": True}


def test_an_error_has_openais_shape() -> None:
    """Clients find message, type and code where they look for them."""
    body = json.loads(openai.error_body(NoEligibleEngine("nobody there")))
    assert body == {"error": {"message": "nobody there", "type": "engine_error", "param": None, "code": "no_engine"}}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"error":{"code":400}}', 400),
        (b'{"error":{"code":null}}', 500),
        (b"x", 500),
        (b'{"error":{"code":200}}', 500),
    ],
)
def test_an_error_events_code_is_its_status(body: bytes, status: int) -> None:
    """A stream that failed before its first token is told with the status that the engine meant."""
    assert openai.error_status(body) == status
