"""Logprobs of sampled tokens against a trainer's recomputation: transformers in float32, one forward per sample."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from tiny import write_tiny

BOUND = 2e-5  # as docs/vllm.md says
PROMPTS = [[3, 5, 7, 9], [3, 5, 7, 9, 11, 13, 15, 17, 19], [40], list(range(20, 60))]
PARAMS = [
    SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, logprobs=0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=24, ignore_eos=True, logprobs=0, seed=2, n=2),
]


def largest_difference(trainer: torch.nn.Module, results: list) -> float:
    """Between logprobs of sampled tokens and those of the trainer's forward over prompt and tokens."""
    found = []
    for result in results:
        for sample in result.outputs:
            ids = [*result.prompt_token_ids, *sample.token_ids]
            with torch.no_grad():
                logprobs = trainer(torch.tensor([ids])).logits[0].log_softmax(-1)
            start = len(result.prompt_token_ids) - 1
            for position, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
                found.append(abs(entry[token].logprob - float(logprobs[start + position, token])))
    assert len(found) > 100
    return max(found)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sampled_logprobs_are_those_of_a_trainer_before_and_after_its_update(tmp_path, family):
    folder = write_tiny(tmp_path, family)
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = dict(dtype="float32", num_threads=1, max_num_seqs=4, max_num_batched_tokens=16, page_size=4, num_pages=96)
    with LLM(str(folder), max_model_len=96, use_tqdm_on_load=False, **options) as llm:

        def sample():  # batched, chunked, and from cached prefixes the second time
            runs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in PARAMS]
            return [result for results in runs for result in results]

        before = sample()
        assert largest_difference(trainer, before) < BOUND
        with torch.no_grad():  # a step of the trainer
            for number, parameter in enumerate(trainer.parameters()):
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        assert largest_difference(trainer, before) > 100 * BOUND, "the update is meant to change the model"
        tied = trainer.config.tie_word_embeddings
        tensors = {n: t for n, t in trainer.state_dict().items() if not (tied and n == "lm_head.weight")}
        llm.update_weights(tensors)
        assert largest_difference(trainer, sample()) < BOUND
