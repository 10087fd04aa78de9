"""Host time of one pooling request, from token ids to result, for an encoder.

  python benchmarks/pooling_host.py [--requests 4096] [--tokens 32] [--device cpu] [--json]

scripted   the executor returns prepared results at once: front end, scheduler and loop only
runner     the real runner with a model without layers: staging, copies and results included
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream import LLM
from slipstream.contracts.step import NO_INTS, StepPlan, StepResult

WIDTH = 384
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": WIDTH,
    "num_attention_heads": 12,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "vocab_size": 30_522,
}


class Scripted:
    """An executor with prepared results."""

    span = None

    def __init__(self) -> None:
        self.numbers = np.ones((4096, WIDTH), np.float32)
        self.count = 0

    def launch(self, plan: StepPlan) -> None:
        self.count = len(plan.rows)

    def finish(self, late: object = None) -> Any:
        count, numbers = self.count, self.numbers

        class Done:
            has_no_result = False
            interval = None

            def done(self) -> bool:
                return True

            def wait(self) -> StepResult:
                return StepResult(NO_INTS, np.zeros(0, np.bool_), pooled=tuple(numbers[:count]))

        return Done()

    def close(self) -> None: ...


class NoLayers(torch.nn.Module):
    """Constant hidden states, so that only pooling remains."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__()
        self.heads = model.heads
        self.hidden = torch.ones(65_536, WIDTH, device=device)

    def forward(self, context: Any) -> torch.Tensor:
        return self.hidden[: len(context.batch.ids)]


def measure(folder: str, kind: str, device: str, prompts: list[list[int]], depth: int, rounds: int) -> float:
    """Microseconds per request, best round."""
    options: dict[str, Any] = dict(load_format="dummy", skip_tokenizer_init=True, use_tqdm_on_load=False, num_threads=1)
    options |= dict(max_num_seqs=256, max_num_batched_tokens=8192, dtype="float32", device=device, depth=depth)
    with LLM(folder, task="embed", **options) as llm:
        runner: Any = llm.core.executor
        if kind == "scripted":
            runner.close()
            llm.core.executor, llm.core.recorder = Scripted(), None
        else:
            runner.model = NoLayers(runner.model, runner.device.torch_device)
        each = []
        for _ in range(rounds):
            start = time.perf_counter()
            results = llm.encode(prompts, pooling_task="embed", use_tqdm=False)
            each.append((time.perf_counter() - start) / len(prompts) * 1e6)
            assert len(results) == len(prompts) and results[-1].outputs.data.shape == (WIDTH,)
    return min(each) if rounds > 1 else statistics.median(each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(30_000) for _ in range(args.tokens)] for _ in range(args.requests)]
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for kind, depth in (("scripted", 1), ("runner", 0), ("runner", 1)):
            us = measure(folder, kind, args.device, prompts, depth, args.rounds)
            results[f"{kind}, depth {depth}"] = round(us, 2)
    if args.json:
        print(json.dumps(results))
        return
    print(f"{args.requests} requests of {args.tokens} tokens, {args.device}")
    for name, us in results.items():
        print(f"{name:20} {us:8.2f} us/request")


if __name__ == "__main__":
    main()
