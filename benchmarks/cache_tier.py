"""Time to first token of prompts that left the device's cache: computed again, or loaded from the second tier.

    python benchmarks/cache_tier.py --prompts 32 --length 4096

Random weights in the shape of Qwen3-8B. The device's cache holds a few prompts, the tier all of them. Prompts are sent
one at a time, twice: the first round computes them, the second one loads them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

SHAPE = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=4096, intermediate_size=12288,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
    max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, torch_dtype="bfloat16", eos_token_id=0,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32, help="(default: 32)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt (default: 4096)")
    parser.add_argument("--layers", type=int, default=36, help="(default: 36)")
    parser.add_argument("--tier", type=float, default=24.0, help="GiB of host memory (default: 24)")
    parser.add_argument("--cache", default="4GiB", help="memory of the device's cache (default: 4GiB)")
    args = parser.parse_args()
    from slipstream import LLM, SamplingParams

    rng = random.Random(0)
    prompts = [[rng.randrange(1, 150000) for _ in range(args.length)] for _ in range(args.prompts)]
    params = SamplingParams(temperature=0, max_tokens=1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": args.layers}))
        with LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=args.length + 64,
            max_num_seqs=16,
            kv_cache_memory=args.cache,
            kv_offloading_size=args.tier,
        ) as llm:
            llm.generate([[7] * args.length], params)
            for name in ("computed", "loaded"):
                times, cached = [], 0
                for prompt in prompts:
                    start = time.perf_counter()
                    (result,) = llm.generate([prompt], params, use_tqdm=False)
                    times.append(1000 * (time.perf_counter() - start))
                    cached += result.num_cached_tokens or 0
                median, most = statistics.median(times), max(times)
                print(f"{name:<10} first token {median:8.1f} ms median, {most:8.1f} ms most, {cached} tokens cached")
            tier = llm.core.scheduler.cache.tier
            print(f"stored {tier.bytes_stored / 2**30:.1f} GiB, loaded {tier.bytes_loaded / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
