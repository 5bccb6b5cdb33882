"""Python's garbage collector in a process that relays streams: it must not stand in their way. Knows nothing of gateways."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
"""A request leaves no cycle behind (tests/component/test_garbage.py), so that there is hardly anything to find."""


def calm_collector() -> None:
    """Take what has been loaded so far out of its sight, and let it look seldom.

    With Python's own thresholds a look at everything stopped all streams for 50 ms now and then: most of it went over modules
    and classes, which live as long as the process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
