"""Whether a checkpoint's projection to tokens is its embedding, is a tensor of its own, or is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from causal_oracle import oracle
from hand_batch import HandRunner
from hand_encoder import load_pooling
from hand_load import load
from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import read_model_info
from slipstream.nn.load import as_stored
from tiny import tiny_weights, write_tiny, write_weights
from tiny_encoder import write_tiny_encoder

PROMPT = {"a": [3, 1, 4, 1, 5, 9, 2, 6]}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(folder: Path, tied: bool, head: str | None, *, embedding: bool = True, **how: object) -> Path:
    """`head`: a tensor with the embedding's numbers (same), with others (other), or none at all."""
    write_tiny(folder, "qwen3", tie_word_embeddings=tied)
    weights = tiny_weights(folder)
    weights.pop(HEAD, None)
    if head is not None:
        generator = torch.Generator().manual_seed(8)
        other = torch.randn(weights[EMBEDDING].shape, generator=generator) * 0.3
        weights[HEAD] = weights[EMBEDDING].clone() if head == "same" else other
    if not embedding:
        del weights[EMBEDDING]
    (folder / "model.safetensors").unlink()
    write_weights(folder, weights, **how)  # type: ignore[arg-type]
    return folder


def check_logits(folder: Path) -> None:
    expected = oracle(folder, torch.float32, PROMPT)["a"]
    torch.testing.assert_close(HandRunner(load(folder)).run(PROMPT)["a"], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("tied", "head", "own"), [(True, "other", True), (True, "same", False), (True, None, False)])
def test_a_tied_checkpoint_with_another_head_uses_it(
    tied: bool, head: str | None, own: bool, shards: int, tmp_path: Path
) -> None:
    """As transformers: tied weights that differ in the file are not tied; equal ones share their memory."""
    folder = write(tmp_path, tied, head, shards=shards)
    assert (load(folder).head is not None) == own
    check_logits(folder)


def test_a_tied_checkpoint_may_keep_its_embedding_as_the_head(tmp_path: Path) -> None:
    folder = write(tmp_path, tied=True, head="other", embedding=False)
    assert load(folder).head is None
    check_logits(folder)


def test_a_last_number_that_differs_is_seen(tmp_path: Path) -> None:
    folder = write(tmp_path, tied=True, head="same")
    weights = tiny_weights(folder)
    weights[HEAD] = weights[EMBEDDING].clone()
    weights[HEAD][-1, -1] += 1
    write_weights(folder, weights)
    assert load(folder).head is not None


def test_a_head_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, tied=True, head="same")
    write_weights(folder, tiny_weights(folder) | {HEAD: torch.zeros(300, 64)})
    with pytest.raises(Exception, match=r"lm_head.weight is \[300, 64\], expected \[304, 64\]"):
        load(folder)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"])
def test_a_missing_head_is_known(architecture: str, tmp_path: Path) -> None:
    folder = write(tmp_path, tied=False, head=None)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", architecture))
    info = as_stored(read_model_info(folder), folder)
    assert info.has_lm_head == (architecture != "Qwen3ForCausalLM")  # the others need none
    whole = write(tmp_path / "whole", tied=False, head="other")
    assert as_stored(read_model_info(whole), whole).has_lm_head


@pytest.mark.parametrize(
    ("family", "name"), [("bert", "cls.predictions.decoder.weight"), ("modernbert", "decoder.weight")]
)
def test_words_of_an_encoder_that_are_not_its_embedding_are_refused(family: str, name: str, tmp_path: Path) -> None:
    """transformers uses such a tensor; where it is the embedding once more, as older files have it, nothing changes."""
    folder = write_tiny_encoder(tmp_path, family, "ForMaskedLM")
    weights = load_file(folder / "model.safetensors")
    ends = ("word_embeddings.weight", "tok_embeddings.weight")
    embedding = next(tensor for key, tensor in weights.items() if key.endswith(ends))
    write_weights(folder, weights | {name: embedding.clone()})
    load_pooling(folder, task="sparse")
    write_weights(folder, weights | {name: embedding + 0.1})
    with pytest.raises(UnsupportedModel, match="untied output weights"):
        load_pooling(folder, task="sparse")
