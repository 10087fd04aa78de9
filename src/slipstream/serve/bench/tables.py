"""Formats benchmark results as text for a terminal."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.base.errors import InvalidOption, SlipstreamError
from slipstream.base.processes import child_environment
from slipstream.serve.bench.measure import DraftTrial, Spread, Trial, Workload

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


# Bar charts: as Unicode text for a terminal, and as SVG.

_EIGHTHS = " ▏▎▍▌▋▊▉"
_FILLS = "█▓▒░"
_BAR, _STACKED_BAR = 40, 60  # characters
_PICTURE = 720  # width in pixels


class Chart(msgspec.Struct, frozen=True):
    """Bars from 0 to the largest value."""

    title: str
    rows: tuple[tuple[str, float], ...]  # label and value
    unit: str = ""


def bar(share: float, width: int) -> str:
    """A bar of `share` of `width` characters, in steps of an eighth of a character."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def text_chart(chart: Chart) -> str:
    most = max((value for _, value in chart.rows), default=0.0) or 1.0
    label_width = max((len(label) for label, _ in chart.rows), default=0)
    lines = [chart.title]
    for label, value in chart.rows:
        lines.append(f"  {label:<{label_width}} {value:>12.2f} {chart.unit:<6} {bar(value / most, _BAR)}".rstrip())
    return "\n".join(lines)


def stacked_bar(parts: Sequence[tuple[str, float]]) -> tuple[str, str]:
    """One bar of all parts, and its legend. Small parts are joined to "other"."""
    total = sum(value for _, value in parts) or 1.0
    shown = sorted((part for part in parts if part[1] >= 0.04 * total), key=lambda part: -part[1])[: len(_FILLS) - 1]
    rest = total - sum(value for _, value in shown)
    if rest > 0:
        shown.append(("other", rest))
    ends, line = 0.0, ""
    for (_, value), fill in zip(shown, _FILLS, strict=False):
        ends += value
        line += fill * (round(ends / total * _STACKED_BAR) - len(line))
    legend = "  ".join(f"{fill} {name} {value / total:.0%}" for (name, value), fill in zip(shown, _FILLS, strict=False))
    return line, legend


def svg_charts(charts: Sequence[Chart]) -> str:
    """A picture of all charts, one below the other."""
    from html import escape  # only needed here

    left, height, y = 150, 20, 30
    parts: list[str] = []
    for chart in charts:
        parts.append(f'<text x="10" y="{y}" font-weight="bold">{escape(chart.title)}</text>')
        y += 12
        most = max((value for _, value in chart.rows), default=0.0) or 1.0
        for label, value in chart.rows:
            length = value / most * (_PICTURE - left - 130)
            text = f"{value:,.2f} {chart.unit}".strip()
            parts.append(f'<text x="10" y="{y + 14}">{escape(label)}</text>')
            parts.append(f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="{height - 5}" fill="#0a7f83"/>')
            parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 14}">{escape(text)}</text>')
            y += height
        y += 30
    style = 'font-family="system-ui, sans-serif" font-size="13"'
    size = f'width="{_PICTURE}" height="{y}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_PICTURE} {y}" {style}>'
    back = f'<rect {size} fill="white"/>'
    return "\n".join([opening, back, *parts, "</svg>", ""])


# Measures start-up time in new processes: import, start, and first answer.
#
# A cold start has no compiled kernels: the caches of Triton and of our C kernels are empty folders. The page cache of
# the operating system is not dropped.

_PROGRAM = """
import json, sys, time
start = time.perf_counter()
from slipstream import LLM, SamplingParams
LLM
imported = time.perf_counter()
llm = LLM(**json.loads(sys.argv[1]), use_tqdm_on_load=False)
ready = time.perf_counter()
prompt = [1 + i % 50 for i in range(32)]
if llm.config.model.generates:
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False)
else:
    llm.encode([prompt], use_tqdm=False)
answered = time.perf_counter()
answer = "2 tokens" if llm.config.model.generates else "1 result"
print(json.dumps([answer, imported - start, ready - imported, answered - ready]))
llm.close()
"""


class Startup(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    cold: bool
    import_seconds: float
    start_seconds: float  # until ready
    answer: str  # describes the first answer
    answer_seconds: float

    @property
    def total(self) -> float:
        return self.import_seconds + self.start_seconds + self.answer_seconds


def measure_startup(options: dict[str, Any], notify: Callable[[str], None] = lambda text: None) -> list[Startup]:
    """Measures a cold start, then a warm one with the caches that it filled."""
    with tempfile.TemporaryDirectory() as folder:
        env = child_environment() | {
            "TRITON_CACHE_DIR": os.path.join(folder, "triton"),
            "XDG_CACHE_HOME": os.path.join(folder, "cache"),
        }
        found = []
        for cold in (True, False):
            notify("cold start" if cold else "warm start")
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM, json.dumps(options)], env=env, capture_output=True, encoding="utf-8"
            )
            if done.returncode:
                raise SlipstreamError(f"the engine did not start: {done.stderr.strip().splitlines()[-1]}")
            answer, *times = json.loads(done.stdout.splitlines()[-1])
            seconds = dict(zip(("import_seconds", "start_seconds", "answer_seconds"), times, strict=True))
            found.append(Startup(cold=cold, answer=answer, **seconds))
        return found


# Measures a GPU's current GEMM and copy rates, by which GPUs of one type differ by some percent.

SIZE = 8192
"""m, n and k of the GEMM."""
COPIED = 1 << 28
"""Bytes of a copy: more than the L2 cache, and small enough to fit beside an engine."""
LOAD = 1.0
"""Seconds of GEMMs before the timing, since the clock follows the power draw."""
TIMED = 0.2
"""Seconds of each timing."""

Operation = Callable[[], object]
Clock = Callable[[Operation, int], float]
"""Returns the device seconds of `count` calls in a row."""


class GpuRates(msgspec.Struct, frozen=True):
    product_tflops: float  # sustained, bfloat16, random values
    copy_tbs: float  # TB/s, read and written together

    def __str__(self) -> str:
        return f"this GPU reaches {self.product_tflops:.0f} TFLOP/s and {self.copy_tbs:.2f} TB/s"


def check_gpu(device: str) -> None:
    """Raises if the device is not a CUDA GPU, before a model is loaded."""
    from slipstream.device.device import detect_machine  # imports torch

    if (kind := detect_machine(device).kind) != "cuda":
        raise InvalidOption(f"--machine is for CUDA GPUs, and this engine runs on {kind}; remove it")


def measure_gpu() -> GpuRates:
    """Runs the measurements, about 1.5 s, and waits for them."""
    import torch  # not needed for --help

    def clock(operation: Operation, count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            operation()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    x, weight, out = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    source, target = (torch.zeros(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    product = sustained(lambda: torch.mm(x, weight.t(), out=out), LOAD, clock)
    copy = sustained(lambda: target.copy_(source), 0.0, clock)
    return rates(product, copy)


def rates(product: float, copy: float) -> GpuRates:
    """Computes the rates from the seconds of one GEMM and one copy."""
    return GpuRates(2 * SIZE**3 / product / 1e12, 2 * COPIED / copy / 1e12)


def sustained(operation: Operation, load: float, clock: Clock) -> float:
    """Returns the mean seconds of one call, over `TIMED` seconds after `load` seconds of calls."""
    clock(operation, 1)  # first-use costs: libraries are loaded
    once = clock(operation, 4) / 4
    clock(operation, math.ceil(load / once))
    count = math.ceil(TIMED / once)
    return clock(operation, count) / count
