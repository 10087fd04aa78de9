"""A long generation with and without logits processors: output tokens per second, and the first and last steps' times.

    python benchmarks/logits_processors.py [--model DIR] [--rows 8] [--tokens 512] [--load-format dummy]

The variants run in turns in one process. `watermark`: code that sees logits and raises a part of them, chosen by the
last token; `allowed`: code that sees tokens and returns allowed ids; `bias`: code that sees tokens and returns 16
numbers; `one of all`: only the first row has the watermark. The columns `first` and `last` are the median milliseconds
of a step in the first and the last quarter: without a difference, the cost of a step does not depend on the number of
tokens before it, besides attention, which `none` shows.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from slipstream import LLM, SamplingParams
from slipstream.contracts.messages import Submit


def variants(vocab_size: int) -> dict[str, Callable[..., Any] | None]:
    tables: dict[str, torch.Tensor] = {}

    def watermark(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if "green" not in tables:
            generator = torch.Generator().manual_seed(0)
            tables["green"] = (torch.rand(64, vocab_size, generator=generator) < 0.5).to(logits) * 2.0
        return logits + tables["green"][(output_ids[-1] if output_ids else 0) % 64]

    def allowed(output_ids: list[int]) -> range:
        return range((output_ids[-1] if output_ids else 0) % 2, vocab_size, 2)

    def bias(output_ids: list[int]) -> dict[int, float]:
        start = output_ids[-1] if output_ids else 0
        return {(start + i) % vocab_size: 1.0 for i in range(16)}

    allowed.needs = bias.needs = "tokens"  # type: ignore[attr-defined]
    return {"none": None, "allowed": allowed, "bias": bias, "watermark": watermark, "one of all": watermark}


def measure(llm: LLM, name: str, code: Callable[..., Any] | None, rows: int, tokens: int) -> dict[str, Any]:
    core = llm.core
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True, detokenize=False)
    marked = params if code is None else params.with_changes(logits_processors=[code])
    for row in range(rows):
        own = params if name == "one of all" and row else marked
        core.submit(Submit(f"{name}-{row}", [5 + row, 6, 7], own, time.time()))
    steps, num = [], 0
    start = last = time.perf_counter()
    while core.has_requests():
        num += sum(len(output.token_ids) for output in core.step())
        now = time.perf_counter()
        steps.append(now - last)
        last = now
    quarter = max(1, len(steps) // 4)
    first, final = (1e3 * statistics.median(part) for part in (steps[:quarter], steps[-quarter:]))
    return {"name": name, "rate": num / (last - start), "first": first, "last": final}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with LLM(args.model, load_format=args.load_format, max_num_seqs=args.rows, use_tqdm_on_load=False) as llm:
        kinds = variants(llm.config.model.info.vocab_size)
        for name, code in kinds.items():  # compiles and captures
            measure(llm, name, code, args.rows, 8)
        results = [
            measure(llm, name, code, args.rows, args.tokens) for _ in range(args.rounds) for name, code in kinds.items()
        ]
    print(f"{'variant':>12} {'tokens/s':>10} {'first ms':>9} {'last ms':>9}")
    for name in kinds:
        best = max((result for result in results if result["name"] == name), key=lambda result: result["rate"])
        print(f"{name:>12} {best['rate']:>10.0f} {best['first']:>9.2f} {best['last']:>9.2f}")


if __name__ == "__main__":
    main()
