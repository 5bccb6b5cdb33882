"""Counting and rendering."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pdserve.telemetry.metrics import ALL, ALONE, REQUESTS
from pdserve.telemetry.tally import Tally


def test_counts_by_labels_and_sums_over_the_rest() -> None:
    """Fewer labels ask for a sum."""
    tally = Tally()
    for outcome in ("ok", "ok", "queue_full"):
        tally.count(REQUESTS, "/v1/completions", outcome)
    tally.count(REQUESTS, "/v1/messages", "ok")
    assert tally.value(REQUESTS, "/v1/completions", "ok") == 2
    assert tally.value(REQUESTS, "/v1/completions") == 3
    assert tally.value(REQUESTS) == 4
    assert tally.value(ALONE) == 0


def test_every_metric_is_rendered_with_its_labels() -> None:
    """As Prometheus' own parser reads it; gauges of the moment among them."""
    tally = Tally()
    for metric in ALL:
        tally.count(metric, *("x" for _ in metric.labels))
    families = {
        family.name: family
        for family in text_string_to_metric_families(tally.render({"pdserve_now": ("Now.", 3)}).decode())
    }
    for metric in ALL:
        (sample, *_) = families[metric.name.removesuffix("_total")].samples
        assert sample.labels == dict.fromkeys(metric.labels, "x")
        assert sample.value == 1
    assert families["pdserve_now"].samples[0].value == 3
