"""A conversation as one prompt, in the style of ChatML: everything that a real chat template could look at is in it.

Tools, template arguments and what is no text count as well, so that a leg that lost one of them has another prompt. What
only shapes the output (`response_format`, `tool_choice`) is not in it, as in vLLM. Pure.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pdserve.sim.tokens import render_chat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning")
"""What a template sees of a message besides its role and its content."""


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt. `arguments` are `chat_template_kwargs` and what vLLM adds to them."""
    turns = [(str(message.get("role", "user")), _text_of(message)) for message in messages]
    extras = [("tools", tools), ("arguments", arguments)]
    preamble = [(name, json.dumps(value, sort_keys=True)) for name, value in extras if value]
    return render_chat([*preamble, *turns], add_generation_prompt=add_generation_prompt)


def _text_of(message: Mapping[str, Any]) -> str:
    kept = {name: message[name] for name in _KEPT if message.get(name)}
    return _content(message.get("content")) + (json.dumps(kept, sort_keys=True) if kept else "")


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(map(_part, content))
    return "" if content is None else str(content)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return json.dumps(part, sort_keys=True)
