"""Which hosts a handoff may send D to."""

from __future__ import annotations

import socket

import pytest

from pdserve.config import Config, PrefillConfig, check_config
from pdserve.core import EngineAddress, EngineName, Role
from pdserve.engine.side_channel import allowed_hosts_of
from pdserve.errors import ConfigError
from pdserve.protocol.nixl import UnusableHandoff
from pdserve.protocol.side_channel_hosts import AllowedHosts


def _prefill(url: str) -> EngineAddress:
    return EngineAddress(EngineName("prefill-0"), Role.PREFILL, url)


_CONFIGURED = AllowedHosts.of(
    ["p0.example", "10.1.2.3", "10.9.0.0/16", "fd00:9::/64", "::ffff:10.7.7.7"], engine="prefill engine p"
)


@pytest.mark.parametrize(
    "host",
    [
        "p0.example",
        "P0.Example",
        "p0.example.",
        "10.1.2.3",
        "::ffff:10.1.2.3",
        "10.9.255.255",
        "fd00:9::1",
        "FD00:9:0:0::1",
        "fd00:9::1%eth0",
        "10.7.7.7",
    ],
)
def test_a_known_host_is_allowed_in_every_spelling(host: str) -> None:
    """Case, a final dot, a zone and IPv4 inside IPv6 make no other host."""
    _CONFIGURED.check(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "p1.example",
        "p0.example.evil",
        "10.1.2.4",
        "10.10.0.1",
        "fd00:8::1",
        "localhost",
        "127.0.0.1",
        "0.0.0.0",  # noqa: S104
        "::",
        "169.254.169.254",
        "167838211",
        "0x0a010203",
        "10.1.515",
        "010.1.2.3",
        "[fd00:9::1]",
        "p0.example:80",
        "p0.example/",
        "\u24df0.example",
        "*",
    ],
)
def test_any_other_host_is_refused_with_the_setting_to_add(host: str) -> None:
    """Numbers that only some resolvers take for addresses are no addresses here."""
    with pytest.raises(UnusableHandoff, match=r"prefill engine p .*add it to prefill\.side_channel_hosts"):
        _CONFIGURED.check(host)


def test_a_host_is_judged_the_same_every_time() -> None:
    """What was allowed is remembered by its spelling, within a bound, and what was not never becomes so."""
    hosts = AllowedHosts.of(["fd00:9::/64"], engine="p")
    for _ in range(2):
        assert all(hosts.allows(f"fd00:9::{index:x}") for index in range(200))
        assert not any(hosts.allows(f"fd00:8::{index:x}") for index in range(200))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8100", "http://localhost:8100", "http://[::1]:8100"])
async def test_an_engine_on_this_machine_may_name_it_by_any_of_its_addresses(url: str) -> None:
    """Engines without VLLM_NIXL_SIDE_CHANNEL_HOST say localhost, whatever their URL is."""
    hosts = await allowed_hosts_of(_prefill(url), [])
    for host in ("localhost", "127.0.0.1", "127.0.0.2", "::1", "0.0.0.0", "::", socket.gethostname()):  # noqa: S104
        hosts.check(host)
    assert not hosts.allows("192.0.2.77")


async def test_an_engine_elsewhere_may_not_name_this_machine() -> None:
    """D, told localhost, would connect to itself or to whatever listens beside it."""
    hosts = await allowed_hosts_of(_prefill("http://192.0.2.77:8100"), ["p.example"])
    hosts.check("192.0.2.77")
    hosts.check("p.example")
    for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):  # noqa: S104
        assert not hosts.allows(host)


async def test_a_name_that_cannot_be_resolved_stands_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    """The resolver may be late; the name is still the operator's."""
    hosts = await allowed_hosts_of(_prefill("http://p.invalid:8100"), [])
    hosts.check("p.invalid")
    assert not hosts.allows("localhost")
    assert "cannot resolve p.invalid" in caplog.text


@pytest.mark.parametrize("host", ["p", "p.example", "10.0.0.7", "10.0.0.0/16", "fd00::7", "fd00::/8"])
def test_a_configured_host_is_a_name_an_address_or_a_network(host: str) -> None:
    """All three may stand in one list."""
    check_config(Config(prefill=PrefillConfig(side_channel_hosts=[host])), source="x")


@pytest.mark.parametrize(
    "host", ["", "http://p", "p:80", "10.0.0.7/16", "10.0.0", "0x7f000001", "[fd00::7]", "a b", "*.p"]
)
def test_anything_else_is_an_error_at_load(host: str) -> None:
    """Rather than a host that never matches."""
    with pytest.raises(ConfigError, match=r"prefill\.side_channel_hosts"):
        check_config(Config(prefill=PrefillConfig(side_channel_hosts=[host])), source="x")
