"""Cost of a viewer of the live timeline and of the flight recorder, in decode steps.

    python benchmarks/viewer_cost.py [--model DIR --load-format dummy] [--rows 64] [--steps 1000] [--rounds 3]

One engine, the cases in turns: `plain` (the default: recorder on, no viewer), `viewer` (steps are logged, and read four
times per second as `/debug/timeline` does), `no recorder`. For each: the time of a step, the host's own time in it (the
clock, without waits for the device), and the CPU time of the core's thread, which other processes do not change.
Without --model, a model without layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from step_overhead import CONFIG, NoLayers

from slipstream import LLM, SamplingParams
from slipstream.contracts.messages import Submit
from slipstream.record.recorder import Recorder
from slipstream.record.step_log import stop
from slipstream.transport.client import Inspector
from slipstream.transport.frames import Inspect

CASES = ("plain", "viewer", "no recorder")
_PERIOD = 0.25  # seconds between two reads of a viewer, as in serve/http/admin/system.py
_WARM_STEPS = 20


class Viewer:
    """Reads the log of steps as a core process does for `/debug/timeline`."""

    def __init__(self, llm: LLM) -> None:
        self._inspector = Inspector(llm._driver.lanes)
        self._since, self._next = -1, 0.0
        self.num_steps = 0

    def __call__(self) -> None:
        if (now := time.perf_counter()) < self._next:
            return
        self._next = now + _PERIOD
        answer = self._inspector.answer(Inspect("", "steps", since=self._since))
        assert answer.error is None, answer.error
        _, self._since, steps = _decode(answer.data)
        self.num_steps += len(steps)


def _decode(data: bytes) -> tuple[list[str], int, list[Any]]:
    return msgspec.msgpack.decode(data, type=tuple[list[str], int, list[Any]])


def measure(llm: LLM, case: str, rows: int, steps: int, number: int) -> tuple[float, float, float]:
    """Seconds, host seconds and CPU seconds of a step."""
    core = llm.core
    core.recorder = None if case == "no recorder" else Recorder(core.executor, core.config)
    viewer = Viewer(llm) if case == "viewer" else None
    look: Callable[[], None] = viewer if viewer is not None else lambda: None
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=steps + 2 * _WARM_STEPS)
    for row in range(rows):
        core.submit(Submit(f"{number}-{row}", [1 + row % 60] * 8, params, time.time()))
    end = core.num_steps + _WARM_STEPS
    while core.num_steps < end:
        core.step()
        look()
    end = core.num_steps + steps
    start, host, cpu = time.perf_counter(), core.timer.total.host, time.thread_time()
    while core.num_steps < end:
        core.step()
        look()
    seconds, host, cpu = time.perf_counter() - start, core.timer.total.host - host, time.thread_time() - cpu
    while core.has_requests():
        core.step()
    if viewer is not None:
        assert viewer.num_steps > steps // 2, f"the viewer saw {viewer.num_steps} of {steps} steps"
        stop(llm.cores)
    return seconds / steps, host / steps, cpu / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        length = args.steps + 64
        options: dict[str, Any] = {"max_model_len": length, "skip_tokenizer_init": True, "use_tqdm_on_load": False}
        if args.model is None:
            options |= {
                "load_format": "dummy",
                "num_threads": 1,
                "num_pages": args.rows * (length // 16 + 2),
                "depth": 1,
            }
        else:
            options["load_format"] = args.load_format
        with LLM(args.model or folder, max_num_seqs=args.rows, **options) as llm:
            if args.model is None:
                core: Any = llm.core
                core.executor.model = core.executor.heads[0].model = NoLayers()
            for number in range(args.rounds * len(CASES) + 1):
                case = CASES[number % len(CASES)]
                times = measure(llm, case, args.rows, args.steps, number)
                if number:  # the first run is warm-up
                    found[case].append(times)
    medians = {case: [statistics.median(v) * 1e6 for v in zip(*times, strict=True)] for case, times in found.items()}
    if args.json:
        print(json.dumps(medians))
        return
    print(f"{args.rows} rows, {args.steps} steps, medians of {args.rounds} rounds, microseconds per step")
    print(f"{'case':<12} {'step':>9} {'of plain':>9} {'host':>8} {'CPU':>8}   steps of each round")
    for case, (step, host, cpu) in medians.items():
        each = " ".join(f"{times[0] * 1e6:.1f}" for times in found[case])
        percent = 100 * (step / medians["plain"][0] - 1)
        print(f"{case:<12} {step:>9.1f} {percent:>+8.2f}% {host:>8.1f} {cpu:>8.1f}   {each}")


if __name__ == "__main__":
    main()
