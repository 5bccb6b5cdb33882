"""Every counter of the gateway, its labels and what it means. docs/operations.md speaks of them by these names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """A counter, equal to itself alone. Its label values are few: engines by name, and words from closed sets."""

    name: str
    labels: tuple[str, ...]
    help: str
    is_seen_by_all: bool = False
    """Every worker of a gateway counts the same event: the highest of their counts says how often it happened, not the sum."""


REQUESTS = Metric(
    "pdserve_requests_total",
    ("path", "outcome"),
    "Client requests at their end; the outcome is ok, disconnected, or the reason of the error that the client got.",
)
PREFILLS = Metric(
    "pdserve_prefills_total",
    ("place",),
    "Answered calls by where the prompt was computed, as D's own counts prove it.",
)
ALONE = Metric("pdserve_alone_total", ("reason",), "Calls that went to a decode engine alone by decision.")
RETRIES = Metric(
    "pdserve_retries_total", ("leg", "reason"), "Legs that failed before the first byte, by role and reason."
)
HANDOFFS_REFUSED = Metric(
    "pdserve_handoffs_refused_total",
    ("cause",),
    "Handoffs from P that were not sent: expired, foreign_host, unreachable_host, unknown_engine, unproven_pair, unusable.",
)
RELEASES = Metric(
    "pdserve_releases_total",
    ("outcome",),
    "Handoffs that no D will fetch: released on P, or failed (P then keeps the blocks until its lease ends).",
)
ENGINE_FAILURES = Metric(
    "pdserve_engine_failures_total",
    ("engine", "reason"),
    "Legs that an engine failed, by the reason that it gave or got.",
)
BREAKER_OPENED = Metric(
    "pdserve_breaker_opened_total",
    ("engine",),
    "Times that an engine was left alone for its failures; each worker has a breaker of its own, and all are counted.",
)
PAIR_FAILURES = Metric(
    "pdserve_pair_failures_total", ("prefill", "decode"), "Handoffs between two engines that failed on D."
)
ENGINE_RESTARTS = Metric(
    "pdserve_engine_restarts_total",
    ("engine",),
    "Times that an engine came back, or showed itself as another process; all workers see it, and it counts once.",
    is_seen_by_all=True,
)
UNAUTHORIZED = Metric("pdserve_unauthorized_total", (), "Requests without a valid API key.")
WORKER_RESTARTS = Metric(
    "pdserve_worker_restarts_total",
    (),
    "Times that a process of a gateway with several ended by itself and was replaced.",
)

ALL = (
    REQUESTS,
    PREFILLS,
    ALONE,
    RETRIES,
    HANDOFFS_REFUSED,
    RELEASES,
    ENGINE_FAILURES,
    BREAKER_OPENED,
    PAIR_FAILURES,
    ENGINE_RESTARTS,
    UNAUTHORIZED,
    WORKER_RESTARTS,
)
