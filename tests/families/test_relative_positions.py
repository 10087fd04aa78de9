"""BERT with positions by distance (relative_key and relative_key_query).

transformers 5 no longer has them: it reads such a checkpoint as if it had learned positions, and says so only in its
list of unexpected tensors. So the oracle is its BERT with the attention that version 4 had, written out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hand_encoder import load_pooling, run_texts
from pool_bench import PoolBench
from slipstream.base.errors import UnsupportedModel
from slipstream.params.pooling import PoolingParams
from tiny_encoder import write_tiny_encoder

KINDS = ["relative_key", "relative_key_query"]
LENGTHS = (17, 1, 61, 61, 2, 128)


def write(folder: Path, family: str, kind: str, dtype: torch.dtype) -> Path:
    """A checkpoint whose table of positions is there and means nothing."""
    write_tiny_encoder(folder, family, dtype=dtype)
    config = json.loads((folder / "config.json").read_text()) | {"position_embedding_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for layer in range(config["num_hidden_layers"]):
        values = torch.randn(2 * config["max_position_embeddings"] - 1, 16, generator=generator, dtype=torch.float64)
        weights[f"encoder.layer.{layer}.attention.self.distance_embedding.weight"] = (values * 0.5).to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def oracle(folder: Path, prompts: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    config = json.loads((folder / "config.json").read_text())
    positions, by_keys = config["max_position_embeddings"], config["position_embedding_type"] == "relative_key_query"
    weights = load_file(folder / "model.safetensors")
    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    model.embeddings.position_embeddings.weight.data.zero_()
    home = __import__(type(model).__module__, fromlist=["eager_attention_forward"])

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
        layer = next(i for i, own in enumerate(model.encoder.layer) if own.attention.self is module)
        table = weights[f"encoder.layer.{layer}.attention.self.distance_embedding.weight"].to(dtype)
        places = torch.arange(query.shape[2])
        distances = table[places.unsqueeze(1) - places + positions - 1]  # [l, r, dim]
        scores = query @ key.transpose(2, 3) + torch.einsum("bhld,lrd->bhlr", query, distances)
        if by_keys:
            scores = scores + torch.einsum("bhrd,lrd->bhlr", key, distances)
        return ((scores / math.sqrt(query.shape[3])).softmax(-1) @ value).transpose(1, 2), None

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "eager_attention_forward", attend)
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_hidden_states_are_those_of_the_definition(tmp_path: Path, family: str, kind: str, dtype: torch.dtype) -> None:
    folder = write(tmp_path, family, kind, dtype)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 250, (n,), generator=generator).tolist() for n in LENGTHS]
    expected = oracle(folder, prompts, dtype)
    model = load_pooling(folder, dtype)
    together = run_texts(model, prompts)
    for ids, mine, theirs in zip(prompts, together, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 if dtype is torch.float32 else 1e-9)
        torch.testing.assert_close(run_texts(model, [ids])[0], theirs, rtol=0, atol=1e-4)
    assert not together[2][0].allclose(run_texts(model, [prompts[2][::-1]])[0][-1], atol=1e-2)  # order matters


def test_vectors_by_the_engine(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert", "relative_key_query", torch.float32)
    prompts = [list(range(5, 5 + n)) for n in (9, 40, 1)]
    expected = [x.mean(0).numpy() for x in oracle(folder, prompts, torch.float32)]
    for depth in (0, 2):
        with PoolBench(folder, dtype="float32", depth=depth) as bench:
            found = bench.pool(prompts, PoolingParams(task="embed", normalize=False))
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_only_families_that_had_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "bert", "relative_key", torch.float32)
    for kind, words in (("rotary", "kind rotary is not supported; absolute, relative_key, relative_key_query"),):
        config = json.loads((folder / "config.json").read_text()) | {"position_embedding_type": kind}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModel, match=words):
            load_pooling(folder)
    folder = write_tiny_encoder(tmp_path / "b", "distilbert")
    config = json.loads((folder / "config.json").read_text()) | {"position_embedding_type": "relative_key"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="kind relative_key is not supported; absolute is"):
        load_pooling(folder)
