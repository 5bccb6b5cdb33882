"""How many files and sockets this process may have open: as many as the system lets it, and what that is enough for."""

from __future__ import annotations

import contextlib
import resource

_PER_REQUEST = 2
"""A client's socket and an engine's: the legs come one after the other."""
_OWN = 64
"""The listeners, the log, the event loop, and what watches the engines."""


def raise_limit() -> int:
    """Raise the soft limit to the hard one, which needs no rights; gives what may be open from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS names a hard limit that it does not grant.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def max_clients(limit: int) -> int | None:
    """Connections that clients may have, so that each of them can still have an engine's beside it; None: any number."""
    return None if limit == resource.RLIM_INFINITY else max(1, (limit - _OWN) // _PER_REQUEST)


def shortage(limit: int, *, max_concurrent: int, num_engines: int, num_workers: int = 1) -> str | None:
    """What is wrong where the limit is too low for the configuration, as a sentence. Each worker has the limit for itself."""
    needed = _PER_REQUEST * -(-max_concurrent // num_workers) + num_engines + _OWN
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return None
    who = "this process" if num_workers == 1 else f"each of {num_workers} workers"
    return (
        f"{who} may open {limit} files, and admission.max_concurrent = {max_concurrent} needs about {needed}; "
        "raise the hard limit (ulimit -Hn, LimitNOFILE) or lower admission.max_concurrent"
    )
