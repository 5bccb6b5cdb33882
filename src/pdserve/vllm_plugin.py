"""Runs inside vLLM's processes, as one of its general plugins, and lets NIXL's progress thread sleep between events.

vLLM gives no way to set that thread's delay, and NIXL's Python API sets 0 (nixl_cu13/_api.py in 1.5.1): the thread polls
without a pause for as long as the engine lives. Next to a GPU that is a core well spent. On a laptop it is a core for
each idle engine, and on two cores the engines' own threads starve: a first handoff took 31 s instead of half a second.

Does nothing unless DELAY_VARIABLE is set, which `pdserve up` does for engines on CPU. Knows nothing of pdserve.
"""

from __future__ import annotations

import os

DELAY_VARIABLE = "PDSERVE_NIXL_PROGRESS_DELAY_US"
"""How long the thread may sleep when nothing happens, in microseconds; UCX's events wake it at once. NIXL rounds up to
milliseconds (`nixlUcxSharedThread` in plugins/ucx/ucx_backend.cpp, where the delay is also said to hide lost wake-ups)."""


def let_nixl_sleep() -> None:
    """Give every NIXL agent of this process that delay. Raises ValueError when the variable holds no number."""
    value = os.environ.get(DELAY_VARIABLE, "")
    delay_us = int(value) if value else 0
    if delay_us <= 0:
        return
    try:
        from nixl import _bindings as bindings  # noqa: PLC0415  # An engine without a connector needs no NIXL.
    except ImportError:
        return
    make_agent = bindings.nixlAgent

    def make_patient_agent(name: str, config: bindings.nixlAgentConfig) -> bindings.nixlAgent:
        config.pthrDelay = delay_us
        return make_agent(name, config)

    bindings.nixlAgent = make_patient_agent
