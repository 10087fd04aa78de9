"""Decoders as embedders and rerankers: names with and without a root, classifiers, both directions, yes and no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from causal_oracle import norm_in_float64
from hand_batch import HandRunner
from hand_encoder import load_pooling, run_texts
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.nn.decoder import Decoder
from slipstream.nn.pooling_heads import Heads, HeadShape
from slipstream.nn.weights.weight_format import take_memory
from tiny import write_tiny

PROMPTS = [list(range(5, 5 + n)) for n in (9, 1, 40, 40, 17)]
NAMES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "llama": "Llama", "gemma3": "Gemma3Text"}


def rewrite(folder: Path, rooted: bool, extra: dict[str, torch.Tensor] | None = None, **facts: Any) -> Path:
    """Change fields of the config; drop the projection to tokens, and the root of names if wanted."""
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    if not rooted:
        weights = {name.removeprefix("model."): x for name, x in weights.items()}
    save_file(weights | (extra or {}), folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | facts
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def hidden_states(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Of a causal one, through pages."""
    assert isinstance(model, Decoder)
    runner = HandRunner(model, next(model.parameters()).dtype)
    # hidden states in place of logits
    runner.model = type("Body", (), {"__call__": lambda self, c: model(c), "logits": lambda self, x: x})()
    chunks = {str(i): ids for i, ids in sorted(enumerate(prompts), key=lambda item: len(item[1]) > 1)}
    with torch.inference_mode():
        found = runner.run(chunks)
    return [found[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("rooted", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "llama"])
def test_a_body_without_a_head(family: str, rooted: bool, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family)
    rewrite(folder, rooted, architectures=[f"{NAMES[family]}Model"])
    oracle = transformers.AutoModel.from_pretrained(folder).eval()
    model = load_pooling(folder)
    assert isinstance(model, Decoder) and model.shape.headless and model.heads is None
    for ids, mine in zip(PROMPTS, hidden_states(model, PROMPTS), strict=True):
        with torch.inference_mode():
            theirs = oracle(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedder_under_the_name_of_a_model_that_continues(tied: bool, tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: no root, and no projection to tokens even where it is not tied."""
    folder = write_tiny(tmp_path, "qwen3", tie_word_embeddings=tied)
    expected = hidden_states(load_pooling(folder), PROMPTS)
    rewrite(folder, rooted=False)
    model = load_pooling(folder)
    assert isinstance(model, Decoder) and model.shape.headless is not tied
    for mine, theirs in zip(hidden_states(model, PROMPTS), expected, strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "llama"])
def test_classes_by_the_last_token(family: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, family)
    score = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}, "pad_token_id": 0}
    kind = f"{NAMES[family]}ForSequenceClassification"
    rewrite(folder, True, {"score.weight": score}, architectures=[kind], **labels)
    oracle = getattr(transformers, kind).from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = torch.cat([oracle(torch.tensor([ids])).logits for ids in PROMPTS])
    model = load_pooling(folder)
    assert model.heads is not None and model.heads.pooling.num_labels == 3
    lasts = torch.stack([hidden[-1] for hidden in hidden_states(model, PROMPTS)])
    torch.testing.assert_close(model.heads.classify(lasts), expected, rtol=0, atol=1e-4)


def test_a_reward_model_scores_each_token_through_two_layers(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "qwen2")
    generator = torch.Generator().manual_seed(0)
    score = {
        name: torch.randn(shape, generator=generator)
        for name, shape in (
            ("score.0.weight", (64, 64)), ("score.0.bias", (64,)), ("score.2.weight", (2, 64)), ("score.2.bias", (2,)),
        )
    }  # fmt: skip
    rewrite(folder, True, score, architectures=["Qwen2ForProcessRewardModel"])
    model = load_pooling(folder)
    assert model.heads is not None
    hidden = torch.randn(5, 64, generator=generator)
    inner = torch.relu(hidden @ score["score.0.weight"].T + score["score.0.bias"])
    expected = inner @ score["score.2.weight"].T + score["score.2.bias"]
    torch.testing.assert_close(model.heads.token_classify(hidden), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_yes_less_no_is_the_score_of_a_reranker(tied: bool, tmp_path: Path) -> None:
    model = load_pooling(write_tiny(tmp_path, "qwen3", tie_word_embeddings=tied))
    assert isinstance(model, Decoder)
    info = PoolingInfo(tasks=("classify",), num_labels=1, yes_no=(17, 201), embed_size=64, token_size=64)
    heads = Heads(HeadShape(), info, 64, 304, torch.float32, model.lm_rows, None)
    take_memory(heads, torch.device("cpu"))
    heads.fill_buffers()
    hidden = torch.randn(4, 64)
    logits = model.logits(hidden)
    torch.testing.assert_close(heads.classify(hidden), logits[:, 17:18] - logits[:, 201:202], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_decoder_that_sees_both_ways(family: str, tmp_path: Path) -> None:
    """What a 4-dimensional mask makes of the library's model."""
    folder = write_tiny(tmp_path, family, torch.float64, **({"sliding_window": None} if family == "mistral" else {}))
    rewrite(folder, True, architectures=[f"{NAMES[family]}Model"], is_causal=False)
    oracle = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    norm_in_float64(oracle)
    model = load_pooling(folder, torch.float64)
    assert model.shape.cache_specs(16, "float64") == []
    for ids, mine in zip(PROMPTS, run_texts(model, PROMPTS), strict=True):
        everything = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64)
        with torch.inference_mode():
            theirs = oracle(torch.tensor([ids]), attention_mask=everything).last_hidden_state[0]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


def test_gemma_as_an_embedder_sees_half_its_window_to_each_side(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "gemma3", use_bidirectional_attention=True)
    rewrite(folder, False, architectures=["Gemma3TextModel"])
    oracle = transformers.AutoModel.from_pretrained(folder).eval()
    model = load_pooling(folder)
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 8
    for ids, mine in zip(PROMPTS, run_texts(model, PROMPTS), strict=True):
        with torch.inference_mode():
            theirs = oracle(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
