"""Writes logged steps in Chrome's trace format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.engine.step_log import StepTimes

_HOST, _DEVICE, _IDLE = 1, 2, 3  # threads of the trace
_TEXTS = {
    "turnaround": "turnaround",
    "host_late": "idle: the host was late",
    "output": "idle: the caller was late",
    "no_requests": "idle: no requests",
}


def chrome_trace(models: Sequence[str], steps: Sequence[StepTimes]) -> bytes:
    """A JSON document with one lane for the host, one for the device and one for its idle gaps."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "slipstream"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
            for tid, name in ((_HOST, "host"), (_DEVICE, "device"), (_IDLE, "device idle"))
        ),
    ]
    origin = min((min(step.launched - step.host, step.start - step.gap) for step in steps), default=0.0)
    last_end = origin
    for step in steps:
        args = {
            "step": step.number,
            "model": models[step.lane],
            "rows": step.rows,
            "tokens": step.tokens,
            "prefill_tokens": step.prefill_tokens,
            "drawn": step.drawn,
            "running": step.running,
            "waiting": step.waiting,
            **({"drafts": step.drafts, "accepted": step.accepted} if step.drafts else {}),
        }
        events.append(_slice(_HOST, f"launch {step.number}", step.launched - step.host, step.host, origin, args))
        name = "prefill" if step.prefill_tokens else "decode"
        events.append(_slice(_DEVICE, f"{name} {step.rows} rows", step.start, step.end - step.start, origin, args))
        if step.gap > 0:
            begin = max(step.start - step.gap, last_end)  # the two clocks may differ slightly
            details = {"cause": step.cause, "step": step.number, "seconds": step.gap}
            events.append(_slice(_IDLE, _TEXTS[step.cause], begin, step.start - begin, origin, details))
        if step.late > 0:
            details = {"cause": "grammar", "step": step.number, "seconds": step.late}
            events.append(_slice(_IDLE, "idle: late masks", step.end - step.late, step.late, origin, details))
        counts = {"running": step.running, "waiting": step.waiting}
        events.append({"ph": "C", "name": "requests", "pid": 1, "ts": _us(step.start - origin), "args": counts})
        if step.num_pages:
            used = {"used": step.num_pages - step.free_pages}
            events.append({"ph": "C", "name": "pages", "pid": 1, "ts": _us(step.start - origin), "args": used})
        last_end = step.end
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _slice(tid: int, name: str, start: float, seconds: float, origin: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": _us(start - origin),
        "dur": _us(max(0.0, seconds)),
        "args": args,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
