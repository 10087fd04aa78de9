"""/metrics in the Prometheus format: under our names, and under the vLLM names that dashboards, autoscalers and the
Kubernetes gateway use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder

from slipstream.metrics.stats import BucketCounts, FrontEnds, FrontStats, LaneStats, ModelStats, ReplicaStats

Families = Iterator[Any]

_CAUSES = ("busy", "turnaround", "host_late", "output", "grammar", "no_requests")
_OF_LANES: tuple[tuple[str, str, str, str], ...] = (
    ("gauge", "requests_running", "requests in steps", "num_running"),
    ("gauge", "requests_waiting", "requests that wait for a row or for pages", "num_waiting"),
    ("counter", "steps", "steps of the device", "num_steps"),
    ("counter", "preemptions", "requests that gave back their pages and were computed again", "num_preemptions"),
    ("counter", "prefix_cache_queries", "prompt tokens looked for in the cache", "prefix_queries"),
    ("counter", "prefix_cache_hits", "prompt tokens found in the cache", "prefix_hits"),
    ("counter", "cache_tier_hits", "prompt tokens whose pages came from the second tier", "tier_hits"),
    ("counter", "cache_tier_stored_bytes", "pages copied to the second tier", "tier_bytes_stored"),
    ("counter", "cache_tier_loaded_bytes", "pages copied from the second tier", "tier_bytes_loaded"),
    ("counter", "host_seconds", "time the engine core itself took", "host"),
    ("counter", "drafted_rows", "rows of steps that had drafts", "num_drafted_rows"),
    ("counter", "draft_tokens", "drafted tokens", "num_drafts"),
    ("counter", "accepted_tokens", "drafted tokens that were accepted", "num_accepted_drafts"),
)
_OF_MODELS: tuple[tuple[str, str, str], ...] = (
    ("prompt_tokens", "prompt tokens taken in", "prompt_tokens"),
    ("generation_tokens", "tokens generated", "generated_tokens"),
    ("cached_prompt_tokens", "prompt tokens that came from the cache, of requests that ended", "cached_tokens"),
)
_HISTOGRAMS: tuple[tuple[str, str, str], ...] = (
    ("time_to_first_token_seconds", "until a request's first token", "ttft"),
    ("inter_token_latency_seconds", "between two tokens of a text", "itl"),
    ("e2e_request_latency_seconds", "of whole requests", "e2e"),
    ("request_queue_time_seconds", "until a prompt is begun", "queue"),
    ("request_prefill_time_seconds", "from there to its first token", "prefill"),
    ("request_decode_time_seconds", "from the first token to the last", "decode"),
    ("request_inference_time_seconds", "from the prompt's beginning to the last token", "inference"),
    ("request_prompt_tokens", "tokens of a prompt", "prompt_length"),
    ("request_generation_tokens", "tokens generated for a prompt", "output_length"),
)
_OF_PROCESSES: tuple[tuple[str, str, str, str], ...] = (
    ("gauge", "resident_memory_bytes", "memory that is there", "resident"),
    ("gauge", "virtual_memory_bytes", "addresses that are taken", "virtual"),
    ("counter", "cpu_seconds", "user and system time", "cpu_seconds"),
    ("gauge", "start_time_seconds", "since 1970", "start_time"),
    ("gauge", "open_fds", "open files, every connection among them", "open_files"),
    ("gauge", "max_fds", "files that may be open", "max_files"),
)
# vLLM's names of our metrics
_ALIASES = {
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "preemptions": "num_preemptions",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "cache_tier_hits": "external_prefix_cache_hits",
    "drafted_rows": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "cache_usage_ratio": "kv_cache_usage_perc",
    **{name: name for name, _, _ in _HISTOGRAMS},
}


class Metrics:
    """Built for each scrape from what `look` returns then."""

    def __init__(
        self,
        look: Callable[[], tuple[FrontStats, Sequence[LaneStats]]],
        version: str,
        front_ends: Callable[[], FrontEnds | None] = lambda: None,
        replicas: Callable[[], Sequence[ReplicaStats]] = tuple,
    ) -> None:
        self._look = look
        self._version = version
        self._front_ends = front_ends
        self._replicas = replicas
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the newest format that the client accepts."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind

    def collect(self) -> Families:
        front, lanes = self._look()
        yield from _server(front, self._version)
        yield from _processes(front.pids)
        yield from _front_ends(self._front_ends() or FrontEnds(1, 1))
        yield from _of_replicas(self._replicas())
        yield from engine_families(front.models, lanes)


def engine_families(models: dict[str, ModelStats], lanes: Sequence[LaneStats]) -> Families:
    """The metrics of models and their cores."""
    yield from _lanes(lanes)
    yield from _models(models)
    yield from _vllm_only(models, lanes)


def _server(front: FrontStats, version: str) -> Families:
    info = GaugeMetricFamily("slipstream_info", "the version", labels=("version",))
    info.add_metric((version,), 1)
    yield info
    requests = CounterMetricFamily("slipstream_http_requests", "HTTP requests", labels=("route", "status"))
    for key, count in front.requests.items():
        requests.add_metric(key.rsplit(" ", 1), count)
    yield requests
    for name, doc, label, counts in (
        ("aborted", "requests aborted by their caller or by a lost connection", "cause", front.aborted),
        ("refused", "requests that were not taken", "reason", front.refused),
    ):
        family = CounterMetricFamily(f"slipstream_requests_{name}", doc, labels=(label,))
        for key, count in counts.items():
            family.add_metric((key,), count)
        yield family
    failed = CounterMetricFamily("slipstream_failed_turns", "turns of repeated work that failed", labels=("task",))
    failing = GaugeMetricFamily("slipstream_failing", "tasks whose last turn failed", labels=("task",))
    for task, count in front.failed_turns.items():
        failed.add_metric((task,), count)
        failing.add_metric((task,), front.failing.get(task, 0))
    yield failed
    yield failing
    yield GaugeMetricFamily("slipstream_open_requests", "prompts under way", value=front.open_requests)
    yield GaugeMetricFamily(
        "slipstream_queued_requests", "prompts of which nothing was computed yet", value=front.queued_requests
    )
    yield GaugeMetricFamily("slipstream_queued_tokens", "and their tokens", value=front.queued_tokens)


def _processes(pids: dict[str, int]) -> Families:
    """Process metrics under prometheus_client's names, with the process as a label, since there are several."""
    found = {name: stats for name, pid in pids.items() if (stats := read_process(pid)) is not None}
    for kind, name, doc, field in _OF_PROCESSES:
        family = _KINDS[kind](f"process_{name}", doc, labels=("process",))
        for process, stats in found.items():
            family.add_metric((process,), getattr(stats, field))
        yield family


def _front_ends(front_ends: FrontEnds) -> Families:
    yield GaugeMetricFamily("slipstream_front_ends", "front-end processes that run", value=front_ends.running)
    yield GaugeMetricFamily("slipstream_front_ends_wanted", "as --workers says", value=front_ends.wanted)
    yield CounterMetricFamily(
        "slipstream_front_end_restarts", "front ends that died and were started again", value=front_ends.restarts
    )


def _of_replicas(replicas: Sequence[ReplicaStats]) -> Families:
    """None if there is one core only."""
    if not replicas:
        return
    for kind, name, doc, field in (
        ("gauge", "ready", "1 where the replica takes requests", "is_ready"),
        ("gauge", "open_requests", "requests sent to the replica that have not finished", "num_open"),
        ("counter", "restarts", "times that the replica died and was started again", "num_restarts"),
        ("counter", "rerouted_requests", "requests run on another replica after this one died", "num_rerouted"),
    ):
        family = _KINDS[kind](f"slipstream_replica_{name}", doc, labels=("replica",))
        for each in replicas:
            family.add_metric((str(each.replica),), int(getattr(each, field)))
        yield family


def _lanes(lanes: Sequence[LaneStats]) -> Families:
    """Metrics of each model; if there are several replicas, of each model and replica."""
    several = any(lane.replica for lane in lanes)
    label_names, vllm_label_names = ("model", *(["replica"] if several else [])), ("model_name", "engine")

    def labels(lane: LaneStats, *, of_vllm: bool = False) -> tuple[str, ...]:
        return (lane.model, str(lane.replica)) if several or of_vllm else (lane.model,)

    def named(kind: str, name: str, doc: str) -> Iterator[tuple[Any, bool]]:
        yield _KINDS[kind](f"slipstream_{name}", doc, labels=label_names), False
        if alias := _ALIASES.get(name):
            yield _KINDS[kind](f"vllm:{alias}", doc, labels=vllm_label_names), True

    for kind, name, doc, field in _OF_LANES:
        for family, of_vllm in named(kind, name, doc):
            for lane in lanes:
                family.add_metric(labels(lane, of_vllm=of_vllm), getattr(lane, field))
            yield family
    for family, of_vllm in named("gauge", "cache_usage_ratio", "share of the cache's pages that requests hold"):
        for lane in lanes:
            if lane.num_pages:
                family.add_metric(labels(lane, of_vllm=of_vllm), 1 - lane.num_free_pages / lane.num_pages)
        yield family
    for name, of_vllm in (
        ("slipstream_accepted_tokens_per_pos", False),
        ("vllm:spec_decode_num_accepted_tokens_per_pos", True),
    ):
        doc = "accepted drafts by their position in the row, from 0"
        by_position = CounterMetricFamily(
            name, doc, labels=(*(vllm_label_names if of_vllm else label_names), "position")
        )
        for lane in lanes:
            for position, count in enumerate(lane.accepted_at):
                by_position.add_metric((*labels(lane, of_vllm=of_vllm), str(position)), count)
        yield by_position
    time = CounterMetricFamily(
        "slipstream_device_seconds", "device time: busy, and idle by cause", labels=(*label_names, "state")
    )
    share = GaugeMetricFamily(
        "slipstream_device_busy_ratio", "busy share of the time in which there were requests", labels=label_names
    )
    for lane in lanes:
        for cause in _CAUSES:
            time.add_metric((*labels(lane), cause), getattr(lane, cause))
        worked = sum(getattr(lane, cause) for cause in _CAUSES if cause != "no_requests")
        if worked:
            share.add_metric(labels(lane), lane.busy / worked)
    yield time
    yield share


def _models(models: dict[str, ModelStats]) -> Families:
    for name, doc, field in _OF_MODELS:
        for family, labels in _named("counter", name, doc):
            for model, stats in models.items():
                family.add_metric((model, *labels), getattr(stats, field))
            yield family
    for name, doc, field in _HISTOGRAMS:
        for family, labels in _named("histogram", name, doc):
            for model, stats in models.items():
                _put(family, (model, *labels), getattr(stats, field))
            yield family
    ended = CounterMetricFamily("slipstream_requests_finished", "samples that ended", labels=("model", "reason"))
    for model, stats in models.items():
        for reason, count in stats.finished.items():
            ended.add_metric((model, reason), count)
    yield ended


def _vllm_only(models: dict[str, ModelStats], lanes: Sequence[LaneStats]) -> Families:
    """vLLM metrics that have another shape than those of Slipstream."""
    success = CounterMetricFamily(
        "vllm:request_success", "samples that ended", labels=("model_name", "engine", "finished_reason")
    )
    for model, stats in models.items():
        for reason, count in stats.finished.items():
            success.add_metric((model, "0", reason), count)
    yield success
    yield from _cache_info(lanes)
    yield _lora_info(lanes)


def _lora_info(lanes: Sequence[LaneStats]) -> GaugeMetricFamily:
    """Adapters by name; the value is the time of the scrape, as in vLLM: the newest series is the current one."""
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "LoRA adapters of running and of waiting requests",
        labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    own = [lane for lane in lanes if lane.max_loras]
    running, waiting = (
        ",".join(sorted({name for lane in own for name in getattr(lane, field)}))
        for field in ("running_adapters", "waiting_adapters")
    )
    most = max((lane.max_loras for lane in own), default=0)
    info.add_metric((str(most), running, waiting), time.time() if own else 0)
    return info


def _cache_info(lanes: Iterable[LaneStats]) -> Families:
    info = GaugeMetricFamily(
        "vllm:cache_config_info",
        "how the cache is cut",
        labels=("model_name", "engine", "block_size", "num_gpu_blocks"),
    )
    for lane in lanes:
        if lane.num_pages:
            info.add_metric((lane.model, str(lane.replica), str(lane.page_size), str(lane.num_pages)), 1)
    yield info


_KINDS: dict[str, Any] = {
    "gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily
}  # fmt: skip


def _named(kind: str, name: str, doc: str) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """A metric family under our name, and under vLLM's name if there is one; `labels` are added to the model's."""
    yield _KINDS[kind](f"slipstream_{name}", doc, labels=("model",)), ()
    if alias := _ALIASES.get(name):
        yield _KINDS[kind](f"vllm:{alias}", doc, labels=("model_name", "engine")), ("0",)


def _put(family: Any, labels: tuple[str, ...], histogram: BucketCounts) -> None:
    buckets, below = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), below))
    family.add_metric(labels, buckets, histogram.total)


# ProcessStats: what /proc says about a process. Linux only: elsewhere nothing is known.


class ProcessStats(msgspec.Struct, frozen=True):
    resident: int  # bytes
    virtual: int  # bytes
    cpu_seconds: float
    start_time: float  # seconds since 1970
    open_files: int
    max_files: int


def read_process(pid: int) -> ProcessStats | None:
    """None if there is no such process, or no /proc."""
    folder = Path("/proc") / str(pid)
    try:
        fields = (
            (folder / "stat").read_text(encoding="ascii").rpartition(") ")[2].split()
        )  # from the third field on: the process name before them may contain anything
        limits = (folder / "limits").read_text(encoding="ascii").splitlines()
        open_files = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    user, system, started, virtual, resident = (int(fields[index]) for index in (11, 12, 19, 20, 21))
    soft = next(line.split()[3] for line in limits if line.startswith("Max open files"))
    return ProcessStats(
        resident=resident * page,
        virtual=virtual,
        cpu_seconds=(user + system) / ticks,
        start_time=_boot_time() + started / ticks,
        open_files=open_files,
        max_files=int(soft) if soft.isdigit() else -1,
    )


def _boot_time() -> float:
    for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


# Metrics as Python objects, in the classes and under the names of vLLM's `get_metrics`.


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
