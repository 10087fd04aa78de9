"""Warm-up by running plans: what is captured, and that no state is left."""

import contextlib

import numpy as np
import pytest

from live_bytes import LiveBytes
from repeats import slow
from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.base.errors import NotEnoughMemory
from slipstream.config.memory import estimate_memory
from slipstream.device.device import Device
from slipstream.runner.features import Size
from slipstream.runner.graphs import GraphPool
from slipstream.runner.rows import RowTable
from slipstream.runner.sampling.sampler import Sampler
from slipstream.runner.warmup import FEATURES, KERNEL_SIZES, WarmUp, chunk_rows, chunk_sizes
from small_model import write_small
from tiny import LONG_ROPE, write_tiny

PROMPTS = [[5, 6, 7], [9] * 11, [3]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = dict(
    dtype="float64", use_tqdm_on_load=False, max_model_len=64, num_pages=40, page_size=4, max_num_seqs=4, num_threads=1
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def warm_up_of(llm, max_tokens=16):
    return WarmUp(llm.core.executor, 4, max_tokens, 64, 1)


def tokens(results):
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture(scope="module")
def wanted(folder):
    with LLM(folder, **OPTIONS) as llm:
        return tokens(llm.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_warmed_up_engine_gives_the_same_tokens_and_has_captured_its_steps(folder, wanted, depth):
    device = ReplayDevice(depth)
    with LLM(folder, **OPTIONS, depth=depth, _device=device) as llm:
        graphs = llm.core.executor.graphs
        graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        warm_up = warm_up_of(llm)
        warm_up.dry_run()
        warm_up.run_largest()
        assert graphs.num_captured == 0  # so far everything was only run
        warm_up.capture()
        captured = {key for key, entry in graphs._captured.items() if entry is not None}
        assert {("forward", Size(n, n, is_short=n == 1), False) for n in (1, 2, 4)} < {key[:3] for key in captured}
        assert {key[1] for key in captured if key[0] == "head"} == {1, 2, 4}
        before = graphs.num_captured
        replays = device.num_replays
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
        assert device.num_replays > replays
        assert {key for key, entry in graphs._captured.items() if entry is not None} >= captured
        assert graphs.num_captured >= before


def test_a_warm_up_captures_steps_with_drafts(folder, wanted):
    """Of every size: heads without proposals, with proposals, and with drafts."""
    device = ReplayDevice(1)
    with LLM(folder, **OPTIONS, depth=1, _device=device, drafts="ngram:3") as llm:
        runner = llm.core.executor
        graphs = runner.graphs
        graphs.token_sizes = []
        assert graphs.max_rows == 4 + 4 * 3
        warm_up = WarmUp(runner, 4, 16, 64, 1, num_drafts=3)
        warm_up.dry_run()
        warm_up.run_largest()
        warm_up.capture()
        captured = {key for key, entry in graphs._captured.items() if entry is not None}
        assert {("forward", Size(n, n, is_short=n == 1), False) for n in (1, 2, 4)} <= {key[:3] for key in captured}
        drafted = {("forward", Size(n, n, has_drafts=True), False) for n in (2, 4, 8, 16)}
        assert drafted <= {key[:3] for key in captured}
        heads = {(key.num_rows, *key.drafts[:2]) for key in captured if key[0] == "head"}
        plain = {(n, False, proposed) for n in (1, 2, 4) for proposed in (0, 3)}
        assert heads == plain | {(n, True, 3) for n in (2, 4, 8, 16)}
        assert not runner.heads[0].rows.computed[-1], "the padding row has a length"
        llm.core.scheduler.drafts.length = None
        for _ in range(2):
            assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
        assert {key for key, entry in graphs._captured.items() if entry is not None and key[0] == "forward"} <= captured


def test_warm_up_steps_exceed_the_short_rope_length(tmp_path):
    """Their rows read the part of the rope table with all positions."""
    rope = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 5}
    folder = str(write_tiny(tmp_path, "phi3", **rope))
    with LLM(folder, **OPTIONS) as llm:
        wanted = tokens(llm.generate(PROMPTS, GREEDY))
    with LLM(folder, **OPTIONS, _device=ReplayDevice(0)) as llm:
        llm.core.executor.graphs.token_sizes = []
        warm_up = warm_up_of(llm)
        warm_up.dry_run()
        warm_up.run_largest()
        warm_up.capture()
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted


def test_a_watched_engine_may_wait_while_it_starts(folder, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "error")
    with LLM(folder, **OPTIONS) as llm:
        runner, modes = llm.core.executor, []
        launch = runner.launch
        runner.launch = lambda plan: (modes.append(runner.hot_path.mode), launch(plan))
        warm_up_of(llm).run_largest()
        assert set(modes) == {""} and runner.hot_path.mode == "error"


def test_warm_up_releases_every_row(folder):
    with LLM(folder, **OPTIONS, _device=ReplayDevice(0)) as llm:
        runner = llm.core.executor
        runner.graphs.token_sizes = []
        warm_up_of(llm).dry_run()
        sampler = runner.find(Sampler)
        everyone = np.arange(4)
        assert not any(stage.is_used_by(everyone) for stage in sampler.stages)


def test_the_largest_step_fills_budget_and_rows(folder):
    with LLM(folder, **OPTIONS) as llm:
        runner, seen = llm.core.executor, []
        launch = runner.launch
        runner.launch = lambda plan: (seen.append(plan), launch(plan))
        warm_up_of(llm, max_tokens=16).run_largest()
        assert (len(seen[0].rows), seen[0].total_tokens) == (4, 16)
        assert seen[0].num_logprobs == 5 and seen[1].released.tolist() == [0, 1, 2, 3]
        seen.clear()
        warm_up_of(llm, max_tokens=4000).run_largest()  # no row is longer than a request may be
        assert seen[0].total_tokens == 4 * 63


def test_only_a_dry_run_skips_layers_of_the_same_kind(tmp_path):
    folder = str(write_tiny(tmp_path, "llama", num_hidden_layers=6))
    with LLM(folder, **OPTIONS) as llm:
        model, run = llm.core.executor.model, []
        for place, block in enumerate(model.layers):
            forward = block.forward
            block.forward = lambda *args, place=place, forward=forward: (run.append(place), forward(*args))[1]
        warm_up_of(llm).dry_run()
        assert set(run) == {0, 1, 5}
        run.clear()
        warm_up_of(llm).run_largest()
        assert set(run) == set(range(6))


def test_the_dry_run_uses_all_features_with_any_number_of_rows(folder):
    with LLM(folder, **(OPTIONS | dict(max_num_seqs=1))) as llm:
        runner, seen = llm.core.executor, []
        launch = runner.launch
        runner.launch = lambda plan: (seen.append(plan), launch(plan))
        WarmUp(runner, 1, 16, 64, 1).dry_run()
        walked = [plan.admitted[0].params for plan in seen if plan.admitted]
        assert walked[1 : 1 + len(FEATURES)] == list(FEATURES)  # behind the largest step


def test_the_dry_run_uses_every_kernel_size_in_decodes_and_chunks(folder):
    with LLM(folder, **(OPTIONS | dict(max_num_seqs=130))) as llm:
        runner, seen = llm.core.executor, []
        launch = runner.launch
        runner.launch = lambda plan: (seen.append(plan), launch(plan))
        WarmUp(runner, 130, 256, 64, 1).dry_run()
        singles = {len(plan.rows) for plan in seen if not len(plan.tokens)}
        chunks = [plan.total_tokens for plan in seen if len(plan.tokens) and len(plan.rows) < plan.total_tokens]
        assert singles == {1, 2, 4, 8, 16, 24, 32, 64, 80, 96, 128, 130}
        for low, high in zip((0, *KERNEL_SIZES), KERNEL_SIZES, strict=False):
            assert any(low < total <= high for total in chunks), (low, high)
        assert all(plan.num_tokens.max() <= 63 for plan in seen)


def test_the_dry_run_has_steps_with_adapters(folder):
    with LLM(folder, enable_lora=True, max_loras=2, max_lora_rank=8, **(OPTIONS | dict(max_num_seqs=17))) as llm:
        runner, seen = llm.core.executor, []
        launch = runner.launch
        runner.launch = lambda plan: (seen.append(plan), launch(plan))
        WarmUp(runner, 17, 64, 64, 1).dry_run()
        adapted = [plan for plan in seen if plan.adapters is not None]
        assert {len(plan.rows) for plan in adapted if not len(plan.tokens)} == {1, 2, 4, 8, 16, 17}
        assert any(len(plan.tokens) > 16 for plan in adapted) and len(adapted) < len(seen)


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "sizes"),
    [
        (8, 1024, [16, 32, 64, 128, 256, 896]),
        (100, 1100, [128, 256, 896]),
        (256, 8192, [320, 896]),
        (8, 500, [16, 32, 64, 128, 256, 500]),
        (8, 40, [16, 32, 40]),
        (1000, 1100, [1024]),
        (8, 8, []),
    ],
)
def test_the_dry_run_uses_padded_chunk_sizes(max_rows, max_tokens, sizes):
    assert chunk_sizes(GraphPool(ReplayDevice(0), max_rows, max_tokens, eager=False), max_tokens) == sizes


def test_the_dry_run_computes_last_tokens_only_for_every_number_of_rows(folder):
    """With padding all steps have the same number of rows."""
    with LLM(folder, **(OPTIONS | dict(max_num_seqs=130, max_model_len=600, num_pages=200))) as llm:
        runner, seen = llm.core.executor, []
        launch = runner.launch
        runner.launch = lambda plan: (seen.append(plan), launch(plan))
        WarmUp(runner, 130, 2000, 600, 1).dry_run()
        rows = {len(plan.rows) for plan in seen if plan.total_tokens > 256}
        assert rows >= {1, 2, 4, 8, 16, 24, 32, 64, 128}
        assert any(1000 < plan.total_tokens < 1024 for plan in seen)
        assert chunk_rows(GraphPool(ReplayDevice(0), 130, 2000, eager=False), 130, 2000, 600) == []


def test_no_size_is_larger_than_all_rows_together(folder):
    with LLM(folder, **OPTIONS, _device=ReplayDevice(0)) as llm:
        assert llm.core.executor.graphs.token_sizes[-1] == 4 * 64


def test_out_of_memory_at_start_names_the_options(folder):
    with LLM(folder, **OPTIONS) as llm:

        def launch(plan):
            raise RuntimeError("CUDA out of memory. Tried to allocate 9 GiB")

        llm.core.executor.launch = launch
        with pytest.raises(NotEnoughMemory, match="lower max_num_batched_tokens"):
            warm_up_of(llm).run_largest()


class Gpu(ReplayDevice):
    """Reports itself as a GPU with this much free memory."""

    warms_up = True

    def __init__(self, free):
        super().__init__(0)
        self.free = free

    def free_memory(self):
        return self.free


def test_the_cache_gets_the_measured_free_memory(folder, wanted, monkeypatch):
    """And not what was computed before anything was loaded."""
    from slipstream.config import resolve
    from slipstream.runner import build

    monkeypatch.setattr(resolve, "keep_free", lambda options, machine: 1000)
    monkeypatch.setattr(build, "_room", lambda config, device: device.free_memory() - config.device.keep_free)
    monkeypatch.setattr(Device, "can_graph", False)
    monkeypatch.setattr(ReplayDevice, "can_graph", False)  # the CPU's attention takes no padded chunks
    options = {name: value for name, value in OPTIONS.items() if name != "num_pages"}
    with LLM(folder, **options, _device=Gpu(10**9)) as llm:
        page = sum(group.bytes_per_page for group in llm.config.cache.groups)
        assert llm.config.cache.num_pages == 4 * 16 + 1  # as many as all rows can use
        assert len(llm.core.executor.store.caches[0][0]) == 65
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
    with LLM(folder, **options, _device=Gpu(1000 + 30 * page + 5)) as llm:
        assert llm.config is llm.core.config and llm.config.cache.num_pages == 30
        assert len(llm.core.executor.store.caches[0][0]) == 30
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
    with pytest.raises(NotEnoughMemory, match="one request of max_model_len 64 takes"):
        LLM(folder, **options, _device=Gpu(1000 + 5 * page))


def test_a_device_that_captures_nothing_starts_and_runs_eagerly(folder, wanted, monkeypatch, caplog):
    from slipstream.runner import build as assemble

    class Unable(Gpu):
        def capture(self, work):
            raise RuntimeError("operation not permitted")

    real = assemble.GraphPool

    def pool(*args, **kwargs):
        made = real(*args, **kwargs)
        made.token_sizes = []  # the CPU's attention takes no padded chunks
        return made

    monkeypatch.setattr(assemble, "GraphPool", pool)
    with LLM(folder, **OPTIONS, _device=Unable(10**9)) as llm:
        assert llm.core.executor.graphs.gave_up and not llm.core.executor.graphs.num_captured
        assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted
    assert caplog.text.count("could not be captured") == 1


def test_steps_run_after_writes_on_other_streams(folder, monkeypatch):
    """Zeros of tables and caches, and weights, are written on the default stream; steps run on another."""
    from slipstream.config import resolve
    from slipstream.runner import build, warmup
    from slipstream.runner.stores import KVStore

    happened = []

    @contextlib.contextmanager
    def compiling_ahead(dry_run, num_processes):
        dry_run()
        yield

    def noted(owner, name, what):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            happened.append(what)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(resolve, "keep_free", lambda options, machine: 1000)
    monkeypatch.setattr(build, "_room", lambda config, device: device.free_memory() - config.device.keep_free)
    monkeypatch.setattr(build, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(build, "compiling_ahead", compiling_ahead)
    monkeypatch.setattr(ReplayDevice, "can_graph", False)
    noted(build, "assemble", "written")
    noted(KVStore, "take_memory", "written")
    noted(Gpu, "wait_until_idle", "settled")
    noted(warmup, "run_plan", "step")
    real_open = build.open_model

    def open_model(*args):
        model, fill = real_open(*args)

        def fill_and_note(progress):
            happened.append("written")
            fill(progress)

        return model, fill_and_note

    monkeypatch.setattr(build, "open_model", open_model)
    options = {name: value for name, value in OPTIONS.items() if name != "num_pages"}
    LLM(folder, **options, _device=Gpu(10**9)).close()
    assert "step" in happened and happened.count("written") >= 3
    last = ""
    for what in happened:
        assert (last, what) != ("written", "step")
        last = what if what != "step" else last
    assert last == "settled", "nor one of the first request"


@pytest.mark.parametrize("max_tokens", [16, 300])
def test_planned_lengths_of_a_warm_up_bound_those_on_the_device(folder, max_tokens):
    """Attention reads as many pages as the plan says, so that must never be too few."""
    with LLM(folder, **(OPTIONS | dict(max_num_batched_tokens=max_tokens))) as llm:
        runner, launch = llm.core.executor, llm.core.executor.launch
        table = runner.find(RowTable)
        seen = []

        def watched(plan):
            launch(plan)
            seen.append((plan.lengths, table.computed[plan.rows.astype(np.int64)].numpy()))

        runner.launch = watched
        warm_up = warm_up_of(llm, max_tokens)
        warm_up.dry_run()
        warm_up.run_largest()
        assert len(seen) > 10 and all((planned >= actual).all() for planned, actual in seen)


PARAMS = {
    "greedy": dict(temperature=0.0),
    "random": dict(top_p=0.9, top_k=50, min_p=0.01, logprobs=5),
    "penalties": dict(repetition_penalty=1.1, top_p=0.9, logprobs=5),
    "bias": dict(logit_bias={3: 1.0}, top_p=0.9, logprobs=5),
    "prompt": dict(temperature=0.0, prompt_logprobs=3),
}


@pytest.mark.parametrize(
    "sizes", [(1, 64, 64), (1, 512, 512), slow((16, 20, 64)), (16, 16, 64), (8, 100, 64), slow((5, 700, 200))]
)
def test_no_step_uses_more_memory_than_planned(tmp_path, sizes):
    """Few tokens with many rows, and many tokens with few rows."""
    rows, tokens, length = sizes
    options = OPTIONS | dict(dtype="float32", load_format="dummy", skip_tokenizer_init=True, num_pages=1000)
    limits = dict(max_num_seqs=rows, max_num_batched_tokens=tokens, max_model_len=length)
    with LLM(write_small(tmp_path, vocab_size=20_000), **(options | limits)) as llm:
        later = estimate_memory(llm.config, 0).later
        with LiveBytes() as largest:
            WarmUp(llm.core.executor, rows, tokens, length, 1).run_largest()
        for name, params in PARAMS.items():
            for num in (4, length - 8):
                prompts = [[(i * 5 + k) % 61 for k in range(num)] for i in range(rows + 1)]  # one waits for a row
                with LiveBytes() as live:
                    llm.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True, **params), use_tqdm=False)
                own = later if name != "random" else 0
                assert live.peak <= largest.peak + own, (name, num)


def test_fused_layers_work_after_a_dry_run(tmp_path):
    """The dry run uses some of the layers, but the fused call needs all of them."""
    folder = str(write_tiny(tmp_path, "llama", num_hidden_layers=6))
    tokens = []
    for walks in (False, True):
        with LLM(folder, **(OPTIONS | dict(dtype="float32"))) as llm:
            if walks:
                WarmUp(llm.core.executor, 4, 16, 64, 1).dry_run()
            tokens.append([result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
    assert tokens[0] == tokens[1]
