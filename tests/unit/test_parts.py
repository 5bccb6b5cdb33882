"""Requests taken apart and answers put together: indexes, seeds, usage, ids, and everything that must stay whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.protocol import parts as module
from pdserve.protocol.api import Api
from pdserve.protocol.fields import join
from pdserve.protocol.openai import split_request
from pdserve.protocol.parts import (
    MAX_BYTES_AT_ONCE,
    MAX_PARTS,
    MAX_PARTS_AT_ONCE,
    MAX_UNFINISHED_EVENT_BYTES,
    Parts,
    StreamMerge,
    UnmergeableAnswer,
    merge_answers,
    take_apart,
)

_MESSAGES = [{"role": "user", "content": "hello"}]


def _apart(api: Api = Api.COMPLETIONS, **fields: Any) -> Parts | None:
    body = {"messages": _MESSAGES, **fields} if api is Api.CHAT_COMPLETIONS else {"prompt": "hello", **fields}
    return take_apart(api, split_request(json.dumps(body).encode()))


def _requests(api: Api = Api.COMPLETIONS, **fields: Any) -> list[dict[str, Any]]:
    parts = _apart(api, **fields)
    assert parts is not None
    return [json.loads(join(request)) for request in parts.requests]


# Apart


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT_COMPLETIONS])
def test_choices_become_requests_without_n(api: Api) -> None:
    """Each part is the client's own request, less `n`, and with `best_of`, which vLLM ignores, left out."""
    requests = _requests(api, n=3, best_of=5, max_tokens=7, stop=["x"])
    assert len(requests) == 3
    whole = {"messages": _MESSAGES} if api is Api.CHAT_COMPLETIONS else {"prompt": "hello"}
    assert requests == [{**whole, "max_tokens": 7, "stop": ["x"]}] * 3


def test_prompts_become_requests_with_a_list_of_one() -> None:
    """A text from a list stays in a list, because vLLM refuses an empty text and takes a list with one."""
    assert [request["prompt"] for request in _requests(prompt=["a", "", "c"])] == [["a"], [""], ["c"]]


def test_token_ids_become_requests_with_a_list_of_one() -> None:
    """Lists of ids are prompts; their numbers stay the bytes that came, blanks included."""
    parts = take_apart(Api.COMPLETIONS, split_request(b'{"prompt": [ [1, 2],[ 3 ] ], "n": null, "model": "m"}'))
    assert parts is not None
    assert [join(request) for request in parts.requests] == [
        b'{"prompt":[[1, 2]],"n":null,"model":"m"}',
        b'{"prompt":[[ 3 ]],"n":null,"model":"m"}',
    ]


def test_prompt_by_prompt_then_choice_by_choice() -> None:
    """The order of the parts is the order of vLLM's choice indexes: prompt * n + choice."""
    requests = _requests(prompt=["a", "b"], n=2, seed=40)
    assert [(request["prompt"], request["seed"]) for request in requests] == [
        (["a"], 40),
        (["a"], 41),
        (["b"], 40),
        (["b"], 41),
    ]


@pytest.mark.parametrize(
    ("fields", "seeds"),
    [
        ({}, [None, None]),
        ({"seed": None}, [None, None]),
        ({"seed": -1}, [-1, -1]),
        ({"seed": 0}, [0, 1]),
        ({"seed": -7}, [-7, -6]),
        ({"seed": 10**17}, [10**17, 10**17 + 1]),
    ],
)
def test_each_choice_has_its_seed(fields: dict[str, Any], seeds: list[int | None]) -> None:
    """Choice j has the seed + j; -1 is vLLM's word for no seed, for every choice."""
    assert [request.get("seed") for request in _requests(n=2, **fields)] == seeds


def test_prompts_alone_share_their_seed() -> None:
    """Without several choices the seed stays as the client spelled it."""
    assert [request["seed"] for request in _requests(prompt=["a", "b"], seed="5")] == ["5", "5"]


@pytest.mark.parametrize("temperature", [0.01, 1, 1.5, None])
def test_sampling_allows_choices(temperature: float | None) -> None:
    """Any temperature that is certain not to be greedy."""
    assert len(_requests(n=2, temperature=temperature)) == 2


def test_greedy_prompts_are_taken_apart() -> None:
    """Greedy is an error only with several choices."""
    assert len(_requests(prompt=["a", "b"], temperature=0)) == 2


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT_COMPLETIONS])
def test_a_prompt_that_is_too_long_to_be_repeated_stays_whole(api: Api) -> None:
    """One request may not make the gateway hold its prompt 32 times when that is gigabytes."""
    name = "prompt" if api is Api.COMPLETIONS else "messages"
    text = "x" * (MAX_BYTES_AT_ONCE // MAX_PARTS_AT_ONCE)
    prompt = {name: text if api is Api.COMPLETIONS else [{"role": "user", "content": text}]}
    assert _apart(api, n=MAX_PARTS_AT_ONCE, **prompt) is None
    assert _apart(api, n=MAX_PARTS, **prompt) is None
    assert len(_requests(api, n=MAX_PARTS_AT_ONCE - 1, **prompt)) == MAX_PARTS_AT_ONCE - 1


def test_long_prompts_in_a_list_are_taken_apart() -> None:
    """Each part carries its own prompt only."""
    prompts = ["x" * (MAX_BYTES_AT_ONCE // 64)] * 48
    assert len(_requests(prompt=prompts)) == 48


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"n": None},
        {"best_of": 4},
        {"prompt": ["a"]},
        {"prompt": [[1, 2]]},
        {"prompt": [1, 2, 3]},
    ],
)
def test_one_prompt_with_one_choice_is_no_parts(fields: dict[str, Any]) -> None:
    """Nothing to take apart."""
    assert _apart(**fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0},
        {"n": -2},
        {"n": "2"},
        {"n": 2.0},
        {"n": True},
        {"n": MAX_PARTS + 1},
        {"n": 10**30},
        {"n": 2, "temperature": 0},
        {"n": 2, "temperature": -0.0},
        {"n": 2, "temperature": 1e-7},
        {"n": 2, "temperature": -1},
        {"n": 2, "temperature": "0.5"},
        {"n": 2, "temperature": True},
        {"n": 2, "seed": "5"},
        {"n": 2, "seed": 5.0},
        {"n": 2, "seed": 2**63 - 1},
        {"n": 3, "seed": -2},
        {"n": 2, "echo": True},
        {"n": 2, "prompt_logprobs": 1},
        {"n": 2, "use_beam_search": True},
        {"n": 2, "prompt_embeds": "AAAA"},
        {"n": 2, "max_tokens": "5"},
        {"n": 2, "stream": 1},
        {"prompt": ["a", "b"], "n": "1"},
        {"prompt": ["a", "b"], "echo": True},
        {"prompt": []},
        {"prompt": [], "n": 2},
        {"prompt": ["a", [1]]},
        {"prompt": [[1], ["2"]]},
        {"prompt": [[1], []]},
        {"prompt": [[1], [-1]]},
        {"prompt": [[1], [1.0]]},
        {"prompt": [[1], [True]]},
        {"prompt": [[1], [[2]]]},
        {"prompt": ["a", 1]},
        {"prompt": ["a"] * (MAX_PARTS + 1)},
        {"prompt": ["a"] * (MAX_PARTS // 2 + 1), "n": 2},
    ],
)
def test_what_only_one_engine_can_answer_stays_whole(fields: dict[str, Any]) -> None:
    """Errors that concern the whole, spellings only the engine can read, prompts told back, and too many parts."""
    assert _apart(**fields) is None


def test_the_bound_itself_is_taken_apart() -> None:
    """As many parts as allowed, in prompts and choices."""
    assert len(_requests(prompt=["a"] * (MAX_PARTS // 2), n=2)) == MAX_PARTS


@given(
    st.integers(1, 5),
    st.none() | st.integers(-(10**17), 10**17),
    st.lists(st.text(max_size=3), max_size=4)
    | st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=4),
)
def test_parts_hold_every_prompt_and_choice_once(n: int, seed: int | None, prompts: list[Any]) -> None:
    """Whatever is taken apart comes to prompts times choices, each prompt in its place."""
    parts = _apart(prompt=prompts, n=n, seed=seed)
    if parts is None:
        assert n * len(prompts) <= 1 or (seed is not None and seed < -1 <= seed + n - 1)
        return
    bodies = [json.loads(join(request)) for request in parts.requests]
    own = [body["prompt"][0] for body in bodies]
    assert own == [prompt for prompt in prompts for _ in range(n)]
    assert all("n" not in body or body["n"] == 1 for body in bodies)


# Whole answers put together


def _usage(prompt: int, completion: int, **details: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion, **details}


def _whole(text: str, usage: dict[str, Any], **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "stop_reason": 2**70}
    answer = {"id": "cmpl-x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps({**answer, "system_fingerprint": "f", "usage": usage, "metrics": None, **fields}).encode()


def _parts(num_prompts: int, num_choices: int, api: Api = Api.COMPLETIONS) -> Parts:
    return Parts(api, ({},) * (num_prompts * num_choices), num_choices)


def test_whole_answers_become_one() -> None:
    """Choices are numbered, each prompt counts once, all generated tokens count, and the id is the request's."""
    answers = [
        _whole("a0", _usage(3, 5), created=7),
        _whole("a1", _usage(3, 6), created=8),
        _whole("b0", _usage(10, 7), created=9),
        _whole("b1", _usage(10, 8), created=9),
    ]
    merged = json.loads(merge_answers(_parts(2, 2), answers, request_id="pd-1"))
    assert [(choice["index"], choice["text"]) for choice in merged["choices"]] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
    ]
    assert all(choice["stop_reason"] == 2**70 for choice in merged["choices"])
    assert merged["usage"] == _usage(13, 26)
    assert (merged["id"], merged["created"], merged["model"]) == ("cmpl-pd-1", 7, "m")
    assert list(merged) == list(json.loads(answers[0]))


def test_details_are_the_last_prompts_and_reasoning_is_summed() -> None:
    """As vLLM tells them: cached tokens of the last prompt, reasoning tokens of all choices."""
    details = [{"cached_tokens": 1}, {"cached_tokens": 2}]
    answers = [
        _whole("", _usage(3, 5, prompt_tokens_details=detail, completion_tokens_details={"reasoning_tokens": 4}))
        for detail in details
    ]
    usage = json.loads(merge_answers(_parts(2, 1), answers, request_id="x"))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 8}


def test_without_a_reasoning_parser_there_are_no_details() -> None:
    """A null stays a null."""
    answers = [_whole("", _usage(3, 5, completion_tokens_details=None))] * 2
    assert (
        json.loads(merge_answers(_parts(1, 2), answers, request_id="x"))["usage"]["completion_tokens_details"] is None
    )


def test_metrics_of_one_sequence_are_left_out() -> None:
    """They cannot speak of several sequences, so vLLM tells none."""
    answers = [_whole("", _usage(3, 5), metrics={"time_to_first_token_ms": 3})] * 2
    assert json.loads(merge_answers(_parts(1, 2), answers, request_id="x"))["metrics"] is None


def test_chat_answers_have_chats_prefix() -> None:
    """vLLM names chat answers `chatcmpl-`."""
    merged = merge_answers(_parts(1, 2, Api.CHAT_COMPLETIONS), [_whole("", _usage(1, 1))] * 2, request_id="pd-1")
    assert json.loads(merged)["id"] == "chatcmpl-pd-1"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"choices":[],"usage":{}}',
        b'{"choices":[{},{}],"usage":{}}',
        b'{"choices":[1],"usage":{}}',
        b'{"choices":{},"usage":{}}',
        b'{"choices":[{}],"usage":null}',
        b'{"choices":[{}],"usage":{"prompt_tokens":"3"}}',
    ],
)
def test_what_is_no_answer_is_not_merged(body: bytes) -> None:
    """One choice and readable counts, or an error of the engine's."""
    with pytest.raises(UnmergeableAnswer):
        merge_answers(_parts(1, 2), [_whole("", _usage(1, 1)), body], request_id="x")


# Streams put together


def _event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def _chunk(part: int, *choices: dict[str, Any], **fields: Any) -> bytes:
    head = {"id": f"cmpl-part-{part}", "object": "text_completion", "created": 100 + part, "model": "m"}
    return _event({**head, "choices": list(choices), **fields})


def _completion_stream(part: int, texts: list[str], *, usage: bool) -> list[bytes]:
    events = [_chunk(part, {"index": 0, "text": text, "finish_reason": None}) for text in texts]
    events.append(_chunk(part, {"index": 0, "text": "", "finish_reason": "length"}))
    details = {"prompt_tokens_details": {"cached_tokens": part}}
    if usage:
        events.append(_chunk(part, usage=_usage(3, len(texts), **details), system_fingerprint="f", metrics={"x": 1}))
    return [*events, b"data: [DONE]\n\n"]


def _chat_stream(part: int, texts: list[str], *, usage: bool) -> list[bytes]:
    role = _chunk(part, {"index": 0, "delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1])
    events = [_chunk(part, {"index": 0, "delta": {"content": text}}) for text in texts]
    end = [_chunk(part, usage=_usage(3, len(texts)))] if usage else []
    return [role, *events, *end, b"data: [DONE]\n\n"]


def _payloads(stream: bytes) -> list[Any]:
    events = stream.decode().split("\n\n")
    assert events.pop() == ""
    return [event if event == "data: [DONE]" else json.loads(event.removeprefix("data: ")) for event in events]


def _texts(payloads: list[Any], num_parts: int) -> list[str]:
    texts = [""] * num_parts
    for payload in payloads:
        for choice in payload["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"]["content"]
    return texts


@st.composite
def _interleavings(draw: st.DrawFn) -> tuple[list[list[str]], bool, list[tuple[int, bytes]]]:
    """Texts of each part, whether usage was asked for, and the parts' bytes in some order and in any pieces."""
    texts = draw(st.lists(st.lists(st.text(max_size=3), max_size=4), min_size=2, max_size=5))
    usage = draw(st.booleans())
    make = _chat_stream if draw(st.booleans()) else _completion_stream
    left = [b"".join(make(part, part_texts, usage=usage)) for part, part_texts in enumerate(texts)]
    order = draw(st.lists(st.tuples(st.integers(0, len(texts) - 1), st.integers(1, 400)), max_size=30))
    pieces: list[tuple[int, bytes]] = []
    for part, size in [*order, *((part, 10**9) for part in range(len(texts)))]:
        if left[part]:
            pieces.append((part, left[part][:size]))
            left[part] = left[part][size:]
    return texts, usage, pieces


@given(_interleavings())
def test_any_order_of_events_gives_each_choice_its_text(
    interleaving: tuple[list[list[str]], bool, list[tuple[int, bytes]]],
) -> None:
    """Per choice the same text, one id, one time of creation, one usage where it was asked for, and one end, at the end."""
    texts, usage, pieces = interleaving
    is_chat = b'"delta"' in b"".join(piece for _, piece in pieces)
    merge = StreamMerge(_parts(1, len(texts), Api.CHAT_COMPLETIONS if is_chat else Api.COMPLETIONS), request_id="pd-1")
    stream = b"".join(merge.feed(part, piece) for part, piece in pieces) + merge.finish()
    *payloads, done = _payloads(stream)
    assert done == "data: [DONE]"
    assert _texts(payloads, len(texts)) == ["".join(part_texts) for part_texts in texts]
    assert {payload["id"] for payload in payloads} == {"chatcmpl-pd-1" if is_chat else "cmpl-pd-1"}
    assert len({payload["created"] for payload in payloads}) == 1
    usages = [payload for payload in payloads if not payload["choices"]]
    assert len(usages) == usage
    if usage:
        assert payloads[-1] is usages[0]
        counts = {**usages[0]["usage"]}
        counts.pop("prompt_tokens_details", None)
        assert counts == _usage(3, sum(map(len, texts)))
        assert "metrics" not in usages[0]


def test_events_go_out_as_they_came() -> None:
    """Byte for byte the part's own event, but for its id, its time and its index; nothing waits for another part."""
    merge = StreamMerge(_parts(1, 2), request_id="p")
    value = (
        b'{"id":"cmpl-part-%d","created":%d,"model":"m","choices":[{"text":"\\u00e9","index":%d,"x":1e400}],"y":[ 1 ]}'
    )
    assert merge.feed(1, b"data: " + value % (1, 9, 0) + b"\n\n") == (
        b"data: " + (value % (1, 9, 1)).replace(b"cmpl-part-1", b"cmpl-p") + b"\n\n"
    )
    assert b'"created":9' in merge.feed(0, b"data: " + value % (0, 5, 0) + b"\n\n")


def test_all_roles_come_first() -> None:
    """vLLM opens every choice of a chat before the first one says anything; the other parts' openings are then too many."""
    merge = StreamMerge(_parts(1, 3, Api.CHAT_COMPLETIONS), request_id="p")
    streams = [_chat_stream(part, ["a"], usage=False) for part in range(3)]
    first = _payloads(merge.feed(2, b"".join(streams[2][:2])))
    assert [(payload["choices"][0]["index"], payload["choices"][0]["delta"].get("role")) for payload in first] == [
        (0, "assistant"),
        (1, "assistant"),
        (2, "assistant"),
        (2, None),
    ]
    assert all(payload["prompt_token_ids"] == [1] for payload in first[:3])
    assert merge.feed(0, streams[0][0]) == b""
    assert _payloads(merge.feed(0, streams[0][1]))[0]["choices"][0]["index"] == 0


def test_a_role_in_the_middle_is_passed_on() -> None:
    """Only a part's first role opens its choice."""
    merge = StreamMerge(_parts(1, 2, Api.CHAT_COMPLETIONS), request_id="p")
    role = _chat_stream(0, [], usage=False)[0]
    merge.feed(0, role)
    assert len(_payloads(merge.feed(0, role))) == 1


def test_usage_counts_prompts_once_and_takes_the_first_answers_details() -> None:
    """A stream tells the cached tokens of the part that spoke first."""
    merge = StreamMerge(_parts(2, 2), request_id="p")
    streams = [_completion_stream(part, ["a", "b"], usage=True) for part in range(4)]
    for part in (2, 0, 1, 3):
        merge.feed(part, b"".join(streams[part]))
    usage = _payloads(merge.finish())[0]
    assert usage["usage"] == _usage(6, 8, prompt_tokens_details={"cached_tokens": 2})
    assert (usage["system_fingerprint"], usage["choices"]) == ("f", [])


def test_usage_in_every_chunk_is_the_choices_own() -> None:
    """`continuous_usage_stats`: vLLM counts the choice's own tokens and its own prompt."""
    merge = StreamMerge(_parts(2, 1), request_id="p")
    chunk = _chunk(1, {"index": 0, "text": "a"}, usage=_usage(9, 1))
    assert _payloads(merge.feed(1, chunk))[0]["usage"] == _usage(9, 1)
    assert merge.finish() == b"data: [DONE]\n\n"


def test_an_engines_error_ends_the_stream_as_vllm_ends_it() -> None:
    """The error goes out as it came; no usage follows it."""
    merge = StreamMerge(_parts(1, 2), request_id="p")
    merge.feed(0, b"".join(_completion_stream(0, ["a"], usage=True)))
    error = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
    assert merge.feed(1, error) == error
    assert merge.is_broken
    assert merge.finish() == b"data: [DONE]\n\n"


def test_what_is_no_chunk_is_passed_on() -> None:
    """Comments that keep a connection alive, and events that nobody knows yet."""
    merge = StreamMerge(_parts(1, 2), request_id="p")
    for event in (b": keep-alive\n\n", b'data: {"x":1}\n\n', b"data: 3\n\n"):
        assert merge.feed(0, event) == event


def test_an_unreadable_usage_is_not_merged() -> None:
    """A sum needs numbers."""
    merge = StreamMerge(_parts(1, 2), request_id="p")
    with pytest.raises(UnmergeableAnswer):
        merge.feed(0, _chunk(0, usage={"prompt_tokens": "x"}))


def test_an_event_may_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished events are held back, since another part's bytes may not land in them."""
    assert MAX_UNFINISHED_EVENT_BYTES > 10 * 1024 * 1024
    monkeypatch.setattr(module, "MAX_UNFINISHED_EVENT_BYTES", 100)
    merge = StreamMerge(_parts(1, 2), request_id="p")
    assert merge.feed(0, b"x" * 100) == b""
    with pytest.raises(UnmergeableAnswer, match="exceeds 100 bytes"):
        merge.feed(0, b"x")
