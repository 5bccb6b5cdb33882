"""The responses that vLLM keeps when VLLM_ENABLE_RESPONSES_API_STORE is set, and those that run in the background.

As in entrypoints/openai/responses/serving.py of 0.32, it never forgets, and a background response that fails stays `queued`.
Knows no sockets.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.sim.refusal import Refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence
    from typing import Any

    from pdserve.sim.answer import Json


@dataclass(slots=True)
class EventLog:
    """A background stream's events, which may be read again and again."""

    events: list[bytes] = field(default_factory=list)
    is_whole: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def append(self, events: bytes) -> None:
        """Some more; they are numbered one by one."""
        self.events += [event + b"\n\n" for event in events.split(b"\n\n") if event]
        self._wake()

    def end(self) -> None:
        """That was the last one."""
        self.is_whole = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, start: int) -> AsyncIterator[bytes]:
        """The events from a number on. One that broke off never ends, as in vLLM."""
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self.is_whole:
                return
            await self._changed.wait()


class ResponseStore:
    """All responses of one engine."""

    def __init__(self) -> None:
        self._responses: dict[str, Json] = {}
        self._conversations: dict[str, list[Json]] = {}
        self._logs: dict[str, EventLog] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def num_running(self) -> int:
        """Responses that run in the background."""
        return len(self._tasks)

    def get(self, response_id: str) -> Json:
        """A response. Raises Refused."""
        response = self._responses.get(response_id)
        if response is None:
            message = f"Response with id '{response_id}' not found."
            raise Refused(404, "invalid_request_error", message, "response_id")
        return response

    def history(self, response_id: str | None) -> Sequence[Json]:
        """The conversation up to a response and its answer. Raises Refused."""
        if response_id is None:
            return []
        output = self.get(response_id)["output"]
        answers = [
            {"role": "assistant", "content": part["text"]}
            for item in output
            if item["type"] == "message"
            for part in item["content"]
        ]
        return [*self._conversations.get(response_id, ()), *answers]

    def begin(self, response_id: str, conversation: list[Json]) -> None:
        """Remember what was asked."""
        self._conversations[response_id] = conversation

    def keep(self, response: Json) -> None:
        """Remember an answer, unless it was cancelled."""
        known = self._responses.get(response["id"])
        if known is None or known["status"] != "cancelled":
            self._responses[response["id"]] = response

    def log_of(self, response_id: str) -> EventLog | None:
        """A background stream's events; None: it was no such stream."""
        return self._logs.get(response_id)

    def open_log(self, response_id: str) -> EventLog:
        """Begin a background stream's events."""
        return self._logs.setdefault(response_id, EventLog())

    def run(self, response_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Go on whether or not the client waits."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(response_id, None))

    async def cancel(self, response_id: str) -> Json:
        """End a background response. Raises Refused."""
        response = self.get(response_id)
        if response["status"] not in {"queued", "in_progress"}:
            raise Refused(400, "invalid_request_error", "Cannot cancel a synchronous response.", "response_id")
        response["status"] = "cancelled"
        await self._end(self._tasks.get(response_id))
        return response

    async def close(self) -> None:
        """End everything."""
        for task in list(self._tasks.values()):
            await self._end(task)

    async def _end(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
