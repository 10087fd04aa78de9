"""Hybrid models through the engine: scheduling changes no token (law 7), in float64, against the model alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from delayed_device import DelayedDevice
from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.device.device import Device
from slipstream.runner.stores import StateStore
from tiny import write_tiny

FAMILIES = ["qwen3_next", "qwen3_5", "mamba2", "falcon_h1"]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=1)  # enough to run out of pages
SHORT = GREEDY.with_changes(max_tokens=6)
SAMPLED = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=4, logprobs=0, ignore_eos=True)
TEXT = random.Random(0).choices(range(300), k=230)
# prompts with common prefixes; three answers cross a border of a chunk, also those of SHORT
PROMPTS = [TEXT[:125], TEXT[:200], [*TEXT[:188], 7, 8], [5], [*TEXT[:70], 3], TEXT[160:222]]


@dataclass
class Hybrid:
    folder: str
    greedy: list[Any]
    sampled: list[Any]


def make(folder: str, device: Device | None = None, **options: Any) -> LLM:
    usual = dict(
        dtype="float64", num_threads=1, max_model_len=256, max_num_seqs=8, num_pages=400, max_num_batched_tokens=1024,
        num_checkpoints=12, depth=0, use_tqdm_on_load=False, _device=device,
    )  # fmt: skip
    llm = LLM(folder, **(usual | options))
    for tensor in llm.core.executor.find(StateStore).tensors.values():
        tensor.fill_(float("nan"))  # states are never cleared
    return llm


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    folder = str(write_tiny(tmp_path_factory.mktemp("tiny"), request.param, torch.float64))
    with make(folder, max_num_seqs=1, enable_prefix_caching=False) as llm:
        found = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (GREEDY, SAMPLED)]
    assert len({tuple(result.outputs[0].token_ids) for result in found[0]}) == len(PROMPTS)
    return Hybrid(folder, *found)


def check(llm: LLM, wanted: list[Any], params: SamplingParams = GREEDY) -> None:
    got = llm.generate(PROMPTS, params, use_tqdm=False)
    for ours, theirs in zip(got, wanted, strict=True):
        for sample, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert len(sample.token_ids) == params.max_tokens
            assert sample.token_ids == other.token_ids[: params.max_tokens]
            for step, expected in zip(sample.logprobs, other.logprobs[: params.max_tokens], strict=True):
                assert all(abs(step[token].logprob - expected[token].logprob) < 1e-9 for token in expected)
    llm.core.scheduler.check()


def test_a_number_of_pages_leaves_checkpoints_to_a_model_without_attention(tmp_path: Path) -> None:
    with make(str(write_tiny(tmp_path, "mamba2", torch.float64)), num_checkpoints=None) as llm:
        for cached in (0, 128):
            (result,) = llm.generate([TEXT[:140]], SHORT, use_tqdm=False)
            assert result.num_cached_tokens == cached


CELLS: dict[str, dict[str, Any]] = {
    "batched": dict(enable_prefix_caching=False),
    "cached": dict(depth=1),
    "chunked": dict(max_num_batched_tokens=43, enable_prefix_caching=False, depth=2),
    "chunked and cached": dict(max_num_batched_tokens=43, depth=1),
    "alone, cached, chunked": dict(max_num_seqs=1, max_num_batched_tokens=150, depth=2),
    "preempted": dict(num_pages=136, page_size=4, max_num_batched_tokens=61, depth=1),
    "preempted, deeper": dict(num_pages=136, page_size=4, depth=2, num_checkpoints=3),
}


@pytest.mark.every_second("hybrid", "cell")
@pytest.mark.parametrize("cell", CELLS)
def test_tokens_do_not_depend_on_scheduling(hybrid: Hybrid, cell: str) -> None:
    with make(hybrid.folder, **CELLS[cell]) as llm:
        for _ in range(2 if llm.config.cache.prefix_caching else 1):  # the second time the cache is warm
            check(llm, hybrid.greedy, GREEDY if "preempted" in cell else SHORT)
        scheduler = llm.core.scheduler
        has_pages = bool(llm.core.executor.model.shape.cache_specs(16, "float64"))  # without them nothing runs out
        assert scheduler.num_preemptions > 0 or "preempted" not in cell or not has_pages
        assert scheduler.cache.num_hits > 400 or "cached" not in cell


@pytest.mark.every_second("hybrid", "depth")
@pytest.mark.parametrize("depth", [0, 2])
def test_samples_of_a_prompt_get_the_same_tokens(hybrid: Hybrid, depth: int) -> None:
    with make(hybrid.folder, depth=depth) as llm:
        check(llm, hybrid.sampled, SAMPLED)
        assert llm.core.scheduler.cache.num_hits > 200


def test_a_late_device_changes_nothing(hybrid: Hybrid) -> None:
    options = dict(depth=2, num_pages=136, page_size=4, max_num_batched_tokens=90, num_checkpoints=3)
    with make(hybrid.folder, DelayedDevice(2), **options) as llm:
        check(llm, hybrid.greedy)


def test_replayed_steps_change_nothing(hybrid: Hybrid) -> None:
    device = ReplayDevice(1)
    with make(hybrid.folder, device, depth=1, max_num_batched_tokens=100) as llm:
        llm.core.executor.graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        for _ in range(2):
            check(llm, hybrid.greedy)
        assert device.num_replays > 20
