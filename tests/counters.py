"""Waiting for what a real engine's counters say: vLLM gives no event for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.scrape import scrape
from pdserve.engine.transport import EngineClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.scrape import EngineCounters

_INTERVAL_S = 0.1


async def until(url: str, is_so: Callable[[EngineCounters], bool], *, timeout_s: float = 20) -> EngineCounters:
    """The counters as soon as they are so."""
    engine = EngineClient(EngineAddress(EngineName("e"), Role.BOTH, url), connect_timeout_s=5)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                counters = await scrape(engine)
                if is_so(counters):
                    return counters
                await asyncio.sleep(_INTERVAL_S)
    finally:
        engine.close()


def is_idle(counters: EngineCounters) -> bool:
    """Nothing runs, nothing waits, and no block is held."""
    return counters.num_running == 0 and counters.num_waiting == 0 and counters.kv_usage == 0
