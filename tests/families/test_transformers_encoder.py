"""Encoders by the module of the transformers library, packed without padding, against the library alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from slipstream import LLM
from slipstream.base.errors import UnsupportedModel
from tiny_encoder import scatter, write_pair_tokenizer

TINY: dict[str, Any] = {
    "vocab_size": 304, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 96, "pad_token_id": 3, "type_vocab_size": 2,
}  # fmt: skip
FAMILIES = ("Ernie", "RobertaPreLayerNorm", "Data2VecText")  # positions from 0, or after the padding id
TEXTS = ["one", "a longer text of some words", "b", "and the last one"]


def write(folder: Path, family: str, task: str = "Model", **changes: Any) -> Path:
    config = getattr(transformers, f"{family}Config")(**TINY | changes)
    model = getattr(transformers, family + task)(config)
    scatter(model, 0)
    model.to(torch.float64).save_pretrained(folder)
    write_pair_tokenizer(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_equal_the_library(family: str, tmp_path: Path) -> None:
    folder = write(tmp_path, family)
    with LLM(str(folder), dtype="float64", num_threads=1, max_model_len=64, normalize=False) as llm:
        found = llm.embed(TEXTS, use_tqdm=False)
        tokens = llm.encode(TEXTS[:2], pooling_task="token_embed", use_tqdm=False)
    theirs = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    for index, output in enumerate(found):
        ids = torch.tensor([output.prompt_token_ids])
        with torch.no_grad():
            hidden = theirs(input_ids=ids).last_hidden_state[0]
        np.testing.assert_allclose(output.outputs.data, hidden.mean(0).numpy(), atol=1e-5)
        if index < 2:
            np.testing.assert_allclose(tokens[index].outputs.array, hidden.numpy(), atol=1e-5)
    assert np.std(found[0].outputs.data) > 0.05


@pytest.mark.parametrize("family", ["Ernie", "Data2VecText", "OPT"])  # a pooler, a head of two layers, a decoder
def test_classes_equal_the_library(family: str, tmp_path: Path) -> None:
    own = {"ffn_dim": 80, "word_embed_proj_dim": 48} if family == "OPT" else {}
    folder = write(tmp_path, family, "ForSequenceClassification", num_labels=3, **own)
    with LLM(str(folder), dtype="float64", num_threads=1, max_model_len=64) as llm:
        found = llm.classify(TEXTS, use_tqdm=False)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    for output in found:
        with torch.no_grad():
            wanted = theirs(input_ids=torch.tensor([output.prompt_token_ids])).logits[0].softmax(-1)
        np.testing.assert_allclose(output.outputs.probs, wanted.numpy(), atol=1e-5)
    assert np.std([output.outputs.probs for output in found], axis=0).max() > 1e-3


def test_classes_of_tokens_equal_the_library(tmp_path: Path) -> None:
    folder = write(tmp_path, "Ernie", "ForTokenClassification", num_labels=3)
    with LLM(str(folder), dtype="float64", num_threads=1, max_model_len=64) as llm:
        (output,) = llm.encode(TEXTS[1], pooling_task="token_classify", use_tqdm=False)
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor([output.prompt_token_ids])).logits[0].softmax(-1)
    np.testing.assert_allclose(output.outputs.array, wanted.numpy(), atol=1e-5)


def test_what_it_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", "Ernie", "ForQuestionAnswering")
    with pytest.raises(UnsupportedModel, match="ErnieForQuestionAnswering.*ends with its hidden states"):
        LLM(str(folder), num_threads=1)
    folder = write(tmp_path / "attention", "MegatronBert")
    with pytest.raises(UnsupportedModel, match="does not support other attention"):
        LLM(str(folder), num_threads=1)


@pytest.mark.cuda
def test_a_gpu_gives_the_vectors_of_the_cpu(tmp_path: Path) -> None:
    folder, found = write(tmp_path, "Ernie", hidden_size=64), []
    for device in ("cpu", "cuda"):
        with LLM(str(folder), dtype="float32", device=device, max_model_len=64) as llm:
            for _ in range(3):  # graphs are captured at the second use
                outputs = llm.embed(TEXTS, use_tqdm=False)
            found.append(np.array([output.outputs.embedding for output in outputs]))
    np.testing.assert_allclose(found[0], found[1], atol=2e-3)
