"""Measures start-up time in new processes: import, start, and first answer.

A cold start has no compiled kernels: the caches of Triton and of our C kernels are empty folders. The page cache of the
operating system is not dropped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import msgspec

from slipstream.base.errors import SlipstreamError
from slipstream.base.processes import child_environment

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
