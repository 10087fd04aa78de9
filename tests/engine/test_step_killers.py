"""What a request or a checkpoint may hold that would fail inside a step, and so end all others: it is refused before.

The random requests at the end look for more of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sampling_values import VALUES, edges
from slipstream import LLM, PoolingParams, SamplingParams
from slipstream.base.errors import (
    BadCheckpoint,
    EngineDead,
    InvalidParams,
    InvalidPrompt,
    SlipstreamError,
    UnsupportedModel,
)
from slipstream.params.sampling import BENCH, names_for
from tiny import VOCAB_SIZE, write_tiny

SMALL: dict[str, Any] = dict(use_tqdm_on_load=False, max_model_len=64, num_pages=64, page_size=4, num_threads=1)


@pytest.fixture(scope="module")
def short_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer has three tokens more than the model."""
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=256, eos_token_id=None, bos_token_id=None)


def test_a_token_that_only_the_tokenizer_has_is_refused(short_vocabulary: Path) -> None:
    with LLM(str(short_vocabulary), **SMALL) as llm:
        for ask in (
            lambda: llm.generate("a <|im_end|> b"),
            lambda: llm.generate(["good", {"prompt": "<|endoftext|>"}]),
            lambda: llm.chat([{"role": "user", "content": "hello"}]),
            lambda: list(llm.stream("<|im_end|>")),
            lambda: llm.embed("a <|im_end|> b"),
        ):
            with pytest.raises(InvalidPrompt, match=r"25[678].*0 to 255"):
                ask()
        with pytest.raises(InvalidParams, match=r"bad_words.*258.*0 to 255"):
            llm.generate("good", SamplingParams(bad_words=["x<|im_end|>"]))
        assert llm.generate("good")[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("ends", [100_000, -1, [-1, 258, VOCAB_SIZE]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_outside_the_vocabulary_are_never_drawn(file: str, ends: Any, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    path = folder / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | {"eos_token_id": ends}))
    with LLM(str(folder), **SMALL) as llm:
        (result,) = llm.generate([[1, 2, 3]], SamplingParams(min_tokens=3, max_tokens=5))
        assert len(result.outputs[0].token_ids) >= 3


BAD_FACTS: list[dict[str, Any]] = [
    {"head_dim": 1}, {"head_dim": 3}, {"head_dim": -2}, {"num_attention_heads": 3}, {"num_hidden_layers": 0},
    {"num_hidden_layers": 10**9}, {"vocab_size": 0}, {"vocab_size": -5}, {"hidden_size": 0}, {"intermediate_size": -1},
    {"max_position_embeddings": 0}, {"rms_norm_eps": -1.0}, {"rms_norm_eps": "x"},
    {"rope_parameters": {"rope_theta": -1.0}},
    {"eos_token_id": "x"}, {"eos_token_id": ["x"]}, {"hidden_act": ["silu"]}, {"architectures": [3]}, {"head_dim": "x"},
    {"rope_parameters": {"rope_type": "linear", "factor": "x"}},
    {"rope_parameters": {"rope_type": "linear", "factor": 0}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 2.0}}, {"rope_parameters": 3},
    {"max_position_embeddings": float("inf")}, {"rope_parameters": {"rope_type": ["linear"]}},
    {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": -1},
]  # fmt: skip


@pytest.mark.parametrize("facts", BAD_FACTS, ids=str)
def test_numbers_that_cannot_be_are_refused_at_the_start(facts: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    with pytest.raises((BadCheckpoint, UnsupportedModel)):
        LLM(str(folder), load_format="dummy", **SMALL)


def random_request(rng: random.Random) -> tuple[Any, SamplingParams | PoolingParams]:
    """Of values at and around the edges of what is allowed."""
    prompt = [rng.choice([0, 1, 255, VOCAB_SIZE - 1]) for _ in range(rng.choice([1, 2, 40, 62, 63, 64]))]
    if rng.random() < 0.2:
        return prompt, PoolingParams(
            task=rng.choice(["embed", "token_embed"]),
            dimensions=rng.choice([None, 1, 64]),
            truncate_prompt_tokens=rng.choice([None, -1, 1, 63, 64]),
        )
    ids = [0, VOCAB_SIZE - 1, *rng.sample(range(VOCAB_SIZE), 3)]
    everything = list(range(VOCAB_SIZE))
    choices: dict[str, list[Any]] = {
        **{name: [*edges(name), VALUES[name]] for name in names_for(BENCH)},
        "n": [1, 1, 3],
        "temperature": [0, 1e-9, 1e-5, 1.0, 1e6],
        "top_k": [-1, 1, VOCAB_SIZE, 2**31 - 1],
        "seed": [None, *edges("seed")],
        "max_tokens": [None, 1, 2, 2**31 - 1],
        "min_tokens": [0, 1],
        "stop_token_ids": [None, ids, everything],
        "logprobs": [None, -1, 0, 1, 33, VOCAB_SIZE],
        "prompt_logprobs": [None, None, -1, 0, VOCAB_SIZE],
        "logprob_token_ids": [None, ids, everything],
        "logit_bias": [None, {0: -100.0, VOCAB_SIZE - 1: 100.0}, dict.fromkeys(everything, -100.0)],
        "allowed_token_ids": [None, ids, everything, [VOCAB_SIZE - 1]],
        "bad_words": [None, ["a"], list(map(chr, range(33, 127)))],
        "truncate_prompt_tokens": [None, -1, 1, 2**31 - 1],
        "priority": [0, *edges("priority")],
        "cache_salt": ["", "x"],
        "ignore_eos": [True, False],
    }
    given = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}
    return prompt, SamplingParams(**given)


@pytest.mark.parametrize("seed", range(3))
def test_no_request_ends_the_engine(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    num_refused = num_served = 0
    options = SMALL | dict(max_num_seqs=4, max_num_batched_tokens=rng.choice([4, 17, 64]), depth=rng.choice([0, 2]))
    with LLM(str(write_tiny(tmp_path, rng.choice(["llama", "gemma2"]))), **options) as llm:
        for number in range(31):
            try:
                prompt, params = random_request(rng) if number else ([0] * 64, SamplingParams())  # one is too long
                if isinstance(params, PoolingParams):
                    llm.encode([prompt], params)
                else:
                    llm.generate([prompt, [5, 6]], [params, SamplingParams(max_tokens=3)])
                num_served += 1
            except EngineDead:
                raise
            except SlipstreamError:
                num_refused += 1
        llm.core.scheduler.check()
    assert num_refused and num_served > 10
