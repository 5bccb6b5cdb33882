"""One request through a gateway, with the evidence of every party: D's usage, both engines' counters, and D alone.

Works in front of any P/D gateway: pdserve's own says which engines took the request and why; for another one the engines'
addresses are given, and their counters decide. Believes no status code.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.core import EngineAddress, EngineName, PrefillPlace, Role
from pdserve.engine.admin_client import AdminClient
from pdserve.engine.credentials import OPEN_ACCESS
from pdserve.engine.pair import expect_ok, served_model
from pdserve.engine.scrape import scrape
from pdserve.engine.transport import EngineClient
from pdserve.errors import EngineProtocolError, EngineStatus, VerifyFailed
from pdserve.protocol.openai import Api
from pdserve.protocol.sse import event_data, split_events
from pdserve.verify.compare import Comparison, TokenChoice, compare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.engine.credentials import EngineAccess
    from pdserve.engine.scrape import EngineCounters
    from pdserve.engine.transport import Answer
    from pdserve.protocol.admin import RequestRecord

DEFAULT_PROMPT = "Explain the request flow between Prefill and Decode in PD disaggregation."
_TIMEOUT_S = 300.0
_COUNTERS_WAIT_S = 5.0
"""vLLM counts a transfer when the engine's next step reports it, which is a moment after the answer."""
_NUM_TOP_LOGPROBS = 5


class _Logprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct, frozen=True):
    text: str
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine counted while the request ran."""

    engine: EngineAddress
    counters: EngineCounters


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was seen of the request."""

    has_moved: bool
    sentence: str
    model: str
    prompt: str
    text: str
    num_prompt_tokens: int
    total_s: float
    record: RequestRecord | None
    """pdserve's own account; None in front of another gateway."""
    prefill: list[Delta]
    decode: list[Delta]
    comparison: Comparison | None
    """None when KV did not move: there is nothing to compare then."""
    text_alone: str | None


class Verifier:
    """Sends the request and asks around. Must be used inside a running event loop; `close` it."""

    def __init__(
        self,
        url: str,
        engines: Sequence[EngineAddress],
        admin: AdminClient | None,
        *,
        access: EngineAccess = OPEN_ACCESS,
        engine_access: EngineAccess = OPEN_ACCESS,
    ) -> None:
        """`access` is what the gateway wants of its clients, `engine_access` what the engines want of the gateway."""
        self._gateway = _client(EngineAddress(EngineName("gateway"), Role.BOTH, url), access)
        self._engines = [_client(address, engine_access) for address in engines]
        self._admin = admin

    @classmethod
    async def of_pdserve(
        cls,
        url: str,
        admin_url: str,
        *,
        access: EngineAccess = OPEN_ACCESS,
        engine_access: EngineAccess = OPEN_ACCESS,
    ) -> Verifier:
        """In front of pdserve's gateway, which tells its engines. Raises EngineError."""
        admin = AdminClient(admin_url)
        status = await admin.status()
        engines = [EngineAddress(EngineName(info.name), info.role, info.url) for info in status.engines]
        return cls(url, engines, admin, access=access, engine_access=engine_access)

    async def verify(self, prompt: str, *, max_tokens: int) -> Report:
        """Raises EngineError or VerifyFailed when there is no answer to judge."""
        model = await served_model(self._gateway)
        before = await self._scrape()
        started_s = time.monotonic()
        # Streamed, so that the gateway can tell the pull and the first token from the rest.
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await self._ask(self._gateway, model, prompt, max_tokens, **stream)
        total_s = time.monotonic() - started_s
        completion = _parse_stream(self._gateway, answer)
        assert completion.usage is not None
        num_prompt = completion.usage.prompt_tokens
        record = await self._record(answer)
        deltas = await self._settled_deltas(before, num_prompt)
        prefill, decode = _of_role(deltas, Role.PREFILL), _of_role(deltas, Role.DECODE)
        has_moved, sentence = judge(record, prefill, decode, num_prompt_tokens=num_prompt)
        comparison, text_alone = None, None
        if has_moved:
            comparison, text_alone = await self._compare(model, prompt, max_tokens, completion, record)
        return Report(
            has_moved=has_moved,
            sentence=sentence,
            model=model,
            prompt=prompt,
            text=completion.choices[0].text,
            num_prompt_tokens=num_prompt,
            total_s=total_s,
            record=record,
            prefill=prefill,
            decode=decode,
            comparison=comparison,
            text_alone=text_alone,
        )

    def close(self) -> None:
        """Close all connections."""
        for client in (self._gateway, *self._engines):
            client.close()
        if self._admin is not None:
            self._admin.close()

    async def _ask(self, client: EngineClient, model: str, prompt: str, max_tokens: int, **more: Any) -> Answer:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": _NUM_TOP_LOGPROBS,
            # New each time: no engine may find the prompt in its prefix cache, D alone not even in what P sent it.
            "cache_salt": secrets.token_hex(8),
            **more,
        }
        request_id = f"pdserve-verify-{secrets.token_hex(8)}".encode()
        path = Api.COMPLETIONS
        answer = await client.post(path, msgspec.json.encode(body), request_id=request_id, timeout_s=_TIMEOUT_S)
        try:
            return expect_ok(client, answer)
        except EngineStatus as exc:
            shown = exc.body[:500].decode(errors="replace")
            raise VerifyFailed(f"{client.address.url} answered {exc.status} to the request: {shown}") from exc

    async def _record(self, answer: Answer) -> RequestRecord | None:
        if self._admin is None:
            return None
        request_id = next((value for name, value in answer.headers if name == b"x-pdserve-request-id"), None)
        if request_id is None:
            raise VerifyFailed(
                f"{self._gateway.address.url} did not answer as pdserve's gateway; name the engines instead"
            )
        return await self._admin.request(request_id.decode())

    async def _scrape(self) -> list[EngineCounters]:
        return list(await asyncio.gather(*(scrape(engine) for engine in self._engines)))

    async def _settled_deltas(self, before: list[EngineCounters], num_prompt_tokens: int) -> list[Delta]:
        """The engines' counts since `before`, once D has accounted for the prompt one way or the other."""
        deadline_s = time.monotonic() + _COUNTERS_WAIT_S
        while True:
            now = await self._scrape()
            deltas = [
                Delta(engine.address, after.since(earlier))
                for engine, earlier, after in zip(self._engines, before, now, strict=True)
            ]
            if _is_settled(_of_role(deltas, Role.DECODE), num_prompt_tokens) or time.monotonic() > deadline_s:
                return deltas
            await asyncio.sleep(0.1)  # vLLM gives no event for this

    async def _compare(
        self, model: str, prompt: str, max_tokens: int, completion: _Completion, record: RequestRecord | None
    ) -> tuple[Comparison, str]:
        """The same prompt on D alone."""
        decode = next(
            engine
            for engine in self._engines
            if engine.address.role == Role.DECODE and (record is None or engine.address.name == record.decode)
        )
        alone = _parse(decode, await self._ask(decode, model, prompt, max_tokens))
        return compare(_choices(completion), _choices(alone)), alone.choices[0].text


def judge(
    record: RequestRecord | None, prefill: list[Delta], decode: list[Delta], *, num_prompt_tokens: int
) -> tuple[bool, str]:
    """Whether KV moved for the request, and a sentence that says what happened."""
    num_remote = sum(delta.counters.num_prompt_tokens_remote for delta in decode)
    has_counters = any(delta.counters.has_prompt_sources for delta in decode)
    has_counted = num_remote >= num_prompt_tokens
    if record is not None and record.place is not PrefillPlace.UNPROVEN:
        if record.place is not PrefillPlace.REMOTE:
            return False, _own_sentence(record, num_prompt_tokens)
        if has_counters and not has_counted:
            return False, (
                f"D's usage says that {num_prompt_tokens} prompt tokens came from outside, but D's counters say "
                f"{num_remote}: one of them is wrong, so nothing is proven"
            )
        return True, f"All {num_prompt_tokens} prompt tokens came to {record.decode} from {record.prefill} over NIXL."
    if has_counted:
        return True, f"D's counters say that {num_remote} prompt tokens came from outside while this request ran."
    return False, _counted_sentence(prefill, decode, num_prompt_tokens, has_counters=has_counters)


def _own_sentence(record: RequestRecord, num_prompt_tokens: int) -> str:
    if record.cause.startswith("D computed"):
        return record.cause
    return f"D computed all {num_prompt_tokens} prompt tokens itself: {record.cause}"


def _counted_sentence(prefill: list[Delta], decode: list[Delta], num_prompt_tokens: int, *, has_counters: bool) -> str:
    if not has_counters:
        return (
            "Nothing proves it either way: D has no vllm:prompt_tokens_by_source_total; "
            "is it vLLM 0.26 or newer, with metrics on?"
        )
    num_on_prefill = sum(
        delta.counters.num_prompt_tokens_local + delta.counters.num_prompt_tokens_local_cache for delta in prefill
    )
    num_on_decode = sum(
        delta.counters.num_prompt_tokens_local + delta.counters.num_prompt_tokens_local_cache for delta in decode
    )
    if num_on_decode < num_prompt_tokens:
        return (
            f"D accounted for {num_on_decode} prompt tokens and {num_prompt_tokens} were sent: "
            "the request went to an engine that was not named"
        )
    if num_on_prefill < num_prompt_tokens:
        return (
            f"D computed all {num_prompt_tokens} prompt tokens itself, and P never saw them: "
            "the gateway sent the request to D alone"
        )
    return (
        f"D computed all {num_prompt_tokens} prompt tokens itself, though P computed them too: either P's answer held no "
        "handoff, or the gateway lost it on the way, or D ignored it; are both running with --kv-transfer-config?"
    )


def _client(address: EngineAddress, access: EngineAccess) -> EngineClient:
    return EngineClient(address, connect_timeout_s=5.0, access=access)


def _of_role(deltas: list[Delta], role: Role) -> list[Delta]:
    return [delta for delta in deltas if delta.engine.role == role]


def _is_settled(decode: list[Delta], num_prompt_tokens: int) -> bool:
    counted = sum(
        delta.counters.num_prompt_tokens_remote
        + delta.counters.num_prompt_tokens_local
        + delta.counters.num_prompt_tokens_local_cache
        for delta in decode
    )
    is_transfer_counted = all(
        delta.counters.num_transfers > 0 for delta in decode if delta.counters.num_prompt_tokens_remote > 0
    )
    return counted >= num_prompt_tokens and is_transfer_counted


def _parse(client: EngineClient, answer: Answer) -> _Completion:
    completion = client.decoded(answer, _Completion)
    if not completion.choices or completion.usage is None:
        raise EngineProtocolError("the answer holds no choice or no usage", engine=str(client.address))
    return completion


def _parse_stream(client: EngineClient, answer: Answer) -> _Completion:
    """A stream's events as one completion."""
    payloads = [data for event in split_events(answer.body) if (data := event_data(event)) not in {b"", b"[DONE]"}]
    try:
        pieces = [msgspec.json.decode(payload, type=_Completion) for payload in payloads]
    except msgspec.DecodeError as exc:
        shown = payloads[-1][:500].decode(errors="replace") if payloads else "nothing"
        raise EngineProtocolError(
            f"not a stream of completions: {exc}; it ends with {shown}", engine=str(client.address)
        ) from exc
    choices = [piece.choices[0] for piece in pieces if piece.choices]
    usage = next((piece.usage for piece in reversed(pieces) if piece.usage is not None), None)
    if not choices or usage is None:
        raise EngineProtocolError("the stream holds no choice or no usage", engine=str(client.address))
    logprobs = [choice.logprobs for choice in choices if choice.logprobs is not None]
    joined = _Logprobs(
        tokens=[token for one in logprobs for token in one.tokens],
        token_logprobs=[logprob for one in logprobs for logprob in one.token_logprobs],
        top_logprobs=[top for one in logprobs for top in one.top_logprobs],
    )
    text = "".join(choice.text for choice in choices)
    return _Completion([_Choice(text, joined if logprobs else None)], usage)


def _choices(completion: _Completion) -> list[TokenChoice]:
    """Token by token; an engine that gives no logprobs is compared by its whole text."""
    choice = completion.choices[0]
    if choice.logprobs is None:
        return [TokenChoice(choice.text, 0.0, {})]
    logprobs = choice.logprobs
    return [
        TokenChoice(token, logprob if logprob is not None else 0.0, top or {})
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    ]
