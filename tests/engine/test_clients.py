"""The official clients against the gateway in front of real vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dialogues

if TYPE_CHECKING:
    from deployment import RealPair

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.mark.parametrize("dialogue", dialogues.SYNC, ids=lambda dialogue: dialogue.__name__)
def test_the_blocking_clients(real_pair: RealPair, dialogue: dialogues.SyncDialogue) -> None:
    """What people do with them works as it does with one server."""
    with dialogues.clients_of(real_pair.gateway_url, real_pair.model) as clients:
        dialogue(clients)


@pytest.mark.parametrize("dialogue", dialogues.ASYNC, ids=lambda dialogue: dialogue.__name__)
async def test_the_asyncio_clients(real_pair: RealPair, dialogue: dialogues.AsyncDialogue) -> None:
    """Several requests of several APIs at once."""
    async with dialogues.async_clients_of(real_pair.gateway_url, real_pair.model) as clients:
        await dialogue(clients)
