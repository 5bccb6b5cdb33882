"""Which TCP ports a deployment uses: distinct ones, none of them taken, and a clear word about who has one that was asked for.

Planning is pure and asks `is_free`; binding to find out, and looking up who holds a port, is the rim.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Listener:
    """A port of pdserve's own that was asked for by number."""

    host: str
    port: int
    setting: str
    """What to change when the port is taken, such as `gateway.port (--port)`."""


@dataclass(frozen=True, slots=True)
class PortPlan:
    """The engines' ports, prefill engines first."""

    http: tuple[int, ...]
    side_channel: tuple[int, ...]
    """The first one of each engine: a data-parallel rank listens on this plus its rank."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """Where to look for free ports: from `first` up, or anywhere when it is 0."""

    host: str
    first: int
    setting: str


def plan_ports(
    widths: Sequence[int],
    *,
    http: PortRange,
    side_channel: PortRange,
    reserved: Iterable[int],
    is_free: Callable[[str, int], bool],
    any_free: Callable[[str], int],
) -> PortPlan:
    """One HTTP port per engine, and as many side channel ports in a row as it has data-parallel ranks (`widths`)."""
    taken = set(reserved)
    finder = _Finder(taken, is_free, any_free)
    return PortPlan(
        http=tuple(finder.find(http, 1) for _ in widths),
        side_channel=tuple(finder.find(side_channel, width) for width in widths),
    )


class _Finder:
    """Hands out runs of ports, none of them twice."""

    def __init__(self, taken: set[int], is_free: Callable[[str, int], bool], any_free: Callable[[str], int]) -> None:
        self._taken = taken
        self._is_free = is_free
        self._any_free = any_free

    def find(self, ports: PortRange, width: int) -> int:
        first = ports.first
        while True:
            start = first or self._any_free(ports.host)
            if start + width - 1 > MAX_PORT:
                raise ConfigError(
                    f"{ports.setting} = {ports.first}: no {width} free in a row up to {MAX_PORT} on {ports.host}; start lower"
                )
            busy = [port for port in range(start, start + width) if not self._is_usable(ports.host, port)]
            if not busy:
                self._taken.update(range(start, start + width))
                return start
            first = first and busy[-1] + 1

    def _is_usable(self, host: str, port: int) -> bool:
        return port not in self._taken and self._is_free(host, port)


def check_listeners(
    listeners: Sequence[Listener], *, is_free: Callable[[str, int], bool], holder: Callable[[int], str | None]
) -> None:
    """Raises ConfigError when two of pdserve's own listeners want one port, or when somebody else has it."""
    seen: dict[int, str] = {}
    for listener in listeners:
        if listener.port == 0:
            continue
        if listener.port in seen:
            raise ConfigError(
                f"port {listener.port} is asked for twice: by {seen[listener.port]} and by {listener.setting}; change one"
            )
        seen[listener.port] = listener.setting
        if not is_free(listener.host, listener.port):
            raise ConfigError(
                f"port {listener.port} on {listener.host} is in use by {holder(listener.port) or 'another program'}. "
                f"Stop that, or choose another port: {listener.setting}"
            )


# The rim


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could have that port now. Raises ConfigError when none ever could: not our address, or not our right."""
    if _can_bind(host, port, reuse=False):
        return True
    # SO_REUSEADDR passes over what is left of old connections, as servers do; but also over a port that somebody has bound
    # and does not listen on yet, and vLLM binds a minute before it listens (`setup_server`, launcher.py in 0.32).
    return _can_bind(host, port, reuse=True) and _has_old_connections(port)


def any_free_port(host: str) -> int:
    """A port that the kernel chose. It is free now, not reserved."""
    with _socket(host, 0) as (sock, address):
        sock.bind(address)
        port: int = sock.getsockname()[1]
        return port


def _can_bind(host: str, port: int, *, reuse: bool) -> bool:
    with _socket(host, port) as (sock, address):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            sock.bind(address)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
            return False
        return True


@contextlib.contextmanager
def _socket(host: str, port: int) -> Iterator[tuple[socket.socket, Any]]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as sock:
            yield sock, address
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host} port {port}: {exc.strerror or exc}") from exc


def _has_old_connections(port: int) -> bool:
    return any(
        connection.laddr.port == port and connection.status != psutil.CONN_LISTEN for connection in _tcp_connections()
    )


def port_holder(port: int) -> str | None:
    """`pid 4711 (python3 -m http.server 8192)`, or None when nobody listens or the kernel won't tell."""
    for connection in _tcp_connections():
        is_match = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if is_match and connection.pid is not None:
            return _describe(connection.pid)
    return None


def _tcp_connections() -> Sequence[Any]:
    try:
        return [connection for connection in psutil.net_connections(kind="tcp") if connection.laddr]
    except psutil.AccessDenied:  # macOS tells only root
        return []


def _describe(pid: int) -> str:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        command = ""
    return f"pid {pid} ({command[:120]})" if command else f"pid {pid}"
