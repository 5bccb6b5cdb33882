"""The matrix as a document for people: docs/conformance.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.conformance.case import Case

HEAD = """\
# Conformance: the gateway and one plain vLLM, side by side

Made by `scripts/conformance`; `tests/engine/test_conformance.py` holds every line.

Each request goes to the gateway, in front of a prefill and a decode engine, and to one vLLM without a connector that has the
same model and flags. Equal means: status, content type, text, token ids, logprobs to 0.001, finish reasons, tool calls, `usage`
to the last number, and errors to the last word are the same. Not compared are ids, times and `system_fingerprint`. A stream is
compared by its kinds of events in order and by what its chunks add up to, since how vLLM cuts a text into chunks depends on how
busy the machine is.

The engines run in float32: in bfloat16 the shape of a batch is enough to turn a near tie between two tokens, with and
without P/D.

The way is what the gateway's own record says of the request:

| way | meaning |
|---|---|
| remote | P computed the prompt, and D's count proves that its KV came over |
| remote, in N parts | taken apart into N requests with ids of their own, each of them remote |
| local | D computed the prompt again, though its KV came: what vLLM does with a prompt of a single token |
| alone: REASON | sent to D alone, since no handoff can stand for it or since only the engine can say what it means |
| passed on | answered by an engine, without a prefill |
| refused by an engine | the engine's own error, word by word |
| refused by the gateway: REASON | vLLM's status and the API's fields, in the gateway's words |
"""
TABLE_HEAD = """\
| request | API | what is sent | way | answer |
|---|---|---|---|---|
"""


def render(results: Sequence[tuple[Case, str]], versions: Mapping[str, str]) -> str:
    """The document, with how each case went."""
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    last_run = f"Last run with {told}: {len(results)} requests."
    rows = [f"| {row(case)} | {outcome} |\n" for case, outcome in results]
    return f"{HEAD}\n{last_run}\n\n{TABLE_HEAD}{''.join(rows)}"


def row(case: Case) -> str:
    """What stands in a case's line before its outcome."""
    return " | ".join(cell.replace("|", "\\|") for cell in (case.name, f"`{case.path}`", case.sends, case.way))
