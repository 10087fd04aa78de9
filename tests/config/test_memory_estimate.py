"""The arithmetic of memory, without a device."""

from __future__ import annotations

import msgspec
import pytest

from hand_cache import one_group
from slipstream.base.errors import NotEnoughMemory
from slipstream.checkpoint.model_info import ModelInfo, model_info_from_config
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.checkpoint.quantization import ONLINE_FP8, Quantization
from slipstream.config.buffer_size import activation_bytes
from slipstream.config.cache_size import LIBRARIES, fit_cache
from slipstream.config.config import DraftModelConfig
from slipstream.config.memory import MAX_DEQUANTIZED, Machine, estimate_memory
from slipstream.config.options import make_options
from slipstream.config.resolve import Source, resolve
from slipstream.nn.registry import find_shape
from small_model import CONFIG

INFO: ModelInfo = model_info_from_config(CONFIG | {"vocab_size": 150_000, "max_position_embeddings": 32_768})
SIZES = find_shape(INFO).sizes(on_cpu=True)
GIB = 2**30


def settle(machine: Machine, **options):
    groups = one_group(8, 128, num_heads=16, dtype="bfloat16", num_sites=28)
    source = Source("there", "folder", "model", 2 * GIB, SIZES)
    return resolve(make_options(**options), INFO, source, groups, "bfloat16", machine)


@pytest.mark.parametrize("rows", [8, 256, 1024])
def test_weights_cache_and_activations_fit_the_share_of_a_gpu(rows):
    machine = Machine("cuda", 79 * GIB, 80 * GIB, 8, ("bfloat16",))
    config = settle(machine, gpu_memory_utilization=0.5, max_num_seqs=rows)
    memory = estimate_memory(config, 2 * GIB)
    taken = machine.total_memory - machine.free_memory
    # rings and tables come out of the GiB that is left for libraries
    assert taken + memory.weights + memory.cache + memory.activations + GIB <= 0.5 * machine.total_memory
    assert memory.cache > 0.5 * (40 * GIB - taken - memory.weights - memory.activations - GIB) or rows == 8


def test_everything_is_counted_once():
    memory = estimate_memory(settle(Machine("cpu", 20 * GIB, 24 * GIB, 2, ("bfloat16",)), depth=2), 123)
    assert memory.weights == 123
    assert memory.staging_host == 4 * memory.staging  # depth + 2 buffers
    assert memory.results == memory.results_host
    assert memory.total > memory.weights + memory.cache + memory.activations


def test_a_step_has_room_for_a_dequantised_weight():
    """On a GPU, unless inputs are quantised too: those GEMMs take quantised weights for any number of rows. The largest
    one may be the projection to tokens, and is dequantised in parts."""
    config = settle(Machine("cuda", 79 * GIB, 80 * GIB, 8, ("bfloat16",)))

    def quantized(quantization):
        return msgspec.structs.replace(config.model, quantization=quantization)

    def hidden(quantization):
        return estimate_memory(msgspec.structs.replace(config, model=quantized(quantization)), 0).hidden

    int4 = Quantization(method="awq", layout="awq", bits=4, group=128)
    largest = INFO.hidden_size * max(SIZES.widest, INFO.vocab_size)
    assert hidden(int4) - hidden(None) == min(largest, MAX_DEQUANTIZED) * 2 > INFO.hidden_size * SIZES.widest * 2
    assert hidden(ONLINE_FP8) == hidden(None)
    draft = DraftModelConfig("draft_model", quantized(int4), first_site=28, page_bytes=0)
    assert estimate_memory(msgspec.structs.replace(config, draft=draft), 0).hidden == hidden(int4)


@pytest.mark.parametrize("more", ["rows", "tokens", "length"])
def test_a_larger_step_takes_more(more):
    size = dict(rows=8, tokens=64, length=256, groups=1, on_cpu=True)
    assert sum(activation_bytes(INFO, SIZES, "float32", **(size | {more: 4 * size[more]}))) > sum(
        activation_bytes(INFO, SIZES, "float32", **size)
    )


@pytest.mark.parametrize("rows", [1, 8, 256])
def test_what_comes_later_comes_on_top_of_the_step_that_is_measured(rows):
    """Whether its layers take the most, or its logits."""
    memory = estimate_memory(settle(Machine("cuda", 79 * GIB, 80 * GIB, 8, ("bfloat16",)), max_num_seqs=rows), 2 * GIB)
    here = memory.weights + memory.tables + memory.staging + memory.masks + memory.results
    largest = max(memory.hidden + memory.attention, memory.logits)
    assert memory.unread > 0
    assert memory.of_device - memory.cache - memory.later == here + largest


def test_results_of_tokens_of_a_long_causal_embedder_take_little_beside_themselves():
    """Its hidden states, of two prompts at most, and a few lines at a time."""
    pooling = PoolingInfo(embed_size=4096, token_size=4096)
    info = msgspec.structs.replace(INFO, hidden_size=4096)
    groups = one_group(8, 128, num_heads=16, dtype="bfloat16", num_sites=28)
    source = Source("there", "folder", "model", 2 * GIB, SIZES)
    machine = Machine("cuda", 138 * GIB, 140 * GIB, 8, ("bfloat16",))
    memory = estimate_memory(resolve(make_options(), info, source, groups, "bfloat16", machine, pooling), 2 * GIB)
    # those that are compared with queries are there as they are made and once more together, and four times what is
    # made of them at once
    compared = 2 * (8192 + 32_768) * 4096 * 4 + 4 * 2**24 * 4
    assert compared < memory.unread < compared + 0.8 * 10**9
    alone = msgspec.structs.replace(pooling, tasks=("embed",))
    memory_alone = estimate_memory(resolve(make_options(), info, source, groups, "bfloat16", machine, alone), 2 * GIB)
    assert memory_alone.unread == memory_alone.features == 0
    lines = 4 * (8192 + 32_768) * 4097  # which leave together when a prompt ends, by three buffers
    assert 3 * lines <= memory.result_growth < 3.01 * lines


def test_queries_that_a_generator_keeps_are_counted():
    groups = one_group(8, 128, num_heads=16, dtype="bfloat16", num_sites=28)
    source = Source("there", "folder", "model", 2 * GIB, SIZES)
    machine = Machine("cuda", 79 * GIB, 80 * GIB, 8, ("bfloat16",))
    pooling = PoolingInfo(embed_size=1024, token_size=1024, generates=True)
    with_queries, without = (
        estimate_memory(resolve(make_options(), INFO, source, groups, "bfloat16", machine, mine), 2 * GIB)
        for mine in (pooling, None)
    )
    assert with_queries.features == without.features + 2**24 * 4


@pytest.mark.parametrize("options", [{}, dict(enforce_eager=True), dict(max_num_seqs=2000), dict(depth=4)])
@pytest.mark.parametrize("room", [0, 64, 300, 1000])
def test_the_length_that_fits_is_one_that_the_start_finds_room_for(room, options):
    """On a card that leaves so many MiB for the cache, less or more."""
    fitted = dict(max_model_len="auto", gpu_memory_utilization=0.9) | options
    roomy = Machine("cuda", 800 * GIB, 1000 * GIB, 8, ("bfloat16",))
    whole = estimate_memory(settle(roomy, **fitted), 2 * GIB)
    total = int((whole.of_device - whole.cache + LIBRARIES + room * 2**20) / 0.9) + 1
    try:
        config = settle(Machine("cuda", total, total, 8, ("bfloat16",)), **fitted)
    except NotEnoughMemory:
        assert not room
        return
    memory = estimate_memory(config, 2 * GIB)
    # what lies there when the start looks: all that does not come later, and what libraries take
    here = memory.of_device - memory.cache - memory.later + LIBRARIES
    left = total - here - config.device.keep_free - memory.later
    assert fit_cache(config, left).scheduler.max_model_len == config.scheduler.max_model_len > 2
