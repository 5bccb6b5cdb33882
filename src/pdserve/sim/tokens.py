"""A tokenizer and a language model that need no weights.

Text and ids map to each other without loss: common words are one token each, everything else is spelled in bytes. The next
token is a pure function of the whole context, so a context that is not the request's own shows in the text. Knows no KV.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_WORDS = re.findall(
    r"\w+",
    """
a able about above after again air all almost along also always am among an and animal another answer any are around as ask
at away back be because bed before began being below best better between big bird black blue boat body book both box boy
bring brown build but by call came can car carry cat change children city clear close cold come could country cut day did
different do does dog done door down draw dry each early earth eat end enough even every example eye face fact family far
farm fast father feel feet few field find fire first fish five follow food for form found four fox friend from full game gave
get girl give go gold good got great green ground group grow had half hand hard has have he head hear heat help her here high
him his hold home horse hour house how idea if in inside into is island it its jumps just keep kind king knew know land
language large last late laugh lay lazy lead learn leave left less let letter life light like line list listen little live
long look love low made make man many map mark may me mean men might mile mind miss money moon more morning most mother
mountain move much music must my name near need never new next night no north not note nothing now number of off often old on
once one only open or order other our out over own page paper part pass people person picture place plain plan plant play
point power problem quick quiet rain ran reach read real red remember rest right river road rock room run said same saw say
school sea second see seem sentence serve set seven several she ship short should show side simple since sing six sky sleep
slow small snow so some song soon sound south spell stand star start state step still stone stop story street strong study
such summer sun sure table take talk teach tell ten test than that the their them then there these they thing think this
those thought three through time to together told too took top toward town travel tree true try turn two under until up us
use very voice wait walk want war warm was watch water way we week well went were west what wheel when where which while
white who whole why will wind winter wish with without wonder wood word work world would write year yes you young your
""",
)

END_OF_TEXT = 0
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_FIRST_BYTE = len(_SPECIALS)
_FIRST_WORD = _FIRST_BYTE + 256
_FORMS_OF_A_WORD = 3
"""As it is, after a space, and in capitals after a space: the last is how the model writes on a context that is not its own."""

_TEXTS: tuple[bytes, ...] = (
    *(special.encode() for special in _SPECIALS),
    *(bytes([value]) for value in range(256)),
    *(form.encode() for word in _WORDS for form in (word, f" {word}", f" {word.upper()}")),
)
_IDS = {text.decode(): token for token, text in enumerate(_TEXTS) if token >= _FIRST_WORD or token < _FIRST_BYTE}
_PIECE = re.compile("|".join(re.escape(special) for special in _SPECIALS) + r"| ?[A-Za-z]+|.", re.DOTALL)

VOCABULARY_SIZE = len(_TEXTS)


def encode(text: str) -> list[int]:
    """Text to token ids. A lone surrogate, which JSON allows and UTF-8 does not, becomes a question mark."""
    tokens: list[int] = []
    for piece in _PIECE.findall(text):
        known = _IDS.get(piece)
        if known is not None:
            tokens.append(known)
        else:
            tokens.extend(_FIRST_BYTE + value for value in piece.encode("utf-8", "replace"))
    return tokens


def decode(tokens: Iterable[int]) -> str:
    """Token ids to text; ids that no text has are skipped, as vLLM's /detokenize does."""
    return b"".join(_TEXTS[token] for token in tokens if 0 <= token < VOCABULARY_SIZE).decode("utf-8", "replace")


def render_chat(messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool = True) -> str:
    """Roles and texts as one prompt, in the style of ChatML."""
    turns = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages]
    return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class TextStream:
    """Tokens to pieces of text, with stop strings as vLLM has them: text that could begin one is held back."""

    def __init__(self, stop: Sequence[str], *, includes_stop: bool) -> None:
        self._stop = stop
        self._includes_stop = includes_stop
        self._held_back = max(map(len, stop), default=1) - 1 if not includes_stop else 0
        self._text = ""
        self._num_sent = 0

    def add(self, tokens: Sequence[int], *, is_last: bool, may_stop: bool) -> tuple[str, str | None]:
        """The text that may go out now, and the stop string that ends it, if one does."""
        num_before = len(self._text)
        self._text += decode(token for token in tokens if token >= _FIRST_BYTE)
        stop = self._find_stop(num_before) if may_stop else None
        if stop is not None:
            end, text = stop
            return self._send(end), text
        return self._send(len(self._text) - (0 if is_last else self._held_back)), None

    def _find_stop(self, num_before: int) -> tuple[int, str] | None:
        for text in self._stop:
            start = self._text.find(text, max(0, num_before - len(text) + 1))
            if start >= 0:
                return start + (len(text) if self._includes_stop else 0), text
        return None

    def _send(self, end: int) -> str:
        start, self._num_sent = self._num_sent, max(self._num_sent, end)
        return self._text[start : self._num_sent]


class Continuation:
    """What the model says after a context, token by token. `salt` stands for whatever makes sampling differ."""

    def __init__(
        self, context: Sequence[int], *, salt: str = "", is_foreign: bool = False, eos_one_in: int = 0
    ) -> None:
        self._hash = hashlib.blake2b(salt.encode(), digest_size=8)
        self._form = 2 if is_foreign else 1
        self._eos_one_in = eos_one_in
        for token in context:
            self._add(token)

    def next_token(self, *, may_end: bool) -> int:
        """The next token, which is part of the context from now on."""
        draw = int.from_bytes(self._hash.digest(), "big")
        if may_end and self._eos_one_in and draw // len(_WORDS) % self._eos_one_in == 0:
            return END_OF_TEXT
        token = _FIRST_WORD + draw % len(_WORDS) * _FORMS_OF_A_WORD + self._form
        self._add(token)
        return token

    def take(self, token: int) -> int:
        """A token that the model had no choice about."""
        self._add(token)
        return token

    def _add(self, token: int) -> None:
        self._hash.update(token.to_bytes(4, "big", signed=True))  # KV memory that nobody wrote counts as well.


def rivals(token: int, count: int) -> list[int]:
    """Other tokens that the model might have chosen in a token's place, best first."""
    step = _FORMS_OF_A_WORD
    offset = (token - _FIRST_WORD) % step if token >= _FIRST_WORD else 1
    word = max(0, token - _FIRST_WORD) // step
    return [_FIRST_WORD + (word + rank + 1) % len(_WORDS) * step + offset for rank in range(count)]


def logprob(token: int, rank: int) -> float:
    """A made-up log probability: the first of rank 0 near -0.5, each further rank about one lower."""
    return -(0.5 + rank + token % 97 / 200)
