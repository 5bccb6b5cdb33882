"""An engine's /metrics as numbers: the samples that tell whether KV moved and how full an engine is.

Names are vLLM 0.32's (v1/metrics/loggers.py, nixl/stats.py). An engine without a family gives zero for it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from pdserve.errors import EngineProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.samples import Sample

    from pdserve.engine.transport import EngineClient


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Counters since the engine's start, and gauges; summed over the engine's ranks."""

    has_prompt_sources: bool
    """Whether the engine tells where prompt tokens came from at all."""
    num_prompt_tokens_local: int
    num_prompt_tokens_local_cache: int
    num_prompt_tokens_remote: int
    num_transfers: int
    transfer_s: float
    transfer_bytes: float
    num_failed_transfers: int
    num_expired: int
    num_notifications_after_expiry: int
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of the KV blocks in use, 0 to 1."""
    num_kv_tokens: int
    """Tokens that the KV cache holds in all; 0 where the engine does not say."""

    def since(self, before: EngineCounters) -> EngineCounters:
        """What was counted between two scrapes; gauges stay as they are now."""
        return EngineCounters(
            **{name: getattr(self, name) - getattr(before, name) for name in _COUNTERS},
            has_prompt_sources=self.has_prompt_sources,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            kv_usage=self.kv_usage,
            num_kv_tokens=self.num_kv_tokens,
        )


_CACHE_CONFIG = "vllm:cache_config_info"
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_SAMPLES: dict[str, tuple[str, str | None]] = {
    "num_prompt_tokens_local": (_BY_SOURCE, "local_compute"),
    "num_prompt_tokens_local_cache": (_BY_SOURCE, "local_cache_hit"),
    "num_prompt_tokens_remote": (_BY_SOURCE, "external_kv_transfer"),
    "num_transfers": ("vllm:nixl_xfer_time_seconds_count", None),
    "transfer_s": ("vllm:nixl_xfer_time_seconds_sum", None),
    "transfer_bytes": ("vllm:nixl_bytes_transferred_sum", None),
    "num_failed_transfers": ("vllm:nixl_num_failed_transfers_total", None),
    "num_expired": ("vllm:nixl_num_kv_expired_reqs_total", None),
    "num_notifications_after_expiry": ("vllm:nixl_num_notifications_after_expiry_total", None),
    "num_running": ("vllm:num_requests_running", None),
    "num_waiting": ("vllm:num_requests_waiting", None),
    "kv_usage": ("vllm:kv_cache_usage_perc", None),
}
_EXPIRED = re.compile(rb"^vllm:nixl_num_kv_expired_reqs_total(?:\{[^}\n]*\})? ([0-9.eE+]+)", re.MULTILINE)
_GAUGES = {"num_running", "num_waiting", "kv_usage"}
_COUNTERS = [name for name in _SAMPLES if name not in _GAUGES]
_FLOATS = {"transfer_s", "transfer_bytes", "kv_usage"}


async def scrape(engine: EngineClient, *, timeout_s: float = 10.0) -> EngineCounters:
    """Read an engine's counters. Raises EngineError."""
    answer = await engine.get("/metrics", timeout_s=timeout_s)
    if answer.status != 200:  # noqa: PLR2004
        raise EngineProtocolError(f"/metrics answered {answer.status}", engine=str(engine.address))
    try:
        return parse_counters(answer.body.decode())
    except ValueError as exc:
        raise EngineProtocolError(f"/metrics is not Prometheus text: {exc}", engine=str(engine.address)) from exc


async def count_expired(engine: EngineClient, *, timeout_s: float) -> int:
    """How many leases have run out on an engine, read from the one counter's lines. Raises EngineError.

    Parsing all of /metrics takes milliseconds, which is too long for what happens beside requests.
    """
    answer = await engine.get("/metrics", timeout_s=timeout_s)
    values = _EXPIRED.findall(answer.body)
    if answer.status != 200 or not values:  # noqa: PLR2004
        message = f"/metrics answered {answer.status} without {_SAMPLES['num_expired'][0]}"
        raise EngineProtocolError(message, engine=str(engine.address))
    return round(sum(map(float, values)))


def parse_counters(text: str) -> EngineCounters:
    """Sum the samples that are wanted. Raises ValueError for text that is not Prometheus'."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {name: _sum(samples, *wanted) for name, wanted in _SAMPLES.items()}
    numbers: dict[str, Any] = {name: value if name in _FLOATS else round(value) for name, value in values.items()}
    return EngineCounters(
        has_prompt_sources=any(sample.name == _BY_SOURCE for sample in samples),
        num_kv_tokens=sum(_kv_tokens(sample) for sample in samples if sample.name == _CACHE_CONFIG),
        **numbers,
    )


def _kv_tokens(sample: Sample) -> int:
    """From an info metric whose labels are vLLM's whole cache configuration; a label can be the word None."""
    sizes = [sample.labels.get(label, "") for label in ("num_gpu_blocks", "block_size")]
    return math.prod(int(size) for size in sizes) if all(size.isdecimal() for size in sizes) else 0


def _sum(samples: Iterable[Sample], name: str, source: str | None) -> float:
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and (source is None or sample.labels.get("source") == source)
    )
