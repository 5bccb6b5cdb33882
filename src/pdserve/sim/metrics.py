"""/metrics with vLLM 0.32's names, labels and buckets, for what the stand-in has a number of.

Names from v1/metrics/loggers.py, v1/metrics/buckets.py and the NIXL connector's stats.py; the Prometheus client adds the
suffixes as it does there. Knows no engine: gauges are read from functions that are passed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LABELS = ("model_name", "engine")
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TRANSFER_TIME_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_TRANSFER_BYTES_BUCKETS = tuple(2.0 ** (10 + power) for power in range(1, 25, 2))
_DESCRIPTOR_BUCKETS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


class _Families:
    """Makes metrics of one engine in one registry."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.labels = (model_name, "0")

    def counter(self, name: str, help_text: str) -> Counter:
        """A count."""
        return Counter(f"vllm:{name}", help_text, _LABELS, registry=self.registry).labels(*self.labels)

    def counters(self, name: str, help_text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """A count for each value of a label."""
        family = Counter(f"vllm:{name}", help_text, (*_LABELS, label), registry=self.registry)
        return {value: family.labels(*self.labels, value) for value in values}

    def histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        """A distribution."""
        return Histogram(f"vllm:{name}", help_text, _LABELS, registry=self.registry, buckets=buckets).labels(
            *self.labels
        )

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A number that is read when somebody asks."""
        Gauge(f"vllm:{name}", help_text, _LABELS, registry=self.registry).labels(*self.labels).set_function(read)

    def gauges(self, name: str, help_text: str, label: str, reads: Mapping[str, Callable[[], float]]) -> None:
        """The same, one for each value of a label."""
        family = Gauge(f"vllm:{name}", help_text, (*_LABELS, label), registry=self.registry)
        for value, read in reads.items():
            family.labels(*self.labels, value).set_function(read)


class Metrics:
    """One engine's numbers."""

    def __init__(self, model_name: str, *, has_connector: bool) -> None:
        families = _Families(model_name)
        self._families = families
        self._queries = families.counter("prefix_cache_queries", "Prefix cache queries, in tokens.")
        self._hits = families.counter("prefix_cache_hits", "Prefix cache hits, in tokens.")
        self._external_queries = families.counter(
            "external_prefix_cache_queries", "Queries to the connector, in tokens."
        )
        self._external_hits = families.counter("external_prefix_cache_hits", "Hits of the connector, in tokens.")
        self._preemptions = families.counter("num_preemptions", "Preempted requests.")
        self._prompt_tokens = families.counter("prompt_tokens", "Prefill tokens.")
        self._by_source = families.counters("prompt_tokens_by_source", "Prompt tokens by source.", "source", _SOURCES)
        self._cached = families.counter("prompt_tokens_cached", "Cached prompt tokens, local and external.")
        self._generation_tokens = families.counter("generation_tokens", "Generated tokens.")
        self._success = families.counters("request_success", "Finished requests.", "finished_reason", _FINISH_REASONS)
        self._ttft = families.histogram("time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS)
        self._itl = families.histogram("inter_token_latency_seconds", "Time between tokens.", _ITL_BUCKETS)
        self._e2e = families.histogram("e2e_request_latency_seconds", "Request latency.", _LATENCY_BUCKETS)
        self._nixl = NixlMetrics(families) if has_connector else None

    @property
    def nixl(self) -> NixlMetrics:
        """The connector's own numbers."""
        assert self._nixl is not None
        return self._nixl

    def watch_scheduler(self, *, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Requests under way."""
        self._families.gauge("num_requests_running", "Requests in model execution batches.", running)
        self._families.gauge("num_requests_waiting", "Requests waiting to be processed.", waiting)

    def watch_blocks(self, usage: Callable[[], float]) -> None:
        """KV blocks in use."""
        self._families.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage)

    def watch_loads(self, waiting: Callable[[], float], loading: Callable[[], float]) -> None:
        """Requests by stage of their KV load; only an engine that may consume KV has this family."""
        reads = {"waiting_to_start": waiting, "in_progress": loading, "completed_waiting": lambda: 0.0}
        self._families.gauges("num_requests_kv_fetch_by_stage", "Waiting requests by KV load stage.", "stage", reads)

    def admitted(self, num_tokens: int, num_local: int, num_external: int) -> None:
        """A request was looked up in the caches."""
        self._queries.inc(num_tokens)
        self._hits.inc(num_local)
        if self._nixl is not None:
            self._external_queries.inc(num_tokens - num_local)
            self._external_hits.inc(num_external)

    def first_token(self, num_tokens: int, num_local: int, num_external: int, ttft_s: float) -> None:
        """A prefill is done."""
        self._prompt_tokens.inc(num_tokens)
        self._by_source["local_compute"].inc(num_tokens - num_local - num_external)
        self._by_source["local_cache_hit"].inc(num_local)
        self._by_source["external_kv_transfer"].inc(num_external)
        self._cached.inc(num_local + num_external)
        self._ttft.observe(ttft_s)

    def token(self, since_last_s: float | None) -> None:
        """A token came out; the time is None for a request's first."""
        self._generation_tokens.inc()
        if since_last_s is not None:
            self._itl.observe(since_last_s)

    def finished(self, reason: str, latency_s: float) -> None:
        """A request ended by itself. Aborted ones are not counted by vLLM either, though it has a label for them."""
        self._success[reason].inc()
        self._e2e.observe(latency_s)

    def preempted(self) -> None:
        """A request lost its blocks to others."""
        self._preemptions.inc()

    def render(self) -> bytes:
        """The page, in the text format."""
        return generate_latest(self._families.registry)

    def value(self, name: str, **labels: str) -> float:
        """One sample, by its full name; for tests."""
        value = self._families.registry.get_sample_value(
            name, dict(zip(_LABELS, self._families.labels, strict=True)) | labels
        )
        assert value is not None, f"there is no {name} {labels}"
        return value


class NixlMetrics:
    """What the NIXL connector counts: transfers on D, expiry on P, failures on either."""

    def __init__(self, families: _Families) -> None:
        self._time = families.histogram("nixl_xfer_time_seconds", "Transfer time.", _TRANSFER_TIME_BUCKETS[1:])
        self._post = families.histogram("nixl_post_time_seconds", "Transfer post time.", _TRANSFER_TIME_BUCKETS)
        self._bytes = families.histogram("nixl_bytes_transferred", "Bytes per transfer.", _TRANSFER_BYTES_BUCKETS)
        self._descriptors = families.histogram("nixl_num_descriptors", "Descriptors per transfer.", _DESCRIPTOR_BUCKETS)
        self._failed = families.counter("nixl_num_failed_transfers", "Failed transfers, handshakes and notifications.")
        self._failed_notices = families.counter("nixl_num_failed_notifications", "Failed notifications.")
        self._expired = families.counter("nixl_num_kv_expired_reqs", "Requests whose KV expired; counted on P.")
        self._late = families.counter(
            "nixl_num_notifications_after_expiry", "Notifications for requests not kept any more."
        )

    def transferred(self, *, duration_s: float, num_bytes: int, num_descriptors: int) -> None:
        """D has read a request's blocks."""
        self._time.observe(duration_s)
        self._post.observe(duration_s)
        self._bytes.observe(num_bytes)
        self._descriptors.observe(num_descriptors)

    def transfer_failed(self) -> None:
        """A handshake or a read did not work."""
        self._failed.inc()

    def notice_failed(self) -> None:
        """P was not told that its blocks may go; vLLM counts that twice over."""
        self._failed.inc()
        self._failed_notices.inc()

    def expired(self, count: int) -> None:
        """Leases ran out."""
        self._expired.inc(count)

    def noticed_late(self) -> None:
        """Notice came for a request that nothing is kept for."""
        self._late.inc()
