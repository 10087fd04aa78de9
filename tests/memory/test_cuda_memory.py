"""The estimate of `slipstream plan` bounds what an engine on a GPU takes of the allocator and of the card."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from slipstream import LLM, PoolingParams, SamplingParams
from slipstream.config.cache_size import LIBRARIES
from slipstream.config.memory import MemoryEstimate, estimate_memory
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.nn.load import weight_bytes
from small_model import write_small
from tiny_tokenizer import write_byte_tokenizer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="reads the whole card's memory: run it without -n"),
]

VOCABULARY = 151_936
WIDE = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    head_dim=128,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=16,
    num_key_value_heads=8,
    tie_word_embeddings=True,
    vocab_size=VOCABULARY,
    max_position_embeddings=16_384,
    torch_dtype="bfloat16",
)
BERT = dict(
    architectures=["BertModel"],
    model_type="bert",
    hidden_act="gelu",
    hidden_size=1024,
    intermediate_size=4096,
    num_attention_heads=16,
    num_key_value_heads=16,
    layer_norm_eps=1e-12,
    max_position_embeddings=512,
    type_vocab_size=2,
    vocab_size=30_522,
    torch_dtype="float32",
)
SHORT = dict(max_tokens=6, ignore_eos=True)
SAMPLING = {
    "greedy": dict(temperature=0.0),
    "random": dict(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, logprobs=20),
    "penalties": dict(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, top_p=0.9, logprobs=5),
    "allowed": dict(allowed_token_ids=list(range(0, VOCABULARY, 3)), logit_bias={5: 1.0, 9: -1.0}, logprobs=5),
    "stop ids": dict(min_tokens=5, stop_token_ids=list(range(1000, 5000)), top_p=0.9),
    "many stop ids": dict(min_tokens=5, stop_token_ids=list(range(1000, 150_000))),
    "bad words": dict(bad_words=["a", "bad word", "x" * 32, *(f"{i:04}" for i in range(500))], logprobs=1),
    "many bad words": dict(bad_words=["y" * 32, *(f"{i:05}" for i in range(6000))]),
    "given": dict(logprob_token_ids=list(range(4000)), logprobs=3),
    "many given": dict(logprob_token_ids=list(range(100_000))),
    "whole": dict(logprobs=-1),
    "prompt": dict(temperature=0.0, prompt_logprobs=20),
    "whole prompt": dict(prompt_logprobs=-1),
    "all": dict(
        top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=5, prompt_logprobs=5, min_tokens=3, stop_token_ids=[7],
        logit_bias={3: 1.0}, bad_words=["ab"], logprob_token_ids=[3, 4],
    ),
}  # fmt: skip


@dataclass
class Kind:
    model: dict[str, Any]
    options: dict[str, Any]

    @property
    def generates(self) -> bool:
        return "CausalLM" in self.model["architectures"][0]


EMBEDDER = WIDE | dict(architectures=["Qwen3Model"])
KINDS = {
    "generator": Kind(WIDE, {}),
    "few rows": Kind(WIDE, dict(max_num_seqs=13, max_num_batched_tokens=1500, max_model_len="auto")),
    "many rows": Kind(WIDE, dict(max_num_seqs=300, max_num_batched_tokens=3001, max_model_len=1000)),
    "eager": Kind(WIDE, dict(enforce_eager=True, max_num_seqs=70, max_num_batched_tokens=1100, max_model_len="auto")),
    "embedder": Kind(EMBEDDER, {}),
    "small steps": Kind(EMBEDDER, dict(max_num_seqs=9, max_num_batched_tokens=1200, max_model_len=3000)),
    "encoder": Kind(BERT, {}),
}


class Taken:
    """Of the card's memory, since this was made."""

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._reserved = torch.cuda.memory_reserved()
        self.before, self.total = self._used()

    def _used(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info()
        return total - free, total

    @property
    def reserved(self) -> int:
        """The most that torch ever held. It gives nothing back unless it must."""
        return torch.cuda.max_memory_reserved() - self._reserved

    @property
    def used(self) -> int:
        return self._used()[0] - self.before


def options_for(kind: Kind, folder: str, card: Taken) -> dict[str, Any]:
    """On a card that has room for what is foretold, and for a cache of a few requests."""
    common = dict(model=folder, device="cuda", load_format="dummy", max_itl=0.0)  # the default of LLM
    length = kind.options.get("max_model_len", min(4096, kind.model["max_position_embeddings"]))
    pages = dict(num_pages=4 * 4096 // 16, max_model_len=4096 if length == "auto" else length)
    _, memory = estimate_build(make_options(**(common | kind.options | pages)))
    share = (card.before + memory.of_device + LIBRARIES) / card.total
    return common | dict(max_model_len=length) | kind.options | dict(gpu_memory_utilization=share)


def estimate_of(llm: LLM) -> MemoryEstimate:
    """With the cache that it found room for."""
    return estimate_memory(llm.config, weight_bytes(llm.config.model, "cuda"))


def prompts_for(llm: LLM, *, long: bool) -> list[list[int]]:
    """As many as there are rows, or few and long."""
    scheduler = llm.config.scheduler
    rows, length = scheduler.max_num_seqs, min(scheduler.max_model_len - 8, 3000)
    if long:
        return [[(5 * row + i) % 251 for i in range(length - 3 * row)] for row in range(min(rows, 6))]
    return [[(5 * row + i) % 251 for i in range(40 + row % 7)] for row in range(2 * rows)]


def run_all(llm: LLM):
    """Yields the name of each that has run."""
    if llm.config.model.generates:
        for name, params in SAMPLING.items():
            for long in (False, True):
                prompts = prompts_for(llm, long=long)
                if name.startswith(("many", "whole")):
                    prompts = [prompt[:12] for prompt in prompts[:8]]
                llm.generate(prompts, SamplingParams(**SHORT, **params), use_tqdm=False)
            yield name
        return
    for settings in (dict(), dict(normalize=False), dict(dimensions=64), dict(dimensions=48, normalize=False)):
        for long in (False, True):
            llm.embed(prompts_for(llm, long=long), PoolingParams(**settings), use_tqdm=False)
        yield f"embed {settings}"
    for long in (False, True):
        prompts = prompts_for(llm, long=long)
        llm.encode(prompts, pooling_task="token_embed", use_tqdm=False)
        yield "tokens"
        mixed = [PoolingParams(task="token_embed" if i % 2 else "embed") for i in range(len(prompts))]
        llm.encode(prompts, mixed, use_tqdm=False)
        yield "tokens beside vectors"
        prompts = [prompt[:30] for prompt in prompts]
        half = min(64, len(prompts) // 2)
        asked = [PoolingParams(task="token_embed", query_key=f"{i}", query_uses=1) for i in range(half)]
        answered = [PoolingParams(task="token_embed", query_key=f"{i}") for i in range(half)]
        llm.encode(prompts[:half], asked, use_tqdm=False)
        llm.encode(prompts[half : 2 * half], answered, use_tqdm=False)
        yield "late interaction"


@pytest.mark.parametrize("name", KINDS)
def test_no_more_memory_is_taken_than_planned(tmp_path, name):
    kind = KINDS[name]
    folder = write_small(tmp_path, **kind.model)
    write_byte_tokenizer(tmp_path)
    card = Taken()
    with LLM(**options_for(kind, folder, card), use_tqdm_on_load=False) as llm:
        memory = estimate_of(llm)
        for done in ("start", *run_all(llm)):
            assert card.reserved <= memory.of_device, done
            assert card.used <= memory.of_device + LIBRARIES, done
            if llm.config.cache.groups:
                assert torch.cuda.mem_get_info()[0] >= llm.config.device.keep_free, done
        assert not llm.core.executor.graphs.gave_up
        assert not torch.cuda.memory_stats()["num_alloc_retries"], "it came to the end of its memory"
