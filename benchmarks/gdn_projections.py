"""Input projections of Gated DeltaNet on the GPU: two GEMMs in turn, on two streams, or one fused GEMM.

    python benchmarks/gdn_projections.py [--tokens 1 16 64] [--hidden 2048] [--outputs 12288] [--gates 64]
    python benchmarks/gdn_projections.py --model DIR [--load-format dummy] [--rows 1 16 256]    # decode steps

The defaults are Qwen3-Next's: q, k, v and z have 12,288 outputs, b and a have 64. Times are medians of replayed graphs
of all layers, each with its own weights, so that none is in the L2 cache.

End to end, the time is the median between two tokens of a row, the median of --repeats runs with prompts of 128 tokens
and outputs of 64. Each run is printed as it ends.
"Sequential" runs the norm, then the GEMM for q, k, v and z, then that for b and a: by our own kernels, which start
early (PDL), or by those of the library.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from timing import replay_seconds

from slipstream.nn.context import context_of
from slipstream.nn.layers.recurrent import DeltaNet
from slipstream.ops.gemm.linear import linear
from slipstream.ops.recurrent.delta_rule import TWO_STREAMS, project_on_two_streams

LAYERS = 36
PROMPT, OUTPUT = 128, 64  # tokens of a request, end to end
PAGE = 16
MAX_BATCHED_TOKENS = 2048
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # all weights, and their two parts
Project = Callable[[torch.Tensor, Rows], object]


def in_turn(x: torch.Tensor, rows: Rows) -> object:
    return linear(x, rows[1], None), linear(x, rows[2], None)


def two_streams(x: torch.Tensor, rows: Rows) -> object:
    return project_on_two_streams(x, rows[1], rows[2])


def fused(x: torch.Tensor, rows: Rows) -> object:
    return linear(x, rows[0], None)


WAYS: dict[str, Project] = {"sequential": in_turn, "two streams": two_streams, "fused": fused}


def time_us(project: Project, x: torch.Tensor, layers: list[Rows]) -> float:
    """Median time of one layer's projections."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for rows in layers:  # compiles, and takes what may not be taken during capture
            project(x, rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for rows in layers:
                project(x, rows)
        seconds = replay_seconds(graph)
    return seconds * 1e6 / len(layers)


def sequential_layer(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """In place of `DeltaNet.after_norm`: two GEMMs in turn after the norm."""

    def after_norm(self: DeltaNet, norm: Any, x: Any, residual: Any, context: Any, last: Any = None) -> Any:
        rows = self._weight_rows()
        assert rows is not None, "sequential projections need unquantised weights"
        normed, total = norm(x, residual)
        mixed = self._mix(multiply(normed, rows[0]), multiply(normed, rows[1]), context, last)
        return self.output(mixed, context_of(context, last)), total if last is None else last.of(total)

    return after_norm


def measure_steps(args: argparse.Namespace) -> None:
    """Prints the time of a decode step of the model with each way, one number of rows after the other.

    Each way has an engine; all exist at once, and their trials take turns, so that clocks and temperature are alike.
    The engines are small: a graph is captured for each number of rows up to the largest asked for.
    """
    from slipstream.api.llm import LLM
    from slipstream.serve.bench.measure import Workload, measure
    from slipstream.serve.cli.bench import bench_params

    ways = {
        "default": DeltaNet.after_norm,
        "sequential": sequential_layer(linear),
        "sequential, library": sequential_layer(torch.nn.functional.linear),
    }
    most = max(args.rows)
    options = {
        "load_format": args.load_format,
        "skip_tokenizer_init": True,
        "max_model_len": PROMPT + OUTPUT,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(MAX_BATCHED_TOKENS, 2 * most),
        "num_pages": most * (-(-(PROMPT + OUTPUT) // PAGE) + 1),
        "page_size": PAGE,
        "enable_prefix_caching": False,
    }
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        engines = {}
        for way, after_norm in ways.items():
            DeltaNet.after_norm = after_norm  # type: ignore[method-assign]
            engines[way] = stack.enter_context(LLM(args.model, **options))
            print(f"{time.perf_counter() - begin:.1f} s: {way}", flush=True)
        lines = [f"{'rows':>8}" + "".join(f"{way:>22}" for way in ways) + "   ms per step, and what the default saves"]
        for rows in args.rows:
            workload = Workload(num_prompts=rows, input_len=PROMPT, output_len=OUTPUT)
            times: dict[str, list[float]] = {way: [] for way in ways}
            for repeat in range(args.repeats):
                for way, after_norm in ways.items():
                    DeltaNet.after_norm = after_norm  # type: ignore[method-assign]  # sizes may be captured now
                    trial = measure(engines[way], workload, bench_params(), warmup=repeat == 0)[0]
                    assert trial.itl_ms is not None
                    found = trial.itl_ms.p50
                    times[way].append(found)
                    print(f"{time.perf_counter() - begin:.1f} s: {rows} rows, {way}: {found:.4f}", flush=True)
            median = {way: statistics.median(each) for way, each in times.items()}
            cells = [f"{median['default']:.4f}"]
            for way in list(ways)[1:]:
                cells.append(f"{median[way]:.4f} ({1 - median['default'] / median[way]:.1%})")
            lines.append(f"{rows:>8}" + "".join(f"{cell:>22}" for cell in cells))
            print("\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 1024, 4096])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=12288)
    parser.add_argument("--gates", type=int, default=64)
    parser.add_argument("--model", help="measure decode steps of this model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.model is not None:
        measure_steps(args)
        return
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU")
        return
    layers = []
    for _ in range(LAYERS):
        whole = torch.randn(args.outputs + args.gates, args.hidden, device="cuda", dtype=torch.bfloat16) * 0.02
        layers.append((whole, whole[: args.outputs], whole[args.outputs :]))
    print(f"{torch.cuda.get_device_name()}, us per layer")
    print(f"{'tokens':>8}" + "".join(f"{way:>14}" for way in WAYS) + f"{'fastest':>14}{'default':>14}")
    for tokens in args.tokens:
        x = torch.randn(tokens, args.hidden, device="cuda", dtype=torch.bfloat16)
        times = {way: time_us(project, x, layers) for way, project in WAYS.items()}
        default = "two streams" if tokens in TWO_STREAMS else "fused"
        best = min(times, key=lambda way: times[way])
        print(f"{tokens:>8}" + "".join(f"{time:>14.2f}" for time in times.values()) + f"{best:>14}{default:>14}")


if __name__ == "__main__":
    main()
