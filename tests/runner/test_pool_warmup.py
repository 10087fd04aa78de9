"""Warm-up of a model that only pools: plans of prompts, of which no state is left."""

import numpy as np
import pytest

from live_bytes import LiveBytes
from pool_bench import PoolBench, assert_same, rewrite
from replay_device import ReplayDevice
from slipstream import LLM
from slipstream.base.errors import NotEnoughMemory
from slipstream.config.memory import estimate_memory
from slipstream.params.pooling import PoolingParams
from slipstream.runner.warmup import PoolWarmUp, WarmUp
from small_model import write_small
from tiny import LONG_ROPE, write_tiny
from tiny_encoder import write_modules, write_tiny_encoder

EMBED = PoolingParams(task="embed")
PROMPTS = [[5, 6, 7], [9] * 11, [3, 4]]
OPTIONS = dict(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=64)


class Gpu(ReplayDevice):
    """A device that warms up, and whose kernels take their shapes from the host, so nothing is padded."""

    can_graph = False
    warms_up = True

    def __init__(self, depth, free=10**9):
        super().__init__(depth)
        self.free = free

    def free_memory(self):
        return self.free


@pytest.fixture(scope="module", params=["encoder", "decoder mean", "decoder last", "longrope last"])
def model(request, tmp_path_factory):
    kind, *method = request.param.split()
    folder = tmp_path_factory.mktemp(kind)
    if kind == "encoder":
        return dict(folder=write_tiny_encoder(folder, "bert", "Model"), **OPTIONS)
    pooling = {"mean": "mean", "last": "lasttoken"}[method[0]]
    return dict(folder=write_decoder(folder, pooling, long_rope=kind == "longrope"), **OPTIONS)


def write_decoder(folder, pooling, long_rope=False):
    """A model with a cache that does not generate. Some prompts use LongRoPE's short factors, some the long ones."""
    if long_rope:
        rope = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 7}
        return write_modules(rewrite(write_tiny(folder, "phi3", **rope), {"architectures": ["Phi3Model"]}, {}), pooling)
    return write_modules(rewrite(write_tiny(folder, "llama"), {"architectures": ["LlamaModel"]}, {}), pooling)


def seen_by(bench):
    """Records the plans that its runner gets from now on."""
    runner, seen = bench.core.executor, []
    launch = runner.launch
    runner.launch = lambda plan: (seen.append(plan), launch(plan))
    return seen


def warm_up_of(bench):
    return PoolWarmUp(bench.core.executor, bench.core.config.scheduler, EMBED, len(bench.core.config.cache.groups))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_warmed_up_engine_gives_the_same_results(model, depth):
    with PoolBench(**model) as bench:
        wanted = bench.pool(PROMPTS, EMBED)
    with PoolBench(**model, depth=depth, device=Gpu(depth)) as bench:
        assert not bench.core.executor.heads[-1].chunks.parts
        assert_same(bench.pool(PROMPTS, EMBED), wanted)


def test_warm_up_runs_at_start_if_the_device_needs_it(model, monkeypatch):
    calls = []
    for name in ("dry_run", "run_largest", "capture"):
        monkeypatch.setattr(PoolWarmUp, name, lambda self, name=name: calls.append(name))
        monkeypatch.setattr(WarmUp, name, lambda self: pytest.fail("it generates nothing"))
    with PoolBench(**model):
        assert not calls
    with PoolBench(**model, device=Gpu(0)):
        assert calls == ["dry_run", "capture", "run_largest"]


def test_the_largest_steps_fill_budget_and_rows(model):
    with PoolBench(**model) as bench:
        seen = seen_by(bench)
        warm_up_of(bench).run_largest()
        many, long = seen[:2]
        is_encoder = bench.core.config.scheduler.is_encoder
        assert many.num_tokens.tolist() == [16] * 4
        assert long.num_tokens.tolist() == ([32, 32] if is_encoder else [31, 31, 2])
        assert many.pooling.ends.all() and many.pooling.params == (EMBED,) * 4
        if is_encoder:
            assert len(seen) == 2 and not many.pooling.admitted
        else:
            assert seen[2].released.tolist() == [0, 1, 2] and not bench.core.executor.heads[-1].chunks.admissions


def test_every_size_that_steps_are_padded_to_is_run_twice(model, monkeypatch):
    """Work that is run a second time is captured."""
    with PoolBench(**model) as bench:
        graphs = bench.core.executor.graphs
        graphs.token_sizes, graphs.enabled = [5, 8, 33, 64], True
        monkeypatch.setattr(graphs, "size_for", lambda plan: None)  # the CPU's attention goes row by row
        seen = seen_by(bench)
        warm_up_of(bench).capture()
        sizes = [plan.total_tokens for plan in seen if plan.pooling is not None]
        assert sizes == [64, 64, 33, 33, 8, 8, 5, 5]
        pooling = [plan for plan in seen if plan.pooling is not None]
        assert all(plan.num_tokens.max() <= 32 and np.array_equal(plan.lengths, plan.num_tokens) for plan in pooling)


def test_the_cache_of_a_model_that_only_pools_is_measured_too(tmp_path, monkeypatch):
    from slipstream.config import resolve
    from slipstream.runner import build

    monkeypatch.setattr(resolve, "keep_free", lambda options, machine: 1000)
    monkeypatch.setattr(build, "_room", lambda config, device: device.free_memory() - config.device.keep_free)
    folder = write_decoder(tmp_path, "lasttoken")
    with PoolBench(folder, **OPTIONS, device=Gpu(0)) as bench:
        page = sum(group.bytes_per_page for group in bench.core.config.cache.groups)
        wanted = bench.pool(PROMPTS, EMBED)
    with PoolBench(folder, **OPTIONS, device=Gpu(0, 1000 + 12 * page + 5)) as bench:
        assert bench.core.config.cache.num_pages == 12
        assert_same(bench.pool(PROMPTS, EMBED), wanted)
    with pytest.raises(NotEnoughMemory, match="one request of max_model_len 32 takes"):
        PoolBench(folder, **OPTIONS, device=Gpu(0, 1000 + 5 * page))


def test_out_of_memory_during_autotuning_names_the_options(model, monkeypatch):
    from slipstream.runner import build

    def autotune_recorded(products):
        raise RuntimeError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(build, "autotune_recorded", autotune_recorded)
    with pytest.raises(NotEnoughMemory, match="lower max_num_batched_tokens"):
        PoolBench(**model, device=Gpu(0))


@pytest.mark.parametrize("sizes", [(8, 64, 256), (4, 16, 256), (8, 256, 256), (16, 20, 64)])
def test_no_step_uses_more_memory_than_planned(tmp_path, sizes):
    """Also with results per token of prompts in several steps: the largest step of the warm-up makes vectors."""
    rows, tokens, length = sizes
    path = write_small(tmp_path, architectures=["LlamaModel"], hidden_size=256, intermediate_size=768)
    limits = dict(max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=length, num_pages=1000, page_size=16)
    common = dict(dtype="float32", load_format="dummy", skip_tokenizer_init=True, num_threads=1)
    with LLM(path, **common, **limits, use_tqdm_on_load=False) as llm:
        config = llm.config
        memory = estimate_memory(config, 0)
        with LiveBytes() as largest:
            PoolWarmUp(llm.core.executor, config.scheduler, EMBED, len(config.cache.groups)).run_largest()
        for task in config.model.pooling.tasks:
            for num in (4, length):
                prompts = [[(i * 5 + k) % 61 for k in range(num)] for i in range(rows + 1)]  # one waits for a row
                llm.encode(prompts, pooling_task=task, use_tqdm=False)  # buffers grow, which is counted on its own
                with LiveBytes() as live:
                    llm.encode(prompts, pooling_task=task, use_tqdm=False)
                assert live.peak <= largest.peak + memory.later - memory.result_growth, (task, num)
