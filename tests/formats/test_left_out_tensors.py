"""Checkpoints with one tensor left out: refused at the start, or every kind of request is served or refused.

A tensor that is missed inside a step would end the engine for all requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.base.errors import BadCheckpoint, EngineDead, InvalidParams
from tiny import tiny_weights, write_tiny, write_weights

SMALL: dict[str, Any] = dict(use_tqdm_on_load=False, max_model_len=64, num_pages=64, page_size=4, num_threads=1)
PROMPT = [5, 6, 7]
REQUESTS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate([PROMPT], SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1)),
    "samples": lambda llm: llm.generate([PROMPT], SamplingParams(n=2, max_tokens=2, temperature=1.0)),
    "embed": lambda llm: llm.embed([PROMPT]),
    "token_embed": lambda llm: llm.encode([PROMPT], pooling_task="token_embed"),
    "classify": lambda llm: llm.classify([PROMPT]),
    "score": lambda llm: llm.score("a", ["b"]),
}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_tensor_left_out_ends_no_engine(family: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family)
    weights = tiny_weights(folder)
    started = []
    for name in weights:
        if ".layers.1." in name:  # as those of layer 0
            continue
        write_weights(folder, {other: tensor for other, tensor in weights.items() if other != name})
        try:
            llm = LLM(str(folder), **SMALL)
        except BadCheckpoint as error:
            assert "1 missing (" in str(error), f"{name}: {error}"
            continue
        started.append(name)
        with llm:
            for kind, ask in REQUESTS.items():
                try:
                    ask(llm)
                except InvalidParams:
                    pass
                except EngineDead as error:
                    pytest.fail(f"{kind} without {name} ended the engine: {error}")
            assert len(llm.embed([PROMPT])[0].outputs.embedding)
    assert started == (["lm_head.weight"] if "lm_head.weight" in weights else [])
