"""Time to first token of a decode engine that fetches a prompt's pages from a prefill engine, and of one that computes.

The prefill engine is in a process of its own, on the same device.

    python benchmarks/handoff.py --model MODEL --prompt-tokens 8192 --load-format dummy --cuda-ipc
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from slipstream import LLM, SamplingParams
from slipstream.handoff import mover

PREFILL = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def prefill(pipe: Connection, options: dict[str, Any], transfer: dict[str, Any], shape: tuple[int, int]) -> None:
    """The process of the prefill engine: sends its port and the prompts, and serves until it gets an answer."""
    with LLM(**options, kv_transfer_config=transfer | {"kv_role": "kv_producer", "kv_port": 0}) as llm:
        vocab_size = llm.core.config.model.info.vocab_size
        prompts, others = np.random.default_rng(0).integers(0, vocab_size, (2, *shape)).tolist()
        llm.generate(prompts, PREFILL, use_tqdm=False)
        assert llm.core.handoff is not None and llm.core.handoff.server is not None
        pipe.send((llm.core.handoff.server.port, prompts, others))
        pipe.recv()


def first_token(llm: LLM, prompts: list[list[int]], num_cached: int = 0) -> float:
    """Median seconds until the first token of a prompt, alone. `num_cached`: least number of cached tokens of each."""
    seconds = []
    for prompt in prompts:
        started = time.perf_counter()
        (result,) = llm.generate([prompt], PREFILL, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        assert (result.num_cached_tokens or 0) >= num_cached, "pages did not arrive"
    return statistics.median(seconds)


def measure(llm: LLM, prompts: list[list[int]], others: list[list[int]], *, by_device: bool) -> None:
    config, handoff = llm.core.config, llm.core.handoff
    assert handoff is not None
    peers = handoff._mover._peers
    num_tokens = len(prompts[0]) - 1
    page_bytes = sum(group.bytes_per_page for group in config.cache.groups)
    print(f"{num_tokens} tokens, {page_bytes * (num_tokens // config.cache.page_size) / 1e6:.0f} MB of pages; ", end="")
    print(f"first token after\n  computing the prompt: {first_token(llm, others) * 1e3:.0f} ms", flush=True)
    for way in ["pages by CUDA IPC"] * by_device + ["pages from shared memory", "pages over TCP"]:
        if way != "pages by CUDA IPC":
            for peer in peers.values():  # connect again, in another way
                peer.close()
                peer._mirror = None
        if way == "pages over TCP":
            mover.MappedMemory = _refuse  # type: ignore[assignment, misc]
        llm.reset_prefix_cache()
        seconds = first_token(llm, prompts, int(num_tokens * 0.99))
        if way == "pages by CUDA IPC":
            assert all(peer._mapped[2] is not None for peer in peers.values()), "the memory was not opened"
        print(f"  {way}: {seconds * 1e3:.0f} ms", flush=True)


def _refuse(name: str) -> None:
    raise OSError("not mapped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.4, help="gpu_memory_utilization of each engine")
    parser.add_argument("--buffer-gb", type=float, default=16, help="host memory of each engine for pages")
    parser.add_argument("--cuda-ipc", action="store_true", help="also from device to device; takes as much GPU memory")
    args = parser.parse_args()
    options: dict[str, Any] = dict(
        model=args.model,
        load_format=args.load_format,
        max_model_len=args.prompt_tokens + 64,
        use_tqdm_on_load=False,
        max_num_seqs=16,
    )
    transfer: dict[str, Any] = {"kv_buffer_size": int(args.buffer_gb * 1e9), "kv_timeout": 60}
    if args.cuda_ipc:
        transfer["kv_connector_extra_config"] = {"cuda_ipc": True}
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    shape = args.prompts, args.prompt_tokens + 1
    own = options | {"gpu_memory_utilization": args.memory}
    child = context.Process(target=prefill, args=(other, own, transfer, shape), daemon=True)
    child.start()
    other.close()  # so that the end of the process ends `recv`
    port, prompts, others = pipe.recv()
    consume = transfer | {"kv_role": "kv_consumer", "kv_peers": [f"127.0.0.1:{port}"]}
    memory = min(2 * args.memory, 1.0)  # the first engine has its share already
    with LLM(**options, gpu_memory_utilization=memory, kv_transfer_config=consume) as llm:
        measure(llm, prompts, others, by_device=args.cuda_ipc)
    pipe.send("end")
    child.join()


if __name__ == "__main__":
    main()
