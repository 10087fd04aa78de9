"""`slipstream bench`: measures throughput and latency of a model, with random prompts of given lengths."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.base.errors import EngineDead, InvalidOption
from slipstream.base.log import progress
from slipstream.params.sampling import BENCH, SamplingParams, names_for
from slipstream.serve.bench import tables
from slipstream.serve.bench.measure import SHAPES, Shape, Trial, Workload, best_of, measure
from slipstream.serve.bench.tables import (
    check_gpu,
    latency_chart,
    measure_gpu,
    measure_startup,
    show,
    svg_charts,
    text_chart,
)
from slipstream.serve.cli.flags import add_engine_flags, add_sampling_flags, engine_options, sampling_changes
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.api.llm import LLM
    from slipstream.config.config import EngineConfig


KINDS = {
    "throughput": "all prompts at the same time (the default)",
    "latency": "Poisson arrivals, at --rate or at --load of the maximum throughput",
    "long": "long outputs with and without penalties, with the inter-token latency by position",
    "step": "host and device time per step",
    "serve": "a server at --url, with --concurrency concurrent requests or --rate requests per second",
    "startup": "import, start and first tokens of new processes, with and without compiled kernels",
}
_LENGTHS: dict[str, tuple[type, Any, str, str]] = {
    "--num-prompts": (int, 32, "N", "number of requests"),
    "--input-len": (int, 128, "N", "tokens per prompt"),
    "--output-len": (int, 64, "N", "tokens to generate per prompt"),
    "--range-ratio": (float, 1.0, "X", "distribute lengths uniformly from this fraction of the full length up to it"),
    "--random-seed": (int, 0, "N", "seed of lengths and tokens"),
}
"""Type, default, placeholder and help of the flags that named shapes replace. A flag that is not given is None."""
MACHINE_HELP = "first measure this GPU: TFLOP/s of a large GEMM, TB/s of a copy (1.5 s)"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "bench",
        help="measure throughput and latency",
        description="Runs random prompts and reports throughput, time to first token, and inter-token latency. "
        "Works with any model folder, also without weights (--load-format dummy) or a tokenizer. Sampling is greedy "
        "by default, and generation continues past the end token. Kinds: "
        + "; ".join(f"{name}: {text}" for name, text in KINDS.items())
        + ".",
        usage="slipstream bench [throughput|latency|long|step|serve|startup] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("kind", nargs="?", choices=KINDS, default="throughput", help="what to measure")
    command.add_argument(
        "--shape",
        nargs="+",
        choices=[*SHAPES, "all"],
        metavar="NAME",
        help=f"named shapes instead of lengths and sampling flags: {', '.join(SHAPES)}, or all",
    )
    for flag, (kind, default, metavar, text) in _LENGTHS.items():
        command.add_argument(flag, type=kind, metavar=metavar, help=f"{text} (default: {default:g})")
    command.add_argument("--concurrency", type=int, metavar="N", help="maximum concurrent requests (default: all)")
    command.add_argument("--rate", type=float, metavar="X", help="for latency and serve: requests per second")
    command.add_argument(
        "--load",
        type=float,
        default=0.7,
        metavar="X",
        help="for latency without --rate: fraction of the maximum throughput (default: 0.7)",
    )
    command.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="number of trials, each with an empty prefix cache, of which the best is reported (default: 1)",
    )
    command.add_argument("--no-warmup", action="store_true", help="include first-use costs in the first trial")
    command.add_argument("--detokenize", action="store_true", help="also detokenise; needs the model's tokenizer")
    command.add_argument("--logprobs", type=int, metavar="N", help="number of top logprobs per token")
    command.add_argument("--machine", action="store_true", help=MACHINE_HELP)
    command.add_argument("--json", action="store_true", help="print a JSON object, and the table to standard error")
    command.add_argument(
        "--plot", nargs="?", const=True, metavar="FILE", help="draw the results; with a FILE also as a picture (SVG)"
    )
    command.add_argument("--trace", metavar="FILE", help="write times of all steps to a file for ui.perfetto.dev")
    add_flags(command)
    add_sampling_flags(command, max_tokens=None, names=names_for(BENCH))
    add_engine_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    for name in ("concurrency", "repeats"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise InvalidOption(f"{name} is {value}; give an integer from 1 up")
    options = bench_options(engine_options(args), detokenize=args.detokenize)
    if args.machine:
        if args.kind in ("serve", "startup"):
            raise InvalidOption(
                f"--machine is for an engine in this process, and {args.kind} measures others; remove it, or "
                "measure throughput with it first"
            )
        check_gpu(options.get("device", "auto"))
    if args.trace is not None and args.kind in ("serve", "startup"):
        raise InvalidOption(f"--trace is for an engine in this process, and {args.kind} measures others; remove it")
    if args.plot is not None and args.kind == "startup":
        raise InvalidOption("--plot draws latency and throughput, and startup measures neither; remove it")
    changes = sampling_changes(args) | ({} if args.logprobs is None else {"logprobs": args.logprobs})
    if args.shape:
        _check_shape(args, changes)
    if args.kind == "startup":
        return _run_startup(options, args)
    num_prompts, input_len, output_len, range_ratio, seed = (
        default if (value := _given(args, flag)) is None else value for flag, (_, default, _, _) in _LENGTHS.items()
    )
    own = Workload(
        num_prompts=num_prompts, input_len=input_len, output_len=output_len, range_ratio=range_ratio, seed=seed
    )
    if args.kind == "serve":
        return run_serve(args, own, changes)
    shapes = {"": Shape(own, changes)}
    if args.shape:
        shapes = {name: SHAPES[name] for name in (SHAPES if "all" in args.shape else args.shape)}
    for shape in shapes.values():
        bench_params(**shape.params)  # raises before the model is loaded
    if args.kind == "latency":
        options.setdefault("max_itl", None)  # the server's default
    start = time.perf_counter()
    llm = opener(**options)
    startup = time.perf_counter() - start
    with closing(llm), nullcontext() if args.trace is None else llm.trace(args.trace):
        bench = _Bench(llm, args, startup)
        {"throughput": bench.throughput, "latency": bench.latency, "long": bench.long, "step": bench.step}[args.kind](
            shapes
        )
        bench.plot()
    return 0


def _check_shape(args: argparse.Namespace, changes: dict[str, Any]) -> None:
    """Refuses flags that a named shape would ignore. `changes`: sampling parameters that were given."""
    if args.kind in ("serve", "startup"):
        raise InvalidOption(f"--shape is for an engine in this process, and {args.kind} measures others; remove it")
    lengths = [flag for flag in _LENGTHS if _given(args, flag) is not None]
    for flag in [*lengths, *(f"--{name.replace('_', '-')}" for name in changes)]:
        raise InvalidOption(f"--shape sets the lengths and the sampling, and {flag} is given; remove one of them")


def _given(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag[2:].replace("-", "_"))


class _Bench:
    """The measurements of one engine. Each method prints its results."""

    def __init__(self, llm: LLM, args: argparse.Namespace, startup: float) -> None:
        self.llm = llm
        self.args = args
        self.startup = startup
        self.best: dict[str, Trial] = {}  # by name of the shape
        self.summary: dict[str, Any] = {"startup_seconds": startup, "engine": engine_summary(llm.config)}
        if args.machine:
            rates = measure_gpu()
            self.summary["machine"] = msgspec.to_builtins(rates)
            self._show(str(rates))

    def throughput(self, shapes: dict[str, Shape]) -> None:
        if list(shapes) == [""]:
            shape = shapes[""]
            trials = self._measure(shape)
            self._print(shape.workload.summary(), trials, "")
            return
        self._print_header(tables.COLUMNS)
        found: dict[str, Any] = {}
        for name, best in self._each(shapes, found):
            self._show(tables.trial_line(name, best))
            found[name] = shape_summary(shapes[name]) | best.summary()
        self._print_json({"shapes": found})

    def latency(self, shapes: dict[str, Shape]) -> None:
        if self.args.rate is None and not 0 < self.args.load <= 1:
            raise InvalidOption(f"load is {self.args.load}; give a fraction above 0 and up to 1")
        if list(shapes) == [""]:
            shape = shapes[""]
            rate = self._rate(shape)
            self._print(
                shape.workload.summary() | {"rate": rate}, self._measure(shape, rate), f", {rate:.2f} requests/s"
            )
            return
        self._print_header(tables.COLUMNS)
        found: dict[str, Any] = {}
        rates: dict[str, float] = {}
        for name, best in self._each(shapes, found, rates):
            self._show(tables.trial_line(name, best) + f"  at {rates[name]:.2f} requests/s")
            found[name] = shape_summary(shapes[name]) | {"rate": rates[name]} | best.summary()
        self._print_json({"shapes": found})

    def long(self, shapes: dict[str, Shape]) -> None:
        """Compares outputs with and without penalties, whose cost must not grow with the length."""
        if list(shapes) == [""]:
            plain = shapes[""]
            penalised = Shape(plain.workload, plain.params | SHAPES["longpen"].params)
            shapes = {"plain": plain, "penalised": penalised}
        found: dict[str, Any] = {}
        trials: dict[str, Trial] = {}
        for name, best in self._each(shapes, found):
            trials[name] = best
            found[name] = shape_summary(shapes[name]) | best.summary()
        self._print_header(tables.long_table(trials))
        self._print_json({"shapes": found})

    def step(self, shapes: dict[str, Shape]) -> None:
        found: dict[str, Any] = {}
        for name, best in self._each(shapes, found):
            self._print_header(f"{name or tables.shape_line(shapes[name].workload)}\n{tables.step_table(best.device)}")
            found[name or "given"] = shape_summary(shapes[name]) | {"device": msgspec.to_builtins(best.device)}
        self._print_json({"shapes": found})

    def _each(
        self, shapes: dict[str, Shape], found: dict[str, Any], rates: dict[str, float] | None = None
    ) -> Iterator[tuple[str, Trial]]:
        """Yields the best trial of each shape. With `rates`, trials have a request rate, which is stored there. A shape
        that is too long for this engine is reported, also in `found`, and skipped; raises if all are."""
        refused: InvalidOption | None = None
        for name, shape in shapes.items():
            try:
                rate = None if rates is None else self._rate(shape)
                best = best_of(self._measure(shape, rate, name))
            except InvalidOption as error:
                refused = error
                found[name] = {"error": str(error)}
                self._show(f"{name:<10}{error}")
                continue
            if rates is not None and rate is not None:
                rates[name] = rate
            yield name, best
        if refused is not None and all("error" in summary for summary in found.values()):
            raise refused

    def _rate(self, shape: Shape) -> float:
        """The request rate for latency: --rate, or --load of the measured throughput."""
        if self.args.rate is not None:
            return float(self.args.rate)
        return float(self.args.load * best_of(self._measure(shape)).requests_per_second)

    def _measure(self, shape: Shape, rate: float | None = None, name: str = "") -> list[Trial]:
        args = self.args
        with progress(shape.workload.num_prompts * args.repeats, "requests") as advance:
            trials = measure(
                self.llm,
                shape.workload,
                bench_params(**shape.params),
                repeats=args.repeats,
                warmup=not args.no_warmup,
                concurrency=args.concurrency,
                rate=rate,
                detokenize=args.detokenize,
                advance=advance,
            )
        self.best[name or tables.shape_line(shape.workload)] = best_of(trials)
        return trials

    def _print(self, workload: dict[str, Any], trials: list[Trial], note: str) -> None:
        """Prints the table of one workload."""
        best, seconds = best_of(trials), [trial.seconds for trial in trials]
        shown = {name: value for name, value in workload.items() if name != "rate"}
        repeats = f", best of {len(trials)}" if len(trials) > 1 else ""
        self._show(
            f"{tables.engine_line(self.llm.config)}: {tables.shape_line(Workload(**shown))}{note}{repeats}\n"
            + tables.trial_table(best, self.startup)
        )
        self._print_json({"workload": workload} | best.summary() | {"trial_seconds": seconds})

    def plot(self) -> None:
        """Draws the best trials, as text and as a picture."""
        if self.args.plot is None:
            return
        charts = tables.trial_charts(self.best)
        for chart in charts:
            self._show("\n" + text_chart(chart))
        if isinstance(self.args.plot, str):
            Path(self.args.plot).write_text(svg_charts(charts), encoding="utf-8")

    def _print_header(self, columns: str) -> None:
        self._show(f"{tables.engine_line(self.llm.config)}, start-up {self.startup:.2f} s\n{columns}")

    def _show(self, text: str) -> None:
        tables.show(text, beside_json=self.args.json)

    def _print_json(self, found: dict[str, Any]) -> None:
        if self.args.json:
            print(json.dumps(self.summary | found))


def _run_startup(options: dict[str, Any], args: argparse.Namespace) -> int:
    def notify(text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr)

    starts = measure_startup(options, notify)
    tables.show(tables.startup_table(starts), beside_json=args.json)
    if args.json:
        print(json.dumps({"options": options, "starts": msgspec.to_builtins(starts)}))
    return 0


def shape_summary(shape: Shape) -> dict[str, Any]:
    return {"workload": shape.workload.summary(), "params": shape.params}


def bench_params(**changes: Any) -> SamplingParams:
    """Greedy sampling past the end token by default, so that outputs have the requested lengths."""
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | changes))


def bench_options(given: dict[str, Any], *, detokenize: bool) -> dict[str, Any]:
    """Engine options: without a tokenizer unless `detokenize`, and with the longest context that fits."""
    return {"skip_tokenizer_init": not detokenize, "max_model_len": "auto"} | given


def engine_summary(config: EngineConfig) -> dict[str, Any]:
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


# `slipstream bench serve`: measures a running server.


def add_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("bench serve")
    group.add_argument("--url", metavar="URL", help="URL of the server, for example http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY", help="API key of the server (default: SLIPSTREAM_API_KEY)")


def run_serve(args: argparse.Namespace, workload: Workload, changes: dict[str, Any]) -> int:
    from slipstream.serve.bench.online import (
        Target,
        histogram,
        run_online,
    )  # imports asyncio, which --help does not need

    if args.url is None:
        raise InvalidOption("bench serve needs --url; give one like http://127.0.0.1:8000")
    key = args.api_key or os.environ.get("SLIPSTREAM_API_KEY", "").split(",")[0] or None
    target = Target.parse(args.url, getattr(args, "model", None), key)
    params = {"temperature": 0.0, "ignore_eos": True} | changes
    with progress(workload.num_prompts, "requests") as advance:
        result, answers = run_online(
            target, workload, params, rate=args.rate, concurrency=args.concurrency, advance=advance
        )
    how = f"{args.rate:g} requests/s" if args.rate else f"{args.concurrency or workload.num_prompts} concurrent"
    lines = [f"{args.url}: {workload.num_prompts} x {workload.input_len} -> {workload.output_len}, {how}"]
    lines += result.lines()
    if args.plot:
        done = [answer for answer in answers if answer.status == 200 and answer.times]
        lines += histogram([answer.times[0] - answer.sent for answer in done], "first token")
        lines += histogram([answer.end - answer.sent for answer in done], "whole request")
        if isinstance(args.plot, str):
            charts = [latency_chart({"first token": result.ttft_ms, "whole request": result.request_ms})]
            Path(args.plot).write_text(svg_charts(charts), encoding="utf-8")
    show("\n".join(lines), beside_json=args.json)
    if args.json:
        print(json.dumps({"workload": workload.summary(), "result": msgspec.to_builtins(result)}))
    if not result.statuses.get("200"):
        raise EngineDead(f"no request succeeded: {next((a.error for a in answers if a.error), result.statuses)}")
    return 0
