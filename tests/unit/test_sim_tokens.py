"""The stand-in's tokenizer and model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.sim.tokens import (
    END_OF_TEXT,
    VOCABULARY_SIZE,
    Continuation,
    TextStream,
    decode,
    encode,
    render_chat,
)

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(_TEXTS)
def test_text_survives_encoding(text: str) -> None:
    """Every text comes back from its tokens, whatever is in it."""
    assert decode(encode(text)) == text


@given(_TEXTS)
def test_tokens_are_in_the_vocabulary(text: str) -> None:
    """No text has an id that a prompt of ids could not use."""
    assert all(0 <= token < VOCABULARY_SIZE for token in encode(text))


def test_common_words_are_one_token_each() -> None:
    """A sentence of common words has about as many tokens as words."""
    assert len(encode("the quick brown fox jumps over the lazy dog")) == 9


def test_a_lone_surrogate_does_not_fail() -> None:
    """JSON can hold half a surrogate pair; it becomes a question mark."""
    assert decode(encode("a\ud800b")) == "a?b"


def test_unknown_ids_decode_to_nothing() -> None:
    """Ids beyond the vocabulary are skipped."""
    assert decode([VOCABULARY_SIZE, *encode("river"), -1]) == "river"


def test_chat_keeps_its_markers_as_single_tokens() -> None:
    """The template's markers are special tokens and not spelled in bytes."""
    tokens = encode(render_chat([("user", "go")]))
    assert tokens.count(1) == 2
    assert tokens.count(2) == 1


def _continue(context: list[int], count: int = 8, *, salt: str = "", is_foreign: bool = False) -> list[int]:
    model = Continuation(context, salt=salt, is_foreign=is_foreign)
    return [model.next_token(may_end=True) for _ in range(count)]


@given(st.lists(st.integers(-1, VOCABULARY_SIZE - 1), max_size=50), st.data())
def test_the_continuation_depends_on_the_whole_context(context: list[int], data: st.DataObject) -> None:
    """The same context gives the same text; one token changed anywhere gives another one."""
    assert _continue(context) == _continue(context)
    if context:
        position = data.draw(st.integers(0, len(context) - 1))
        changed = [*context[:position], (context[position] + 2) % VOCABULARY_SIZE, *context[position + 1 :]]
        assert _continue(changed) != _continue(context)


def test_the_continuation_of_a_prefix_goes_on() -> None:
    """Generated tokens are context: going on from them is the same as having gone on."""
    context = encode("once upon a time")
    assert _continue([*context, *_continue(context, 3)], 5) == _continue(context, 8)[3:]


def test_sampling_differs_by_salt() -> None:
    """Another seed or choice gives another text."""
    context = encode("once upon a time")
    assert _continue(context, salt="1/0") != _continue(context, salt="1/1")


def test_a_foreign_context_shows_in_capitals() -> None:
    """Text that was written on somebody else's context can be told from any other."""
    context = encode("once upon a time")
    assert decode(_continue(context, is_foreign=True)).isupper()
    assert decode(_continue(context)).islower()


def test_the_model_ends_when_it_may() -> None:
    """With one chance in one it ends at once, unless it may not."""
    model = Continuation(encode("end"), eos_one_in=1)
    assert model.next_token(may_end=False) != END_OF_TEXT
    assert model.next_token(may_end=True) == END_OF_TEXT


def _stream(words: list[str], stop: list[str], *, includes_stop: bool = False) -> tuple[list[str], str | None]:
    stream = TextStream(stop, includes_stop=includes_stop)
    pieces = []
    for position, word in enumerate(words):
        piece, found = stream.add(encode(word), is_last=position == len(words) - 1, may_stop=True)
        pieces.append(piece)
        if found is not None:
            return pieces, found
    return pieces, None


def test_without_stop_strings_text_comes_at_once() -> None:
    """Each token's text goes out with the token."""
    assert _stream(["the", " red", " house"], []) == (["the", " red", " house"], None)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    """As vLLM, one character less than the longest stop string stays behind until the end."""
    assert _stream(["the", " red", " house"], ["xyz"]) == (["t", "he r", "ed house"], None)


def test_a_stop_string_ends_the_text_before_it() -> None:
    """A stop string that spans tokens is found, and is not part of the text."""
    pieces, found = _stream(["the", " red", " house"], ["d h"])
    assert ("".join(pieces), found) == ("the re", "d h")


def test_a_stop_string_can_be_included() -> None:
    """With include_stop_str_in_output the text ends after it, and nothing is held back."""
    assert _stream(["the", " red", " house"], ["d h"], includes_stop=True) == (["the", " red", " h"], "d h")


@pytest.mark.parametrize("stop", [["zzz"], ["the"], ["d", "house"]])
@given(words=st.lists(st.sampled_from(["the", " red", " house", " on"]), min_size=1))
def test_pieces_add_up_to_the_text_before_the_stop(words: list[str], stop: list[str]) -> None:
    """However the text is cut, what comes out is all of it up to the first stop string."""
    pieces, _ = _stream(words, stop)
    text = "".join(words)
    ends = [text.find(item) for item in stop if item in text]
    assert "".join(pieces) == text[: min(ends, default=len(text))]
