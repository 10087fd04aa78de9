"""`slipstream bench`: how fast a model runs here, on random prompts of chosen lengths."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from slipstream.errors import InvalidOption
from slipstream.params import SamplingParams
from slipstream.serve.bench.measure import Advance, Spread, Trial, measure
from slipstream.serve.bench.workload import Workload
from slipstream.serve.cli.flags import add_engine_flags, add_sampling_flags, engine_options, sampling_changes
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.config.config import EngineConfig

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "bench",
        help="measure throughput and latency",
        description="Runs random prompts and reports throughput, time to the first token, and time between tokens. "
        "Any model folder will do, also without weights (--load-format dummy) or a tokenizer. Drawing is greedy unless "
        "a sampling flag says otherwise, and texts go on past the end token. With all prompts at once it measures "
        "throughput; with --concurrency 1 it measures latency.",
        usage="slipstream bench [flags]",
        allow_abbrev=False,
    )
    command.add_argument("--num-prompts", type=int, default=32, metavar="N", help="requests (default: 32)")
    command.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens of a prompt (default: 128)")
    command.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens of an answer (default: 64)")
    command.add_argument(
        "--range-ratio",
        type=float,
        default=1.0,
        metavar="X",
        help="spread lengths evenly from this share of the full length up to it (default: 1, all of them full)",
    )
    command.add_argument("--random-seed", type=int, default=0, metavar="N", help="of lengths and tokens (default: 0)")
    command.add_argument("--concurrency", type=int, metavar="N", help="requests under way at once (default: all)")
    command.add_argument("--repeats", type=int, default=1, metavar="N", help="trials; the best counts (default: 1)")
    command.add_argument("--no-warmup", action="store_true", help="let the first trial pay for first uses")
    command.add_argument("--detokenize", action="store_true", help="make text too; needs the model's tokenizer")
    command.add_argument("--logprobs", type=int, metavar="N", help="likeliest tokens to report with each token")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_sampling_flags(command, max_tokens=None, names=SAMPLING)
    add_engine_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    for name in ("concurrency", "repeats"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise InvalidOption(f"{name} is {value}; give a whole number from 1 up")
    workload = Workload(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=args.range_ratio,
        seed=args.random_seed,
    )
    params = bench_params(logprobs=args.logprobs, **sampling_changes(args))
    start = time.perf_counter()
    llm = opener(**bench_options(engine_options(args), detokenize=args.detokenize))
    startup = time.perf_counter() - start
    with closing(llm), progress(workload.num_prompts * args.repeats) as advance:
        trials = measure(
            llm,
            workload,
            params,
            repeats=args.repeats,
            warmup=not args.no_warmup,
            concurrency=args.concurrency,
            detokenize=args.detokenize,
            advance=advance,
        )
    if args.json:
        facts = {"startup_seconds": startup, "engine": engine_facts(llm.config), "workload": workload.facts()}
        print(json.dumps(facts | trials[0].facts() | {"trial_seconds": [trial.seconds for trial in trials]}))
    else:
        print_table(llm.config, workload, trials, startup)
    return 0


def bench_params(**changes: Any) -> SamplingParams:
    """Greedy and past the end token unless told otherwise, so that lengths are what was asked for."""
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | changes))


def bench_options(given: dict[str, Any], *, detokenize: bool) -> dict[str, Any]:
    """Token ids alone unless text is wanted, and as long a context as fits."""
    return {"skip_tokenizer_init": not detokenize, "max_model_len": "auto"} | given


def engine_facts(config: EngineConfig) -> dict[str, Any]:
    scheduler = config.scheduler
    return {
        "model": config.model.name,
        "device": config.device.kind,
        "num_threads": config.device.num_threads,
        "dtype": config.model.dtype,
        "load_format": config.model.load_format,
        "depth": scheduler.depth,
        "max_model_len": scheduler.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "num_pages": config.cache.num_pages - 1,
        "page_size": config.cache.page_size,
    }


def print_table(config: EngineConfig, workload: Workload, trials: list[Trial], startup: float) -> None:
    best = trials[0]
    spread = "" if workload.range_ratio == 1 else f", lengths from {workload.range_ratio:g} of that"
    print(
        f"{config.model.name} on {config.device.kind}, {config.model.dtype}, depth {config.scheduler.depth}: "
        f"{workload.num_prompts} x {workload.input_len} -> {workload.output_len}{spread}"
        + (f", best of {len(trials)}" if len(trials) > 1 else "")
    )
    rows = [
        ("start-up", f"{startup:.2f} s"),
        ("time", f"{best.seconds:.3f} s in {best.num_steps} steps"),
        ("requests", f"{best.requests_per_second:.2f} /s"),
        ("output tokens", f"{best.output_per_second:.1f} /s"),
        ("total tokens", f"{best.total_per_second:.1f} /s"),
    ]
    for name, value in rows:
        print(f"  {name:<18}{value}")
    print(f"  {'ms':<18}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, times in (
        ("first token", best.ttft_ms),
        ("between tokens", best.itl_ms),
        ("whole request", best.request_ms),
    ):
        if times is not None:
            print(f"  {name:<18}{_columns(times)}")


def _columns(times: Spread) -> str:
    return "".join(f"{value:>10.2f}" for value in (times.mean, times.p50, times.p90, times.p99))


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """A bar on standard error; nothing where that is no terminal."""
    if not sys.stderr.isatty():
        yield lambda tokens: None
        return
    from rich.console import Console  # only an interactive terminal pays for the import
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda tokens: bar.advance(task)
