"""A rank that is killed under load: every request ends exactly once, the replica comes back, no process is left."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

from tiny import write_tiny

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


def test_requests_end_once_when_a_rank_is_killed(tmp_path):
    spec = importlib.util.spec_from_file_location("chaos", CHAOS)
    chaos = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chaos)
    folder = str(write_tiny(tmp_path, "llama"))
    sizes = ["--replicas", "1", "--ranks", "2", "--requests", "60", "--kills", "1", "--in-flight", "16", "--only-ranks"]
    ends, kills = asyncio.run(chaos.run(chaos.read_args(["--model", folder, *sizes])))
    assert kills == {"rank": 1}
    assert set(ends) <= {"answered", "lost"} and ends["answered"] >= 44  # at most those in flight had sent tokens
