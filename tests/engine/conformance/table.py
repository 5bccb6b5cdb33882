"""The matrix: every request that the gateway must answer as one plain vLLM does. A line more is a case more.

Prompts are shorter than a KV block or belong to one case alone, so that what a prefix cache has seen before is the same on
both sides whatever runs beside it, and `usage` can be compared to the last number.
"""

from __future__ import annotations

from typing import Any

from engine.conformance.case import (
    BY_ENGINE,
    CHAT,
    COMPLETIONS,
    LOCAL,
    MESSAGES,
    MODEL,
    PASSED_ON,
    REMOTE,
    RESPONSES,
    Case,
    alone,
    both,
    by_gateway,
    in_parts,
    twice,
)

_STORY = "Once upon a time there was a little robot who"
_QUESTION = "What is the capital of France?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_CONVERSATION = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Nice to meet you, Ada."},
    {"role": "user", "content": "What is my name?"},
]
_UNICODE = "Übersetze: 你好，世界！ Привет 🌍👩‍👩‍👧 é"  # noqa: RUF001 - a Chinese comma, as it is written
_TOKENS = [504, 2365, 282, 4649, 314]
_WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Current weather in a city", "parameters": _WEATHER},
}
_OTHER_TOOL = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": {"type": "integer"}}}},
}
_FLAT_TOOL = {"type": "function", **_TOOL["function"]}  # type: ignore[dict-item]
_ANTHROPIC_TOOL = {"name": "get_weather", "description": "Current weather in a city", "input_schema": _WEATHER}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_GRAMMAR = 'root ::= "yes" | "no" | "may" "be"'


def _long_prompt(subject: str, *, num_lines: int = 60) -> str:
    return "".join(f"Line {line}: {subject} number {line * 7 % 31} is counted.\n" for line in range(num_lines))


def _completion(name: str, sends: str, *, way: str = REMOTE, **fields: Any) -> Case:
    body = {"model": MODEL, "prompt": _STORY, "max_tokens": 5, "temperature": 0, **fields}
    return Case(name, COMPLETIONS, sends, body, way)


def _chat(name: str, sends: str, *, way: str = REMOTE, **fields: Any) -> Case:
    body = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 5, "temperature": 0, **fields}
    return Case(name, CHAT, sends, body, way)


def _response(name: str, sends: str, *, way: str = REMOTE, **fields: Any) -> Case:
    body = {"model": MODEL, "input": _QUESTION, "max_output_tokens": 5, "temperature": 0, **fields}
    return Case(name, RESPONSES, sends, body, way)


def _message(name: str, sends: str, *, way: str = REMOTE, **fields: Any) -> Case:
    body = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 5, "temperature": 0, **fields}
    return Case(name, MESSAGES, sends, body, way)


_COMPLETIONS = (
    *both(_completion("completion", "text")),
    _completion("completion of one token", "max_tokens 1", max_tokens=1),
    *both(_completion("completion to its own end", "min_tokens 3, stop '.'", max_tokens=12, min_tokens=3, stop=".")),
    _completion("completion with default limit", "no max_tokens", max_tokens=None),
    *both(_completion("completion with stop strings", "stop, two strings", max_tokens=12, stop=["little", " the"])),
    *both(
        _completion(
            "completion with its stop string kept",
            "include_stop_str_in_output",
            max_tokens=12,
            stop=[" the"],
            include_stop_str_in_output=True,
        )
    ),
    _completion("completion with stop token ids", "stop_token_ids", max_tokens=12, stop_token_ids=[253, 260, 284]),
    _completion("completion that ignores the end", "ignore_eos", ignore_eos=True, max_tokens=10),
    *both(_completion("completion with logprobs", "logprobs 3", logprobs=3)),
    _completion("completion with the chosen tokens' logprobs", "logprobs 0", logprobs=0),
    *both(_completion("completion with a seed", "temperature 1, seed", temperature=1.0, seed=7)),
    _completion(
        "completion by top_p and top_k",
        "top_p, top_k, min_p, seed",
        temperature=0.8,
        seed=3,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
    ),
    _completion(
        "completion with penalties",
        "repetition, presence, frequency",
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        max_tokens=10,
    ),
    _completion("completion with a logit bias", "logit_bias", logit_bias={"500": 5.0, "284": -100}),
    _completion("completion without bad words", "bad_words", bad_words=["was", " robot"], max_tokens=10),
    _completion("completion from allowed tokens", "allowed_token_ids", allowed_token_ids=[253, 260, 284, 30, 28]),
    *both(_completion("completion of token ids", "prompt as ids", prompt=_TOKENS)),
    _completion("completion of a single token", "prompt [id]", way=LOCAL, prompt=_TOKENS[:1]),
    _completion("completion of one prompt in a list", "prompt [text]", prompt=[_STORY]),
    *both(
        _completion(
            "completion of several texts",
            "prompt [text, text, text]",
            way=in_parts(3),
            prompt=["One plus one is", "The sea is", "A ship"],
        )
    ),
    _completion(
        "completion of several token lists", "prompt [[ids], [ids]]", way=in_parts(2), prompt=[_TOKENS, _TOKENS[:2]]
    ),
    *both(_completion("several choices", "n 3, seed", way=in_parts(3), n=3, temperature=0.9, seed=11)),
    *both(
        _completion(
            "several choices of several prompts",
            "n 2, two prompts, seed",
            way=in_parts(4),
            n=2,
            temperature=0.9,
            seed=5,
            prompt=["Red is", "Blue is"],
        )
    ),
    _completion("best_of", "best_of 2, which vLLM ignores", best_of=2),
    *both(_completion("echo", "echo", way=alone("prompt_echo"), echo=True)),
    *both(_completion("echo with logprobs", "echo, logprobs 1", way=alone("prompt_echo"), echo=True, logprobs=1)),
    _completion("prompt logprobs", "prompt_logprobs 1", way=alone("prompt_logprobs"), prompt_logprobs=1),
    _completion("beam search", "use_beam_search, n 2", way=alone("many_choices"), use_beam_search=True, n=2),
    *both(_completion("completion with token ids told", "return_token_ids", return_token_ids=True)),
    _completion(
        "completion with tokens as ids", "return_tokens_as_token_ids", logprobs=1, return_tokens_as_token_ids=True
    ),
    _completion("completion by regex", "structured_outputs regex", structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"}),
    *both(
        _completion(
            "completion by choice", "structured_outputs choice", structured_outputs={"choice": ["red", "green"]}
        )
    ),
    _completion("completion by grammar", "structured_outputs grammar", structured_outputs={"grammar": _GRAMMAR}),
    *both(
        _completion(
            "completion by schema", "structured_outputs json", structured_outputs={"json": _PERSON}, max_tokens=40
        )
    ),
    *both(_completion("completion with unicode", "Chinese, Cyrillic, emoji", prompt=_UNICODE, max_tokens=10)),
    twice(_completion("long prompt", "1,100 tokens, then a prefix hit", prompt=_long_prompt("sheep"))),
    _completion(
        "completion with a cache salt", "cache_salt", prompt=_long_prompt("goat", num_lines=14), cache_salt="s"
    ),
    _completion("completion with a suffix of its prompt cut", "truncate_prompt_tokens", truncate_prompt_tokens=4),
    _completion(
        "completion without special tokens",
        "add_special_tokens, skip_special_tokens",
        add_special_tokens=False,
        skip_special_tokens=False,
    ),
    *both(_completion("completion with unknown fields", "a field of nobody's", nobody_knows={"a": [1, {"b": None}]})),
    _completion("completion with a big seed", "seed 2**63 - 1", seed=2**63 - 1, temperature=1.0),
    _completion("completion for a user, with a priority", "user, priority 3", user="ada", priority=3),
)

_STREAMS = (
    _completion("stream with usage", "include_usage", stream_options={"include_usage": True}).streamed(),
    _completion(
        "stream with usage in every chunk",
        "continuous_usage_stats",
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ).streamed(),
    _completion(
        "stream with usage of several prompts",
        "include_usage, two prompts",
        way=in_parts(2),
        prompt=["The sun is", "The moon is"],
        stream_options={"include_usage": True},
    ).streamed(),
    _completion(
        "stream that asks for no usage", "include_usage false", stream_options={"include_usage": False}
    ).streamed(),
    twice(
        _completion(
            "stream with usage of a long prompt",
            "include_usage, then a prefix hit",
            prompt=_long_prompt("lamb"),
            stream_options={"include_usage": True},
        ).streamed()
    ),
    _chat("chat stream with usage", "include_usage", stream_options={"include_usage": True}).streamed(),
    _chat(
        "chat stream with usage in every chunk",
        "continuous_usage_stats",
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ).streamed(),
    _chat(
        "chat stream of several choices with usage",
        "n 2, include_usage, seed",
        way=in_parts(2),
        n=2,
        seed=4,
        temperature=0.8,
        stream_options={"include_usage": True},
    ).streamed(),
)

_CHATS = (
    *both(_chat("chat", "one message")),
    _chat("chat of one token", "max_tokens 1", max_tokens=1),
    _chat("chat by its newer limit", "max_completion_tokens", max_tokens=None, max_completion_tokens=5),
    *both(_chat("chat with both limits", "max_tokens, max_completion_tokens", max_tokens=9, max_completion_tokens=5)),
    *both(
        _chat(
            "chat to its own end",
            "no limit",
            max_tokens=None,
            messages=[{"role": "user", "content": "Say: ok"}],
            stop=[".", "\n"],
        )
    ),
    *both(_chat("chat with system and turns", "four messages", messages=_CONVERSATION)),
    _chat(
        "chat with content parts",
        "content as a list of texts",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": _QUESTION}, {"type": "text", "text": "Answer!"}]}
        ],
    ),
    *both(
        _chat(
            "chat with unicode",
            "emoji in and asked for",
            messages=[{"role": "user", "content": _UNICODE}],
            max_tokens=10,
        )
    ),
    _chat("chat with a role of nobody's", "role 'wizard' without content", messages=[{"role": "wizard"}]),
    *both(_chat("chat with logprobs", "logprobs, top_logprobs 2", logprobs=True, top_logprobs=2)),
    _chat("chat with a seed", "temperature 1, seed", temperature=1.0, seed=7),
    *both(
        _chat(
            "chat with stop strings",
            "stop, include_stop_str_in_output",
            stop=["capital"],
            include_stop_str_in_output=True,
            max_tokens=10,
        )
    ),
    _chat("chat with min_tokens", "min_tokens 6, stop", min_tokens=6, stop=["The"], max_tokens=12),
    *both(_chat("chat of several choices", "n 2, seed", way=in_parts(2), n=2, temperature=0.9, seed=11)),
    *both(
        _chat("chat with tools, its own choice", "tool_choice auto", tools=[_TOOL], tool_choice="auto", max_tokens=12)
    ),
    *both(
        _chat(
            "chat with tools, one required",
            "tool_choice required",
            tools=[_TOOL, _OTHER_TOOL],
            tool_choice="required",
            max_tokens=40,
        )
    ),
    *both(
        _chat(
            "chat with tools, one named",
            "tool_choice get_weather",
            tools=[_TOOL, _OTHER_TOOL],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            max_tokens=40,
        )
    ),
    _chat("chat with tools, none to be used", "tool_choice none", tools=[_TOOL], tool_choice="none"),
    _chat(
        "chat after a tool's answer",
        "assistant tool_calls, tool message",
        messages=[
            *_MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "C"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "21 C"},
        ],
        tools=[_TOOL],
        tool_choice="none",
    ),
    _chat(
        "chat as a JSON object", "response_format json_object", response_format={"type": "json_object"}, max_tokens=10
    ),
    *both(
        _chat(
            "chat by a schema",
            "response_format json_schema",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": _PERSON, "strict": True},
            },
            max_tokens=40,
        )
    ),
    _chat("chat by regex", "structured_outputs regex", structured_outputs={"regex": "(yes|no), [A-Z][a-z]{2,5}"}),
    _chat("chat by choice", "structured_outputs choice", structured_outputs={"choice": ["Paris", "Rome"]}),
    _chat(
        "chat with template arguments",
        "chat_template_kwargs",
        chat_template_kwargs={"enable_thinking": False, "add_generation_prompt": True},
    ),
    _chat(
        "chat with a template of its own",
        "chat_template",
        chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}bot:",
        way=BY_ENGINE,
    ),
    *both(
        _chat(
            "chat that goes on",
            "continue_final_message",
            messages=[*_MESSAGES, {"role": "assistant", "content": "The capital is"}],
            continue_final_message=True,
            add_generation_prompt=False,
        )
    ),
    _chat("chat without a generation prompt", "add_generation_prompt false", add_generation_prompt=False),
    twice(
        _chat(
            "long chat", "1,200 tokens, then a prefix hit", messages=[{"role": "user", "content": _long_prompt("cow")}]
        )
    ),
    twice(
        _chat(
            "long chat", "1,200 tokens, then a prefix hit", messages=[{"role": "user", "content": _long_prompt("calf")}]
        ).streamed()
    ),
    _chat("chat with token ids told", "return_token_ids", return_token_ids=True),
    _chat(
        "chat with penalties and bias",
        "penalties, logit_bias, bad_words",
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.3,
        logit_bias={"284": -100},
        bad_words=["Paris"],
    ),
    *both(_chat("chat with unknown fields", "a field of nobody's", nobody_knows=2**70)),
    _chat("chat of empty content", "content ''", messages=[{"role": "user", "content": ""}]),
    _chat("chat with prompt logprobs", "prompt_logprobs 1", way=alone("prompt_logprobs"), prompt_logprobs=1),
    *both(
        _chat(
            "chat with echo",
            "echo, continue_final_message",
            way=alone("prompt_echo"),
            echo=True,
            messages=[*_MESSAGES, {"role": "assistant", "content": "It is"}],
            continue_final_message=True,
            add_generation_prompt=False,
        )
    ),
)

_REFUSED = (
    _completion("completion, unknown model", "404", way=BY_ENGINE, model="nobody-serves-this"),
    _chat("chat, unknown model", "404", way=BY_ENGINE, model="nobody-serves-this"),
    _chat("chat, unknown model, streamed", "404", way=BY_ENGINE, model="nobody-serves-this", stream=True),
    _completion(
        "completion, prompt too long",
        "more than max_model_len",
        way=BY_ENGINE,
        prompt=_long_prompt("ant", num_lines=300),
    ),
    _completion("completion, limit too high", "max_tokens 1,000,000", way=BY_ENGINE, max_tokens=1_000_000),
    _completion(
        "completion, limit too high, streamed", "max_tokens 1,000,000", way=BY_ENGINE, max_tokens=1_000_000, stream=True
    ),
    _completion("completion, negative limit", "max_tokens -1", way=BY_ENGINE, max_tokens=-1),
    _completion("completion, no limit left", "max_tokens 0", way=BY_ENGINE, max_tokens=0),
    _completion("completion, temperature below zero", "temperature -1", way=BY_ENGINE, temperature=-1),
    _completion("completion, temperature as text", "temperature 'hot'", way=BY_ENGINE, temperature="hot"),
    _completion("completion, top_p above one", "top_p 1.5", way=BY_ENGINE, top_p=1.5),
    _completion("completion, no choice", "n 0", way=BY_ENGINE, n=0),
    _completion("completion, choices without chance", "n 2, temperature 0", way=BY_ENGINE, n=2),
    _completion("completion, prompt as a number", "prompt 3", way=BY_ENGINE, prompt=3),
    _completion("completion, no prompt in the list", "prompt []", way=BY_ENGINE, prompt=[]),
    _completion("completion, empty prompt", "prompt ''", way=BY_ENGINE, prompt=""),
    _completion("completion, token id out of range", "prompt [10**9]", way=BY_ENGINE, prompt=[10**9]),
    _completion("completion, min_tokens above the limit", "min_tokens 9, max_tokens 5", way=BY_ENGINE, min_tokens=9),
    _completion(
        "completion, stream options without a stream",
        "stream_options",
        way=BY_ENGINE,
        stream_options={"include_usage": True},
    ),
    _completion("completion, too many logprobs", "logprobs 1,000", way=BY_ENGINE, logprobs=1000),
    _completion(
        "completion, two structures at once",
        "regex and choice",
        way=BY_ENGINE,
        structured_outputs={"regex": "a", "choice": ["a"]},
    ),
    _completion(
        "completion, broken grammar", "grammar 'root ::='", way=BY_ENGINE, structured_outputs={"grammar": "root ::="}
    ),
    _completion("completion, seed out of range", "seed 2**64", way=BY_ENGINE, seed=2**64),
    _chat("chat, messages as text", "messages 'hi'", way=BY_ENGINE, messages="hi"),
    _chat("chat, no messages", "messages []", way=BY_ENGINE, messages=[]),
    _chat(
        "chat, tool that is not there",
        "tool_choice of another name",
        way=BY_ENGINE,
        tools=[_TOOL],
        tool_choice={"type": "function", "function": {"name": "fly"}},
    ),
    _chat("chat, choice without tools", "tool_choice required, no tools", way=BY_ENGINE, tool_choice="required"),
    _chat("chat, choices without chance", "n 2, temperature 0", way=BY_ENGINE, n=2),
    _chat("chat, top_logprobs without logprobs", "top_logprobs 2", way=BY_ENGINE, top_logprobs=2),
    _chat(
        "chat, both ways of going on",
        "continue_final_message and add_generation_prompt",
        way=BY_ENGINE,
        continue_final_message=True,
        add_generation_prompt=True,
    ),
    Case("completion, no JSON", COMPLETIONS, "'{'", b"{", by_gateway("malformed_json")),
    Case("completion, JSON that is no object", COMPLETIONS, "'[]'", b"[]", by_gateway("malformed_json")),
    Case("completion, no prompt", COMPLETIONS, "no prompt field", {"model": MODEL}, by_gateway("invalid_field")),
    Case("chat, no messages field", CHAT, "no messages field", {"model": MODEL}, by_gateway("invalid_field")),
)

_RESPONSES = (
    *both(_response("response", "input as text")),
    *both(_response("response to messages", "input as a list", input=[{"role": "user", "content": _QUESTION}])),
    *both(
        _response(
            "response to a conversation",
            "instructions and turns",
            instructions="Answer briefly.",
            input=_CONVERSATION[1:],
        )
    ),
    _response(
        "response to content parts",
        "input_text parts",
        input=[{"role": "user", "content": [{"type": "input_text", "text": _QUESTION}]}],
    ),
    _response("response of one token", "max_output_tokens 1", max_output_tokens=1),
    _response("response by chance", "temperature 1, top_p, seed", temperature=1.0, top_p=0.9, seed=3),
    *both(
        _response(
            "response with a tool named",
            "tools, tool_choice get_weather",
            tools=[_FLAT_TOOL],
            tool_choice={"type": "function", "name": "get_weather"},
            max_output_tokens=40,
        )
    ),
    *both(
        _response(
            "response with a tool required",
            "tools, tool_choice required",
            tools=[_FLAT_TOOL],
            tool_choice="required",
            max_output_tokens=60,
        )
    ),
    _response(
        "response with tools, its own choice", "tools, tool_choice auto", tools=[_FLAT_TOOL], max_output_tokens=12
    ),
    *both(
        _response(
            "response by a schema",
            "text.format json_schema",
            text={"format": {"type": "json_schema", "name": "person", "schema": _PERSON, "strict": True}},
            max_output_tokens=40,
        )
    ),
    *both(
        _response(
            "response with logprobs",
            "include message.output_text.logprobs",
            include=["message.output_text.logprobs"],
            top_logprobs=2,
        )
    ),
    _response("response to unicode", "emoji", input=_UNICODE),
    twice(_response("long response", "1,200 tokens, then a prefix hit", input=_long_prompt("duck"))),
    twice(_response("long response", "1,200 tokens, then a prefix hit", input=_long_prompt("drake")).streamed()),
    *both(
        _response(
            "response with metadata",
            "metadata, user, an unknown field",
            metadata={"a": "b"},
            user="ada",
            nobody_knows=1,
        )
    ),
    _response("response that is not kept", "store false", store=False),
    _response(
        "response with penalties",
        "repetition, presence and frequency",
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.4,
    ),
    _response("response until a stop string", "stop", stop=["capital"]),
    _response("response, unknown model", "404", way=BY_ENGINE, model="nobody-serves-this"),
    _response("response, negative limit", "max_output_tokens -1", way=BY_ENGINE, max_output_tokens=-1),
    _response("response, input as a number", "input 3", way=BY_ENGINE, input=3),
    _response("response, temperature as text", "temperature 'hot'", way=BY_ENGINE, temperature="hot"),
    _response(
        "response to one that nobody knows", "previous_response_id", way=BY_ENGINE, previous_response_id="resp_0"
    ),
    _response(
        "response, input too long", "more than max_model_len", way=BY_ENGINE, input=_long_prompt("ape", num_lines=300)
    ),
    Case("response, no input", RESPONSES, "no input field", {"model": MODEL}, by_gateway("invalid_field")),
)

_ANTHROPIC = (
    *both(_message("message", "one turn")),
    *both(
        _message(
            "message with system and turns",
            "system, three turns",
            system="Answer in one short sentence.",
            messages=_CONVERSATION[1:],
        )
    ),
    _message("message with system blocks", "system as a list", system=[{"type": "text", "text": "Answer briefly."}]),
    _message(
        "message with content blocks",
        "content as a list",
        messages=[{"role": "user", "content": [{"type": "text", "text": _QUESTION}]}],
    ),
    _message("message of one token", "max_tokens 1", max_tokens=1),
    *both(_message("message with stop sequences", "stop_sequences", stop_sequences=["capital"], max_tokens=10)),
    _message("message by top_k", "top_k 1, temperature 1", temperature=1.0, top_k=1),
    *both(
        _message(
            "message with tools, its own choice",
            "tools, tool_choice auto",
            tools=[_ANTHROPIC_TOOL],
            tool_choice={"type": "auto"},
            max_tokens=12,
        )
    ),
    *both(
        _message(
            "message with tools, any",
            "tools, tool_choice any",
            tools=[_ANTHROPIC_TOOL],
            tool_choice={"type": "any"},
            max_tokens=40,
        )
    ),
    *both(
        _message(
            "message with a tool named",
            "tools, tool_choice get_weather",
            way=alone("unusual_fields"),
            tools=[_ANTHROPIC_TOOL],
            tool_choice={"type": "tool", "name": "get_weather"},
            max_tokens=40,
        )
    ),
    _message(
        "message after a tool's answer",
        "tool_use, tool_result",
        messages=[
            *_MESSAGES,
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "toolu_1",
                        "name": "get_weather",
                        "input": {"city": "Paris", "unit": "C"},
                    }
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "21 C"}]},
        ],
        tools=[_ANTHROPIC_TOOL],
    ),
    *both(_message("message to unicode", "emoji", messages=[{"role": "user", "content": _UNICODE}])),
    twice(
        _message(
            "long message",
            "1,200 tokens, then a prefix hit",
            messages=[{"role": "user", "content": _long_prompt("hen")}],
        )
    ),
    twice(
        _message(
            "long message",
            "1,200 tokens, then a prefix hit",
            messages=[{"role": "user", "content": _long_prompt("chick")}],
        ).streamed()
    ),
    _message("message with metadata", "metadata, an unknown field", metadata={"user_id": "ada"}, nobody_knows=[]),
    *both(
        _message(
            "message by a schema",
            "output_config json_schema",
            output_config={"format": {"type": "json_schema", "schema": _PERSON}},
            max_tokens=40,
        )
    ),
    _message("message, unknown model", "404", way=BY_ENGINE, model="nobody-serves-this"),
    _message("message, no limit", "max_tokens missing", way=BY_ENGINE, max_tokens=None),
    _message("message, limit of zero", "max_tokens 0", way=BY_ENGINE, max_tokens=0),
    _message("message, messages as text", "messages 'hi'", way=BY_ENGINE, messages="hi"),
    _message(
        "message, too long",
        "more than max_model_len",
        way=BY_ENGINE,
        messages=[{"role": "user", "content": _long_prompt("bee", num_lines=300)}],
    ),
    Case(
        "message, no messages field",
        MESSAGES,
        "no messages",
        {"model": MODEL, "max_tokens": 8},
        by_gateway("invalid_field"),
    ),
)

_PASSED_ON = (
    Case("models", "/v1/models", "GET", None, PASSED_ON),
    Case("version", "/version", "GET", None, PASSED_ON),
    Case(
        "tokenize a text",
        "/tokenize",
        "prompt",
        {"model": MODEL, "prompt": _UNICODE, "return_token_strs": True},
        PASSED_ON,
    ),
    Case("tokenize a chat", "/tokenize", "messages", {"model": MODEL, "messages": _CONVERSATION}, PASSED_ON),
    Case("tokenize, no prompt", "/tokenize", "nothing", {"model": MODEL}, BY_ENGINE),
    Case("detokenize", "/detokenize", "tokens", {"model": MODEL, "tokens": _TOKENS}, PASSED_ON),
    Case("detokenize, negative id", "/detokenize", "tokens [-1]", {"model": MODEL, "tokens": [-1]}, BY_ENGINE),
    Case(
        "count tokens",
        f"{MESSAGES}/count_tokens",
        "messages, system, tools",
        {"model": MODEL, "messages": _MESSAGES, "system": "Hm.", "tools": [_ANTHROPIC_TOOL]},
        PASSED_ON,
    ),
    Case(
        "count tokens, unknown model",
        f"{MESSAGES}/count_tokens",
        "404",
        {"model": "nobody-serves-this", "messages": _MESSAGES},
        BY_ENGINE,
    ),
    Case("embeddings", "/v1/embeddings", "of a model that has none", {"model": MODEL, "input": "a"}, BY_ENGINE),
)

CASES: tuple[Case, ...] = (*_COMPLETIONS, *_STREAMS, *_CHATS, *_RESPONSES, *_ANTHROPIC, *_REFUSED, *_PASSED_ON)
