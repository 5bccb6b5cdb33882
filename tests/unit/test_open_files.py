"""How many files the gateway may open, and what it says when that is too little."""

from __future__ import annotations

import resource

from pdserve.cli.open_files import max_clients, raise_limit, shortage


def test_the_limit_is_raised_as_far_as_it_goes() -> None:
    """The soft limit becomes the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        assert raise_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_clients_leave_half_to_the_engines() -> None:
    """Each client's request needs an engine's socket beside its own."""
    assert max_clients(1024) == 480
    assert max_clients(10) == 1
    assert max_clients(resource.RLIM_INFINITY) is None


def test_a_limit_that_is_too_low_is_told() -> None:
    """With what is needed and what to do."""
    assert shortage(100_000, max_concurrent=4096, num_engines=4) is None
    assert shortage(resource.RLIM_INFINITY, max_concurrent=4096, num_engines=4) is None
    told = shortage(1024, max_concurrent=4096, num_engines=4)
    assert told is not None
    assert "1024" in told
    assert "8260" in told


def test_each_worker_has_the_limit_for_itself() -> None:
    """What one process may not open for all, four may for a quarter each."""
    assert shortage(4096, max_concurrent=4096, num_engines=4) is not None
    assert shortage(4096, max_concurrent=4096, num_engines=4, num_workers=4) is None
    told = shortage(1024, max_concurrent=4096, num_engines=4, num_workers=4)
    assert told is not None
    assert told.startswith("each of 4 workers may open 1024 files")
