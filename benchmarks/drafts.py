"""Speculative decoding of one model: without drafts, with drafts that are all right or all wrong, and with a drafter.

    python benchmarks/drafts.py --model DIR --load-format dummy --rows 1 16 --num-drafts 4
    python benchmarks/drafts.py --model DIR --load-format dummy --speculative-config '{"method": "mtp"}' --rows 1
    python benchmarks/drafts.py --model DIR --load-format dummy --history 8192 --rows 16

All kinds run in one engine, in turns, on the same prompts (random token ids). Right drafts replay the answer of the run
without drafts; "own" are those of the engine's drafter (n-grams, if --speculative-config names no other), a fixed
number in each step. The temperature is so high that the noise decides the draw: with random weights in bfloat16 a
greedy answer would change with the rounding of each GEMM kernel, and the replayed drafts would be wrong. Times of a
step are medians on the device, of the later half of the steps, where all rows decode. With "turns", four steps with
right drafts follow four without, so that both kinds have the same keys and the same clock: alone, a kind that takes
more power may run at a lower clock than the other. With --history, the time of the n-gram search alone is measured, for
rows with so many tokens. Answers are not replayed in place of a drafter with a model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from slipstream import LLM, SamplingParams
from slipstream.base.errors import SlipstreamError
from slipstream.contracts.request import Request
from slipstream.record.step_log import StepLog, stop
from slipstream.runner.drafter import DraftBatch
from slipstream.scheduler.drafting import DraftPlanner
from slipstream.serve.cli.bench import bench_options
from slipstream.serve.cli.flags import add_engine_flags, engine_options

KINDS = ("none", "right", "turns", "wrong", "own", "adaptive")
REPLAYED = ("right", "turns", "wrong")
FIRST = 100  # the first token of prompt i is FIRST + i: a drafter finds its answer by it


class ReplayedAnswers:
    """A drafter that knows the answers, on the device. On CUDA it is one launch: its time counts as that of drafts."""

    always_runs = False
    reads_hidden = False
    fills_returned = False

    def __init__(self, runner: Any, texts: torch.Tensor, shift: int, vocab_size: int) -> None:
        """`texts` [prompts, length]: prompts and answers; `shift`: 0 for right drafts."""
        self.rows, self.history = runner.heads[0].rows, runner.store.history
        self.table = runner.input_batch.page_tables.tables[self.history.group]
        num, length = texts.shape
        later = torch.cat([texts[:, 1:], texts[:, -1:].expand(-1, self.rows.max_drafts)], 1)
        # [prompts * length, drafts] the tokens after each position
        self.after = ((later + shift) % vocab_size).unfold(1, self.rows.max_drafts, 1).flatten(0, 1).contiguous()
        # [vocabulary] the first of these of the prompt that begins with this token
        self.first = torch.zeros(vocab_size, dtype=torch.int64, device=texts.device)
        self.first[FIRST : FIRST + num] = torch.arange(num, device=texts.device) * length

    def propose(self, batch: DraftBatch, num_drafts: int) -> None:
        rows, table = batch.rows, self.rows
        if rows.is_cuda:
            from replay_kernel import replay_drafts

            state = table.next_tokens, table.computed, self.table, self.history.tokens
            replay_drafts(*state, rows, batch.offsets, self.first, self.after, num_drafts)
            return
        token = self.history.tokens[:, 0].index_select(0, self.table[:, 0].index_select(0, rows))
        places = self.first.index_select(0, token) + table.computed.index_select(0, rows)
        drafts = self.after[:, :num_drafts].index_select(0, places)
        target = rows if batch.offsets is None else torch.where(batch.offsets == 0, rows, len(table.computed) - 1)
        table.next_tokens[:, 1 : 1 + num_drafts].index_copy_(0, target, drafts)


class Turns:
    """Instead of `DraftPlanner.begin_plan`: four plans with drafts follow four without."""

    def __init__(self, planner: DraftPlanner, num_drafts: int) -> None:
        self.planner, self.num_drafts = planner, num_drafts
        self.num_plans = 0

    def __call__(self, running: Sequence[Request]) -> int:
        self.planner.num_drafts = self.num_drafts if self.num_plans & 4 else 0
        self.planner.num_proposed = self.num_drafts if self.num_plans + 1 & 4 else 0
        self.num_plans += 1
        return DraftPlanner.begin_plan(self.planner, running)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], metavar="N", help="(default: 1 16)")
    parser.add_argument("--num-drafts", type=int, default=4, metavar="K", help="drafts per row and step (default: 4)")
    parser.add_argument("--input-len", type=int, default=512, metavar="N", help="(default: 512)")
    parser.add_argument("--output-len", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs per kind (default: 3)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="(default: all that the drafter has)")
    parser.add_argument("--history", type=int, metavar="N", help="measure the n-gram search over so many tokens")
    add_engine_flags(parser, leave_out=("drafts",))
    args = parser.parse_args()
    options = bench_options(engine_options(args), detokenize=False) | {"enable_prefix_caching": False}
    spec = json.loads(options.get("speculative_config", '{"method": "ngram"}'))
    has_model = spec["method"] not in ("ngram", "suffix")
    args.kinds = args.kinds or [kind for kind in KINDS if not has_model or kind not in REPLAYED]
    if has_model and {*args.kinds} & {*REPLAYED}:
        parser.error(
            f"answers are replayed in place of n-grams, not of {spec['method']}; give --kinds none own adaptive"
        )
    try:
        options["speculative_config"] = spec | {"num_speculative_tokens": args.num_drafts}
        with LLM(**options) as llm:
            for num_rows in args.rows:
                if args.history is None:
                    generate(llm, num_rows, args)
                else:
                    search(llm, num_rows, args.history, args.num_drafts)
    except SlipstreamError as error:
        print(f"benchmarks/drafts.py: {error}", file=sys.stderr)
        return 2
    return 0


def generate(llm: LLM, num_rows: int, args: argparse.Namespace) -> None:
    core, runner = llm.core, llm.core.executor
    head, planner, vocab_size = runner.heads[0], core.scheduler.drafts, llm.config.model.info.vocab_size
    rng = random.Random(0)
    prompts = [[FIRST + i, *(rng.randrange(vocab_size) for _ in range(args.input_len - 1))] for i in range(num_rows)]
    params = SamplingParams(temperature=1000.0, seed=1, max_tokens=args.output_len, ignore_eos=True)
    own, adaptive, ordinary = head.drafter, planner.length, planner.begin_plan
    texts = None
    for kind in args.kinds:
        planner.length = adaptive if kind == "adaptive" else None
        planner.num_drafts = planner.num_proposed = 0 if kind == "none" else args.num_drafts
        planner.begin_plan = Turns(planner, args.num_drafts) if kind == "turns" else ordinary
        if texts is not None and kind in REPLAYED:
            head.drafter = ReplayedAnswers(runner, texts, int(kind == "wrong"), vocab_size)
        else:
            head.drafter = own
        captured = runner.graphs._captured.items()
        runner.graphs._captured = {key: work for key, work in captured if key[0] == "forward"}  # not drafts
        best, counts = float("inf"), planner.counts
        for trial in range(1 + args.repeats):  # the first one captures
            before, steps = (counts.num_rows, counts.num_drafts, counts.num_accepted), core.num_steps
            log, begin = StepLog({"": core}), time.perf_counter()
            results = llm.generate(prompts, params, use_tqdm=False)
            if trial:
                best = min(best, time.perf_counter() - begin)
            core.drain()
            stop({"": core})
        if texts is None:
            known = [result.prompt_token_ids + result.outputs[0].token_ids for result in results]
            texts = torch.tensor(known, device=head.rows.computed.device)
        num, drafted, accepted = (now - then for now, then in zip(vars_of(counts), before, strict=True))
        share = f"{accepted / drafted:>9.0%}{1 + accepted / num:>8.2f}" if drafted else " " * 17
        rate = num_rows * args.output_len / best
        plain, verify = (device_seconds(log, num_rows, each) for each in (0, args.num_drafts))
        took = f"{1e6 * (plain if math.isnan(verify) else verify):.0f} us"
        if kind == "turns":
            took = f"{1e6 * plain:.0f} and {1e6 * verify:.0f} us, {verify / plain:.3f} times"
        print(
            f"{num_rows:>5} rows {kind:<10}{1000 * best / args.output_len:>9.3f} ms/token{rate:>10.0f} out/s"
            f"{core.num_steps - steps:>7} steps of {took}{share}",
            flush=True,
        )
    head.drafter, planner.length, planner.begin_plan = own, adaptive, ordinary


def device_seconds(log: StepLog, num_rows: int, num_drafts: int) -> float:
    """Median time on the device of the later half of the steps that decode all rows, each with so many drafts: the
    clock may be lower just after the prompts."""
    tokens = num_rows * (1 + num_drafts)
    steps = [step for step in log.steps if step.rows == num_rows and not step.prefill_tokens]
    later = steps[len(steps) // 2 : -1]
    return median([step.end - step.start for step in later if step.tokens == tokens] or [math.nan])


def vars_of(counts: Any) -> tuple[int, int, int]:
    return counts.num_rows, counts.num_drafts, counts.num_accepted


def search(llm: LLM, num_rows: int, length: int, num_drafts: int) -> None:
    """Time of the search with rows of random tokens, few of which match."""
    runner = llm.core.executor
    head, history = runner.heads[0], runner.store.history
    device = head.rows.computed.device
    table = history.table
    width = -(-length // history.tokens.shape[1])
    pages = 1 + torch.arange(num_rows * width, device=device) % (len(history.tokens) - 1)
    table[:num_rows, :width] = pages.view(num_rows, width)
    history.tokens.random_(0, 50_000)
    head.rows.computed[:num_rows] = length - 1
    rows = torch.arange(num_rows, device=device)
    batch = DraftBatch(rows, None, rows * 0 + length, rows * 0, torch.empty(num_rows, 0), length, num_rows)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(10):
            head.drafter.propose(batch, num_drafts)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / 10)
    print(f"{num_rows:>5} rows x {length} tokens: {1e6 * min(seconds):.0f} us per search", flush=True)
    table[:num_rows], head.rows.computed[:num_rows] = 0, 0


if __name__ == "__main__":
    raise SystemExit(main())
