"""Request bodies: split at the top level, exact in every byte that is not ours to change."""

from __future__ import annotations

import contextlib
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core import AloneReason, RequestFacts
from pdserve.errors import InvalidRequest, Reason
from pdserve.protocol import nixl, openai
from pdserve.protocol.api import LIMIT_FIELDS
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


_RESERVED_KEYS = sorted(openai.RESERVED_FIELDS)
_XARGS_KEYS = [*_RESERVED_KEYS, "kv_cache_report_mode"]


def test_reserved_names_in_xargs_are_dropped() -> None:
    """vLLM copies `vllm_xargs` to where it looks for a handoff."""
    body = rb'{"prompt":"p","vllm_xargs":{"kv_transfer_param\u0073":"x","mine":1}}'
    assert json.loads(openai.join(openai.split_request(body)))["vllm_xargs"] == {"mine": 1}


@pytest.mark.parametrize(
    "xargs",
    [
        b'{"\xed\xa0\x80": 1, "kv_transfer_params": "x"}',
        b'{"kv_transfer_params": "x", "\xff": 1}',
        rb'{"\ud800": 1, "kv_transfer_params": "x"}',
        b'{"kv_transfer_params": "x", "a": NaN}',
        b'"{}"',
        b"[]",
    ],
)
def test_xargs_that_cannot_be_read_are_refused(xargs: bytes) -> None:
    """Python's parser takes surrogates and NaN; what hides behind one would reach an engine unseen."""
    with pytest.raises(InvalidRequest):
        openai.split_request(b'{"prompt":"p","vllm_xargs":%b}' % xargs)


def test_null_xargs_are_none() -> None:
    """As a client writes that has none."""
    assert openai.join(openai.split_request(b'{"prompt":"p","vllm_xargs":null}')) == b'{"prompt":"p","vllm_xargs":null}'


@pytest.mark.parametrize(
    ("path", "api"),
    [
        (b"/v1/messages", Api.MESSAGES),
        (b"/v1/messages/count_tokens", Api.MESSAGES),
        (b"/v1/responses/resp_1/cancel", Api.RESPONSES),
        (b"/v1/completions", Api.COMPLETIONS),
        (b"/v1/completionsx", None),
        (b"/v1/models", None),
    ],
)
def test_a_paths_clients_are_known(path: bytes, api: Api | None) -> None:
    """An error goes out in the form that they read."""
    assert openai.api_of(path) is api


def _escaped(key: str, is_escaped: list[bool]) -> str:
    letters = itertools.zip_longest(key, is_escaped[: len(key)], fillvalue=False)
    return "".join(f"\\u{ord(str(letter)):04x}" if escaped else str(letter) for letter, escaped in letters)


@st.composite
def _members(draw: st.DrawFn, keys: list[str]) -> list[str]:
    """Members of an object: reserved ones, ordinary ones and doubles, their keys escaped anyhow."""
    chosen = draw(st.lists(st.sampled_from([*keys, "mine", "model"]), max_size=6))
    values = st.sampled_from(["1", "null", '{"do_remote_prefill":true}', '"x"', "[2]"])
    escapes = st.lists(st.booleans(), min_size=24, max_size=24)
    return [f'"{_escaped(key, draw(escapes))}": {draw(values)}' for key in chosen]


@given(_members(_RESERVED_KEYS), st.lists(_members(_XARGS_KEYS), max_size=3), st.lists(st.booleans(), max_size=10))
def test_no_reserved_name_gets_through(members: list[str], xargs: list[list[str]], escaped: list[bool]) -> None:
    """However it is spelled, and however often, at the top or in any `vllm_xargs`."""
    name = _escaped("vllm_xargs", escaped)
    inner = [f'"{name}": {{{", ".join(each)}}}' for each in xargs]
    body = "{" + ", ".join([*members, *inner]) + "}"
    out = json.loads(openai.join(openai.split_request(body.encode())))
    assert not openai.RESERVED_FIELDS & out.keys()
    assert not set(_XARGS_KEYS) & out.get("vllm_xargs", {}).keys()


@given(st.sampled_from(Api), st.dictionaries(st.text(max_size=8), _JSON, max_size=8), st.integers())
def test_what_shapes_the_prompt_is_the_same_on_both_legs(api: Api, more: dict[str, Any], big: int) -> None:
    """Byte for byte, known fields and unknown ones, whatever is in them."""
    more = {f"x_{name}": value for name, value in more.items()}
    shaping = dict.fromkeys(("messages", "system", "tools", "input", "instructions", "prompt", "thinking"), more)
    body = {"model": "m", **shaping, **more, "seed": big * 2**70, "stream": True, "max_tokens": 9, "min_tokens": 2}
    text = json.dumps(body, indent=_indent(big)).encode()
    fields = openai.split_request(text)
    prefill = nixl.prefill_fields(api, fields)
    changed = {"stream", "min_tokens", "store", "kv_transfer_params", *LIMIT_FIELDS}
    for name, value in fields.items():
        assert bytes(value) in text
        if name not in changed:
            assert prefill[name] is value
    assert not prefill.keys() - fields.keys() - changed


def _indent(seed: int) -> int | None:
    """Bodies with and without blanks."""
    return 2 if seed % 2 else None


def _facts(api: Api = Api.COMPLETIONS, **fields: Any) -> RequestFacts:
    return openai.facts_of(api, openai.split_request(json.dumps(fields).encode()))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "p", "n": 2}, AloneReason.MANY_CHOICES),
        ({"prompt": "p", "best_of": "3"}, AloneReason.MANY_CHOICES),
        ({"prompt": "p", "best_of": 3, "n": 2}, AloneReason.MANY_CHOICES),
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
        ({"prompt": "p", "min_tokens": None}, AloneReason.UNUSUAL_FIELDS),
        ({"prompt": "p", "max_tokens": 10**4300 // 3}, AloneReason.UNUSUAL_FIELDS),
        ({"prompt": "p", "truncate_prompt_tokens": -1}, AloneReason.UNUSUAL_FIELDS),
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
        {"prompt": "p", "best_of": 3},
        {"prompt": "p", "n": None, "prompt_embeds": None, "max_tokens": None, "stream_options": None},
        {"prompt": "p", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": None}},
        {"prompt": "p", "truncate_prompt_tokens": 100, "max_tokens": 0, "min_tokens": 0},
    ],
)
def test_one_prompt_and_one_choice_can_be_split(fields: dict[str, Any]) -> None:
    """A list that holds one prompt is one prompt."""
    assert _facts(**fields).alone_reason is None


_TOOL = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"stream": True, "stream_options": {"include_obfuscation": False}, "n": 2, "echo": True}, None),
        ({"tools": [_TOOL, {"type": "custom", "name": "c"}, {"type": "namespace", "name": "n", "tools": []}]}, None),
        ({"store": True, "background": False, "max_output_tokens": None, "previous_response_id": None}, None),
        ({"truncation": "disabled", "tools": None, "min_tokens": 3}, None),
        ({"previous_response_id": "resp_1", "background": True}, AloneReason.PREVIOUS_RESPONSE),
        ({"previous_response_id": 5}, AloneReason.PREVIOUS_RESPONSE),
        ({"background": True}, AloneReason.BACKGROUND),
        ({"background": "yes"}, AloneReason.BACKGROUND),
        ({"tools": [_TOOL, {"type": "web_search_preview"}]}, AloneReason.BUILTIN_TOOLS),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, AloneReason.BUILTIN_TOOLS),
        ({"tools": [{"name": "no type"}]}, AloneReason.BUILTIN_TOOLS),
        ({"tools": "x"}, AloneReason.BUILTIN_TOOLS),
        ({"truncation": "auto"}, AloneReason.UNUSUAL_FIELDS),
        ({"truncation": None}, AloneReason.UNUSUAL_FIELDS),
        ({"store": "yes"}, AloneReason.UNUSUAL_FIELDS),
        ({"max_output_tokens": "5"}, AloneReason.UNUSUAL_FIELDS),
        ({"stream": "on"}, AloneReason.UNUSUAL_FIELDS),
    ],
)
def test_which_responses_can_be_split(fields: dict[str, Any], reason: AloneReason | None) -> None:
    """Not those that live in one engine's memory, generate more than once, or are cut to a length that P would not cut to."""
    assert _facts(Api.RESPONSES, input="p", **fields).alone_reason is reason


_UNUSUAL = AloneReason.UNUSUAL_FIELDS


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 9}, None),
        ({"max_tokens": 9, "stream": True, "thinking": {"type": "disabled"}, "tool_choice": {"type": "any"}}, None),
        ({"max_tokens": 9, "thinking": {"type": "adaptive"}, "tool_choice": None}, None),
        ({"max_tokens": 9, "stream_options": "ignored"}, None),
        ({"max_tokens": 2049, "thinking": {"type": "enabled", "budget_tokens": 2048}}, None),
        ({"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 2048}}, _UNUSUAL),
        ({"max_tokens": 2049, "thinking": {"type": "enabled", "budget_tokens": "2048"}}, _UNUSUAL),
        ({"max_tokens": 2049, "thinking": {"type": "enabled"}}, _UNUSUAL),
        ({"max_tokens": 9, "thinking": 1}, _UNUSUAL),
        ({}, _UNUSUAL),
        ({"max_tokens": None}, _UNUSUAL),
        ({"max_tokens": 0}, _UNUSUAL),
        ({"max_tokens": "9"}, _UNUSUAL),
        ({"max_tokens": 9, "tool_choice": {"type": "tool", "name": "f"}}, _UNUSUAL),
        ({"max_tokens": 9, "tool_choice": "any"}, _UNUSUAL),
    ],
)
def test_which_messages_can_be_split(fields: dict[str, Any], reason: AloneReason | None) -> None:
    """D checks the limit and the thinking budget that P never gets to check; a forced tool's one token breaks P's answer."""
    assert _facts(Api.MESSAGES, messages=[], **fields).alone_reason is reason


@pytest.mark.parametrize(
    ("fields", "is_repeatable"),
    [
        ({"store": True}, True),
        ({"background": False, "previous_response_id": None, "tools": [_TOOL]}, True),
        ({"background": True}, False),
        ({"previous_response_id": "resp_1"}, False),
        ({"tools": [{"type": "code_interpreter"}]}, False),
    ],
)
def test_what_an_engine_goes_on_with_is_not_sent_twice(fields: dict[str, Any], is_repeatable: bool) -> None:  # noqa: FBT001
    """A background response goes on by itself, a tool acts on the world, and a conversation lies in one engine."""
    assert _facts(Api.RESPONSES, input="p", **fields).is_repeatable is is_repeatable
    assert _facts(Api.CHAT_COMPLETIONS, messages=[], **fields).is_repeatable


@pytest.mark.parametrize(("value", "priority"), [(5, 5), (-3, -3), (0, 0), ("7", 0), (1.5, 0), (None, 0), (10**30, 0)])
def test_a_plain_priority_is_read(value: object, priority: int) -> None:
    """What is not plainly an integer is no priority to the gateway, whatever the engine makes of it."""
    assert _facts(prompt="p", priority=value).priority == priority
    assert _facts(prompt="p").priority == 0


def test_a_long_conversation_is_as_long_as_all_its_parts() -> None:
    """A system prompt and tools are often most of a prompt."""
    facts = _facts(Api.MESSAGES, max_tokens=1, messages=[1, 2], system="abc", tools=[1], other="x" * 99)
    assert facts.prompt_bytes == len("[1, 2]") + len('"abc"') + len("[1]")


@pytest.mark.parametrize("prompt", [b'[%b"a", "b"]' % (b" " * 500), b'[\n\t"a","b"]', b"[ [1], [2] ]"])
def test_blanks_hide_no_second_prompt(prompt: bytes) -> None:
    """A second prompt would be given the first one's KV."""
    fields = openai.split_request(b'{"prompt": %b}' % prompt)
    assert openai.facts_of(Api.COMPLETIONS, fields).alone_reason is AloneReason.MANY_PROMPTS


@pytest.mark.parametrize(
    ("prompt", "is_one"),
    [
        (b"[[1, 2, 3]]", True),
        (b" [\n[ 1 ]\n] ", True),
        (b"[[]]", True),
        (b"[[[1]]]", True),
        (b'[["]"]]', True),
        (b'["]"]', True),
        (b"[[1], [2]]", False),
        (b"[[1], 2]", False),
        (b'[["]"], [1]]', False),
        (b'[[1], "]"]', False),
        (b'["]", [1]]', False),
        (b'["[", "]"]', False),
        (b"[[[1]], [2]]", False),
    ],
)
def test_brackets_are_counted_as_json_has_them(prompt: bytes, is_one: bool) -> None:  # noqa: FBT001
    """A list of one long list is known without parsing it, and nothing else may pass for one."""
    fields = openai.split_request(b'{"prompt": %b}' % prompt)
    assert (openai.facts_of(Api.COMPLETIONS, fields).alone_reason is None) is is_one


@pytest.mark.parametrize(
    ("api", "members", "reason"),
    [
        (Api.RESPONSES, {"store": "x", "previous_response_id": "r", "background": True}, AloneReason.PREVIOUS_RESPONSE),
        (Api.COMPLETIONS, {"stream": 1, "echo": True, "n": 2}, AloneReason.MANY_CHOICES),
    ],
)
def test_the_reason_does_not_depend_on_the_order_of_the_members(
    api: Api, members: dict[str, Any], reason: AloneReason
) -> None:
    """Of several the same one is told, however the client writes its request: what follows may depend on it."""
    for order in itertools.permutations(members.items()):
        assert _facts(api, **dict(order), prompt="p", input="p").alone_reason is reason


@pytest.mark.parametrize("body", [b'{"prompt":"p","a":' + b"[" * 100_000, b'{"prompt":"p","n":1e999}', b'{"a":"\xff"}'])
def test_what_breaks_a_decoder_is_no_fault_of_ours(body: bytes) -> None:
    """Depth, size and bad UTF-8 end in a 400 or in a request for D alone, never in an exception of another kind."""
    try:
        facts = openai.facts_of(Api.COMPLETIONS, openai.split_request(body))
    except InvalidRequest:
        return
    assert facts.alone_reason is AloneReason.MANY_CHOICES


_TOLD = (
    "prompt",
    "messages",
    "input",
    "tools",
    "tool_choice",
    "thinking",
    "stream",
    "stream_options",
    "max_tokens",
    "max_output_tokens",
    "min_tokens",
    "priority",
    "truncation",
    "previous_response_id",
)


def test_a_request_without_a_prompt_is_refused() -> None:
    """It would cost two engines a round trip to learn the same."""
    for api, name in ((Api.CHAT_COMPLETIONS, "messages"), (Api.RESPONSES, "input"), (Api.MESSAGES, "messages")):
        with pytest.raises(InvalidRequest, match=f"'{name}' is missing"):
            _facts(api, prompt="p")


@given(st.sampled_from(Api), st.dictionaries(st.sampled_from(_TOLD), _JSON, max_size=6))
def test_any_value_in_any_field_is_told_or_refused(api: Api, body: dict[str, Any]) -> None:
    """A value of another kind than expected sends a request to D alone; it never breaks the gateway."""
    fields = openai.split_request(json.dumps(body).encode())
    with contextlib.suppress(InvalidRequest):
        openai.facts_of(api, fields)
    openai.join(openai.with_stream_usage(api, fields))
    openai.previous_response_id(fields)


@pytest.mark.parametrize(
    ("options", "wants"),
    [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)],
)
def test_usage_is_asked_for_and_the_clients_wish_is_known(options: object, wants: bool) -> None:  # noqa: FBT001
    """The gateway needs the usage event as evidence; whether the client sees it is the client's wish."""
    fields = openai.split_request(json.dumps({"prompt": "p", "stream": True, "stream_options": options}).encode())
    for api in (Api.COMPLETIONS, Api.CHAT_COMPLETIONS):
        assert openai.wants_stream_usage(api, fields) is wants
        assert openai.wants_stream_usage(api, openai.with_stream_usage(api, fields))


@pytest.mark.parametrize("api", [Api.RESPONSES, Api.MESSAGES])
def test_where_usage_comes_always_nothing_is_asked_for(api: Api) -> None:
    """Their streams end with the counts, and the client knows them to."""
    fields = openai.split_request(b'{"input":"p","stream":true,"stream_options":{"include_obfuscation":false}}')
    assert openai.wants_stream_usage(api, fields)
    assert openai.with_stream_usage(api, fields) == fields


def _sent_options(options: object) -> Any:
    fields = openai.split_request(json.dumps({"prompt": "p", "stream_options": options}).encode())
    return json.loads(openai.join(openai.with_stream_usage(Api.COMPLETIONS, fields)))["stream_options"]


def test_other_stream_options_survive() -> None:
    """Asking for usage changes nothing else of what the client asked for."""
    assert _sent_options({"new": True}) == {"new": True, "include_usage": True}
    both = {"continuous_usage_stats": True, "include_usage": True}
    assert _sent_options(both) == both


def test_usage_that_is_the_gateways_alone_comes_once() -> None:
    """Continuous counts mean nothing without a final one, and our asking for that must not bring them about."""
    assert _sent_options({"continuous_usage_stats": True}) == {"include_usage": True}
    assert _sent_options({"continuous_usage_stats": True, "include_usage": False}) == {"include_usage": True}


@given(
    st.dictionaries(
        st.text(), st.one_of(st.none(), st.integers(), st.text(), st.integers(8190, 9000).map("é".__mul__)), max_size=8
    )
)
def test_pieces_are_the_same_bytes(members: dict[str, object]) -> None:
    """What is long is not copied, wherever it stands and whatever the names are."""
    fields = openai.split_request(msgspec.json.encode(members))
    pieces = openai.join_pieces(fields)
    assert (pieces if isinstance(pieces, bytes) else b"".join(pieces)) == openai.join(fields)


def test_only_what_is_long_makes_pieces() -> None:
    """A copy of a few bytes is cheaper than a piece."""
    assert isinstance(openai.join_pieces(openai.split_request(b'{"model":"m","prompt":"a"}')), bytes)
    body = b'{"model":"m","prompt":"%b","n":1}' % (b"a" * 9000)
    pieces = openai.join_pieces(openai.split_request(body))
    assert isinstance(pieces, list)
    assert [len(piece) for piece in pieces] == [len(b'{"model":"m","prompt":'), 9002, len(b',"n":1}')]
