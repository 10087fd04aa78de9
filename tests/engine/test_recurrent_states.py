"""Recurrent states through the engine: scheduling changes no token (law 7), with states restored, saved and carried."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from delayed_device import DelayedDevice
from recurrent_model import MODELS, write_recurrent
from replay_device import ReplayDevice, captured_forwards
from slipstream import LLM, SamplingParams
from slipstream.config.memory import estimate_memory
from slipstream.device.device import Device
from slipstream.runner.stores import StateStore

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
SAMPLED = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=12, logprobs=0)
TEXT = random.Random(0).choices(range(300), k=230)
# prompts with common prefixes; some answers cross a border
PROMPTS = [TEXT[:118], TEXT[:200], [*TEXT[:190], 7, 8, 9], [5], [*TEXT[:70], 3], TEXT[160:215]]


@dataclass
class Model:
    folder: str
    wanted: list[Any]  # greedy results of each prompt alone, without a cache


def models(name: str, folder: Path) -> Iterator[Model]:
    with pytest.MonkeyPatch.context() as patch:
        path = str(write_recurrent(folder, name, patch))
        yield Model(path, alone(path))


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield from models(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield from models("hybrid", tmp_path_factory.mktemp("model"))


def make(folder: str, device: Device | None = None, **options: Any) -> LLM:
    usual = dict(
        dtype="float64", load_format="dummy", num_threads=1, max_model_len=320, max_num_seqs=8, num_pages=400,
        max_num_batched_tokens=1024, num_checkpoints=8, depth=0, use_tqdm_on_load=False, _device=device,
    )  # fmt: skip
    llm = LLM(folder, **(usual | options))
    for tensor in llm.core.executor.find(StateStore).tensors.values():
        tensor.fill_(float("nan"))  # states are never cleared
    return llm


def alone(folder: str, params: SamplingParams = GREEDY, prompts: Sequence[list[int]] = PROMPTS) -> list[Any]:
    with make(folder, max_num_seqs=1, enable_prefix_caching=False) as llm:
        results = llm.generate(prompts, params, use_tqdm=False)
        assert len({tuple(result.outputs[0].token_ids) for result in results}) == len(prompts)
        return results


def check(llm: LLM, wanted: list[Any], params: SamplingParams = GREEDY) -> None:
    got = llm.generate([result.prompt_token_ids for result in wanted], params, use_tqdm=False)
    for ours, theirs in zip(got, wanted, strict=True):
        for sample, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert sample.token_ids == other.token_ids
            for step, expected in zip(sample.logprobs or (), other.logprobs or (), strict=True):
                assert all(abs(step[token].logprob - expected[token].logprob) < 1e-9 for token in expected)
    llm.core.scheduler.check()


# and a lower bound of the tokens that come from the cache
CELLS: dict[str, tuple[dict[str, Any], int]] = {
    "batched": (dict(enable_prefix_caching=False), 0),
    "cached": (dict(num_checkpoints=16), 400),
    "cached, 2 checkpoints": (dict(num_checkpoints=2, depth=1), 0),
    "chunked": (dict(max_num_batched_tokens=43, enable_prefix_caching=False, depth=1), 0),
    "chunked and cached": (dict(max_num_batched_tokens=43, depth=2), 400),
    "pages of 128": (dict(page_size=128, num_pages=24, depth=2), 128),
    "alone, cached": (dict(max_num_seqs=1, depth=1), 400),
}


@pytest.mark.every_second("model", "cell")
@pytest.mark.parametrize("cell", CELLS)
def test_tokens_do_not_depend_on_scheduling(model: Model, cell: str) -> None:
    options, least = CELLS[cell]
    with make(model.folder, **options) as llm:
        for _ in range(2):  # the second time the cache is warm
            check(llm, model.wanted)
        assert llm.core.scheduler.cache.num_hits >= least


@pytest.mark.parametrize(("depth", "chunk"), [(0, 1024), (1, 61), (2, 300)])
def test_preempted_requests_get_the_same_tokens(hybrid: Model, depth: int, chunk: int) -> None:
    with make(hybrid.folder, num_pages=136, page_size=4, depth=depth, max_num_batched_tokens=chunk) as llm:
        for _ in range(2):
            check(llm, hybrid.wanted)
        assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.every_second("model", "depth")
@pytest.mark.parametrize("depth", [0, 2])
def test_samples_of_a_prompt_get_the_same_tokens(model: Model, depth: int) -> None:
    wanted = alone(model.folder, SAMPLED)
    with make(model.folder, depth=depth) as llm:
        check(llm, wanted, SAMPLED)
        assert llm.core.scheduler.cache.num_hits > 400  # two samples of three start from a checkpoint


@pytest.mark.parametrize("depth", [1, 2])
def test_a_late_device_changes_nothing(hybrid: Model, depth: int) -> None:
    device = DelayedDevice(depth)
    with make(
        hybrid.folder, device, depth=depth, num_pages=136, page_size=4, max_num_batched_tokens=90, num_checkpoints=3
    ) as llm:
        check(llm, hybrid.wanted)


@pytest.mark.parametrize("depth", [0, 2])
def test_replayed_steps_change_nothing(model: Model, depth: int) -> None:
    """Padded steps are captured and replayed: decode steps, and without attention those with chunks too."""
    device = ReplayDevice(depth)
    with make(model.folder, device, depth=depth, max_num_batched_tokens=100, num_checkpoints=3) as llm:
        graphs = llm.core.executor.graphs
        if llm.core.executor.store.caches:
            graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        for _ in range(3):
            check(llm, model.wanted)
        captured = [key[1] for key in captured_forwards(graphs)]
        assert any(size.is_single for size in captured)
        assert bool(llm.core.executor.store.caches) or any(not size.is_single for size in captured)
        assert device.num_replays > 40 and llm.core.scheduler.cache.num_hits > 256


def test_prompt_logprobs_and_hidden_states_of_all_tokens(model: Model) -> None:
    params = GREEDY.with_changes(prompt_logprobs=0, max_tokens=3)
    wanted = alone(model.folder, params, PROMPTS[:2])
    with make(model.folder, max_num_batched_tokens=70, depth=1) as llm:
        for _ in range(2):
            got = llm.generate(PROMPTS[:2], params, use_tqdm=False)
            for ours, theirs in zip(got, wanted, strict=True):
                pairs = list(zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True))[1:]
                for token, (one, other) in zip(ours.prompt_token_ids[1:], pairs, strict=True):
                    assert abs(one[token].logprob - other[token].logprob) < 1e-9


def test_a_nan_state_reaches_no_later_request(hybrid: Model) -> None:
    """A failed request leaves NaN in its row and in no checkpoint."""
    with make(hybrid.folder, depth=1) as llm:
        weight = llm.core.executor.model.layers[1].decay.inner.weight
        whole = weight.data.clone()
        weight.data.fill_(float("nan"))
        failed = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert all(result.outputs[0].finish_reason == "error" for result in failed)
        weight.data.copy_(whole)
        check(llm, hybrid.wanted)


def test_memory_is_what_the_plan_says(hybrid: Model) -> None:
    with make(hybrid.folder, max_num_seqs=5, num_checkpoints=3) as llm:
        memory = estimate_memory(llm.core.config, 0)
        states = llm.core.executor.find(StateStore)
        assert memory.states + memory.checkpoints == states.num_bytes
        assert [tuple(site["sum"].shape) for site in states.sites] == [(9, 24), (9, 24), (9, 16)]
        # sites of equal spec lie in one tensor
        assert states.sites[0]["sum"].data_ptr() + 24 * 8 == states.sites[1]["sum"].data_ptr()
        assert {tensor.shape for tensor in states.tensors.values()} == {
            (9, 2, 24),
            (9, 2, 24, 2),
            (9, 1, 16),
            (9, 1, 16, 2),
        }
