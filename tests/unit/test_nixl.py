"""NIXL pull: what the P leg says, which handoffs are believed, and what D gets."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protocol import nixl, openai
from pdserve.protocol.api import LIMIT_FIELDS
from pdserve.protocol.nixl import Handoff, UnusableHandoff
from pdserve.protocol.openai import Api

HANDOFF: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e8c1",
    "remote_request_id": "cmpl-pd-1-0-abcd1234",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 300,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 128,
}


def _answer(params: object) -> bytes:
    return json.dumps({"id": "x", "choices": [{"text": "a"}], "kv_transfer_params": params}).encode()


def _fields(**fields: Any) -> openai.Fields:
    return openai.split_request(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def _leg(api: Api = Api.CHAT_COMPLETIONS, **fields: Any) -> dict[str, Any]:
    leg: dict[str, Any] = json.loads(openai.join(nixl.prefill_fields(api, _fields(**fields))))
    return leg


def _parse(answer: bytes, *, api: Api = Api.COMPLETIONS, now_s: float = 0.0) -> Handoff:
    return nixl.parse_handoff(api, answer, now_s=now_s)


def test_the_prefill_leg_is_limited_to_one_token_in_every_spelling() -> None:
    """A limit field left standing would make P decode the whole answer."""
    leg = _leg(max_tokens=500, max_completion_tokens=400, max_output_tokens=300)
    assert (leg["max_tokens"], leg["max_completion_tokens"], leg["max_output_tokens"]) == (1, 1, 1)


def test_the_prefill_leg_sets_max_tokens_where_the_client_set_none() -> None:
    """Without a limit vLLM would generate its default; limit fields of other APIs are not invented."""
    leg = _leg()
    assert leg["max_tokens"] == 1
    assert "max_completion_tokens" not in leg


@pytest.mark.parametrize(
    ("api", "limit"),
    [
        (Api.COMPLETIONS, "max_tokens"),
        (Api.CHAT_COMPLETIONS, "max_tokens"),
        (Api.RESPONSES, "max_output_tokens"),
        (Api.MESSAGES, "max_tokens"),
    ],
)
def test_each_api_is_limited_in_its_own_word(api: Api, limit: str) -> None:
    """A limit in another API's word is not read, and P would decode the whole answer."""
    leg = _leg(api)
    assert {name for name in leg if name in LIMIT_FIELDS} == {limit}
    assert leg[limit] == 1


def test_the_prefill_leg_of_a_response_is_kept_by_nobody() -> None:
    """P would keep a response of one token for ever; other APIs have no such field."""
    assert _leg(Api.RESPONSES, store=True)["store"] is False
    assert _leg(Api.RESPONSES)["store"] is False
    assert "store" not in _leg(Api.MESSAGES)


def test_the_thinking_budget_is_the_same_on_both_legs() -> None:
    """It may shape the prompt, and vLLM does not hold it against the one token of a P leg."""
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert _leg(Api.MESSAGES, max_tokens=4096, thinking=thinking)["thinking"] == thinking


def test_the_prefill_leg_is_not_streamed_and_drops_what_one_token_contradicts() -> None:
    """`min_tokens` above one and stream options without a stream are both a 400 on P."""
    leg = _leg(stream=True, stream_options={"include_usage": True}, min_tokens=4)
    assert leg["stream"] is False
    assert "stream_options" not in leg
    assert "min_tokens" not in leg


def test_the_prefill_leg_asks_for_kv_to_be_kept() -> None:
    """The parameters are those that vLLM's own proxy sends."""
    params = _leg()["kv_transfer_params"]
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False


def test_everything_else_is_the_same_on_both_legs() -> None:
    """What shapes the prompt must be equal on both sides, or the KV does not fit it; unknown fields survive."""
    more: dict[str, Any] = {
        "tools": [{"a": 1}],
        "chat_template_kwargs": {"x": True},
        "response_format": {"type": "json"},
        "new": 2**70,
    }
    leg = _leg(**more)
    assert {name: leg[name] for name in more} == more


def test_a_whole_handoff_is_read() -> None:
    """The fields a person may want to see are decoded."""
    handoff = _parse(_answer(HANDOFF), now_s=5.0)
    assert (handoff.engine_id, handoff.host, handoff.port) == ("e8c1", "127.0.0.1", 5600)
    assert (handoff.num_blocks, handoff.num_tokens, handoff.num_cached_on_prefill) == (3, 300, 128)
    assert handoff.age_s(7.5) == 2.5


def test_d_gets_the_handoff_without_the_key_that_hides_the_proof() -> None:
    """Everything else goes to D as P wrote it, unknown keys and large integers included."""
    params = HANDOFF | {"remote_blocks_expiry_time": 2**63 + 1, "new_in_0_33": {"a": [1.0]}}
    handoff = _parse(_answer(params))
    sent = json.loads(openai.join(nixl.decode_fields(_fields(max_tokens=7, min_tokens=2), handoff)))
    del params["remote_prefill_cached_tokens"]
    assert sent["kv_transfer_params"] == params
    assert (sent["max_tokens"], sent["min_tokens"]) == (7, 2)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("value", [128, 0, None])
@pytest.mark.parametrize("index", range(len(HANDOFF)))
def test_the_key_that_hides_the_proof_goes_wherever_it_stands(
    index: int, value: int | None, separators: tuple[str, str]
) -> None:
    """Also first, in the middle, and where the same name stands in something inside, which is not ours to change."""
    others = {name: value for name, value in HANDOFF.items() if name != nixl.HIDING_KEY}
    others["new_in_0_33"] = {"a": 1, nixl.HIDING_KEY: 5}
    members = list(others.items())
    members.insert(index, (nixl.HIDING_KEY, value))
    handoff = _parse(json.dumps({"kv_transfer_params": dict(members)}, separators=separators).encode())
    assert json.loads(bytes(handoff.params)) == others
    assert handoff.num_cached_on_prefill == (value or 0)


@pytest.mark.parametrize("rest", [b"", b',"remote_prefill_cached_tokens":0'])
def test_a_key_that_is_no_text_is_refused(rest: bytes) -> None:
    """D would find fault with the whole request, and the client be told that it was its own."""
    params = json.dumps(HANDOFF).encode()[:-1] + b',"\xff":1' + rest + b"}"
    with pytest.raises(UnusableHandoff):
        _parse(b'{"kv_transfer_params":%b}' % params)


@pytest.mark.parametrize(
    ("block_ids", "num_blocks"),
    [("[[7]]", 1), ("[[1,2,3]]", 3), ("[[1, 2],[3]]", 3), ("[[1],[]]", 1), ("[ [1] ]", 1), ("[[10,20],[30,40,50]]", 5)],
)
def test_blocks_are_counted_in_all_groups(block_ids: str, num_blocks: int) -> None:
    """A model with several kinds of attention has a group of each."""
    body = _answer(HANDOFF | {"remote_block_ids": 0.5}).replace(b"0.5", block_ids.encode())
    assert _parse(body).num_blocks == num_blocks


@pytest.mark.parametrize(
    "block_ids", ["[1,[2]]", "[[1],2]", "[[[1]]]", "[1]", "1", '[["1"]]', "[[1.5]]", "{}", "[[true]]"]
)
def test_block_ids_of_another_shape_are_refused(block_ids: str) -> None:
    """Whatever they are counted by, D's EngineCore would take them apart as lists of integers."""
    body = _answer(HANDOFF | {"remote_block_ids": 0.5}).replace(b"0.5", block_ids.encode())
    with pytest.raises(UnusableHandoff, match=r"incomplete.*remote_block_ids"):
        _parse(body)


@pytest.mark.parametrize(
    "key", ["remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids"]
)
@pytest.mark.parametrize("how", ["missing", "null"])
def test_a_half_handoff_is_not_used(key: str, how: str) -> None:
    """D would compute alone without a word, or die of it."""
    params = {name: value for name, value in HANDOFF.items() if name != key or how == "null"}
    if how == "null":
        params[key] = None
    with pytest.raises(UnusableHandoff, match=r"incomplete.*" + key):
        _parse(_answer(params))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"remote_block_ids": [[]]}, "no KV blocks"),
        ({"remote_block_ids": []}, "no KV blocks"),
        ({"remote_block_ids": "1,2"}, "incomplete"),
        ({"remote_port": "5600"}, "incomplete"),
        ({"remote_port": 0}, "not an address"),
        ({"remote_host": ""}, "not an address"),
        ({"do_remote_prefill": False}, "kv_consumer"),
        ({"transfer_mode": "push"}, "push"),
    ],
)
def test_a_malformed_handoff_never_reaches_an_engine(change: dict[str, Any], says: str) -> None:
    """`[[]]` ended D's EngineCore (vLLM 0.32, seen); the rest cannot work either."""
    with pytest.raises(UnusableHandoff, match=says):
        _parse(_answer(HANDOFF | change))


@pytest.mark.parametrize(
    ("api", "usage", "details"),
    [
        (
            Api.CHAT_COMPLETIONS,
            {
                "prompt_tokens": 300,
                "prompt_tokens_details": {"cached_tokens": 128, "created_cache_tokens": 128, "multimodal_tokens": None},
            },
            {"cached_tokens": 128, "created_cache_tokens": 128, "multimodal_tokens": None},
        ),
        (
            Api.RESPONSES,
            {"input_tokens": 300, "input_tokens_details": {"cached_tokens": 128, "cached_tokens_per_turn": []}},
            {"cached_tokens": 128, "cached_tokens_per_turn": []},
        ),
        (
            Api.MESSAGES,
            {
                "input_tokens": 44,
                "output_tokens": 1,
                "cache_read_input_tokens": 128,
                "cache_creation_input_tokens": 128,
            },
            {"cache_read_input_tokens": 128, "cache_creation_input_tokens": 128},
        ),
        (Api.CHAT_COMPLETIONS, {"prompt_tokens": 300, "prompt_tokens_details": None}, {"cached_tokens": 128}),
        (Api.RESPONSES, None, {"cached_tokens": 128}),
        (Api.MESSAGES, {"input_tokens": 300, "output_tokens": 1}, {"cache_read_input_tokens": 128}),
        (Api.COMPLETIONS, [3], {"cached_tokens": 128}),
    ],
)
def test_ps_cache_hits_are_read_in_each_apis_words(api: Api, usage: object, details: dict[str, Any]) -> None:
    """Where P's usage says nothing of its cache, its handoff does."""
    handoff = _parse(json.dumps({"kv_transfer_params": HANDOFF, "usage": usage}).encode(), api=api)
    assert json.loads(openai.join(handoff.prompt_details)) == details


@pytest.mark.parametrize("body", [_answer(None), b'{"id":"x"}'])
def test_no_handoff_names_the_flag(body: bytes) -> None:
    """A P without a connector answers like any vLLM; the sentence says where to look."""
    with pytest.raises(UnusableHandoff, match="--kv-transfer-config"):
        _parse(body)


@given(st.sampled_from(Api), st.binary(max_size=200))
def test_garbage_is_unusable_and_nothing_else(api: Api, body: bytes) -> None:
    """Whatever P answers, the parser raises its own error only."""
    with pytest.raises(UnusableHandoff):
        _parse(body, api=api)


@given(st.sampled_from(Api), st.data())
def test_a_broken_answer_is_used_or_refused(api: Api, data: st.DataObject) -> None:
    """A whole answer with some bytes replaced, or cut short, raises the parser's own error only."""
    body = bytearray(_answer(HANDOFF))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UnusableHandoff):
        _parse(bytes(body[: data.draw(st.integers(0, len(body)))]), api=api)


@pytest.mark.parametrize("key", ["remote_port", "remote_prefill_cached_tokens", "remote_num_tokens", "tp_size"])
def test_a_number_too_long_to_read_is_refused(key: str) -> None:
    """Python gives up on an integer of more than 4,300 digits, with an error of another kind."""
    body = _answer(HANDOFF | {key: 0.5}).replace(b"0.5", b"1" * 5000)
    with pytest.raises(UnusableHandoff, match="incomplete"):
        _parse(body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(HANDOFF)), _JSON)
def test_any_value_in_any_key_is_used_or_refused(key: str, value: object) -> None:
    """A handoff with one key replaced is either sound or refused; it never raises anything else."""
    try:
        handoff = _parse(_answer(HANDOFF | {key: value}))
    except UnusableHandoff:
        return
    assert handoff.host
    assert handoff.num_blocks > 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1"])  # noqa: S104
def test_a_loopback_side_channel_is_refused_for_a_decode_engine_elsewhere(host: str) -> None:
    """D would ask itself, find another engine id, and compute alone."""
    handoff = _parse(_answer(HANDOFF | {"remote_host": host}))
    with pytest.raises(UnusableHandoff, match="VLLM_NIXL_SIDE_CHANNEL_HOST"):
        nixl.check_reachable(handoff, decode_url="http://10.0.0.7:8200")
    nixl.check_reachable(handoff, decode_url="http://127.0.0.1:8200")


def test_an_old_handoff_is_refused() -> None:
    """After the lease its blocks may hold another request's context."""
    handoff = _parse(_answer(HANDOFF), now_s=100.0)
    nixl.check_age(handoff, now_s=125.0, max_age_s=25.0)
    with pytest.raises(UnusableHandoff, match=r"25\.1 s old"):
        nixl.check_age(handoff, now_s=125.1, max_age_s=25.0)


def test_a_release_names_a_model_that_no_engine_serves() -> None:
    """The refusal is what frees the blocks, so the handoff must be the real one."""
    handoff = _parse(_answer(HANDOFF))
    body = msgspec.json.decode(nixl.release_body(handoff))
    assert body["model"] == "pdserve-releases-kv"
    assert body["kv_transfer_params"]["remote_request_id"] == HANDOFF["remote_request_id"]


@pytest.mark.parametrize(
    ("refusal", "is_told"),
    [
        (b'{"error":{"message":"no such model","type":"NotFoundError","param":"model","code":404}}', True),
        (b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}', True),
        (b'{"type":"error","error":{"type":"BadRequestError","message":"too long"}}', True),
        (b'{"error":{"message":"1 validation error","type":"Bad Request","param":null,"code":400}}', False),
        (b'{"error":"Unauthorized"}', False),
        (b'{"detail":"Not Found"}', False),
        (b"<html>", False),
        (b"", False),
    ],
)
def test_which_refusals_free_the_blocks(refusal: bytes, is_told: bool) -> None:  # noqa: FBT001
    """Only what vLLM's serving classes refuse tells P; everything before them leaves it holding."""
    assert nixl.tells_prefill(refusal) is is_told
