"""Accuracy of low-bit inference against float32 with the same weights: KL of next-token distributions, greedy text.

    python benchmarks/low_bit_accuracy.py                                    # CPU: low-bit GEMMs
    python benchmarks/low_bit_accuracy.py --device cuda --dtype bfloat16     # GPU: weights dequantized to bfloat16
    python benchmarks/low_bit_accuracy.py --model file.gguf --text book.txt --positions 8192

The reference is the same file with `dequantize=True` and `dtype="float32"` on the same device. The text is split into
windows, and the distributions at every position are compared: KL(reference || candidate) in nats. Each window is
computed in one step, and again with one token per step, as in decoding. The default text is this repository's licence
and documentation.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from slipstream import LLM, SamplingParams
from slipstream.api.evaluation import DistributionReader, compare, cut_windows, summarize, token_ids

ROOT = Path(__file__).parent.parent
TEXTS = ["LICENSE", "README.md", "docs/serving.md", "docs/pooling.md", "docs/cache.md"]
QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "How many legs does a spider have?",
    "Who wrote Hamlet?",
    "What is 12 times 12?",
    "Explain gravity to a child.",
    "Give me a recipe for pancakes.",
    "What is photosynthesis?",
    "Translate 'good morning' into French.",
    "List the planets of the solar system.",
    "What does a compiler do?",
    "Write a haiku about snow.",
    "When did the Second World War end?",
    "What is the largest ocean?",
]


class Engine(DistributionReader):
    """An LLM of one request at a time, with steps of at most `step_tokens` tokens."""

    def __init__(self, step_tokens: int, **options: Any) -> None:
        super().__init__(
            LLM(
                max_num_seqs=1,
                max_num_batched_tokens=step_tokens,
                num_pages=128,  # few, so that several engines fit one device
                enable_prefix_caching=False,
                use_tqdm_on_load=False,
                **options,
            )
        )

    def answers(self, num_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        results = self.llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], params, use_tqdm=False)
        self.seen.clear()
        return [list(result.outputs[0].token_ids) for result in results]


def summary(parts: list[torch.Tensor]) -> dict[str, float]:
    return {"positions": sum(part.shape[1] for part in parts)} | asdict(summarize(parts))


def same_answers(reference: list[list[int]], candidate: list[list[int]]) -> str:
    return f"{sum(a == b for a, b in zip(reference, candidate, strict=True))} of {len(reference)}"


def measure(args: argparse.Namespace) -> dict[str, Any]:
    common = {"model": args.model, "device": args.device, "max_model_len": 1024}
    low_bit = {"dtype": args.dtype, "dequantize": False} | common
    engines = {
        "reference": Engine(args.window + 1, dtype="float32", dequantize=True, **common),
        "whole prompt": Engine(args.window + 1, **low_bit),
        "token by token": Engine(1, **low_bit),
    }
    parts: dict[str, list[torch.Tensor]] = {"whole prompt": [], "token by token": [], "one from other": []}
    llm = engines["reference"].llm
    tokens = [token for path in args.text for token in token_ids(llm, path.read_text())]
    for ids in cut_windows(tokens, args.window, args.positions):
        found = {name: engine.logprobs(ids) for name, engine in engines.items()}
        for name in ("whole prompt", "token by token"):
            parts[name].append(compare(found["reference"], found[name]))
        parts["one from other"].append(compare(found["whole prompt"], found["token by token"]))
    wanted = engines["reference"].answers(args.tokens)
    return {
        "device": args.device,
        "dtype": args.dtype,
        "rows": {name: summary(part) for name, part in parts.items()},
        "greedy": {
            name: same_answers(wanted, engines[name].answers(args.tokens))
            for name in ("whole prompt", "token by token")
        },
    }


def show(result: dict[str, Any], tokens: int) -> None:
    print(f"{'':18}{'positions':>10}{'mean KL':>11}{'99%':>11}{'max':>11}{'top-1':>9}{'logprob max':>13}{'greedy':>12}")
    for name, row in result["rows"].items():
        print(
            f"{name:18}{row['positions']:>10}{row['kl_mean']:>11.2e}{row['kl_p99']:>11.2e}{row['kl_max']:>11.2e}"
            f"{row['top1']:>9.4f}{row['logprob_max']:>13.2e}{result['greedy'].get(name, ''):>12}"
        )
    print(
        "KL in nats against dequantised float32; 'one from other' compares the two rows above it with each other; "
        f"logprob max: of tokens with a probability over 1e-4; greedy: equal answers of up to {tokens} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="accuracy of low-bit products against dequantised float32 weights")
    parser.add_argument("--model", help="a GGUF file; default: the embedded model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of the candidate; float32 on the CPU keeps weights low-bit")
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / name for name in TEXTS])
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=24, help="tokens per greedy output")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    result = measure(args)
    show(result, args.tokens)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
