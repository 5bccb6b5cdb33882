"""What must be true of a handoff before D gets it, and of D's answer before the client does.

Each check is a function over values; none of them waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import EngineError, EngineProtocolError, Reason
from pdserve.protocol import nixl

if TYPE_CHECKING:
    from pdserve.config import TimeoutsConfig
    from pdserve.core import EngineAddress
    from pdserve.engine.pool import EnginePool
    from pdserve.protocol.nixl import Handoff
    from pdserve.protocol.usage import Usage, UsageWatch

WRONG_TEXT = frozenset({Reason.WRONG_CONTEXT, Reason.STALE_HANDOFF})
"""D may have continued another request's context, and its prefix cache holds that KV under this prompt's name."""
EXPIRED = "expired"


def refusal_of(
    handoff: Handoff,
    prefill: EngineAddress,
    decode: EngineAddress,
    *,
    pool: EnginePool,
    timeouts: TimeoutsConfig,
    now_s: float,
) -> tuple[str, str] | None:
    """Why a handoff may not be sent: a word for the counter and a sentence. None: it may."""
    if not pool.is_usable(prefill.name, decode.name):
        return "unproven_pair", f"handoffs from {prefill} to {decode} are not proven"
    if not pool.knows_engine_id(prefill.name, handoff.engine_id):
        return "unknown_engine", f"{prefill} restarted as engine {handoff.engine_id}, which is not proven yet"
    try:
        cause = "foreign_host"
        pool.check_handoff_host(prefill.name, handoff)
        cause = "unreachable_host"
        nixl.check_reachable(handoff, decode_url=decode.url)
        cause = EXPIRED
        nixl.check_age(handoff, now_s=now_s, max_age_s=timeouts.kv_lease - timeouts.kv_lease_margin)
    except nixl.UnusableHandoff as exc:
        return cause, str(exc)
    return None


def wrong_context(handoff: Handoff | None, usage: Usage | None, decode: EngineAddress) -> EngineError | None:
    """D must count the prompt as P did: with another template or tokenizer it continues another prompt, and answers 200."""
    num_prefilled = handoff.num_prompt_tokens if handoff is not None else None
    num_prompt = usage.prompt_tokens if usage is not None else None
    if num_prefilled is None or num_prompt is None or num_prefilled == num_prompt:
        return None
    return EngineProtocolError(
        f"counted {num_prompt} prompt tokens where P had computed {num_prefilled}: the answer stands on a wrong context; "
        "do P and D have the same model, tokenizer and chat template?",
        engine=str(decode),
        reason=Reason.WRONG_CONTEXT,
    )


def stale_read(decode: EngineAddress) -> EngineError:
    """For an answer whose KV was not certain to be there any more."""
    return EngineProtocolError(
        "answered after P's lease had run out, so what it read there may have been another request's KV",
        engine=str(decode),
        reason=Reason.STALE_HANDOFF,
    )


def no_answer(watch: UsageWatch, body: bytes, decode: EngineAddress) -> EngineError | None:
    """A 200 with something else is an engine, or something before it, talking nonsense. What it said is not repeated."""
    if watch.has_answer:
        return None
    message = f"answered 200 with {len(body)} bytes that are no answer"
    return EngineProtocolError(message, engine=str(decode))
