"""Pooling throughput over a table of shapes, through `LLM.encode` with token prompts, on any device.

    python benchmarks/pooling.py --model DIR --load-format dummy --shapes mixed short32 long --depths 0 1
    python benchmarks/pooling.py --model DIR --load-format dummy --concurrency 64 --shapes short32 --depths 0 1

mixed: 2048 prompts of 16 to 512 tokens; short32: 4096 of 32; long: 1024 of 512. Prompts are random token ids. Reported
is the best of --repeats trials, each with its own prompts, after a warm-up. --concurrency keeps that many requests
active instead of submitting all at once. pooling_host.py measures the host time alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from slipstream.api.llm import LLM
from slipstream.front.pooling_inputs import PoolingPrompts
from slipstream.front.pooling_prompts import PoolingBatch
from slipstream.params.pooling import PoolingParams
from slipstream.serve.cli.flags import add_engine_flags, engine_options

SHAPES = {"mixed": (2048, 16, 512), "short32": (4096, 32, 32), "long": (1024, 512, 512)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--share", type=float, default=1.0, help="fraction of each shape's prompts, for a slow machine")
    parser.add_argument("--pooling-task", default=None, help="embed, token_embed, classify ...; default: the model's")
    parser.add_argument(
        "--depths", nargs="+", type=int, default=None, help="one engine per depth; default: of the device"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--concurrency", type=int, default=None, metavar="N", help="concurrent requests")
    add_engine_flags(parser)
    args = parser.parse_args()
    options = {"skip_tokenizer_init": True} | engine_options(args)
    print(f"{'shape':<10}{'depth':>6}{'seq/s':>11}{'tok/s':>12}{'us/request':>12}{'steps':>7}", flush=True)
    for depth in args.depths or [options.pop("depth", None)]:
        given = options if depth is None else options | {"depth": depth}
        with LLM(use_tqdm_on_load=False, **given) as llm:
            for shape in args.shapes:
                report(llm, shape, args)


def report(llm: LLM, shape: str, args: argparse.Namespace) -> None:
    num, shortest, longest = SHAPES[shape]
    num = max(int(num * args.share), 1)
    lengths = random.Random(0)
    sizes = [lengths.randint(shortest, min(longest, llm.config.scheduler.max_model_len)) for _ in range(num)]
    params = PoolingParams(task=args.pooling_task)
    best, steps = float("inf"), 0
    for trial in range(args.repeats + 1):
        tokens = np.random.default_rng(trial)
        prompts = [tokens.integers(5, llm.config.model.info.vocab_size, size).tolist() for size in sizes]
        if trial == 0:
            prompts = prompts[: max(num // 4, 1)]  # warm-up: kernels are compiled, graphs captured
        before, start = llm.core.num_steps, time.perf_counter()
        if args.concurrency is None:
            llm.encode(prompts, params, use_tqdm=False)
        else:
            closed_loop(llm, prompts, params, args.concurrency)
        seconds = time.perf_counter() - start
        if trial and seconds < best:
            best, steps = seconds, llm.core.num_steps - before
    print(
        f"{shape:<10}{llm.config.scheduler.depth:>6}{num / best:>11,.0f}{sum(sizes) / best:>12,.0f}"
        f"{best / num * 1e6:>12.1f}{steps:>7}",
        flush=True,
    )


def closed_loop(llm: LLM, prompts: list[list[int]], params: PoolingParams, concurrency: int) -> None:
    """`concurrency` clients, each of which sends its next request when the previous one has completed."""
    (served,) = llm.models.values()
    inputs, engine, client = served.require_pooling(), llm._engine, llm._inline()
    batches = [PoolingBatch(prompts, inputs.resolve(params))]
    feed: Iterator[Any] = iter(PoolingPrompts(inputs, batches, engine.new_id))
    under_way, held = 0, next(feed, None)
    with client.turn(), engine.read((), streaming=False) as stream:
        while held is not None or under_way:
            while held is not None and under_way < concurrency:
                engine.send(stream, *held)
                under_way += 1
                held = next(feed, None)
            client.step()
            under_way -= len(stream.mailbox.take())


if __name__ == "__main__":
    main()
