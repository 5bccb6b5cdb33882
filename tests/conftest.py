"""What all tests share: the event loops that they run on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest

_ON_BOTH_LOOPS = {"component", "faults"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests with sockets of ours run on asyncio's own loop too: uvloop's transports differ in more than speed."""
    if _ON_BOTH_LOOPS & set(item.path.parts):
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}
