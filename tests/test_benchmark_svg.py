"""The picture in the README shows the figures of docs/benchmark.json, and those are the ones of docs/performance.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from child import child_env

ROOT = Path(__file__).parent.parent


def test_the_picture_is_what_the_script_makes_of_the_figures() -> None:
    script = ROOT / "scripts/benchmark_svg"
    ended = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, env=child_env())
    assert ended.returncode == 0, ended.stderr


def test_the_figures_are_those_of_the_performance_page() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    measured = set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", page))
    groups = json.loads((ROOT / "docs/benchmark.json").read_text(encoding="utf-8"))["groups"]
    figures = [f"{row[side]:,}" for group in groups for row in group["rows"] for side in ("ours", "peer")]
    assert figures
    assert [figure for figure in figures if figure not in measured] == []
