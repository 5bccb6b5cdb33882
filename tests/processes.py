"""Fake engines for tests that start processes, and ways to wait for processes without sleeping."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

GONE_WITHIN_S = 20.0
"""Far more than any of these takes, on a machine that is busy."""

_PRELUDE = """
import os, signal, sys, time
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def stay():
    say("up", os.getpid())
    while True:
        signal.pause()
"""

POLITE = "signal.signal(signal.SIGTERM, lambda *_: (say('asked'), os._exit(0)))\nstay()"
"""Ends at once when it is asked to."""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nstay()"
"""Ends only when it is killed."""
FAMILY = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    stay()                          # a worker in the engine's group
if os.fork() == 0:
    os.setsid()                     # one in a session of its own,
    if os.fork() == 0:
        stay()                      # with a child
    stay()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        stay()                      # a daemon whose parent has ended
    os._exit(0)
stay()
"""
"""Five processes that ignore SIGTERM, in three sessions."""
FAMILY_SIZE = 5


def program(code: str) -> list[str]:
    """The command line of a fake engine. Without site-packages it starts in a few hundredths of a second."""
    return [sys.executable, "-I", "-S", "-c", _PRELUDE + code]


def wait_gone(pids: Iterable[int]) -> set[int]:
    """Wait until the processes have ended; those that have not."""
    poller = select.poll()
    running: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            running[os.pidfd_open(pid)] = pid
    for descriptor in running:
        poller.register(descriptor, select.POLLIN)
    while running and (ended := poller.poll(GONE_WITHIN_S * 1000)):
        for descriptor, _ in ended:
            del running[descriptor]
            poller.unregister(descriptor)
            os.close(descriptor)
    return set(running.values())
