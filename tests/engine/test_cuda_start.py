"""What an engine on a GPU has done before its first request: compiled, measured, captured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from child import child_env
from pool_bench import rewrite
from slipstream import LLM, SamplingParams
from slipstream.runner.graphs import WHOLE_STEP_ROWS
from tiny import write_tiny
from tiny_encoder import write_tiny_encoder

pytestmark = pytest.mark.cuda

PROMPTS = [[i + 3, *range(20, 20 + 7 * i), i + 5] for i in range(8)]
OPTIONS = dict(use_tqdm_on_load=False, max_model_len=128, page_size=16, max_num_seqs=8, dtype="bfloat16", device="cuda")
LENGTHS = dict(max_tokens=20, ignore_eos=True)
USUAL = {
    "greedy": SamplingParams(temperature=0, **LENGTHS),
    "random": SamplingParams(temperature=0.8, seed=3, **LENGTHS),
    "truncated": SamplingParams(temperature=0.9, seed=3, top_k=9, top_p=0.9, **LENGTHS),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, **LENGTHS),
    "logprobs": SamplingParams(temperature=0, logprobs=5, **LENGTHS),
}


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2"])
def folder(request, tmp_path_factory):
    config = {"head_dim": 64} if request.param != "llama" else {"hidden_size": 256}
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), request.param, **config))


@pytest.mark.parametrize("eager", [False, True])
def test_no_kernel_is_compiled_for_usual_requests(folder, monkeypatch, eager):
    knobs = pytest.importorskip("triton").knobs
    with LLM(folder, **OPTIONS, enforce_eager=eager) as llm:
        compiled = []
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["fn"].name))
        for params in USUAL.values():
            llm.generate(PROMPTS, params)
            llm.generate(PROMPTS[:1], params)
        assert not compiled


def test_decodes_are_replayed_from_the_first(folder):
    with LLM(folder, **OPTIONS) as llm:
        graphs = llm.core.executor.graphs
        keys = [key for key, entry in graphs._captured.items() if entry is not None]
        alone = [key[1] for key in keys if key[0] == "forward"]
        whole = [key[2] for key in keys if key[0] == "step"]
        assert sorted(size.rows for size in alone if size.is_single) == graphs.row_sizes
        assert sorted(size.rows for size in whole) == [n for n in graphs.row_sizes if n <= WHOLE_STEP_ROWS]


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_model_that_only_pools_is_ready_too(kind, tmp_path, monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    if kind == "encoder":
        path = write_tiny_encoder(tmp_path, "bert", "Model", hidden_size=96)
    else:
        path = rewrite(write_tiny(tmp_path, "llama", hidden_size=256), {"architectures": ["LlamaModel"]}, {})
    with LLM(str(path), **OPTIONS) as llm:
        graphs = llm.core.executor.graphs
        captured = {key for key, entry in graphs._captured.items() if entry is not None}
        for part in ("forward", "pool"):
            assert {key[1].tokens for key in captured if key[0] == part} >= set(graphs.token_sizes)
        compiled = []
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["fn"].name))
        for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[3:5]):
            assert len(llm.embed(prompts)) == len(prompts)
        assert not compiled
        assert {key for key, entry in graphs._captured.items() if entry is not None} == captured


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="reads the whole card's memory: run it without -n")
@pytest.mark.parametrize("eager", [False, True])
def test_the_memory_to_keep_free_stays_free(folder, eager):
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 6 * 2**30) / total
    with LLM(
        folder, **(OPTIONS | dict(max_model_len="auto", gpu_memory_utilization=share, enforce_eager=eager))
    ) as llm:
        for params in USUAL.values():
            llm.generate(PROMPTS * 4, params)
        free, total = torch.cuda.mem_get_info()
        assert free >= llm.config.device.keep_free
        assert llm.config.cache.num_bytes > 0


def test_the_devices_time_is_accounted(folder):
    with LLM(folder, **OPTIONS, depth=1) as llm:
        llm.generate(PROMPTS, USUAL["greedy"])
        before = llm.core.timer.total.copy()
        llm.generate(PROMPTS, USUAL["greedy"])
        spent = llm.core.timer.total.since(before)
        assert spent.num_steps >= 20 and spent.busy > 0 and 0 < spent.busy_share <= 1


def test_a_start_is_right_whatever_stream_is_late(folder):
    """What the host's own stream has still to write must not fall on what the first steps have uploaded."""
    with LLM(folder, **OPTIONS) as llm:
        wanted = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, USUAL["greedy"])]
    torch.cuda._sleep(2_000_000_000)  # about a second
    with LLM(folder, **OPTIONS) as llm:
        assert [result.outputs[0].token_ids for result in llm.generate(PROMPTS, USUAL["greedy"])] == wanted


START = """
import sys, torch
from slipstream import LLM
from slipstream.ops.platform.compile_ahead import ForkedCompiler
from slipstream.runner.warmup import WarmUp

def noted(owner, name, note):
    real = getattr(owner, name)
    setattr(owner, name, lambda *args: (note(), real(*args), note())[1])

forks, taken = [], []
noted(ForkedCompiler, "_fork", lambda: forks.append(1))
noted(WarmUp, "run_largest", lambda: taken.append(torch.cuda.memory_reserved()))
LLM(sys.argv[1], dtype="bfloat16", use_tqdm_on_load=False, num_pages=600, max_num_seqs=8).close()
print(len(forks), taken[1] - taken[0])
"""


def test_a_second_start_compiles_nothing_and_the_largest_step_finds_its_memory_taken(tmp_path):
    # gates and ups of 8,184 tokens are 134 MB
    folder = str(write_tiny(tmp_path / "model", "qwen3", head_dim=64, intermediate_size=8192))
    env = child_env(TRITON_CACHE_DIR=str(tmp_path / "kernels"), SLIPSTREAM_DEVICE="cuda")
    told = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", START, folder], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        told.append([int(number) for number in done.stdout.split()])
    (first_forks, first_bytes), (forks, num_bytes) = told
    assert first_forks and not forks
    assert max(first_bytes, num_bytes) < 64 << 20, "the walk has not taken it"


def test_a_captured_step_clears_nothing(tmp_path_factory):
    """What kernels count with is there before any graph is captured, for every layer: no replay sets it to 0."""
    sizes = dict(head_dim=64, hidden_size=256, intermediate_size=3072, num_hidden_layers=6)  # sums of `down` are split
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3", **sizes)
    with LLM(str(folder), **OPTIONS) as llm:
        params = SamplingParams(temperature=0, **LENGTHS)
        llm.generate(PROMPTS, params)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            llm.generate(PROMPTS, params)
            torch.cuda.synchronize()
    steps = sum(event.count for event in profile.key_averages() if "_gather_kernel" in event.key)
    fills = sum(event.count for event in profile.key_averages() if "FillFunctor<int>" in event.key)
    assert steps >= LENGTHS["max_tokens"] and fills < steps
