"""What a request leaves behind is freed at once: the collector, which stops every stream while it looks, finds nothing."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from split import MODEL, split

if TYPE_CHECKING:
    from collections.abc import Iterator

_OURS = ("pdserve.gateway", "pdserve.http", "pdserve.engine", "pdserve.protocol")
_NUM_REQUESTS = 8


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_leaves_no_cycle_behind(stream: bool) -> None:  # noqa: FBT001
    async with split() as deployment:
        body = {"model": MODEL, "prompt": "hello world", "max_tokens": 6, "stream": stream}
        await deployment.client.post("/v1/completions", json=body)
        with _collected() as found:
            for _ in range(_NUM_REQUESTS):
                response = await deployment.client.post("/v1/completions", json=body)
                assert response.headers["x-pdserve-prefill"] in {"remote", "unproven"}
        assert not found


@contextlib.contextmanager
def _collected() -> Iterator[Counter[str]]:
    """What only the collector could free of what was made in the block, by type."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(type(thing).__qualname__ for thing in gc.garbage if type(thing).__module__.startswith(_OURS))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
