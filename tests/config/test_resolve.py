"""resolve: every default, in one pure function."""

from __future__ import annotations

import msgspec
import pytest

from hand_cache import make_spec
from slipstream.base.errors import InvalidOption, NotEnoughMemory
from slipstream.checkpoint.model_info import ModelInfo, ModelSizes
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.config.cache_size import fit_cache
from slipstream.config.memory import Machine
from slipstream.config.options import Options, make_options, parse_bytes
from slipstream.config.resolve import Source, resolve, resolve_dtype
from slipstream.contracts.cache_spec import CacheGroup, StateSpec
from slipstream.nn.shapes import DeltaShape
from slipstream.nn.ssm_shapes import Mamba2Shape, ShortConvShape

INFO = ModelInfo(
    architecture="LlamaForCausalLM", vocab_size=100, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_size=128, max_positions=1024, norm_eps=1e-6, activation="silu", tied_embeddings=True,
    dtype="bfloat16",
)  # fmt: skip
SIZES = ModelSizes(widest=400, rotary=48, split_sums=72, keys=32)
GROUPS = (CacheGroup(make_spec(2, 16), (0, 1)),)
PAGE_BYTES = GROUPS[0].bytes_per_page
CPU = Machine("cpu", 8 * 2**30, 16 * 2**30, 4, ("float32",))
GPU = Machine("cuda", 70 * 2**30, 80 * 2**30, 8, ("bfloat16", "float16", "float32"))


def settle(machine=CPU, info=INFO, groups=GROUPS, pooling=None, states=(), **options):
    source = Source("/m", "folder", "m", 10**6, SIZES)
    return resolve(make_options(**options), info, source, groups, "float32", machine, pooling, states)


def test_defaults_follow_the_machine():
    cpu, gpu = settle(), settle(GPU)
    assert (cpu.scheduler.depth, gpu.scheduler.depth) == (0, 1)
    assert cpu.scheduler.max_num_batched_tokens < gpu.scheduler.max_num_batched_tokens
    assert cpu.device.num_threads == 4
    assert cpu.scheduler.max_model_len == 1024
    assert cpu.model.load_format == "safetensors"


def test_dtype_is_the_checkpoints_where_that_is_fast():
    assert resolve_dtype(Options(), INFO, CPU) == "float32"
    assert resolve_dtype(Options(), INFO, GPU) == "bfloat16"
    assert resolve_dtype(Options(dtype="float64"), INFO, CPU) == "float64"
    encoder = msgspec.structs.replace(INFO, is_causal=False, dtype="float32")
    assert resolve_dtype(Options(), encoder, GPU) == "float16"
    assert resolve_dtype(Options(), encoder, CPU) == resolve_dtype(Options(dtype="float32"), encoder, GPU) == "float32"
    with pytest.raises(InvalidOption, match="CPU"):
        resolve_dtype(Options(dtype="float64"), INFO, GPU)


def test_cache_memory_counts_pages():
    config = settle(kv_cache_memory=PAGE_BYTES * 65, max_model_len=1024)
    assert config.cache.num_pages == 65  # one of them the null page
    with pytest.raises(NotEnoughMemory, match="1008"):
        settle(kv_cache_memory=PAGE_BYTES * 64, max_model_len=1024)
    fitted = settle(kv_cache_memory=PAGE_BYTES * 64, max_model_len="auto")
    assert fitted.scheduler.max_model_len == fitted.model.max_model_len == 63 * 16


def test_rows_and_tokens_of_a_step_agree():
    assert settle(max_num_seqs=2000).scheduler.max_num_batched_tokens == 2000
    assert settle(max_num_batched_tokens=7).scheduler.max_num_seqs == 7
    with pytest.raises(InvalidOption, match="fewer than"):
        settle(max_num_batched_tokens=7, max_num_seqs=8)
    assert settle(enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 1024
    with pytest.raises(InvalidOption, match="a prompt must fit one step"):
        settle(enable_chunked_prefill=False, max_num_batched_tokens=1023)


def test_offline_steps_of_a_large_gpu_have_twice_the_tokens():
    def tokens(machine, **options):
        return settle(machine, **options).scheduler.max_num_batched_tokens

    small = msgspec.structs.replace(GPU, free_memory=30 * 2**30, total_memory=40 * 2**30)
    served = tokens(GPU)
    embedder = PoolingInfo(embed_size=INFO.hidden_size, token_size=INFO.hidden_size)
    decoder = msgspec.structs.replace(embedder, generates=True)  # decoders embed too
    assert tokens(GPU, max_itl=0) == tokens(GPU, max_itl=0, pooling=decoder) == 2 * served
    assert tokens(GPU, max_itl=0, pooling=embedder) == served
    assert tokens(GPU, max_itl=80) == tokens(small, max_itl=0) == tokens(small) == served
    assert tokens(CPU, max_itl=0) == tokens(CPU)
    assert tokens(GPU, max_itl=0, max_num_batched_tokens=3000) == 3000


@pytest.mark.parametrize(("multiprocessors", "expected"), [(132, 16_896), (108, 13_824), (60, 15_360), (148, 18_944)])
def test_offline_steps_fill_the_last_wave_of_gemm_tiles(multiprocessors, expected):
    gpu = msgspec.structs.replace(GPU, num_multiprocessors=multiprocessors)
    assert settle(gpu, max_itl=0).scheduler.max_num_batched_tokens == expected
    assert settle(gpu).scheduler.max_num_batched_tokens == settle(GPU).scheduler.max_num_batched_tokens


def test_steps_of_a_small_encoder_are_larger_on_a_gpu():
    def size(machine, hidden, groups=(), **options):
        scheduler = settle(machine, msgspec.structs.replace(INFO, hidden_size=hidden), groups, **options).scheduler
        return scheduler.max_num_seqs, scheduler.max_num_batched_tokens

    usual = size(GPU, 384, GROUPS)
    assert size(GPU, 1024) == usual
    assert size(GPU, 384) == (2 * usual[0], 2 * usual[1])
    assert size(CPU, 384)[0] == size(CPU, 1024)[0] == size(CPU, 384, GROUPS)[0]
    assert size(GPU, 384, max_num_seqs=100, max_num_batched_tokens=3000) == (100, 3000)


@pytest.mark.parametrize(
    ("text", "size"), [(5, 5), ("5", 5), ("2GiB", 2**31), ("1.5 MiB", 1572864), ("3kb", 3000), ("1g", 10**9)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "2 TiB of it", "I"])
def test_what_is_no_size(text):
    with pytest.raises(InvalidOption, match="512MiB"):
        parse_bytes(text)


def test_the_time_between_tokens_is_bounded_on_a_gpu_and_where_asked_for():
    assert (settle().scheduler.max_itl, settle(GPU).scheduler.max_itl) == (None, 0.05)
    assert settle(GPU, max_itl=20.0).scheduler.max_itl == 0.02
    assert settle(GPU, max_itl=0.0).scheduler.max_itl is None
    with pytest.raises(InvalidOption, match="max_itl is -1"):
        settle(max_itl=-1.0)


def test_a_gpus_cache_is_sized_once_more_when_the_rest_was_measured():
    config = settle(GPU, gpu_memory_utilization=0.75, max_model_len=64, max_num_seqs=4)
    assert config.device.keep_free == 20 * 2**30
    assert settle(GPU, num_pages=80).device.keep_free is None
    assert settle(GPU, kv_cache_memory="1GiB").device.keep_free is None
    assert settle(CPU).device.keep_free is None
    fitted = fit_cache(config, 9 * PAGE_BYTES + 1)
    assert fitted.cache.num_pages == 9 and fitted.cache.group_pages == (9,)
    assert fitted.scheduler == config.scheduler and fitted.model == config.model
    assert fit_cache(config, 10**12).cache.num_pages == 4 * 4 + 1  # no more than the rows can use
    for room in (4 * PAGE_BYTES, 0, -5):
        with pytest.raises(NotEnoughMemory, match="max_model_len 64 takes"):
            fit_cache(config, room)


def test_the_token_ids_that_drafts_are_found_in_fit_beside_the_cache():
    config = settle(GPU, max_model_len=64, max_num_seqs=4, drafts="ngram")
    page_size = config.cache.page_size
    for room in (9 * PAGE_BYTES, 9 * (PAGE_BYTES + 4 * page_size)):
        cache = fit_cache(config, room).cache
        assert cache.num_bytes + cache.num_pages * page_size * 4 <= room < (cache.num_pages + 2) * PAGE_BYTES


def test_a_step_has_as_many_drafts_as_their_logits_are_small():
    def max_step_drafts(machine: Machine, vocab_size: int, num_seqs: int = 256) -> int:
        info = msgspec.structs.replace(INFO, vocab_size=vocab_size)
        config = settle(machine, info, max_num_seqs=num_seqs, drafts="ngram:4", max_num_batched_tokens=8192)
        return config.scheduler.max_step_drafts

    assert max_step_drafts(GPU, 32_000) == 256 * 4
    assert 256 < max_step_drafts(GPU, 152_000) < 1024
    assert max_step_drafts(GPU, 2_000_000) == max_step_drafts(CPU, 32_000) == 256
    assert max_step_drafts(GPU, 152_000, num_seqs=16) == 64


def test_a_cache_that_was_measured_keeps_windows_as_large_as_they_were_planned():
    """All requests of a step together add its tokens to a group with a window, however short each of them is."""
    groups = (*GROUPS, CacheGroup(make_spec(2, 16, window=32), (2, 3)))
    config = settle(GPU, groups=groups, max_num_seqs=64)
    assert fit_cache(config, 10**12).cache == config.cache


@pytest.mark.parametrize("name", ["dtype", "task", "load_format", "max_model_len", "depth"])
def test_half_of_a_surrogate_pair_is_refused_as_any_other_text(name):
    with pytest.raises(InvalidOption, match=rf"{name} is '\\ud800'; it takes"):
        make_options(**{name: "\ud800"})


@pytest.mark.parametrize(
    ("mixer", "says"),
    [
        (DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8, conv_width=4), "delta nets"),
        (Mamba2Shape(num_heads=4, head_dim=8, num_groups=2, state_size=8, conv_width=4), "Mamba-2 layers"),
        (ShortConvShape(size=8, conv_width=3), ""),
    ],
)
def test_deterministic_is_refused_where_chunks_round_otherwise_than_tokens(mixer, says):
    states = (StateSpec(mixer.state_fields("float32"), mixer.chunk_rounding),)
    settle(GPU, states=states)
    if not says:
        assert settle(GPU, states=states, deterministic=True).model.deterministic
        return
    with pytest.raises(InvalidOption, match=f"deterministic is not supported for m: its {says}.*float32"):
        settle(GPU, states=states, deterministic=True)
