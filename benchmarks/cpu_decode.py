"""Decode speed of the default model, or of a GGUF file, on the CPU, compared with other engines in the same run.

    python benchmarks/cpu_decode.py                     # all threads, batches of 1 and 8
    python benchmarks/cpu_decode.py --threads 1         # on a busy machine, use the CPU column of this
    python benchmarks/cpu_decode.py --model FILE.gguf   # benchmarks/random_gguf.py makes one with K-quants
    python benchmarks/cpu_decode.py --json result.json

Prompts of 32 tokens, 128 new tokens, greedy. A step samples one token for every row of the batch; reported is the
median step, in wall time and in CPU time of the process. The floor is the time of the GEMMs of a step alone. Peers:
transformers `generate` in float32 with the same dequantized weights, and llama.cpp with the same file if `llama_cpp` is
installed. Rounds alternate between engines, so that a slow phase of the machine affects all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream import LLM, SamplingParams
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.gguf_info import gguf_model_info
from slipstream.checkpoint.locate import locate
from slipstream.contracts.messages import Submit
from slipstream.nn.weights.gguf import GgufSource
from slipstream.ops.gemm.low_bit import find_kernel
from slipstream.ops.platform import native

PROMPT, NEW = 32, 128
PEER = "transformers float32"
Step = tuple[float, float]  # seconds of wall and CPU time


class Clock:
    """Times between calls of `tick`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._last: Step | None = None

    def tick(self) -> None:
        now = (time.perf_counter(), time.process_time())
        if self._last is not None:
            self.steps.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now


def prompts(batch: int) -> list[list[int]]:
    return [np.random.default_rng(row).integers(1000, 40_000, PROMPT).tolist() for row in range(batch)]


class Ours:
    def __init__(self, path: Path, dequantize: bool, threads: int) -> None:
        self.llm = LLM(
            str(path),
            dequantize=dequantize,
            dtype="float32",
            num_threads=threads,
            max_model_len=256,
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
        )

    def run(self, batch: int) -> list[Step]:
        core, clock = self.llm.core, Clock()
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        for row, ids in enumerate(prompts(batch)):
            core.submit(Submit(f"{time.perf_counter_ns()}-{row}", ids, params, time.time()))
        core.step()  # prefill
        clock.tick()
        while core.has_requests():
            core.step()
            clock.tick()
        return clock.steps

    def floor(self, batch: int) -> Callable[[], None]:
        model = self.llm.core.executor.model
        weights = [module.weight for module in model.modules() if hasattr(module, "num_inputs")]
        weights.append(model.embedding.weight)
        sizes = [module.num_inputs for module in model.modules() if hasattr(module, "num_inputs")]
        sizes.append(model.embedding(torch.zeros(1, dtype=torch.long)).shape[1])
        inputs = [torch.randn(batch, size) for size in sizes]
        return lambda: [w.multiply(x, None) for w, x in zip(weights, inputs, strict=True)] and None


class Transformers:
    def __init__(self, path: Path, threads: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        info = gguf_model_info(GgufFile(path))
        config = LlamaConfig(
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            intermediate_size=info.ffn_size,
            num_hidden_layers=info.num_layers,
            num_attention_heads=info.num_heads,
            num_key_value_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            rms_norm_eps=info.norm_eps,
            max_position_embeddings=info.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": info.rope.theta},
            tie_word_embeddings=info.tied_embeddings,
        )
        self.model = LlamaForCausalLM(config).eval()
        source = GgufSource(GgufFile(path), info.num_heads, info.num_kv_heads)
        self.model.load_state_dict({tensor.name: tensor.read() for tensor in source}, strict=False)
        self.model.generation_config.eos_token_id = None
        self.threads = threads

    def run(self, batch: int) -> list[Step]:
        clock = Clock()

        def watch(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            clock.tick()
            return torch.zeros(len(ids), dtype=torch.bool)

        torch.set_num_threads(self.threads)
        ids = torch.tensor(prompts(batch))
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[watch],
            )
        return clock.steps

    def floor(self, batch: int) -> Callable[[], None]:
        weights = [module.weight for module in self.model.modules() if isinstance(module, torch.nn.Linear)]
        inputs = [torch.randn(batch, weight.shape[1]) for weight in weights]

        def products() -> None:
            for weight, x in zip(weights, inputs, strict=True):
                torch.nn.functional.linear(x, weight)

        return products


class LlamaCpp:
    """Uses the C functions of the library, since its Python class runs one sequence at a time."""

    def __init__(self, path: Path, threads: int, batch: int) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 256 * batch
        params.n_batch = params.n_ubatch = max(512, PROMPT * batch)
        params.n_seq_max = batch
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, batch: int) -> list[Step]:
        clock = Clock()
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        ids = self._decode(
            [(row, place, token) for row, p in enumerate(prompts(batch)) for place, token in enumerate(p)]
        )
        last = [ids[(row + 1) * PROMPT - 1] for row in range(batch)]
        clock.tick()
        for place in range(PROMPT, PROMPT + NEW - 1):
            last = self._decode([(row, place, token) for row, token in enumerate(last)])
            clock.tick()
        return clock.steps

    def _decode(self, tokens: list[tuple[int, int, int]]) -> list[int]:
        """The most likely token after each."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (row, place, token) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, place, 1, 1
            batch.seq_id[i][0] = row
        assert self.api.llama_decode(self.context, batch) == 0
        found = []
        for i in range(len(tokens)):
            logits = ctypes.cast(self.api.llama_get_logits_ith(self.context, i), ctypes.POINTER(ctypes.c_float))
            found.append(int(np.ctypeslib.as_array(logits, (self.num_tokens,)).argmax()))
        self.api.llama_batch_free(batch)
        return found


def timed(work: Callable[[], None], times: int = 15) -> list[Step]:
    clock = Clock()
    for _ in range(times + 3):
        work()
        clock.tick()
    return clock.steps[2:]


def middle(steps: list[Step]) -> Step:
    wall, cpu = zip(*steps, strict=True)
    return statistics.median(wall), statistics.median(cpu)


def measure(path: Path, batches: list[int], threads: int, rounds: int) -> list[dict[str, Any]]:
    native.build()  # an engine has them after its first second
    engines: dict[str, Any] = {
        "slipstream low-bit": Ours(path, False, threads),
        "slipstream float32": Ours(path, True, threads),
        PEER: Transformers(path, threads),
    }
    results = []
    for batch in batches:
        running = dict(engines)
        if importlib.util.find_spec("llama_cpp"):
            running["llama.cpp"] = LlamaCpp(path, threads, batch)
        steps: dict[str, list[Step]] = {name: [] for name in running}
        floors: dict[str, list[Step]] = {name: [] for name in running}
        for number in range(rounds + 1):
            for name, engine in running.items():
                of_round = engine.run(batch)
                if number:  # the first warms up
                    steps[name] += of_round[2:]
                    if hasattr(engine, "floor"):
                        floors[name] += timed(engine.floor(batch))
        for name in running:
            wall, cpu = middle(steps[name])
            floor = middle(floors[name]) if floors[name] else (None, None)
            results.append(
                {
                    "engine": name,
                    "batch": batch,
                    "wall": wall,
                    "cpu": cpu,
                    "floor_wall": floor[0],
                    "floor_cpu": floor[1],
                }
            )
    peers = {r["batch"]: r for r in results if r["engine"] == PEER}
    for result in results:
        result["ratio_wall"] = peers[result["batch"]]["wall"] / result["wall"]
        result["ratio_cpu"] = peers[result["batch"]]["cpu"] / result["cpu"]
    return results


def show(results: list[dict[str, Any]]) -> None:
    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.1f}"

    print(f"{'':24}{'batch':>6}{'step ms':>9}{'CPU ms':>9}{'tok/s':>8}{'floor ms':>10}{'CPU':>8}{'ratio':>8}{'CPU':>7}")
    for r in results:
        print(
            f"{r['engine']:24}{r['batch']:6}{ms(r['wall']):>9}{ms(r['cpu']):>9}{r['batch'] / r['wall']:8.1f}"
            f"{ms(r['floor_wall']):>10}{ms(r['floor_cpu']):>8}{r['ratio_wall']:8.2f}{r['ratio_cpu']:7.2f}"
        )
    print(f"ratio: speed relative to {PEER}, by wall time and by CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description="decode speed of the default model on the CPU, beside its peers")
    parser.add_argument("--model", type=Path, help="a GGUF file of a llama model; default: the default model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    results = measure(args.model or locate(None, None).path, args.batches, args.threads, args.rounds)
    kernel = find_kernel()
    print(f"{args.threads} threads, torch {torch.__version__}, low-bit kernel: {kernel.name if kernel else 'none'}")
    show(results)
    if args.json:
        args.json.write_text(json.dumps({"threads": args.threads, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
