"""The second tier of the prefix cache (kv_offloading_size): the same tokens, and fewer computed positions."""

from __future__ import annotations

import pytest

from delayed_device import DelayedDevice
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidOption
from slipstream.config import memory
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.runner.page_tier import PageTier
from tiny import write_tiny
from tiny_encoder import write_tiny_encoder

PROMPTS = [list(range(first, first + length)) for first, length in ((20, 37), (70, 30), (120, 45), (170, 33))]
PROMPTS.append(PROMPTS[0][:20] + PROMPTS[1][:15])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def make(folder, *, tier: float | None = 2**-14, device=None, **options) -> LLM:
    """24 pages of 4 positions: two prompts fit at once. 2**-14 GiB are 64 KiB."""
    options = {"num_pages": 25, "max_num_seqs": 4, "dtype": "float64", "max_model_len": 72} | options
    return LLM(
        str(folder),
        use_tqdm_on_load=False,
        page_size=4,
        num_threads=1,
        kv_offloading_size=tier,
        _device=device,
        **options,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: write_tiny(tmp_path_factory.mktemp(family), family) for family in ("llama", "gemma2")}


@pytest.fixture(scope="module")
def wanted(folders):
    """Tokens of each prompt alone, by family and dtype of the cache."""
    tokens = {}
    for family, cache_dtype in (("llama", "auto"), ("llama", "fp8"), ("gemma2", "auto")):
        options = {"num_pages": 400, "enable_prefix_caching": False, "kv_cache_dtype": cache_dtype}
        with make(folders[family], tier=None, **options) as llm:
            tokens[family, cache_dtype] = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
    return tokens


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"depth": 0}),
        ("llama", {"depth": 1, "max_num_batched_tokens": 9}),
        ("llama", {"depth": 1, "kv_cache_dtype": "fp8"}),
        ("llama", {"depth": 2, "drafts": "ngram:3"}),
        ("gemma2", {"depth": 2}),
    ],
)
def test_tokens_are_the_same_with_a_tier(folders, wanted, monkeypatch, family, options):
    monkeypatch.setattr(memory, "REGION_BYTES", 5000)  # a few pages at once
    device = DelayedDevice(options["depth"], longest=0.0005) if options["depth"] else None
    with make(folders[family], device=device, **options) as llm:
        tier = llm.core.scheduler.cache.tier
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY)
            tokens = [one.outputs[0].token_ids for one in outputs]
            assert tokens == wanted[family, options.get("kv_cache_dtype", "auto")]
        assert tier.num_hits and tier.bytes_loaded and tier.bytes_stored
        assert llm.core.scheduler.num_preemptions
        llm.core.scheduler.check()


def test_a_prompt_that_left_the_device_is_a_hit(folders):
    with make(folders["llama"], num_pages=20, tier=2**-11) as llm:
        llm.generate(PROMPTS[:4], GREEDY)
        (again,) = llm.generate(PROMPTS[:1], GREEDY)
        assert again.num_cached_tokens == 36  # all whole pages before the last token


def test_the_memory_of_slots_is_planned(folders):
    with make(folders["llama"], tier=2**-10) as llm:
        tier = llm.core.executor.find(PageTier)
        assert sum(group.tensor.nbytes for group in tier._groups) <= 2**20
        assert sum(group.tensor.nbytes for group in tier._groups) > 0.9 * 2**20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False}, "leave enable_prefix_caching on"),
        ({"tier": -1.0}, "GiB of host memory"),
        ({"tier": 2**-30}, "room for a page"),
        ({"kv_offloading_backend": "lmcache"}, "use native"),
    ],
)
def test_a_tier_that_cannot_work_is_refused(folders, options, message):
    with pytest.raises(InvalidOption, match=message):
        make(folders["llama"], **options)


def test_a_tier_of_an_encoder_is_refused(tmp_path):
    with pytest.raises(InvalidOption, match="kv_offloading_size is for models with a cache"):
        estimate_build(make_options(model=str(write_tiny_encoder(tmp_path)), kv_offloading_size=1.0))


def test_checkpoints_of_recurrent_states_are_stored_and_loaded(tmp_path):
    """Four checkpoints of prompts with three borders each: the first prompts lose theirs, and get them back."""
    folder = write_tiny(tmp_path, "qwen3_next")
    prompts = [[first + n % 9 for n in range(200 + first)] for first in range(3, 9)]
    options = dict(max_model_len=240, max_num_seqs=2, num_checkpoints=4, max_num_batched_tokens=80)
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def tokens(llm):
        return [one.outputs[0].token_ids for one in llm.generate(prompts, short)]

    with make(folder, tier=None, num_pages=400, enable_prefix_caching=False, **options) as llm:
        wanted = tokens(llm)
    with make(folder, tier=2**-6, num_pages=130, depth=2, **options) as llm:
        tier = llm.core.scheduler.cache.tier
        assert tokens(llm) == wanted
        before = tier.num_hits
        assert tokens(llm) == wanted
        llm.core.scheduler.check()
        assert tier.num_hits - before >= 4 * 192  # positions before the last borders of most prompts
    with pytest.raises(InvalidOption, match="raise num_checkpoints"):
        make(folder, num_pages=400, **options | {"num_checkpoints": 0})
