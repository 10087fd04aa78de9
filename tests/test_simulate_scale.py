"""The estimates in docs/scale.md are the figures that benchmarks/simulate_scale.py prints."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYOUTS = {  # in the page, and in the output
    "replicas": "replicas",
    "tensor parallel 2": "tensor parallel 2",
    "tensor parallel 8": "tensor parallel 8",
    "experts over 8 engines": "experts over 8, all-gather",
    "experts over 64 engines, gathered from all": "experts over 64, all-gather",
    "experts over 64 engines, all-to-all (not built)": "experts over 64, all-to-all",
}


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "scale.md").read_text()


@pytest.fixture
def printed(capsys):
    runpy.run_path(str(ROOT / "benchmarks" / "simulate_scale.py"), run_name="__main__")
    return capsys.readouterr().out


def is_rounded(written: str, value: float) -> bool:
    """Whether `written` is the value with fewer digits; the output has two after the point."""
    return abs(float(written) - value) <= 0.5 * 10.0 ** -len(written.partition(".")[2]) + 0.0051


def test_layouts_of_8_and_64_gpus(page, printed):
    found, model = {}, ""
    for line in printed.splitlines():
        if own := re.match(r" *(\d+) GPUs, (.+): +([\d,]+) +([\d.]+)$", line):
            found[model, own[2], int(own[1])] = int(own[3].replace(",", "")), float(own[4])
        else:
            model = line.partition(",")[0]
    rows = re.findall(r"(?m)^\| (Qwen3-\S+)? ?\| (.+?) \| ([\d,]+|–) \| ([\d,]+) \| ([\d.]+) \|$", page)
    assert [row[1] for row in rows if row[1] != "replicas"] == [*LAYOUTS][1:]
    for named, layout, *counts, step in rows:
        model = named or model
        for num_gpus, count in zip((8, 64), counts, strict=True):
            if count != "–":
                tokens, milliseconds = found[model, LAYOUTS[layout], num_gpus]
                assert int(count.replace(",", "")) == round(tokens, -3) and is_rounded(step, milliseconds)
