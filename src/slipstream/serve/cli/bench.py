"""`slipstream bench`: how fast a model runs here, on random prompts of chosen lengths."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.engine.progress import progress
from slipstream.errors import InvalidOption
from slipstream.params import SamplingParams
from slipstream.serve.bench import report
from slipstream.serve.bench.machine import check_gpu, measure_gpu
from slipstream.serve.bench.measure import Trial, measure
from slipstream.serve.bench.shapes import SHAPES, Shape
from slipstream.serve.bench.startup import measure_startup
from slipstream.serve.bench.workload import Workload
from slipstream.serve.cli import bench_serve
from slipstream.serve.cli.flags import add_engine_flags, add_sampling_flags, engine_options, sampling_changes
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.config.config import EngineConfig
    from slipstream.llm import LLM

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
KINDS = {
    "throughput": "all prompts at once (the default)",
    "latency": "prompts come one by one, as from many people, at --rate or at --load of the peak",
    "long": "long texts with and without penalties, and the time between tokens along them",
    "step": "the host's and the device's time for a step",
    "serve": "a server at --url, with --concurrency requests at once or --rate of them a second",
    "startup": "import, start and first tokens of new processes, with and without compiled kernels",
}
MACHINE_HELP = "first tell what this GPU gives at the moment: TFLOP/s of a large product, TB/s of a copy (1.5 s)"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "bench",
        help="measure throughput and latency",
        description="Runs random prompts and reports throughput, time to the first token, and time between tokens. "
        "Any model folder will do, also without weights (--load-format dummy) or a tokenizer. Drawing is greedy unless "
        "a sampling flag says otherwise, and texts go on past the end token. What is measured: "
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
        help=f"shapes by name instead of by lengths: {', '.join(SHAPES)}, or all",
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
    command.add_argument("--rate", type=float, metavar="X", help="of latency and serve: requests a second")
    command.add_argument(
        "--load",
        type=float,
        default=0.7,
        metavar="X",
        help="of latency without --rate: share of the peak (default: 0.7)",
    )
    command.add_argument("--repeats", type=int, default=1, metavar="N", help="trials; the best counts (default: 1)")
    command.add_argument("--no-warmup", action="store_true", help="let the first trial pay for first uses")
    command.add_argument("--detokenize", action="store_true", help="make text too; needs the model's tokenizer")
    command.add_argument("--logprobs", type=int, metavar="N", help="likeliest tokens to report with each token")
    command.add_argument("--machine", action="store_true", help=MACHINE_HELP)
    command.add_argument("--json", action="store_true", help="print one JSON object, and the table to standard error")
    bench_serve.add_flags(command)
    add_sampling_flags(command, max_tokens=None, names=SAMPLING)
    add_engine_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    for name in ("concurrency", "repeats"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise InvalidOption(f"{name} is {value}; give a whole number from 1 up")
    options = bench_options(engine_options(args), detokenize=args.detokenize)
    if args.machine:
        if args.kind in ("serve", "startup"):
            raise InvalidOption(
                f"--machine is for an engine in this process, and {args.kind} measures others; leave it out, or "
                "measure throughput with it first"
            )
        check_gpu(options.get("device", "auto"))
    if args.kind == "startup":
        return _run_startup(options, args)
    own = Workload(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=args.range_ratio,
        seed=args.random_seed,
    )
    changes = sampling_changes(args) | ({} if args.logprobs is None else {"logprobs": args.logprobs})
    if args.kind == "serve":
        return bench_serve.run_serve(args, own, changes)
    shapes = {"": Shape(own, changes)}
    if args.shape:
        shapes = {name: SHAPES[name] for name in (SHAPES if "all" in args.shape else args.shape)}
    for shape in shapes.values():
        bench_params(**shape.params)  # a mistake is told before anything is loaded
    if args.kind == "latency":
        options.setdefault("max_itl", None)  # somebody reads along: as a server has it
    start = time.perf_counter()
    llm = opener(**options)
    startup = time.perf_counter() - start
    with closing(llm):
        bench = _Bench(llm, args, startup)
        {"throughput": bench.throughput, "latency": bench.latency, "long": bench.long, "step": bench.step}[args.kind](
            shapes
        )
    return 0


class _Bench:
    """One engine, measured in one way or another. Each way prints what it found."""

    def __init__(self, llm: LLM, args: argparse.Namespace, startup: float) -> None:
        self.llm = llm
        self.args = args
        self.startup = startup
        self.facts: dict[str, Any] = {"startup_seconds": startup, "engine": engine_facts(llm.config)}
        if args.machine:
            rates = measure_gpu()
            self.facts["machine"] = msgspec.to_builtins(rates)
            self._tell(str(rates))

    def throughput(self, shapes: dict[str, Shape]) -> None:
        if list(shapes) == [""]:
            shape = shapes[""]
            trials = self._measure(shape)
            self._print(shape.workload.facts(), trials, "")
            return
        self._print_header(report.COLUMNS)
        found: dict[str, Any] = {}
        for name, best in self._each(shapes, found):
            self._tell(report.trial_line(name, best))
            found[name] = shape_facts(shapes[name]) | best.facts()
        self._print_json({"shapes": found})

    def latency(self, shapes: dict[str, Shape]) -> None:
        if self.args.rate is None and not 0 < self.args.load <= 1:
            raise InvalidOption(f"load is {self.args.load}; give a share of the peak, over 0 and up to 1")
        if list(shapes) == [""]:
            shape = shapes[""]
            rate = self._rate(shape)
            self._print(shape.workload.facts() | {"rate": rate}, self._measure(shape, rate), f", {rate:.2f} requests/s")
            return
        self._print_header(report.COLUMNS)
        found: dict[str, Any] = {}
        rates: dict[str, float] = {}
        for name, best in self._each(shapes, found, rates):
            self._tell(report.trial_line(name, best) + f"  at {rates[name]:.2f} requests/s")
            found[name] = shape_facts(shapes[name]) | {"rate": rates[name]} | best.facts()
        self._print_json({"shapes": found})

    def long(self, shapes: dict[str, Shape]) -> None:
        """Penalties must cost the same at every length."""
        if list(shapes) == [""]:
            plain = shapes[""]
            penalised = Shape(plain.workload, plain.params | SHAPES["longpen"].params)
            shapes = {"plain": plain, "penalised": penalised}
        found: dict[str, Any] = {}
        trials: dict[str, Trial] = {}
        for name, best in self._each(shapes, found):
            trials[name] = best
            found[name] = shape_facts(shapes[name]) | best.facts()
        self._print_header(report.long_table(trials))
        self._print_json({"shapes": found})

    def step(self, shapes: dict[str, Shape]) -> None:
        found: dict[str, Any] = {}
        for name, best in self._each(shapes, found):
            self._print_header(f"{name or report.shape_line(shapes[name].workload)}\n{report.step_table(best.device)}")
            found[name or "given"] = shape_facts(shapes[name]) | {"device": msgspec.to_builtins(best.device)}
        self._print_json({"shapes": found})

    def _each(
        self, shapes: dict[str, Shape], found: dict[str, Any], rates: dict[str, float] | None = None
    ) -> Iterator[tuple[str, Trial]]:
        """The best trial of each shape, where `rates` is given at the rate that goes in there. One that is too long for
        this engine is told of, in `found` too, and the others are measured; an error if all are."""
        refused: InvalidOption | None = None
        for name, shape in shapes.items():
            try:
                rate = None if rates is None else self._rate(shape)
                best = self._measure(shape, rate)[0]
            except InvalidOption as error:
                refused = error
                found[name] = {"error": str(error)}
                self._tell(f"{name:<10}{error}")
                continue
            if rates is not None and rate is not None:
                rates[name] = rate
            yield name, best
        if refused is not None and all("error" in facts for facts in found.values()):
            raise refused

    def _rate(self, shape: Shape) -> float:
        """Of latency: as told, or a share of the peak."""
        if self.args.rate is not None:
            return float(self.args.rate)
        return float(self.args.load * self._measure(shape)[0].requests_per_second)

    def _measure(self, shape: Shape, rate: float | None = None) -> list[Trial]:
        args = self.args
        with progress(shape.workload.num_prompts * args.repeats, "requests") as advance:
            return measure(
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

    def _print(self, workload: dict[str, Any], trials: list[Trial], note: str) -> None:
        """One workload in full."""
        seconds = [trial.seconds for trial in trials]
        shown = {name: value for name, value in workload.items() if name != "rate"}
        best_of = f", best of {len(trials)}" if len(trials) > 1 else ""
        self._tell(
            f"{report.engine_line(self.llm.config)}: {report.shape_line(Workload(**shown))}{note}{best_of}\n"
            + report.trial_table(trials[0], self.startup)
        )
        self._print_json({"workload": workload} | trials[0].facts() | {"trial_seconds": seconds})

    def _print_header(self, columns: str) -> None:
        self._tell(f"{report.engine_line(self.llm.config)}, start-up {self.startup:.2f} s\n{columns}")

    def _tell(self, text: str) -> None:
        report.show(text, beside_json=self.args.json)

    def _print_json(self, found: dict[str, Any]) -> None:
        if self.args.json:
            print(json.dumps(self.facts | found))


def _run_startup(options: dict[str, Any], args: argparse.Namespace) -> int:
    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr)

    starts = measure_startup(options, tell)
    report.show(report.startup_table(starts), beside_json=args.json)
    if args.json:
        print(json.dumps({"options": options, "starts": msgspec.to_builtins(starts)}))
    return 0


def shape_facts(shape: Shape) -> dict[str, Any]:
    return {"workload": shape.workload.facts(), "params": shape.params}


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
