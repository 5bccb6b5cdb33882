"""The official clients against the gateway in front of the stand-in: the same dialogues as with real vLLM."""

from __future__ import annotations

import asyncio

import pytest

import dialogues
from split import MODEL, split


def _hold(url: str, dialogue: dialogues.SyncDialogue) -> None:
    with dialogues.clients_of(url, MODEL) as clients:
        dialogue(clients)


@pytest.mark.parametrize("dialogue", dialogues.SYNC, ids=lambda dialogue: dialogue.__name__)
async def test_the_blocking_clients(dialogue: dialogues.SyncDialogue) -> None:
    """What people do with them works, and nothing stays held."""
    async with split() as deployment:
        await asyncio.to_thread(_hold, deployment.gateway.client.url, dialogue)
        await deployment.settle()


@pytest.mark.parametrize("dialogue", dialogues.ASYNC, ids=lambda dialogue: dialogue.__name__)
async def test_the_asyncio_clients(dialogue: dialogues.AsyncDialogue) -> None:
    """Several requests of several APIs at once, and nothing stays held."""
    async with split() as deployment:
        async with dialogues.async_clients_of(deployment.gateway.client.url, MODEL) as clients:
            await dialogue(clients)
        await deployment.settle()
