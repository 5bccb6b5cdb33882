"""What all tests share: the event loops that they run on, and one pair of real engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import hypothesis
import pytest
import uvloop

import deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# A busy machine may take its time over one example; a test that takes too long as a whole is pytest-timeout's to end.
hypothesis.settings.register_profile("pdserve", deadline=None)
hypothesis.settings.load_profile("pdserve")

_ON_BOTH_LOOPS = {"component", "faults"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests with sockets of ours run on asyncio's own loop too: uvloop's transports differ in more than speed."""
    if _ON_BOTH_LOOPS & set(item.path.parts):
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real engines last, and the pair that stays up for the session very last.

    NIXL's progress thread spins on an engine's core as long as the engine runs, so whatever runs beside one is starved.
    """
    items.sort(key=_weight)


def _weight(item: pytest.Item) -> int:
    if item.get_closest_marker("engine") is None:
        return 0
    return 2 if "real_pair" in getattr(item, "fixturenames", ()) else 1


@pytest.fixture(scope="session")
def real_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[deployment.RealPair]:
    """Real vLLM engines and the gateway, started once by `pdserve up`; tests leave them as they found them."""
    with deployment.real_pair(tmp_path_factory.mktemp("state")) as pair:
        yield pair
