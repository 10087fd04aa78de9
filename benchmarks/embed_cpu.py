"""Embedding on the CPU compared with sentence-transformers: MiniLM, sentences of mixed lengths, float32.

    python benchmarks/embed_cpu.py                 # 512 sentences, engines alternate, best of 3
    python benchmarks/embed_cpu.py --start         # also the time from process start to first vector

Both engines get the same texts and number of threads, and their vectors are compared. Needs sentence-transformers and
the package of the default embedder (or --model FOLDER).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from slipstream.checkpoint.locate import default_embedder

FIRST_OURS = """
from slipstream import LLM
LLM({model!r}, task="embed", num_threads={threads}).embed("The first of many.", use_tqdm=False)
"""
FIRST_THEIRS = """
import torch
torch.set_num_threads({threads})
from sentence_transformers import SentenceTransformer
SentenceTransformer({model!r}, device="cpu").encode("The first of many.", show_progress_bar=False)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a sentence-transformers folder; default the embedded MiniLM")
    parser.add_argument("--num", type=int, default=512, help="sentences")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start", action="store_true", help="also measure the time from start to first vector")
    args = parser.parse_args()
    model = args.model or str(default_embedder().path)
    if args.start:
        compare_starts(model, args.threads, args.rounds)
    compare_throughput(model, sentences(args.num), args.threads, args.rounds)


def sentences(num: int, seed: int = 0) -> list[str]:
    """Text of this repository, cut to sentence lengths: mostly short, a few long."""
    rng = random.Random(seed)
    root = Path(__file__).parents[1]
    words = " ".join(path.read_text() for path in sorted([*root.glob("*.md"), *root.glob("docs/*.md")])).split()
    found = []
    for _ in range(num):
        size = min(int(rng.lognormvariate(2.2, 0.75)) + 1, 120)
        start = rng.randrange(len(words) - size)
        found.append(" ".join(words[start : start + size]))
    return found


def compare_throughput(model: str, texts: list[str], threads: int, rounds: int) -> None:
    import torch
    from sentence_transformers import SentenceTransformer

    from slipstream import LLM

    torch.set_num_threads(threads)
    theirs = SentenceTransformer(model, device="cpu")
    ours = LLM(model, task="embed", num_threads=threads, use_tqdm_on_load=False)
    calls: dict[str, Callable[[], np.ndarray]] = {
        "slipstream": lambda: np.stack([one.outputs.data for one in ours.embed(texts, use_tqdm=False)]),
        "sentence-transformers": lambda: theirs.encode(texts, batch_size=32, show_progress_bar=False),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    busy: dict[str, list[float]] = {name: [] for name in calls}
    vectors: dict[str, np.ndarray] = {}
    for call in calls.values():
        call()  # warm up
    for _ in range(rounds):
        for name, call in calls.items():
            start, own = time.perf_counter(), time.process_time()
            vectors[name] = call()
            times[name].append(time.perf_counter() - start)
            busy[name].append(time.process_time() - own)
    tokens = sum(one.num_prompt_tokens for one in ours.embed(texts, use_tqdm=False))
    a, b = vectors.values()
    distance = float((1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).max())
    print(
        f"{len(texts)} sentences, {tokens} tokens, {threads} threads, float32; largest cosine distance {distance:.1e}"
    )
    for name, seconds in times.items():
        best = min(seconds)
        print(f"  {name:<22} {len(texts) / best:8.1f} sentences/s  {tokens / best:9.0f} tokens/s  (best of {rounds})")
    for name, taken in (("wall", times), ("processor", busy)):  # CPU time is comparable on a busy machine too
        ours_best, theirs_best = (min(seconds) for seconds in taken.values())
        print(f"  ratio of {name} time {theirs_best / ours_best:.2f}")
    ours.close()


def compare_starts(model: str, threads: int, rounds: int) -> None:
    """Time from process start to the first vector; engines alternate."""
    programs = {"slipstream": FIRST_OURS, "sentence-transformers": FIRST_THEIRS}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program.format(model=model, threads=threads)], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        print(f"  start to first vector  {name:<22} {seconds:6.2f} s")
    print(f"  ratio {medians['sentence-transformers'] / medians['slipstream']:.1f}")


if __name__ == "__main__":
    main()
