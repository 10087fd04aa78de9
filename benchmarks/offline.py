"""Throughput and latency of a model over a table of shapes, all prompts at once, on any device.

    python benchmarks/offline.py --model DIR --load-format dummy --shapes bs1 offline decode --json out.json

Prompts are random token ids. Sampling is greedy unless the shape says otherwise and ignores the end token; text is made
only with --detokenize. Reported is the best of --repeats trials, each with its own prompts, after a warm-up: on a
GPU with all prompts of the shape and short outputs, since every size of step is captured at its first use.
`trial_seconds` of the file has all trials in their order. Engine flags are those of `slipstream bench`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from slipstream.base.errors import InvalidOption, SlipstreamError
from slipstream.serve.bench.measure import SHAPES, Trial, best_of, measure
from slipstream.serve.bench.tables import check_gpu, measure_gpu
from slipstream.serve.cli.bench import MACHINE_HELP, bench_options, bench_params, engine_summary, progress
from slipstream.serve.cli.flags import add_engine_flags, engine_options

COLUMNS = (
    f"{'shape':<10}{'out/s':>10}{'total/s':>11}{'ms/token':>10}{'itl p50':>9}{'p99':>8}{'ttft p50':>10}{'steps':>7}"
    f"{'busy':>7}"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, "all"], default=["bs1"], help="(default: bs1)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="trials per shape (default: 3)")
    parser.add_argument("--detokenize", action="store_true", help="also detokenize; needs the model's tokenizer")
    parser.add_argument("--machine", action="store_true", help=MACHINE_HELP)
    parser.add_argument("--json", metavar="PATH", help="also write the figures to this file, after each shape")
    add_engine_flags(parser)
    args = parser.parse_args()
    try:
        return run(args)
    except SlipstreamError as error:
        print(f"benchmarks/offline.py: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    from slipstream.api.llm import LLM  # timed: it imports torch

    imported = time.perf_counter()
    options = bench_options(engine_options(args), detokenize=args.detokenize)
    if args.machine:
        check_gpu(options.get("device", "auto"))
    llm = LLM(**options)
    ready = time.perf_counter()
    summary: dict[str, Any] = {
        "machine": machine_facts(llm.config.device.kind),
        "engine": engine_summary(llm.config),
        "import_seconds": imported - start,
        "start_seconds": ready - imported,
        "shapes": {},
    }
    print(f"import {imported - start:.2f} s, start {ready - imported:.2f} s, {summary['machine']}, {summary['engine']}")
    with llm:
        if args.machine:
            rates = measure_gpu()
            summary["machine"] |= msgspec.to_builtins(rates)
            print(rates)
        print(COLUMNS, flush=True)
        for name in SHAPES if "all" in args.shapes else args.shapes:
            workload, changes = SHAPES[name].workload, SHAPES[name].params
            try:
                with progress(workload.num_prompts * args.repeats, "requests") as advance:
                    trials = measure(
                        llm,
                        workload,
                        bench_params(**changes),
                        repeats=args.repeats,
                        detokenize=args.detokenize,
                        advance=advance,
                    )
            except InvalidOption as error:  # too long for this engine; other shapes may fit
                print(f"{name:<10}{error}", flush=True)
                summary["shapes"][name] = {"error": str(error)}
            else:
                best = best_of(trials)
                print(line(name, best), flush=True)
                summary["shapes"][name] = (
                    {"workload": workload.summary(), "params": changes}
                    | best.summary()
                    | {"trial_seconds": [trial.seconds for trial in trials]}
                )
            if args.json:
                Path(args.json).write_text(json.dumps(summary, indent=1))
    return 0


def line(name: str, best: Trial) -> str:
    """ms/token: time of the whole call / tokens of one output."""
    per_token = 1000 * best.seconds * best.num_requests / best.output_tokens
    gaps = best.itl_ms
    between = f"{gaps.p50:>9.2f}{gaps.p99:>8.2f}" if gaps else " " * 17
    return (
        f"{name:<10}{best.output_per_second:>10.0f}{best.total_per_second:>11.0f}{per_token:>10.3f}{between}"
        f"{best.ttft_ms.p50:>10.1f}{best.num_steps:>7}{best.device.busy_share:>7.1%}"
    )


def machine_facts(kind: str) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if kind == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
