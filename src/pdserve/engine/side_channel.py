"""Finds out which hosts a P engine's handoffs may name: its own, by every name and address that is known of it here.

Asks the resolver and the machine's interfaces; what is allowed then is a pure matter, `pdserve.protocol.side_channel_hosts`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil

from pdserve.protocol.side_channel_hosts import LOOPBACK, AllowedHosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.core import EngineAddress

_logger = logging.getLogger("pdserve.pool")


async def allowed_hosts_of(prefill: EngineAddress, configured: Sequence[str]) -> AllowedHosts:
    """The host of the engine's URL, what it resolves to now, and what is configured.

    An engine on this machine may use any of the machine's addresses: which of them its URL has is the operator's choice.
    """
    host = urlsplit(prefill.url).hostname
    assert host is not None, "an engine's URL was checked when it was read"
    addresses = await _resolve(host)
    hosts = {host, *addresses, *configured}
    own = _own_addresses()
    if any(ipaddress.ip_address(address).is_loopback or address in own for address in addresses):
        hosts |= {*LOOPBACK, *own, socket.gethostname()}
    return AllowedHosts.of(hosts, engine=str(prefill))


async def _resolve(host: str) -> set[str]:
    """Every address; none when the name is not known now, which leaves the name itself."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as exc:
        _logger.warning("cannot resolve %s: %s", host, exc.strerror or exc)
        return set()
    return {_without_zone(str(entry[4][0])) for entry in found}


def _own_addresses() -> set[str]:
    families = {socket.AF_INET, socket.AF_INET6}
    interfaces = psutil.net_if_addrs().values()
    return {_without_zone(entry.address) for entries in interfaces for entry in entries if entry.family in families}


def _without_zone(address: str) -> str:
    return address.partition("%")[0]
