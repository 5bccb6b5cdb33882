"""What the engine is asked for, and what it produces: values, and the queue between an engine and whoever reads its output."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pdserve.sim.form import Form
    from pdserve.sim.handoff import Params


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to go on, and when to stop."""

    max_tokens: int = 16
    min_tokens: int = 0
    ignores_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    includes_stop: bool = False
    form: Form = ()
    """What the output must look like; empty: the model is free."""
    salt: str = ""
    """Whatever makes one sample differ from another; empty is greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to be continued once."""

    request_id: str
    """As the API server makes it; the engine adds a random suffix."""
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    params: Params | None = None
    cache_salt: str | None = None
    never_loads: bool = False
    """Its KV never comes."""
    comes_late_s: float = 0.0
    """It waits so long before it is looked at, and P hears nothing meanwhile."""
    beats_before_s: float = 0.0
    """It waits so long before that, and P hears of it."""


@dataclass(frozen=True, slots=True)
class Output:
    """One token's worth of an answer."""

    text: str
    tokens: tuple[int, ...]
    num_cached: int
    """Prompt tokens reported as cached: D's own count or the one that the handoff told."""
    num_created: int
    """Prompt tokens that this request put into the prefix cache."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    handoff: Params | None = None


class Outputs:
    """What running jobs produce, as it comes; ends when all of them have."""

    def __init__(self, num_jobs: int) -> None:
        self._queue: asyncio.Queue[tuple[int, Output] | Exception] = asyncio.Queue()
        self._num_open = num_jobs

    def put(self, item: tuple[int, Output] | Exception) -> None:
        """A job produced something, or failed."""
        self._queue.put_nowait(item)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Output]:
        if not self._num_open:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        self._num_open -= item[1].finish_reason is not None
        return item
