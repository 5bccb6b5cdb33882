"""What constrained output must look like: tokens where a schema fixes them, gaps where the model chooses.

vLLM masks the sampler with a grammar; the stand-in lays the answer out beforehand. Its words still come from the model, so
that a context which is not the request's own shows here too. Pure.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdserve.sim.tokens import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Form = tuple[int, ...]
"""Token ids, and WORD where the model chooses; empty: the model is free."""

WORD = -1
_WORDS_OF_A_STRING = 2
_MAX_DEPTH = 8
"""Schemas may refer to themselves; what lies deeper is left out, as a model would leave it some time."""
_ANY_OBJECT: Mapping[str, Any] = {"properties": {"answer": {"type": "string"}}}


def form_of_format(response_format: Any) -> Form:
    """`response_format` of completions and chat, and `text.format` of responses, which says it without the inner object."""
    if not isinstance(response_format, dict):
        return ()
    kind = response_format.get("type")
    if kind == "json_object":
        return form_of_schema(_ANY_OBJECT)
    if kind != "json_schema":
        return ()
    inner = response_format.get("json_schema")
    return form_of_schema((inner if isinstance(inner, dict) else response_format).get("schema") or _ANY_OBJECT)


def form_of_schema(schema: Mapping[str, Any]) -> Form:
    """Some object that a JSON schema describes; one without properties gets one, so that there is something to tell."""
    root = schema if schema.get("properties") or "$ref" in schema or "anyOf" in schema else _ANY_OBJECT
    form: list[int] = []
    for piece in _pieces(root, schema, 0):
        form += [WORD] * _WORDS_OF_A_STRING if piece is None else encode(piece)
    return tuple(form)


def _pieces(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str | None]:
    """Texts, and None where words go."""
    schema = _resolved(schema, root, depth)
    if depth > _MAX_DEPTH:
        yield "null"
    elif "const" in schema or "enum" in schema:
        yield json.dumps(schema["const"] if "const" in schema else schema["enum"][0])
    elif "properties" in schema:
        yield from _object(schema["properties"], root, depth)
    else:
        yield from _plain(schema, root, depth)


def _resolved(schema: Any, root: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
    if not isinstance(schema, dict):
        return {}
    if depth <= _MAX_DEPTH and isinstance(schema.get("$ref"), str):
        target: Any = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target.get(name, {}) if isinstance(target, dict) else {}
        return _resolved(target, root, depth + 1)
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return _resolved(schema[name][0], root, depth)
    return schema


def _object(properties: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[str | None]:
    for index, (name, schema) in enumerate(properties.items()):
        yield f"{', ' if index else '{'}{json.dumps(name)}: "
        yield from _pieces(schema, root, depth + 1)
    yield "}"


def _plain(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[str | None]:
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind in {"integer", "number"}:
        yield json.dumps(schema.get("minimum", 7))
    elif kind == "boolean":
        yield "true"
    elif kind == "null":
        yield "null"
    elif kind == "array":
        yield "["
        yield from _pieces(schema.get("items"), root, depth + 1)
        yield "]"
    elif kind == "object":
        yield "{}"
    else:
        yield from ('"', None, '"')
