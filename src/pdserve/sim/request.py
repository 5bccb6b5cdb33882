"""From a request's body to jobs for the engine, refusing what vLLM 0.32 refuses, with its statuses, types and words.

Two steps, because they differ for P/D: what `read_*` refuses never got past pydantic, and P hears nothing of it; what
`prepare` refuses did, and D then tells P that its blocks may go. Knows no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from pdserve.sim.form import form_of_format, form_of_schema
from pdserve.sim.job import Job, Sampling
from pdserve.sim.prompt import render
from pdserve.sim.refusal import Refused, invalid, read_body
from pdserve.sim.tokens import VOCABULARY_SIZE, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.sim.form import Form
    from pdserve.sim.settings import EngineSettings

_MAX_LOGPROBS = 20
_GREEDY_BELOW = 1e-5
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_StopStrings = Annotated[list[str], msgspec.Meta(max_length=4)]


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
    response_format: dict[str, Any] | None = None
    priority: _Int64 = 0
    kv_transfer_params: dict[str, Any] | None = None


class CompletionBody(_Body, kw_only=True):
    """`/v1/completions`."""

    prompt: str | list[int | str | list[int]] | None = None
    max_tokens: int | None = 16
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None


class Function(msgspec.Struct, omit_defaults=True):
    """What a tool is called and takes."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """One of `tools`."""

    function: Function
    type: Literal["function"] = "function"


class ChatBody(_Body, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tool_choice: str | dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct):
    """`/tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct):
    """`/detokenize`."""

    tokens: list[int]
    model: str | None = None


def read_completion(body: bytes, content_type: bytes) -> CompletionBody:
    """A completion request. Raises Refused."""
    request = read_body(body, content_type, CompletionBody)
    _check_fields(request)
    if request.logprobs is not None and request.logprobs < -1:
        raise invalid("`logprobs` must be a positive value or -1.", "logprobs", value=request.logprobs)
    if request.prompt is None or request.prompt == "":
        raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    return request


def read_chat(body: bytes, content_type: bytes) -> ChatBody:
    """A chat request. Raises Refused."""
    request = read_body(body, content_type, ChatBody)
    _check_fields(request)
    if request.top_logprobs and not request.logprobs:
        raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    if request.tools == []:
        raise invalid(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    check_tool_choice(request.tool_choice, request.tools)
    return request


def check_tool_choice(choice: str | dict[str, Any] | None, tools: list[Tool] | None) -> None:
    """As ChatCompletionRequest checks it (check_tool_usage). Raises Refused."""
    if choice in {None, "none"} if not isinstance(choice, dict) else False:
        return
    if not tools:
        raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        if tool_named(choice, tools) is None:
            raise invalid(
                "The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice"
            )
    elif choice not in {"auto", "required"}:
        raise invalid(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )


def tool_named(choice: dict[str, Any], tools: Sequence[Tool]) -> Tool | None:
    """The tool that a choice names; None: there is none of that name."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return next((tool for tool in tools if tool.function.name == name), None)


def _check_fields(request: _Body) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    if request.stream and request.prompt_logprobs:
        raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


def check_model(name: str | None, settings: EngineSettings) -> None:
    """Raises Refused when another model is asked for."""
    if name and name != settings.model:
        message = f"The model `{name}` does not exist. Valid aliases: {settings.model}."
        raise Refused(404, "NotFoundError", message, "model")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The output is a tool call."""

    name: str
    is_named: bool
    """The client named it: chat then ends with `stop` and not with `tool_calls`."""
    is_tagged: bool
    """The model marks its calls."""

    def is_call(self, finish_reason: str | None) -> bool:
        """Whether an output is one: where the client named the tool and nothing marks the call, anything is."""
        return finish_reason == "stop" or (self.is_named and not self.is_tagged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that can be run: what all APIs come down to."""

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
    tool_use: ToolUse | None = None


def prepare_completion(body: CompletionBody, request_id: str, settings: EngineSettings) -> Call:
    """Raises Refused."""
    if body.stream and body.use_beam_search:
        raise invalid("Streaming is not currently supported with beam search")
    check_model(body.model, settings)
    if body.suffix:
        message = "suffix is only supported for models with FIM completion rendering"
        raise Refused(400, "BadRequestError", message, "suffix")
    _check_num_logprobs(body.logprobs, "logprobs")
    prompt_logprobs = body.logprobs if body.prompt_logprobs is None and body.echo else body.prompt_logprobs
    request_id = f"cmpl-{request_id}"
    return _prepare(
        body,
        is_chat=False,
        request_id=request_id,
        prompts=[(f"{request_id}-{index}", prompt) for index, prompt in enumerate(_prompts_of(body.prompt))],
        max_tokens=16 if body.max_tokens is None else body.max_tokens,
        echoes=bool(body.echo),
        num_logprobs=body.logprobs,
        num_prompt_logprobs=prompt_logprobs,
        form=form_of_format(body.response_format),
        settings=settings,
    )


def prepare_chat(body: ChatBody, request_id: str, settings: EngineSettings) -> Call:
    """Raises Refused."""
    check_model(body.model, settings)
    if not settings.enable_auto_tool_choice:
        _refuse_tools(body)
    _check_num_logprobs(body.top_logprobs, "top_logprobs")
    request_id = f"chatcmpl-{request_id}"
    return prepare_conversation(body, request_id, request_id, settings)


def prepare_conversation(body: ChatBody, request_id: str, job_id: str, settings: EngineSettings) -> Call:
    """What chat, messages and responses have in common. Raises Refused."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tool = _forced_tool(body) if settings.enable_auto_tool_choice else None
    return _prepare(
        body,
        is_chat=True,
        request_id=request_id,
        prompts=[(job_id, tuple(encode(render_messages(body))))],
        max_tokens=settings.max_model_len if max_tokens is None else max_tokens,
        echoes=False,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        num_prompt_logprobs=body.prompt_logprobs,
        form=form_of_schema(tool.function.parameters or {}) if tool else form_of_format(body.response_format),
        tool_use=None if tool is None else _use(tool, body.tool_choice, settings),
        settings=settings,
    )


def _use(tool: Tool, choice: object, settings: EngineSettings) -> ToolUse:
    is_named = isinstance(choice, dict)
    return ToolUse(tool.function.name, is_named=is_named, is_tagged=settings.has_tagged_tool_calls)


def _refuse_tools(body: ChatBody) -> None:
    """Without a tool parser (renderers/online_renderer.py, render_chat)."""
    choice = body.tool_choice
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        raise invalid(f'tool_choice=function "{name}" requires --tool-call-parser to be set')
    if choice == "required":
        raise invalid('tool_choice="required" requires --tool-call-parser to be set')
    if choice == "auto" or (choice is None and body.tools):
        raise invalid('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')


def _forced_tool(body: ChatBody) -> Tool | None:
    if not body.tools:
        return None
    if isinstance(body.tool_choice, dict):
        return tool_named(body.tool_choice, body.tools)
    return body.tools[0] if body.tool_choice == "required" else None


def _prepare(
    body: _Body,
    *,
    is_chat: bool,
    request_id: str,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    max_tokens: int,
    echoes: bool,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    form: Form,
    settings: EngineSettings,
    tool_use: ToolUse | None = None,
) -> Call:
    """`prompts` are the engine's request ids and what to go on from."""
    n = 1 if body.n is None else body.n
    if n < 1:
        raise invalid(f"n must be at least 1, got {n}.")
    jobs = tuple(
        Job(
            # Several choices are children of one request (v1/engine/parallel_sampling.py).
            request_id=job_id if n == 1 else f"{choice}_{job_id}",
            prompt=prompt,
            sampling=_sampling_of(body, _room_for(prompt, max_tokens, settings), choice, n, form),
            params=dict(body.kv_transfer_params) if body.kv_transfer_params else None,
            cache_salt=body.cache_salt,
        )
        for job_id, prompt in prompts
        for choice in range(n)
    )
    options = body.stream_options or StreamOptions()
    return Call(
        is_chat=is_chat,
        request_id=request_id,
        prompts=tuple(prompt for _, prompt in prompts),
        n=n,
        jobs=jobs,
        echoes=echoes,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        returns_token_ids=bool(body.return_token_ids),
        includes_usage=bool(options.include_usage),
        has_continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        tool_use=tool_use,
    )


def _room_for(prompt: Sequence[int], max_tokens: int, settings: EngineSettings) -> int:
    length, limit = len(prompt), settings.max_model_len
    if length > limit:
        raise invalid(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} input tokens, "
            "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            value=length,
        )
    room = min(max_tokens, limit - length)
    if room < 1:
        raise invalid(f"max_tokens must be at least 1, got {room}.", "max_tokens", value=room)
    return room


def _sampling_of(body: _Body, max_tokens: int, choice: int, n: int, form: Form) -> Sampling:
    """As SamplingParams checks them, in its words (vllm/sampling_params.py)."""
    temperature = 1.0 if body.temperature is None else body.temperature
    is_greedy = temperature < _GREEDY_BELOW and not body.use_beam_search
    _check_sampling(body, temperature)
    if body.min_tokens > max_tokens:
        message = f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}."
        raise invalid(message)
    if n > 1 and is_greedy:
        raise invalid(f"n must be 1 when using greedy sampling, got {n}.")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if "" in stop:
        raise invalid("stop cannot contain an empty string.")
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        ignores_eos=body.ignore_eos,
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        includes_stop=body.include_stop_str_in_output,
        form=form,
        salt="" if is_greedy else _salt_of(body.seed, choice),
    )


def _salt_of(seed: int | None, choice: int) -> str:
    """Choice j of a seeded request is what seed + j gives alone (v1/engine/parallel_sampling.py).

    Without a seed vLLM's samples differ from run to run; here only a request's choices differ, so that tests can compare.
    """
    return f"choice {choice}" if seed is None else f"seed {seed + choice}"


def _check_sampling(body: _Body, temperature: float) -> None:
    if temperature < 0:
        raise invalid(f"temperature must be non-negative, got {temperature}.", "temperature", value=temperature)
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise invalid(f"top_p must be in (0, 1], got {body.top_p}.", "top_p", value=body.top_p)
    if body.min_tokens < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")


def _check_num_logprobs(count: int | None, param: str) -> None:
    if count is not None and count > _MAX_LOGPROBS:
        message = f"Requested sample logprobs of {count}, which is greater than max allowed: {_MAX_LOGPROBS}"
        raise invalid(message, param, value=count)


def _prompts_of(prompt: str | list[int | str | list[int]] | None) -> tuple[tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (tuple(encode(prompt)),)
    if not prompt:
        raise invalid("You must pass at least one prompt")
    numbers = [item for item in prompt if isinstance(item, int)]
    if numbers:
        return (_known_tokens(numbers),)
    texts_or_lists = [item for item in prompt if not isinstance(item, int)]
    return tuple(tuple(encode(item)) if isinstance(item, str) else _known_tokens(item) for item in texts_or_lists)


def _known_tokens(tokens: list[int]) -> tuple[int, ...]:
    for token in tokens:
        if not 0 <= token < VOCABULARY_SIZE:
            raise invalid(f"Token id {token} is out of vocabulary")
    return tuple(tokens)


def render_messages(body: ChatBody | TokenizeBody) -> str:
    """A conversation as a prompt. Raises Refused."""
    if not body.messages:
        raise invalid("Cannot apply chat template to an empty conversation. Provide at least one message.")
    arguments = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        arguments["reasoning_effort"] = body.reasoning_effort
    tools = [msgspec.to_builtins(tool) for tool in body.tools or ()]
    return render(body.messages, tools=tools, arguments=arguments, add_generation_prompt=body.add_generation_prompt)
