"""TorchProfiler: records the operations of a device with torch's profiler, into a trace file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


class TorchProfiler:
    def __init__(self, run: Callable[[Callable[[], None]], None], kind: str, folder: Path, **how: Any) -> None:
        """`run`: runs a function in the thread of the device; `kind`: of the device; `how`: arguments of
        torch.profiler.profile."""
        self._run = run
        self._folder = folder
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]
        self._profile = profile(activities=activities, **how)
        run(self._profile.start)  # it records the thread that starts it

    def stop(self, prefix: str = "") -> Path:
        """Writes a trace for ui.perfetto.dev, and returns its path."""
        self._run(self._profile.stop)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{prefix}{time.time_ns()}.pt.trace.json.gz"
        self._profile.export_chrome_trace(str(path))
        return path
