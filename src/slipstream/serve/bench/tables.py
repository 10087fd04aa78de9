"""Formats benchmark results as text for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream.serve.bench.measure import DraftTrial, Spread, Trial
from slipstream.serve.bench.startup import Startup
from slipstream.serve.bench.workload import Workload
from slipstream.serve.charts import Chart

if TYPE_CHECKING:
    from slipstream.config.config import EngineConfig
    from slipstream.record.device_timing import DeviceTime

COLUMNS = (
    f"{'shape':<10}{'out/s':>10}{'total/s':>11}{'ms/token':>10}{'itl p50':>9}{'p99':>8}{'ttft p50':>10}{'p99':>9}"
    f"{'steps':>7}{'busy':>7}"
)


def show(text: str, *, beside_json: bool) -> None:
    """Prints to standard output, or to standard error where standard output has JSON."""
    print(text, file=sys.stderr if beside_json else sys.stdout, flush=True)


def engine_line(config: EngineConfig) -> str:
    return f"{config.model.name} on {config.device.kind}, {config.model.dtype}, depth {config.scheduler.depth}"


def shape_line(workload: Workload) -> str:
    spread = "" if workload.range_ratio == 1 else f", lengths from {workload.range_ratio:g} of that"
    return f"{workload.num_prompts} x {workload.input_len} -> {workload.output_len}{spread}"


def trial_line(name: str, best: Trial) -> str:
    """One row of the table. ms/token: the call's time divided by the tokens of one output; busy: device busy share."""
    per_token = 1000 * best.seconds * best.num_requests / best.output_tokens
    gaps = best.itl_ms
    between = f"{gaps.p50:>9.2f}{gaps.p99:>8.2f}" if gaps else " " * 17
    return (
        f"{name:<10}{best.output_per_second:>10.0f}{best.total_per_second:>11.0f}{per_token:>10.3f}{between}"
        f"{best.ttft_ms.p50:>10.1f}{best.ttft_ms.p99:>9.1f}{best.num_steps:>7}{best.device.busy_share:>7.1%}"
    )


def trial_table(best: Trial, startup: float) -> str:
    rows = [
        ("start-up", f"{startup:.2f} s"),
        ("time", f"{best.seconds:.3f} s in {best.num_steps} steps"),
        ("requests", f"{best.requests_per_second:.2f} /s"),
        ("output tokens", f"{best.output_per_second:.1f} /s"),
        ("total tokens", f"{best.total_per_second:.1f} /s"),
        ("device", device_line(best.device)),
    ]
    if best.drafts is not None:
        rows.append(("drafts", draft_line(best.drafts)))
    lines = [f"  {name:<18}{value}" for name, value in rows]
    lines.append(f"  {'ms':<18}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, times in (
        ("first token", best.ttft_ms),
        ("between tokens", best.itl_ms),
        ("whole request", best.request_ms),
    ):
        if times is not None:
            lines.append(f"  {name:<18}{_columns(times)}")
    return "\n".join(lines)


def draft_line(drafts: DraftTrial) -> str:
    """Accepted drafts, tokens per row and step, and the share of rows that accepted the first draft, the second ..."""
    rows = drafts.num_rows
    by_position = " ".join(f"{count / rows:.0%}" for count in drafts.accepted_at)
    share, per_row = drafts.num_accepted / drafts.num_drafts, 1 + drafts.num_accepted / rows
    return (
        f"{share:.0%} of {drafts.num_drafts} accepted, {per_row:.2f} tokens per row and step, by position {by_position}"
    )


def device_line(time: DeviceTime) -> str:
    """The device's busy share while there were requests, and idle time by cause."""
    total = time.busy + time.idle
    if not total:
        return "no step was timed"
    causes = {
        "turnaround": time.turnaround,
        "host late": time.host_late,
        "output": time.output,
        "grammar": time.grammar,
    }
    idle = [f"{name} {seconds / total:.1%}" for name, seconds in causes.items() if seconds >= 0.0005 * total]
    return f"busy {time.busy_share:.1%}" + (f" (idle: {', '.join(idle)})" if idle else "")


def step_table(time: DeviceTime) -> str:
    num = max(time.num_steps, 1)
    return "\n".join(
        f"  {name:<18}{value}"
        for name, value in (
            ("steps", f"{time.num_steps}"),
            ("host", f"{1e6 * time.host / num:.0f} us per step: plan, launch, commit"),
            ("device", f"{1e6 * time.busy / num:.0f} us per step, {device_line(time)}"),
        )
    )


def long_table(trials: dict[str, Trial]) -> str:
    positions = sorted({position for trial in trials.values() for position in trial.itl_at_ms})
    lines = [
        f"  {'':<12}{'out/s':>10}"
        + "".join(f"{f'at {position}':>12}" for position in positions)
        + "   ms between tokens"
    ]
    if not positions:
        lines = [f"  {'':<12}{'out/s':>10}   outputs are too short to compare inter-token latency by position"]
    for name, trial in trials.items():
        gaps = [trial.itl_at_ms.get(position) for position in positions]
        times = "".join(f"{'-':>12}" if gap is None else f"{gap:>12.3f}" for gap in gaps)
        lines.append(f"  {name:<12}{trial.output_per_second:>10.0f}{times}")
    return "\n".join(lines)


def startup_table(starts: list[Startup]) -> str:
    lines = [f"  {'seconds':<10}{'import':>10}{'start':>10}{starts[0].answer:>10}{'total':>10}"]
    for start in starts:
        times: tuple[Any, ...] = (start.import_seconds, start.start_seconds, start.answer_seconds, start.total)
        lines.append(f"  {'cold' if start.cold else 'warm':<10}" + "".join(f"{value:>10.2f}" for value in times))
    return "\n".join(lines)


def throughput_chart(trials: Mapping[str, Trial]) -> Chart:
    return Chart("output tokens per second", tuple((name, each.output_per_second) for name, each in trials.items()))


def latency_chart(times: Mapping[str, Spread | None], name: str = "") -> Chart:
    """Percentiles of each kind of time."""
    rows = [
        (f"{kind} {point}", getattr(spread, point))
        for kind, spread in times.items()
        if spread is not None
        for point in ("p50", "p90", "p99")
    ]
    return Chart(f"{name}: latency" if name else "latency", tuple(rows), "ms")


def trial_charts(trials: Mapping[str, Trial]) -> list[Chart]:
    """Throughput of all trials, then latencies of each."""
    charts = [throughput_chart(trials)]
    for name, trial in trials.items():
        charts.append(latency_chart({"first token": trial.ttft_ms}, name))
        charts.append(latency_chart({"between tokens": trial.itl_ms}, name))
    return [chart for chart in charts if chart.rows]


def _columns(times: Spread) -> str:
    return "".join(f"{value:>10.2f}" for value in (times.mean, times.p50, times.p90, times.p99))
