"""Tensor parallel over NCCL at world size 1: collectives in captured graphs, and the tokens of plain layers."""

from __future__ import annotations

import pytest
import torch

from one_rank import divide_among_one
from slipstream import LLM, SamplingParams
from slipstream.device.sync_check import watch
from tiny import write_tiny

pytestmark = pytest.mark.cuda

OPTIONS = dict(use_tqdm_on_load=False, max_model_len=128, page_size=16, max_num_seqs=4, dtype="float32", device="cuda")
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
FAMILIES = {
    "qwen3": {"head_dim": 64},
    "qwen3_next": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
}
PROMPTS = [[i + 3, *range(20, 30 + 7 * i), i + 5] for i in range(4)]


def tokens(results):
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_collectives_give_the_tokens_of_plain_layers(tmp_path, monkeypatch, family):
    folder = str(write_tiny(tmp_path, family, **FAMILIES[family]))
    with LLM(folder, **OPTIONS, num_pages=64) as llm:
        wanted = [tokens(llm.generate(PROMPTS, params)) for params in (GREEDY, DRAWN)]
    divide_among_one(monkeypatch, tmp_path / "store")
    with LLM(folder, **OPTIONS, num_pages=64) as llm:
        group = llm.core.executor._ranks.group
        assert [tokens(llm.generate(PROMPTS, params)) for params in (GREEDY, DRAWN)] == wanted
        assert group.num_calls > 10 and not llm.core.executor.runner.graphs.gave_up
        before = group.num_calls
        with watch() as log:
            assert tokens(llm.generate(PROMPTS[:1], GREEDY)) == wanted[0][:1]
        assert not log.found, "\n".join(map(str, log.found))
        # steps of one token replay graphs, in which the collectives are
        assert group.num_calls - before < GREEDY.max_tokens


def test_the_cache_of_ranks_is_measured(tmp_path, monkeypatch):
    """Also by a second engine of the process, which connects again."""
    folder = str(write_tiny(tmp_path, "qwen3", head_dim=64))
    free, total = torch.cuda.mem_get_info()
    options = OPTIONS | {"gpu_memory_utilization": min(0.98, 1 - free / total + 0.1)}
    with LLM(folder, **options) as llm:
        wanted, num_pages = tokens(llm.generate(PROMPTS, GREEDY)), llm.config.cache.num_pages
    divide_among_one(monkeypatch, tmp_path / "store")
    for _ in range(2):
        with LLM(folder, **options) as llm:
            assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
            assert llm.config.cache.num_pages == num_pages
