"""Host time of one step: CPU time of the calling thread in plan + launch + commit, with a model without layers.

    python benchmarks/step_overhead.py [--rows 8 256] [--steps 400] [--logprobs 5] [--json]

At depth 1 the device is another thread, so only host time is counted; at depth 0 the small operations of the device run
in the same thread and are counted too. Also shown: the scheduler's part, and the time of a front end to receive the
outputs of a step, in the same thread or in another process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from slipstream import LLM, SamplingParams
from slipstream.contracts.messages import Submit

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 4096,
    "vocab_size": 64,
}


class NoLayers:
    """A model without layers: constant logits."""

    def __init__(self) -> None:
        self.table = torch.zeros(1024, 64)

    def __call__(self, context: Any) -> torch.Tensor:
        return self.table[: len(context.batch.ids), :16]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[: len(hidden)]


def measure(folder: str, rows: int, depth: int, steps: int, params: SamplingParams) -> dict[str, float]:
    options: dict[str, Any] = dict(load_format="dummy", skip_tokenizer_init=True, use_tqdm_on_load=False, num_threads=1)
    with LLM(
        folder, max_num_seqs=rows, num_pages=rows * 64, max_num_batched_tokens=1024, depth=depth, **options
    ) as llm:
        core = llm.core
        core.executor.model = core.executor.heads[0].model = NoLayers()  # type: ignore[attr-defined]
        front = llm._engine
        stream = front.read((), streaming=False)
        for i in range(rows):
            submit = Submit(f"r{i}", [1 + i % 60] * 8, params.with_changes(max_tokens=steps + 60), time.time())
            core.submit(submit)
            front.open(stream, submit, None)
        for _ in range(30):
            front.receive(core.step())
        whole, planning, hearing = [], [], []
        plan, commit = core.scheduler.plan, core.scheduler.commit

        def timed(function: Any) -> Any:
            def call(*args: Any) -> Any:
                start = time.thread_time_ns()
                try:
                    return function(*args)
                finally:
                    planning[-1] += time.thread_time_ns() - start

            return call

        core.scheduler.plan, core.scheduler.commit = timed(plan), timed(commit)  # type: ignore[method-assign]
        while len(whole) < steps:
            planning.append(0)
            start = time.thread_time_ns()
            outputs = core.step()
            spent = time.thread_time_ns() - start
            if not outputs:  # on a busy machine the device may be late, and the next launch is delayed
                planning.pop()
                continue
            whole.append(spent)
            assert len(outputs) == rows
            start = time.thread_time_ns()
            front.receive(outputs)
            hearing.append(time.thread_time_ns() - start)
    return {
        "rows": rows,
        "depth": depth,
        "host_us": round(statistics.median(whole) / 1000, 1),
        "scheduler_us": round(statistics.median(planning) / 1000, 1),
        "front_us": round(statistics.median(hearing) / 1000, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--logprobs", type=int, metavar="K", help="logprobs of the K most likely tokens per row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for depth in (1, 0):
            for rows in args.rows:
                params = SamplingParams(temperature=0, ignore_eos=True, logprobs=args.logprobs)
                results.append(measure(folder, rows, depth, args.steps, params))
    if args.json:
        print(json.dumps(results))
        return
    print(f"{'rows':>6} {'depth':>6} {'host us/step':>14} {'scheduler part':>16} {'front end':>10}")
    for r in results:
        print(f"{r['rows']:>6} {r['depth']:>6} {r['host_us']:>14} {r['scheduler_us']:>16} {r['front_us']:>10}")


if __name__ == "__main__":
    main()
