"""Embeddings, scores and ranks, as vLLM 0.32 answers them for models that make them: small vectors made from the text.

Read from entrypoints/pooling/{embed,scoring}/{protocol,serving}.py. Pure.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from pdserve.sim.refusal import invalid, malformed
from pdserve.sim.request import check_model
from pdserve.sim.tokens import decode, encode

if TYPE_CHECKING:
    from pdserve.sim.answer import Json
    from pdserve.sim.settings import EngineSettings

_DIMENSIONS = 8
_Texts = str | list[str]


class EmbeddingsBody(msgspec.Struct):
    """`/v1/embeddings`."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str = "float"
    dimensions: int | None = None


class ScoreBody(msgspec.Struct):
    """`/score`, in the four spellings of its two sides."""

    model: str | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None
    items: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None
    text_1: _Texts | None = None
    text_2: _Texts | None = None


class RerankBody(msgspec.Struct):
    """`/rerank`."""

    query: str
    documents: _Texts
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=0)] = 0


def embeddings(body: EmbeddingsBody, request_id: str, created: int, settings: EngineSettings) -> Json:
    """Raises Refused."""
    check_model(body.model, settings)
    if body.dimensions is not None:
        raise invalid(f'Model "{settings.model}" does not support matryoshka representation.', "dimensions")
    prompts = _prompts_of(body.input)
    data = [
        {"index": index, "object": "embedding", "embedding": _told(_vector(decode(prompt)), body.encoding_format)}
        for index, prompt in enumerate(prompts)
    ]
    usage = _usage(sum(map(len, prompts)))
    head = {"id": f"embd-{request_id}", "object": "list", "created": created, "model": settings.model}
    return head | {"data": data, "usage": usage}


def scores(body: ScoreBody, request_id: str, created: int, settings: EngineSettings) -> Json:
    """Raises Refused."""
    check_model(body.model, settings)
    first = _listed(body.queries or body.data_1 or body.text_1)
    second = _listed(body.documents or body.items or body.data_2 or body.text_2)
    if not first or not second:
        raise malformed("{'type': 'missing', 'loc': 'body.queries', 'msg': 'Field required'}", "body.queries")
    if len(first) not in {1, len(second)}:
        raise invalid("Input lengths must be either 1:1, 1:N or N:N")
    pairs = list(zip(first if len(first) == len(second) else first * len(second), second, strict=True))
    data = [{"index": index, "object": "score", "score": _likeness(*pair)} for index, pair in enumerate(pairs)]
    head = {"id": f"score-{request_id}", "object": "list", "created": created, "model": settings.model}
    return head | {"data": data, "usage": _usage(_num_tokens(pairs))}


def ranks(body: RerankBody, request_id: str, settings: EngineSettings) -> Json:
    """Raises Refused."""
    check_model(body.model, settings)
    documents = _listed(body.documents)
    pairs = [(body.query, document) for document in documents]
    results: list[Json] = [
        {
            "index": index,
            "document": {"text": document, "multi_modal": None},
            "relevance_score": _likeness(body.query, document),
        }
        for index, document in enumerate(documents)
    ]
    results.sort(key=lambda result: result["relevance_score"], reverse=True)
    num_tokens = _num_tokens(pairs)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    top = results[: body.top_n or len(results)]
    return {"id": f"score-{request_id}", "model": settings.model, "usage": usage, "results": top}


def _prompts_of(given: str | list[str | int | list[int]]) -> list[list[int]]:
    items: list[Any] = [given] if isinstance(given, str) else given
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return [encode(item) if isinstance(item, str) else item for item in items]


def _vector(text: str) -> list[float]:
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=_DIMENSIONS).digest()
    values = [value / 127.5 - 1 for value in digest]
    length = sum(value * value for value in values) ** 0.5 or 1.0
    return [value / length for value in values]


def _told(vector: list[float], encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
    return vector


def _likeness(first: str, second: str) -> float:
    return sum(a * b for a, b in zip(_vector(first), _vector(second), strict=True))


def _listed(texts: _Texts | None) -> list[str]:
    return [texts] if isinstance(texts, str) else texts or []


def _num_tokens(pairs: list[tuple[str, str]]) -> int:
    return sum(len(encode(text)) for pair in pairs for text in pair)


def _usage(num_tokens: int) -> Json:
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
