"""Counts while requests run, and renders when somebody scrapes: a count on the request path is one dictionary update."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pdserve.telemetry.metrics import ALL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.telemetry.metrics import Metric


Counts = list[tuple[str, tuple[str, ...], int]]
"""A metric's name, its labels and how many: what goes from one process to another."""
_BY_NAME = {metric.name: metric for metric in ALL}


class Tally:
    """Counts since the start."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Metric, tuple[str, ...]]] = Counter()

    def count(self, metric: Metric, *labels: str) -> None:
        """One more; labels in the order in which the metric declares them."""
        self._counts[metric, labels] += 1

    def value(self, metric: Metric, *labels: str) -> int:
        """How many so far; with fewer labels than the metric has, the sum over the others."""
        return sum(
            count
            for (counted, values), count in self._counts.items()
            if counted is metric and values[: len(labels)] == labels
        )

    @classmethod
    def joined(cls, dumps: Iterable[Counts]) -> Tally:
        """What several workers of one gateway have counted side by side."""
        total = cls()
        for name, labels, count in itertools.chain.from_iterable(dumps):
            metric = _BY_NAME[name]
            so_far = total._counts[metric, labels]
            total._counts[metric, labels] = max(so_far, count) if metric.is_seen_by_all else so_far + count
        return total

    def dump(self) -> Counts:
        """All counts, for another tally to include."""
        return [(metric.name, labels, count) for (metric, labels), count in self._counts.items()]

    def include(self, counts: Counts) -> None:
        """Add what another tally has counted before or after this one."""
        for name, labels, count in counts:
            self._counts[_BY_NAME[name], labels] += count

    def render(self, gauges: Mapping[str, tuple[str, float]]) -> bytes:
        """Prometheus text: all counters, and gauges of this moment as name to help and value."""
        registry = CollectorRegistry()
        registry.register(_Families(self._families(gauges)))
        return generate_latest(registry)

    def _families(self, gauges: Mapping[str, tuple[str, float]]) -> list[Family]:
        families: list[Family] = []
        for metric in ALL:
            family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for (counted, values), count in sorted(self._counts.items(), key=lambda item: item[0][1]):
                if counted is metric:
                    family.add_metric(values, count)
            families.append(family)
        families.extend(GaugeMetricFamily(name, text, value=value) for name, (text, value) in gauges.items())
        return families


class _Families(Collector):
    """What prometheus-client renders."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families
