"""Which ports a deployment gets, and what is said when one is taken."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.launch.ports import Listener, PortPlan, PortRange, check_listeners, plan_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_HOST = "127.0.0.1"


def _plan(
    widths: Sequence[int],
    *,
    first: int = 8100,
    first_side_channel: int = 5600,
    taken: Iterable[int] = (),
    reserved: Iterable[int] = (),
) -> PortPlan:
    busy = frozenset(taken)
    kernel = itertools.count(40000)
    return plan_ports(
        widths,
        http=PortRange(_HOST, first, "engines.first_port"),
        side_channel=PortRange(_HOST, first_side_channel, "engines.first_side_channel_port"),
        reserved=reserved,
        is_free=lambda _, port: port not in busy,
        any_free=lambda _: next(kernel),
    )


def _free_except(*taken: int) -> Callable[[str, int], bool]:
    return lambda _, port: port not in taken


def test_ports_count_up_from_the_first() -> None:
    """With nothing in the way the engines get neighbouring ports."""
    assert _plan([1, 1, 1]) == PortPlan(http=(8100, 8101, 8102), side_channel=(5600, 5601, 5602))


def test_taken_ports_are_passed_over() -> None:
    """A port that somebody listens on is skipped, for HTTP and the side channel alike."""
    assert _plan([1, 1], taken=[8100, 8102, 5601]) == PortPlan(http=(8101, 8103), side_channel=(5600, 5602))


def test_pdserves_own_listeners_are_passed_over() -> None:
    """The gateway's port is free until the gateway starts, and must stay so."""
    assert _plan([1, 1], reserved=[8101]).http == (8100, 8102)


def test_a_data_parallel_engine_gets_a_run_of_side_channel_ports() -> None:
    """Rank r listens on the first plus r, so the next engine starts behind the last rank."""
    assert _plan([4, 2, 1]).side_channel == (5600, 5604, 5606)


def test_a_run_is_not_broken_by_a_taken_port() -> None:
    """All ports of a run must be free; the search goes on behind the one that is not."""
    assert _plan([3, 1], taken=[5601]).side_channel == (5602, 5600)


def test_zero_lets_the_kernel_choose() -> None:
    """No number is counted up from zero."""
    assert _plan([1, 1], first=0, first_side_channel=0) == PortPlan(http=(40000, 40001), side_channel=(40002, 40003))


def test_ranges_that_overlap_do_not_collide() -> None:
    """HTTP and side channel may start at one number."""
    ports = _plan([1, 1], first=7000, first_side_channel=7000)
    assert ports == PortPlan(http=(7000, 7001), side_channel=(7002, 7003))


def test_no_port_left_names_the_setting() -> None:
    """Behind the last port comes an error that says what to change."""
    with pytest.raises(ConfigError, match=r"engines\.first_port = 65535.*start lower"):
        _plan([1, 1], first=65535)


@settings(deadline=None)  # A busy machine may take its time.
@given(
    widths=st.lists(st.integers(1, 4), max_size=6),
    taken=st.frozensets(st.integers(8095, 8125)),
    first=st.integers(8095, 8110),
    first_side_channel=st.integers(8095, 8110),
)
def test_ports_are_distinct_and_free(
    widths: list[int], taken: frozenset[int], first: int, first_side_channel: int
) -> None:
    """Whatever is taken, no port is given twice and none that is taken."""
    ports = _plan(widths, first=first, first_side_channel=first_side_channel, taken=taken)
    runs = [range(start, start + width) for start, width in zip(ports.side_channel, widths, strict=True)]
    given_out = [*ports.http, *itertools.chain.from_iterable(runs)]
    assert len(set(given_out)) == len(given_out) == len(widths) + sum(widths)
    assert taken.isdisjoint(given_out)


def test_a_taken_gateway_port_is_an_error_that_names_its_holder() -> None:
    """Port, holder and the setting to change all stand in one sentence."""
    listeners = [Listener(_HOST, 8192, "gateway.port (--port)"), Listener(_HOST, 8193, "gateway.admin_port")]
    with pytest.raises(ConfigError) as caught:
        check_listeners(listeners, is_free=_free_except(8192), holder=lambda _: "pid 4711 (python3 proxy.py)")
    message = str(caught.value)
    assert "port 8192 on 127.0.0.1 is in use by pid 4711 (python3 proxy.py)" in message
    assert "gateway.port (--port)" in message


def test_an_unknown_holder_is_another_program() -> None:
    """The kernel does not always tell."""
    with pytest.raises(ConfigError, match="in use by another program"):
        check_listeners([Listener(_HOST, 8192, "gateway.port")], is_free=_free_except(8192), holder=lambda _: None)


def test_two_listeners_on_one_port_are_an_error() -> None:
    """Both settings are named."""
    listeners = [Listener(_HOST, 8192, "gateway.port"), Listener(_HOST, 8192, "gateway.admin_port")]
    with pytest.raises(ConfigError, match=r"gateway\.port and by gateway\.admin_port"):
        check_listeners(listeners, is_free=_free_except(), holder=lambda _: None)


def test_port_zero_is_never_in_use() -> None:
    """Two listeners may both leave the choice to the kernel."""
    listeners = [Listener(_HOST, 0, "gateway.port"), Listener(_HOST, 0, "gateway.admin_port")]
    check_listeners(listeners, is_free=lambda *_: pytest.fail("asked for port 0"), holder=lambda _: None)
