"""The client's socket below `http.server`: what no server should do to a client, and a stand-in must.

Reaches into ServerConnection on purpose and from here only, so that the server itself needs no door for it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.http.server import Response

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class BareConnection:
    """One client's connection, while its response is open."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._connection = response.connection
        self._transport = self._connection._transport  # noqa: SLF001

    def write(self, data: bytes) -> None:
        """Send bytes as they are; from now on the response has no say."""
        self._response.is_started = True
        self._connection.write(data)

    def close(self) -> None:
        """Send what is left, then close: the client sees an end (FIN)."""
        self._response.is_ended = True
        self._connection.response_ended(keep_alive=False)

    def drop(self) -> None:
        """Close without another word. Whoever answers is cancelled, as when the client leaves."""
        self._connection.abort()

    def reset(self) -> None:
        """Drop what is left and close with a reset (RST)."""
        if self._transport is not None:
            # asyncio and uvloop let nobody set options on their sockets; those of a copy hold for the socket itself.
            with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as copy:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.drop()

    def half_close(self) -> None:
        """Send no more, and go on listening: the client sees an end, and nobody hangs up."""
        self._response.is_started = (
            True  # Nothing may be said any more, not even to find out whether the client is there.
        )
        if self._transport is not None:
            self._transport.write_eof()

    async def flushed(self) -> None:
        """Wait until the kernel has everything."""
        await asyncio.sleep(0)  # uvloop writes at the end of a turn.
        transport = self._transport
        while transport is not None and transport.get_write_buffer_size() and not transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0)
