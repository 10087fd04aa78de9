"""GraphPool: work runs, is captured, is replayed; without graphs it just runs."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from hand_cache import one_group
from slipstream.checkpoint.model_info import model_info_from_config
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.config.buffer_size import result_bytes
from slipstream.config.memory import WORKSPACE, Machine, estimate_memory, graph_output_bytes, sizes_up_to
from slipstream.config.options import make_options
from slipstream.config.resolve import Source, resolve
from slipstream.contracts.step import NO_INTS, NO_PAGES, PoolPlan, StepPlan
from slipstream.device.device import Device
from slipstream.nn.registry import find_shape
from slipstream.runner.features import Size
from slipstream.runner.graphs import GraphPool
from small_model import CONFIG


def plan_of(num_rows: int, chunk: int = 1) -> StepPlan:
    """Decode rows, the last of them a chunk of host tokens if it is longer than one."""
    num_tokens, num_host_tokens = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32)
    if chunk > 1:
        num_tokens[-1] = num_host_tokens[-1] = chunk
    return StepPlan(
        step=0,
        released=NO_INTS,
        admitted=(),
        rows=np.arange(num_rows, dtype=np.int32),
        num_tokens=num_tokens,
        lengths=num_tokens,
        num_drawn=np.ones(num_rows, np.int32),
        num_host_tokens=num_host_tokens,
        tokens=np.zeros(num_host_tokens.sum(), np.int32),
        new_pages=(),
    )


class Recorder(Device):
    """Captures by keeping the closure, and replays by counting."""

    can_graph = True

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.replays = 0

    def capture(self, work):
        result = work()

        def replay() -> None:
            self.replays += 1

        return replay, result


def pool_on(device: Device, eager: bool = False) -> GraphPool:
    return GraphPool(device, 256, 2048, eager=eager)


def test_first_run_then_capture_then_replay():
    device, ran = Recorder(), []
    pool = pool_on(device)
    for i in range(4):
        assert pool.run("a", lambda i=i: ran.append(i) or i) == (0 if i == 0 else 1)
    assert ran == [0, 1]  # once eagerly, once while captured
    assert device.replays == 3
    pool.run("b", lambda: None)
    assert pool.num_captured == 1


def test_after_start_up_new_work_is_captured_at_its_first_use():
    device, ran = Recorder(), []
    pool = pool_on(device)
    with pool.starting(capture=False):
        pool.run("a", lambda: ran.append("only run"))
    assert pool.num_captured == 0
    with pool.starting(capture=True):
        pool.run("a", lambda: ran.append("at start"))
    for _ in range(3):
        pool.run("b", lambda: ran.append("later"))
    assert ran == ["only run", "at start", "later"] and pool.num_captured == 2
    assert device.replays == 4


class Refuser(Recorder):
    """Fails to capture while `refuses` is set, after it has started the work."""

    def __init__(self, error: str = "operation not permitted") -> None:
        super().__init__()
        self.error = error
        self.refuses = False

    def capture(self, work):
        if self.refuses:
            work()
            raise RuntimeError(f"{self.error}\nand a long story")
        return super().capture(work)


def test_work_that_cannot_be_captured_is_run(caplog):
    device, ran = Refuser(), []
    pool = pool_on(device)
    with pool.starting(capture=True):
        pool.run("before", lambda: ran.append("before"))
    device.refuses = True
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert [pool.run("a", lambda i=i: ran.append(i) or i) for i in range(3)] == [0, 1, 2]
    assert ran == ["before", 0, 0, 1, 2]  # the first while it was tried, and again
    (record,) = caplog.records
    assert "operation not permitted" in record.message and "story" not in record.message
    device.refuses = False
    for i in range(2):  # it may read what the others left, each time somewhere else
        assert pool.run("after a", lambda i=i: i) == i
    pool.run("before", lambda: ran.append("never"))
    assert "never" not in ran and device.replays == 2 and pool.num_captured == 1


def test_out_of_memory_during_start_up_raises():
    device = Refuser("CUDA out of memory")
    device.refuses = True
    pool = pool_on(device)
    with pytest.raises(RuntimeError, match="out of memory"), pool.starting(capture=True):
        pool.run("a", lambda: None)
    assert pool.run("a", lambda: 7) == 7  # later it is no reason to lose a step
    pool = pool_on(device)
    with pytest.raises(RuntimeError, match="out of memory"), pool.starting():
        for _ in range(2):  # once to get ready, then to be captured
            pool.run("a", lambda: None)


def test_memory_reserved_for_graphs_is_used_by_them():
    pool = pool_on(Recorder())
    pool.take(64)
    assert pool._taken is not None and pool._taken[1] is None, "no graph holds it"


def test_a_device_that_captures_nothing_still_starts(caplog):
    device = Refuser()
    device.refuses = True
    pool = pool_on(device)
    with caplog.at_level(logging.WARNING, "slipstream"), pool.starting():
        pool.take(64)
    assert pool.gave_up and len(caplog.records) == 1
    with pool.starting(capture=True):
        assert [pool.run("a", lambda i=i: i) for i in range(2)] == [0, 1]
    device = Refuser("CUDA out of memory")
    device.refuses = True
    with pytest.raises(RuntimeError, match="out of memory"), (pool := pool_on(device)).starting():
        pool.take(64)
    for pool in (pool_on(device, eager=True), pool_on(Device(0, 1))):
        pool.take(64)


def test_eager_engines_and_devices_without_graphs_run_the_work():
    for pool in (pool_on(Recorder(), eager=True), pool_on(Device(0, 1))):
        assert [pool.run("a", lambda i=i: i) for i in range(3)] == [0, 1, 2]
        assert pool.size_for(plan_of(3)) is None


def test_sizes_cover_every_count_and_waste_little():
    for most in (1, 3, 17, 208, 224, 225, 256, 1000):
        for first_steps in (8, 64):
            sizes = sizes_up_to(most, first_steps)
            assert sizes == sorted(set(sizes)) and sizes[-1] == most
    pool = pool_on(Recorder())
    for rows in range(1, 257):
        size = pool.size_for(plan_of(rows))
        assert size is not None and size.is_single
        assert rows <= size.rows <= max(rows * 1.25, rows + 8, 2 * rows if rows < 16 else 0)
    assert pool.size_for(plan_of(257)) is None


def test_an_inefficient_size_is_not_used():
    assert {192, 208, 256} <= set(pool_on(Recorder()).row_sizes) and 224 not in pool_on(Recorder()).row_sizes
    assert GraphPool(Recorder(), 224, 2048, eager=False).row_sizes[-2:] == [192, 224], "the most is a size"


def test_a_plan_with_a_chunk_is_padded_by_tokens():
    pool = pool_on(Recorder())
    assert pool.size_for(plan_of(3)) == Size(4, 4)
    assert pool.size_for(plan_of(17, chunk=5)) == Size(320, 256)
    assert pool.size_for(plan_of(3, chunk=1200)) == Size(1280, 256)
    assert pool.size_for(plan_of(3, chunk=2046)) == Size(2048, 256)
    assert pool.size_for(plan_of(3, chunk=2047)) is None
    assert not any(Size(n, 256).is_single for n in pool.token_sizes)


def test_a_short_chunk_beside_few_rows_is_padded_to_few_rows():
    pool = pool_on(Recorder())
    assert [pool.size_for(plan_of(3, chunk=n)) for n in (5, 126, 254)] == [Size(n, 16) for n in (32, 128, 256)]
    assert pool.size_for(plan_of(16, chunk=2)) == Size(32, 16)
    assert pool.size_for(plan_of(3, chunk=255)) == Size(320, 256)
    assert not any(Size(n, 16).is_single for n in pool.short_sizes)
    assert GraphPool(Recorder(), 16, 2048, eager=False).size_for(plan_of(3, chunk=5)) == Size(32, 16)


def test_steps_with_few_rows_are_not_padded_to_the_tokens_of_all_drafts():
    pool = GraphPool(Recorder(), 1280, 4096, eager=False, max_num_seqs=256)
    assert pool.size_for(plan_of(1280)) == Size(1280, 1280)
    assert pool.size_for(plan_of(17, chunk=100)) == Size(320, 256)
    assert pool.size_for(plan_of(256, chunk=100)) == Size(384, 256)
    assert pool.size_for(plan_of(257, chunk=100)) == Size(1536, 1280)  # with drafts


def test_only_pooling_steps_set_all_long():
    """Other steps would be captured twice at each size: with decode rows and without."""
    pool = pool_on(Recorder())
    plan = replace(plan_of(1, chunk=300), new_pages=(NO_PAGES,))
    assert pool.size_for(plan) == Size(320, 256)
    pooling = replace(plan, pooling=PoolPlan(ends=np.ones(1, np.bool_)), num_drawn=np.zeros(1, np.int32))
    assert pool.size_for(pooling) == Size(320, 256, all_long=True)
    beside = replace(plan_of(2, chunk=300), new_pages=(NO_PAGES,), pooling=PoolPlan(ends=np.array([False, True])))
    assert pool.size_for(beside) == Size(320, 256)
    whole = replace(pooling, new_pages=())
    assert pool.size_for(whole) == Size(320, 256)


INFO = model_info_from_config(CONFIG | {"hidden_size": 4096, "max_position_embeddings": 32_768})


def config_of(pooling: PoolingInfo | None, **options):
    machine = Machine("cuda", 800 * 2**30, 1000 * 2**30, 8, ("bfloat16",))
    groups = one_group(8, 128, num_heads=16, dtype="bfloat16", num_sites=28)
    source = Source("there", "folder", "m", 2**30, find_shape(INFO).sizes(on_cpu=False))
    return resolve(make_options(**options), INFO, source, groups, "bfloat16", machine, pooling)


@pytest.mark.parametrize("only_pools", [False, True])
@pytest.mark.parametrize(("max_rows", "max_tokens"), [(256, 8192), (256, 16384), (512, 2048), (13, 1500), (9, 500)])
def test_the_plan_covers_the_memory_of_captured_steps(only_pools, max_rows, max_tokens):
    pooling = PoolingInfo(embed_size=4096, token_size=4096) if only_pools else None
    config = config_of(pooling, max_num_seqs=max_rows, max_num_batched_tokens=max_tokens)
    pool = GraphPool(Recorder(), max_rows, max_tokens, eager=False)
    memory = estimate_memory(config, 0)
    kept = sum(size * (4096 * 2 + 8) for size in pool.row_sizes)
    assert memory.graphs >= memory.hidden + memory.attention + kept + WORKSPACE
    hidden, results = graph_output_bytes(config)
    assert hidden == max_tokens * 4096 * 2 >= pool.token_sizes[-1] * 4096 * 2
    assert results == (max_rows * 4096 * 4 if only_pools else result_bytes(config))
    eager = config_of(pooling, max_num_seqs=max_rows, max_num_batched_tokens=max_tokens, enforce_eager=True)
    assert estimate_memory(eager, 0).tables == memory.tables - hidden - results
