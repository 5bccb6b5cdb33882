"""Finding out whether a port is free, on real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.launch.ports import any_free_port, is_port_free, port_holder

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOST = "127.0.0.1"


@contextlib.contextmanager
def _bound(*, reuse: bool = False) -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        sock.bind((_HOST, 0))
        yield sock


def _port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port


def test_a_port_is_free_until_somebody_listens() -> None:
    """And again when nobody does any more."""
    with _bound() as sock:
        sock.listen()
        assert not is_port_free(_HOST, _port(sock))
        port = _port(sock)
    assert is_port_free(_HOST, port)


def test_a_port_that_is_bound_but_not_listened_on_is_taken() -> None:
    """vLLM binds with SO_REUSEADDR a minute before it listens."""
    with _bound(reuse=True) as sock:
        assert not is_port_free(_HOST, _port(sock))


def test_a_listener_on_every_address_takes_the_port_on_each() -> None:
    """A server on 0.0.0.0 is in the way of one on 127.0.0.1."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        sock.listen()
        assert not is_port_free(_HOST, _port(sock))


def test_what_is_left_of_old_connections_is_not_in_the_way() -> None:
    """After a restart the port is free at once, though the kernel still remembers its connections."""
    with _bound(reuse=True) as sock:
        sock.listen()
        port = _port(sock)
        with socket.create_connection((_HOST, port)) as client:
            accepted, _ = sock.accept()
            accepted.close()  # The side that closes first is the one that waits.
            assert client.recv(1) == b""
    assert is_port_free(_HOST, port)


def test_an_address_of_another_machine_is_an_error() -> None:
    """It would never be free."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 8100"):
        is_port_free("192.0.2.1", 8100)
    with pytest.raises(ConfigError, match=r"cannot listen on no-such-host\.invalid"):
        any_free_port("no-such-host.invalid")


def test_the_kernel_gives_a_port_that_is_free() -> None:
    """Any will do."""
    assert is_port_free(_HOST, any_free_port(_HOST))


def test_ipv6_is_known() -> None:
    """Where the machine has it."""
    try:
        port = any_free_port("::1")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert is_port_free("::1", port)


def test_the_holder_of_a_port_is_named() -> None:
    """By process number and command line."""
    with _bound() as sock:
        sock.listen()
        holder = port_holder(_port(sock))
    assert holder is not None
    assert holder.startswith(f"pid {os.getpid()} (")


def test_a_port_that_nobody_holds_has_no_holder() -> None:
    """Nothing is made up."""
    with _bound() as sock:
        assert port_holder(_port(sock)) is None
