"""Metrics as Python objects, in the classes and under the names of vLLM's `get_metrics`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.metrics.lane import LaneStats
from slipstream.metrics.prometheus import engine_families
from slipstream.metrics.stats import ModelStats


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counters by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number of the moment."""

    value: float


@dataclass
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # by upper bound: how many values are not above it


def read_metrics(models: dict[str, ModelStats], lanes: Sequence[LaneStats]) -> list[Metric]:
    found: list[Metric] = []
    for family in engine_families(models, lanes):
        if family.name.startswith("vllm:"):
            found += _READERS[family.type](family)
    return found


def _counters(family: Any) -> Iterator[Metric]:
    vectors: dict[tuple[tuple[str, str], ...], Vector] = {}
    for sample in family.samples:
        labels = dict(sample.labels)
        if labels.pop("position", None) is None:
            yield Counter(family.name, labels, int(sample.value))
        else:  # samples of a vector are in the order of positions
            vector = vectors.setdefault(tuple(labels.items()), Vector(family.name, labels, []))
            vector.values.append(int(sample.value))
    yield from vectors.values()


def _gauges(family: Any) -> Iterator[Metric]:
    for sample in family.samples:
        yield Gauge(family.name, dict(sample.labels), sample.value)


def _histograms(family: Any) -> Iterator[Metric]:
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = dict(sample.labels)
        bound = labels.pop("le", None)
        histogram = found.setdefault(tuple(labels.items()), Histogram(family.name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket") and bound is not None:
            histogram.buckets[bound] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = sample.value
    yield from found.values()


_READERS = {"counter": _counters, "gauge": _gauges, "histogram": _histograms}
