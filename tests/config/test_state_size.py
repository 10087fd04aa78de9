"""How many rows and checkpoints recurrent states leave room for."""

from __future__ import annotations

import pytest

from hand_cache import one_group
from slipstream.base.errors import InvalidOption
from slipstream.checkpoint.model_info import ModelInfo, model_info_from_config
from slipstream.config.cache_size import LIBRARIES, too_large
from slipstream.config.config import EngineConfig
from slipstream.config.memory import Machine, estimate_memory
from slipstream.config.options import make_options
from slipstream.config.resolve import Source, fewer_rows, resolve
from slipstream.contracts.cache_spec import STATE_CHUNK, CacheGroup, StateField, StateSpec
from slipstream.nn.registry import find_shape
from small_model import CONFIG

INFO: ModelInfo = model_info_from_config(CONFIG | {"vocab_size": 1000, "max_position_embeddings": 8192})
SIZES = find_shape(INFO).sizes(on_cpu=True)
MIB, GIB = 2**20, 2**30
GPU = Machine("cuda", 79 * GIB, 80 * GIB, 8, ("bfloat16",))
CPU = Machine("cpu", 16 * GIB, 24 * GIB, 2, ("bfloat16",))
# 12 MiB for each row: 2 MiB of matrices at each of 6 sites, and a few inputs of convolutions
SPEC = StateSpec((StateField("matrix", (32, 128, 128), "float32"), StateField("conv", (100, 3), "bfloat16")))
SPECS = (SPEC,) * 6
GROUPS = one_group(2, 256, num_heads=16, dtype="bfloat16", num_sites=2)


def settle(
    machine: Machine, groups: tuple[CacheGroup, ...] = GROUPS, specs: tuple[StateSpec, ...] = SPECS, **options: object
) -> EngineConfig:
    source = Source("there", "folder", "model", 2 * GIB, SIZES)
    return resolve(make_options(**options), INFO, source, groups, "bfloat16", machine, None, specs)  # type: ignore[arg-type]


def test_states_and_checkpoints_are_counted_to_the_byte() -> None:
    config = settle(GPU, max_num_seqs=32)
    states = config.cache.states
    assert states is not None and states.num_bytes == 6 * (2 * MIB + 600)
    memory = estimate_memory(config, 2 * GIB)
    assert memory.states == 33 * states.num_bytes
    assert memory.checkpoints == states.num_checkpoints * states.num_bytes > 0
    assert estimate_memory(settle(GPU, specs=(), max_num_seqs=32), 2 * GIB).states == 0


def test_checkpoints_and_pages_share_the_memory_of_the_cache() -> None:
    config = settle(GPU, gpu_memory_utilization=0.2)
    memory = estimate_memory(config, 2 * GIB)
    room = memory.cache + memory.checkpoints
    assert 0.2 * room < memory.checkpoints <= 0.26 * room
    taken = GPU.total_memory - GPU.free_memory
    assert taken + memory.of_device + LIBRARIES <= 0.2 * GPU.total_memory + 2 * MIB
    given = settle(GPU, kv_cache_memory="8GiB", max_num_seqs=8)
    assert given.cache.states is not None
    assert given.cache.num_bytes + given.cache.states.num_checkpoints * given.cache.states.num_bytes <= 8 * GIB
    assert given.cache.states.num_checkpoints == 8 * 16  # as many as prompts take
    pages = settle(GPU, num_pages=600, max_num_seqs=8).cache
    assert pages.num_pages == 601 and pages.states is not None
    assert pages.states.num_checkpoints == pages.num_bytes // 3 // pages.states.num_bytes


def test_large_states_lower_the_number_of_rows_and_say_so() -> None:
    config = settle(CPU)
    assert config.scheduler.max_num_seqs == 64 and fewer_rows(config) == ""
    config = settle(CPU, specs=SPECS * 10)
    rows, states = config.scheduler.max_num_seqs, config.cache.states
    assert 1 <= rows < 64 and states is not None
    memory = estimate_memory(config, 2 * GIB)
    assert memory.states <= 0.5 * 0.2 * (CPU.free_memory - 2 * GIB)
    assert f"max_num_seqs is {rows}, not 64" in fewer_rows(config) and "120.0 MiB" in fewer_rows(config)
    assert settle(CPU, specs=SPECS * 10, max_num_seqs=16).scheduler.max_num_seqs == 16


def test_a_cache_that_the_host_cannot_fill_is_a_notice() -> None:
    config = settle(CPU, num_pages=1 << 14, num_checkpoints=0)
    size = config.cache.num_bytes
    for machine, noticed in ((CPU, False), (Machine("cpu", 2 * GIB + size - 1, 2**50, 2, ()), True), (GPU, False)):
        note = too_large(config, 2 * GIB, machine)
        assert bool(note) == noticed and (not note or "lower kv_cache_memory or num_pages" in note)
    assert not too_large(settle(CPU), 2 * GIB, CPU)  # the default is small enough


def test_a_model_without_pages_keeps_states_and_is_no_encoder() -> None:
    config = settle(CPU, groups=())
    assert not config.scheduler.is_encoder and config.cache.states is not None
    assert config.cache.states.num_checkpoints > 100
    assert settle(CPU, groups=(), specs=()).scheduler.is_encoder
    for machine in (CPU, GPU):  # a number of pages says nothing about checkpoints
        assert settle(machine, groups=(), num_pages=600).cache.states == settle(machine, groups=()).cache.states
    assert settle(CPU, groups=(), num_pages=600, num_checkpoints=5).cache.states.num_checkpoints == 5
    with pytest.raises(InvalidOption, match="both given"):
        settle(CPU, groups=(), num_pages=600, kv_cache_memory="1GiB")


def test_checkpoints_follow_the_options() -> None:
    def num_checkpoints(**options: object) -> int:
        states = settle(CPU, **options).cache.states
        assert states is not None
        return states.num_checkpoints

    assert num_checkpoints(num_checkpoints=5) == 5 and num_checkpoints(num_checkpoints=0) == 0
    assert num_checkpoints(enable_prefix_caching=False) == 0
    with pytest.raises(InvalidOption, match="this one has none"):
        settle(CPU, specs=(), num_checkpoints=5)
    with pytest.raises(InvalidOption, match="from 0 up"):
        settle(CPU, num_checkpoints=-1)


@pytest.mark.parametrize(("page_size", "border"), [(16, 64), (1, 64), (64, 64), (128, 128)])
def test_checkpoints_lie_at_ends_of_pages_and_of_chunks(page_size: int, border: int) -> None:
    groups = one_group(2, 256, num_heads=16, dtype="bfloat16", num_sites=2, page_size=page_size)
    states = settle(CPU, groups, page_size=page_size).cache.states
    assert states is not None and states.border == border
    # a state takes as much as the keys and values of 3,072 positions
    assert states.spacing == 3072 + border - 3072 % border if 3072 % border else 3072


@pytest.mark.parametrize("page_size", [48, 96])
def test_page_sizes_that_chunks_do_not_fit_are_refused(page_size: int) -> None:
    with pytest.raises(InvalidOption, match=f"must divide {STATE_CHUNK}"):
        settle(CPU, page_size=page_size)
