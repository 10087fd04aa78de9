"""N-gram drafts on real text: tokens per second with and without them, by kind of text, one request at a time.

    python benchmarks/drafts_text.py [--model MODEL] [--method suffix] [--num-drafts 4] [--output-len 128] [--repeats 2]
                                     [--step-times]

Without --model it runs the embedded SmolLM2-135M-Instruct, on a CPU or a GPU. Both kinds of run use one engine, in
turns, greedy. The tokens with drafts are compared with those without, and a difference is an error: on a GPU choose
--deterministic or --dtype float32, since near-ties in bfloat16 are decided by the rounding of a step's GEMM kernels.
With --step-times the prompts run once more without drafts, with an adaptive number and with a fixed one, and a table
has the median times of their steps on the device and on the host.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

from slipstream import LLM, SamplingParams
from slipstream.base.errors import SlipstreamError
from slipstream.record.step_log import StepLog, stop
from slipstream.serve.cli.flags import add_engine_flags, engine_options

LETTER = """Dear Ms Larsen,

thank you for you're letter of the 3rd of march. We has received the parcel with the two lamps, but one of them are
broken: the glass shade have a crack on the left side, and the cable is to short. We would like to send the lamp back
and to recieve a new one. Please let us now wether we should pay for the postage, and how long it will takes. The other
lamp is fine, and my wife like it very much. We has put it in the living room beside the window.

Yours sincerely,
Tom Baker"""

ARTICLE = """The town of Eldham has opened a new library on the site of the old railway station. The building, which
cost 4.2 million pounds, has three floors, a reading room with a glass roof and a hall for concerts. The station
closed in 1964, and the site had been empty since a fire in 1987. The architect, Maria Oduya, kept the brick front of
the station and its clock. The library has 60,000 books, 40 computers and a collection of maps from the 18th century,
which came from the estate of a local farmer. About 900 visitors came on the first day. The mayor, John Hale, said
that the library would be open seven days a week. Some residents criticised the cost: the town had closed two swimming
pools last year to save money. A group of volunteers will run a cafe on the ground floor, and the profits will pay for
new books."""

CODE = """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)"""

TASKS = {
    "editing": [
        f"Correct the spelling and grammar of this letter and repeat it in full:\n\n{LETTER}",
        f"Rewrite this text with the name of the town changed to Westbrook, and change nothing else:\n\n{ARTICLE}",
    ],
    "summarising": [
        f"Summarise this article in three sentences:\n\n{ARTICLE}",
        f"List the facts of this article as short points:\n\n{ARTICLE}",
    ],
    "code": [
        f"Add a docstring to every method of this class and print the whole class:\n\n```python\n{CODE}\n```",
        f"Rename `balance` to `amount_left` in this class and print it:\n\n```python\n{CODE}\n```",
    ],
    "free text": [
        "Write a short story about a lighthouse keeper who finds a message in a bottle.",
        "Explain to a child why the sky is blue.",
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--method", choices=("ngram", "suffix"), default="ngram", help="(default: ngram)")
    parser.add_argument("--num-drafts", type=int, default=4, metavar="K", help="drafts per row and step (default: 4)")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens per answer (default: 128)")
    parser.add_argument(
        "--repeats", type=int, default=2, metavar="N", help="runs per kind, the best counts (default: 2)"
    )
    parser.add_argument("--step-times", action="store_true", help="also measure steps by their number of drafts")
    add_engine_flags(parser, leave_out=("drafts", "speculative_config"))
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of time, where other programs run")
    args = parser.parse_args()
    try:
        options = {"max_model_len": 2048, "max_num_seqs": 4, "enable_prefix_caching": False} | engine_options(args)
        with LLM(**options, drafts=f"{args.method}:{args.num_drafts}", use_tqdm_on_load=False) as llm:
            return compare(llm, args)
    except SlipstreamError as error:
        print(f"benchmarks/drafts_text.py: {error}", file=sys.stderr)
        return 2


def compare(llm: LLM, args: argparse.Namespace) -> int:
    core = llm.core
    planner = core.scheduler.drafts
    adaptive, counts = planner.length, planner.counts
    clock = time.process_time if args.cpu_time else time.perf_counter
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)

    def run(prompt: str, *, with_drafts: bool, adapts: bool = True) -> tuple[list[int], float]:
        """Tokens and seconds of one answer."""
        planner.length = adaptive if with_drafts and adapts else None
        planner.num_drafts = planner.num_proposed = args.num_drafts if with_drafts else 0
        begin = clock()
        result = llm.chat([{"role": "user", "content": prompt}], params, use_tqdm=False)[0]
        return list(result.outputs[0].token_ids), clock() - begin

    run(TASKS["free text"][0], with_drafts=True)  # compiles and captures
    print(
        f"{'kind of text':<14}{'none':>10}{args.method:>10}{'gain':>8}{'accepted':>10}{'per step':>10}{'tokens':>10}",
        flush=True,
    )
    num_different = 0
    for kind, prompts in TASKS.items():
        seconds, num_tokens, same = [0.0, 0.0], 0, True
        drafted, accepted, num_steps = counts.num_drafts, counts.num_accepted, 0
        for prompt in prompts:
            best = [float("inf"), float("inf")]
            answers: list[list[int]] = []
            for _ in range(args.repeats):
                for index in (0, 1):
                    before = core.num_steps
                    tokens, took = run(prompt, with_drafts=index == 1)
                    num_steps += (core.num_steps - before) * index
                    best[index] = min(best[index], took)
                    answers.append(tokens)
            same &= all(tokens == answers[0] for tokens in answers)
            num_tokens += len(answers[0])
            seconds = [total + own for total, own in zip(seconds, best, strict=True)]
        none, ngram = (num_tokens / own for own in seconds)
        num = counts.num_drafts - drafted
        share = f"{(counts.num_accepted - accepted) / num:>10.0%}" if num else f"{'':>10}"
        per_step = args.repeats * num_tokens / num_steps
        print(
            f"{kind:<14}{none:>10.1f}{ngram:>10.1f}{ngram / none - 1:>+8.0%}{share}{per_step:>10.2f}"
            f"{'equal' if same else 'DIFFER':>10}",
            flush=True,
        )
        num_different += not same
    if args.step_times:
        print(f"{'':<10}{'drafts':>8}{'steps':>8}{'device us':>12}{'idle us':>12}{'host us':>12}")
        prompts = [prompt for own in TASKS.values() for prompt in own]
        show_steps(llm, "none", lambda: [run(prompt, with_drafts=False) for prompt in prompts])
        show_steps(llm, "adaptive", lambda: [run(prompt, with_drafts=True) for prompt in prompts])
        show_steps(llm, "fixed", lambda: [run(prompt, with_drafts=True, adapts=False) for prompt in prompts])
    return 1 if num_different else 0


def show_steps(llm: LLM, name: str, run: Callable[[], object]) -> None:
    """Prints medians by number of drafts: time on the device, idle time of the device before the step, time of the
    host."""
    cores = {name: llm.core}
    log = StepLog(cores)
    run()
    llm.core.drain()
    stop(cores)
    found = defaultdict(list)
    for step in log.steps:
        if not step.prefill_tokens:
            found[step.drafts].append((step.end - step.start, step.gap, step.host))
    for drafts, times in sorted(found.items()):
        device, idle, host = (1e6 * median(own) for own in zip(*times, strict=True))
        print(f"{name:<10}{drafts:>8}{len(times):>8}{device:>12.0f}{idle:>12.0f}{host:>12.0f}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
