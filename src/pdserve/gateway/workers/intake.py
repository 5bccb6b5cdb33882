"""How a client's connection comes to a worker: the front accepts it and hands it on by its descriptor, to each worker in turn.

Neither of the ways in which the kernel would spread connections does it well. With one listening socket for all, whichever
worker wakes first takes what there is: of 64 connections at once it was 4 or 64 as well as 32, measured with uvloop 0.23.
With a socket each (SO_REUSEPORT) the kernel throws a coin for every connection, so that few of them spread unevenly; those of
a worker that is down wait for it; and a second gateway on the same port is not refused. In turn, 8 connections are 4 and 4, and
a worker that is gone is left out. It costs the front tens of microseconds a connection. No byte of a client passes through it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_BACKLOG = 2048
"""As uvicorn has it for a gateway of one process; the kernel's own limit is the lower one as a rule."""
_MAX_AT_ONCE = 64
"""Connections accepted in one go, before the front looks at anything else."""
_PAUSE_S = 1.0
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_logger = logging.getLogger("pdserve.gateway")


class Door:
    """The front's side: accepts while it is open. `hand_on` gives a connection to a worker, and False where none takes it."""

    def __init__(self, listener: socket.socket, hand_on: Callable[[socket.socket], bool]) -> None:
        self._listener = listener
        self._hand_on = hand_on
        self._loop = asyncio.get_running_loop()
        self._is_open = False
        listener.listen(_BACKLOG)

    def open(self) -> None:
        """Somebody is there to serve. Until then, and while the door is shut, clients wait in the kernel's queue."""
        if not self._is_open and self._listener.fileno() >= 0:
            self._is_open = True
            self._go_on()

    def shut(self) -> None:
        """Nobody is there."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener)

    def close(self) -> None:
        """For good: clients are refused from now on."""
        self.shut()
        self._listener.close()

    def _go_on(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                connection, _peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return
            except OSError as exc:
                if exc.errno not in _NO_ROOM:
                    raise
                _logger.error("clients wait, since none can be accepted: %s", exc.strerror)  # noqa: TRY400 - that says it all
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_PAUSE_S, self._go_on)
                return
            with connection:
                if not self._hand_on(connection):
                    _logger.error("a client was turned away: no worker takes any more")


def hand_over(channel: socket.socket, connection: socket.socket) -> bool:
    """Give a connection to whoever is at the other end; False where nobody is, or too many lie there already."""
    try:
        socket.send_fds(channel, [b"."], [connection.fileno()])
    except OSError:
        return False
    return True


class Intake:
    """A worker's side: takes what the front hands over, until the front closes the channel."""

    def __init__(self, channel: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._channel = channel
        self._take = take
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        """Nothing more will come."""
        channel.setblocking(False)
        self._loop.add_reader(channel, self._receive)

    def close(self) -> None:
        """Take no more."""
        if not self.closed.is_set():
            self.closed.set()
            self._loop.remove_reader(self._channel)
            self._channel.close()

    def _receive(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            try:
                # One at a time is what the kernel gives: it does not join messages that carry descriptors.
                data, descriptors, flags, _ = socket.recv_fds(self._channel, 1, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                data, descriptors, flags = b"", [], 0
            if data and not descriptors:
                _logger.warning("a client was lost on its way from the front: %s", _why_lost(flags))
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                self._take(connection)
            if not data:
                self.close()
                return


def _why_lost(flags: int) -> str:
    """The kernel drops a descriptor for which the receiver has no number left, and says no more than that."""
    if not flags & socket.MSG_CTRUNC:
        return "its descriptor did not come with it"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"this worker may open no more than {limit} files; "
        "raise the hard limit (ulimit -Hn, LimitNOFILE), or run more workers"
    )
