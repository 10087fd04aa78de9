"""The decoder with pictures in its prompt, against transformers' whole model: their rows in place of embeddings, three
positions for each token, features behind the first layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from causal_oracle import exact_math, norm_in_float64
from hand_batch import HandRunner
from slipstream.nn.context import GivenEmbeddings
from slipstream.nn.decoder import Decoder
from tiny_towers import TOWERS, library_inputs, load_sighted, pictures, run_tower, write_tower


def write_prompt(info: Any, images: list[Any]) -> list[int]:
    """Texts of odd lengths around the pictures."""
    generator = torch.Generator().manual_seed(1)
    prompt = []
    for image in images:
        prompt += torch.randint(0, 200, (5,), generator=generator).tolist()
        prompt += [info.prompt.token_id] * image.num_tokens
    return prompt + torch.randint(0, 200, (7,), generator=generator).tolist()


def run_library(folder: Path, info: Any, prompt: list[int], images: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all tokens in float64, and positions [3, tokens]."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
    norm_in_float64(model)
    model.config._experts_implementation = model.config.text_config._experts_implementation = "eager"
    ids = torch.tensor([prompt])
    fields = library_inputs(images, info) if images else {}
    positions = torch.arange(len(prompt)).expand(3, 1, -1)
    with exact_math(torch.float64):
        if info.mrope:
            fields["mm_token_type_ids"] = (ids == info.prompt.token_id).int()
            positions, _ = model.model.get_rope_index(ids, **fields)
        return model(ids, **fields).logits[0], positions[:, 0]


def run_ours(
    model: Decoder, info: Any, prompt: list[int], rows: torch.Tensor, positions: torch.Tensor, borders: list[int]
) -> torch.Tensor:
    """Logits of all tokens, in chunks with these borders. rows [rows, levels, hidden] of all pictures."""
    runner = HandRunner(model, torch.float64, num_pages=200)
    is_picture = torch.tensor(prompt) == info.prompt.token_id
    first = is_picture.cumsum(0) - is_picture.long()  # of each token, the rows before it
    found = []
    for start, stop in zip([0, *borders], [*borders, len(prompt)], strict=True):
        indices = is_picture[start:stop].nonzero().flatten()
        own = rows[first[start:stop][indices]]
        added = own[:, 1:] if own.shape[1] > 1 else None
        batch = replace(
            runner.batch({"a": prompt[start:stop]}),
            embeds=GivenEmbeddings(indices, own[:, 0], added) if len(indices) else None,
            rope_rows=positions[:, start:stop] if info.mrope and len(indices) else positions[0, start:stop],
        )
        found.append(model.logits(model(runner.context(batch))))
    return torch.cat(found)


@pytest.mark.parametrize("family", [family for family in TOWERS if family != "gemma3"])  # its images see themselves
def test_logits_behind_pictures_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    info = write_tower(family, tmp_path, torch.float64)
    model = load_sighted(tmp_path, info, torch.float64)
    for sizes in ([], [(70, 110)], [(97, 333), (70, 64), (230, 61)]):
        images = pictures(info, *sizes)
        prompt = write_prompt(info, images)
        expected, positions = run_library(tmp_path, info, prompt, images)
        rows = torch.cat(run_tower(model, images)) if images else torch.empty(0, 1, 32)
        found = run_ours(model, info, prompt, rows, positions, [])
        assert expected.std() > 0.3
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)  # the tower's angles are float32
        chunked = run_ours(model, info, prompt, rows, positions, sorted({3, len(prompt) // 2, len(prompt) - 3}))
        torch.testing.assert_close(chunked, found, rtol=0, atol=1e-9)
