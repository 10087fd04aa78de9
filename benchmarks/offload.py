"""Decode steps with weights in host memory (`cpu_offload_gb`): time per step, and the share of the bus that they use.

    python benchmarks/offload.py --gib 4 --rows 1 16

Random weights in the shape of Qwen3-8B. A step copies the weights of all offloaded layers once. The speed of the bus is
that of copies of one pinned buffer, in the same process.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import torch
from cache_tier import SHAPE

from slipstream import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="device memory to save (default: 4)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="requests at once (default: 1 16)")
    parser.add_argument("--output", type=int, default=32, metavar="TOKENS", help="(default: 32)")
    parser.add_argument("--layers", type=int, default=36, help="(default: 36)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": args.layers}))
        options = dict(load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=max(args.rows))
        with LLM(folder, cpu_offload_gb=args.gib, **options) as llm:
            streamed = llm.core.executor.model.streamed
            bus = bus_speed()
            print(f"{streamed.num_bytes / 1e9:.2f} GB per step; the bus copies {bus / 1e9:.1f} GB/s")
            for rows in args.rows:
                seconds = step_time(llm, rows, args.output)
                speed = streamed.num_bytes / seconds
                print(
                    f"{rows:4} rows {1000 * seconds:8.1f} ms per step {speed / 1e9:6.1f} GB/s {100 * speed / bus:5.1f}%"
                )


def step_time(llm: LLM, rows: int, num_tokens: int) -> float:
    """Seconds of a decode step: the difference between long and short outputs of the same prompts, best of two."""
    chance = random.Random(rows)
    prompts = [[chance.randrange(1, 150000) for _ in range(64)] for _ in range(rows)]
    times = []
    for count in (1, num_tokens + 1):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        best = float("inf")
        for _ in range(2):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            best = min(best, time.perf_counter() - start)
        times.append(best)
    return (times[1] - times[0]) / num_tokens


def bus_speed(num_bytes: int = 1 << 29) -> float:
    """Bytes per second from pinned host memory to the device."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        begin.record()
        for _ in range(4):
            target.copy_(host, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
    return 4000 * num_bytes / begin.elapsed_time(end)


if __name__ == "__main__":
    main()
