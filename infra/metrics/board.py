"""The current values of a set of metrics, as plain numbers; made into a page only when somebody asks for one."""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from ebbflow.infra.metrics.catalogue import Kind, Metric

Labels = tuple[str, ...]


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


class Board(Collector):
    """Values of `metrics`, all with the `constant` labels. Safe to read from another thread.

    Its own, and not the client library's counters: they would add a `_created` series to each, which nothing here
    documents, and are global to the process, where a user's own metrics live.
    before_page: called for each page, to set what is cheaper to look up then than at every step.
    """

    def __init__(
        self,
        metrics: Iterable[Metric],
        constant: Mapping[str, str],
        before_page: Callable[[], None] = lambda: None,
    ) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._constant = dict(constant)
        self._before_page = before_page
        self._lock = threading.Lock()
        self._numbers: dict[str, dict[Labels, float]] = {name: {} for name in self._metrics}
        self._histograms = {m.name: _Histogram(m.buckets) for m in self._metrics.values() if m.kind is Kind.HISTOGRAM}

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """What is not known, or is no number, is absent, not 0. Raises KeyError for a name outside the catalogue."""
        series = self._numbers[name]
        with self._lock:
            if value is None or math.isnan(value):
                series.pop(labels, None)
            else:
                series[labels] = float(value)

    def add(self, name: str, amount: float, *labels: str) -> None:
        series = self._numbers[name]
        with self._lock:
            series[labels] = series.get(labels, 0.0) + amount

    def observe(self, name: str, value: float) -> None:
        with self._lock:
            self._histograms[name].observe(value)

    def page(self) -> bytes:
        """The text format of Prometheus (version 0.0.4)."""
        return generate_latest(self.registry())

    def registry(self) -> CollectorRegistry:
        """For the client library's server and push."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return registry

    def collect(self) -> Iterator[Family]:
        """What the client library asks for."""
        self._before_page()
        with self._lock:
            numbers = {name: dict(series) for name, series in self._numbers.items()}
            histograms = {name: (list(h.counts), h.sum) for name, h in self._histograms.items()}
        for name, metric in self._metrics.items():
            if metric.kind is Kind.HISTOGRAM:
                yield self._histogram_family(metric, *histograms[name])
            elif numbers[name]:
                yield self._family(metric, numbers[name])

    def describe(self) -> list[Family]:
        """Registering must not make a page."""
        return []

    def _family(self, metric: Metric, series: Mapping[Labels, float]) -> Family:
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=[*self._constant, *metric.labels])
        for labels, value in sorted(series.items()):
            if len(labels) != len(metric.labels):
                raise ValueError(f"{metric.name} has labels {metric.labels}, and was given {labels}")
            family.add_metric([*self._constant.values(), *labels], value)
        return family

    def _histogram_family(self, metric: Metric, counts: list[int], total: float) -> Family:
        family = HistogramMetricFamily(metric.name, metric.help, labels=list(self._constant))
        buckets, seen = [], 0
        for bound, count in zip([*map(str, metric.buckets), "+Inf"], counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(list(self._constant.values()), buckets, total)
        return family
