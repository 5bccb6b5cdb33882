"""The requests that are split, by path, and where each API says the same things. Knows no bodies and no connectors."""

from __future__ import annotations

import enum


class Api(enum.StrEnum):
    """The requests that can be split, by path."""

    COMPLETIONS = "/v1/completions"
    CHAT_COMPLETIONS = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    """Anthropic's."""


ROUTED_APIS = {api.value.encode(): api for api in Api}

CHOICE_APIS = frozenset({Api.COMPLETIONS, Api.CHAT_COMPLETIONS})
"""Those that may be asked for several choices, and whose streams tell their usage only when asked to."""

PROMPT_FIELD = {
    Api.COMPLETIONS: "prompt",
    Api.CHAT_COMPLETIONS: "messages",
    Api.RESPONSES: "input",
    Api.MESSAGES: "messages",
}
"""Without it there is nothing to prefill."""

PROMPT_PARTS = {
    Api.COMPLETIONS: ("prompt", "suffix"),
    Api.CHAT_COMPLETIONS: ("messages", "tools"),
    Api.RESPONSES: ("input", "instructions", "tools"),
    Api.MESSAGES: ("messages", "system", "tools"),
}
"""What makes a prompt long."""

ANSWER_FIELD = {
    Api.COMPLETIONS: "choices",
    Api.CHAT_COMPLETIONS: "choices",
    Api.RESPONSES: "output",
    Api.MESSAGES: "content",
}
"""Without it a whole answer is none."""

LIMIT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Every spelling of how long an answer may get."""

LIMIT_FIELD = {
    Api.COMPLETIONS: "max_tokens",
    Api.CHAT_COMPLETIONS: "max_tokens",
    Api.RESPONSES: "max_output_tokens",
    Api.MESSAGES: "max_tokens",
}
"""The spelling that an API is sure to read where a request holds no other."""


def api_of(path: bytes) -> Api | None:
    """Whose clients a path is for: an API's own path and what lies below it."""
    return next((api for own, api in ROUTED_APIS.items() if path == own or path.startswith(own + b"/")), None)
