"""Streams as vLLM 0.32 sent them: a decode engine with a handoff, once well and once with a side channel that nobody answers.

Recorded from SmolLM2-135M on CPU, max tokens 5, temperature 0, P and D with --enable-prompt-tokens-details.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core import PrefillPlace
from pdserve.protocol.openai import Api
from pdserve.protocol.preamble import ends_stream, error_marks, is_preamble, stream_error
from pdserve.protocol.sse import EventRelay, split_events
from pdserve.protocol.usage import UsageWatch, cache_hits, judge

_STREAMS = Path(__file__).parent / "streams"
_NAMES = {
    Api.COMPLETIONS: "completions",
    Api.CHAT_COMPLETIONS: "chat",
    Api.RESPONSES: "responses",
    Api.MESSAGES: "messages",
}
_GOOD = {api: (_STREAMS / f"{name}.sse").read_bytes() for api, name in _NAMES.items()}
_FAILED = {api: (_STREAMS / f"{name}_failed.sse").read_bytes() for api, name in _NAMES.items()}
_NUM_PREAMBLES = {Api.COMPLETIONS: 0, Api.CHAT_COMPLETIONS: 1, Api.RESPONSES: 2, Api.MESSAGES: 1}
_NUM_PROMPT_TOKENS = {Api.COMPLETIONS: 177, Api.CHAT_COMPLETIONS: 207, Api.RESPONSES: 207, Api.MESSAGES: 208}


def _relayed(api: Api, chunks: list[bytes], *, client_wants_usage: bool) -> tuple[bytes, UsageWatch]:
    watch = UsageWatch(api, prefill_details=cache_hits(api, 128), client_wants_usage=client_wants_usage)
    relay = EventRelay(watch.edit_event, mark=watch.mark)
    return b"".join(relay.feed(chunk) for chunk in chunks) + relay.flush(), watch


@pytest.mark.parametrize("api", Api)
def test_a_good_stream_is_preamble_answer_and_end(api: Api) -> None:
    """The preamble comes first and only there, no piece of the answer looks like an error, and the end is known."""
    events = split_events(_GOOD[api])
    num_preambles = _NUM_PREAMBLES[api]
    assert [is_preamble(api, event) for event in events] == [index < num_preambles for index in range(len(events))]
    assert [stream_error(api, event) for event in events] == [None] * len(events)
    assert ends_stream(api, _GOOD[api])
    assert not any(mark in _GOOD[api] for mark in error_marks(api))


@pytest.mark.parametrize("api", Api)
def test_a_failed_stream_holds_nothing_of_an_answer(api: Api) -> None:
    """All of it can be held back, so the request can still be tried elsewhere; of responses there is no error, just no end."""
    events = split_events(_FAILED[api])
    errors = [body for event in events if (body := stream_error(api, event)) is not None]
    answer = [event for event in events if not is_preamble(api, event) and stream_error(api, event) is None]
    assert answer in ([], [b"data: [DONE]\n\n"])
    assert len(errors) == (0 if api is Api.RESPONSES else 1)
    assert api is not Api.RESPONSES or not ends_stream(api, _FAILED[api])
    assert all(any(mark in _FAILED[api] for mark in error_marks(api)) for _ in errors)


@pytest.mark.parametrize("api", Api)
def test_the_client_sees_the_stream_of_one_engine(api: Api) -> None:
    """P's prefix hits in place of what came over the wire; nothing else is another byte."""
    out, watch = _relayed(api, [_GOOD[api]], client_wants_usage=True)
    num_prompt = b"%d" % _NUM_PROMPT_TOKENS[api]
    expected = {
        Api.COMPLETIONS: (b'"cached_tokens":' + num_prompt, b'"cached_tokens":128'),
        Api.CHAT_COMPLETIONS: (b'"cached_tokens":' + num_prompt, b'"cached_tokens":128'),
        Api.RESPONSES: (b'"cached_tokens":' + num_prompt, b'"cached_tokens":128'),
        Api.MESSAGES: (
            b'{"input_tokens":0,"output_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":208}',
            b'{"input_tokens":80,"output_tokens":5,"cache_creation_input_tokens":0,"cache_read_input_tokens":128}',
        ),
    }[api]
    assert out == _GOOD[api].replace(*expected)
    assert out != _GOOD[api]
    assert judge(watch.usage).place is PrefillPlace.REMOTE
    assert watch.usage is not None
    assert watch.usage.completion_tokens == 5


@pytest.mark.parametrize("api", [Api.COMPLETIONS, Api.CHAT_COMPLETIONS])
def test_usage_that_the_client_did_not_ask_for_is_taken_out(api: Api) -> None:
    """One event less, and the rest as it was."""
    out, _ = _relayed(api, [_GOOD[api]], client_wants_usage=False)
    events = split_events(_GOOD[api])
    assert split_events(out) == [event for event in events if b'"usage"' not in event]
    assert len(split_events(out)) == len(events) - 1


@given(st.sampled_from(Api), st.booleans(), st.data())
def test_any_chunking_tells_the_same(api: Api, client_wants_usage: bool, data: st.DataObject) -> None:  # noqa: FBT001
    """Where the network cuts a stream changes neither its bytes nor its counts."""
    stream = _GOOD[api]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    chunks = [stream[start:end] for start, end in itertools.pairwise([0, *cuts, len(stream)])]
    whole, watch = _relayed(api, [stream], client_wants_usage=client_wants_usage)
    out, other = _relayed(api, chunks, client_wants_usage=client_wants_usage)
    assert (out, other.usage) == (whole, watch.usage)
