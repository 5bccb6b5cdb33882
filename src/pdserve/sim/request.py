"""From a request's body to jobs for the engine, refusing what vLLM 0.32 refuses, with its statuses, types and words.

Two steps, because they differ for P/D: what `read_*` refuses never got past pydantic, and P hears nothing of it; what
`prepare` refuses did, and D then tells P that its blocks may go. Knows no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from pdserve.sim.job import Job, Sampling
from pdserve.sim.tokens import VOCABULARY_SIZE, encode, render_chat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.sim.settings import EngineSettings

_MAX_LOGPROBS = 20
_GREEDY_BELOW = 1e-5
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_StopStrings = Annotated[list[str], msgspec.Meta(max_length=4)]


class Refused(Exception):
    """An answer that is an error, in vLLM's shape (entrypoints/serve/engine/protocol.py, ErrorResponse)."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


def _invalid(message: str, param: str | None = None, **value: object) -> Refused:
    """vLLM's VLLMValidationError appends what was wrong to its message."""
    details = [f"parameter={param}"] if param else []
    details += [f"value={item}" for item in value.values()]
    return Refused(400, "BadRequestError", f"{message} ({', '.join(details)})" if details else message, param)


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Body(msgspec.Struct, kw_only=True):
    """What completions and chat share. Fields that are not here are accepted and ignored, as vLLM does with unknown ones."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    seed: _Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | _StopStrings | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    use_beam_search: bool = False
    prompt_logprobs: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionBody(_Body, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[int | str | list[int]] | None = None
    max_tokens: int | None = 16
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None


class ChatBody(_Body, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    add_generation_prompt: bool = True
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct):
    """`/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct):
    """`/detokenize`."""

    tokens: list[int]
    model: str | None = None


_T = TypeVar("_T", bound=msgspec.Struct)


def read_body(body: bytes, content_type: bytes, kind: type[_T]) -> _T:
    """Decode a body. Raises Refused."""
    if content_type.lower().partition(b";")[0] != b"application/json":
        raise _malformed("Unsupported Media Type: Only 'application/json' is allowed", None)
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _malformed(
            f"{{'type': 'json_invalid', 'loc': 'body', 'msg': 'JSON decode error: {exc}'}}", "body"
        ) from exc
    try:
        return msgspec.convert(value, kind, strict=False)  # pydantic takes "3" for a number as well.
    except msgspec.ValidationError as exc:
        message, _, path = str(exc).partition(" - at `$")
        param = "body" + path.rstrip("`")
        raise _malformed(f"{{'loc': '{param}', 'msg': '{message}'}}", param) from exc


def _malformed(error: str, param: str | None) -> Refused:
    """vLLM answers 400 where FastAPI's own answer would be 422 (exception_handling/handlers/validation.py)."""
    return Refused(400, "Bad Request", f"1 validation error:\n  {error}", param)


def read_completion(body: bytes, content_type: bytes) -> CompletionBody:
    """A completion request. Raises Refused."""
    request = read_body(body, content_type, CompletionBody)
    _check_fields(request)
    if request.logprobs is not None and request.logprobs < -1:
        raise _invalid("`logprobs` must be a positive value or -1.", "logprobs", value=request.logprobs)
    if request.prompt is None or request.prompt == "":
        raise _invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    return request


def read_chat(body: bytes, content_type: bytes) -> ChatBody:
    """A chat request. Raises Refused."""
    request = read_body(body, content_type, ChatBody)
    _check_fields(request)
    if request.top_logprobs and not request.logprobs:
        raise _invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if request.tools == []:
        raise _invalid(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    return request


def _check_fields(request: _Body) -> None:
    if request.stream_options is not None and not request.stream:
        raise _invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    if request.stream and request.prompt_logprobs:
        raise _invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


def check_model(name: str | None, settings: EngineSettings) -> None:
    """Raises Refused when another model is asked for."""
    if name and name != settings.model:
        message = f"The model `{name}` does not exist. Valid aliases: {settings.model}."
        raise Refused(404, "NotFoundError", message, "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that can be run: what both APIs come down to."""

    is_chat: bool
    request_id: str
    """With its prefix, as the answer names it."""
    prompts: tuple[tuple[int, ...], ...]
    n: int
    jobs: tuple[Job, ...]
    """Prompt by prompt, each `n` times."""
    echoes: bool
    num_logprobs: int | None
    """Alternatives to tell for each token; None: tell nothing."""
    num_prompt_logprobs: int | None
    returns_token_ids: bool
    includes_usage: bool
    has_continuous_usage: bool


def prepare_completion(body: CompletionBody, request_id: str, settings: EngineSettings) -> Call:
    """Raises Refused."""
    if body.stream and body.use_beam_search:
        raise _invalid("Streaming is not currently supported with beam search")
    check_model(body.model, settings)
    if body.suffix:
        message = "suffix is only supported for models with FIM completion rendering"
        raise Refused(400, "BadRequestError", message, "suffix")
    _check_num_logprobs(body.logprobs, "logprobs")
    prompt_logprobs = body.logprobs if body.prompt_logprobs is None and body.echo else body.prompt_logprobs
    return _prepare(
        body,
        is_chat=False,
        request_id=f"cmpl-{request_id}",
        prompts=_prompts_of(body.prompt),
        max_tokens=16 if body.max_tokens is None else body.max_tokens,
        echoes=bool(body.echo),
        num_logprobs=body.logprobs,
        num_prompt_logprobs=prompt_logprobs,
        settings=settings,
    )


def prepare_chat(body: ChatBody, request_id: str, settings: EngineSettings) -> Call:
    """Raises Refused."""
    check_model(body.model, settings)
    if body.tools and body.tool_choice in {None, "auto"}:
        raise _invalid('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    _check_num_logprobs(body.top_logprobs, "top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    text = render_messages(body.messages, add_generation_prompt=body.add_generation_prompt)
    return _prepare(
        body,
        is_chat=True,
        request_id=f"chatcmpl-{request_id}",
        prompts=(tuple(encode(text)),),
        max_tokens=settings.max_model_len if max_tokens is None else max_tokens,
        echoes=False,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_prompt_logprobs=body.prompt_logprobs,
        settings=settings,
    )


def _prepare(
    body: _Body,
    *,
    is_chat: bool,
    request_id: str,
    prompts: tuple[tuple[int, ...], ...],
    max_tokens: int,
    echoes: bool,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    settings: EngineSettings,
) -> Call:
    n = 1 if body.n is None else body.n
    if n < 1:
        raise _invalid(f"n must be at least 1, got {n}.")
    jobs = tuple(
        Job(
            request_id=_job_id(request_id, index, choice, is_chat=is_chat, n=n),
            prompt=prompt,
            sampling=_sampling_of(body, _room_for(prompt, max_tokens, settings), choice, n),
            params=dict(body.kv_transfer_params) if body.kv_transfer_params else None,
            cache_salt=body.cache_salt,
        )
        for index, prompt in enumerate(prompts)
        for choice in range(n)
    )
    options = body.stream_options or StreamOptions()
    return Call(
        is_chat=is_chat,
        request_id=request_id,
        prompts=prompts,
        n=n,
        jobs=jobs,
        echoes=echoes,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        includes_usage=bool(options.include_usage),
        has_continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
    )


def _job_id(request_id: str, index: int, choice: int, *, is_chat: bool, n: int) -> str:
    """Completions number their prompts; several choices are children (v1/engine/parallel_sampling.py)."""
    name = request_id if is_chat else f"{request_id}-{index}"
    return name if n == 1 else f"{choice}_{name}"


def _room_for(prompt: Sequence[int], max_tokens: int, settings: EngineSettings) -> int:
    length, limit = len(prompt), settings.max_model_len
    if length > limit:
        raise _invalid(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            value=length,
        )
    room = min(max_tokens, limit - length)
    if room < 1:
        raise _invalid(f"max_tokens must be at least 1, got {room}.", "max_tokens", value=room)
    return room


def _sampling_of(body: _Body, max_tokens: int, choice: int, n: int) -> Sampling:
    """As SamplingParams checks them, in its words (vllm/sampling_params.py)."""
    temperature = 1.0 if body.temperature is None else body.temperature
    is_greedy = temperature < _GREEDY_BELOW and not body.use_beam_search
    _check_sampling(body, temperature)
    if body.min_tokens > max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}."
        raise _invalid(message)
    if n > 1 and is_greedy:
        raise _invalid(f"n must be 1 when using greedy sampling, got {n}.")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if "" in stop:
        raise _invalid("stop cannot contain an empty string.")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignores_eos=body.ignore_eos,
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        includes_stop=body.include_stop_str_in_output,
        salt="" if is_greedy else f"{body.seed or 0}/{choice}",
    )


def _check_sampling(body: _Body, temperature: float) -> None:
    if temperature < 0:
        raise _invalid(f"temperature must be non-negative, got {temperature}.", "temperature", value=temperature)
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise _invalid(f"top_p must be in (0, 1], got {body.top_p}.", "top_p", value=body.top_p)
    if body.min_tokens < 0:
        raise _invalid(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")


def _check_num_logprobs(count: int | None, param: str) -> None:
    if count is not None and count > _MAX_LOGPROBS:
        message = f"Requested sample logprobs of {count}, which is greater than max allowed: {_MAX_LOGPROBS}"
        raise _invalid(message, param, value=count)


def _prompts_of(prompt: str | list[int | str | list[int]] | None) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (tuple(encode(prompt)),)
    if not prompt:
        raise _invalid("You must pass at least one prompt")
    numbers = [item for item in prompt if isinstance(item, int)]
    if numbers:
        return (_known_tokens(numbers),)
    texts_or_lists = [item for item in prompt if not isinstance(item, int)]
    return tuple(tuple(encode(item)) if isinstance(item, str) else _known_tokens(item) for item in texts_or_lists)


def _known_tokens(tokens: list[int]) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < VOCABULARY_SIZE:
            raise _invalid(f"Token id {token} is out of vocabulary")
    return tuple(tokens)


def render_messages(messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    """A conversation as a prompt. Raises Refused."""
    if not messages:
        raise _invalid("Cannot apply chat template to an empty conversation. Provide at least one message.")
    turns = [(str(message.get("role", "user")), _text_of(message.get("content"))) for message in messages]
    return render_chat(turns, add_generation_prompt=add_generation_prompt)


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
