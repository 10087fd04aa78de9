"""Sampling and elementwise kernels on a GPU: error against the references, and time against the floor.

    python benchmarks/ops/sampling.py [--vocabulary 151936] [--rows 1 64 256] [--json FILE]

Each op is first compared with its reference, then both are timed by replays of a captured graph (median). The floor is
the bytes that an op must move / the bandwidth of a large copy. Calls alternate between copies of the inputs, so that
they are not in the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import replay_seconds

from slipstream.ops.elementwise import StepRows
from slipstream.ops.elementwise import reference as activation
from slipstream.ops.elementwise import reference as norm
from slipstream.ops.elementwise import reference as rows_reference
from slipstream.ops.sampling import reference
from slipstream.params.sampling import SamplingParams
from slipstream.runner.sampling.draw import limits_of

COPY_BANDWIDTH = 4.2e12  # bytes a second, read + written, of a large device copy on an H200
COLD_BYTES = 256 << 20  # bytes of inputs over all copies, several times the L2 cache

Request = Callable[[int], Any]  # argument: index of the copy


@dataclass
class Case:
    name: str
    rows: int
    bytes: int  # read + written
    copies: int
    kernel: Request
    reference: Request
    agree: Callable[[Any, Any], float]  # fraction of results that differ, or a relative error


def seconds(call: Request, copies: int, replays: int) -> float:
    """Seconds per call: median over replays of a graph with one call per copy."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            call(copy)
    for _ in range(3):
        graph.replay()
    return replay_seconds(graph, replays) / copies


def distance(mine: Any, expected: Any) -> float:
    pairs = zip(mine, expected, strict=True) if isinstance(mine, tuple) else [(mine, expected)]
    worst = 0.0
    for a, b in pairs:
        there = b.isfinite() if b.is_floating_point() else torch.ones_like(b, dtype=torch.bool)
        a, b = a.double()[there], b.double()[there]
        worst = max(worst, float((a - b).norm() / b.norm().clamp_min(1e-30))) if a.numel() else worst
    return worst


def differing(mine: Any, expected: Any) -> float:
    return float((mine.tokens != expected.tokens).double().mean())


def sampling_cases(num_rows: int, size: int) -> list[Case]:
    from slipstream.ops.sampling import triton as kernels

    once = num_rows * size * 4
    copies = max(1, min(32, COLD_BYTES // once))
    logits = [torch.randn(num_rows, size, device="cuda") * 2 for _ in range(copies)]
    # a few tokens have high logits, as in a trained model
    peaked = [x + torch.where(torch.rand_like(x) < 1e-4, 8.0, 0.0) for x in logits]
    narrow = [x.bfloat16() for x in logits]
    cut = [x.masked_fill(x < x.topk(50, -1).values[:, -1:], -math.inf) for x in logits]
    index = torch.arange(num_rows, device="cuda")
    random = torch.ones(num_rows, dtype=torch.bool, device="cuda")
    temperature = torch.full((num_rows,), 0.8, device="cuda")
    everything = [(index, size)]
    counts = (torch.rand(num_rows, size, device="cuda") < 0.01).int()
    seen = (torch.rand(num_rows, size, device="cuda") < 0.01) * reference.IN_PROMPT + counts * reference.IN_OUTPUT
    seen = seen.to(torch.uint8)
    values = torch.tensor([[1.1, 0.2, 0.1]], device="cuda").repeat(num_rows, 1)
    tokens = torch.randint(0, size, (num_rows,), device="cuda")
    floor = torch.ones(num_rows, device="cuda")

    def limits(min_p: float, top_k: int, top_p: float) -> torch.Tensor:
        row = limits_of(SamplingParams(min_p=min_p, top_k=top_k, top_p=min(top_p, 1.0)), size)
        return torch.tensor([row], dtype=torch.float32, device="cuda").repeat(num_rows, 1)

    def draw(ops: Any, own: torch.Tensor, *, scaled: bool = False, limits: torch.Tensor | None = None) -> Any:
        tables = reference.DrawTables(index * 7919, random, temperature if scaled else None, limits)
        return ops.draw_by_row(own, index, index, tables)

    def case(name: str, passes: float, kernel: Request, plain: Request, agree: Callable[[Any, Any], float]) -> Case:
        return Case(name, num_rows, int(once * passes), copies, kernel, plain, agree)

    cases = [
        case(
            "argmax_rows",
            1,
            lambda i: kernels.argmax_rows(logits[i]),
            lambda i: reference.argmax_rows(logits[i]),
            differing,
        ),
        case(
            "most likely bf16",
            0.5,
            lambda i: kernels.argmax_rows(narrow[i]),
            lambda i: reference.argmax_rows(narrow[i].float()),
            differing,
        ),
        case("draw", 1, lambda i: draw(kernels, logits[i]), lambda i: draw(reference, logits[i]), differing),
        case(
            "draw of a cut row",
            1,
            lambda i: draw(kernels, cut[i]),
            lambda i: draw(reference, cut[i]),
            differing,
        ),
    ]
    asks = {"k 50 p .95": (0.0, 50, 0.95), "k 1000": (0.0, 1000, 2.0), "p .95": (0.0, 0, 0.95), "min-p": (0.1, 0, 2.0)}
    for ask, numbers in asks.items():
        limit = limits(*numbers)
        order = [(index, numbers[1])] if numbers[1] else everything if numbers[2] < 1 else [(index, 0)]
        for kind, source in (("flat", logits), ("peaked", peaked)):

            def kept(mine: Any, expected: Any, source: Any = source) -> float:
                """Fraction of rows whose number of kept tokens differs by more than rounding explains."""
                a, b = ((source[0] >= x[:, None]).sum(-1) for x in (mine, expected))
                return float(((a - b).abs() > 2 + b // 2000).double().mean())

            cases.append(
                case(
                    f"floor {ask} {kind}",
                    1,
                    lambda i, source=source, limit=limit: kernels.find_floor(source[i], limit),
                    lambda i, source=source, limit=limit, order=order: reference.find_floor(source[i], limit, order),
                    kept,
                )
            )
    limit = limits(0.0, 50, 0.95)

    cases.append(
        case(
            "T .8, k 50 p .95, draw",
            2,
            lambda i: draw(kernels, logits[i], scaled=True, limits=limit),
            lambda i: draw(reference, logits[i], scaled=True, limits=limit),
            differing,
        )
    )

    def in_place(op: Callable[..., None], *args: Any) -> Request:
        def call(i: int) -> torch.Tensor:
            op(logits[i], *args)
            return logits[i]

        return call

    def on_copies(name: str, *args: Any) -> Callable[[Any, Any], float]:
        def agree(mine: Any, expected: Any) -> float:
            a, b = logits[0].clone(), logits[0].clone()
            getattr(kernels, name)(a, *args)
            getattr(reference, name)(b, *args)
            return distance(a, b)

        return agree

    for name, passes, args in (
        ("penalize_", 3.25, (counts, seen, index, values)),
        ("drop_below_", 2, (floor,)),
    ):
        cases.append(
            case(
                name,
                passes,
                in_place(getattr(kernels, name), *args),
                in_place(getattr(reference, name), *args),
                on_copies(name, *args),
            )
        )
    for k in (0, 5, 20):
        cases.append(
            case(
                f"top {k} logprobs",
                1,
                lambda i, k=k: kernels.top_logprobs(logits[i], tokens, k),
                lambda i, k=k: reference.top_logprobs(logits[i], tokens, k),
                lambda mine, expected: distance((mine[0], mine[1], mine[3]), (expected[0], expected[1], expected[3])),
            )
        )
    # in-place ops last, so that the others get unchanged logits
    return [c for c in cases if not c.name.endswith("_")] + [c for c in cases if c.name.endswith("_")]


def elementwise_cases(num_rows: int) -> list[Case]:
    from slipstream.ops.elementwise import norm_triton as norm_kernels
    from slipstream.ops.elementwise import step_inputs_triton as rows_kernels
    from slipstream.ops.elementwise import triton as activation_kernels

    cases = []
    for hidden, middle in ((1024, 3072), (4096, 12_288)):
        once = num_rows * hidden * 2
        copies = max(1, min(64, COLD_BYTES // (4 * once)))
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        x = [torch.randn(num_rows, hidden, **options) for _ in range(copies)]
        residual = [torch.randn(num_rows, hidden, **options) for _ in range(copies)]
        gate_up = [torch.randn(num_rows, 2 * middle, **options) for _ in range(min(copies, 16))]
        weight = torch.randn(hidden, **options)
        cases.append(
            Case(
                f"add_rms_norm {hidden}",
                num_rows,
                4 * once,
                copies,
                lambda i, a=(x, residual, weight): norm_kernels.add_rms_norm(a[0][i], a[1][i], a[2], 1e-6),
                lambda i, a=(x, residual, weight): norm.add_rms_norm(a[0][i], a[1][i], a[2], 1e-6),
                distance,
            )
        )
        cases.append(
            Case(
                f"silu_and_mul {middle}",
                num_rows,
                3 * num_rows * middle * 2,
                len(gate_up),
                lambda i, a=gate_up: activation_kernels.silu_and_mul(a[i]),
                lambda i, a=gate_up: activation.silu_and_mul(a[i]),
                distance,
            )
        )
    width = 2560
    computed = torch.randint(0, 40_000, (num_rows + 1,), device="cuda")
    tables = torch.randint(1, 1 << 20, (1, num_rows + 1, width), device="cuda")
    rows = torch.randperm(num_rows, device="cuda")
    args = (computed, computed[:, None], tables, 16, width, StepRows(rows))
    cases.append(
        Case(
            f"gather_inputs, {width} pages",
            num_rows,
            num_rows * width * 16,
            4,
            lambda i: rows_kernels.gather_inputs(*args),
            lambda i: rows_reference.gather_inputs(*args),
            distance,
        )
    )
    return cases


def measure(case: Case, replays: int) -> dict[str, Any]:
    off = case.agree(case.kernel(0), case.reference(0))
    time = seconds(case.kernel, case.copies, replays)
    plain = seconds(case.reference, case.copies, max(3, replays // 4))
    return {
        "op": case.name,
        "rows": case.rows,
        "MB": case.bytes / 1e6,
        "us": time * 1e6,
        "floor us": case.bytes / COPY_BANDWIDTH * 1e6,
        "TB/s": case.bytes / time / 1e12,
        "torch us": plain * 1e6,
        "times faster": plain / time,
        "off": off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU here; the kernels are checked without one by tests/ops/test_triton_sample.py")
    torch.manual_seed(0)
    results = []
    print(f"{'op':28}{'rows':>6}{'MB':>8}{'us':>9}{'floor':>8}{'TB/s':>7}{'torch':>10}{'faster':>8}{'off':>10}")
    for num_rows in args.rows:
        for case in sampling_cases(num_rows, args.vocabulary) + elementwise_cases(num_rows):
            r = measure(case, args.replays)
            results.append(r)
            print(
                f"{r['op']:28}{r['rows']:6}{r['MB']:8.1f}{r['us']:9.1f}{r['floor us']:8.1f}{r['TB/s']:7.2f}"
                f"{r['torch us']:10.1f}{r['times faster']:8.1f}{r['off']:10.1e}",
                flush=True,
            )
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
