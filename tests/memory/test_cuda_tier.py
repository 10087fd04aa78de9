"""The second tier of the prefix cache on a GPU: tokens of the CPU, captured graphs, no wait of the host."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from tiny import write_tiny

pytestmark = pytest.mark.cuda

PROMPTS = [[i + 3, *range(20 + 10 * i, 60 + 12 * i), i + 5] for i in range(6)]
OPTIONS = dict(use_tqdm_on_load=False, max_model_len=160, page_size=16, max_num_seqs=4, dtype="float32")
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def tokens(results):
    return [sample.token_ids for result in results for sample in result.outputs]


@pytest.mark.parametrize(
    "options", [dict(depth=2), dict(depth=1, kv_cache_dtype="fp8"), dict(depth=1, drafts="ngram:3")]
)
def test_tokens_are_the_same_and_nothing_waits(tmp_path, monkeypatch, options):
    folder = str(write_tiny(tmp_path, "qwen3", head_dim=64))
    few = dict(num_pages=15, kv_offloading_size=2**-6)
    cache_dtype = options.get("kv_cache_dtype", "auto")
    with LLM(folder, **OPTIONS, num_pages=96, kv_cache_dtype=cache_dtype, device="cuda", depth=0) as llm:
        wanted = tokens(llm.generate(PROMPTS, GREEDY))
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "error")
    with LLM(folder, **OPTIONS, **few, **options, device="cuda") as llm:
        hot_path, tier = llm.core.executor.hot_path, llm.core.scheduler.cache.tier
        for mode in ("", "", "error"):  # eager, captured, replayed
            hot_path.mode = mode
            assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
        assert not hot_path.log.found
        assert tier.bytes_loaded and tier.num_hits
