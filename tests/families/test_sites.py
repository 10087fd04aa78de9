"""Models whose layers share cache sites or have heads of several sizes, against plain torch; and through an engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from law7 import PAIRED, PROMPTS, options_of
from plain_decoder import plain_logits
from slipstream import LLM, SamplingParams
from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.model_info import ModelInfo
from slipstream.contracts.cache_spec import StateField
from slipstream.nn.decoder import Decoder
from slipstream.nn.shapes import MixerShape
from slipstream.ops.platform import native
from slipstream.scheduler.cache.pages import group_sites
from tiny_sites import MODELS, alternating, mixed, shared, write_sites


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_sites(tmp_path, request.param, monkeypatch)


TEXTS = {name: [random.Random(name).randrange(300) for _ in range(n)] for name, n in (("a", 33), ("b", 9), ("c", 1))}
STEPS: list[dict[str, int]] = [{"a": 7}, {"a": 1, "b": 8}, {"c": 1, "b": 1, "a": 24}, {"a": 1}]


@pytest.mark.parametrize("in_place", [False, True], ids=["gathered", "in place"])
def test_logits_equal_plain_torch_however_texts_are_cut(folder: Path, in_place: bool) -> None:
    """In float64 keys are gathered from the pages; in float32 the C kernel reads them in place."""
    if in_place and not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    exact = load(folder, torch.float64)
    expected = {name: plain_logits(exact, ids) for name, ids in TEXTS.items()}
    dtype, tolerance = (torch.float32, 1e-3) if in_place else (torch.float64, 1e-9)
    model = load(folder, dtype)
    whole = HandRunner(model, dtype).run({name: TEXTS[name] for name in ("c", "b", "a")})
    for name, logits in whole.items():
        torch.testing.assert_close(logits.double(), expected[name], rtol=0, atol=tolerance)
    for run in (HandRunner.run, HandRunner.run_last):
        runner = HandRunner(model, dtype, slack=3)
        place = dict.fromkeys(TEXTS, 0)
        for step in STEPS:
            chunks = {name: TEXTS[name][place[name] : place[name] + size] for name, size in step.items()}
            for name, logits in run(runner, chunks).items():
                place[name] += step[name]
                last = logits if run is HandRunner.run_last else logits[-1]
                torch.testing.assert_close(last.double(), expected[name][place[name] - 1], rtol=0, atol=tolerance)


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


def generate(folder: Path, **cell: Any) -> tuple[list[Any], int]:
    """The results of each call, and how many requests were preempted."""
    with LLM(str(folder), use_tqdm_on_load=False, max_model_len=60, **options_of(few_pages=16, **cell)) as llm:
        calls = 2 if cell.get("cached") else 1  # the second time from the cache
        results = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(calls)]
        llm.core.scheduler.cache.check()
        return results, llm.core.scheduler.num_preemptions


def test_tokens_are_those_of_plain_torch_in_every_cell_of_law_7(folder: Path) -> None:
    model = load(folder, torch.float64)
    expected = [continue_plainly(model, prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]
    num_preempted = 0
    for cell in ({"batched": False}, *PAIRED[:4]):
        both, num = generate(folder, **cell)
        num_preempted += num
        for results in both:
            assert [result.outputs[0].token_ids for result in results] == [tokens for tokens, _ in expected], cell
            for result, (tokens, logprobs) in zip(results, expected, strict=True):
                for step, token, logprob in zip(result.outputs[0].logprobs, tokens, logprobs, strict=True):
                    assert abs(step[token].logprob - logprob) < 1e-9
    assert num_preempted > 0


def continue_plainly(model: Decoder, prompt: list[int], num: int) -> tuple[list[int], list[float]]:
    ids, logprobs = list(prompt), []
    for _ in range(num):
        last = plain_logits(model, ids)[-1].log_softmax(-1)
        ids.append(int(last.argmax()))
        logprobs.append(float(last.max()))
    return ids[len(prompt) :], logprobs


INFO = ModelInfo(
    architecture="LlamaForCausalLM", vocab_size=9, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_size=8, max_positions=8, norm_eps=1e-5, activation="silu", tied_embeddings=True,
)  # fmt: skip


def test_sites_and_groups() -> None:
    info = INFO
    assert shared(info).sites == ((0,), (1,), (1,), (1,))
    assert len(shared(info).cache_specs(16, "float32")) == 2
    groups = group_sites(alternating(info).cache_specs(16, "bfloat16"))
    assert [(group.spec.head_dim, group.sites) for group in groups] == [(16, (0, 2)), (32, (1, 3))]
    assert groups[0].bytes_per_page == 2 * (2 * 2 * 16 * 2 * 16)
    assert mixed(info).sites == ((0,), (1,), (0,), (1,))


@pytest.mark.parametrize("source", [1, 2, 7, -1])
def test_a_source_that_cannot_be_read_is_named(source: int) -> None:
    """Another head size; itself; a layer that does not exist."""
    shape = alternating(INFO)
    layers = list(shape.layers)
    layers[2] = replace(layers[2], mixers=(replace(layers[2].mixers[0], kv_source=source),))
    with pytest.raises(UnsupportedModel, match=f"layer 2 reads the keys and values of layer {source}"):
        replace(shape, layers=tuple(layers)).sites  # noqa: B018


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayShape(MixerShape):
    """A mixer with a recurrent state."""

    name: str = "decay"
    size: int = 4

    def state_fields(self, dtype: str, num_drafts: int = 0) -> tuple[StateField, ...]:
        return (StateField("sum", (self.size,), "float64" if dtype == "float64" else "float32"),)


def test_state_sites_are_numbered_apart_from_cache_sites() -> None:
    info = INFO
    layers = list(alternating(info).layers)
    layers[1] = replace(layers[1], mixers=(DecayShape(), *layers[1].mixers))
    layers[3] = replace(layers[3], mixers=(DecayShape(size=8),))
    shape = replace(alternating(info), layers=tuple(layers))
    assert shape.sites == ((0,), (None, 1), (2,), (None,))
    assert shape.state_sites == ((None,), (0, None), (None,), (1,))
    assert [spec.num_bytes for spec in shape.state_specs("bfloat16")] == [16, 32]
    assert [spec.num_bytes for spec in shape.state_specs("float64")] == [32, 64]
    assert len(shape.cache_specs(16, "float32")) == 3
    assert alternating(info).state_specs("float32") == []
