"""GGUF files with a vocabulary of their own, as Phi-4-mini and OLMo-2 are published, beside the folders they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from slipstream import LLM, SamplingParams
from tiny import LONG_ROPE, write_tiny
from tiny_gguf import write_gguf

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-4o": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}),
    "dbrx": ("olmo2", {}),
    "qwen2": ("qwen3", {}),
    "tekken": ("llama", {}),
}


@pytest.mark.parametrize("pre", FAMILIES)
def test_a_file_alone_gives_what_its_folder_gives(pre: str, tmp_path: Path) -> None:
    family, facts = FAMILIES[pre]
    folder = write_tiny(tmp_path, family, **facts)
    file = write_gguf(folder, gguf.GGMLQuantizationType.F32, pre=pre)
    options: dict[str, Any] = dict(use_tqdm_on_load=False, max_model_len=96, dtype="float64", num_threads=1)
    # short, and beyond the length of Phi's short rope factors
    prompts = ["Hello, world 123!", "naïve <|im_start|> text that goes on for longer than thirty-two bytes"]
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0)
    with LLM(str(folder), **options) as llm:
        expected = llm.generate(prompts, params)
    with LLM(str(file), **options) as llm:
        found = llm.generate(prompts, params)
    for ours, theirs in zip(found, expected, strict=True):
        # tekken begins a text with a bos token if it has one, and this one has none
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob, abs=1e-5)
