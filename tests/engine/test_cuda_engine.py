"""The engine on a GPU: replayed or eager, ahead or not, whole or in chunks, the tokens are the CPU's."""

from __future__ import annotations

import asyncio

import pytest

from patience import PATIENCE
from sampling_values import TRUNCATIONS
from slipstream import LLM, AsyncEngine, SamplingParams, StructuredOutputsParams
from slipstream.device.sync_check import watch
from tiny import write_tiny

pytestmark = pytest.mark.cuda

PROMPTS = [[i + 3, *range(20, 20 + 7 * i), i + 5] for i in range(8)]
OPTIONS = dict(use_tqdm_on_load=False, max_model_len=128, page_size=16, num_pages=96, max_num_seqs=8, dtype="float32")
SHAPE = StructuredOutputsParams(regex="[a-f]{3,9}(, [0-9]{2}){2,5}")
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
FEATURES = {
    "greedy": GREEDY,
    "random": SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
    "truncated": SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, **TRUNCATIONS),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, max_tokens=20
    ),
    "allowed": SamplingParams(temperature=0.9, seed=2, allowed_token_ids=[7, 30, 31, 99, 200], max_tokens=12),
    "given": SamplingParams(temperature=0, logprob_token_ids=[3, 5, 250], max_tokens=12),
    "vocabulary": SamplingParams(temperature=0, logprobs=-1, max_tokens=4),
    "logprobs": SamplingParams(temperature=0, logprobs=4, prompt_logprobs=2, max_tokens=12),
    "lists": SamplingParams(temperature=0, logit_bias={5: 3.0}, bad_words=["a", "bc"], min_tokens=4, max_tokens=16),
    "samples": SamplingParams(n=3, temperature=1.0, seed=8, max_tokens=12),
    # masks are copied inside the captured head
    "grammar": SamplingParams(temperature=0, structured_outputs=SHAPE, max_tokens=30),
    "grammar, drawn": SamplingParams(temperature=0.9, seed=5, top_p=0.9, structured_outputs=SHAPE, max_tokens=30),
    # no start compiles its kernels, and its head is captured when it first comes
    "rare": SamplingParams(temperature=0, logit_bias={5: 3.0}, min_tokens=4, max_tokens=16),
}


def tokens(results):
    return [sample.token_ids for result in results for sample in result.outputs]


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma2"])
def folder(request, tmp_path_factory):
    config = {"head_dim": 64} if request.param != "llama" else {"hidden_size": 256}
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), request.param, **config))


@pytest.fixture(scope="module")
def wanted(folder):
    with LLM(folder, **OPTIONS, device="cpu", num_threads=1) as llm:
        return {name: tokens(llm.generate(PROMPTS, params)) for name, params in FEATURES.items()}


@pytest.mark.parametrize(
    "options",
    [
        dict(enforce_eager=True, depth=0),
        dict(depth=0),
        dict(depth=1),
        dict(depth=2, max_num_batched_tokens=40),
        dict(depth=2, num_pages=24),
    ],
    ids=["eager", "graphs", "ahead", "chunked", "preempted"],
)
def test_tokens_are_those_of_the_cpu(folder, wanted, options):
    with LLM(folder, **(OPTIONS | options), device="cuda") as llm:
        for _ in range(3):  # eager, captured, replayed
            assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted["greedy"]
        for name, params in FEATURES.items():
            if params.seed is not None or params.is_greedy:
                assert tokens(llm.generate(PROMPTS, params)) == wanted[name], name
        graphs = llm.core.executor.graphs
        assert (graphs.num_captured > 0) == (not options.get("enforce_eager", False))
        assert not graphs.gave_up
        llm.core.scheduler.cache.check()


def test_a_platform_that_pins_no_memory_gives_the_same_tokens(folder, wanted, monkeypatch):
    monkeypatch.setattr("slipstream.device.device._pinning_works", lambda: False)
    with LLM(folder, **OPTIONS, device="cuda") as llm:
        assert not llm.core.executor.ring.buffers[0].tensor.is_pinned()
        for _ in range(3):
            assert tokens(llm.generate(PROMPTS, GREEDY)) == wanted["greedy"]


def test_a_core_in_another_thread_gives_the_same_tokens(folder, wanted):
    """It was started in this one: whatever a library keeps for each thread is first used inside a capture."""

    async def last(stream):
        async for result in stream:
            final = result
        return final

    async def main():
        options = {name: value for name, value in OPTIONS.items() if name != "use_tqdm_on_load"}
        engine = AsyncEngine(folder, **options, device="cuda")
        try:
            results = await asyncio.gather(
                *(last(engine.generate(prompt, GREEDY, f"r{i}")) for i, prompt in enumerate(PROMPTS))
            )
            (core,) = engine.client.core.cores.values()
            assert not core.executor.graphs.gave_up
            return results
        finally:
            await engine.close()

    assert tokens(asyncio.run(asyncio.wait_for(main(), PATIENCE))) == wanted["greedy"]


@pytest.mark.parametrize(
    "options",
    [
        dict(enforce_eager=True, depth=0, enable_prefix_caching=False),
        dict(depth=1, max_num_batched_tokens=40),
        dict(depth=2, num_pages=24),
    ],
    ids=["eager", "chunked", "preempted"],
)
def test_launching_never_waits_in_steady_state(folder, options, monkeypatch):
    """The switch in error mode: a wait would end the engine. Prompts come again, so prefixes are hit."""
    monkeypatch.setenv("SLIPSTREAM_SYNC_CHECK", "error")
    with LLM(folder, **(OPTIONS | options), device="cuda") as llm:
        hot_path = llm.core.executor.hot_path
        for mode in ("", "", "error"):  # eager, captured, replayed
            hot_path.mode = mode
            for params in FEATURES.values():
                llm.generate(PROMPTS, params)
            llm.generate((2 * PROMPTS)[: len(FEATURES)], list(FEATURES.values()))
        assert not hot_path.log.found


def test_steady_state_never_waits_outside_the_commit(folder):
    with LLM(folder, **OPTIONS, device="cuda", depth=2, max_num_batched_tokens=40) as llm:
        for params in FEATURES.values():
            llm.generate(PROMPTS, params)
        with watch() as log:
            for params in FEATURES.values():
                llm.generate(PROMPTS, params)
        assert not log.found, "\n".join(f"{sync.what} x{sync.count}\n{sync.stack}" for sync in log.found)


@pytest.mark.parametrize("options", [dict(enforce_eager=True, depth=0), dict(depth=1), dict(depth=2, num_pages=24)])
@pytest.mark.parametrize("drafts", ["ngram:3", "suffix:7"])
def test_drafts_change_no_token(folder, wanted, options, drafts):
    """Eager and replayed; steps with drafts replay the graphs of decode steps, and nothing waits."""
    with LLM(folder, **(OPTIONS | options), device="cuda", drafts=drafts) as llm:
        llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        chosen = {name: params for name, params in FEATURES.items() if params.seed is not None or params.is_greedy}
        for _ in range(2):
            for name, params in chosen.items():
                assert tokens(llm.generate(PROMPTS, params)) == wanted[name], name
        with watch() as log:
            for params in chosen.values():
                llm.generate(PROMPTS, params)
        assert not log.found, "\n".join(f"{sync.what} x{sync.count}\n{sync.stack}" for sync in log.found)
        counts, graphs = llm.core.scheduler.drafts.counts, llm.core.executor.graphs
        assert 0 < counts.num_accepted < counts.num_drafts
        if not options.get("enforce_eager"):
            captured = [key for key, entry in graphs._captured.items() if entry is not None]
            assert any(key[0] == "head" and key.drafts[0] for key in captured) and not graphs.gave_up
        llm.core.scheduler.cache.check()
