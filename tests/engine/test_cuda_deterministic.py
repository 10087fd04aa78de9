"""A deterministic engine on a GPU: tokens and logprobs have the same bits in every batch, order and chunk, and alone.

One small model of each kind answers requests of every length through a cache that holds a part of them, in chunks and
two steps ahead, so that steps of all sizes, preemptions and prefix hits come. Sizes are those of tiny models, but the
steps are large enough for every choice by number of rows: experts of 65 and more tokens, splits of attention, tiles.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest

import quantized_checkpoint
from slipstream import LLM, SamplingParams
from tiny import write_tiny
from tiny_gguf import write_gguf

pytestmark = pytest.mark.cuda

HEADS: dict[str, Any] = {"head_dim": 64}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense": ("qwen3", HEADS, ""),
    "windows and softcaps": ("gemma2", HEADS, ""),
    "two head sizes": ("gemma4", {"head_dim": 64, "global_head_dim": 128}, ""),
    "experts": ("qwen3_moe", HEADS, ""),
    "a shared expert": ("qwen2_moe", {}, ""),
    "a shared expert and a correction": ("glm4_moe", HEADS, ""),
    "sinks and biases of experts": ("gpt_oss", HEADS, ""),
    "latent attention": ("deepseek_v3", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, ""),
    "awq": ("qwen3", HEADS, "awq"),
    "fp8 in blocks": ("qwen3", HEADS, "fp8 block"),
    "fp8 by channel": ("qwen3", HEADS, "fp8 channel"),
    "experts in fp8": ("qwen3_moe", {**HEADS, "moe_intermediate_size": 64}, "fp8 block"),
    "convolutions": ("lfm2_moe", {}, ""),
    "Mamba-1 and attention": ("jamba", {}, ""),
    "several streams": ("gemma3n", HEADS, ""),
    "gguf": ("llama", {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}, "gguf"),
}
DRAFTED = ("dense", "experts")
OPTIONS: dict[str, Any] = dict(
    dtype="bfloat16", deterministic=True, device="cuda", max_model_len=512, max_num_seqs=64, page_size=16,
    num_pages=110, max_num_batched_tokens=512, depth=2, use_tqdm_on_load=False,
)  # fmt: skip
ALONE: dict[str, Any] = dict(
    depth=0, enforce_eager=True, enable_prefix_caching=False, num_pages=200, max_num_batched_tokens=8192
)


def requests(num: int = 96) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 300 tokens, a third with a common start, and their parameters: greedy or drawn."""
    draw = random.Random(5)
    common = draw.choices(range(300), k=96)
    prompts = []
    for i in range(num):
        # short prompts have long answers, which outgrow the cache
        own = draw.choices(range(300), k=draw.choice([1, 3, 17] if i < num // 3 else [17, 64, 65, 130, 300]))
        prompts.append([*common, *own] if i % 3 == 0 and i >= num // 3 else own)
    params = [
        SamplingParams(
            temperature=0 if i % 2 else 0.9, seed=i, top_p=0.9, top_k=20, logprobs=2, ignore_eos=True,
            repetition_penalty=1.2 if i % 5 == 0 else 1.0, logit_bias={5: 3.0} if i % 7 == 0 else None,
            max_tokens=150 if i < num // 3 else draw.randint(8, 24),
        )
        for i in range(num)
    ]  # fmt: skip
    return prompts, params


def bits(result: Any) -> list[Any]:
    """Tokens, and logprobs to the last bit."""
    return [
        (sample.token_ids, [[(i, p.logprob) for i, p in at.items()] for at in sample.logprobs])
        for sample in result.outputs
    ]


def differing(got: list[Any], wanted: list[Any]) -> list[int]:
    return [i for i, (one, other) in enumerate(zip(got, wanted, strict=True)) if one != other]


def write(folder: Path, kind: str) -> str:
    family, config, form = KINDS[kind]
    write_tiny(folder, family, **config)
    if form == "gguf":
        return str(write_gguf(folder, gguf.GGMLQuantizationType.Q4_K, pre="qwen2"))
    if form:
        quantized_checkpoint.quantize(folder, form)
    return str(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_have_the_same_bits_in_every_order_and_alone(tmp_path, kind):
    model = write(tmp_path, kind)
    prompts, params = requests()
    for drafts in (None, "ngram:3") if kind in DRAFTED else (None,):
        with LLM(model, **OPTIONS, drafts=drafts) as llm:
            first = [bits(result) for result in llm.generate(prompts, params)]
            assert llm.core.scheduler.num_preemptions > 0, "the cache held every request"
            backwards = [bits(result) for result in llm.generate(prompts[::-1], params[::-1])][::-1]
        some = range(0, len(prompts), 4)
        with LLM(model, **OPTIONS | ALONE) as llm:
            alone = [bits(llm.generate([prompts[i]], params[i])[0]) for i in some]
        assert differing(backwards, first) == [], "in reversed order"
        assert differing([first[i] for i in some], alone) == [], "alone"
