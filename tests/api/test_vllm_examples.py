"""Examples of vLLM's documentation, ported by name: the same calls, over tiny models."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re

import pytest

from pool_bench import write_reward_model
from slipstream import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tiny import write_tiny
from tiny_adapter import LLAMA_MODULES, write_adapter
from tiny_encoder import write_tiny_encoder

SMALL = dict(max_model_len=160, num_pages=128, page_size=4, max_num_seqs=8, num_threads=1, use_tqdm_on_load=False)
PROMPTS = ["Hello, my name is", "The president is", "The capital of France is", "The future of AI is"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def llm(folder):
    options = dict(enable_lora=True, max_loras=2, disable_log_stats=False)
    with LLM(model=str(folder), **SMALL, **options) as llm:
        yield llm


def test_basic(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8))
    assert [output.prompt for output in outputs] == PROMPTS
    assert all(isinstance(output.outputs[0].text, str) and output.finished for output in outputs)


def test_generate_with_several_params_and_token_ids(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 3)]
    outputs = llm.generate([{"prompt_token_ids": [1, 2, 3]}, {"prompt": "Hi"}], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 3]
    several = llm.generate("Hi", SamplingParams(n=3, seed=1, max_tokens=4))[0].outputs
    assert [sample.index for sample in several] == [0, 1, 2]


def test_chat(llm):
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Write an essay"},
    ]
    params = SamplingParams(temperature=0, max_tokens=4)
    (one,) = llm.chat(conversation, params, use_tqdm=False)
    many = llm.chat([conversation for _ in range(3)], params, use_tqdm=True)
    assert [each.outputs[0].token_ids for each in many] == [one.outputs[0].token_ids] * 3
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0].token_ids == one.outputs[0].token_ids


def test_prefix_caching(llm):
    prefix = "You are an expert teacher. " * 4
    params = SamplingParams(temperature=0.0, max_tokens=4)
    llm.reset_prefix_cache()
    alone = [llm.generate(prompt, params)[0].outputs[0].text for prompt in PROMPTS]
    hits = next(each for each in llm.get_metrics() if each.name == "vllm:prefix_cache_hits").value
    llm.generate(prefix + PROMPTS[0], params)
    cached = llm.generate([prefix + prompt for prompt in PROMPTS], params)
    assert all(output.num_cached_tokens >= len(prefix) - 4 for output in cached)
    assert next(each for each in llm.get_metrics() if each.name == "vllm:prefix_cache_hits").value > hits
    llm.reset_prefix_cache()
    assert [llm.generate(prompt, params)[0].outputs[0].text for prompt in PROMPTS] == alone


def test_structured_outputs(llm):
    def ask(**how):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**how), max_tokens=60, temperature=0)
        return llm.generate("Classify this", params)[0].outputs[0].text

    assert ask(choice=["Positive", "Negative"]) in ("Positive", "Negative")
    assert re.fullmatch(r"\w{3}@\w{2}\.com", ask(regex=r"\w{3}@\w{2}\.com"))
    schema = {"type": "object", "properties": {"brand": {"enum": ["a", "b"]}}, "required": ["brand"]}
    schema["additionalProperties"] = False
    assert json.loads(ask(json=schema))["brand"] in ("a", "b")
    assert ask(grammar='root ::= "SELECT " ("x" | "y")') in ("SELECT x", "SELECT y")


def test_multilora(llm, folder, tmp_path):
    paths = [write_adapter(tmp_path / f"a{n}", folder, LLAMA_MODULES, rank=4, seed=n) for n in range(2)]
    requests = [None, *(LoRARequest(f"adapter-{n}", n + 1, str(path)) for n, path in enumerate(paths))]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    apart = [llm.generate("Hello", params, lora_request=each)[0].outputs[0].token_ids for each in requests]
    together = llm.generate(["Hello"] * 3, params, lora_request=requests)
    assert [each.outputs[0].token_ids for each in together] == apart and len({*map(tuple, apart)}) == 3


def test_beam_search(llm):
    (found,) = llm.beam_search([{"prompt": "Hello"}], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    scores = [sequence.cum_logprob for sequence in found.sequences]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    assert all(sequence.text.startswith("Hello") for sequence in found.sequences)


def test_llm_engine_example(folder):
    engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), **SMALL))
    prompts = [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, max_tokens=4)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=4)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=4)),
    ]
    numbers, finished = itertools.count(), []
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, params = prompts.pop(0)
            engine.add_request(str(next(numbers)), prompt, params)
        finished += [output for output in engine.step() if output.finished]
    assert sorted(output.request_id for output in finished) == ["0", "1", "2"]
    assert {output.request_id: len(output.outputs) for output in finished}["2"] == 2
    engine.llm.close()


def test_async_llm_streaming(folder):
    async def main():
        engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(folder), enforce_eager=True, **SMALL))
        params = SamplingParams(max_tokens=8, seed=42, output_kind=RequestOutputKind.DELTA, ignore_eos=True)
        parts = []
        async for output in engine.generate(request_id="stream-1", prompt="The future is", sampling_params=params):
            parts += [token for completion in output.outputs for token in completion.token_ids]
            if output.finished:
                break
        await engine.close()
        return parts

    assert len(asyncio.run(main())) == 8


def test_embed(tmp_path):
    write_tiny_encoder(tmp_path)
    with LLM(model=str(tmp_path), runner="pooling", enforce_eager=True, num_threads=1, use_tqdm_on_load=False) as llm:
        outputs = llm.embed(PROMPTS)
        vectors = [output.outputs.embedding for output in outputs]
        assert len({len(vector) for vector in vectors}) == 1
        assert all(math.isclose(sum(x * x for x in vector), 1.0, rel_tol=1e-4) for vector in vectors)
        (tokens,) = llm.encode(PROMPTS[0], pooling_task="token_embed")
        assert len(tokens.outputs.data) == len(tokens.prompt_token_ids)
        plain = llm.embed(PROMPTS[0], pooling_params=PoolingParams(use_activation=False))[0].outputs.embedding
        assert not math.isclose(sum(x * x for x in plain), 1.0, rel_tol=1e-3)


def test_classify_and_score(tmp_path):
    write_tiny_encoder(tmp_path / "classes", task="ForSequenceClassification", num_labels=3)
    with LLM(model=str(tmp_path / "classes"), num_threads=1, use_tqdm_on_load=False) as llm:
        for output in llm.classify(PROMPTS):
            assert len(output.outputs.probs) == 3 and math.isclose(sum(output.outputs.probs), 1.0, rel_tol=1e-5)
    write_tiny_encoder(tmp_path / "pairs", task="ForSequenceClassification", num_labels=1)
    with LLM(model=str(tmp_path / "pairs"), num_threads=1, use_tqdm_on_load=False) as llm:
        scores = [output.outputs.score for output in llm.score(PROMPTS[0], PROMPTS[1:])]
        assert len(scores) == 3 and all(0 <= score <= 1 for score in scores)


def test_reward(tmp_path):
    folder = write_reward_model(tmp_path)
    with LLM(model=str(folder), runner="pooling", num_threads=1, max_model_len=64, use_tqdm_on_load=False) as llm:
        (output,) = llm.encode("Hello", pooling_task="token_classify")
        assert output.outputs.data.ndim == 2 and output.finished
