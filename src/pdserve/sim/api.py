"""vLLM's generating paths: how each reads its request, what it runs, and how it answers. Knows no sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pdserve.sim.answer import OpenAiAnswer
from pdserve.sim.messages import MessagesAnswer, MessagesBody, prepare_messages, read_messages
from pdserve.sim.request import ChatBody, CompletionBody, prepare_chat, prepare_completion, read_chat, read_completion
from pdserve.sim.responses import (
    ResponsesAnswer,
    ResponsesBody,
    check_responses,
    conversation_of,
    prepare_responses,
    read_responses,
)

if TYPE_CHECKING:
    from pdserve.sim.answer import Answer
    from pdserve.sim.refusal import Refused
    from pdserve.sim.request import Call
    from pdserve.sim.response_store import ResponseStore
    from pdserve.sim.settings import EngineSettings

AnyBody = CompletionBody | ChatBody | MessagesBody | ResponsesBody


class Api(Protocol):
    """One path. `B` is its own body; nobody else looks into it."""

    def read(self, body: bytes, content_type: bytes) -> AnyBody:
        """Raises Refused."""

    def begin(self, body: Any, request_id: str, *, created: int) -> tuple[Call, Answer]:
        """What to run, and what turns its outputs into an answer. Raises Refused."""

    def finished(self, body: Any, answer: Any) -> None:
        """The answer is whole."""

    def dressed(self, refusal: Refused) -> Refused:
        """A refusal in the path's own shape."""


class _OpenAiApi:
    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings

    def finished(self, body: Any, answer: Any) -> None:
        pass

    def dressed(self, refusal: Refused) -> Refused:
        return refusal

    def _answer(self, call: Call, created: int) -> OpenAiAnswer:
        has_details = self._settings.enable_prompt_tokens_details
        return OpenAiAnswer(call, model=self._settings.model, created=created, has_details=has_details)


class CompletionsApi(_OpenAiApi):
    """`/v1/completions`."""

    def read(self, body: bytes, content_type: bytes) -> CompletionBody:
        return read_completion(body, content_type)

    def begin(self, body: CompletionBody, request_id: str, *, created: int) -> tuple[Call, Answer]:
        call = prepare_completion(body, request_id, self._settings)
        return call, self._answer(call, created)


class ChatApi(_OpenAiApi):
    """`/v1/chat/completions`."""

    def read(self, body: bytes, content_type: bytes) -> ChatBody:
        return read_chat(body, content_type)

    def begin(self, body: ChatBody, request_id: str, *, created: int) -> tuple[Call, Answer]:
        call = prepare_chat(body, request_id, self._settings)
        return call, self._answer(call, created)


class MessagesApi(_OpenAiApi):
    """`/v1/messages`."""

    def read(self, body: bytes, content_type: bytes) -> MessagesBody:
        return read_messages(body, content_type)

    def begin(self, body: MessagesBody, request_id: str, *, created: int) -> tuple[Call, Answer]:
        call = prepare_messages(body, request_id, self._settings)
        return call, MessagesAnswer(self._answer(call, created), self._settings.model)

    def dressed(self, refusal: Refused) -> Refused:
        return refusal.for_anthropic()


class ResponsesApi(_OpenAiApi):
    """`/v1/responses`."""

    def __init__(self, settings: EngineSettings, store: ResponseStore) -> None:
        super().__init__(settings)
        self.store = store

    def read(self, body: bytes, content_type: bytes) -> ResponsesBody:
        return read_responses(body, content_type)

    def begin(self, body: ResponsesBody, request_id: str, *, created: int) -> tuple[Call, ResponsesAnswer]:
        del request_id  # The header names completions and chat only; a response has the body's id.
        check_responses(body, self._settings)
        history = self.store.history(body.previous_response_id)
        call = prepare_responses(body, history, self._settings)
        if self.keeps(body):
            self.store.begin(call.request_id, conversation_of(body, history))
        return call, ResponsesAnswer(body, call, self._settings, created=created)

    def finished(self, body: ResponsesBody, answer: ResponsesAnswer) -> None:
        if self.keeps(body) and answer.finished is not None:
            self.store.keep(answer.finished)

    def keeps(self, body: ResponsesBody) -> bool:
        """`store` is true unless said otherwise, and without the engine's setting it means nothing."""
        return self._settings.enable_responses_store and body.store is not False
