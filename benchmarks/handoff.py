"""Time to first token of a decode engine that fetches a prompt's pages from a prefill engine, and of one that computes.

Both engines are in this process, on one device; their threads share the interpreter, so the figures are an upper bound.

    python benchmarks/handoff.py --model MODEL --prompt-tokens 8192 --load-format dummy
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from slipstream import LLM, SamplingParams
from slipstream.engine import page_peer

PREFILL = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def first_token(llm: LLM, prompts: list[list[int]]) -> tuple[float, int]:
    """Median seconds until the first token of a prompt, alone; cached tokens of all."""
    seconds, cached = [], 0
    for prompt in prompts:
        started = time.perf_counter()
        (result,) = llm.generate([prompt], PREFILL, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        cached += result.num_cached_tokens or 0
    return statistics.median(seconds), cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.4, help="gpu_memory_utilization of each engine")
    parser.add_argument("--buffer-gb", type=float, default=16, help="host memory of each engine for pages")
    args = parser.parse_args()
    options: dict[str, Any] = dict(
        load_format=args.load_format, max_model_len=args.prompt_tokens + 64, use_tqdm_on_load=False, max_num_seqs=16
    )
    size = {"kv_buffer_size": int(args.buffer_gb * 1e9), "kv_timeout": 60}
    produce = size | {"kv_role": "kv_producer", "kv_port": 0}
    with LLM(args.model, **options, gpu_memory_utilization=args.memory, kv_transfer_config=produce) as producer:
        rng, vocab_size = np.random.default_rng(0), producer.core.config.model.info.vocab_size
        tokens = rng.integers(0, vocab_size, (2, args.prompts, args.prompt_tokens + 1))
        prompts, others = tokens.tolist()
        producer.generate(prompts, PREFILL, use_tqdm=False)
        assert producer.core.handoff is not None and producer.core.handoff.server is not None
        peer = f"127.0.0.1:{producer.core.handoff.server.port}"
        consume = size | {"kv_role": "kv_consumer", "kv_peers": [peer]}
        memory = 2 * args.memory  # the first engine has its share already
        with LLM(args.model, **options, gpu_memory_utilization=memory, kv_transfer_config=consume) as llm:
            page_bytes = sum(group.bytes_per_page for group in llm.core.config.cache.groups)
            num_bytes = page_bytes * (args.prompt_tokens // llm.core.config.cache.page_size)
            computed, _ = first_token(llm, others)
            mapped, cached = first_token(llm, prompts)
            assert cached >= args.prompts * args.prompt_tokens * 0.99, "pages did not arrive"
            print(f"{args.prompt_tokens} tokens, {num_bytes / 1e6:.0f} MB of pages; first token after")
            print(f"  computing the prompt: {computed * 1e3:.0f} ms")
            print(f"  pages from shared memory: {mapped * 1e3:.0f} ms")
            llm.reset_prefix_cache()
            page_peer.MappedMemory = _refuse  # type: ignore[assignment, misc]
            llm.core.handoff._client.close()  # type: ignore[union-attr]
            for each in llm.core.handoff._client._peers:  # type: ignore[union-attr]
                each._mapped = "", None
            over_tcp, cached = first_token(llm, prompts)
            assert cached >= args.prompts * args.prompt_tokens * 0.99, "pages did not arrive"
            print(f"  pages over TCP: {over_tcp * 1e3:.0f} ms")


def _refuse(name: str) -> None:
    raise OSError("not mapped")


if __name__ == "__main__":
    main()
