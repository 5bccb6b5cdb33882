"""The words that every part of pdserve shares: frozen values, no I/O, nothing of any wire format.

Times are monotonic seconds. Counts start with `num_`.
"""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

EngineName = NewType("EngineName", str)
"""What a person calls an engine: `prefill-0`, `decode-1`."""


class Role(enum.StrEnum):
    """What an engine does in a disaggregated deployment."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class AloneReason(enum.StrEnum):
    """Why a request goes to a decode engine alone."""

    MANY_CHOICES = "many_choices"
    MANY_PROMPTS = "many_prompts"
    PROMPT_ECHO = "prompt_echo"
    PROMPT_LOGPROBS = "prompt_logprobs"
    BEAM_SEARCH = "beam_search"
    UNUSUAL_FIELDS = "unusual_fields"
    """A limit or a flag is spelled so that only the engine can say what it means."""
    PREVIOUS_RESPONSE = "previous_response"
    """The conversation so far lies in the memory of one decode engine."""
    BACKGROUND = "background"
    BUILTIN_TOOLS = "builtin_tools"
    """The engine may generate several times for one request, and a handoff is good for one."""
    NO_PREFILL_ENGINE = "no_prefill_engine"
    NO_PROVEN_PAIR = "no_proven_pair"
    ATTEMPTS_FAILED = "attempts_failed"
    """The handoff was tried and failed; one engine alone is the last resort."""


class PrefillPlace(enum.StrEnum):
    """Where a request's prompt was computed, as far as it is proven."""

    REMOTE = "remote"
    """On P, and its KV came over: D says that it computed none of the prompt."""
    LOCAL = "local"
    """On D, though the request was to be split."""
    ALONE = "alone"
    """On D, by decision."""
    UNPROVEN = "unproven"
    """D has a handoff, but gives no number that would tell, or has not given it yet."""


WEAKEST_FIRST = (PrefillPlace.UNPROVEN, PrefillPlace.LOCAL, PrefillPlace.ALONE, PrefillPlace.REMOTE)
"""What stands for a request in parts: `remote` only where all of them are."""


class Evidence(msgspec.Struct, frozen=True, gc=False):
    """What is known of one request's prefill, and why."""

    place: PrefillPlace
    num_prompt_tokens: int | None = None
    num_remote_tokens: int | None = None
    """Prompt tokens that D did not compute: pulled from P, or in D's own prefix cache."""
    cause: str = ""
    """A sentence, wherever the place is not `remote`."""


class EngineAddress(msgspec.Struct, frozen=True, gc=False):
    """One vLLM server, as its user names and reaches it."""

    name: EngineName
    role: Role
    url: str
    """Scheme, host and port, without a path and without a trailing slash."""

    def __str__(self) -> str:
        return (
            f"{self.name} at {self.url}" if self.role is Role.BOTH else f"{self.role} engine {self.name} at {self.url}"
        )


class EngineSnapshot(msgspec.Struct):
    """What the gateway knows of an engine at one moment: all that a policy may look at.

    Not frozen, since whoever makes them brings the same ones up to date for every request; for everybody else they are values.
    """

    address: EngineAddress
    num_in_flight: int
    """Legs that this gateway, all its workers together, has open on the engine."""
    is_healthy: bool
    """Whether it may be given new work."""
    partners: frozenset[EngineName] = frozenset()
    """A prefill engine's decode engines that its handoffs are known to reach."""


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """What a policy may know of a request: sizes and shape, never content."""

    prompt_bytes: int
    is_stream: bool
    alone_reason: AloneReason | None
    """Set when the request's shape allows no remote prefill."""
    priority: int = 0
    """As vLLM has it: lower goes first."""
    is_repeatable: bool = True
    """False where an engine keeps something of the request: sent twice, it would be kept twice."""


class RemotePrefill(msgspec.Struct, frozen=True, gc=False):
    """Prefill on one engine, decode on another."""

    prefill: EngineAddress
    decode: EngineAddress


class DecodeAlone(msgspec.Struct, frozen=True, gc=False):
    """One engine does it all."""

    decode: EngineAddress
    reason: AloneReason


Decision = RemotePrefill | DecodeAlone
