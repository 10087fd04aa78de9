"""Named benchmark shapes. docs/performance.md has their figures."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.serve.bench.workload import Workload


class Shape(msgspec.Struct, frozen=True):
    workload: Workload
    params: dict[str, Any] = {}  # sampling parameters that differ from greedy


def _shape(num_prompts: int, input_len: int, output_len: int, range_ratio: float = 1.0, **params: Any) -> Shape:
    workload = Workload(num_prompts=num_prompts, input_len=input_len, output_len=output_len, range_ratio=range_ratio)
    return Shape(workload, params)


SHAPES: dict[str, Shape] = {
    "bs1": _shape(1, 128, 256),
    "bs16": _shape(16, 1024, 256),
    "offline": _shape(256, 512, 128),
    "decode": _shape(256, 128, 512),
    "nano": _shape(256, 1024, 1024, range_ratio=100 / 1024),
    "prefill": _shape(64, 4096, 16),
    "sample": _shape(256, 128, 256, temperature=0.8, top_p=0.95, top_k=50),
    "logprobs": _shape(64, 128, 256, logprobs=5),
    "pen512": _shape(128, 64, 512, repetition_penalty=1.1),
    "long": _shape(128, 64, 4096),
    "longpen": _shape(128, 64, 4096, repetition_penalty=1.1, presence_penalty=0.2),
}
