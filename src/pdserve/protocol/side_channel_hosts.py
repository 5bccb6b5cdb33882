"""Which hosts a handoff may name: D connects to whatever address stands in it, so it must be one that the operator knows.

Pure: `pdserve.engine.side_channel` finds out what a P engine's name means and which addresses are this machine's.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from pdserve.protocol.nixl import UnusableHandoff

if TYPE_CHECKING:
    from collections.abc import Iterable

    Network = ipaddress.IPv4Network | ipaddress.IPv6Network
    Address = ipaddress.IPv4Address | ipaddress.IPv6Address

SETTING = "prefill.side_channel_hosts"
LOOPBACK = ("localhost", "127.0.0.0/8", "::1", "0.0.0.0", "::")  # noqa: S104 - what a handoff may say, not where to listen
"""What a P engine on this machine may call itself; a D that is told 0.0.0.0 connects to itself, and that is this machine."""
_MAX_KNOWN = 64


class AllowedHosts:
    """The hosts that one P engine's handoffs may name."""

    __slots__ = ("_engine", "_known", "_names", "_networks")

    def __init__(self, names: Iterable[str], networks: Iterable[Network], *, engine: str) -> None:
        self._names = frozenset(names)
        self._networks = tuple(networks)
        self._engine = engine
        """Whose handoffs these are, for the message."""
        self._known: set[str] = set()
        """Hosts as handoffs spelled them that were found to be allowed: an engine spells its own the same way every time."""

    @classmethod
    def of(cls, hosts: Iterable[str], *, engine: str) -> AllowedHosts:
        """From names, addresses and networks in any mixture."""
        networks, names = [], set()
        for host in hosts:
            network = _try_network(host)
            if network is not None:
                networks.append(network)
            else:
                names.add(_canonical_name(host))
        return cls(names, networks, engine=engine)

    def check(self, host: str) -> None:
        """Raises UnusableHandoff for a host that is none of these."""
        if not self.allows(host):
            shown = host[:100]
            raise UnusableHandoff(
                f"the handoff of {self._engine} names {shown!r} as P's side channel, which is not known to be P's host; "
                f"if it is, add it to {SETTING}"
            )

    def allows(self, host: str) -> bool:
        """Whether D may be sent there. A name is never resolved here: only a name that is known is good."""
        if host in self._known:
            return True
        is_allowed = self._stands_among(host)
        if is_allowed and len(self._known) < _MAX_KNOWN:
            self._known.add(host)
        return is_allowed

    def _stands_among(self, host: str) -> bool:
        address = _try_address(host)
        if address is None:
            return _canonical_name(host) in self._names
        return any(address.version == network.version and address in network for network in self._networks)


def _canonical_name(name: str) -> str:
    return name.lower().removesuffix(".")


def _try_address(host: str) -> Address | None:
    """As Python reads it, which is strict: `127.1`, `0x7f000001` and `010.0.0.1` are no addresses, so they are refused."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        return ipaddress.IPv6Address(int(address))  # Without its zone, which only names the interface to reach it by.
    return address


def _try_network(host: str) -> Network | None:
    address = _try_address(host)
    if address is not None:
        return ipaddress.ip_network(address)
    try:
        return ipaddress.ip_network(host)
    except ValueError:
        return None
