"""One request of the matrix, as a small frozen value. Knows neither engines nor gateways."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

MODEL = "$model"
"""Stands for the served model's name in a body."""

REMOTE = "remote"
LOCAL = "local"
"""vLLM computes a prompt of a single token again on D: less the last token nothing of what came over is left, and D takes the
request for a new one (0.32, v1/core/sched/scheduler.py, _update_waiting_for_remote_kv)."""
PASSED_ON = "passed on"
BY_ENGINE = "refused by an engine"


def in_parts(num: int) -> str:
    """The way of a request that was taken apart, each part remote."""
    return f"{REMOTE}, in {num} parts"


def alone(reason: str) -> str:
    """The way of a request that D answers by itself."""
    return f"alone: {reason}"


def by_gateway(reason: str) -> str:
    """The way of a request that no engine gets to see."""
    return f"refused by the gateway: {reason}"


@dataclass(frozen=True, slots=True)
class Case:
    """One request, sent to both, and the way that it must take through the gateway."""

    name: str
    path: str
    sends: str
    """What is special about it, in a few words."""
    body: Mapping[str, Any] | bytes | None
    """None: a GET. Bytes: sent as they are."""
    way: str = REMOTE
    is_stream: bool = False
    times: int = 1
    """How often it is sent, one after the other: the second time finds a prefix in the cache."""

    def streamed(self) -> Case:
        """The same request as a stream."""
        assert isinstance(self.body, dict)
        return replace(self, name=f"{self.name}, streamed", body={**self.body, "stream": True}, is_stream=True)


def twice(case: Case) -> Case:
    """The same request again after the first one's answer."""
    return replace(case, name=f"{case.name}, twice", times=2)


def both(case: Case) -> tuple[Case, ...]:
    """A request whole and streamed."""
    return case, case.streamed()
