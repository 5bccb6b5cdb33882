"""What pdserve does inside vLLM's processes: nothing, unless it was asked to let NIXL sleep."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pdserve.vllm_plugin import DELAY_VARIABLE, let_nixl_sleep

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def make_agent(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """NIXL's bindings as its Python API uses them (nixl_cu13/_api.py in 1.5.1): the delay that an agent gets."""
    bindings = SimpleNamespace(nixlAgent=lambda name, config: (name, config))
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_bindings=bindings))

    def make() -> int:
        config = SimpleNamespace(pthrDelay=0)
        assert bindings.nixlAgent("P", config) == ("P", config)
        return int(config.pthrDelay)

    return make


@pytest.mark.parametrize(("value", "delay_us"), [("1000", 1000), ("0", 0), ("", 0), (None, 0)])
def test_agents_get_the_delay(
    make_agent: Callable[[], int], monkeypatch: pytest.MonkeyPatch, value: str | None, delay_us: int
) -> None:
    """Without the variable, or with 0, NIXL stays as it is."""
    if value is None:
        monkeypatch.delenv(DELAY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(DELAY_VARIABLE, value)
    let_nixl_sleep()
    assert make_agent() == delay_us


def test_an_engine_without_nixl_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DELAY_VARIABLE, "1000")
    monkeypatch.setitem(sys.modules, "nixl", None)
    let_nixl_sleep()


def test_something_else_than_a_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs what a plugin raises."""
    monkeypatch.setenv(DELAY_VARIABLE, "soon")
    with pytest.raises(ValueError, match="soon"):
        let_nixl_sleep()
