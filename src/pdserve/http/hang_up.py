"""Tells a client that only has nothing more to send from one that is gone.

TCP says the same of both: the end of what they send. But a gone one's machine answers whatever is sent to it with a reset.
asyncio and libuv stop looking at a socket once its input has ended, so the reset is waited for here.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class HangUpWatch:
    """Calls back once when the socket is dead in both directions."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket_fd: int, on_hang_up: Callable[[], None]) -> None:
        """Raises OSError when there is no descriptor left to watch with."""
        self._loop = loop
        self._on_hang_up = on_hang_up
        self._epoll: select.epoll | None = select.epoll()
        self._epoll.register(
            socket_fd, 0
        )  # Errors and hang-ups are told of without being asked for, and nothing else is.
        loop.add_reader(self._epoll.fileno(), self._hung_up)

    def close(self) -> None:
        """Stop watching."""
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            self._loop.remove_reader(epoll.fileno())
            epoll.close()

    def _hung_up(self) -> None:
        self.close()
        self._on_hang_up()
